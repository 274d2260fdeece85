# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the wait target of each sleeping task, as msa-prstat reports it."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.locks import file_locks, file_targets, sleeping_locks
from msatools.locks.completions import vforked
from msatools.locks.context import (
    FEW_READS,
    BlockedTask,
    LockContext,
    ends_at,
    per_context,
    read_cases,
    signals_of,
    timer_ends,
)
from msatools.locks.described import describe
from msatools.locks.file_targets import by_file
from msatools.locks.futexes import Waiter, waiters_of
from msatools.locks.kernel_locks import KernelLock
from msatools.locks.names import find_lock_place
from msatools.locks.report import CONDITION, FutexKey, WaitTarget
from msatools.locks.struct_reader import Layout, Timer
from msatools.locks.user_locks import condition_at
from msatools.locks.user_memory import mapping_at
from msatools.program.model import Address
from msatools.tasks.sampler import TaskState
from msatools.tasks.states import STOP_SIGNAL
from msatools.tasks.syscalls import WaitOptsReader
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows, stack_bytes
from msatools.tasks.waits import VFORK, TaskClass, are_any

# --- Wait targets of tasks that wait on futexes, condition variables or kernel locks.


_COMMAND = 0x7F
_WAITS = (0, 6, 9, 11, 13)
"""Operations of futex(): FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET,
FUTEX_WAIT_REQUEUE_PI, FUTEX_LOCK_PI2."""


def futex(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the futex or futexes that a task waits on."""
    waiters, counts = waiters_of(context, case)
    if not waiters:
        return asked_for(case)
    ends = timer_ends(context, case)
    if len(waiters) > 1:
        addresses = [waiter.key.address for waiter in waiters]
        known = tuple(Address(address) for address in addresses if address is not None)
        return WaitTarget(
            kind="futex",
            addresses=known if len(known) == len(waiters) else None,
            count=len(waiters),
            **ends,
        )
    (waiter,) = waiters
    # Equal targets of many tasks are made once.
    alike = None if ends or counts is None else (waiter.key, waiter.pi_state)
    if alike in _futex_targets(context):
        return _futex_targets(context)[alike]
    if counts is None and case.call != "futex_waitv":
        context.losses.note(
            "waiters-not-counted",
            f"{FEW_READS} or more wait in the bucket of one futex; they were not "
            "counted",
        )
    key = waiter.key
    address, inode = key.address, None
    if key.of_inode:
        address, inode = _in_file(context, case, key)
    owner = _pi_owner(context, waiter)
    on = WaitTarget(
        kind="futex",
        type="pi_futex" if waiter.pi_state else None,
        address=None if address is None else Address(address),
        shared=key.shared,
        inode=inode,
        waiters=counts.get(key) if counts is not None else None,
        owner=owner,
        **ends,
    )
    if alike and not key.of_inode:
        _futex_targets(context)[alike] = on
    return on


@per_context
def _futex_targets(
    context: LockContext,
) -> dict[tuple[FutexKey, int] | None, WaitTarget]:
    """Targets of tasks whose waits do not end by themselves, by futex and PI state."""
    return {}


def asked_for(case: BlockedTask) -> WaitTarget | None:
    """Return the futex of a task's system call, if that call waits.

    A task that is not in the queue of the futex was woken, or is about to sleep.
    """
    if case.call not in ("futex", "futex_time32") or not case.plain:
        return None
    if case.arguments[1] & _COMMAND not in _WAITS:
        return None
    return WaitTarget(kind="futex", address=Address(case.arguments[0]))


def is_off_queue(on: WaitTarget) -> bool:
    """Return whether a target comes from :func:`asked_for`: the task is in no queue."""
    return on.kind == "futex" and on.address is not None and on.shared is None


def _pi_owner(context: LockContext, waiter: Waiter) -> int | None:
    if not waiter.pi_state:
        return None
    owner = context.layout.member(waiter.pi_state, "futex_pi_state", "owner")
    return context.pid(owner) if owner else None


def _in_file(
    context: LockContext, case: BlockedTask, key: FutexKey
) -> tuple[int | None, int | None]:
    """Return address and inode number of a futex in a file, by the system call.

    The mapping at that address may have changed, so it has to match the key.
    """
    if case.call not in ("futex", "futex_wait"):
        return None, None
    address = case.arguments[0]
    mapping = mapping_at(context.layout, case.mm, address)
    if mapping is None or not mapping.file:
        return None, None
    if mapping.file_offset(address) != key.file_offset:
        return None, None
    inode = context.layout.member(mapping.file, "file", "f_inode")
    if context.layout.member(inode, "inode", "i_sequence") != key.object:
        return None, None
    return address, context.storage.inode(inode).number


Ons = Sequence[WaitTarget | None]


def as_conditions(
    context: LockContext, ons: Ons, least: int
) -> list[WaitTarget | None]:
    """
    Replace futexes of condition variables by the condition variables.

    :param ons: The present or last wait target of each task of the context.
    :param least: Minimum number of waiters for which memory is read.
    """
    mms: list[int] = context.tasks["mm"].tolist()
    words = [
        None if on is None else _word_of(mm, on)
        for mm, on in zip(mms, ons, strict=True)
    ]
    starts = {
        word: condition_at(context, *word)
        for word, count in Counter(words).items()
        if word is not None and count >= least
    }
    # Many tasks may share one target: the new one is shared as well.
    conditions: dict[tuple[int, int], WaitTarget] = {}
    targets = list(ons)
    for row, (on, word) in enumerate(zip(ons, words, strict=True)):
        start = starts.get(word) if word else None
        if on is not None and start is not None:
            key = id(on), start
            if key not in conditions:
                conditions[key] = replace(on, address=Address(start), name=CONDITION)
            targets[row] = conditions[key]
    return targets


def _word_of(mm: int, on: WaitTarget) -> tuple[int, int] | None:
    """Return the address space and the aligned address of a private futex."""
    if not mm or on.kind != "futex":
        return None
    if on.address is None or on.inode is not None:
        return None
    return mm, int(on.address) & ~7


def kernel_lock(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the kernel lock that a task waits for."""
    lock = sleeping_locks.sleeping_find(context, case)
    if lock is None:
        return None
    on = WaitTarget(
        kind="lock",
        type=lock.type,
        address=None if lock.address is None else Address(lock.address),
        mode=lock.mode,
        waiters=lock.waiters,
        owner=context.pid(lock.owner) if lock.owner else None,
    )
    return _with_place(context, on, lock, case)


def _with_place(
    context: LockContext, on: WaitTarget, lock: KernelLock, case: BlockedTask
) -> WaitTarget:
    """Return a target with the name, inode, path and process of its lock, if found."""
    if lock.address is None:
        return on
    place = find_lock_place(context, lock.type, lock.address, [case])
    if place is None:
        return on
    known = describe(context, place)
    on = replace(on, name=place.name, inode=known.inode, path=known.path, pid=known.pid)
    file = case.file
    if place.type_name == "pipe_inode_info":
        on = replace(on, name="pipe")
        return replace(on, fd=file.fd) if file else on
    if place.type_name == "file" and file and file.address == place.address:
        return replace(on, fd=file.fd)
    return on


# --- Wait targets of tasks that wait for tasks, signals, messages or timers.


def timer(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the timer that ends a sleep."""
    if case.file is not None:
        return by_file(context, case)
    ends = timer_ends(context, case)
    return WaitTarget(kind="timer", **ends) if ends else None


def child(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the child that a task waits for."""
    if case.is_in("do_wait"):
        return _waited(context, case)
    if case.is_in(*VFORK):
        return _vforked(context, case)
    return None


def _waited(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the child of a wait(), by its arguments."""
    wake_function = context.layout.symbol("child_wait_callback")
    for entry in case.stack.wait_entries():
        if entry.function != wake_function:
            continue
        wait = _wait_opts(context).of_entry(entry.address)
        if wait.kind == "any":
            return WaitTarget(kind="child")
        if wait.number is None:
            return None
        if wait.kind == "pid":
            return WaitTarget(kind="child", pid=wait.number)
        return WaitTarget(kind="child", pgid=wait.number)
    return None


def _vforked(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the vforked child, which has a pointer to the stack of the task."""
    task = vforked(context, case.address, lambda done: done in case.stack)
    return (
        WaitTarget(kind="child", pid=context.pid(task, leader=True)) if task else None
    )


def signal(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the signals that end a task's wait; no ``signals`` if any signal does."""
    if case.file is not None:
        return by_file(context, case)
    blocked = "blocked.sig[0]"
    if case.is_in("do_sigtimedwait"):
        # The signals of the call are unblocked while it waits.
        names = (blocked, "real_blocked.sig[0]")
        now, before = context.layout.members(case.address, "task_struct", *names)
        signals = signals_of(before & ~now)
        return WaitTarget(
            kind="signals", signals=signals or None, **timer_ends(context, case)
        )
    if case.is_in("sigsuspend", "__do_sys_rt_sigsuspend"):
        mask = context.layout.member(case.address, "task_struct", blocked)
        return WaitTarget(kind="signals", signals=signals_of(~mask) if mask else None)
    return WaitTarget(kind="signals")


def message(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the message queue or the set of semaphores that a task waits on."""
    ends = timer_ends(context, case)
    id_ = case.arguments[0] & 0x7FFF_FFFF if case.plain else None
    if case.is_in("do_msgrcv", "do_msgsnd"):
        return WaitTarget(kind="msgqueue", id=id_)
    if case.is_in("do_semtimedop", "__do_semtimedop"):
        return WaitTarget(kind="semaphore", id=id_, **ends)
    if case.call in ("mq_timedsend", "mq_timedreceive"):
        path = context.path_at(case.file.place) if case.file else None
        return WaitTarget(kind="mqueue", fd=case.fd, path=path, **ends)
    return None


def stopped(context: LockContext, case: BlockedTask) -> WaitTarget:
    """Return the signal that stopped a task."""
    number = int(context.tasks["jobctl"][case.row]) & STOP_SIGNAL
    return WaitTarget(kind="stop", signals=(number,) if number else None)


def traced(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the tracer of a task."""
    if not int(context.tasks["ptrace"][case.row]):
        return None
    pid = context.pid(int(context.tasks["parent"][case.row]), leader=True)
    return WaitTarget(kind="tracer", pid=pid)


@per_context
def _wait_opts(context: LockContext) -> WaitOptsReader:
    """Return the reader of arguments of wait()."""
    return WaitOptsReader(context.reader)


# --- Finds the wait target of each sleeping task.
#
# It is determined by the functions on the stack, the arguments of the system call, and
# structures on the stack. Fields that cannot be determined exactly are None.


_BY_CLASS: dict[TaskClass, Callable[[LockContext, BlockedTask], WaitTarget | None]] = {
    TaskClass.LCK: futex,
    TaskClass.KLK: kernel_lock,
    TaskClass.FLK: file_locks.file_lock,
    TaskClass.POL: file_targets.poll,
    TaskClass.FLT: file_targets.fault,
    TaskClass.SWP: file_targets.fault,
    TaskClass.RCL: file_targets.reclaim,
    TaskClass.DSK: file_targets.disk,
    TaskClass.PIP: file_targets.by_file,
    TaskClass.NET: file_targets.by_file,
    TaskClass.TTY: file_targets.by_file,
    TaskClass.TMR: timer,
    TaskClass.WAI: child,
    TaskClass.SIG: signal,
    TaskClass.IPC: message,
    TaskClass.URG: file_targets.io_uring,
    TaskClass.STP: stopped,
    TaskClass.TRC: traced,
}


_FIXED = frozenset({"timer", "child", "signals", "msgqueue", "semaphore"})
"""Kinds of targets that stay the same while a task sleeps, as they follow from its own
stack and system call. Owners, waiters and paths of files may change."""

_OWN_CLASSES = (TaskClass.TMR, TaskClass.WAI, TaskClass.SIG, TaskClass.IPC)
"""Classes of tasks that may have a target of a kind in :data:`_FIXED`."""

_SLEEP = (
    *("start_ns", "state", "on_cpu", "nvcsw", "nivcsw", "sp", "last_arrival_ns"),
    "stack",
)
"""Columns of the table of tasks, at least one of which changes if a task runs. The
counters of switches alone are not enough: a woken task counts none until it sleeps."""


class _Fixed(Struct, frozen=True):
    """A target that stays the same until its task wakes up."""

    sleep: tuple[int, ...]
    """Values of the columns :data:`_SLEEP`, which identify the sleep."""

    on: WaitTarget
    timer: Timer | None


class Explainer:
    """Finds wait targets of tasks of one kernel; looks up types once.

    On a running kernel, targets that stay the same while a task sleeps on are not
    looked for again.
    """

    def __init__(self, reader: Reader) -> None:
        self._layout = Layout(reader)
        self._live = reader.is_live
        self._fixed: dict[int, _Fixed] = {}
        """Targets by the address of the task, on a running kernel."""

        self.stack_bytes = stack_bytes(reader.prog)

    def explain(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        losses: LossLog,
        *,
        rows: Rows | None = None,
        alone: bool | None = None,
    ) -> list[WaitTarget | None]:
        """
        Return the wait targets of tasks.

        :param tasks: The tasks from which *now* was collected.
        :param rows: Rows of the tasks; all if not given.
        :param alone: Whether other waiters are counted only if there are few of them;
            by default so for a single row.
        :return: One target per row; ``None`` for a task that does not wait, or whose
            target is unknown.
        """
        chosen = np.arange(len(tasks)) if rows is None else rows
        alone = len(chosen) == 1 if alone is None else alone
        context = LockContext(self._layout, tasks, losses, clocks, alone=alone)
        found: list[WaitTarget | None] = [None] * len(chosen)
        alike: dict[WaitTarget | None, WaitTarget | None] = {}
        kept: set[int] = set()
        """The ``id()`` of stored targets, which need no slow comparison."""

        waits = are_any(now.classes[chosen], [*_BY_CLASS])
        sleeps = self._sleeps(tasks, now, chosen) if self._live else {}
        for index, (address, sleep) in sleeps.items():
            on = self._still(context, address, sleep)
            if on is not None:
                waits[index] = False
                found[index] = alike.setdefault(on, on)
        asleep = np.flatnonzero(waits)
        cases = read_cases(context, now, chosen[asleep], self.stack_bytes)
        for index, case in zip(asleep.tolist(), cases, strict=True):
            on = wait_target(context, case)
            # Equal targets of many tasks are stored once.
            found[index] = on if id(on) in kept else alike.setdefault(on, on)
            kept.add(id(found[index]))
            if index in sleeps and on is not None:
                address, sleep = sleeps[index]
                if on.kind in _FIXED and case.file is None:
                    timer = None if on.expires_ns is None else case.stack.timer()
                    self._fixed[address] = _Fixed(sleep, on, timer)
        self._forget(tasks)
        return found

    def _sleeps(
        self, tasks: TaskTable, now: TaskState, chosen: Rows
    ) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return address and sleep of the tasks that may have a fixed target.

        :return: Maps the index in *chosen* to the address and :attr:`_Fixed.sleep`.
        """
        own = np.flatnonzero(are_any(now.classes[chosen], _OWN_CLASSES))
        rows = chosen[own]
        names = [name for name in _SLEEP if tasks.has(name)]
        sleeps = zip(*(tasks[name][rows].tolist() for name in names), strict=True)
        addresses = tasks["address"][rows].tolist()
        return dict(zip(own.tolist(), zip(addresses, sleeps, strict=True), strict=True))

    def _still(
        self, context: LockContext, address: int, sleep: tuple[int, ...]
    ) -> WaitTarget | None:
        """Return the fixed target of a task that sleeps on; ``None`` if not known.

        If the columns :data:`_SLEEP` have changed, the task has run, and may have
        another target.
        """
        fixed = self._fixed.get(address)
        if fixed is None or fixed.sleep != sleep:
            return None
        if fixed.timer is None:
            return fixed.on
        # The clock of the timer may have been set since.
        try:
            ends = ends_at(context, fixed.timer.expires_ns, fixed.timer.base)
        except UNREADABLE:
            return None
        return replace(fixed.on, **{"expires_ns": None, "left_ns": None, **ends})

    def _forget(self, tasks: TaskTable) -> None:
        """Forget tasks that have ended, if there are many."""
        if len(self._fixed) > 2 * len(tasks):
            there = set(tasks["address"].tolist())
            self._fixed = {
                address: fixed
                for address, fixed in self._fixed.items()
                if address in there
            }

    def context(self, tasks: TaskTable, clocks: Clocks) -> LockContext:
        """Return a context of tasks whose losses are not reported."""
        return LockContext(self._layout, tasks, LossLog(), clocks, alone=False)


def awake_rows(tasks: TaskTable, now: TaskState) -> Rows:
    """Return the rows of threads of processes that wait for a CPU."""
    awake = are_any(now.classes, (TaskClass.LAT, TaskClass.WAK))
    return np.flatnonzero(awake & (tasks["mm"] != 0))


def leaving(
    context: LockContext, now: TaskState, rows: Rows, stack_bytes: int
) -> list[WaitTarget | None]:
    """
    Return the futexes that threads were waiting on, by their system calls.

    The threads were woken, or are about to sleep: the call has not returned.
    """
    cases = read_cases(context, now, rows, stack_bytes)
    return [asked_for(case) for case in cases]


def wait_target(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the wait target of a task; log what cannot be read."""
    by_class = _BY_CLASS.get(case.task_class)
    try:
        return by_class(context, case) if by_class else None
    except UNREADABLE as error:
        context.losses.lose(
            Loss.WAITS, f"cannot determine what a task waits on: {error}"
        )
    except MissingError as error:
        context.losses.note(
            "waits-unknown",
            f"what tasks of class {case.task_class.name} wait on is unknown: {error}",
            case.task_class.name,
        )
    return None
