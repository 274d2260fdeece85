# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each thread did in an interval, and what it waited for.

Pure: samples of all threads in, numbers out. Time on the CPU, waiting for one and off
it is what the kernel counted between the first sample and the last: the parts make up
the interval. The kernel does not count what a thread waited for; three rules give it:

- a thread that sleeps in two samples and was not switched in between slept all the
  time, and in one place;
- a sleep that is seen began at ``exec_start``;
- the kernel counts sleeps (``nvcsw``): if no other sleep was between two samples, all
  time off the CPU was the two that were seen.

All this is exact. The time of sleeps that began and ended between two samples is spread
so that the whole has the shares of the classes in the samples. Each sample counts for
half the time before it and after it, and no class gets less than its exact time. That
is an estimate, with its error.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.structs import Booleans
from msatools.tasks.classes import TaskClass
from msatools.tasks.microstates import BOUND_NS, Microstates, user_time
from msatools.tasks.states import asleep
from msatools.tasks.task_samples import (
    NOBODY,
    Counts,
    Rows,
    TaskSample,
    Values,
    cpu_of,
    match,
)
from msatools.tasks.task_state import AgeBound

NCLASSES = len(TaskClass)

Times = npt.NDArray[np.float64]
"""Shape (threads, classes)."""

ON_CODE = NCLASSES
"""The column, after those of the classes, of page faults on code."""

_UNTOLD = NCLASSES + 1
"""The column of time whose class no sample shows."""


class Part(NamedTuple):
    """What a row's time off the CPU was spent on, in part."""

    task_class: TaskClass | None
    """``None`` if nothing tells."""

    ns: int
    error_ns: int
    on_code: bool


@dataclass(frozen=True)
class OffCpuByClass:
    """What some threads' time off the CPU was spent on."""

    ns: npt.NDArray[np.int64]
    """Shape (threads, NCLASSES + 1): by class, and page faults on code."""

    error_ns: npt.NDArray[np.int64]
    """One standard error of each; 0 if exact. It is for what was seen at all."""

    untold_ns: Nanoseconds
    """Time whose class no sample shows: nothing was sampled, or no sleep was counted
    (interrupts, a hypervisor)."""

    exact: Booleans
    """Whether no part is an estimate or untold."""

    def of_rows(self, starts: Rows, ends: Rows, counts: Booleans) -> "OffCpuByClass":
        """Sum up the threads from each start to each end.

        :param counts: Which threads do.
        """

        def summed(values: Values) -> Values:
            kept = np.where(counts if values.ndim == 1 else counts[:, None], values, 0)
            sums = np.zeros((len(values) + 1, *values.shape[1:]), np.int64)
            np.cumsum(kept, axis=0, out=sums[1:])
            return sums[ends] - sums[starts]

        # A sample is of all threads at once: their errors add up.
        return OffCpuByClass(
            ns=summed(self.ns),
            error_ns=summed(self.error_ns),
            untold_ns=summed(self.untold_ns),
            exact=summed(~self.exact) == 0,
        )

    def parts(self, row: int) -> list[Part]:
        """Return the times of a row, the longest first."""
        (columns,) = np.nonzero(self.ns[row])
        found = [
            Part(
                TaskClass.FLT if column == ON_CODE else TaskClass(column),
                int(self.ns[row, column]),
                int(self.error_ns[row, column]),
                column == ON_CODE,
            )
            for column in columns.tolist()
        ]
        if self.untold_ns[row]:
            found.append(Part(None, int(self.untold_ns[row]), 0, False))
        return sorted(found, key=lambda part: -part.ns)


@dataclass(frozen=True)
class Deltas:
    """One value for each thread of the last sample."""

    interval_ns: int
    """By the local clock of the kernel."""

    samples: int
    """Samples within the interval."""

    born: Booleans
    """Whether it was not in the first sample."""

    lives: Microstates
    """Of the interval: ``lifetime_ns`` is as much of it as the thread has lived in.

    ``impossible`` and ``missed_ns`` are where the kernel counted more latency than
    there was time for: from v6.12 on, sleep that counts as latency at the wake-up. The
    more samples there are, the more of it shows.
    """

    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts
    off: OffCpuByClass
    gone: int
    """Threads of one sample that were not in the next."""


class Interval:
    """An interval that is under way: what is known of each thread since its start."""

    def __init__(self, first: TaskSample, bound_ns: int = BOUND_NS) -> None:
        """
        :param bound_ns: How far clocks may be apart: see
            :func:`~msatools.tasks.microstates.bound_of`.
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
        self._met = np.zeros((count, _UNTOLD + 1), np.float64)
        """Classes in samples, each for half the time off the CPU around it."""
        self._unseen = np.zeros(count, np.int64)
        self._squares = np.zeros(count, np.float64)
        """Sums of the times between two samples in which sleeps were not seen, and of
        their squares."""

    def add(self, sample: TaskSample) -> None:
        """Add the next sample; the last one ends the interval."""
        row = match(self._last.tasks, sample.tasks)
        self._gone += len(self._last.tasks) - int(np.count_nonzero(row != NOBODY))
        self._follow(row)
        gap = _Gap(self._last, sample, row, self._bound_ns)
        self._latency += gap.latency
        self._missed += gap.missed
        rows = np.arange(len(row))
        for classes, times in gap.known:
            self._known[rows, classes] += times
        for classes, times in gap.met:
            self._met[rows, classes] += times
        self._unseen += gap.unseen
        self._squares += gap.unseen.astype(np.float64) ** 2
        self._last = sample
        self._added += 1

    def end(self) -> Deltas:
        """Return what each thread of the last sample did since the first."""
        first, last = self._first, self._last
        # A sample in between may have missed a thread.
        row = match(first.tasks, last.tasks)
        interval = _between(first, last)
        born = row == NOBODY
        lived, missed = _lived(first, last, born, self._bound_ns)
        part = np.minimum(lived, interval)

        def grown(before: Values, after: Values) -> Counts:
            return np.where(missed, 0, np.maximum(_grown(before, after, row), 0))

        cpu = np.minimum(grown(cpu_of(first), cpu_of(last)), part)
        zombie = grown(first.states.zombie_ns, last.states.zombie_ns)
        zombie = np.minimum(zombie, part - cpu)
        latency = np.clip(self._latency, 0, part - cpu - zombie)
        off_cpu = part - cpu - zombie - latency
        counted = {
            name: grown(first.tasks[name], last.tasks[name])
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

    def _follow(self, row: Rows) -> None:
        """Reorder what is known by the threads of the next sample."""
        if np.array_equal(row, np.arange(len(self._latency))):
            return
        self._latency = _taken(self._latency, row)
        self._missed = _taken(self._missed, row)
        self._known = _taken(self._known, row)
        self._met = _taken(self._met, row)
        self._unseen = _taken(self._unseen, row)
        self._squares = _taken(self._squares, row)

    def _off(self, off_cpu: Nanoseconds) -> OffCpuByClass:
        known = self._known[:, :_UNTOLD].astype(np.float64)
        untold = self._known[:, _UNTOLD].astype(np.float64)
        unseen = self._unseen.astype(np.float64)
        # Of what was met, that which is not known already happened unseen.
        met = self._met[:, :_UNTOLD]
        shares = met * _ratio(known.sum(1) + unseen, met.sum(1))[:, None]
        shares = np.maximum(shares - known, 0)
        total = shares.sum(1)
        guessed = shares * _ratio(unseen, total)[:, None]
        untold += np.where(total > 0, 0, unseen)
        error = _errors(known, met, guessed, self._squares)

        # What is left are clocks, or interrupts or a hypervisor, of which no sleep was
        # counted.
        classified = known.sum(1) + guessed.sum(1)
        slack = off_cpu - classified - untold
        untold += np.where((slack > self._bound_ns) | (classified == 0), slack, 0)
        untold = np.clip(untold, 0, off_cpu)
        factor = _ratio(off_cpu - untold, classified)
        ns = np.rint((known + guessed) * factor[:, None]).astype(np.int64)
        # Rounding belongs to the longest.
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
    """What happened between two samples: one value a thread of the second."""

    def __init__(
        self, before: TaskSample, after: TaskSample, row: Rows, bound_ns: int
    ) -> None:
        self._row = row
        was = row != NOBODY
        age = after.now.age_ns
        part, missed = _lived(before, after, ~was, bound_ns)
        slept, sleeps = was & _taken(asleep(before.tasks), row), asleep(after.tasks)
        dead = after.tasks["exit_state"] != 0
        was_dead = was & _taken(before.tasks["exit_state"] != 0, row)
        switches = self._grown(before.tasks["nvcsw"], after.tasks["nvcsw"])
        preempted = self._grown(before.tasks["nivcsw"], after.tasks["nivcsw"])
        still = slept & sleeps & (switches == 0) & (preempted == 0)

        # The last switch of who dies is a voluntary one, too, and no sleep.
        begun = np.maximum(switches - (dead & ~was_dead), 0)
        dated = after.now.age_bound == AgeBound.EXACT
        began = sleeps & ~still
        busy = np.clip(self._grown(cpu_of(before), cpu_of(after)), 0, part)
        busy += np.clip(
            self._grown(before.states.zombie_ns, after.states.zombie_ns), 0, part - busy
        )
        tail = np.where(began & dated, np.minimum(age, part), 0)
        # It shrinks if a wait ended after the task was read and before the clocks were.
        waited = self._grown(_latency(before), _latency(after))
        room = np.maximum(part - busy - tail, 0)
        self.latency = np.where(still, 0, np.minimum(waited, room))
        self.missed = np.where(missed, 0, waited - self.latency)
        off = part - busy - np.maximum(self.latency, 0)

        old = _taken(_column(before), row)
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
        met_old = slept & (old != _UNTOLD)
        met_new = (sleeps | woken) & (new != _UNTOLD)
        half = np.where(met_old & met_new, off / 2, off)
        self.met = (
            (old, np.where(met_old, half, 0)),
            (new, np.where(met_new, half, 0)),
        )

    def _grown(self, before: Values, after: Values) -> Counts:
        return _grown(before, after, self._row)


def _between(before: TaskSample, after: TaskSample) -> int:
    return max(after.clocks.local_ns - before.clocks.local_ns, 0)


def _lived(
    before: TaskSample, after: TaskSample, new: Booleans, bound_ns: int
) -> tuple[Nanoseconds, Booleans]:
    """Return for how long each thread of a sample has lived since the one before.

    :param new: Threads that the sample before lacks. One that was born meanwhile counts
        from its birth, as its counters do. An older one was missed, as lists of a
        running kernel change while they are followed: nothing is known of its time
        since.
    :return: The times, zero for those that were missed; and which were missed.
    """
    since = _between(before, after)
    most = since + before.took_ns
    lifetime = after.states.lifetime_ns
    missed = new & (lifetime > most + bound_ns)
    lived = np.where(new, np.minimum(lifetime, most), since)
    return np.where(missed, 0, lived), missed


def _taken(values: Values, row: Rows) -> Values:
    """Return each thread's value in an earlier sample; zero if it was not there."""
    if not len(values):
        return np.zeros((len(row), *values.shape[1:]), values.dtype)
    taken = values[row]
    taken[row == NOBODY] = 0
    return taken


def _grown(before: Values, after: Values, row: Rows) -> Counts:
    grown: Counts = after.astype(np.int64) - _taken(before.astype(np.int64), row)
    return grown


def _latency(sample: TaskSample) -> Nanoseconds:
    """Return what the kernel has counted, before it was cut to a thread's life."""
    return sample.states.latency_ns + sample.states.missed_ns


def _column(sample: TaskSample) -> npt.NDArray[np.intp]:
    slept_in = np.where(sample.on_code, ON_CODE, sample.now.slept_in)
    return np.where(sample.class_known, slept_in, _UNTOLD).astype(np.intp)


def _life_share(states: Microstates) -> npt.NDArray[np.float64]:
    """Return how much of all its time on the CPU a thread was in user mode."""
    cpu = states.user_ns + states.system_ns
    return np.where(cpu > 0, _ratio(states.user_ns, cpu), 1.0)


def _ratio(value: Values, of: Values) -> npt.NDArray[np.float64]:
    found = np.zeros(len(of))
    np.divide(value, of, out=found, where=of != 0)
    return found


def _errors(
    known: Times, met: Times, guessed: Times, squares: npt.NDArray[np.float64]
) -> Times:
    """Return the standard errors of times of which a part was guessed.

    The whole has the error of shares of so many samples; but what was guessed cannot
    miss by more than it is. Gaps between samples in which sleeps were not seen count as
    samples of that part, by the weight of their times. Few that agree are no
    certainty: shares are those of two samples more, one of them of the class (Agresti
    and Coull, 1998).
    """
    part = guessed.sum(1)
    whole = known.sum(1) + part
    samples = _ratio(part**2, squares)
    of_part = _deviation(guessed, samples)
    samples *= _ratio(whole, part)
    of_whole = _deviation(met, samples) / np.sqrt(samples + 2)[:, None]
    error = np.minimum(whole[:, None] * of_whole, part[:, None] * of_part)
    return np.where((part[:, None] > 0) & (known + met > 0), error, 0)


def _deviation(times: Times, samples: npt.NDArray[np.float64]) -> Times:
    """Return the deviation of each class's share from one sample to another."""
    share = times * _ratio(np.ones(len(times)), times.sum(1))[:, None]
    share = (share * samples[:, None] + 1) / (samples[:, None] + 2)
    deviation: Times = np.sqrt(share * (1 - share))
    return deviation
