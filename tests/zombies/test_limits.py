# SPDX-License-Identifier: LGPL-2.1-or-later

"""What zombies use up, held against what the guest's /proc and control groups say."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from msatools.kernel.cpus import possible_cpus
from msatools.kernel.report import Findings
from msatools.tasks.identity import read_identities
from msatools.tasks.table import PF_KTHREAD
from msatools.zombies.limits import collect_limits, left
from msatools.zombies.model import Limit
from tests.support.dumps import pairs
from tests.zombies.dumps import ZOMBIES, Dump, read_dump, with_above

SECOND = 10**9


@pytest.fixture(scope="module", params=pairs(ZOMBIES))
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(*request.param)


@pytest.fixture(scope="module")
def limits(dump: Dump) -> tuple[Limit, ...]:
    findings = Findings()
    found = collect_limits(dump.reader, dump.tasks, dump.dead, findings)
    assert not findings.notes
    assert not findings.lost
    return found


def of(limits: tuple[Limit, ...], name: str) -> dict[str, Limit]:
    return {limit.scope: limit for limit in limits if limit.name == name}


def newest(dump: Dump) -> int:
    """Count the workers of the kernel that may have come since the guest counted.

    That was after it saw the last of its dead end.
    """
    ends = [one["exited_ns"] for one in dump.workload["zombies"]]
    own = (dump.tasks["flags"] & PF_KTHREAD) != 0
    since = max(end for end in ends if end is not None)
    return int(np.count_nonzero(own & (dump.tasks["start_ns"] > since)))


def test_limits_equal_the_guests(dump: Dump, limits: tuple[Limit, ...]) -> None:
    found = {(limit.name, limit.scope): (limit.used, limit.max) for limit in limits}
    first = f"pid_ns {min(map(int, dump.workload['namespaces']))}"
    for row in dump.workload["limits"]:
        key = row["name"], row["scope"]
        if key == ("RLIMIT_NPROC", "uid 0"):
            continue
        used, most = found[key]
        assert most == row["max"], key
        more = newest(dump) if row["scope"] in ("system", first) else 0
        assert used is not None
        assert row["used"] <= used <= row["used"] + more, key
    names = Counter(limit.name for limit in limits)
    said = Counter(row["name"] for row in dump.workload["limits"])
    # A group that was removed is in no directory, but the dead are still in it.
    assert names - said == {"pids.max": 1, "pids left": 4}


def test_limits_equal_proc(dump: Dump, limits: tuple[Limit, ...]) -> None:
    def number(name: str) -> int | None:
        word = dump.run.truth(name).decode().strip()
        return None if word == "max" else int(word)

    (system,) = of(limits, "threads-max").values()
    assert system.max == number("proc/sys/kernel/threads-max")
    assert system.used == len(dump.tasks)
    for space in of(limits, "pid_max").values():
        assert space.max == number("proc/sys/kernel/pid_max")
    groups = of(limits, "pids.max")
    gone = groups.pop("/gone (deleted)")
    assert (gone.used, gone.max) == (2, None)
    assert len(groups) == 6
    for scope, group in groups.items():
        assert group.used == number(f"sys/fs/cgroup{scope}/pids.current")
        assert group.max == number(f"sys/fs/cgroup{scope}/pids.max")


def test_users(dump: Dump, limits: tuple[Limit, ...]) -> None:
    found = of(limits, "RLIMIT_NPROC")
    users = dump.workload["users"]
    assert {int(scope.removeprefix("uid ")) for scope in found} == {*map(int, users)}
    # The kernel counts its idle tasks, and does not hold this user to a limit.
    idle = len(possible_cpus(dump.reader.prog, Findings()))
    root = found.pop("uid 0")
    assert root.max is None
    assert root.used is not None
    assert 0 <= root.used - (users["0"]["threads"] + idle) <= newest(dump)
    for scope, user in found.items():
        told = users[scope.removeprefix("uid ")]
        assert (user.used, user.max) == (told["threads"], told["max_processes"])


def test_zombies_in_each(dump: Dump, limits: tuple[Limit, ...]) -> None:
    dead = dump.all_dead()
    (system,) = of(limits, "threads-max").values()
    assert system.zombies == len(dead)
    by_user = Counter(f"uid {one['real_uid']}" for one in dead)
    users = of(limits, "RLIMIT_NPROC")
    assert {scope: user.zombies for scope, user in users.items()} == by_user
    by_group = dict(with_above(Counter(one["cgroup"] for one in dead)))
    groups = of(limits, "pids.max")
    assert {scope: group.zombies for scope, group in groups.items()} == by_group
    spaces = dump.workload["namespaces"]
    by_space: Counter[str] = Counter()
    for one in dead:
        inode = one["namespace"]
        while inode is not None:
            by_space[f"pid_ns {inode}"] += 1
            inode = spaces[str(inode)]["parent"]
    for name in ("pid_max", "pids left"):
        found = {scope: space.zombies for scope, space in of(limits, name).items()}
        assert found == by_space


def test_numbers_left(dump: Dump, limits: tuple[Limit, ...]) -> None:
    """Those below 300 are given out once only, and do not count."""
    first = f"pid_ns {min(map(int, dump.workload['namespaces']))}"
    taken, rest = of(limits, "pid_max")[first], of(limits, "pids left")[first]
    low = sum(pid < 300 for pid in dump.pids())
    assert low > 100
    assert taken.used is not None
    assert rest.used == taken.used - low
    assert taken.max is not None
    assert rest.max == taken.max - 300
    below = [
        space for scope, space in of(limits, "pids left").items() if scope != first
    ]
    assert [space.used for space in below] == [0, 0, 0]


def test_nearest_first(limits: tuple[Limit, ...]) -> None:
    assert [limit.scope for limit in limits if limit.first] == ["/small"]
    assert limits[0].first
    room = [x.max - x.used for x in limits if x.max is not None and x.used is not None]
    assert room == sorted(room)
    assert all(limit.max is None for limit in limits[len(room) :])
    assert all(limit.left_ns is None for limit in limits)


def test_users_before_ucounts() -> None:
    """Of all tasks of an old kernel, as if they were dead."""
    old = read_dump("memory-5.10", "btf")
    findings = Findings()
    every = np.arange(len(old.tasks))
    found = collect_limits(old.reader, old.tasks, every, findings)
    assert not findings.notes
    users = of(found, "RLIMIT_NPROC")
    uids = read_identities(old.reader, old.tasks, findings).uid
    idle = len(possible_cpus(old.reader.prog, findings))
    by_user = Counter(f"uid {uid}" for uid in uids.tolist())
    assert {scope: user.zombies for scope, user in users.items()} == by_user
    assert users["uid 0"].used == by_user["uid 0"] + idle
    (system,) = of(found, "threads-max").values()
    assert system.used == len(old.tasks)
    (space,) = of(found, "pid_max").values()
    assert space.max == 32768
    assert space.used == len(old.tasks)


def test_nothing_is_read_by_zombie() -> None:
    many = read_dump("manytasks-6.12", "btf")
    before = many.reader.reads
    found = collect_limits(many.reader, many.tasks, many.dead, Findings())
    assert many.reader.reads - before < len(many.dead) / 5
    (system,) = of(found, "threads-max").values()
    assert (system.zombies, system.used) == (20_000, len(many.tasks))


def test_what_cannot_be_read_is_noted(dump: Dump) -> None:
    """Of tasks whose pointers lead nowhere."""
    records = dump.tasks.records.copy()
    for column in ("thread_pid", "cgroups", "cred"):
        records[column][dump.dead] = 0x8_0000
    findings = Findings()
    broken = replace(dump.tasks, records=records)
    found = collect_limits(dump.reader, broken, dump.dead, findings)
    assert [limit.name for limit in found] == ["threads-max"]
    assert findings.lost == {"pid": 1, "css_set": 1, "cred": 1}
    assert len(findings.notes) == 3


# --- when they will be hit


def limit(name: str, used: int | None, most: int | None) -> Limit:
    return Limit(name=name, scope="x", used=used, max=most, zombies=0, first=False)


def test_rate_tells_when() -> None:
    before = (limit("a", 10, 100), limit("b", 0, 20))
    after = (limit("b", 1, 20), limit("a", 40, 100))
    found = left(before, after, 3 * SECOND)
    # 60 more at 10 a second; 19 more at one in three seconds.
    assert [(x.name, x.left_ns) for x in found] == [
        ("a", 6 * SECOND),
        ("b", 57 * SECOND),
    ]
    assert [x.first for x in found] == [True, False]


@pytest.mark.parametrize(
    ("before", "after"),
    [((5, 9), (5, 9)), ((6, 9), (5, 9)), ((None, 9), (5, 9)), ((1, None), (5, None))],
)
def test_nothing_to_tell(
    before: tuple[int | None, int | None], after: tuple[int | None, int | None]
) -> None:
    (found,) = left((limit("a", *before),), (limit("a", *after),), SECOND)
    assert found.left_ns is None
    assert found.first == (after[1] is not None)


def test_hit_already() -> None:
    (found,) = left((limit("a", 9, 9),), (limit("a", 9, 9),), SECOND)
    assert found.left_ns == 0
    (found,) = left((limit("a", 9, 9),), (limit("a", 11, 9),), SECOND)
    assert found.left_ns == 0


def test_new_limit_has_no_rate() -> None:
    (found,) = left((), (limit("a", 1, 9),), SECOND)
    assert found.left_ns is None


def test_those_that_do_not_fill_come_after() -> None:
    before = (limit("near", 8, 9), limit("fills", 0, 1000), limit("none", 0, None))
    after = (limit("none", 1, None), limit("near", 8, 9), limit("fills", 1, 1000))
    found = left(before, after, SECOND)
    assert [x.name for x in found] == ["fills", "near", "none"]
    assert [x.first for x in found] == [True, False, False]


def test_scopes_have_one_row_each(limits: tuple[Limit, ...]) -> None:
    keys = [(x.name, x.scope) for x in limits]
    assert len(set(keys)) == len(keys)
    scopes = r"system|pid_ns \d+|/\S+( \(deleted\))?|uid \d+"
    assert all(re.fullmatch(scopes, scope) for _, scope in keys)
