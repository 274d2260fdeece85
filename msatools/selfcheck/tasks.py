# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of tasks, of how memory is read, and of how stacks are unwound."""

import contextlib
from collections.abc import Container, Iterator

import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import follow_phys
from msgspec.structs import replace

from msatools.errors import UNREADABLE, MissingError, NotSupportedError
from msatools.kernel.pids import PID_MAX_LIMIT, PidTree
from msatools.kernel.reader import Addresses
from msatools.kernel.structs import WordArray, find_offset, read_structs
from msatools.kernel.walks import list_nodes
from msatools.selfcheck.model import Comparison
from msatools.selfcheck.selfcheck import ReportSet
from msatools.selfdesc.find import ask, find_symbol, find_type, find_variable
from msatools.tasks.stacks import StackCollector, ask_drgn
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import saved_registers

# --- Checks of tasks: whether the commands, the kernel's counts and its lists agree.


def same_tasks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the number of threads that the commands find."""
    for name, report in (("locks", reports.locks), ("zombies", reports.zombies)):
        yield Comparison(
            name=f"tasks.{name}",
            left="threads by msa-prstat",
            right=f"threads by msa-{name}",
            left_value=reports.prstat.totals.threads,
            right_value=report.coverage["tasks"],
        )


def counted(reports: ReportSet) -> Iterator[Comparison]:
    """Compare threads and processes with the kernel's counts (kernel/fork.c)."""
    totals = reports.prstat.totals
    yield Comparison(
        name="tasks.nr-threads",
        left="threads on the lists of tasks",
        right="nr_threads",
        left_value=totals.threads,
        right_value=find_variable(reports.prog, "nr_threads").value_(),
    )
    yield Comparison(
        name="tasks.process-counts",
        left="processes on the list of tasks",
        right="sum of process_counts",
        left_value=int(np.count_nonzero(reports.tasks.leaders)),
        right_value=_sum_of_words(reports, "process_counts"),
    )


def _sum_of_words(reports: ReportSet, name: str) -> int:
    """Sum a per-CPU variable of 64 bits, the parts of which may be negative.

    The symbol is used, as BTF of older kernels lacks the variable's type.
    """
    pointer = find_symbol(reports.prog, name).address
    words = [
        int(reports.reader.words(address, 1)[0])
        for address in reports.percpu.at(pointer).tolist()
    ]
    return sum(words) & (1 << 64) - 1


def pid_tree(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the threads on the lists with those that their PIDs lead to."""
    tree = PidTree(reports.reader, find_variable(reports.prog, "init_pid_ns").address_)
    tasks = reports.tasks
    pairs = zip(tasks["pid"].tolist(), tasks["address"].tolist(), strict=True)
    yield Comparison(
        name="tasks.pids",
        left="threads that the lookup of their PID finds",
        right="threads on the lists of tasks",
        left_value=sum(tree.linked(pid) == address for pid, address in pairs),
        right_value=len(tasks),
    )
    groups = len({*tasks["pid"].tolist()})
    yield Comparison(
        name="tasks.pids-in-use",
        left="PIDs in use",
        right="threads on the lists of tasks",
        left_value=tree.count_below(PID_MAX_LIMIT),
        right_value=groups,
        # A process group or a session keeps the PID of its dead leader.
        most=groups,
        reason="process groups and sessions keep the PID of a leader that is gone",
    )


def children(reports: ReportSet) -> Iterator[Comparison]:
    """Compare processes, and zombies, with those on the lists of children."""
    tasks = reports.tasks
    init = find_variable(reports.prog, "init_task")
    parents = np.append(tasks["address"].astype(np.uint64), np.uint64(init.address_))
    found = _children(reports, parents)
    by_address = dict(
        zip(tasks["address"].tolist(), tasks["exit_state"].tolist(), strict=True)
    )
    leaders = int(np.count_nonzero(tasks.leaders))
    yield Comparison(
        name="tasks.children",
        left="processes on the lists of children",
        right="processes on the list of tasks",
        left_value=sum(child in by_address for child in found),
        right_value=leaders,
    )
    dead = sum(by_address.get(child, 0) != 0 for child in found)
    yield Comparison(
        name="zombies.children",
        left="zombies by msa-zombies",
        right="dead processes on the lists of children",
        left_value=len(reports.zombies.zombies),
        right_value=dead,
        most=int(np.count_nonzero(tasks["exit_state"][~tasks.leaders])),
        reason="dead threads that a tracer has not waited for have no parent's list",
    )


def _children(reports: ReportSet, parents: Addresses) -> list[int]:
    """Return the addresses of all children of some tasks."""
    reader, losses = reports.reader, reports.losses
    task = find_type(reports.prog, "struct task_struct")
    head, node = find_offset(task, ("children",)), find_offset(task, ("sibling",))
    if head is None or node is None:
        raise MissingError("struct task_struct has no lists of children")
    heads = read_structs(
        reader,
        "struct task_struct",
        {"children": WordArray(("children",))},
        parents,
        losses,
    )
    own = parents + np.uint64(head)
    full = heads.readable & (heads["children"][:, 0] != own)
    return [
        child - node
        for address in own[full].tolist()
        for child in list_nodes(
            reader, address, losses, "the list of a process's children"
        ).tolist()
    ]


def dead(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the zombies that the commands find."""
    ends = reports.tasks["exit_state"] != 0
    yield Comparison(
        name="zombies.listed",
        left="zombies by msa-zombies",
        right="threads in an exit state",
        left_value=len(reports.zombies.zombies),
        right_value=int(np.count_nonzero(ends)),
        least=-int(np.count_nonzero(ends & ~reports.tasks.leaders)),
        reason="dead threads of living processes are being released",
    )
    yield Comparison(
        name="zombies.groups",
        left="zombies of all groups",
        right="zombies by msa-zombies",
        left_value=sum(group.count for group in reports.zombies.groups),
        right_value=len(reports.zombies.zombies),
    )


def lifetimes(reports: ReportSet) -> Iterator[Comparison]:
    """Compare each thread's times with its lifetime."""
    bound = reports.prstat.bound_ns
    wrong = sum(
        abs(
            task.user_ns
            + task.system_ns
            + task.latency_ns
            + task.off_cpu_ns
            + task.zombie_ns
            - task.lifetime_ns
        )
        > bound
        for task in reports.prstat.tasks
    )
    yield Comparison(
        name="prstat.lifetimes",
        left="threads whose times do not sum to their lifetime",
        right="none",
        left_value=wrong,
        right_value=0,
    )


def run_queues(reports: ReportSet) -> Iterator[Comparison]:
    """Compare runnable threads with those on the run queues."""
    queues = reports.cpus.run_queues
    running = {
        queue.current.pid
        for queue in queues
        if queue.current is not None and queue.current.pid > 0
    }
    waiting = sum(len(queue.waiting) for queue in queues)
    classes = reports.prstat.totals.classes
    yield Comparison(
        name="queues.runnable",
        left="runnable threads by msa-prstat",
        right="running and waiting tasks by msa-cpus",
        left_value=reports.prstat.totals.states.get("R", 0),
        right_value=len(running) + waiting,
        least=-_about_to_sleep(reports, running),
        # TASK_WAKING: another CPU is to put it on a queue (kernel/sched/core.c).
        most=classes.get("WAK", 0),
        reason="a task that is about to sleep still runs, but is not runnable; one "
        "that is being woken up is runnable, and on no queue yet",
    )
    yield Comparison(
        name="queues.latency",
        left="threads in class LAT by msa-prstat",
        right="waiting tasks by msa-cpus",
        left_value=classes.get("LAT", 0),
        right_value=waiting,
        least=-_switched_out(reports, running),
        reason="a task that is being switched out is still on its CPU, and waits",
    )


def _switched_out(reports: ReportSet, running: Container[int]) -> int:
    """Count the tasks with ``on_cpu`` set whose CPU has switched to another already.

    kernel/sched/core.c: ``on_cpu`` is cleared last, in finish_task().
    """
    tasks = reports.tasks
    pids = tasks["pid"][(tasks["on_cpu"] != 0) & (tasks["pid"] > 0)]
    return sum(pid not in running for pid in pids.tolist())


def _about_to_sleep(reports: ReportSet, running: Container[int]) -> int:
    """Count the tasks that run and have set another state than TASK_RUNNING."""
    tasks = reports.tasks
    asleep = tasks["pid"][tasks["state"] != 0]
    return sum(pid in running for pid in asleep.tolist())


def uninterruptible(reports: ReportSet) -> Iterator[Comparison]:
    """Compare threads in uninterruptible sleep with the run queues' counts.

    kernel/sched/core.c: a task that wakes on another CPU is taken off the count there,
    so that only the sum is a number of tasks.
    """
    addresses = reports.percpu.addresses("runqueues")
    members = {"count": ("nr_uninterruptible",)}
    rq = read_structs(reports.reader, "struct rq", members, addresses, reports.losses)
    load = reports.prstat.load
    if not rq.has("count") or load is None:
        raise MissingError("struct rq has no nr_uninterruptible")
    # Up to v5.12 an unsigned long, later an unsigned int.
    total = int(rq["count"].astype(np.uint32).astype(np.int64).sum())
    signed = (total + (1 << 31)) % (1 << 32) - (1 << 31)
    yield Comparison(
        name="queues.uninterruptible",
        left="uninterruptible threads by msa-prstat",
        right="sum of nr_uninterruptible",
        left_value=load.uninterruptible,
        right_value=signed if bool(rq.readable.all()) else None,
        most=_delayed(reports),
        reason="sleepers that are still on a run queue are not counted yet",
        lost="a run queue could not be read",
    )


def _delayed(reports: ReportSet) -> int:
    """Count the threads in uninterruptible sleep that are still on a run queue."""
    tasks = reports.tasks
    if not tasks.has("sched_delayed"):
        return 0
    asleep: npt.NDArray[np.bool_] = (tasks["state"] & UNINTERRUPTIBLE) != 0
    return int(np.count_nonzero(asleep & (tasks["sched_delayed"] != 0)))


ALL = (same_tasks, counted, pid_tree, children)
DEAD = (dead,)
LIVES = (lifetimes,)
QUEUED = (run_queues, uninterruptible)


# --- Checks of how memory is read and how stacks are unwound, against drgn.


_SAMPLE = 32
"""Tasks or addresses compared: drgn takes some milliseconds for each."""

_BYTES = 64
"""Bytes read at each address."""

_NO_TABLES = "drgn has no unwind tables without debug info"


def stacks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the stacks unwound to their end with all stacks."""
    coverage = reports.prstat.coverage
    total = coverage["stacks"]
    yield Comparison(
        name="stacks.complete",
        left="stacks unwound to their end",
        right="stacks of tasks off the CPU",
        left_value=total - coverage["stacks_incomplete"],
        right_value=total,
    )
    yield Comparison(
        name="stacks.guessed",
        left="stacks with a frame whose caller is a guess",
        right="none",
        left_value=coverage["stacks_guessed"],
        right_value=0,
    )


def unwinders(reports: ReportSet) -> Iterator[Comparison]:
    """Compare a sample of stacks with drgn's own."""
    base = Comparison(
        name="stacks.drgn",
        left="sampled stacks that drgn unwinds in the same way",
        right="sampled stacks",
    )
    collector = StackCollector(reports.reader, reports.losses)
    tasks = _sleeping(reports.tasks)
    if not collector.is_fast:
        yield replace(base, absent="drgn unwinds all stacks here")
    elif reports.target.types == "btf":
        yield replace(base, absent=_NO_TABLES)
    elif reports.target.live:
        yield replace(base, absent="stacks change while they are compared")
    else:
        saved = saved_registers(tasks)
        own = collector.collect(tasks["address"], tasks["stack"], saved)
        same = sum(
            own[row].addresses == ask_drgn(reports.prog, address).addresses
            for row, address in enumerate(tasks["address"].tolist())
        )
        yield replace(base, left_value=same, right_value=len(tasks))


def _sleeping(tasks: TaskTable) -> TaskTable:
    """Return a sample of the tasks that do not run, spread over the whole table."""
    asleep = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0) & (tasks["stack"] != 0)
    rows = np.flatnonzero(asleep)
    wanted = np.zeros(len(tasks), np.bool_)
    wanted[rows[:: max(1, len(rows) // _SAMPLE)][:_SAMPLE]] = True
    return tasks.only(wanted)


def addresses(reports: ReportSet) -> Iterator[Comparison]:
    """Compare memory as msatools reads it with a walk of the page tables by drgn."""
    tasks = _sleeping(reports.tasks)
    samples = {
        "tasks": tasks["address"].astype(np.uint64),
        # The stack in use is kept in every dump; its other end may be left out.
        "stacks": tasks["sp"].astype(np.uint64),
        "percpu": reports.percpu.addresses("runqueues")[:_SAMPLE],
    }
    for name, sample in samples.items():
        yield _compared(reports, name, sample)


def _compared(reports: ReportSet, name: str, sample: Addresses) -> Comparison:
    base = Comparison(
        name=f"reading.{name}",
        left=f"sampled addresses of {name} with the same contents by drgn's walk",
        right="sampled addresses",
    )
    if reports.target.live:
        return replace(base, absent="memory changes while it is compared")
    space = find_variable(reports.prog, "init_mm").address_of_()
    same = sampled = 0
    for address in sample.tolist():
        try:
            physical = ask(follow_phys, space, address).value_()
            expected = reports.prog.read(physical, _BYTES, True)
        except NotSupportedError:
            return replace(base, absent="drgn does not translate addresses here")
        except UNREADABLE:
            continue  # not in the dump
        sampled += 1
        with contextlib.suppress(*UNREADABLE):
            same += reports.reader.read(address, _BYTES) == expected
    if not sampled:
        return replace(base, absent="drgn can read none of them")
    return replace(base, left_value=same, right_value=sampled)


CHECKS = (addresses,)
STACKS = (stacks, unwinders)
