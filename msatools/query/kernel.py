# SPDX-License-Identifier: LGPL-2.1-or-later

"""Query a kernel for single threads and processes, repeatedly.

On a running kernel each query reads the PID's entry, the task and all CPUs' clocks; the
settings of accounting are read at most every 0.1 s. Types and symbols are looked up
once.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, TypeVar

import drgn
import numpy as np

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.clocks import Accounting, AccountingReader, read_clocks
from msatools.kernel.pids import NoSuchPidError, find_task
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.wait_targets import Explainer
from msatools.program import TargetError, TargetSpec, describe, live, open_target
from msatools.program.model import KCORE
from msatools.prstat.states import (
    GELATO_NOW,
    SLEEPS,
    SOLARIS_NOW,
    STATES,
    StateSums,
    Time,
    pasts,
)
from msatools.query.life import (
    Life,
    LifeMoment,
    LifeSeen,
    ThreadReader,
    age,
    covered_since,
    life,
    split_by_ticks,
    state_class,
    summed,
)
from msatools.query.model import ChildTimes, Now, Process, States, Thread, Timers
from msatools.selfdesc.find import find_variable
from msatools.tasks.identity import comm_text
from msatools.tasks.sampler import AgeBound, collect_now, running_class
from msatools.tasks.stacks import StackCollector, Stacks
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.unwind import SAVED
from msatools.tasks.waits import TaskClass, classify

T = TypeVar("T")

_SHOWN = 60
"""Number of last characters of a path that ``repr`` shows."""

_NAMESPACE = "/proc/self/ns/pid"
_ACCOUNTING_NS = 100_000_000
"""How long the settings of accounting are cached."""

_TRIES = 3
"""Maximum attempts on a running kernel, where threads end and lists change."""

_BOUNDS: dict[AgeBound, Literal["exact", "upper", "estimate"]] = {
    AgeBound.EXACT: "exact",
    AgeBound.UPPER: "upper",
    AgeBound.ESTIMATE: "estimate",
}

_WAITED_FOR = (
    "time on the CPU of children that were waited for, and of theirs; ticks sampled "
    "the mode it was in"
)
_NOT_OF_CHILDREN = Time(
    None, None, "of children that were waited for Linux keeps their time on the CPU"
)


class NoSuchTaskError(NoSuchPidError, LookupError):
    """No thread has the PID, not even a zombie."""


class UnreadableTaskError(TargetError):
    """The task cannot be read, is damaged, or changes too fast."""


class NotThisMachineError(TargetError):
    """The calling process is not a task of this kernel."""


def require_id(pid: int) -> None:
    """
    Check that *pid* is an integer.

    :raises TypeError: if it is not
    """
    if not isinstance(pid, int) or isinstance(pid, bool):
        raise TypeError(
            f"a task is asked for by its ID, an int, not {type(pid).__name__} "
            f"{pid!r}; of drgn's objects that is task.pid.value_()"
        )


class Kernel:
    """A kernel open for queries; :func:`msatools.open` returns one.

    All methods raise

    - :class:`NoSuchTaskError`, which is a ``LookupError``, if there is no such thread;
    - :class:`UnreadableTaskError` if it exists but cannot be read;
    - other :class:`msatools.program.TargetError` if nothing can be read any more.

    PIDs are those of the initial PID namespace, as in all commands. The methods are not
    thread-safe; forked processes may use the same object.
    """

    def __init__(self, prog: drgn.Program) -> None:
        """
        :param prog: A Linux kernel with types, live or dead.
        :raises MissingError: if the types of tasks are missing
        """
        self.prog = prog
        self.reader = Reader(prog)
        self._threads = ThreadReader(self.reader)
        self._accounting_reader = AccountingReader(prog)
        self._accounting: Accounting | None = None
        self._accounting_ns = 0
        self._losses = LossLog()
        self._asker = os.getpid()
        self._is_local = bool(prog.flags & drgn.ProgramFlags.IS_LOCAL)
        self._moment: tuple[LifeMoment, tuple[str, ...]] | None = None
        self._collector: StackCollector | None = None
        self._delayed = "sched_delayed" in self._threads.columns

    def __repr__(self) -> str:
        """Return one line with the path of the target and the kernel's release."""
        target = describe(self.prog)
        return f"<Kernel of {str(target.path)[-_SHOWN:]!r}, {target.release!r}>"

    def thread(self, tid: int) -> Thread:
        """Return one thread.

        The numbers are the same as of ``msa-prstat --states -L -p TID``.
        """
        return self._asked(tid, lambda: self._thread(tid))

    def process(self, pid: int) -> Process:
        """Return a process: the sums over its threads.

        The numbers are the same as of ``msa-prstat --states -p PID``.

        :param pid: PID of any of its threads.
        """
        return self._asked(pid, lambda: self._process(pid))

    def children(self, pid: int) -> ChildTimes:
        """Return the times of reaped children of a process, as with RUSAGE_CHILDREN.

        The numbers are the same as of ``msa-prstat --children -p PID``.

        :param pid: PID of any thread of the process.
        """
        return self._asked(pid, lambda: self._children(pid))

    def self(self) -> Process:
        """Return the calling process.

        :raises NotThisMachineError: if it runs on another kernel, or in a PID namespace
            other than the initial one
        """
        if not (self.reader.is_live and self._is_local):
            raise NotThisMachineError(
                "self", "not on the kernel that is asked", "ask for a PID"
            )
        initial = self.reader.once(_NAMESPACE, self._initial_namespace)
        if os.stat(_NAMESPACE).st_ino != initial:
            raise NotThisMachineError(
                "self", "in a PID namespace, as in a container", "ask from outside"
            )
        return self.process(os.getpid())

    def _initial_namespace(self) -> int:
        inode: int = find_variable(self.prog, "init_pid_ns").ns.inum.value_()
        return inode

    def _asked(self, pid: int, work: Callable[[], T]) -> T:
        """Do some work with the last known segments of /proc/kcore.

        If they changed meanwhile, or the work failed, do it again with the segments
        checked.
        """
        is_live = self.reader.is_live
        require_id(pid)
        if is_live and self._is_local:
            self._own_file(pid)
        if self._is_local or not is_live:
            try:
                done = work()
            except (*UNREADABLE, NoSuchTaskError):
                pass
            else:
                if not is_live or live.is_unchanged(self.prog):
                    return done
        for left in reversed(range(_TRIES)):
            try:
                with live.steady(self.prog):
                    return work()
            except UNREADABLE as error:
                if not (left and is_live):
                    raise self._unreadable(pid, error) from error
        raise AssertionError("the last attempt returns or raises")

    def _own_file(self, pid: int) -> None:
        """After a fork, open /proc/kcore again: see kcore.open_again()."""
        asker = os.getpid()
        if asker == self._asker:
            return
        try:
            live.open_again(self.prog)
        except OSError as error:
            raise UnreadableTaskError(
                f"pid {pid}",
                f"{KCORE}: {error.strerror}",
                "open the kernel again",
            ) from error
        self._asker = asker

    def _unreadable(self, pid: int, error: drgn.FaultError) -> UnreadableTaskError:
        return UnreadableTaskError(
            f"pid {pid}",
            f"its records cannot be read ({error})",
            "ask again" if self.reader.is_live else "take another dump",
        )

    def _find(self, pid: int) -> int:
        address = find_task(self.reader, pid)
        if address is None:
            raise NoSuchTaskError(
                f"pid {pid}", "no such task", "list them with msa-prstat"
            )
        return address

    def _thread(self, tid: int) -> Thread:
        seen, stack = self._threads.read(self._find(tid), tid)
        task = seen.task
        moment, notes = self._now()
        words = stack if self._threads.has_not_run(seen) else None
        one = life(seen, moment, covered_since((task,), moment))

        def read_now() -> Now:
            return self._now_of(seen, words, moment)

        timers, states = self._times_of((one,), moment, lambda: (read_now(),))
        return Thread(
            taken_at_ns=moment.clocks.monotonic_ns,
            timers=timers,
            states=states,
            notes=notes,
            tid=tid,
            pid=task["tgid"],
            comm=comm_text(task["comm"]),
            lifetime_ns=one.lifetime_ns,
            read_now=read_now,
        )

    def _process(self, pid: int) -> Process:
        losses = LossLog()
        stacks = self._threads.read_process(self._find(pid), losses)
        if losses.lost:
            raise DamagedDataError("; ".join(n.text for n in losses.notes.values()), 0)
        tids = tuple(seen.task["pid"] for seen, _ in stacks)
        if pid not in tids:
            raise DamagedDataError("no task of that PID", 0)
        leader = stacks[0][0]
        counted = self._threads.counts(leader.task["signal"])
        moment, notes = self._now()
        held = [
            (seen, stack if self._threads.has_not_run(seen) else None)
            for seen, stack in stacks
        ]
        since_ns = covered_since((seen.task for seen, _ in held), moment)
        lives = [life(seen, moment, since_ns) for seen, _ in held]

        def read_now() -> tuple[Now, ...]:
            return tuple(self._now_of(*one, moment) for one in held)

        timers, states = self._times_of(lives, moment, read_now)
        ended = counted["sum_exec"]
        ended_user = split_by_ticks(ended, counted["utime"], counted["stime"])
        return Process(
            taken_at_ns=moment.clocks.monotonic_ns,
            timers=timers,
            states=states,
            notes=notes,
            pid=leader.task["tgid"],
            comm=comm_text(leader.task["comm"]),
            tids=tids,
            ended_user_ns=ended_user,
            ended_system_ns=ended - ended_user,
            read_now=read_now,
        )

    def _children(self, pid: int) -> ChildTimes:
        address = self._find(pid)
        task = self._threads.record(address, pid)
        counted = self._threads.counts(task["signal"])
        moment, notes = self._now()
        self._threads.has_not_run(LifeSeen(address, task, False, None))
        user, system = (
            Time(counted[name], "estimate", _WAITED_FOR, f"signal->{name}")
            for name in ("cutime", "cstime")
        )
        none = _NOT_OF_CHILDREN
        return ChildTimes(
            taken_at_ns=moment.clocks.monotonic_ns,
            timers=Timers(user, system, *(none for _ in range(11))),
            states=States(user, system, *(none for _ in range(8))),
            notes=notes,
            pid=task["tgid"],
        )

    @property
    def _stacks(self) -> StackCollector:
        if self._collector is None:
            self._collector = StackCollector(self.reader, LossLog())
        return self._collector

    def _now(self) -> tuple[LifeMoment, tuple[str, ...]]:
        """Read clocks and settings; only once in a dump."""
        if self._moment is not None and not self.reader.is_live:
            return self._moment
        losses = self._losses
        clocks = read_clocks(self.reader, losses)
        accounting = self._read_accounting(losses)
        if not clocks.local_ns:
            raise DamagedDataError("no CPU's clock can be read", 0)
        notes: tuple[str, ...] = ()
        if losses.notes:
            notes = tuple(note.text for note in losses.notes.values())
            self._losses = LossLog()
        self._moment = LifeMoment(clocks, accounting), notes
        return self._moment

    def _read_accounting(self, losses: LossLog) -> Accounting:
        """Return the settings of accounting, at most 0.1 s old.

        They change rarely, and reading them takes a tenth of the time of a query.
        """
        now_ns = time.monotonic_ns()
        if self._accounting is None or now_ns - self._accounting_ns > _ACCOUNTING_NS:
            self._accounting = self._accounting_reader.read(losses)
            self._accounting_ns = now_ns
        return self._accounting

    def _times_of(
        self,
        lives: Sequence[Life],
        moment: LifeMoment,
        read_now: Callable[[], Sequence[Now]],
    ) -> tuple[Timers, States]:
        sums = summed(lives, moment, self._delayed)
        paging, data = self._lasting(sums, read_now)
        times = pasts(sums, moment.accounting, paging, data)
        gelato, solaris = STATES["gelato"].values(), STATES["solaris"].values()
        return (
            Timers(*[time_of(times) for time_of in gelato]),
            States(*[time_of(times) for time_of in solaris]),
        )

    def _lasting(
        self, sums: StateSums, read_now: Callable[[], Sequence[Now]]
    ) -> tuple[int, int]:
        """Return for how many ns current page faults have lasted: all, those on data.

        They are added to the faults that have ended; both are 0 if the kernel does not
        count these.
        """
        if sums.swapped is None:
            return 0, 0
        now = read_now()
        return (
            sum(one.age_ns for one in now if one.timer == "paging_sleep"),
            sum(one.age_ns for one in now if one.state == "dfault"),
        )

    def _now_of(self, seen: LifeSeen, words: bytes | None, moment: LifeMoment) -> Now:
        """Return what a thread was doing, from the data that was read."""
        age_ns, bound = age(seen.task, moment)
        task_class = self._class(seen, words)
        timer = None if task_class is None else GELATO_NOW.get(task_class)
        # A running thread does not sleep, even if its mode is unknown.
        runs = state_class(seen.task) is TaskClass.CPU
        if task_class is not None and timer is None and not runs:
            timer = SLEEPS[bool(seen.task["state"] & UNINTERRUPTIBLE)]
        state = SOLARIS_NOW.get(timer) if timer else None
        if state == "DFAULT" and self._is_on_code(seen, moment):
            state = "TFAULT"
        return Now(
            task_class=task_class.name if task_class is not None else None,
            timer=timer.lower() if timer else None,
            state=state.lower() if state else None,
            age_ns=age_ns,
            age_bound=_BOUNDS[bound],
        )

    def _class(self, seen: LifeSeen, words: bytes | None) -> TaskClass | None:
        task_class = state_class(seen.task)
        if task_class is TaskClass.CPU:
            return running_class(self.prog, seen.address)
        if task_class is not None or words is None:
            return task_class
        stack = self._stacks.unwind(
            seen.address,
            np.frombuffer(words, "<u8").tolist(),
            tuple(seen.task[name] for name in SAVED if name in seen.task),
        )
        return classify(Stacks(self._stacks.text).names(stack)).task_class

    def _is_on_code(self, seen: LifeSeen, moment: LifeMoment) -> bool:
        """Return whether a page fault is on an executable mapping."""
        aside = LossLog()
        tasks = self._threads.table([seen.address], aside)
        now = collect_now(self._stacks, self.prog, tasks, moment.clocks)
        explained = Explainer(self.reader).explain(tasks, now, moment.clocks, aside)
        return any(on is not None and bool(on.text) for on in explained)


# --- The functions of the package ``msatools`` itself.


_NAME = "msatools.query"
"""Key of the :class:`Kernel` in a program's cache."""


def open(
    target: str | os.PathLike[str] | TargetSpec | drgn.Program | None = None,
) -> Kernel:
    """
    Open a kernel for queries.

    >>> kernel = msatools.open("vmcore")
    >>> kernel.process(1).timers.oncpu_usr.ns
    143208118

    :param target: The path of a dump; ``/proc/kcore`` or ``None`` for the running
        kernel; a :class:`msatools.program.TargetSpec` for other targets of the
        commands; or an open program of drgn.
    :raises TargetError: if the target cannot be opened, or its types are not found
    """
    if isinstance(target, drgn.Program):
        return _of(target)
    if not isinstance(target, TargetSpec):
        target = TargetSpec(path=None if target is None else os.fspath(target))
    return _of(open_target(target).prog)


def thread(tid: int) -> Thread:
    """Return one thread of the default kernel: see :meth:`Kernel.thread`.

    The default kernel is drgn's default program, if there is one, as at drgn's prompt;
    else the running kernel, which is opened once.
    """
    require_id(tid)
    return _default_kernel().thread(tid)


def process(pid: int) -> Process:
    """Return one process of the default kernel: see :meth:`Kernel.process`."""
    require_id(pid)
    return _default_kernel().process(pid)


def children(pid: int) -> ChildTimes:
    """Return the times of reaped children: see :meth:`Kernel.children`."""
    require_id(pid)
    return _default_kernel().children(pid)


def self() -> Process:
    """Return the calling process: see :meth:`Kernel.self`."""
    return _default_kernel().self()


def _default_kernel() -> Kernel:
    try:
        return _of(drgn.get_default_prog())
    except drgn.NoDefaultProgramError:
        return _running()


@cache
def _running() -> Kernel:
    return open()


def _of(prog: drgn.Program) -> Kernel:
    kernel: Kernel | None = prog.cache.get(_NAME)
    if kernel is None:
        # Without debug info, this makes the kernel's own BTF provide the types.
        describe(prog)
        kernel = prog.cache[_NAME] = Kernel(prog)
    return kernel
