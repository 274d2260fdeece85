# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs that threads may run on, as in /proc/PID/status, and their sets."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from drgn import FaultError, Program

from fixtures import lab
from msatools.cpus.model import CpuSet, SetTasks
from msatools.cpus.placement import (
    PF_NO_SETAFFINITY,
    Affinities,
    Placement,
    affinities,
)
from msatools.cpus.sets import set_of_cpus
from msatools.kernel.report import LossLog
from msatools.tasks.identity import TaskCgroups, read_cpuset_groups
from msatools.tasks.table import PF_KTHREAD, TaskTable
from tests.cpus.damaged import lose
from tests.cpus.guests import GROUPS, KERNELS, numbers
from tests.cpus.setdumps import Seen, look_at, masks_of, seen, set_of

NOT_YET = (b"truth", b"kworker/")
"""Names of threads that start after the guest has listed all: its recorder, and kernel
workers."""

PER_CPU = PF_KTHREAD | PF_NO_SETAFFINITY
CPUS = 8


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    """The cpus scenario, on each kernel."""
    return seen(f"cpus-{request.param}")


# --- the guest's record


def test_affinities_are_those_in_proc(dump: Seen) -> None:
    found = affinities(dump.tasks, dump.prog)
    pids, names = dump.tasks["pid"].tolist(), dump.tasks["comm"].tolist()
    listed = dump.threads
    # Any number of workers can start and end.
    ended = {pid for pid in listed if pid not in pids}
    assert all(dump.status(pid, "Name").startswith("kworker/") for pid in ended)
    begun = [name for name, pid in zip(names, pids, strict=True) if pid not in listed]
    assert all(name.startswith(NOT_YET) for name in begun)
    compared = [(row, pid) for row, pid in enumerate(pids) if pid in listed]
    for row, pid in compared:
        assert found.cpus(row) == numbers(dump.status(pid, "Cpus_allowed_list")), pid
    assert len({found.cpus(row) for row, _ in compared}) > CPUS


def test_cpusets_of_threads_are_those_in_proc(dump: Seen) -> None:
    groups = read_cpuset_groups(dump.reader, dump.tasks, LossLog())
    compared = 0
    for row, pid in enumerate(dump.tasks["pid"].tolist()):
        if pid not in dump.threads:
            continue
        path = dump.truth(f"{dump.threads[pid]}/cgroup").partition("0::")[2]
        assert groups.path(row) == path, pid
        compared += path != "/"
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
            count = sum(len(dump.truth(name).split()) for name in files)
            assert dump.tasks_of(one.name).members == count > 0, one.name


def nearest(dump: Seen, path: str, cpus: tuple[int, ...]) -> CpuSet:
    """Return the innermost set of a thread, by its group and its affinity."""
    by_name = {one.name: one for one in dump.sets}
    while path not in ("", "/"):
        if path in by_name:
            return by_name[path]
        path = path.rpartition("/")[0]
    isolated = set(cpus) <= set(by_name["isolcpus"].cpus)
    return by_name["isolcpus" if isolated else "default"]


def test_pinned_threads(dump: Seen) -> None:
    """Threads of the workload that cannot use all CPUs of their set are pinned."""
    expected = {}
    for task in dump.made.values():
        cpus = numbers(dump.status(task["pid"], "Cpus_allowed_list"))
        one = nearest(dump, task["cgroup"] or "/", cpus)
        if set(cpus) < set(one.cpus):
            expected[task["pid"]] = one.name
    found = {
        task.pid: one.name
        for one in dump.sets
        for task in dump.tasks_of(one.name).pinned
        if task.pid in dump.pids(*dump.made)
    }
    assert found == expected
    assert len(expected) > 20
    assert set(expected.values()) == {"default", "/limit"}
    made = dump.made["pinned-two"]
    pinned = {task.pid: task for task in dump.tasks_of("default").pinned}
    task = pinned[made["pid"]]
    assert (task.comm, list(task.cpus)) == ("pinned-two", made["cpus"])
    assert task.cpu in task.cpus
    assert (task.cgroup, task.why) == ("/", "")


def test_no_thread_of_one_cpu_is_pinned_or_strays(dump: Seen) -> None:
    names = ("migration/", "ksoftirqd/", "cpuhp/", "idle_inject/")
    for one in dump.sets:
        tasks = dump.tasks_of(one.name)
        bound = (*tasks.pinned, *tasks.straying)
        assert not [task for task in bound if task.comm.startswith(names)]


def test_threads_of_one_cpu_are_counted(dump: Seen) -> None:
    """Threads that the kernel binds to one CPU for good are counted per set."""
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
        assert count <= dump.tasks_of(name).percpu_threads <= count + unseen, name
    # Each CPU has some; those of the offline CPU are parked.
    assert expected["default"] > 5 * 3
    assert min(expected.values()) > 3
    assert set(expected) == {"default", "/db", "/quiet", "isolcpus"}


def test_straying_threads(dump: Seen) -> None:
    """Threads stray onto isolated CPUs by their affinity or their current CPU.

    Resting threads of the workload stay on their CPU. The thread with an affinity of
    two CPUs always strays; threads with all CPUs are there by chance.
    """
    made = dump.made
    alone = set(dump.one("isolcpus").cpus)
    default = set(dump.one("default").cpus)
    expected = {}
    for name, task in made.items():
        cpus = set(numbers(dump.status(task["pid"], "Cpus_allowed_list")))
        last = int(dump.stat(task["pid"])[36])
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
    # User threads are listed before kernel threads.
    first = dump.tasks_of("isolcpus").straying[: len(expected)]
    assert {task.pid: task.why for task in first} == expected


def test_kernel_threads_stray_by_their_current_cpu(dump: Seen) -> None:
    made = dump.pids(*dump.made)
    for one in dump.sets:
        for task in dump.tasks_of(one.name).straying:
            if task.pid not in made:
                assert one.name in ("/db", "/quiet", "isolcpus")
                assert task.cpu in one.cpus
                assert task.cpu in task.cpus
                assert not set(task.cpus) <= set(one.cpus)
                assert task.why == f"last on {task.cpu}, and is of default"


def test_threads_bound_to_isolated_cpus_are_members(dump: Seen) -> None:
    bound = dump.pids("stray-only-isolated", "isolated-hog")
    for name in ("isolcpus", "nohz_full"):
        tasks = dump.tasks_of(name)
        assert tasks.members == len(bound)
        assert not bound & {task.pid for task in tasks.straying}


def test_affinities_need_the_number_of_cpus(program: Program) -> None:
    lose(program, program["nr_cpu_ids"].address_, 4)
    found = look_at(program, lab.build("cpus-6.12"))
    assert not found.tasks.has("cpus_mask")
    assert len(found.tasks) == len(seen("cpus-6.12").tasks)


def test_unreadable_group_has_no_members(program: Program) -> None:
    (group,) = [one for one in seen("cpus-6.12").cpusets.all if one.path == "/db/mysql"]
    lose(program, group.address, 8)
    found = look_at(program, lab.build("cpus-6.12"))
    assert seen("cpus-6.12").tasks_of("/db").members
    assert found.tasks_of("/db").members == 0
    assert found.losses.coverage["cgroup_subsys_state_unreadable"] == 1
    with pytest.raises(FaultError):
        found.reader.read(group.address, 8)


# --- threads made by hand

DEFAULT = set_of("default", "root", (0, 1, 2))
PARTITION = set_of("/part", "isolated", (3, 4), asked=(3, 4))
BELOW = set_of("/slice/part", "root", (3,))
INVALID = set_of("/bad", "invalid", (0, 1, 2), asked=(9,))
BOOT = set_of("isolcpus", "isolcpus", (5, 6), asked=(5, 6))
NOHZ = set_of("nohz_full", "nohz_full", (4, 5))
LIMIT = set_of("/slice", "limit", (0, 1), asked=(0, 1))
INNER = set_of("/slice/inner", "limit", (1,), asked=(1,))
ALL = tuple(range(CPUS))
KERNEL = {"flags": PF_KTHREAD}


def thread(cpus: tuple[int, ...], cpuset: str = "/", **fields: int) -> dict[str, Any]:
    """Make a thread with an affinity, on its first CPU."""
    plain = {"cpu": cpus[0], "flags": 0, "exit_state": 0}
    return {"cpus": cpus, "cpuset": cpuset, **plain, **fields}


def placed(
    sets: Sequence[CpuSet], threads: Sequence[dict[str, Any]]
) -> dict[str, SetTasks]:
    """Place threads with IDs from 1 in sets.

    There are eight CPUs; the last one is offline.
    """
    columns = {"pid": "i4", "flags": "u4", "exit_state": "i4", "cpu": "u4"}
    records = np.zeros(len(threads), [*columns.items(), ("comm", "S16")])
    masks = np.zeros((len(threads), CPUS), np.bool_)
    for row, made in enumerate(threads):
        for name in columns:
            records[name][row] = made.get(name, row + 1)
        masks[row, list(made["cpus"])] = True
    different, index = np.unique(masks, axis=0, return_inverse=True)
    paths = tuple(dict.fromkeys(made["cpuset"] for made in threads))
    path_of = [paths.index(made["cpuset"]) for made in threads]
    groups = TaskCgroups(paths, np.array(path_of, np.int32))
    placement = Placement(
        sets=sets,
        tasks=TaskTable(records, frozenset((*columns, "comm"))),
        affinities=Affinities(different, index.reshape(-1)),
        cpusets=groups,
        cgroups=groups,
        masks=masks_of(possible=range(CPUS), online=range(CPUS - 1)),
    )
    return {one.name: placement.tasks_of(number) for number, one in enumerate(sets)}


def summary(tasks: SetTasks) -> tuple[int, list[int], dict[int, str]]:
    """Return the number of members, pinned threads, and straying ones with reasons."""
    pinned = [task.pid for task in tasks.pinned]
    return tasks.members, pinned, {task.pid: task.why for task in tasks.straying}


OFFLINE = "all CPUs that it may run on are offline"
PLACES = {
    "nested sets, and the innermost one": (
        (DEFAULT, LIMIT, INNER),
        (
            thread((0,), "/slice"),
            thread((1,), "/slice/inner/deeper"),
            thread((0, 1), "/slice"),
        ),
        {"default": (3, [], {}), "/slice": (3, [1], {}), "/slice/inner": (1, [], {})},
    ),
    "members of a partition are not of what is above": (
        (DEFAULT, LIMIT, BELOW),
        (thread((3,), "/slice/part/below"), thread((0, 1), "/slice")),
        {"default": (1, [], {}), "/slice": (1, [], {}), "/slice/part": (1, [], {})},
    ),
    "a partition that is not in force has members": (
        (DEFAULT, INVALID),
        (thread((0, 1, 2), "/bad"),),
        {"default": (1, [], {}), "/bad": (1, [], {})},
    ),
    "who leaves its set": (
        (DEFAULT, PARTITION, LIMIT),
        (thread((0, 3), "/part", cpu=3), thread((0, 1, 2), "/slice")),
        {
            "default": (1, [], {}),
            "/part": (1, [], {1: "may run on 0, which /part has not"}),
            "/slice": (1, [], {2: "may run on 2, which /slice has not"}),
        },
    ),
    "who is bound to CPUs of the command line": (
        # The second thread is in both sets, with CPUs of both.
        (DEFAULT, BOOT, NOHZ, LIMIT),
        (thread((6,)), thread((4, 6)), thread((5, 6), "/slice")),
        {
            "default": (0, [], {}),
            "isolcpus": (2, [1], {}),
            "nohz_full": (0, [], {}),
            "/slice": (1, [], {3: "may run on 5-6, which /slice has not"}),
        },
    ),
    "who can run nowhere": (
        (DEFAULT, PARTITION),
        (thread((7,), "/part"), thread((7,), flags=PER_CPU), thread((7,))),
        {"default": (1, [], {3: OFFLINE}), "/part": (1, [], {1: OFFLINE})},
    ),
    "only threads that one could move are pinned": (
        (DEFAULT,),
        (
            thread((0,), flags=PER_CPU),
            thread((0, 1), flags=PER_CPU),
            thread((1,), **KERNEL),
            thread((2,), flags=PF_NO_SETAFFINITY),
        ),
        {"default": (3, [3, 4], {})},
    ),
    "where all CPUs are taken nobody intrudes from afar": (
        (set_of("default", "root", ()), set_of("isolcpus", "isolcpus", ALL[:-1])),
        (thread(ALL, cpu=7),),
        {"default": (0, [], {}), "isolcpus": (1, [], {})},
    ),
    "no threads at all": (
        (DEFAULT, PARTITION),
        (),
        {"default": (0, [], {}), "/part": (0, [], {})},
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_places(case: str) -> None:
    sets, threads, expected = PLACES[case]
    found = placed(sets, threads)
    assert {name: summary(tasks) for name, tasks in found.items()} == expected
    percpu = [made["flags"] == PER_CPU and len(made["cpus"]) == 1 for made in threads]
    assert found["default"].percpu_threads == sum(percpu)


@pytest.mark.parametrize("one", [PARTITION, BOOT], ids=lambda one: one.name)
def test_intruding_threads(one: CpuSet) -> None:
    first, second = one.cpus
    threads = (
        thread((1, first)),
        thread(ALL, cpu=1),
        thread(ALL, cpu=second),
        # It was moved away and sleeps.
        thread((0, 1, 2), cpu=first),
        thread((1, first), exit_state=32),
        thread(ALL, cpu=second, **KERNEL),
        thread((1, first), **KERNEL),
    )
    found = placed((DEFAULT, PARTITION, BOOT), threads)
    (other,) = {"/part", "isolcpus"} - {one.name}
    assert found[other].straying == ()
    assert [(task.pid, task.why) for task in found[one.name].straying] == [
        (1, f"may run on {first}, and is of default"),
        (3, f"last on {second}, and is of default"),
        (6, f"last on {second}, and is of default"),
    ]
