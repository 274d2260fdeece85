# SPDX-License-Identifier: LGPL-2.1-or-later

"""Snapshots of waits, locks and owners, from which reports are made.

Also short descriptions of what tasks that others wait for are doing.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.clocks import Clocks
from msatools.kernel.code import stack_trace
from msatools.kernel.report import Loss
from msatools.locks.context import BlockedTask, LockContext
from msatools.locks.externals import External
from msatools.locks.graph import Edge, Graph, Owned, Thing
from msatools.locks.lock_types import (
    Blocked,
    blocked_rows,
    find_blocked,
    holders_of,
    queue_of,
    readers_of,
)
from msatools.locks.report import Holder, Lock, LockTypeName, QueuedWaiter, WaitTarget
from msatools.locks.spinlocks import spins
from msatools.locks.user_locks import FUTEX, condition_at
from msatools.locks.work import current_work
from msatools.program.linear import KERNEL_HALF
from msatools.reports.units import signal_name
from msatools.tasks.identity import comm_text
from msatools.tasks.running_stacks import StackReader, named_frames
from msatools.tasks.sampler import TaskState, runs
from msatools.tasks.states import (
    MAX_RT_PRIO,
    STOP_SIGNAL,
    TRAP_FREEZE,
    letters,
    policy_text,
    read_frozen,
)
from msatools.tasks.table import PF_EXITING, TaskTable
from msatools.tasks.waits import TaskClass, function_text, is_thunk

# --- Describes what a task that others wait for is doing, in a few words.


_EXIT_DEAD = 0x10
"""``EXIT_DEAD`` of ``task_struct.exit_state``: the task is being reaped."""


_BELOW_WORK = "process_one_work"
"""The function that calls the functions of work items."""

_OF_DATA = frozenset({TaskClass.DSK, TaskClass.FLT, TaskClass.SWP})
"""Classes of waits for data: they are described by its device or file if known, rather
than by the lock."""


def reason(
    context: LockContext,
    row: int,
    now: TaskState,
    case: BlockedTask | None,
    on: WaitTarget | None,
    what: str | None,
) -> str:
    """
    Describe what a task is doing, without its duration.

    :param case: Its stack and system call, if it sleeps.
    :param on: Its wait target, if known.
    :param what: Description of its wait for a lock without an owner.
    """
    task_class = TaskClass(int(now.classes[row]))
    if task_class is TaskClass.ZMB:
        return _dead(context, row)
    # Its class is unknown if it runs on a CPU of which a dump has no registers.
    if task_class in _AWAKE or context.tasks["on_cpu"][row]:
        text = _awake(context, row, task_class)
    else:
        text = _asleep(context, row, now, case, on, what, task_class)
    work = current_work(context, row)
    if work is not None:
        # If a work item's function ends with a jump, it is not on the stack.
        for function in (_BELOW_WORK, work.partition(" of ")[0]):
            before, found, module = text.rpartition(f" in {function}")
            if found and (not module or module.startswith(" [")):
                return f"{before} in work {work}"
        return f"{text}, in work {work}"
    exits = int(context.tasks["flags"][row]) & PF_EXITING
    return f"exiting, {text}" if exits else text


def wait_text(task_class: TaskClass, on: WaitTarget | None) -> str | None:
    """Describe what tasks of a class wait for; ``None`` if the class does not say."""
    describe = _BY_CLASS.get(task_class)
    return describe(on) if describe else None


def external_reason(external: External, doing: str | None) -> str:
    """
    Describe something outside of all tasks, and what its server is doing.

    :param doing: Description of what ``external.pid`` is doing.
    """
    exact = all(server.confidence == "exact" for server in external.servers)
    if external.pid is None or doing is None or exact:
        return external.text
    return f"{external.text}, {doing}"


def _dead(context: LockContext, row: int) -> str:
    reaped = int(context.tasks["exit_state"][row]) & _EXIT_DEAD
    return "dead, being reaped" if reaped else "dead, not reaped"


_AWAKE = frozenset(
    {TaskClass.CPU, TaskClass.USR, TaskClass.SYS, TaskClass.INT, TaskClass.LAT}
)


def standing(context: LockContext, row: int) -> str | None:
    """Describe how a task stands with the scheduler; ``None`` if it sleeps."""
    tasks = context.tasks
    cpu = int(tasks["cpu"][row])
    if tasks["on_cpu"][row]:
        return f"runs on CPU {cpu}"
    if tasks["state"][row] or tasks["exit_state"][row]:
        return None
    throttle = context.throttles.of(row, context.local_ns)
    if throttle is not None:
        return throttle.text
    return f"waits for CPU {cpu}{_policy(context, row)}{_urgent(context, row)}"


def _awake(context: LockContext, row: int, task_class: TaskClass) -> str:
    found = standing(context, row) if task_class is TaskClass.LAT else None
    if found is not None:
        return found
    where = {
        TaskClass.USR: " in user mode",
        TaskClass.INT: " in an interrupt",
        TaskClass.SYS: _running_in(context, row),
    }
    return f"runs on CPU {context.tasks['cpu'][row]}{where.get(task_class, '')}"


def _policy(context: LockContext, row: int) -> str:
    """Return the policy or nice value of an ordinary task, in parentheses.

    Empty for a real-time task, and for the default policy and nice value.
    """
    tasks = context.tasks
    if tasks["prio"][row] < MAX_RT_PRIO:
        return ""
    words = policy_text(
        *(int(tasks[name][row]) for name in ("policy", "rt_priority", "static_prio"))
    )
    return f" ({words})" if words else ""


def _urgent(context: LockContext, row: int) -> str:
    """Describe the real-time task that keeps an ordinary task off its CPU, if any."""
    tasks = context.tasks
    prio = tasks["prio"]
    if prio[row] < MAX_RT_PRIO:
        return ""
    runs = (tasks["on_cpu"] != 0) & (tasks["cpu"] == tasks["cpu"][row])
    for found in np.flatnonzero(runs & (prio < MAX_RT_PRIO)).tolist():
        comm = comm_text(tasks["comm"][found])
        return f", which real-time task {int(tasks['pid'][found])} {comm} has"
    return ""


def _running_in(context: LockContext, row: int) -> str:
    """Return the function that a running task is in, by the registers in a dump."""
    frames = stack_trace(context.reader.prog, int(context.tasks["address"][row])) or ()
    for frame in frames:
        name = context.function(frame) if frame.pc >= KERNEL_HALF else None
        if name and not is_thunk(name):
            return f" in {function_text(name, context.text.module_name(frame.pc))}"
    return ""


def _asleep(
    context: LockContext,
    row: int,
    now: TaskState,
    case: BlockedTask | None,
    on: WaitTarget | None,
    what: str | None,
    task_class: TaskClass,
) -> str:
    if task_class is TaskClass.STP:
        return _stopped(context, row)
    if task_class is TaskClass.TRC:
        tracer = on.pid if on else None
        return "stopped by a tracer" if tracer is None else f"traced by {tracer}"
    if what is not None and task_class is TaskClass.LCK:
        return what  # the description of a futex is a whole sentence
    text = wait_text(task_class, on)
    if what is not None and (text is None or task_class not in _OF_DATA):
        return f"waits for {what}"
    if text is not None:
        return text
    function = _function(now, row, case)
    file = _file(on) if on is not None else None
    if function is None:
        return f"waits for {file}" if file else "asleep"
    return f"asleep in {function} of {file}" if file else f"asleep in {function}"


def _stopped(context: LockContext, row: int) -> str:
    tasks = TaskTable(context.tasks.records[[row]], context.tasks.columns)
    jobctl = int(tasks["jobctl"][0])
    if read_frozen(context.reader, tasks)[0]:
        # A suspend freezes all processes. Control groups of version 1 set no bit.
        by_group = jobctl & TRAP_FREEZE or not _all_frozen(context)
        return "frozen by its control group" if by_group else "frozen"
    number = jobctl & STOP_SIGNAL
    return f"stopped by {signal_name(number)}" if number else "stopped"


def _all_frozen(context: LockContext) -> bool:
    """Return whether all processes are being frozen (kernel/power/process.c)."""
    address = context.layout.symbol("pm_freezing")
    if address is None:
        return True
    try:
        return context.reader.read(address, 1) != b"\0"
    except UNREADABLE as error:
        context.losses.lose(
            Loss.LOCK_NAMES, f"cannot determine who has frozen a task: {error}"
        )
        return True


def _function(now: TaskState, row: int, case: BlockedTask | None) -> str | None:
    """Return the system call that a task sleeps in, or else the function."""
    if case is not None and case.call is not None:
        return case.call
    wait = now.waits[int(now.stacks.index[row])]
    name = wait.caller or wait.function
    return wait.call or function_text(name, now.stacks.module(now.stacks[row], name))


def _data(on: WaitTarget | None) -> str | None:
    """Describe a wait for data: by its device, file or journal."""
    if on is None:
        return None
    if on.kind == "userfaultfd":
        return "waits for a page of a userfaultfd"
    if on.kind == "journal":
        thread = f" by {on.pid}" if on.pid else ""
        return f"waits for a commit of {on.device or 'a journal'}{thread}"
    if on.device is not None:
        return f"I/O on {on.device}"
    if on.path is not None:
        return f"I/O on {on.path}"
    return "waits for a page of memory" if on.kind == "page" else None


def _swap(on: WaitTarget | None) -> str:
    return f"swap on {on.device}" if on and on.device else "waits for swap"


def _memory(on: WaitTarget | None) -> str:
    where = f" of control group {on.path}" if on and on.path else ""
    return f"waits for memory{where}"


def _lock(on: WaitTarget | None) -> str | None:
    if on is None or on.kind != "lock":
        return None
    name = on.name or (None if on.address is None else f"{on.address:#x}")
    words = (on.type, name, on.path)
    return "waits for " + " ".join(word for word in words if word)


def _futex(on: WaitTarget | None) -> str:
    if on is not None and on.addresses:
        return f"waits for any of {len(on.addresses)} futexes"
    if on is None or on.address is None:
        return "waits for a futex"
    return f"waits for futex {on.address:#x}"


def _file_lock(on: WaitTarget | None) -> str:
    if on is None:
        return "waits for a lock of a file"
    return f"waits for {on.kind} {on.path or ''}".rstrip()


def _child(on: WaitTarget | None) -> str | None:
    if on is None or on.kind != "child":
        return None
    if on.pid is not None:
        return f"waits for child {on.pid}"
    group = "" if on.pgid is None else f" of group {on.pgid}"
    return f"waits for a child{group}"


_BY_CLASS: dict[TaskClass, Callable[[WaitTarget | None], str | None]] = {
    TaskClass.LCK: _futex,
    TaskClass.KLK: _lock,
    TaskClass.FLK: _file_lock,
    TaskClass.DSK: _data,
    TaskClass.FLT: _data,
    TaskClass.SWP: _swap,
    TaskClass.RCL: _memory,
    TaskClass.WAI: _child,
}


def _file(on: WaitTarget) -> str | None:
    """Return the file that a system call waits on; ``None`` if it waits on no file."""
    if on.kind in ("pipe", "socket") and on.path is None:
        return None if on.inode is None else f"{on.kind}:[{on.inode}]"
    if on.path is not None:
        return on.path
    if on.kind in _NO_FILES or on.fd is None:
        return None
    return on.kind if on.kind not in ("file", "device", "disk") else f"fd {on.fd}"


_NO_FILES = frozenset({"timer", "signals", "poll", "epoll", "futex", "lock"})


# --- Snapshots: blocked tasks, their locks and owners at one moment.


BRIEF_NS = 1_000_000_000
"""Minimum wait of tasks for an address on a stack to count in a deadlock: waits for
contended locks are usually much shorter."""


class Unknown(Struct, frozen=True):
    """A thing that a task waits for, known only by a description of the wait."""

    text: str


class Wanted(Struct):
    """A lock that tasks wait for."""

    lock: Lock
    rows: list[int] = field(default_factory=list)
    """Rows of the waiters, in the order in which they were found."""

    queue: tuple[QueuedWaiter, ...] | None = None
    holders: tuple[Holder, ...] = ()
    readers: int | None = None
    owners: tuple[Owned, ...] = ()
    refuted: tuple[Owned, ...] = ()
    """Tasks that the lock names as owners, but that other facts refute."""


class WaitSnapshot(Struct, frozen=True, dict=True):
    """All tasks, and the locks that some of them wait for."""

    context: LockContext
    tasks: TaskTable
    now: TaskState
    clocks: Clocks
    blocked: dict[int, Blocked]
    """Maps the row of a task to its wait."""

    wanted: dict[Lock, Wanted]

    moved: frozenset[int] = frozenset()
    """Rows of owners that ran while the snapshot was read."""

    def without(self, rows: set[int]) -> "WaitSnapshot":
        """Return the snapshot without the waits of some tasks."""
        blocked = {row: each for row, each in self.blocked.items() if row not in rows}
        wanted = {
            lock: replace(want, rows=[row for row in want.rows if row not in rows])
            for lock, want in self.wanted.items()
        }
        waited = {lock: want for lock, want in wanted.items() if want.rows}
        return replace(self, blocked=blocked, wanted=waited)

    @cached_property
    def graph(self) -> Graph:
        """The graph of waits."""
        edges = [
            Edge(row, each.lock, own.row, own.confidence, self._is_firm(row, own))
            for each in self.wanted.values()
            for row in each.rows
            if len(self.blocked[row].requests) == 1
            for own in each.owners
        ]
        things = {row: self._thing(each) for row, each in self.blocked.items()}
        known = {row: thing for row, thing in things.items() if thing is not None}
        return Graph(edges, known, lambda row: int(self.now.age_ns[row]))

    def _is_firm(self, row: int, own: Owned) -> bool:
        """Return whether a wait of one task for another may be part of a deadlock.

        An address on the stack of a task that just fell asleep may be that of a lock
        that it has just released.
        """
        if own.confidence == "exact" or not own.seen:
            return own.firm
        brief = min(int(self.now.age_ns[row]), int(self.now.age_ns[own.row]))
        return own.firm and brief >= BRIEF_NS

    def _thing(self, blocked: Blocked) -> Thing | None:
        """Return the thing that a task waits for; the graph uses it if it has no owner.

        :return: ``None`` for a wait for any of several locks, or if unknown.
        """
        if blocked.external is not None:
            return blocked.external.kind, blocked.external.identity
        if len(blocked.requests) == 1:
            return blocked.requests[0].lock
        if blocked.requests:
            return None
        wait = self.now.waits[int(self.now.stacks.index[blocked.row])]
        where = wait.caller or wait.function
        if where is None:
            return None
        text = blocked.what
        if text is None and wait.task_class is not TaskClass.LCK:
            # Futexes are left out: others of other processes have the same address.
            text = wait_text(wait.task_class, blocked.on)
        return Unknown(text or f"asleep in {where}")

    def pid(self, task: int) -> int | None:
        """Return a task's thread ID; ``None`` if it cannot be read."""
        try:
            return self.context.pid(task)
        except UNREADABLE:
            self.context.losses.lose(Loss.WAITERS, "cannot read all waiters for a lock")
            return None

    @cached_property
    def pids(self) -> list[int]:
        """Thread ID of each task."""
        pids: list[int] = self.tasks["pid"].tolist()
        return pids

    @cached_property
    def letters(self) -> list[str]:
        """Letter of each task's state, as in /proc."""
        found: list[str] = letters(self.tasks).tolist()
        return found

    @cached_property
    def ages_ns(self) -> list[int]:
        """Time since each task entered its state."""
        ages: list[int] = self.now.age_ns.tolist()
        return ages

    def comm(self, row: int) -> str:
        """Return the name of a task."""
        return comm_text(self.tasks["comm"][row])

    def functions(self, row: int) -> tuple[str, ...]:
        """Return the functions on the stack of a task that sleeps, innermost first."""
        stacks = self.now.stacks
        return stacks.names(stacks[row])

    def stack_of(self, row: int) -> tuple[str, ...]:
        """Return the functions on a task's stack, also of one that runs in a dump."""
        address = int(self.tasks["address"][row])
        found = self._running.read(address) if self._are_running[row] else None
        if found is None:
            return self.functions(row)
        return tuple(name for name, _ in named_frames(found, self.context.text))

    @cached_property
    def _are_running(self) -> list[bool]:
        found: list[bool] = runs(self.tasks).tolist()
        return found

    @cached_property
    def _running(self) -> StackReader:
        return StackReader(self.context.reader, self.context.text, self.context.losses)

    def oldest_first(self, rows: Iterable[int]) -> list[int]:
        """Sort tasks by the time since they entered their state, the longest first."""
        return sorted(rows, key=lambda row: (-self.ages_ns[row], self.pids[row]))

    @cached_property
    def unqueued(self) -> dict[tuple[int, int], list[int]]:
        """Rows of tasks in a futex call but not in its queue, by process and address.

        They still sleep, but were taken off the queue to be woken. On a running kernel
        they may also have queued after the queue was read.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for row, each in self.blocked.items():
            on = each.on
            if on is not None and on.kind == "futex" and on.address is not None:
                futex = self.place_of(row, int(on.address))
                found.setdefault(futex, []).append(row)
        return found

    def place_of(self, row: int, address: int) -> tuple[int, int]:
        """Return the process of a task, and the address that identifies a futex.

        For a futex of a condition variable that is the address of its start.
        """
        start = condition_at(self.context, int(self.tasks["mm"][row]), address)
        return int(self.tasks["tgid"][row]), address if start is None else start

    @cached_property
    def crowds(self) -> list[Wanted]:
        """The waiters of each lock, and the tasks that have just left its queue.

        A futex is identified by its process and address.
        """
        found: dict[Lock, Wanted] = {}
        for want in self.wanted.values():
            lock = self.crowd_lock(want)
            # A futex that is used as private and as shared one has two queues.
            known = found.get(lock, replace(want, rows=[]))
            found[lock] = replace(known, lock=lock, rows=[*known.rows, *want.rows])
        for place, rows in self.unqueued.items():
            lock = futex_at(place)
            want = found.get(lock, Wanted(lock))
            found[lock] = replace(want, rows=[*want.rows, *rows])
        return list(found.values())

    def crowd_lock(self, want: Wanted) -> Lock:
        """Return the lock that identifies a crowd: see :attr:`crowds`."""
        place = self.place(want)
        return want.lock if place is None else futex_at(place, want.lock.type)

    def place(self, want: Wanted) -> tuple[int, int] | None:
        """Return the process and address of a futex; ``None`` for another lock."""
        if want.lock.type not in FUTEX.names or want.lock.address is None:
            return None
        return int(self.tasks["tgid"][want.rows[0]]), want.lock.address

    @cached_property
    def rows(self) -> dict[int, int]:
        """Maps the address of a task to its row."""
        addresses: list[int] = self.tasks["address"].tolist()
        return {address: row for row, address in enumerate(addresses)}


def futex_at(place: tuple[int, int], type_: LockTypeName = "futex") -> Lock:
    """Return the lock of a futex, by its process and address alone."""
    tgid, address = place
    return Lock(type_, address, tgid)


def read_snapshot(
    context: LockContext, now: TaskState, clocks: Clocks, stack_size: int
) -> WaitSnapshot:
    """Read the blocked tasks, the locks they wait for, and their holders."""
    tasks = context.tasks
    rows = blocked_rows(context, now)
    blocked = {each.row: each for each in find_blocked(context, now, rows, stack_size)}
    spinning = {spin.row: spin for spin in spins(context, stack_size)}
    for row, spin in spinning.items():
        blocked[row] = Blocked(row, (spin.request,), caller=spin.caller)
    wanted: dict[Lock, Wanted] = {}
    for row, each in blocked.items():
        for request in each.requests:
            wanted.setdefault(request.lock, Wanted(request.lock)).rows.append(row)
    snapshot = WaitSnapshot(context, tasks, now, clocks, blocked, wanted)
    for want in wanted.values():
        if want.rows[0] in spinning:
            want.holders = spinning[want.rows[0]].holders
        else:
            _read_lock(context, want)
    return snapshot


def _read_lock(context: LockContext, want: Wanted) -> None:
    """Read the waiters of a lock, and the holders that it records."""
    try:
        queue = queue_of(context, want.lock)
        want.queue = None if queue is None else tuple(queue)
        want.holders = tuple(holders_of(context, want.lock))
        want.readers = readers_of(context, want.lock)
    except LOST as error:
        context.losses.lose(
            Loss.LOCKS, f"cannot read the owner or the waiters of a lock: {error}"
        )
