# SPDX-License-Identifier: LGPL-2.1-or-later

"""Decompose the lifetime of one thread, from its record and its stack."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import drgn
import numpy as np

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.clocks import Accounting, Clocks
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import MAX_PLAUSIBLE, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Decoder
from msatools.prstat.states import (
    SCHED_DEADLINE,
    SLEEP_STAMPS,
    SLEEP_SUMS,
    Known,
    StateSums,
    known_sum,
)
from msatools.selfdesc.find import find_type, offset_of
from msatools.tasks.accounting import bound_of, read_delay, read_process
from msatools.tasks.sampler import AgeBound
from msatools.tasks.states import (
    INTERRUPTIBLE,
    STOPPED,
    TRACED,
    UNINTERRUPTIBLE,
    WAKING,
    read_one_in_iowait,
)
from msatools.tasks.table import COUNTS, PF_KTHREAD, TaskReader, TaskTable
from msatools.tasks.unwind import stack_bytes
from msatools.tasks.waits import TaskClass

# --- Decompose the lifetime of one thread. Pure.
#
# msatools.tasks.accounting, msatools.prstat.states and msatools.tasks.sampler compute
# the same for many threads, and explain it. For one thread it takes 342 us with arrays
# of one element, and 14 us with plain numbers. A test compares the two for threads of
# all kinds.


Record = Mapping[str, Any]
"""Columns of :mod:`msatools.tasks.table` that the kernel has."""

_STATISTICS = frozenset((*SLEEP_SUMS, *SLEEP_STAMPS))


class LifeSeen(NamedTuple):
    """The data read of a thread."""

    address: int
    """Address of its ``struct task_struct``."""

    task: Record
    in_iowait: bool
    delays: Mapping[str, Any] | None
    """Its ``struct task_delay_info``; ``None`` if the kernel keeps none for it."""


class Life(NamedTuple):
    """Times of one thread, in nanoseconds; ``None`` if unknown."""

    user_ns: int
    system_ns: int
    latency_ns: int
    off_cpu_ns: int
    """Time off the CPU, without interrupts."""

    zombie_ns: int
    lifetime_ns: int
    interrupted_ns: int | None
    sleep_ns: int | None
    """Time in interruptible sleep."""

    blocked_ns: int | None
    """Time in uninterruptible sleep."""

    stopped_ns: int | None
    swapped_ns: int | None
    unexplained_ns: int | None
    """Time off the CPU for no known reason; ``None`` without statistics of sleeps."""


class _Columns(NamedTuple):
    """The fields of :class:`Life` for several threads, one element per thread."""

    user_ns: Sequence[int]
    system_ns: Sequence[int]
    latency_ns: Sequence[int]
    off_cpu_ns: Sequence[int]
    zombie_ns: Sequence[int]
    lifetime_ns: Sequence[int]
    interrupted_ns: Sequence[int | None]
    sleep_ns: Sequence[int | None]
    blocked_ns: Sequence[int | None]
    stopped_ns: Sequence[int | None]
    swapped_ns: Sequence[int | None]
    unexplained_ns: Sequence[int | None]


class LifeMoment(NamedTuple):
    """Clocks and settings, which are common to all threads."""

    clocks: Clocks
    accounting: Accounting

    def task_clock_ns(self, cpu: int) -> int:
        """Return the task clock of a CPU, in ns."""
        behind = self.clocks.behind_ns
        known = cpu < len(behind)
        return self.clocks.local_ns - (int(behind[cpu]) if known else 0)

    def started_ns(self, task: Record) -> int:
        """Return the start time of a thread, by the local clock."""
        started: int = task["start_ns"] + (self.clocks.monotonic_offset_ns or 0)
        return started


def state_class(task: Record) -> TaskClass | None:
    """Return the class of a thread, if its state determines it.

    :return: ``None`` if the thread sleeps: the class depends on its stack. ``CPU`` if
        it runs: the mode depends on its registers.
    """
    if task["exit_state"]:
        return TaskClass.ZMB
    if task["on_cpu"]:
        return TaskClass.CPU
    state = task["state"]
    if state & WAKING:
        return TaskClass.WAK
    if not state:
        return TaskClass.LAT
    if state & STOPPED:
        return TaskClass.STP
    return TaskClass.TRC if state & TRACED else None


def age(task: Record, moment: LifeMoment) -> tuple[int, AgeBound]:
    """Return how long a thread has been in its class, in ns, and how exact it is."""
    clocks = moment.clocks
    local, since = clocks.local_ns, task["exec_start_ns"]
    delays = "sched_delayed" in task
    task_class = state_class(task)
    age_ns, bound = moment.task_clock_ns(task["cpu"]) - since, AgeBound.EXACT
    if not since:
        age_ns, bound = local - task["last_arrival_ns"], AgeBound.UPPER
    if task_class is TaskClass.CPU:
        age_ns = local - task["last_arrival_ns"]
    elif task_class is TaskClass.LAT and task["last_queued_ns"]:
        age_ns = local - task["last_queued_ns"]
        bound = AgeBound.UPPER if delays else AgeBound.EXACT
    elif task_class is TaskClass.WAK:
        bound = AgeBound.UPPER
    if _asleep(task) and (not since or not delays):
        for column in SLEEP_STAMPS:
            if task.get(column):
                age_ns, bound = local - task[column], AgeBound.EXACT
    if task_class is TaskClass.ZMB:
        bound = AgeBound.ESTIMATE
    if clocks.monotonic_offset_ns is not None:
        age_ns = min(age_ns, local - moment.started_ns(task))
    return max(age_ns, 0), bound


def covered_since(tasks: Iterable[Record], moment: LifeMoment) -> int | None:
    """Return the earliest time at which schedstats are known to have been enabled.

    :return: The earliest start of a sleep that was recorded; ``None`` if there is none.
    """
    if not moment.accounting.schedstats or moment.clocks.monotonic_offset_ns is None:
        return None
    bound = bound_of(moment.accounting)
    stamps = (
        (task.get(column), task["exec_start_ns"])
        for task in tasks
        if _asleep(task)
        for column in SLEEP_STAMPS
    )
    return min(
        (stamp for stamp, ran in stamps if stamp and stamp >= ran - bound),
        default=None,
    )


def life(seen: LifeSeen, moment: LifeMoment, since_ns: int | None) -> Life:
    """Decompose one thread's life up to now.

    :param since_ns: see :func:`covered_since`
    """
    task, accounting, bound = seen.task, moment.accounting, bound_of(moment.accounting)
    local = moment.clocks.local_ns
    now_task = moment.task_clock_ns(task["cpu"])
    delayed = "sched_delayed" in task
    dead = bool(task["exit_state"])
    exec_start = task["exec_start_ns"]
    cpu = task["sum_exec_ns"]
    if task["on_cpu"] and not dead:
        cpu += max(now_task - exec_start, 0)
    lifetime = max(local - moment.started_ns(task), 0)
    zombie = min(max(now_task - exec_start, 0), lifetime) if dead else 0
    latency = task["run_delay_ns"]
    if _waits_for_cpu(task) and task["last_queued_ns"]:
        latency += max(local - task["last_queued_ns"], 0)
    latency = min(latency, max(lifetime - cpu - zombie, 0))
    cpu = min(cpu, lifetime)
    zombie = min(zombie, lifetime - cpu)
    off_cpu = lifetime - zombie - cpu - latency

    kinds = _sleeps(seen, moment)
    slept = sum(kinds) if kinds else 0
    if delayed:
        twice = min(max(slept - off_cpu, 0), latency)
        latency, off_cpu = latency - twice, off_cpu + twice
    interrupted = swapped = None
    if seen.delays is not None:
        if accounting.irq_time and seen.delays.get("irq_ns", off_cpu + 1) <= off_cpu:
            interrupted = seen.delays["irq_ns"]
        swapped = seen.delays.get("swapin_ns")
        if swapped is not None and swapped > lifetime - zombie + bound:
            swapped = None
    off_cpu -= interrupted or 0
    left = off_cpu - slept
    if kinds and (left < -bound or min(kinds) < 0):
        kinds = None
    stopped = None
    if kinds:
        if task["flags"] & PF_KTHREAD or left <= bound:
            stopped = 0
        elif (
            since_ns is not None
            and moment.started_ns(task) >= since_ns
            and task["policy"] != SCHED_DEADLINE
            and not (accounting.irq_time and interrupted is None)
            and not delayed
        ):
            stopped = left
    user = 0
    if not task["flags"] & PF_KTHREAD:
        user = split_by_ticks(cpu, task["utime_ns"], task["stime_ns"])
    return Life(
        user_ns=user,
        system_ns=cpu - user,
        latency_ns=latency,
        off_cpu_ns=off_cpu,
        zombie_ns=zombie,
        lifetime_ns=lifetime,
        interrupted_ns=interrupted,
        sleep_ns=kinds[0] if kinds else None,
        blocked_ns=kinds[1] + kinds[2] if kinds else None,
        stopped_ns=stopped,
        swapped_ns=swapped,
        unexplained_ns=left if kinds else None,
    )


def summed(
    lives: Sequence[Life], moment: LifeMoment, latency_is_bound: bool
) -> StateSums:
    """Sum up the lives of some threads.

    :param latency_is_bound: whether latency may include sleep
    """
    # Usually there is just one thread.
    columns = _Columns(*zip(*lives, strict=True))
    whole = not latency_is_bound
    if whole:
        bound = bound_of(moment.accounting)
        pairs = zip(columns.unexplained_ns, columns.stopped_ns, strict=True)
        whole = all((left or 0) - (stopped or 0) <= bound for left, stopped in pairs)

    def slept(known: Known) -> Known:
        return known if known is None or whole else (known[0], "lower")

    return StateSums(
        user_ns=sum(columns.user_ns),
        system_ns=sum(columns.system_ns),
        latency_ns=sum(columns.latency_ns),
        off_cpu_ns=sum(columns.off_cpu_ns),
        zombie_ns=sum(columns.zombie_ns),
        latency_is_bound=latency_is_bound,
        interrupted=known_sum(columns.interrupted_ns),
        interruptible=slept(known_sum(columns.sleep_ns)),
        uninterruptible=slept(known_sum(columns.blocked_ns)),
        stopped=_stopped(columns.unexplained_ns, columns.stopped_ns),
        swapped=known_sum(columns.swapped_ns),
    )


def _stopped(
    unexplained_ns: Sequence[int | None], stopped_ns: Sequence[int | None]
) -> Known:
    if None in unexplained_ns:
        return None
    pairs = zip(unexplained_ns, stopped_ns, strict=True)
    total = sum(
        max(left or 0, 0) if stopped is None else stopped for left, stopped in pairs
    )
    return total, "upper" if None in stopped_ns else "exact"


def _sleeps(seen: LifeSeen, moment: LifeMoment) -> list[int] | None:
    """Return the ns asleep: interruptible, blocked, I/O wait; ``None``: unknown."""
    task = seen.task
    if not task.keys() >= _STATISTICS:
        return None
    total, block, iowait = (task[column] for column in SLEEP_SUMS)
    if not total and not moment.accounting.schedstats:
        return None
    kinds = [total - block, block - iowait, iowait]
    if _asleep(task):
        if task["state"] & UNINTERRUPTIBLE:
            kinds[2 if seen.in_iowait else 1] += age(task, moment)[0]
        elif task["state"] & INTERRUPTIBLE:
            kinds[0] += age(task, moment)[0]
    return kinds


def _asleep(task: Record) -> bool:
    return bool(task["state"]) and not task["on_cpu"] and not task["exit_state"]


def _waits_for_cpu(task: Record) -> bool:
    runs = task["state"] or task["on_cpu"] or task["exit_state"]
    return bool(task["on_rq"]) and not runs and not task.get("sched_delayed")


def split_by_ticks(cpu_ns: int, utime_ns: int, stime_ns: int) -> int:
    """Return the part of the CPU time in user mode, in ns, as user_time() does."""
    # With floating point, to get exactly the same result.
    utime = float(utime_ns)
    ticks = utime + float(stime_ns)
    return min(int(cpu_ns * (utime / ticks)), cpu_ns) if ticks > 0 else cpu_ns


# --- Reads the records and stacks of single threads, and checks them.


_SWITCHES = ("nvcsw", "nivcsw")
_switches = itemgetter(*_SWITCHES)
_AGAIN = {"pid": "i4", **dict.fromkeys(_SWITCHES, "u8")}
"""Columns that are read again to see whether a thread has moved on."""


class ThreadReader:
    """Reads threads of one kernel."""

    def __init__(self, reader: Reader) -> None:
        """
        :raises MissingError: if the types of tasks are missing
        """
        self._reader = reader
        self._tasks = TaskReader(reader)
        self.columns: Collection[str] = self._tasks.columns
        """Columns of :mod:`msatools.tasks.table` that the kernel has."""

        self._times = itemgetter(
            *(name for name in self.columns if name in COUNTS or name.endswith("_ns"))
        )
        self._stack_bytes = stack_bytes(reader.prog)
        self._again = _again(reader.prog)

    def read(self, address: int, pid: int) -> tuple[LifeSeen, bytes]:
        """Read a thread and its stack: see :meth:`record` and :meth:`_stack`."""
        task = self.record(address, pid)
        return self._see(address, task), self._stack(task)

    def record(self, address: int, pid: int) -> Record:
        """
        Read the record of a thread.

        :param address: Address of its ``struct task_struct``.
        :raises UNREADABLE: if it is damaged, or does not have the PID
        """
        task = self._tasks.read_one(address)
        self._check(address, task)
        if task["pid"] != pid:
            raise DamagedDataError("no task of that PID", address)
        return task

    def read_process(
        self, address: int, losses: LossLog
    ) -> list[tuple[LifeSeen, bytes]]:
        """
        Read all threads of a process, the leader first, and their stacks.

        :param address: Address of the ``struct task_struct`` of any of its threads.
        :raises drgn.FaultError: if one of them is damaged
        """
        found = []
        for thread, task in self._tasks.read_threads(address, losses):
            self._check(thread, task)
            found.append((self._see(thread, task), self._stack(task)))
        return found

    def table(self, addresses: Iterable[int], losses: LossLog) -> TaskTable:
        """Read some tasks as a table."""
        return self._tasks.read([*addresses], losses)

    def counts(self, signal: int) -> Any:
        """Return the counts of a process, by its ``struct signal_struct``.

        :raises UNREADABLE: if one of them is impossible
        """
        counted = read_process(self._reader, signal)
        if max(counted.values()) > MAX_PLAUSIBLE:
            raise DamagedDataError("no counts of a process", signal)
        return counted

    def _check(self, address: int, task: Record) -> None:
        """Check that a record is a task with possible times.

        :raises UNREADABLE: if not
        """
        pids = task["pid"], task["tgid"]
        if (
            min(pids) <= 0
            or max(pids) > PID_MAX_LIMIT
            or max(self._times(task)) > MAX_PLAUSIBLE
        ):
            raise DamagedDataError("no task, or no times of one", address)

    def _see(self, address: int, task: Record) -> LifeSeen:
        """Read the data of a thread outside its ``struct task_struct``."""
        in_iowait = False
        if task["state"] & UNINTERRUPTIBLE and not task["exit_state"]:
            in_iowait = read_one_in_iowait(self._reader, address)
        delays = None
        if task.get("delays"):
            with suppress(*UNREADABLE):
                delays = read_delay(self._reader, task["delays"])
        return LifeSeen(address, task, in_iowait, delays)

    def _stack(self, task: Record) -> bytes:
        """Read the stack of a sleeping thread, to be unwound on demand.

        :return: The stack from the saved stack pointer on; empty if the thread does not
            sleep, or its stack cannot be read.
        """
        if state_class(task) is not None or "sp" not in task:
            return b""
        size = task["stack"] + self._stack_bytes - task["sp"]
        if not 0 < size <= self._stack_bytes or task["sp"] % 8 or size % 8:
            return b""
        try:
            return self._reader.read(task["sp"], size)
        except UNREADABLE:
            return b""

    def has_not_run(self, seen: LifeSeen) -> bool:
        """Return whether a thread has not been on a CPU since it was read.

        :raises UNREADABLE: if it has ended meanwhile
        """
        if not self._reader.is_live:
            return True
        task, (start, size, decode) = seen.task, self._again
        again = decode(self._reader.read(seen.address + start, size))
        if again["pid"] != task["pid"]:
            raise DamagedDataError("it has ended meanwhile", seen.address)
        switches, before = _switches(again), _switches(task)
        return bool(switches == before)


def _again(prog: drgn.Program) -> tuple[int, int, Decoder]:
    """Return offset, size and decoder of the columns that are read again."""
    task = find_type(prog, "struct task_struct")
    offsets = {name: offset_of(task, name) for name in _AGAIN}
    start, end = min(offsets.values()), max(offsets.values()) + 8
    record = np.dtype(
        {
            "names": list(_AGAIN),
            "formats": list(_AGAIN.values()),
            "offsets": [offset - start for offset in offsets.values()],
            "itemsize": end - start,
        }
    )
    return start, end - start, Decoder(record, _AGAIN)
