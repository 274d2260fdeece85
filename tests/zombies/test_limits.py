# SPDX-License-Identifier: LGPL-2.1-or-later

"""Limits that zombies use up; their values are facts in tests/truth/zombies.py."""

from collections import Counter

import numpy as np
import pytest

from msatools.kernel.percpu import possible_cpus
from msatools.kernel.report import LossLog
from msatools.tasks.identity import read_identities
from msatools.tasks.table import PF_KTHREAD
from msatools.zombies.limits import _Account as Account
from msatools.zombies.limits import collect_limits, left, make_limit
from msatools.zombies.model import Limit
from tests.zombies.dumps import Dump, read_dump

SECOND = 10**9


@pytest.fixture
def limits(dump: Dump) -> tuple[Limit, ...]:
    losses = LossLog()
    found = collect_limits(dump.reader, dump.table, dump.rows, losses)
    assert not losses.notes
    assert not losses.lost
    return found


def of(limits: tuple[Limit, ...], name: str) -> dict[str, Limit]:
    return {limit.scope: limit for limit in limits if limit.name == name}


def more(dump: Dump) -> int:
    """Return the change in the number of threads since the guest listed all.

    The kernel starts workers on demand and ends those that were idle for minutes; a
    guest on a busy host runs that long.
    """
    names = (name.split("/") for name in dump.run.truth_names())
    listed = {
        int(part)
        for name in names
        if name[0] == "proc"
        for part in (name[1:2] + name[3:4])
        if part.isdigit()
    }
    kernels = (dump.table["flags"] & PF_KTHREAD) != 0
    assert {*dump.table["pid"][~kernels].tolist()} <= listed
    return len(dump.table) - len(listed)


def test_limits_of_the_first_namespace(dump: Dump, limits: tuple[Limit, ...]) -> None:
    """Numbers are those that the guest counted, plus the change since then."""
    first = first_namespace(dump)
    (row,) = (row for row in dump.workload["limits"] if row["scope"] == first)
    assert of(limits, row["name"])[first].used == row["used"] + more(dump)
    names = Counter(limit.name for limit in limits)
    recorded = Counter(row["name"] for row in dump.workload["limits"])
    # A removed group has no directory, but still has zombies.
    assert names - recorded == {"pids.max": 1}


def first_namespace(dump: Dump) -> str:
    return f"pid_ns {min(map(int, dump.workload['namespaces']))}"


def test_all_threads_count(dump: Dump, limits: tuple[Limit, ...]) -> None:
    (system,) = of(limits, "threads-max").values()
    assert system.used == len(dump.table)
    gone = of(limits, "pids.max")["/gone (deleted)"]
    assert (gone.used, gone.max) == (2, None)


def test_users(dump: Dump, limits: tuple[Limit, ...]) -> None:
    found = of(limits, "RLIMIT_NPROC")
    users = dump.workload["users"]
    assert {int(scope.removeprefix("uid ")) for scope in found} == {*map(int, users)}
    # The kernel counts its idle tasks, and does not limit this user.
    idle = len(possible_cpus(dump.reader.prog, LossLog()))
    root = found["uid 0"]
    assert root.max is None
    assert root.used == users["0"]["threads"] + idle + more(dump)


def test_numbers_left(dump: Dump, limits: tuple[Limit, ...]) -> None:
    """PIDs below 300 (RESERVED_PIDS) are not reused, and do not count."""
    first = first_namespace(dump)
    spaces = of(limits, "pid_max")
    low = int(np.count_nonzero(dump.table["pid"] < 300))
    assert low > 100
    assert left_of_pids(spaces.pop(first), low)
    # The others have few processes, all with PIDs below 300.
    assert len(spaces) == 3
    assert all(left_of_pids(space, space.used or 0) for space in spaces.values())


def left_of_pids(space: Limit, low: int) -> bool:
    """Return whether free PIDs below 300 are not left.

    :param low: Number of PIDs below 300 in use.
    """
    assert space.max is not None
    assert space.used is not None
    return space.left == space.max - 300 - (space.used - low)


def test_nearest_first(limits: tuple[Limit, ...]) -> None:
    assert [limit.scope for limit in limits if limit.first] == ["/small"]
    assert limits[0].first
    room = [x.left for x in limits if x.left is not None]
    assert room == sorted(room)
    assert all(limit.max is None for limit in limits[len(room) :])
    assert all(limit.left_ns is None for limit in limits)


@pytest.mark.parametrize("name", ["memory-5.10"])
def test_users_before_ucounts(name: str) -> None:
    """All tasks of an old kernel are treated as dead."""
    old = read_dump(name)
    losses = LossLog()
    every = np.arange(len(old.table))
    found = collect_limits(old.reader, old.table, every, losses)
    assert not losses.notes
    users = of(found, "RLIMIT_NPROC")
    uids = read_identities(old.reader, old.table, losses).uid
    idle = len(possible_cpus(old.reader.prog, losses))
    by_user = Counter(f"uid {uid}" for uid in uids.tolist())
    assert {scope: user.zombies for scope, user in users.items()} == by_user
    assert users["uid 0"].used == by_user["uid 0"] + idle
    (system,) = of(found, "threads-max").values()
    assert system.used == len(old.table)
    (space,) = of(found, "pid_max").values()
    assert space.max == 32768
    assert space.used == len(old.table)


@pytest.mark.long
def test_no_reads_per_zombie() -> None:
    many = read_dump("manytasks-6.12")
    before = many.reader.reads
    found = collect_limits(many.reader, many.table, many.rows, LossLog())
    assert many.reader.reads - before < len(many.rows) / 5
    (system,) = of(found, "threads-max").values()
    assert (system.zombies, system.used) == (20_000, len(many.table))


def test_unreadable_structures_are_noted(dump: Dump) -> None:
    """Tasks have invalid pointers."""
    columns = ("thread_pid", "cgroups", "cred")
    broken = dump.with_records(**dict.fromkeys(columns, (dump.rows, 0x8_0000)))
    losses = LossLog()
    found = collect_limits(dump.reader, broken, dump.rows, losses)
    assert [limit.name for limit in found] == ["threads-max"]
    assert losses.lost == {
        "pid_unreadable": 1,
        "css_set_unreadable": 1,
        "cred_unreadable": 1,
    }
    assert len(losses.notes) == 3


def test_lowest_limit_of_a_user_counts() -> None:
    account = Account(uid=5, used=1, space=0)
    for most in (9, 7, 8):
        account.lower(most)
    assert account.most == 7


# --- time until a limit is reached


def limit(name: str, used: int | None, most: int | None) -> Limit:
    return make_limit(name, "x", used, most, zombies=0)


def test_time_left_by_rate() -> None:
    before = (limit("a", 10, 100), limit("b", 0, 20))
    after = (limit("b", 1, 20), limit("a", 40, 100))
    found = [(x.name, x.left_ns, x.first) for x in left(before, after, 3 * SECOND)]
    # 60 more at 10 per second; 19 more at one per 3 seconds.
    assert found == [("a", 6 * SECOND, True), ("b", 57 * SECOND, False)]


def test_no_rate() -> None:
    for before, after, left_ns in (
        ((5, 9), (5, 9), None),
        ((6, 9), (5, 9), None),
        ((None, 9), (5, 9), None),
        ((1, None), (5, None), None),
        # Already reached.
        ((9, 9), (9, 9), 0),
        ((9, 9), (11, 9), 0),
    ):
        (found,) = left((limit("a", *before),), (limit("a", *after),), SECOND)
        assert (found.left_ns, found.first) == (left_ns, after[1] is not None)
    (new,) = left((), (limit("a", 1, 9),), SECOND)
    assert new.left_ns is None


def test_limits_that_do_not_fill_are_last() -> None:
    before = (limit("near", 8, 9), limit("fills", 0, 1000), limit("none", 0, None))
    after = (limit("none", 1, None), limit("near", 8, 9), limit("fills", 1, 1000))
    found = [(x.name, x.first) for x in left(before, after, SECOND)]
    assert found == [("fills", True), ("near", False), ("none", False)]
