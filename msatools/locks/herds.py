# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Thundering herds: many tasks that are woken together where one would have been enough.

The kernel does not record which tasks were woken together. But one dump shows a herd,
as its wake-ups leave three traces in the tasks that wait on one thing:

- They went to sleep within a short time, however long ago. Each needs a turn on a CPU,
  and usually a lock, before it sleeps again. So the time allowed is :data:`TURN_NS` for
  each of them; a twentieth of them may have slept earlier or later. Or they went to
  sleep in two such times that are far apart, if some of them waited for a CPU.
- They lived for longer than that time before they went to sleep. Threads that were
  created together, and have waited since, are no herd.
- Most have gone to sleep often (:data:`MIN_SWITCHES`), so this was not the first time.

On the lab's kernels 1,000 workers of a server that wakes all of them went to sleep
within 34 to 72 ms, after lives of some ten seconds, and have slept 4 to 9 times. The
workers of a server that wakes one at a time have slept since they were created, or went
to sleep as far apart as its requests came.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.kernel.clocks import Clocks
from msatools.kernel.reader import distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.locks.report import Herd, WaitTarget, Waker
from msatools.tasks.identity import comm_text
from msatools.tasks.sampler import TaskState
from msatools.tasks.states import asleep
from msatools.tasks.table import PF_KTHREAD, TaskReader, TaskTable
from msatools.tasks.unwind import Rows
from msatools.tasks.waits import TaskClass, are_any

MIN_WAITERS = 16
TURN_NS = 1_000_000
MIN_SWITCHES = 3
"""Minimum median of the tasks' voluntary context switches: their first sleep, and two
more after wake-ups."""

_STRAGGLERS = 0.05
_LOOKS, _PAUSE_SECONDS = 8, 0.02
"""Number of times that one crowd is read again, and the maximum pause between two."""

_MOST_CROWDS, _MOST_THREADS = 4, 256
"""Maximum number of crowds to read again for one report, the largest first, and the
maximum number of threads of each: a machine may have hundreds of crowds."""

_RECENT_NS = 5_000_000_000
"""Maximum median time asleep, in ns, of a crowd that may be woken just now."""

# Kinds of things that are identified by a file descriptor of one process.
_OF_PROCESS = frozenset({"epoll", "io_uring", "poll", "eventfd", "timerfd", "inotify"})


class _Thing(Struct, frozen=True):
    """A thing that several tasks may wait on."""

    kind: str
    number: int
    """An address, an inode number, an ID or a file descriptor."""

    process: int | None
    """ID of the process in which the number is valid; ``None`` if in every process."""

    whole: str | None = None
    """Name of the device or inode in which the number is valid."""

    def __str__(self) -> str:
        shape = f"{self.number:#x}" if self.kind in ("futex", "lock") else self.number
        if self.process is not None:
            return f"{self.kind} {self.process}:{shape}"
        if self.kind in ("pipe", "socket"):
            return f"{self.kind}:[{shape}]"
        of = f" of {self.whole}" if self.whole else ""
        return f"{self.kind} {shape}{of}"


class Watched(Struct, frozen=True):
    """Data from reading threads repeatedly."""

    slept: npt.NDArray[np.int64] | None = None
    """Number of times that each thread has gone to sleep within an interval, by row."""

    again: Callable[[Rows], Iterator[TaskTable]] | None = None
    """Reads some threads again a few times, each time all at once: on a running kernel
    the threads of the first table were read at different moments."""


UNWATCHED = Watched()


def read_again(
    reader: TaskReader, tasks: TaskTable
) -> Callable[[Rows], Iterator[TaskTable]]:
    """Return a function for :attr:`Watched.again` that serves the first few crowds."""
    crowds = iter(range(_MOST_CROWDS))

    def again(rows: Rows) -> Iterator[TaskTable]:
        if next(crowds, None) is None:
            return
        rows = rows[:: -(-len(rows) // _MOST_THREADS)]
        addresses, pids = tasks["address"][rows].tolist(), tasks["pid"][rows]
        for _ in range(_LOOKS):
            found = reader.read(addresses, LossLog())
            yield found.only(np.isin(found["pid"], pids))
            # Random, so as not to read each round of wake-ups in the same phase.
            time.sleep(random.uniform(0, _PAUSE_SECONDS))

    return again


_AT_ONE_FUTEX = (TaskClass.LCK, TaskClass.KLK, TaskClass.LAT, TaskClass.WAK)
"""Classes of the threads in the crowd of a lock or futex, whatever their stacks,
including threads that were just woken from it."""


def may_be_herds(tasks: TaskTable, now: TaskState) -> Booleans:
    """Return which threads may be in a herd, whatever they wait on.

    The threads of a crowd have one class, or those of :data:`_AT_ONE_FUTEX`. At least
    half of a herd has slept :data:`MIN_SWITCHES` times, as its median has.
    """
    often = tasks["nvcsw"] >= MIN_SWITCHES
    part = np.where(are_any(now.classes, _AT_ONE_FUTEX), TaskClass.LCK, now.classes)
    may_be: Booleans = (np.bincount(part, often) >= MIN_WAITERS // 2)[part]
    return may_be


def find_herds(
    tasks: TaskTable,
    now: TaskState,
    ons: Sequence[WaitTarget | None],
    clocks: Clocks,
    gone: Sequence[int] = (),
    watched: Watched = UNWATCHED,
) -> tuple[Herd, ...]:
    """
    Find herds among some threads, the largest first.

    :param ons: The wait target of each thread, if known; for threads that are just
        being woken, what they waited on.
    :param gone: Rows of threads that are just being woken.
    """
    crowds: dict[tuple[_Thing, int], list[int]] = {}
    woken: dict[_Thing, list[int]] = {}
    left = frozenset(gone)
    for row, on in enumerate(ons):
        thing = None if on is None else _thing(on, int(tasks["tgid"][row]))
        if thing is None:
            continue
        # Tasks on one wait queue with different stacks wait for different events.
        way = int(now.stacks.index[row]) if thing.kind not in _ALL_WAYS else 0
        members = crowds.setdefault((thing, way), [])
        (woken.setdefault(thing, []) if row in left else members).append(row)
    herds = []
    for (thing, _), members in sorted(crowds.items(), key=lambda item: -len(item[1])):
        woke = woken.get(thing, [])
        crowd = _Crowd(tasks, now, clocks, np.array(members, np.intp), woke, watched)
        if len(members) + len(woke) >= MIN_WAITERS and crowd.thunders():
            on = ons[(members or woke)[0]]
            herds.append(crowd.as_herd(str(thing), thing.kind, on))
    return tuple(sorted(herds, key=lambda herd: (-herd.waiters, herd.lock)))


def crowd_of(
    lock: str,
    on: WaitTarget,
    tasks: TaskTable,
    now: TaskState,
    rows: Rows,
    clocks: Clocks,
    woken: Sequence[int] = (),
    watched: Watched = UNWATCHED,
) -> Herd:
    """
    Return the tasks that wait for one lock as a :class:`.Herd`.

    :param lock: ID of the lock in the report.
    :param on: The wait target of the tasks.
    :param rows: Rows of the tasks that wait.
    :param woken: Rows of tasks that have waited for the lock, and are just being woken.
    :return: With ``confidence`` ``none`` if they were not woken together.
    """
    crowd = _Crowd(tasks, now, clocks, rows, woken, watched)
    herd = crowd.as_herd(lock, on.kind, on)
    if crowd.thunders():
        return herd
    return replace(herd, confidence="none", wakeups=None, in_vain=None)


def confirm(herd: Herd, slept: npt.NDArray[np.int64]) -> Herd:
    """
    Return a herd as confirmed if it was woken within an interval.

    It was if all but a few of its waiters have gone to sleep in the interval.

    :param slept: Number of times that each waiter went to sleep (by ``nvcsw``).
    """
    woken = np.count_nonzero(slept)
    if len(slept) and woken >= (1 - _STRAGGLERS) * len(slept):
        wakeups = int(slept.sum())
        in_vain = 1 - float(np.median(slept)) / wakeups
        return replace(herd, confidence="confirmed", wakeups=wakeups, in_vain=in_vain)
    return herd


_ALL_WAYS = frozenset({"futex", "lock"})
"""Kinds of things whose waiters are one crowd, whatever their stacks."""


def _thing(on: WaitTarget, process: int) -> _Thing | None:
    """Return the thing that a task waits on; ``None`` if it cannot be identified."""
    if on.kind in ("futex", "lock"):
        if on.address is None:
            return None
        if on.kind == "lock":
            return _Thing(on.kind, int(on.address), None)
        if on.inode is None:
            return _Thing(on.kind, int(on.address), process)
        # In a shared file: processes usually map it at the same address (fork()).
        return _Thing(on.kind, int(on.address), None, f"inode {on.inode}")
    if on.kind in _OF_PROCESS:
        # Threads share descriptors; in another process the same file may have another.
        return None if on.fd is None else _Thing(on.kind, on.fd, process)
    if on.kind in ("pipe", "socket", "flock", "posix_lock") and on.inode is not None:
        return _Thing(on.kind, on.inode, None, on.device)
    if on.kind in ("msgqueue", "semaphore") and on.id is not None:
        return _Thing(on.kind, on.id, None)
    return None


class _Crowd:
    """Threads that wait on one thing, or were just woken from it."""

    def __init__(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        rows: Rows,
        woken: Sequence[int],
        watched: Watched,
    ) -> None:
        self._tasks = tasks
        self._now = now
        self._clocks = clocks
        self._rows = rows
        self._woken = np.array(woken, np.intp)
        self._all = np.concatenate([rows, self._woken])
        self._watched = watched

    def thunders(self) -> bool:
        """Return whether the threads were woken together, as the module describes."""
        if float(np.median(self._tasks["nvcsw"][self._all])) < MIN_SWITCHES:
            return False
        if len(self._woken) >= MIN_WAITERS // 2:
            return True
        return self._have_lived() and self._slept_together()

    def _have_lived(self) -> bool:
        """Return whether the threads lived for a while before they went to sleep."""
        if self._clocks.monotonic_ns is None or not len(self._rows):
            return False
        started = self._tasks["start_ns"][self._rows].astype(np.int64)
        lives = self._clocks.monotonic_ns - started
        waited = self._now.age_ns[self._rows]
        return float(np.median(lives - waited)) > self._allowed_ns

    @property
    def _allowed_ns(self) -> int:
        return TURN_NS * len(self._all)

    def _slept_together(self) -> bool:
        if _apart(self._now.age_ns[self._rows]) <= self._allowed_ns:
            return True
        if self._watched.again is None:
            # A round of wake-ups may be under way: then those who sleep do so since the
            # one before. Or some threads went to sleep late, as they got no CPU.
            ages = self._now.age_ns[self._rows]
            return self._in_rounds(ages) if len(self._woken) else _in_two_parts(ages)
        if not self._are_woken():
            return False
        return any(map(self._together_in, self._watched.again(self._all)))

    def _are_woken(self) -> bool:
        """Return whether a round (a wake-up of all threads) may be under way now."""
        if self._watched.slept is not None:
            return bool(np.median(self._watched.slept[self._all]))
        return float(np.median(self._now.age_ns[self._all])) < _RECENT_NS

    def _together_in(self, table: TaskTable) -> bool:
        """Return whether threads that were read again sleep since one or two rounds."""
        rests = asleep(table)
        stamps = table["exec_start_ns"][rests].astype(np.int64)
        return len(stamps) >= MIN_WAITERS // 2 and self._in_rounds(stamps)

    def _in_rounds(self, times: npt.NDArray[np.int64]) -> bool:
        """Return whether threads went to sleep in one round, or in two.

        :param times: Time of each, or time since then, in ns.
        """
        if _apart(times) <= self._allowed_ns:
            return True
        return all(_apart(part) <= self._allowed_ns for part in _parts(times))

    def as_herd(self, name: str, kind: str, on: WaitTarget | None) -> Herd:
        """Return the threads as a :class:`.Herd`; confirmed if an interval shows it."""
        tasks, rows = self._tasks, self._all
        ages = self._now.age_ns[self._rows if len(self._rows) else rows]
        herd = Herd(
            lock=name,
            waiters=len(rows),
            owner=on.owner if on else None,
            kind=kind,
            address=on.address if on else None,
            pids=tuple(distinct(tasks["tgid"][rows]).tolist()),
            min_age_ns=int(ages.min()),
            max_age_ns=int(ages.max()),
            nvcsw_median=int(np.median(tasks["nvcsw"][rows])),
            confidence="one dump",
            woken=len(self._woken),
            waker=self._waker(kind),
            members=tuple(tasks["pid"][rows].tolist()),
            name=_name_of(on) if on else None,
        )
        slept = self._watched.slept
        return herd if slept is None else confirm(herd, slept[rows])

    def _waker(self, kind: str) -> Waker | None:
        """Find the thread that most likely wakes the crowd, and is not a part of it.

        The kernel records for each task its last wakee, and the number of times that
        the wakee changed, halved each second (record_wakee()). Wake-ups by an interrupt
        count for the interrupted task, so the last wakee of a task may be any task.
        """
        tasks = self._tasks
        if not tasks.has("last_wakee"):
            return None
        wakes = 2 * tasks["wakee_flips"].astype(np.int64) >= len(self._all)
        wakes &= (tasks["flags"] & PF_KTHREAD) == 0
        # A thread of the crowd may have woken the next by releasing a lock.
        wakes[self._all] = False
        found = np.flatnonzero(wakes)
        if not len(found):
            # The usual case: save the search of all threads, as crowds may be many.
            return None
        own = np.isin(tasks["tgid"], distinct(tasks["tgid"][self._all]))
        # The waker of a futex is a thread of the same process.
        if kind == "futex" or own[found].any():
            found = found[own[found]]
        else:
            theirs = np.isin(tasks["last_wakee"][found], tasks["address"][own])
            found = found[theirs]
        if not len(found):
            return None
        row = int(found[np.argmax(tasks["wakee_flips"][found])])
        return Waker(
            pid=int(tasks["pid"][row]),
            tgid=int(tasks["tgid"][row]),
            comm=comm_text(tasks["comm"][row]),
        )


def _name_of(on: WaitTarget) -> str | None:
    """Return what a futex is a part of, or the type and local address of a socket."""
    if on.kind == "socket":
        return " ".join(filter(None, (on.type, on.local))) or None
    return on.name if on.kind == "futex" else None


def _apart(times: npt.NDArray[np.int64]) -> float:
    """Return the span of times, without the earliest and latest few."""
    first, last = np.quantile(times, (_STRAGGLERS / 2, 1 - _STRAGGLERS / 2))
    return float(last - first)


def _parts(times: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Split times in two at the largest gap."""
    times = np.sort(times)
    cut = int(np.diff(times).argmax()) + 1
    return [times[:cut], times[cut:]]


def _in_two_parts(times: npt.NDArray[np.int64]) -> bool:
    """Return whether threads went to sleep in two parts, each within a short time.

    Each part takes at most its share of the allowed time, and less than the gap between
    the parts.
    """
    first, second = _parts(times)
    gap = second[0] - first[-1]
    return all(
        _apart(part) <= min(TURN_NS * len(part), gap) for part in (first, second)
    )
