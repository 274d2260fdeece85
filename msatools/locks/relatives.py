# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for other tasks: of the same process, PID namespace or CPU."""

from collections.abc import Callable, Iterator

import numpy as np

from msatools.errors import MissingError
from msatools.kernel.percpu import read_percpu
from msatools.kernel.pids import MAX_LEVEL
from msatools.kernel.structs import (
    NOT_FOUND,
    Booleans,
    Members,
    find_rows,
    read_structs,
)
from msatools.locks.context import (
    BlockedTask,
    LockContext,
    LockType,
    at_most_one,
    per_context,
)
from msatools.locks.report import Holder, Lock, OwnerConfidence, Request
from msatools.locks.wait_queues import COMPLETION_WAITS
from msatools.tasks.states import asleep

# --- Waits for threads of the same process, io_uring workers, or a PID namespace.
#
# - exec in a threaded program waits until its other threads have been released
#   (fs/exec.c, de_thread()); a core dump waits until they have stopped, and they for
#   the dump (kernel/exit.c, fs/coredump.c).
# - A task that waits for events of an io_uring, or exits with requests in flight, waits
#   for the workers that execute these (io_uring/io-wq.c): threads of its process.
# - The first process of a PID namespace ends only when all others of it have been
#   reaped (kernel/pid_namespace.c, zap_pid_ns_processes()).
#
# The kernel does not record which tasks have to end such a wait, but they follow from
# it: a live thread has to exit, a dead one has to be reaped by its tracer or parent.


MAX_AWAITED = 64
"""Maximum number of tasks that are reported as holders of one wait."""

NAMESPACE = "zap_pid_ns_processes"
URING = (
    *("io_cqring_wait", "io_cqring_schedule_timeout", "io_uring_cancel_generic"),
    *("io_cqring_wait_schedule", "__do_sys_io_uring_enter"),
    *("__x64_sys_io_uring_enter", "__arm64_sys_io_uring_enter"),
)
"""Functions in which a task waits for events of io_uring; in 6.1 the wait is inlined
into the system call."""

_EXITS = ("io_wq_put_and_exit", "io_wq_exit_workers")
PF_IO_WORKER = 0x10
"""Bit of ``task_struct.flags`` that marks a worker of io_uring."""

_EXEC = ("de_thread", "begin_new_exec", "flush_old_exec")
"""de_thread() is inlined into its caller by most compilers."""

_DUMPER = ("coredump_wait", "do_coredump", "vfs_coredump")
_HELPERS = ("call_usermodehelper_exec", "call_usermodehelper_exec_work")
"""Functions in which a dumping task waits for the program that gets the dump, not for
its own threads."""

_DUMPED = ("coredump_task_exit", "exit_mm", "do_exit")
"""Functions in which a thread waits for the core dump of its process: since v5.16
coredump_task_exit(), which may be inlined."""

_SCHEDULER = ("__schedule", "schedule", "__switch_to")

_Finder = Callable[[LockContext, BlockedTask], Iterator[int]]


def _request(context: LockContext, case: BlockedTask) -> Request | None:
    """Return a task's wait for its threads, io_uring workers, or PID namespace."""
    signal = int(context.tasks["signal"][case.row])
    sleeper = case.innermost(_SCHEDULER)
    if sleeper in URING or case.is_in(*_EXITS):
        lock, find = Lock("io_uring", signal), _of_ring
    elif case.is_in(NAMESPACE):
        lock, find = Lock("child", signal), _of_namespace
    elif sleeper in _EXEC:
        lock, find = Lock("threads", signal), _of_exec
    elif sleeper in _DUMPED and _dumper(context, signal):
        lock, find = Lock("threads", signal, 1), _dumper_of
    elif _waits_to_dump(case, sleeper):
        lock, find = Lock("threads", signal), _of_dump
    else:
        return None
    tasks = list(dict.fromkeys(find(context, case)))[:MAX_AWAITED]
    if not tasks:
        return None
    _awaited(context)[lock] = tasks
    _finders(context)[lock] = find
    if find is _of_ring or (find is _of_dump and not _all_counted(context, lock)):
        _unsure(context).add(lock)
    return Request(lock)


def _waits_to_dump(case: BlockedTask, sleeper: str) -> bool:
    """Return whether a task that dumps core waits for its other threads to stop."""
    waits = sleeper in _DUMPER or sleeper.startswith(COMPLETION_WAITS)
    return waits and case.is_in(*_DUMPER) and not case.is_in(*_HELPERS)


@per_context
def _awaited(context: LockContext) -> dict[Lock, list[int]]:
    """Maps a wait to the addresses of the tasks that have to end it."""
    return {}


@per_context
def _finders(context: LockContext) -> dict[Lock, _Finder]:
    """Maps a wait to the function that found the tasks of :func:`_awaited`."""
    return {}


@per_context
def _unsure(context: LockContext) -> set[Lock]:
    """Return the waits for which the tasks of :func:`_awaited` are not certain.

    It is unknown which worker of an io_uring has the request that ends the wait. And
    not every kernel version waits for each kind of worker before a core dump.
    """
    return set()


def _all_counted(context: LockContext, lock: Lock) -> bool:
    """Return whether a core dump waits for as many threads as have been found."""
    layout = context.layout
    state = layout.member(lock.address or 0, "signal_struct", "core_state")
    count = layout.member(state, "core_state", "nr_threads.counter")
    return count == len(_awaited(context)[lock])


def _holders(context: LockContext, lock: Lock) -> list[Holder]:
    unsure = lock in _unsure(context)
    confidence: OwnerConfidence = "likely" if unsure else "exact"
    return [Holder(task, confidence) for task in _awaited(context).get(lock, ())]


def _what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    find = _finders(context).get(request.lock)
    return _TEXTS[find] if find else None


def _group(context: LockContext, case: BlockedTask) -> Booleans:
    """Return which rows are the other threads of a task's process."""
    tasks = context.tasks
    others: Booleans = tasks["signal"] == tasks["signal"][case.row]
    others[case.row] = False
    return others


def _of_exec(context: LockContext, case: BlockedTask) -> Iterator[int]:
    """Yield the live threads that exec waits for, or else who has to reap dead ones."""
    tasks = context.tasks
    others = _group(context, case)
    lives = others & (tasks["exit_state"] == 0)
    yield from tasks["address"][lives].tolist()
    if not lives.any():
        # The dead leader is left out: the task itself releases it after the wait.
        dead = others & (tasks["pid"] != tasks["tgid"])
        yield from _reapers(context, dead, case)


def _reapers(context: LockContext, dead: Booleans, case: BlockedTask) -> Iterator[int]:
    """Yield the tracers or parents of dead tasks, but none of the waiter's process."""
    tasks = context.tasks
    own = tasks["signal"][case.row]
    rows = find_rows(tasks["address"], tasks["parent"][dead])
    rows = rows[rows != NOT_FOUND]
    yield from tasks["address"][rows[tasks["signal"][rows] != own]].tolist()


def _of_dump(context: LockContext, case: BlockedTask) -> Iterator[int]:
    """Yield the threads that have not stopped for the core dump of their process.

    Before v5.16, where a dump also waits for other processes with the same memory, it
    yields none.
    """
    tasks = context.tasks
    if not context.layout.has("signal_struct", "core_state"):
        return
    runs_on = _group(context, case) & (tasks["exit_state"] == 0)
    runs_on &= (tasks["flags"] & _PF_POSTCOREDUMP) == 0
    yield from tasks["address"][runs_on].tolist()


_PF_POSTCOREDUMP = 0x8
"""Bit of ``task_struct.flags``, since v5.16: the thread is past the point where a dump
stops it."""


def _dumper(context: LockContext, signal: int) -> int:
    """Return the task that dumps core for a process; 0 if there is none."""
    if not signal or not context.layout.has("signal_struct", "core_state"):
        return 0
    state = context.layout.member(signal, "signal_struct", "core_state")
    if not state:
        return 0
    return context.layout.member(state, "core_state", "dumper.task")


def _dumper_of(context: LockContext, case: BlockedTask) -> Iterator[int]:
    dumper = _dumper(context, int(context.tasks["signal"][case.row]))
    if dumper and dumper != case.address:
        yield dumper


def _of_namespace(context: LockContext, case: BlockedTask) -> Iterator[int]:
    """Yield the live tasks of a PID namespace, and who has to reap its dead ones."""
    tasks = context.tasks
    inside = _inside(context, case)
    inside &= tasks["signal"] != tasks["signal"][case.row]
    lives = inside & (tasks["exit_state"] == 0)
    yield from tasks["address"][lives].tolist()
    yield from _reapers(context, inside & (tasks["exit_state"] != 0), case)


def _of_ring(context: LockContext, case: BlockedTask) -> Iterator[int]:
    """Yield the sleeping io_uring workers of a task's process that have a request."""
    tasks, layout = context.tasks, context.layout
    workers = _group(context, case) & asleep(tasks)
    workers &= (tasks["flags"] & PF_IO_WORKER) != 0
    if not (tasks.has("kthread") and layout.has("io_worker", "cur_work")):
        return
    for row in np.flatnonzero(workers).tolist():
        worker = int(tasks["kthread"][row])
        if worker and layout.member(worker, "io_worker", "cur_work"):
            yield int(tasks["address"][row])


def _inside(context: LockContext, case: BlockedTask) -> Booleans:
    """Return which tasks are in a task's PID namespace, or in one nested in it."""
    tasks = context.tasks
    layout = context.layout
    own = int(tasks["thread_pid"][case.row])
    level = layout.member(own, "pid", "level")
    found = np.zeros(len(tasks), np.bool_)
    if not 0 < level <= MAX_LEVEL:
        return found
    first = layout.offset("pid", "numbers[0].ns")
    place = first + level * layout.size("upid")
    space = layout.word(own + place)
    pids: list[int] = tasks["thread_pid"].tolist()
    for row, pid in enumerate(pids):
        if pid and layout.member(pid, "pid", "level") >= level:
            found[row] = layout.word(pid + place) == space
    return found


_TEXTS: dict[_Finder, str] = {
    _of_exec: "its own threads to end, before exec",
    _of_dump: "its own threads to stop, for a core dump",
    _dumper_of: "the core dump of its process",
    _of_namespace: "the processes of its PID namespace to be reaped",
    _of_ring: "requests of its io_uring",
}

RELATIVES = LockType(
    names=frozenset({"threads", "child", "io_uring"}),
    requests=at_most_one(_request),
    holders=_holders,
    what=_what,
)


# --- Waits of a CPU that goes offline for the tasks that cannot leave it.
#
# kernel/sched/core.c, balance_hotplug_wait(): the CPU's hotplug thread waits in
# rq.hotplug_wait until no other task is on the run queue, and no task is pinned to the
# CPU by migrate_disable() (v5.11).


_WAITS = ("sched_cpu_wait_empty", "balance_hotplug_wait")

_PINNED: Members = {"pinned": ("migration_disabled",)}


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the wait of a CPU's hotplug thread for the tasks that are pinned to the CPU.

    :raises drgn.FaultError: if the run queue cannot be read
    :raises MissingError: if its type is unknown
    """
    layout = context.layout
    if not case.is_in(*_WAITS) or not layout.has("rq", "hotplug_wait"):
        return None
    cpu = int(context.tasks["cpu"][case.row])
    queue = _run_queue(context, cpu)
    if layout.member(queue, "rq", "hotplug_wait.task") != case.address:
        return None
    return Request(Lock("rcuwait", queue + layout.offset("rq", "hotplug_wait"), cpu))


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the tasks that have migration disabled on the CPU.

    :raises drgn.FaultError: if the run queue cannot be read
    """
    layout, cpu = context.layout, _cpu(lock)
    if not layout.has("rq", "nr_pinned"):
        return []
    count = layout.member(_run_queue(context, cpu), "rq", "nr_pinned")
    rows = np.flatnonzero(
        (context.tasks["cpu"] == cpu) & (context.tasks["exit_state"] == 0)
    )
    addresses = context.tasks["address"][rows].astype(np.uint64)
    found = read_structs(
        context.reader, "struct task_struct", _PINNED, addresses, context.losses
    )
    if not count or not found.has("pinned"):
        return []
    pinned = addresses[found["pinned"] != 0].tolist()
    # A running task enters and leaves short sections, so it may be missed here.
    is_all = len(pinned) == count
    return [Holder(task, "exact" if is_all else "likely") for task in pinned]


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe the wait: which CPU, and how many tasks."""
    cpu = _cpu(request.lock)
    text = f"CPU {cpu} to be left by all tasks"
    count = context.layout.member(_run_queue(context, cpu), "rq", "nr_pinned")
    if count:
        have = "has" if count == 1 else "have"
        text += f": {count:,} {have} migration disabled"
    return text


def _cpu(lock: Lock) -> int:
    assert isinstance(lock.key, int)
    return lock.key


def _run_queue(context: LockContext, cpu: int) -> int:
    """Return the address of the ``struct rq`` of a CPU."""
    percpu = read_percpu(context.reader, context.losses)
    (rows,) = np.nonzero(percpu.cpus == cpu)
    if not len(rows):
        raise MissingError(f"there is no CPU {cpu}")
    return int(percpu.addresses("runqueues")[rows[0]])


HOTPLUG_WAIT = LockType(
    names=frozenset({"rcuwait"}),
    requests=at_most_one(request),
    holders=holders,
    what=what,
)
