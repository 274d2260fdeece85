# SPDX-License-Identifier: LGPL-2.1-or-later

"""Times of each thread in an interval, including threads that ended."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.structs import Booleans, find_rows
from msatools.tasks.accounting import BOUND_NS, Microstates, Processes, user_time
from msatools.tasks.sampler import (
    NOBODY,
    AgeBound,
    Counts,
    Rows,
    TaskSample,
    TaskState,
    Values,
    cpu_of,
    match,
)
from msatools.tasks.states import asleep
from msatools.tasks.waits import RUNNABLE, TaskClass, are_any

# --- Times of each thread in an interval, and the classes of its waits.
#
# Pure: samples of all threads in, numbers out. The kernel counts each thread's time on
# the CPU and its latency; the rest of the interval is time off the CPU, which the
# kernel does not count by class. Three rules find a part of that time exactly:
#
# - a thread that sleeps in two samples and was not switched in between slept all the
#   time, in one class;
# - a sleep that is seen in a sample began at exec_start;
# - the kernel counts sleeps (nvcsw): if no other sleep was between two samples, all
#   time off the CPU was in the two sleeps that the samples show.
#
# The time of sleeps that began and ended between two samples is an estimate, with its
# error: it is divided so that the sums have the shares of the classes in the samples.
# Each sample counts for half the time before it and after it, and no class gets less
# than its exact time.


NCLASSES = len(TaskClass)

Times = npt.NDArray[np.float64]
"""Times by thread and class: shape (threads, classes)."""

ON_CODE = NCLASSES
"""Column of page faults on code, after the columns of the classes."""

_UNTOLD = NCLASSES + 1
"""Column of time whose class no sample shows."""


_CLASSES = {known.value: known for known in TaskClass}


class Part(NamedTuple):
    """The time that a row spent off the CPU in one class."""

    task_class: TaskClass | None
    """``None`` if unknown."""

    ns: int
    error_ns: int
    on_code: bool


class OffCpuByClass(Struct, frozen=True):
    """Time that threads spent off the CPU, by class."""

    ns: npt.NDArray[np.int64]
    """Shape (threads, NCLASSES + 1): times by class, and of page faults on code."""

    error_ns: npt.NDArray[np.int64]
    """Standard error of each time; 0 if it is exact, or no sample shows the class."""

    untold_ns: Nanoseconds
    """Time whose class no sample shows: nothing was sampled, or no sleep was counted
    (interrupts, a hypervisor)."""

    exact: Booleans
    """Whether no part is an estimate or has an unknown class."""

    def of_rows(self, starts: Rows, ends: Rows, counts: Booleans) -> "OffCpuByClass":
        """Return the sums over the threads from each start to each end.

        :param counts: Which threads are summed up.
        """

        def summed(values: Values) -> Values:
            kept = np.where(counts if values.ndim == 1 else counts[:, None], values, 0)
            sums = np.zeros((len(values) + 1, *values.shape[1:]), np.int64)
            np.cumsum(kept, axis=0, out=sums[1:])
            return sums[ends] - sums[starts]

        # All threads have the same samples, so their errors add up.
        return OffCpuByClass(
            ns=summed(self.ns),
            error_ns=summed(self.error_ns),
            untold_ns=summed(self.untold_ns),
            exact=summed(~self.exact) == 0,
        )

    def parts(self, row: int) -> list[Part]:
        """Return the times of a row, the longest first."""
        # Lists, as single values of arrays take longer.
        ns, error_ns = self.ns[row].tolist(), self.error_ns[row].tolist()
        found = [
            Part(
                TaskClass.FLT if column == ON_CODE else _CLASSES[column],
                time_ns,
                error_ns[column],
                column == ON_CODE,
            )
            for column, time_ns in enumerate(ns)
            if time_ns
        ]
        if self.untold_ns[row]:
            found.append(Part(None, int(self.untold_ns[row]), 0, False))
        return sorted(found, key=lambda part: -part.ns)


class Deltas(Struct, frozen=True):
    """One value for each thread of the last sample."""

    interval_ns: int
    """Duration, by the local clock of the kernel."""

    samples: int
    """Number of samples within the interval."""

    born: Booleans
    """Whether a thread was not in the first sample."""

    lives: Microstates
    """Times within the interval; ``lifetime_ns`` is the part that the thread lived in.

    ``impossible`` and ``missed_ns`` show that the kernel counted more latency than
    there was time for: since v6.12 sleep counts as latency at the wake-up (delayed
    dequeue). More samples find more of this latency.
    """

    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts
    off: OffCpuByClass
    gone: int
    """Number of threads that were in one sample but not in the next."""


class Interval:
    """An interval that has not ended, with sums for each thread since its start."""

    def __init__(self, first: TaskSample, bound_ns: int = BOUND_NS) -> None:
        """
        :param bound_ns: Maximum difference of two clocks: see
            :func:`~msatools.tasks.accounting.bound_of`.
        """
        count = len(first.tasks)
        self._first = first
        self._last = first
        self._bound_ns = bound_ns
        self._added = 0
        self._gone = 0
        self._latency = np.zeros(count, np.int64)
        self._missed = np.zeros(count, np.int64)
        self._known = np.zeros((count, _UNTOLD + 1), np.int64)
        self._sampled = np.zeros((count, _UNTOLD + 1), np.float64)
        """Times off the CPU around each sample, by the class in the sample."""

        self._unseen = np.zeros(count, np.int64)
        """Times off the CPU between samples with sleeps that no sample shows."""

        self._squares = np.zeros(count, np.float64)
        """Sums of the squares of the times in :attr:`_unseen`, one a gap."""

    def add(self, sample: TaskSample) -> None:
        """Add the next sample; the last one ends the interval."""
        row = match(self._last.tasks, sample.tasks)
        self._gone += len(self._last.tasks) - int(np.count_nonzero(row != NOBODY))
        self._reorder(row)
        gap = _Gap(self._last, sample, row, self._bound_ns)
        self._latency += gap.latency
        self._missed += gap.missed
        rows = np.arange(len(row))
        for classes, times in gap.known:
            self._known[rows, classes] += times
        for classes, times in gap.sampled:
            self._sampled[rows, classes] += times
        self._unseen += gap.unseen
        self._squares += gap.unseen.astype(np.float64) ** 2
        self._last = sample
        self._added += 1

    def end(self) -> Deltas:
        """Return the times and counts of each thread of the last sample."""
        first, last = self._first, self._last
        # A sample in between may have missed a thread.
        row = match(first.tasks, last.tasks)
        interval = _elapsed_ns(first, last)
        born = row == NOBODY
        lived, missed = _lived(first, last, born, self._bound_ns)
        part = np.minimum(lived, interval)

        def increase(before: Values, after: Values) -> Counts:
            return np.where(missed, 0, np.maximum(_increase(before, after, row), 0))

        cpu = np.minimum(increase(cpu_of(first), cpu_of(last)), part)
        zombie = increase(first.states.zombie_ns, last.states.zombie_ns)
        zombie = np.minimum(zombie, part - cpu)
        latency = np.clip(self._latency, 0, part - cpu - zombie)
        off_cpu = part - cpu - zombie - latency
        counted = {
            name: increase(first.tasks[name], last.tasks[name])
            for name in (*("utime_ns", "stime_ns"), *_COUNTED)
        }
        user = user_time(
            cpu,
            counted["utime_ns"],
            counted["stime_ns"],
            last.tasks["flags"],
            _life_share(last.states),
        )
        return Deltas(
            interval_ns=interval,
            samples=max(self._added - 1, 0),
            born=born,
            lives=Microstates(
                user_ns=user,
                system_ns=cpu - user,
                latency_ns=latency,
                off_cpu_ns=off_cpu,
                zombie_ns=zombie,
                lifetime_ns=part,
                latency_is_bound=last.states.latency_is_bound,
                impossible=self._missed > self._bound_ns,
                missed_ns=self._missed,
            ),
            off=self._off(off_cpu),
            gone=self._gone,
            **{name: counted[name] for name in _COUNTED},
        )

    def _reorder(self, row: Rows) -> None:
        """Reorder the sums by the threads of the next sample."""
        if np.array_equal(row, np.arange(len(self._latency))):
            return
        self._latency = _earlier(self._latency, row)
        self._missed = _earlier(self._missed, row)
        self._known = _earlier(self._known, row)
        self._sampled = _earlier(self._sampled, row)
        self._unseen = _earlier(self._unseen, row)
        self._squares = _earlier(self._squares, row)

    def _off(self, off_cpu: Nanoseconds) -> OffCpuByClass:
        known = self._known[:, :_UNTOLD].astype(np.float64)
        untold = self._known[:, _UNTOLD].astype(np.float64)
        unseen = self._unseen.astype(np.float64)
        # Expected times by the shares in samples, less the times known exactly.
        sampled = self._sampled[:, :_UNTOLD]
        shares = sampled * ratio(known.sum(1) + unseen, sampled.sum(1))[:, None]
        shares = np.maximum(shares - known, 0)
        total = shares.sum(1)
        guessed = shares * ratio(unseen, total)[:, None]
        untold += np.where(total > 0, 0, unseen)
        error = _errors(known, sampled, guessed, self._squares)

        # The remaining time is due to differing clocks, interrupts or a hypervisor, and
        # is no counted sleep.
        classified = known.sum(1) + guessed.sum(1)
        slack = off_cpu - classified - untold
        untold += np.where((slack > self._bound_ns) | (classified == 0), slack, 0)
        untold = np.clip(untold, 0, off_cpu)
        factor = ratio(off_cpu - untold, classified)
        ns = np.rint((known + guessed) * factor[:, None]).astype(np.int64)
        # The longest time takes the rounding errors.
        rows, longest = np.arange(len(ns)), ns.argmax(1) if len(ns) else 0
        has = classified > 0
        whole = np.where(has, np.rint(untold).astype(np.int64), off_cpu)
        ns[rows, longest] += np.where(has, off_cpu - whole - ns.sum(1), 0)
        return OffCpuByClass(
            ns=ns,
            error_ns=np.ceil(error * factor[:, None]).astype(np.int64),
            untold_ns=whole,
            exact=(guessed.sum(1) == 0) & (whole == 0),
        )


_COUNTED = ("nvcsw", "nivcsw", "min_flt", "maj_flt")


class _Gap:
    """Changes between two samples: one value for each thread of the second."""

    def __init__(
        self, before: TaskSample, after: TaskSample, row: Rows, bound_ns: int
    ) -> None:
        self._row = row
        was = row != NOBODY
        age = after.now.age_ns
        part, missed = _lived(before, after, ~was, bound_ns)
        slept, sleeps = was & _earlier(asleep(before.tasks), row), asleep(after.tasks)
        dead = after.tasks["exit_state"] != 0
        was_dead = was & _earlier(before.tasks["exit_state"] != 0, row)
        switches = self._increase(before.tasks["nvcsw"], after.tasks["nvcsw"])
        preempted = self._increase(before.tasks["nivcsw"], after.tasks["nivcsw"])
        still = slept & sleeps & (switches == 0) & (preempted == 0)

        # The last switch of a dying thread counts as voluntary, but is no sleep.
        begun = np.maximum(switches - (dead & ~was_dead), 0)
        dated = after.now.age_bound == AgeBound.EXACT
        began = sleeps & ~still
        busy = np.clip(self._increase(cpu_of(before), cpu_of(after)), 0, part)
        busy += np.clip(
            self._increase(before.states.zombie_ns, after.states.zombie_ns),
            0,
            part - busy,
        )
        tail = np.where(began & dated, np.minimum(age, part), 0)
        # Latency decreases if a wait ended between reading the task and the clocks.
        waited = self._increase(_latency(before), _latency(after))
        room = np.maximum(part - busy - tail, 0)
        self.latency = np.where(still, 0, np.minimum(waited, room))
        self.missed = np.where(missed, 0, waited - self.latency)
        off = part - busy - np.maximum(self.latency, 0)

        old = _earlier(_column(before), row)
        new = _column(after)
        unseen = begun - (began & dated)
        woken = after.now.woken
        only_new = (began & ~dated | woken) & (begun <= 1) & ~slept
        only_old = slept & (unseen <= 0) & ~still
        guess = ~still & ~only_new & (unseen > 0)
        rest = np.where(still, 0, np.maximum(off - tail, 0))
        self.known = (
            (new, np.where(still, off, tail)),
            (new, np.where(only_new, rest, 0)),
            (old, np.where(only_old, rest, 0)),
        )
        self.unseen = np.where(guess, rest, 0)
        sampled_old = slept & (old != _UNTOLD)
        sampled_new = (sleeps | woken) & (new != _UNTOLD)
        half = np.where(sampled_old & sampled_new, off / 2, off)
        self.sampled = (
            (old, np.where(sampled_old, half, 0)),
            (new, np.where(sampled_new, half, 0)),
        )

    def _increase(self, before: Values, after: Values) -> Counts:
        return _increase(before, after, self._row)


def _elapsed_ns(before: TaskSample, after: TaskSample) -> int:
    return max(after.clocks.local_ns - before.clocks.local_ns, 0)


def _lived(
    before: TaskSample, after: TaskSample, new: Booleans, bound_ns: int
) -> tuple[Nanoseconds, Booleans]:
    """Return the time that each thread of a sample has lived since the sample before.

    :param new: Which threads the sample before lacks. A thread born in between counts
        from its birth, as its counters do. An older thread was missed, because lists of
        a running kernel change while they are followed: its times are unknown.
    :return: The times, zero for missed threads; and which threads were missed.
    """
    since = _elapsed_ns(before, after)
    most = since + before.took_ns
    lifetime = after.states.lifetime_ns
    missed = new & (lifetime > most + bound_ns)
    lived = np.where(new, np.minimum(lifetime, most), since)
    return np.where(missed, 0, lived), missed


def _earlier(values: Values, row: Rows) -> Values:
    """Return each thread's value in an earlier sample; zero if that lacks it."""
    if not len(values):
        return np.zeros((len(row), *values.shape[1:]), values.dtype)
    taken = values[row]
    taken[row == NOBODY] = 0
    return taken


def _increase(before: Values, after: Values, row: Rows) -> Counts:
    increase: Counts = after.astype(np.int64) - _earlier(before.astype(np.int64), row)
    return increase


def _latency(sample: TaskSample) -> Nanoseconds:
    """Return the latency that the kernel counted, which may exceed a thread's life."""
    return sample.states.latency_ns + sample.states.missed_ns


def _column(sample: TaskSample) -> npt.NDArray[np.intp]:
    slept_in = np.where(sample.on_code, ON_CODE, sample.now.slept_in)
    return np.where(sample.class_known, slept_in, _UNTOLD).astype(np.intp)


def _life_share(states: Microstates) -> npt.NDArray[np.float64]:
    """Return the share of user mode in all time on the CPU; 1 if there is none."""
    cpu = states.user_ns + states.system_ns
    return np.where(cpu > 0, ratio(states.user_ns, cpu), 1.0)


def ratio(values: npt.NDArray[Any], of: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return *values* divided by *of*; 0 where that is not above 0."""
    found = np.zeros(len(of))
    np.divide(values, of, out=found, where=of > 0)
    return found


def _errors(
    known: Times, sampled: Times, guessed: Times, squares: npt.NDArray[np.float64]
) -> Times:
    """Return the standard errors of times that are partly guessed.

    The error of a class's time is that of its share in a number of samples, but at most
    the deviation of the guessed part. The number is that of gaps with unseen sleeps,
    weighted by their times, and scaled from the guessed part to the whole. As a few
    equal samples prove little, two are added, one of the class (Agresti, Coull 1998).
    """
    part = guessed.sum(1)
    whole = known.sum(1) + part
    samples = ratio(part**2, squares)
    of_part = _deviation(guessed, samples)
    samples *= ratio(whole, part)
    of_whole = _deviation(sampled, samples) / np.sqrt(samples + 2)[:, None]
    error = np.minimum(whole[:, None] * of_whole, part[:, None] * of_part)
    return np.where((part[:, None] > 0) & (known + sampled > 0), error, 0)


def _deviation(times: Times, samples: npt.NDArray[np.float64]) -> Times:
    """Return the standard deviation of each class's share in one sample."""
    share = times * ratio(np.ones(len(times)), times.sum(1))[:, None]
    share = (share * samples[:, None] + 1) / (samples[:, None] + 2)
    deviation: Times = np.sqrt(share * (1 - share))
    return deviation


# --- The work of threads that ended within an interval. Pure: reads no kernel.


class Ended(Struct, frozen=True):
    """The work of each process's ended threads, within an interval or since its start.

    One value for each thread of the last sample, equal for all threads of a process.
    """

    user_ns: Nanoseconds
    system_ns: Nanoseconds
    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts


def ended(
    first: TaskSample,
    first_processes: Processes,
    last: TaskSample,
    last_processes: Processes,
) -> Ended:
    """Return the work within an interval of threads that ended in it.

    A process that has no thread left is not included: its work is in the sums of its
    parent's reaped children.
    """
    growth = _Growth(first, last, first_processes.known, last_processes.known)
    cpu = growth.of(
        first_processes.dead_sum_exec_ns, last_processes.dead_sum_exec_ns, cpu_of(first)
    )

    def grown(name: str) -> Counts:
        before: Counts = getattr(first_processes.dead, name)
        after: Counts = getattr(last_processes.dead, name)
        return growth.of(before, after, first.tasks[name])

    user = user_time(cpu, grown("utime_ns"), grown("stime_ns"), last.tasks["flags"])
    return Ended(
        user_ns=user,
        system_ns=cpu - user,
        nvcsw=grown("nvcsw"),
        nivcsw=grown("nivcsw"),
        min_flt=grown("min_flt"),
        maj_flt=grown("maj_flt"),
    )


class _Growth:
    """Growth of the sums over dead threads of each process."""

    def __init__(
        self,
        first: TaskSample,
        last: TaskSample,
        first_known: Booleans,
        last_known: Booleans,
    ) -> None:
        self._signals, self._process = np.unique(
            last.tasks["signal"], return_inverse=True
        )
        self._old = find_rows(self._signals, first.tasks["signal"])
        # The memory of an ended process may have been reused by a new one.
        tgids = np.zeros(len(self._signals), last.tasks["tgid"].dtype)
        tgids[self._process] = last.tasks["tgid"]
        same = self._old != NOBODY
        same[same] = tgids[self._old[same]] == first.tasks["tgid"][same]
        self._old = np.where(same, self._old, NOBODY)
        row = match(first.tasks, last.tasks)
        self._left = same.copy()
        self._left[row[row != NOBODY]] = False
        self._known = np.zeros(len(self._signals), np.bool_)
        self._known[self._process] = last_known
        self._known[self._old[same & ~first_known]] = False

    def of(self, before: Values, after: Values, own: Values) -> Counts:
        """
        Return the growth of each process, for each thread of the last sample.

        :param before: The sum of each thread's process at the first sample.
        :param after: The sum of each thread's process at the last sample.
        :param own: Each thread's own value at the first sample.
        """
        total = np.zeros(len(self._signals), np.int64)
        total[self._process] = after
        # All threads of a process have its value.
        start = np.zeros(len(self._signals), np.int64)
        there = self._old != NOBODY
        start[self._old[there]] = before[there]
        left = self._left
        np.add.at(start, self._old[left], own[left].astype(np.int64))
        grown = np.where(self._known, np.maximum(total - start, 0), 0)
        of_threads: Counts = grown[self._process]
        return of_threads


# --- Time off the CPU as Solaris's prstat splits it: page faults, locks, stops, and
# sleep.
#
# Pure. For an interval, samples show the split. Linux does not record it over a whole
# life: only the current wait is known.


WAITED = (
    *("code_faults_ns", "data_faults_ns", "locks_ns", "stopped_ns"),
    "untold_ns",
)
"""Columns of the split; other time off the CPU is sleep."""

_FAULTS = (TaskClass.FLT, TaskClass.SWP)
_STOPS = (TaskClass.STP, TaskClass.TRC)
_AWAKE = (*RUNNABLE, TaskClass.WAK, TaskClass.ZMB)

Columns = dict[str, npt.NDArray[Any]]


def within(off: OffCpuByClass) -> Columns:
    """Return the split of each row's time off the CPU within an interval."""
    return {
        "code_faults_ns": off.ns[:, ON_CODE],
        "data_faults_ns": off.ns[:, _FAULTS].sum(1),
        "locks_ns": off.ns[:, TaskClass.LCK],
        "stopped_ns": off.ns[:, _STOPS].sum(1),
        "untold_ns": off.untold_ns,
        "is_estimate": (off.error_ns > 0).any(1),
    }


def lasting(now: TaskState, on_code: Booleans, off_cpu_ns: Nanoseconds) -> Columns:
    """Return the split of each thread's life: its current wait; the rest is untold."""
    classes = now.classes
    age = np.where(are_any(classes, _AWAKE), 0, np.minimum(now.age_ns, off_cpu_ns))
    faults = are_any(classes, _FAULTS)
    return {
        "code_faults_ns": np.where(faults & on_code, age, 0),
        "data_faults_ns": np.where(faults & ~on_code, age, 0),
        "locks_ns": np.where(classes == TaskClass.LCK, age, 0),
        "stopped_ns": np.where(are_any(classes, _STOPS), age, 0),
        "untold_ns": off_cpu_ns - age,
        "is_estimate": (now.age_bound != AgeBound.EXACT) & (age > 0),
    }
