# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows of threads and processes, built on access from columns of numbers.

Pure: reads no kernel. Of a hundred thousand rows, perhaps twenty are shown.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.structs import Booleans, Numbers
from msatools.locks.report import WaitTarget
from msatools.prstat.interval import WAITED, Ended, OffCpuByClass, lasting, within
from msatools.prstat.model import Children, OffCpu, Split, TaskRow, Waited
from msatools.prstat.states import Breakdown, SplitColumn
from msatools.tasks.accounting import (
    Microstates,
    Processes,
    ProcessSums,
    TaskMemory,
    user_time,
)
from msatools.tasks.identity import Identities, TaskCgroups, TaskNamespaces, comm_text
from msatools.tasks.sampler import AgeBound, TaskState
from msatools.tasks.states import MAX_RT_PRIO, NICE_0, letters, loads
from msatools.tasks.table import PF_KTHREAD, TaskTable
from msatools.tasks.waits import TaskClass

UNKNOWN = -(1 << 63)
"""An unknown value in a column of numbers."""

Columns = Mapping[str, npt.NDArray[Any]]

_NUMBERS = (
    *("pid", "tgid", "ppid", "uid", "threads", "pri", "nice", "cpu"),
    *("size_bytes", "rss_bytes", "class_age_ns", "lifetime_ns", "user_ns"),
    *("system_ns", "latency_ns", "off_cpu_ns", "zombie_ns"),
    *("nvcsw", "nivcsw", "min_flt", "maj_flt", "sleeps"),
)
_CLASSES = {known.value: known.name for known in TaskClass}
_AT_ONCE = 1024
_BOUNDS = {bound.value: bound.name.lower() for bound in AgeBound}


class Spent(Struct, frozen=True):
    """The work of each thread over its life or an interval; one value a thread."""

    lives: Microstates
    nvcsw: Numbers
    nivcsw: Numbers
    min_flt: Numbers
    maj_flt: Numbers

    dead: Ended
    """Work of ended threads; each thread has the sum of its process."""

    off_cpu: OffCpuByClass | None = None
    """``None`` except in the report of an interval."""


class Threads(Struct, frozen=True):
    """Data of threads as collected, from which :class:`Kept` is made."""

    tasks: TaskTable
    now: TaskState
    on_code: Booleans
    """Whether each thread's page fault is on code."""

    identities: Identities
    processes: Processes
    memory: TaskMemory
    cgroups: TaskCgroups
    breakdown: Breakdown | None
    """``None`` in the report of an interval."""

    reaped: ProcessSums | None = None
    """Sums over reaped children; ``None`` unless requested."""

    namespaces: TaskNamespaces | None = None
    """``None`` unless requested."""


class Kept(Struct, frozen=True):
    """All data that rows are built from; a recording stores the same."""

    columns: Mapping[str, npt.NDArray[Any]]
    """One value a thread; ``state`` and ``class`` are also used to select by thread."""

    paths: tuple[str, ...]
    """Paths of control groups, by the index in the column."""

    split: Breakdown | None
    """``None`` in the report of an interval."""

    dead: Ended
    """Work of ended threads; each thread has the sum of its process."""

    reaped: ProcessSums | None
    """Sums over reaped children; ``None`` unless requested."""

    off: OffCpuByClass | None
    """``None`` except in the report of an interval."""

    latency_is_bound: bool
    namespaces: TaskNamespaces | None = None
    """``None`` unless requested."""

    ons: tuple[WaitTarget | None, ...] = ()
    """What each thread waits on; empty except in a recording."""

    callers: tuple[str | None, ...] = ()
    """The kernel function that called each thread's wait; empty unless requested."""


class _Taken(Mapping[str, npt.NDArray[Any]]):
    """Columns of some rows, copied on access: all columns take 360 bytes a row."""

    def __init__(
        self, columns: Mapping[str, npt.NDArray[Any]], places: npt.NDArray[Any]
    ) -> None:
        self._columns = columns
        self._places = places

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self._columns[name][self._places]
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def take(self, places: npt.NDArray[Any] | slice) -> "_Taken":
        """Return the columns of some of the rows."""
        return _Taken(self._columns, self._places[places])


class TaskRows(Sequence[TaskRow]):
    """Rows, each built on access."""

    def __init__(
        self,
        columns: Columns,
        ons: Sequence[WaitTarget | None],
        kept: Kept,
        off: OffCpuByClass | None,
    ) -> None:
        """
        :param columns: One value a row; ``thread`` is the index in *kept* of the thread
            that represents the row, ``row`` the row's index in *off*.
        :param ons: What each thread waits on; empty if not requested.
        """
        self.columns = columns
        self._ons = ons
        self.kept = kept
        self._off = off
        self._count = len(columns["pid"])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> TaskRow: ...
    @overload
    def __getitem__(self, place: slice) -> "TaskRows": ...
    def __getitem__(self, place: int | slice) -> "TaskRow | TaskRows":
        if isinstance(place, slice):
            return self.take(place)
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        return next(self.take(slice(place, place + 1))._made())

    def __iter__(self) -> Iterator[TaskRow]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.take(slice(start, start + _AT_ONCE))._made()

    def take(self, places: npt.NDArray[Any] | slice) -> "TaskRows":
        """Return some rows: a range of them, or by their indices or a mask."""
        columns: Columns
        if not isinstance(places, slice) and places.dtype == np.bool_:
            places = np.flatnonzero(places)
        if isinstance(self.columns, _Taken):
            columns = self.columns.take(places)
        elif isinstance(places, slice):
            columns = {name: values[places] for name, values in self.columns.items()}
        else:
            columns = _Taken(self.columns, places)
        return TaskRows(columns, self._ons, self.kept, self._off)

    def with_ons(self, ons: Sequence[WaitTarget | None]) -> "TaskRows":
        """Return the same rows, and what their threads wait on."""
        return TaskRows(self.columns, ons, self.kept, self._off)

    @property
    def ons(self) -> Sequence[WaitTarget | None]:
        """What each thread waits on; empty if not requested."""
        return self._ons

    @property
    def off_cpu(self) -> OffCpuByClass | None:
        """Time off the CPU in an interval, indexed by column ``row``; or ``None``."""
        return self._off

    def path(self, number: int) -> str | None:
        """Return the path of a control group; ``None`` if *number* is negative."""
        return self.kept.paths[number] if number >= 0 else None

    def _made(self) -> Iterator[TaskRow]:
        return map(TaskRow, *self.fields(TaskRow.__struct_fields__))

    def fields(self, names: Iterable[str]) -> list[list[Any]]:
        """Return a list of the rows' values for each field, without building rows.

        This takes a tenth of the time of building rows.

        :param names: Names of attributes of :class:`TaskRow`.
        """
        return [self._field(name) for name in names]

    def _field(self, name: str) -> list[Any]:
        """Return one field of the rows."""
        if name in _NUMBERS:
            return _numbers(self.columns[name])
        match name:
            case "kthread" | "state":
                return self._list(name)
            case "comm":
                return translated(self._list(name), comm_text)
            case "cgroup":
                return translated(self._list(name), self.path)
            case "task_class":
                return [_CLASSES[number] for number in self._list("class")]
            case "class_age_bound":
                return [_BOUNDS[number] for number in self._list(name)]
            case "latency_bound":
                are_upper = self._list("latency_is_upper")
                return ["upper" if is_upper else "exact" for is_upper in are_upper]
            case "on" if self._ons:
                return [self._ons[thread] for thread in self._list("thread")]
            case "breakdown" if self._has_split:
                threads = self._list("threads_of")
                return [self._split(first, end) for first, end in threads]
            case "off_cpu":
                return [self._off_cpu(row) for row in self._list("row")]
            case "waited":
                return self._waited()
            case "children":
                return [self._children(row) for row in self._list("thread")]
        return [None] * len(self)

    def _list(self, name: str) -> list[Any]:
        # Converting whole lists takes a tenth of the time of single values.
        values: list[Any] = self.columns[name].tolist()
        return values

    def _waited(self) -> list[Waited]:
        # The columns are named after the fields of Waited.
        columns = [self._list(name) for name in Waited.__struct_fields__]
        return [*map(Waited, *columns)]

    @cached_property
    def _has_split(self) -> bool:
        """Whether the split of any thread is known."""
        made = self.kept.split
        if made is None:
            return False
        kept = (made.known, *(column.known for column in made.delays.values()))
        return any(known.any() for known in kept)

    def _split(self, first: int, end: int) -> Split | None:
        """Sum up the split of a row's threads; ``None`` if all is unknown."""
        made = self.kept.split
        assert made is not None
        known = bool(made.known[first:end].all())
        part = slice(first, end)
        delays = {kind: _sum(column, part) for kind, column in made.delays.items()}
        if not known and all(value is None for value in delays.values()):
            return None
        coverage = self._coverage(part) if known else None
        return Split(
            iowait_ns=_sum(made.sleeps.iowait, part),
            blocked_ns=_sum(made.sleeps.blocked, part),
            sleep_ns=_sum(made.sleeps.sleep, part),
            stopped_ns=_sum(made.stopped, part),
            delays=delays,
            coverage=coverage,
        )

    def _coverage(self, threads: slice) -> float:
        """Return the share of some threads' time off the CPU that is explained."""
        assert self.kept.split is not None
        shares = self.kept.split.coverage[threads]
        off_cpu = self.kept.columns["off_cpu_ns"][threads]
        whole = off_cpu.sum()
        return float((shares * off_cpu).sum() / whole if whole else shares.mean())

    def _off_cpu(self, row: int) -> tuple[OffCpu, ...] | None:
        if self._off is None:
            return None
        return tuple(
            OffCpu(
                None if part.task_class is None else part.task_class.name,
                part.ns,
                part.error_ns,
                part.on_code or None,
            )
            for part in self._off.parts(row)
        )

    def _children(self, thread: int) -> Children | None:
        reaped = self.kept.reaped
        if reaped is None or not self.kept.columns["process_known"][thread]:
            return None
        return Children(
            user_ns=int(reaped.utime_ns[thread]),
            system_ns=int(reaped.stime_ns[thread]),
            nvcsw=int(reaped.nvcsw[thread]),
            nivcsw=int(reaped.nivcsw[thread]),
            min_flt=int(reaped.min_flt[thread]),
            maj_flt=int(reaped.maj_flt[thread]),
        )


def totals(tasks: TaskTable, lives: Microstates, processes: Processes) -> Spent:
    """Return the work of each thread since its start."""
    dead = processes.dead
    user, system = split_by_ticks(processes.dead_sum_exec_ns, dead)
    return Spent(
        lives=lives,
        # Views, not copies, which would take 32 MB for a million tasks.
        nvcsw=tasks["nvcsw"].view(np.int64),
        nivcsw=tasks["nivcsw"].view(np.int64),
        min_flt=tasks["min_flt"].view(np.int64),
        maj_flt=tasks["maj_flt"].view(np.int64),
        dead=Ended(user, system, dead.nvcsw, dead.nivcsw, dead.min_flt, dead.maj_flt),
    )


def split_by_ticks(
    cpu_ns: Nanoseconds, ticks: ProcessSums
) -> tuple[Nanoseconds, Nanoseconds]:
    """Split time on the CPU into user and system time."""
    of_users = np.zeros(len(cpu_ns), np.uint32)
    user = user_time(cpu_ns, ticks.utime_ns, ticks.stime_ns, of_users)
    return user, cpu_ns - user


def keep(threads: Threads, spent: Spent) -> Kept:
    """Convert the data of threads to columns."""
    return Kept(
        columns=_thread_columns(threads, spent),
        paths=threads.cgroups.paths,
        split=threads.breakdown,
        dead=spent.dead,
        reaped=threads.reaped,
        off=spent.off_cpu,
        latency_is_bound=spent.lives.latency_is_bound,
        namespaces=threads.namespaces,
    )


def thread_rows(kept: Kept) -> TaskRows:
    """Return a row for each thread."""
    places = np.arange(len(kept.columns["pid"]))
    columns = dict(kept.columns)
    columns["thread"] = columns["row"] = places
    columns["threads_of"] = np.stack([places, places + 1], axis=1)
    return TaskRows(columns, kept.ons, kept, kept.off)


def process_rows(kept: Kept) -> TaskRows:
    """Return a row for each process.

    CPU time, switches and faults are sums over its threads, including ended ones;
    latency and time off the CPU are sums over living ones. Its current class is that of
    its leader, or of its oldest living thread if the leader is dead.
    """
    of_thread = kept.columns
    tgid = of_thread["tgid"]
    if not len(tgid):
        return thread_rows(kept)
    starts = np.flatnonzero(np.diff(tgid, prepend=tgid[0] - 1))
    ends = np.append(starts[1:], len(tgid))
    shown = _representatives(of_thread, starts)

    columns = {name: values[shown] for name, values in of_thread.items()}
    columns["thread"] = shown
    for name in ("comm", "ppid", "uid", "cgroup", "kthread", "threads", "lifetime_ns"):
        columns[name] = of_thread[name][starts]
    columns["pid"] = columns["tgid"]
    for name in ("user_ns", "system_ns", "zombie_ns"):
        columns[name] = np.add.reduceat(of_thread[name], starts)
    counts = _lives_in_its_process(of_thread, starts, ends)
    for name in ("latency_ns", "off_cpu_ns", "sleeps", *WAITED):
        columns[name] = np.add.reduceat(np.where(counts, of_thread[name], 0), starts)
    lives = columns["class"] != TaskClass.ZMB
    columns["zombie_ns"][lives] = 0
    columns["latency_is_upper"] = np.logical_or.reduceat(
        of_thread["latency_is_upper"], starts
    )
    columns["is_estimate"] = np.logical_or.reduceat(of_thread["is_estimate"], starts)
    for name in ("nvcsw", "nivcsw", "min_flt", "maj_flt"):
        columns[name] = np.add.reduceat(of_thread[name], starts)
    for name in _DEAD:
        columns[name] = columns[name] + getattr(kept.dead, name)[starts]
    columns["row"] = np.arange(len(starts))
    columns["threads_of"] = np.stack([starts, ends], axis=1)
    off = kept.off and kept.off.of_rows(starts, ends, counts)
    return TaskRows(columns, kept.ons, kept, off)


_DEAD = ("user_ns", "system_ns", "nvcsw", "nivcsw", "min_flt", "maj_flt")


def _lives_in_its_process(
    of_thread: Mapping[str, npt.NDArray[Any]],
    starts: npt.NDArray[np.intp],
    ends: npt.NDArray[np.intp],
) -> Booleans:
    """Return which threads are alive; all threads of a process if none is."""
    lives: Booleans = ~of_thread["is_dead"]
    process_lives = np.logical_or.reduceat(lives, starts)
    counts: Booleans = lives | ~np.repeat(process_lives, ends - starts)
    return counts


def _representatives(
    of_thread: Mapping[str, npt.NDArray[Any]], starts: npt.NDArray[np.intp]
) -> Numbers:
    """Find the thread that represents each process."""
    shown = starts.astype(np.int64)
    dead, start_ns = of_thread["is_dead"], of_thread["start_ns"]
    ends = np.append(starts[1:], len(dead))
    for place in np.flatnonzero(dead[starts] & (ends - starts > 1)).tolist():
        threads = np.arange(starts[place], ends[place])
        alive = threads[~dead[threads]]
        if len(alive):
            shown[place] = alive[np.argmin(start_ns[alive])]
    return shown


def _thread_columns(threads: Threads, spent: Spent) -> Columns:
    tasks, lives = threads.tasks, spent.lives
    identities, memory, processes = (
        threads.identities,
        threads.memory,
        threads.processes,
    )
    has_no_mm = ~memory.has_mm
    if spent.off_cpu is None:
        waited = lasting(threads.now, threads.on_code, lives.off_cpu_ns)
    else:
        waited = within(spent.off_cpu)
    return {
        "pid": tasks["pid"].astype(np.int64),
        "tgid": tasks["tgid"].astype(np.int64),
        "ppid": _known(identities.ppid, identities.ppid >= 0),
        "uid": _known(identities.uid, identities.uid >= 0),
        "comm": tasks["comm"],
        "cgroup": threads.cgroups.index,
        "kthread": (tasks["flags"] & PF_KTHREAD) != 0,
        "threads": _known(processes.nr_threads, processes.known),
        "state": letters(tasks),
        "pri": tasks["prio"].astype(np.int64) - MAX_RT_PRIO,
        "nice": tasks["static_prio"].astype(np.int64) - NICE_0,
        "cpu": tasks["cpu"].astype(np.int64),
        "size_bytes": _known(memory.size_bytes, has_no_mm | memory.known),
        "rss_bytes": _known(memory.rss_bytes, has_no_mm | memory.rss_known),
        "class": threads.now.classes,
        "class_age_ns": threads.now.age_ns,
        "class_age_bound": threads.now.age_bound,
        "lifetime_ns": lives.lifetime_ns,
        "user_ns": lives.user_ns,
        "system_ns": lives.system_ns,
        "latency_ns": lives.latency_ns,
        "latency_is_upper": (lives.latency_ns > 0) & lives.latency_is_bound,
        "off_cpu_ns": lives.off_cpu_ns,
        "zombie_ns": lives.zombie_ns,
        "nvcsw": spent.nvcsw,
        "sleeps": spent.nvcsw,
        **waited,
        "nivcsw": spent.nivcsw,
        "min_flt": spent.min_flt,
        "maj_flt": spent.maj_flt,
        "start_ns": tasks["start_ns"].astype(np.int64),
        "is_dead": tasks["exit_state"] != 0,
        "loads": loads(tasks),
        "process_known": processes.known,
    }


def _sum(column: SplitColumn, threads: slice) -> int | None:
    if threads.stop - threads.start == 1:
        return column[threads.start]
    return int(column.ns[threads].sum()) if column.known[threads].all() else None


def _known(values: Numbers, known: Booleans) -> Numbers:
    return np.where(known, values, UNKNOWN)


def _numbers(values: Numbers) -> list[int | None]:
    numbers: list[int | None] = values.tolist()
    if (values == UNKNOWN).any():
        return [None if number == UNKNOWN else number for number in numbers]
    return numbers


V = TypeVar("V", bound=Hashable)
W = TypeVar("W")


def translated(values: Sequence[V], translate: Callable[[V], W]) -> list[W]:
    """Return the translation of each value; equal values are translated once."""
    known = {value: translate(value) for value in set(values)}
    return [known[value] for value in values]
