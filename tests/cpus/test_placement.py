# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where threads may run, as /proc/PID/status says, and which sets they are in."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from drgn import FaultError, Program

from fixtures import lab
from msatools.cpus.affinities import Affinities, affinities, read_cpuset_groups
from msatools.cpus.model import BoundTask, CpuSet, SetKind
from msatools.cpus.placement import PF_NO_SETAFFINITY, Placement
from msatools.cpus.sets import set_of_cpus
from msatools.kernel.report import Findings
from msatools.tasks.cgroups import TaskCgroups
from msatools.tasks.table import PF_KTHREAD, TaskTable
from tests.cpus.damaged import lose
from tests.cpus.guests import GROUPS, KERNELS, numbers
from tests.cpus.setdumps import Seen, look_at, masks_of, seen, set_of

NOT_YET = (b"truth", b"kworker/")
"""Names of threads that begin once the guest has listed all: the program that records
them, and workers of the kernel."""

PER_CPU = PF_KTHREAD | PF_NO_SETAFFINITY
CPUS = 8


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    """The cpus scenario, on each kernel."""
    return seen(f"cpus-{request.param}")


# --- what the guest's kernel said


def test_all_threads_may_run_where_the_kernel_says(dump: Seen) -> None:
    found = affinities(dump.tasks, dump.prog)
    pids, names = dump.tasks["pid"].tolist(), dump.tasks["comm"].tolist()
    told = dump.threads
    # Workers come and go, however many.
    ended = {pid for pid in told if pid not in pids}
    assert all(dump.status(pid, "Name").startswith("kworker/") for pid in ended)
    begun = [name for name, pid in zip(names, pids, strict=True) if pid not in told]
    assert all(name.startswith(NOT_YET) for name in begun)
    compared = [(row, pid) for row, pid in enumerate(pids) if pid in told]
    for row, pid in compared:
        assert found.cpus(row) == numbers(dump.status(pid, "Cpus_allowed_list")), pid
    assert len({found.cpus(row) for row, _ in compared}) > CPUS


def test_all_threads_are_in_the_cpuset_that_the_kernel_says(dump: Seen) -> None:
    groups = read_cpuset_groups(dump.reader, dump.tasks, Findings())
    compared = 0
    for row, pid in enumerate(dump.tasks["pid"].tolist()):
        if pid not in dump.threads:
            continue
        told = dump.truth(f"{dump.threads[pid]}/cgroup").partition("0::")[2]
        assert groups.path(row) == told, pid
        compared += told != "/"
    assert compared > 10


def test_members_are_the_threads_of_groups(dump: Seen) -> None:
    for one in dump.sets:
        if one.name.startswith("/"):
            files = [
                name
                for name in dump.run.truth_names()
                if name.startswith(f"{GROUPS}{one.name}/")
                and name.endswith("/cgroup.threads")
            ]
            told = sum(len(dump.truth(name).split()) for name in files)
            assert one.tasks is not None
            assert one.tasks.members == told > 0, one.name


def nearest(dump: Seen, path: str, cpus: tuple[int, ...]) -> CpuSet:
    """Find the innermost set of a thread by its group, and by where it may run."""
    by_name = {one.name: one for one in dump.sets}
    while path not in ("", "/"):
        if path in by_name:
            return by_name[path]
        path = path.rpartition("/")[0]
    isolated = set(cpus) <= set(by_name["isolcpus"].cpus)
    return by_name["isolcpus" if isolated else "default"]


def test_threads_that_are_bound(dump: Seen) -> None:
    """Of all that the guest made, those that may not use all of their set."""
    made = dump.made
    expected = {}
    for task in made.values():
        cpus = numbers(dump.status(task["pid"], "Cpus_allowed_list"))
        one = nearest(dump, task["cgroup"] or "/", cpus)
        if set(cpus) < set(one.cpus):
            expected[task["pid"]] = one.name
    found = {
        task.pid: one.name
        for one in dump.sets
        for task in (one.tasks.pinned if one.tasks else ())
        if task.pid in dump.pids(*made)
    }
    assert found == expected
    assert len(expected) > 20
    assert set(expected.values()) == {"default", "/limit"}


def test_what_is_told_of_one_that_is_bound(dump: Seen) -> None:
    made = dump.made["pinned-two"]
    tasks = dump.one("default").tasks
    assert tasks is not None
    (task,) = [task for task in tasks.pinned if task.pid == made["pid"]]
    assert (task.comm, list(task.cpus)) == ("pinned-two", made["cpus"])
    assert task.cpu in task.cpus
    assert (task.cgroup, task.why) == ("/", "")


def test_no_thread_of_one_cpu_is_pinned_or_strays(dump: Seen) -> None:
    names = ("migration/", "ksoftirqd/", "cpuhp/", "idle_inject/")
    for one in dump.sets:
        assert one.tasks is not None
        told = (*one.tasks.pinned, *one.tasks.straying)
        assert not [task for task in told if task.comm.startswith(names)]


def test_threads_of_one_cpu_are_counted(dump: Seen) -> None:
    """All that the kernel has bound to one CPU for good, by the set that has it."""
    rows = {pid: row for row, pid in enumerate(dump.tasks["pid"].tolist())}
    names = set_of_cpus(dump.sets, dump.masks.possible)
    expected: Counter[str] = Counter()
    for pid in dump.threads.keys() & rows.keys():
        cpus = numbers(dump.status(pid, "Cpus_allowed_list"))
        flags = int(
            dump.truth(f"{dump.threads[pid]}/stat").rpartition(")")[2].split()[6]
        )
        if len(cpus) == 1 and flags & PER_CPU == PER_CPU:
            expected[names[cpus[0]]] += 1
    unseen = len(rows.keys() - dump.threads.keys())
    for name, count in expected.items():
        tasks = dump.one(name).tasks
        assert tasks is not None
        assert count <= tasks.percpu_threads <= count + unseen, name
    # Some of each CPU: those of the one that is offline are parked.
    assert expected["default"] > 5 * 3
    assert min(expected.values()) > 3
    assert set(expected) == {"default", "/db", "/quiet", "isolcpus"}


def test_threads_that_stray(dump: Seen) -> None:
    """Onto CPUs that are isolated: by what they may do, or by where they are.

    What the guest made and rests is where it was. The one that may run on two CPUs
    alone strays in any case; those that may run on all have come by chance.
    """
    made = dump.made
    alone = set(dump.one("isolcpus").cpus)
    default = set(dump.one("default").cpus)
    expected = {}
    for name, task in made.items():
        cpus = set(numbers(dump.status(task["pid"], "Cpus_allowed_list")))
        words = (
            dump.truth(f"{dump.threads[task['pid']]}/stat").rpartition(")")[2].split()
        )
        last = int(words[36])
        one = nearest(dump, task["cgroup"] or "/", tuple(cpus)).name
        if not cpus & alone or cpus <= alone:
            continue
        if last in alone:
            expected[task["pid"]] = f"last on {last}, and is of {one}"
        elif not default <= cpus:
            expected[task["pid"]] = f"may run on 7, and is of {one}"
        else:
            assert name in ("in-mems", "in-gone", "stray-gone", "pinned-early"), name
    assert dump.pids("stray-isolated") <= expected.keys()
    tasks = dump.one("isolcpus").tasks
    assert tasks is not None
    # Those that somebody started come before the kernel's.
    first = tasks.straying[: len(expected)]
    assert {task.pid: task.why for task in first} == expected


def test_threads_of_the_kernel_stray_where_they_are(dump: Seen) -> None:
    made = dump.pids(*dump.made)
    for one in dump.sets:
        assert one.tasks is not None
        for task in one.tasks.straying:
            if task.pid not in made:
                assert one.name in ("/db", "/quiet", "isolcpus")
                assert task.cpu in one.cpus
                assert task.cpu in task.cpus
                assert not set(task.cpus) <= set(one.cpus)
                assert task.why == f"last on {task.cpu}, and is of default"


def test_who_is_bound_to_isolated_cpus_is_a_member(dump: Seen) -> None:
    bound = dump.pids("stray-only-isolated", "isolated-hog")
    for name in ("isolcpus", "nohz_full"):
        tasks = dump.one(name).tasks
        assert tasks is not None
        assert tasks.members == len(bound)
        assert not bound & {task.pid for task in tasks.straying}




def test_affinities_need_the_number_of_cpus(program: Program) -> None:
    lose(program, program["nr_cpu_ids"].address_, 4)
    found = look_at(program, lab.build("cpus-6.12"))
    assert not found.tasks.has("cpus_mask")
    assert len(found.tasks) == len(seen("cpus-6.12").tasks)


def test_a_group_that_is_lost_has_no_members(program: Program) -> None:
    (group,) = [one for one in seen("cpus-6.12").cpusets.all if one.path == "/db/mysql"]
    lose(program, group.address, 8)
    found = look_at(program, lab.build("cpus-6.12"))
    whole = seen("cpus-6.12").one("/db").tasks
    assert whole is not None
    assert whole.members
    tasks = found.one("/db").tasks
    assert tasks is not None
    assert tasks.members == 0
    assert found.findings.coverage["cgroup_subsys_state_unreadable"] == 1
    with pytest.raises(FaultError):
        found.reader.read(group.address, 8)


# --- made of nothing


class Made:
    """Sets and threads on eight CPUs, of which the last is offline."""

    def __init__(self, *sets: CpuSet) -> None:
        self.sets = sets
        self.threads: list[dict[str, Any]] = []

    def thread(self, cpus: tuple[int, ...], **fields: Any) -> int:
        """Add a thread; give its ID."""
        pid = len(self.threads) + 1
        plain = {"cpu": cpus[0], "flags": 0, "exit_state": 0, "cpuset": "/"}
        self.threads.append({"cpus": cpus, "pid": pid, **plain, **fields})
        return pid

    def place(self) -> dict[str, Any]:
        """Give the tasks by set."""
        columns = {"pid": "i4", "flags": "u4", "exit_state": "i4", "cpu": "u4"}
        records = np.zeros(len(self.threads), [*columns.items(), ("comm", "S16")])
        masks = np.zeros((len(self.threads), CPUS), np.bool_)
        for row, thread in enumerate(self.threads):
            for name in columns:
                records[name][row] = thread[name]
            masks[row, list(thread["cpus"])] = True
        different, index = np.unique(masks, axis=0, return_inverse=True)
        paths = tuple(dict.fromkeys(thread["cpuset"] for thread in self.threads))
        path_of = [paths.index(thread["cpuset"]) for thread in self.threads]
        groups = TaskCgroups(paths, np.array(path_of, np.int32))
        placement = Placement(
            sets=self.sets,
            tasks=TaskTable(records, frozenset((*columns, "comm"))),
            affinities=Affinities(different, index.reshape(-1)),
            cpusets=groups,
            cgroups=groups,
            masks=masks_of(possible=range(CPUS), online=range(CPUS - 1)),
        )
        return {
            one.name: placement.tasks_of(number) for number, one in enumerate(self.sets)
        }




ALL = tuple(range(CPUS))
DEFAULT = set_of("default", "root", (0, 1, 2))
PARTITION = set_of("/part", "isolated", (3, 4), asked=(3, 4))
BOOT = set_of("isolcpus", "isolcpus", (5, 6), asked=(5, 6))
LIMIT = set_of("/slice", "limit", (0, 1), asked=(0, 1))
INNER = set_of("/slice/inner", "limit", (1,), asked=(1,))


def test_nested_sets_and_the_innermost_one() -> None:
    made = Made(DEFAULT, LIMIT, INNER)
    one = made.thread((0,), cpuset="/slice")
    two = made.thread((1,), cpuset="/slice/inner/deeper")
    three = made.thread((0, 1), cpuset="/slice")
    found = made.place()
    assert found["default"].members == found["/slice"].members == 3
    assert found["/slice/inner"].members == 1
    assert pids(found["/slice"].pinned) == [one]
    assert found["/slice/inner"].pinned == found["default"].pinned == ()
    assert {one, two, three} == {1, 2, 3}


def test_members_of_a_partition_are_not_of_what_is_above() -> None:
    made = Made(DEFAULT, LIMIT, set_of("/slice/part", "root", (3,)))
    made.thread((3,), cpuset="/slice/part/below")
    made.thread((0, 1), cpuset="/slice")
    found = made.place()
    assert [found[name].members for name in found] == [1, 1, 1]


def test_a_partition_that_is_not_in_force_has_members() -> None:
    made = Made(DEFAULT, set_of("/bad", "invalid", (0, 1, 2), asked=(9,)))
    made.thread((0, 1, 2), cpuset="/bad")
    found = made.place()
    assert [found[name].members for name in found] == [1, 1]
    assert found["/bad"].straying == ()


def test_who_leaves_its_set() -> None:
    made = Made(DEFAULT, PARTITION, LIMIT)
    out = made.thread((0, 3), cpuset="/part", cpu=3)
    wide = made.thread((0, 1, 2), cpuset="/slice")
    found = made.place()
    assert pids(found["/part"].straying) == [out]
    assert found["/part"].straying[0].why == "may run on 0, which /part has not"
    assert pids(found["/slice"].straying) == [wide]
    assert found["/slice"].straying[0].why == "may run on 2, which /slice has not"
    assert found["default"].straying == ()


@pytest.mark.parametrize("one", [PARTITION, BOOT], ids=lambda one: one.name)
def test_who_intrudes(one: CpuSet) -> None:
    made = Made(DEFAULT, PARTITION, BOOT)
    first, second = one.cpus
    narrow = made.thread((1, first), cpu=1)
    made.thread(ALL, cpu=1)
    there = made.thread(ALL, cpu=second)
    # It has been moved away, and sleeps.
    made.thread((0, 1, 2), cpu=first)
    made.thread((1, first), cpu=1, exit_state=32)
    kernel = made.thread(ALL, cpu=second, flags=PF_KTHREAD)
    made.thread((1, first), cpu=1, flags=PF_KTHREAD)
    found = made.place()
    assert pids(found[one.name].straying) == [narrow, there, kernel]
    assert [task.why for task in found[one.name].straying] == [
        f"may run on {first}, and is of default",
        f"last on {second}, and is of default",
        f"last on {second}, and is of default",
    ]
    (other,) = {"/part", "isolcpus"} - {one.name}
    assert found[other].straying == ()


def test_who_is_bound_to_cpus_of_the_command_line() -> None:
    made = Made(DEFAULT, BOOT, set_of("nohz_full", "nohz_full", (4, 5)), LIMIT)
    alone = made.thread((6,))
    both = made.thread((4, 6))
    limited = made.thread((5, 6), cpuset="/slice")
    found = made.place()
    assert found["default"].members == 0
    # In both: the second may run on CPUs of either.
    assert found["isolcpus"].members == 2
    assert found["nohz_full"].members == 0
    assert pids(found["isolcpus"].pinned) == [alone]
    for name in ("isolcpus", "nohz_full", "default"):
        assert found[name].straying == (), name
    assert pids(found["/slice"].straying) == [limited]
    assert both == 2


def test_who_can_run_nowhere() -> None:
    made = Made(DEFAULT, PARTITION)
    made.thread((7,), cpuset="/part")
    made.thread((7,), flags=PER_CPU)
    made.thread((7,))
    found = made.place()
    why = "all CPUs that it may run on are offline"
    assert [task.why for task in found["/part"].straying] == [why]
    assert [task.why for task in found["default"].straying] == [why]
    assert found["default"].percpu_threads == 1


def test_only_threads_that_one_could_move_are_pinned() -> None:
    made = Made(DEFAULT)
    made.thread((0,), flags=PER_CPU)
    made.thread((0, 1), flags=PER_CPU)
    interrupt = made.thread((1,), flags=PF_KTHREAD)
    ring = made.thread((2,), flags=PF_NO_SETAFFINITY)
    found = made.place()["default"]
    assert pids(found.pinned) == [interrupt, ring]
    assert (found.members, found.percpu_threads) == (3, 1)


def test_where_all_cpus_are_taken_nobody_intrudes_from_afar() -> None:
    kind: SetKind = "isolcpus"
    made = Made(set_of("default", "root", ()), set_of(kind, kind, ALL[:-1]))
    made.thread(ALL, cpu=7)
    found = made.place()
    assert found[kind].straying == ()
    assert found[kind].members == 1


def test_no_threads_at_all() -> None:
    assert Made(DEFAULT, PARTITION).place()["/part"].members == 0
