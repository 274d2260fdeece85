# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Thundering herds: many tasks that are woken together to find that one would have done.

A kernel does not keep who woke whom. One dump shows it all the same, as a wake-up of
all leaves three traces in those who wait on one thing:

- they all went to sleep within a short time, however long ago: each needs a turn on a
  CPU, and mostly a lock, before it sleeps again, so the time allowed grows with their
  number (:data:`TURN_NS` each, for all but a twentieth, who came later or are slow);
- that was not when they started: the wait is shorter than their life by more than
  that time. Threads that were made together, and have waited since, are no herd;
- each has gone to sleep often (:data:`MIN_SWITCHES`), so this was not the first time.

On the lab's kernels 1,000 workers of a server that broadcasts are 34 to 72 ms apart,
after lives of some ten seconds, and have slept 4 to 9 times. Those of one that wakes
one at a time sleep since they were made, or are as far apart as its requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import Clocks
from msatools.locks.model import Herd, On
from msatools.tasks.now import Now
from msatools.tasks.table import TaskTable

MIN_WAITERS = 16
TURN_NS = 1_000_000
MIN_SWITCHES = 3
"""The median: one sleep that is the first, and the wake-ups that two others took."""

_STRAGGLERS = 0.05

# What one process numbers for itself.
_OF_PROCESS = frozenset({"epoll", "io_uring", "poll", "eventfd", "timerfd", "inotify"})


@dataclass(frozen=True)
class _Thing:
    """What tasks may wait on together."""

    kind: str
    number: int
    """An address, an inode's number, an ID or a file descriptor."""

    process: int | None
    """Whose; ``None`` if the number is not of a process."""

    whole: str | None = None
    """What it is in, if it is in something that has to be named, too."""

    def __str__(self) -> str:
        shape = f"{self.number:#x}" if self.kind in ("futex", "lock") else self.number
        if self.process is not None:
            return f"{self.kind} {self.process}:{shape}"
        if self.kind in ("pipe", "socket"):
            return f"{self.kind}:[{shape}]"
        of = f" of {self.whole}" if self.whole else ""
        return f"{self.kind} {shape}{of}"


def find_herds(
    tasks: TaskTable,
    now: Now,
    ons: Sequence[On | None],
    clocks: Clocks,
    slept: npt.NDArray[np.int64] | None = None,
) -> tuple[Herd, ...]:
    """
    Find herds among some threads, the largest first.

    :param ons: What each thread waits on, as far as that was asked for.
    :param slept: How often each thread has gone to sleep within an interval.
    """
    crowds: dict[tuple[_Thing, int], list[int]] = {}
    for row, on in enumerate(ons):
        thing = None if on is None else _thing(on, int(tasks["tgid"][row]))
        if thing is not None:
            # On one queue: who waits in another way does not wait for the same.
            way = int(now.stacks.index[row]) if thing.kind not in _ALL_WAYS else 0
            crowds.setdefault((thing, way), []).append(row)
    herds = []
    for (thing, _), members in crowds.items():
        rows = np.array(members)
        if len(rows) < MIN_WAITERS or not _thunders(tasks, now, rows, clocks):
            continue
        herd = _herd(tasks, now, thing, rows, ons[members[0]])
        herds.append(herd if slept is None else confirm(herd, slept[rows]))
    return tuple(sorted(herds, key=lambda herd: (-herd.waiters, herd.lock)))


def crowd_of(
    lock: str,
    on: On,
    tasks: TaskTable,
    now: Now,
    rows: npt.NDArray[np.intp],
    clocks: Clocks,
    slept: npt.NDArray[np.int64] | None = None,
) -> Herd:
    """
    Tell of the tasks that wait for one lock whether they are a herd, or just many.

    :param lock: What the report calls it.
    :param on: What they wait on.
    :param slept: How often each of them has gone to sleep within an interval.
    """
    thing = _Thing(on.kind, int(on.address or 0), None)
    herd = replace(_herd(tasks, now, thing, rows, on), lock=lock)
    if not _thunders(tasks, now, rows, clocks):
        return replace(herd, confidence="none")
    return herd if slept is None else confirm(herd, slept)


def confirm(herd: Herd, slept: npt.NDArray[np.int64]) -> Herd:
    """
    Tell whether a herd thundered within an interval.

    It did if all but a few of those that wait have gone to sleep meanwhile.

    :param slept: How often each of its waiters did (by ``nvcsw``).
    """
    woken = np.count_nonzero(slept)
    if len(slept) and woken >= (1 - _STRAGGLERS) * len(slept):
        return replace(herd, confidence="confirmed")
    return herd


_ALL_WAYS = frozenset({"futex", "lock"})


def _thing(on: On, process: int) -> _Thing | None:
    """Tell what a task waits on so that two of them can be told to be the same."""
    if on.kind in ("futex", "lock"):
        if on.address is None:
            return None
        if on.kind == "lock":
            return _Thing(on.kind, int(on.address), None)
        if on.inode is None:
            return _Thing(on.kind, int(on.address), process)
        # Of a file that several have mapped: mostly, as they were forked, alike.
        return _Thing(on.kind, int(on.address), None, f"inode {on.inode}")
    if on.kind in _OF_PROCESS:
        # Threads share descriptors; processes may have the same one by other numbers.
        return None if on.fd is None else _Thing(on.kind, on.fd, process)
    if on.kind in ("pipe", "socket", "flock", "posix_lock") and on.inode is not None:
        return _Thing(on.kind, on.inode, None, on.device)
    if on.kind in ("msgqueue", "semaphore") and on.id is not None:
        return _Thing(on.kind, on.id, None)
    return None


def _thunders(
    tasks: TaskTable, now: Now, rows: npt.NDArray[np.intp], clocks: Clocks
) -> bool:
    """Tell whether waiters have been woken together: see above."""
    ages = now.age_ns[rows]
    first, last = np.quantile(ages, (_STRAGGLERS / 2, 1 - _STRAGGLERS / 2))
    apart, allowed = last - first, TURN_NS * len(rows)
    if apart > allowed or clocks.monotonic_ns is None:
        return False
    lives = clocks.monotonic_ns - tasks["start_ns"][rows].astype(np.int64)
    if float(np.median(lives - ages)) <= allowed:
        return False
    return float(np.median(tasks["nvcsw"][rows])) >= MIN_SWITCHES


def _herd(
    tasks: TaskTable,
    now: Now,
    thing: _Thing,
    rows: npt.NDArray[np.intp],
    on: On | None,
) -> Herd:
    ages = now.age_ns[rows]
    return Herd(
        lock=str(thing),
        waiters=len(rows),
        owner=on.owner if on else None,
        kind=thing.kind,
        address=on.address if on else None,
        pids=tuple(np.unique(tasks["tgid"][rows]).tolist()),
        min_age_ns=int(ages.min()),
        max_age_ns=int(ages.max()),
        nvcsw_median=int(np.median(tasks["nvcsw"][rows])),
        confidence="one dump",
    )
