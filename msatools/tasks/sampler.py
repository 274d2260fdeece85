# SPDX-License-Identifier: LGPL-2.1-or-later

"""Samples of all threads: the class of each thread, and its time in that class.

Samples are cheap: stacks of threads that did not run since the last one are not read.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import UNREADABLE
from msatools.kernel.clocks import Clocks, Nanoseconds, read_clocks
from msatools.kernel.code import stack_trace
from msatools.kernel.reader import LIST_HEAD, U64, Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import NOT_FOUND, Booleans, find_rows
from msatools.program.arch import arch_of
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type, offset_of
from msatools.tasks.accounting import BOUND_NS, Microstates, microstates
from msatools.tasks.stacks import NO_STACK, Stack, StackCollector, Stacks
from msatools.tasks.states import FROZEN, STOPPED, TRACED, WAKING, asleep
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.text import End
from msatools.tasks.unwind import StackMemory, saved_registers
from msatools.tasks.waits import StackWait, TaskClass, are_any, classify

# --- Current class of each thread, and its time in that class (its age).


INTERRUPTS = (
    *("asm_sysvec_", "asm_common_interrupt", "asm_exc_nmi", "asm_spurious"),
    *("el0t_64_irq", "el0t_64_fiq", "el0t_32_irq", "el0t_32_fiq", "el0_irq"),
)
"""Prefixes of the entry points of interrupts: arch/x86/include/asm/idtentry.h and, of
user mode, arch/arm64/kernel/entry.S."""


class AgeBound(IntEnum):
    """Accuracy of an age."""

    EXACT = 0
    UPPER = 1
    """The age is an upper bound: it may include earlier classes."""
    ESTIMATE = 2
    """The age is by the clock of a CPU that may have lagged."""


class TaskState(Struct, frozen=True, dict=True):
    """Class, age and stack of each thread; arrays have one value for each."""

    classes: npt.NDArray[np.uint8]
    """Members of :class:`TaskClass`."""

    age_ns: Nanoseconds
    """Time in the current class."""

    age_bound: npt.NDArray[np.uint8]
    """Members of :class:`AgeBound`."""

    stacks: Stacks
    """Stacks of living threads off the CPU; others have :data:`.NO_STACK`."""

    waits: tuple[StackWait, ...]
    """The wait of each unique stack, in the order of ``stacks.unique``."""

    @cached_property
    def slept_in(self) -> npt.NDArray[np.uint8]:
        """The class of each thread's sleep, also if it was woken but has not run."""
        by_stack = np.array([wait.task_class for wait in self.waits], np.uint8)
        return np.where(self.woken, by_stack[self.stacks.index], self.classes)

    @cached_property
    def woken(self) -> Booleans:
        """Whether each thread has been woken, and has not run since."""
        slept = np.array([not wait.preempted for wait in self.waits], np.bool_)
        awake = are_any(self.classes, (TaskClass.WAK, TaskClass.LAT))
        woken: Booleans = awake & slept[self.stacks.index]
        return woken


def collect_now(
    collector: StackCollector, prog: drgn.Program, tasks: TaskTable, clocks: Clocks
) -> TaskState:
    """Return the current class, age and stack of each thread.

    :param collector: unwinds the stacks of this kernel
    """
    off = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0)
    stacks = collector.collect(
        tasks["address"],
        np.where(off, tasks["stack"], 0).astype(np.uint64),
        saved_registers(tasks),
    )
    waits = tuple(classify(stacks.names(stack)) for stack in stacks.unique)
    by_stack = np.array([wait.task_class for wait in waits], np.uint8)
    classes = by_stack[stacks.index]
    classes[(tasks["state"] & TRACED) != 0] = TaskClass.TRC.value
    classes[(tasks["state"] & (STOPPED | FROZEN)) != 0] = TaskClass.STP.value
    classes[tasks["state"] == 0] = TaskClass.LAT.value
    classes[(tasks["state"] & WAKING) != 0] = TaskClass.WAK.value
    for row in np.flatnonzero(runs(tasks)).tolist():
        classes[row] = running_class(prog, int(tasks["address"][row]))
    classes[tasks["exit_state"] != 0] = TaskClass.ZMB.value
    age, bound = ages(tasks, clocks, classes)
    return TaskState(classes, age, bound, stacks, waits)


def runs(tasks: TaskTable) -> Booleans:
    """Return which threads are on a CPU."""
    found: Booleans = (tasks["on_cpu"] != 0) & (tasks["exit_state"] == 0)
    return found


def running_class(prog: drgn.Program, task: int) -> TaskClass:
    """Return the class of a running thread (USR, SYS or INT), by registers in a dump.

    :param task: address of the ``struct task_struct`` of a thread that runs
    :return: :attr:`TaskClass.CPU` on a live kernel, :attr:`TaskClass.OTH` if the dump
        lacks the registers.
    """
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return TaskClass.CPU
    frames = running_frames(prog, task)
    if not frames:
        return TaskClass.OTH
    if frames[0][0] < KERNEL_HALF:
        return TaskClass.USR
    kernel = [name for pc, name in frames if pc >= KERNEL_HALF]
    over_user = any(pc < KERNEL_HALF for pc, _ in frames)
    if over_user and kernel[-1].startswith(INTERRUPTS):
        return TaskClass.INT
    return TaskClass.SYS


def running_frames(
    prog: drgn.Program, task: int, losses: LossLog | None = None
) -> list[tuple[int, str]]:
    """Return the frames of a running task, by its registers in a dump.

    :param task: address of its ``struct task_struct``
    :param losses: As in :func:`.stack_trace`.
    :return: Program counter and function of each frame, the innermost first; empty
        without registers, as on a live kernel.
    """
    trace = stack_trace(prog, task, losses) or ()
    return [(frame.pc, frame.name or "") for frame in trace if not frame.is_inline]


def ages(
    tasks: TaskTable, clocks: Clocks, classes: npt.NDArray[np.uint8]
) -> tuple[Nanoseconds, npt.NDArray[np.uint8]]:
    """Return each thread's time in its class, in ns, and its :class:`AgeBound`.

    ``exec_start`` is the time at which a thread was last on a CPU (update_curr()), by
    the task clock of that CPU. Every kernel has it.
    """
    now_task = clocks.task_clock_ns(tasks["cpu"])
    since = tasks["exec_start_ns"].astype(np.int64)
    arrival = tasks["last_arrival_ns"].astype(np.int64)
    age = now_task - since
    bound = np.full(len(since), AgeBound.EXACT.value, np.uint8)
    # Moving a delayed sleeper to another CPU clears exec_start (v6.12).
    lost = since == 0
    age[lost] = (clocks.local_ns - arrival)[lost]
    bound[lost] = AgeBound.UPPER.value
    on_cpu = runs(tasks)
    age[on_cpu] = (clocks.local_ns - arrival)[on_cpu]
    queued = tasks["last_queued_ns"].astype(np.int64)
    waits = (classes == TaskClass.LAT.value) & (queued != 0)
    age[waits] = (clocks.local_ns - queued)[waits]
    # last_queued of a delayed sleeper may be from before its sleep.
    delays = tasks.has("sched_delayed")
    bound[waits] = AgeBound.UPPER.value if delays else AgeBound.EXACT.value
    # The time of the wakeup is not recorded.
    bound[classes == TaskClass.WAK.value] = AgeBound.UPPER.value
    # sleep_start of a delayed sleeper is set only when it leaves the run queue.
    stamped = lost if delays else asleep(tasks)
    for column in ("sleep_start_ns", "block_start_ns"):
        if tasks.has(column):
            # Set only while schedstats are enabled; by the run queue's clock.
            start = tasks[column].astype(np.int64)
            kept = (start != 0) & stamped & asleep(tasks)
            age[kept] = (clocks.local_ns - start)[kept]
            bound[kept] = AgeBound.EXACT.value
    bound[classes == TaskClass.ZMB.value] = AgeBound.ESTIMATE.value
    if clocks.monotonic_offset_ns is not None:
        # Clocks differ, and times in a damaged dump may have any value.
        started = tasks["start_ns"].astype(np.int64) + clocks.monotonic_offset_ns
        age = np.minimum(age, clocks.local_ns - started)
    return np.maximum(age, 0), bound


# --- Samples of all threads; match the threads of two samples. Pure.


NOBODY = NOT_FOUND
"""Stands for the row of a thread that is not in the earlier table."""

Rows = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]
Values = npt.NDArray[Any]


class TaskSample(Struct, frozen=True):
    """All threads at one moment."""

    tasks: TaskTable
    clocks: Clocks
    states: Microstates
    now: TaskState
    class_known: Booleans
    """Whether each thread's class is known: not if it ran while it was read."""

    on_code: Booleans
    """Whether each thread is in a page fault on program code."""

    took_ns: int
    """Time from the start of the sample until the kernel's clocks were read, by this
    program's clock: threads created in this time may be missing."""


def match(before: TaskTable, after: TaskTable) -> Rows:
    """Return the row in *before* of each thread of *after*; :data:`NOBODY` if none."""
    row = find_rows(before["address"], after["address"])
    if not len(before):
        return row
    same = (before["pid"][row] == after["pid"]) & (
        before["start_ns"][row] == after["start_ns"]
    )
    # A thread that calls exec() takes the leader's position (de_thread()).
    follows = ~before.leaders[row] & after.leaders
    same |= follows & (before["tgid"][row] == after["tgid"])
    return np.where(same, row, NOBODY)


def cpu_of(sample: TaskSample) -> Nanoseconds:
    """Return each thread's CPU time since it started, in ns."""
    return sample.states.user_ns + sample.states.system_ns


# --- Take samples of all threads.
#
# A sample reads every struct task_struct. The stack of a thread that slept, and was not
# switched since the last sample, is unchanged: it is not read again.


USUAL_SHARE, MAX_SHARE = 0.1, 0.25
"""Default and maximum share of one CPU that samples may take: if they cost more, fewer
are taken. A tenth allows some twenty samples a second of a hundred threads."""

MAX_HZ = 20.0
"""Number of samples a second by default: more would add little."""

_WALKS = 3
"""Maximum attempts to walk the lists of tasks, which change on a running kernel."""

_MANY, _FEW = 256, 16
"""Number of tasks in a batch: large for tasks that have been off the CPU for long, as
each batch has a fixed cost; small for tasks that were on a CPU lately."""

_QUIET_NS = 1_000_000_000
"""Minimum time off the CPU of a task in a large batch."""

_SPARE_STACKS = 1024
"""Maximum number of stacks that are kept although no thread has them any more."""


def share_of_samples(asked: float | None) -> float:
    """Return the share of one CPU that samples may take.

    :param asked: What the user asked for; ``None`` for the usual share.
    """
    return USUAL_SHARE if asked is None else min(asked, MAX_SHARE)


Indices = npt.NDArray[np.int32]

_WHOLE = (End.ENTRY, End.START)


class Sampler:
    """Takes samples of the threads of one kernel; of a dump only one.

    :param hz: Samples a second within an interval; 0 for none, ``None`` for
        :data:`MAX_HZ`.
    :param share: The share of one CPU that samples may take; ``None`` for
        :data:`USUAL_SHARE`.
    :param bound_ns: Maximum difference of the CPUs' clocks, in ns.
    :param read: Reads the table of threads; by default of all.
    :param on_code: Returns for given rows whether the threads' page faults are on code.
    """

    def __init__(
        self,
        reader: Reader,
        losses: LossLog,
        *,
        hz: float | None = 0,
        share: float | None = None,
        bound_ns: int = BOUND_NS,
        read: Callable[[LossLog], TaskTable] | None = None,
        on_code: Callable[[TaskTable, TaskState, Clocks, Rows], Booleans] | None = None,
    ) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._live = reader.is_live
        self._losses = losses
        self.task_reader = TaskReader(reader)
        self._read = read or self.task_reader.read_all
        self._on_code = on_code
        self.collector = _Collector(reader, losses)
        self._hz = MAX_HZ if hz is None else hz
        self._share = share_of_samples(share)
        self._bound_ns = bound_ns
        self._cost_s = 0.0
        self._last: TaskSample | None = None
        self._settled: Booleans = np.zeros(0, np.bool_)
        self._stacks = _Stacks()
        # The first reading of clocks is slow, and would make the first sample late.
        read_clocks(reader, LossLog())

    @property
    def period_s(self) -> float | None:
        """Seconds from one sample to the next, longer if samples cost much CPU time;
        ``None`` if there are no samples within an interval."""
        if self._hz <= 0:
            return None
        return max(1 / self._hz, self._cost_s / self._share)

    def sample(self) -> TaskSample:
        """Read all threads; unwind the stacks that may be new since the last sample."""
        began_s, began_ns = time.process_time(), time.monotonic_ns()
        tasks = self._walk()
        row = self._unswitched(tasks)
        settled = np.ones(len(tasks), np.bool_)
        if self._live:
            tasks, row, settled = self._refresh(tasks, row)
        clocks = self._clocks(tasks)
        took_ns = time.monotonic_ns() - began_ns
        changed = row == NOBODY
        # If all have changed, none is copied: a copy takes half a KiB a thread.
        part = tasks if changed.all() else tasks.only(changed)
        seen = collect_now(self.collector, self._prog, part, clocks)
        self.collector.release()
        known = settled | ~asleep(tasks)
        # The class of a thread that ran since its stack was read is known if the stack
        # is whole, unless it waited for a CPU then and sleeps now.
        whole = _is_whole(seen.stacks)
        known[changed] |= whole & (seen.classes != TaskClass.LAT)
        known[changed] &= whole | ~seen.woken
        self._losses.coverage["classes_untold"] += int(np.count_nonzero(~known))

        classes = np.zeros(len(tasks), np.uint8)
        index: Indices = np.zeros(len(tasks), np.int32)
        if self._last is not None:
            classes[~changed] = self._last.now.classes[row[~changed]]
            index[~changed] = self._last.now.stacks.index[row[~changed]]
        classes[changed] = seen.classes
        index[changed] = self._stacks.add(seen)[seen.stacks.index]
        index = self._stacks.forget(index)
        age, bound = ages(tasks, clocks, classes)
        unique, waits = self._stacks.all()
        stacks = Stacks(self.collector.text, unique, index, seen.stacks.asked)
        now = TaskState(classes, age, bound, stacks, waits)
        sample = TaskSample(
            tasks,
            clocks,
            microstates(tasks, clocks, self._bound_ns),
            now,
            known,
            self._code_faults(tasks, now, clocks, row),
            took_ns,
        )
        if self._last is not None:
            # The first sample costs more than later ones.
            self._cost_s = time.process_time() - began_s
        self._last, self._settled = sample, settled & _rests(tasks)
        return sample

    def _code_faults(
        self, tasks: TaskTable, now: TaskState, clocks: Clocks, row: Rows
    ) -> Booleans:
        """Return which threads' page faults are on code; sleepers keep their result."""
        on_code = np.zeros(len(tasks), np.bool_)
        faults = are_any(now.slept_in, (TaskClass.FLT, TaskClass.SWP))
        if self._on_code is None or not faults.any():
            return on_code
        rests = row != NOBODY
        if self._last is not None:
            on_code[rests] = self._last.on_code[row[rests]]
        rows = np.flatnonzero(faults & ~rests)
        on_code[rows] = self._on_code(tasks, now, clocks, rows)
        return on_code

    def _clocks(self, tasks: TaskTable) -> Clocks:
        clocks = read_clocks(self._reader, self._losses)
        if len(clocks.behind_ns) or not len(tasks):
            return clocks
        self._losses.note(
            "clocks-lost",
            "no CPU's clock can be read: now is when a thread last came to a CPU",
        )
        return replace(clocks, local_ns=int(tasks["last_arrival_ns"].max()))

    def _walk(self) -> TaskTable:
        """Read every thread; read all again if a list changed during the walk."""
        for left in reversed(range(_WALKS)):
            losses = LossLog()
            tasks = self._read(losses)
            if not (self._live and left and losses.coverage["lists_broken"]):
                break
            self._losses.coverage["walks_retried"] += 1
        self._losses.add(losses)
        return tasks

    def _unswitched(self, tasks: TaskTable) -> Rows:
        """Return the row in the last sample of each thread that has slept or been dead
        since then; else :data:`NOBODY`."""
        if self._last is None or not len(self._last.tasks):
            return np.full(len(tasks), NOBODY, np.intp)
        last = self._last.tasks
        row = match(last, tasks)
        there = (row != NOBODY) & self._settled[row]
        there[there] = _same(last.only(row[there]), tasks.only(there))
        return np.where(there, row, NOBODY)

    def _refresh(self, tasks: TaskTable, row: Rows) -> tuple[TaskTable, Rows, Booleans]:
        """Read in batches the stacks that may have changed, and their threads again.

        :return: The threads that still exist, their rows in the last sample, and which
            of them did not run while their stacks were read.
        """
        settled = (row != NOBODY) | (tasks["exit_state"] != 0)
        held: list[Rows] = []
        switches: list[int] = []
        again: list[tuple[int, bytes]] = []
        # A thread that ended meanwhile is not counted as unreadable.
        aside = LossLog()
        for part in _batches(tasks, np.flatnonzero(~settled)):
            addresses = tasks["address"][part].tolist()
            stacks = tasks["stack"][part].tolist()
            switches += self.collector.hold(addresses, stacks)
            again += self.task_reader.read_each(addresses, aside)
            held.append(part)
        if not held:
            return tasks, row, settled
        # Decoding costs less for all of them at once.
        rows = np.concatenate(held)
        fresh, there = self._decoded_again(tasks, rows, again)
        stays = np.ones(len(tasks), np.bool_)
        stays[rows[~there]] = False
        before = np.array(switches, np.int64)[there]
        rows = rows[there]
        tasks.records[rows] = fresh.records
        settled[rows] = asleep(fresh) & (before == _switches(fresh))
        settled |= tasks["exit_state"] != 0
        if stays.all():
            return tasks, row, settled
        self._losses.coverage["tasks_gone"] += int(np.count_nonzero(~stays))
        return tasks.only(stays), row[stays], settled[stays]

    def _decoded_again(
        self, tasks: TaskTable, rows: Rows, again: Sequence[tuple[int, bytes]]
    ) -> tuple[TaskTable, Booleans]:
        """Return the threads that were read again and still exist, and which they are.

        The memory of an ended thread may have been reused.

        :param again: Address and memory of the threads of *rows* that could be read, in
            their order.
        """
        fresh = self.task_reader.table(again, LossLog())
        there = np.isin(tasks["address"][rows], fresh["address"])
        own = np.ones(len(fresh), np.bool_)
        for column in ("pid", "tgid", "start_ns"):
            own &= fresh[column] == tasks[column][rows[there]]
        there[there] = own
        return fresh.only(own), there


def _batches(tasks: TaskTable, rows: Rows) -> Iterator[Rows]:
    """Yield *rows* in batches, those of the longest sleepers first.

    Threads that run or wait for a CPU come last, as their time counts up to now, which
    the clocks that are read next define.
    """
    last_ran = tasks["exec_start_ns"][rows].astype(np.int64)
    last_ran[~asleep(tasks)[rows]] = np.iinfo(np.int64).max
    order = np.argsort(last_ran, kind="stable")
    rows, last_ran = rows[order], last_ran[order]
    newest = int(tasks["exec_start_ns"].max(initial=0))
    quiet = int(np.searchsorted(last_ran, newest - _QUIET_NS))
    for start in range(0, quiet, _MANY):
        yield rows[start : min(start + _MANY, quiet)]
    for start in range(quiet, len(rows), _FEW):
        yield rows[start : start + _FEW]


def _rests(tasks: TaskTable) -> Booleans:
    """Return which threads sleep or are dead."""
    rests: Booleans = asleep(tasks) | (tasks["exit_state"] != 0)
    return rests


def _switches(tasks: TaskTable) -> Counts:
    switches: Counts = (tasks["nvcsw"] + tasks["nivcsw"]).astype(np.int64)
    return switches


def _same(before: TaskTable, after: TaskTable) -> Booleans:
    """Return which threads sleep on or stay dead; the tables have the same threads."""
    same = _rests(before) & _rests(after)
    for column in ("state", "exit_state", "nvcsw", "nivcsw"):
        same &= before[column] == after[column]
    return same


_WORDS = {1: U64, 2: LIST_HEAD}
"""Formats to unpack one and two 64-bit words."""


class _Collector(StackCollector):
    """Collects stacks, also from memory that :meth:`hold` has read before.

    On a running kernel a stack has to be read right after its stack pointer. Unwinding
    can wait, and costs less for many stacks at once.
    """

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        super().__init__(reader, losses)
        self._memory = reader
        self._held: dict[int, tuple[Addresses, Addresses]] = {}
        """Maps the start of a stack to its saved registers, and the words from the
        stack pointer on."""

        task = find_type(reader.prog, "struct task_struct")
        first, second = sorted(offset_of(task, n) for n in ("nvcsw", "nivcsw"))
        # One read, unless the members of the structure are shuffled.
        follow = second == first + 8
        self._counts = ((first, 2),) if follow else ((first, 1), (second, 1))
        saved = arch_of(reader.prog).saved_registers if self.is_fast else ()
        self._saved = tuple(offset_of(task, name) for name in saved)

    def hold(self, tasks: Sequence[int], stacks: Sequence[int]) -> list[int]:
        """Read the stacks of some threads, to be unwound later.

        :param tasks: Addresses of their ``struct task_struct``.
        :param stacks: ``task_struct.stack`` of each; 0 if it has none.
        :return: Each thread's context switches before the read; -1 if unreadable.
        """
        switches = [-1] * len(tasks)
        for row, (address, stack) in enumerate(zip(tasks, stacks, strict=True)):
            with contextlib.suppress(*UNREADABLE):
                # Without numpy: for two words its calls would cost more than the reads.
                switches[row] = sum(
                    sum(
                        _WORDS[count].unpack(
                            self._memory.read(address + start, 8 * count)
                        )
                    )
                    for start, count in self._counts
                )
                if stack and self._saved:
                    self._hold_stack(stack, address)
        return switches

    def _hold_stack(self, stack: int, task: int) -> None:
        """Read a stack from its saved stack pointer on, if that is plausible."""
        first, end = min(self._saved), max(self._saved) + 8
        data = self._memory.read(task + first, end - first)
        saved = [U64.unpack_from(data, offset - first)[0] for offset in self._saved]
        pointer = saved[0]
        size = stack + self.stack_bytes - pointer
        if pointer % 8 == 0 and 0 < size <= self.stack_bytes:
            words = self._memory.words(pointer, size // 8)
            self._held[stack] = np.array(saved, np.uint64), words

    def release(self) -> None:
        self._held = {}

    def read(self, stacks: Addresses, saved: Addresses) -> StackMemory:
        if not self._held:
            return super().read(stacks, saved)
        no_words = np.empty(0, np.uint64)
        none = np.zeros(max(len(self._saved), 1), np.uint64), no_words
        held = [self._held.get(stack, none) for stack in stacks.tolist()]
        kept = np.stack([registers for registers, _ in held])
        lengths = np.array([len(words) for _, words in held], np.intp)
        return StackMemory(
            words=np.concatenate([no_words, *(words for _, words in held)]),
            first=np.cumsum(lengths) - lengths,
            base=np.ascontiguousarray(kept[:, 0]),
            size=8 * lengths.astype(np.uint64),
            saved=kept,
        )


class _Stacks:
    """All stacks seen so far, and the wait that each shows; the first is NO_STACK."""

    def __init__(self) -> None:
        self._index: dict[Stack, int] = {NO_STACK: 0}
        self._waits: list[StackWait] = [classify(())]

    def all(self) -> tuple[list[Stack], tuple[StackWait, ...]]:
        return list(self._index), tuple(self._waits)

    def add(self, seen: TaskState) -> Indices:
        """Add the new ones of ``seen.stacks.unique``; return the index of each."""
        for stack, wait in zip(seen.stacks.unique, seen.waits, strict=True):
            if stack not in self._index:
                self._index[stack] = len(self._waits)
                self._waits.append(wait)
        return np.array([self._index[stack] for stack in seen.stacks.unique], np.int32)

    def forget(self, index: Indices) -> Indices:
        """Forget unused stacks if there are many; return each thread's new index."""
        if len(self._waits) <= _SPARE_STACKS:
            return index
        used, index_of_used = np.unique(np.append(index, 0), return_inverse=True)
        if len(self._waits) - len(used) <= _SPARE_STACKS:
            return index
        stacks = list(self._index)
        self._waits = [self._waits[old] for old in used.tolist()]
        self._index = {stacks[old]: new for new, old in enumerate(used.tolist())}
        return index_of_used[:-1].astype(np.int32)


def _is_whole(stacks: Stacks) -> Booleans:
    """Return whether each thread's stack was unwound to its outermost frame."""
    whole = np.array([stack.end in _WHOLE for stack in stacks.unique], np.bool_)
    return whole[stacks.index]
