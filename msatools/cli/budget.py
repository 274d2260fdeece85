# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a run takes of the machine that it is on, and how much it may take."""

import os
import re
import resource
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from msatools.kernel.report import Cost

NICENESS = 5
"""Tasks of the machine's own have three times as much of a CPU that both want; an
answer still comes within seconds where every CPU is busy."""

SECOND_NS = 10**9
WINDOW_S = 30.0
"""No stretch so long has more of a CPU than a run may take."""

_MARK_S = 0.25
"""How far apart moments are whose CPU time is remembered."""


class CpuMark(NamedTuple):
    """The CPU time that was used by some moment."""

    at_s: float
    """Of the monotonic clock."""

    used_s: float


def be_nice() -> None:
    """Let others go first, if the user has not said who goes first."""
    if os.nice(0) == 0:
        os.nice(NICENESS)


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process; ``None`` without /proc.

    getrusage() tells it as well, but not of this program alone: what was resident when
    it was started, in the process of which it is a copy, counts there.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None


def cpu_ns() -> int:
    """Return the CPU time of this process, and of those of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round(
        (children.ru_utime + children.ru_stime) * SECOND_NS
    )


class Pace:
    """Keep a run within its share of a CPU, from its first look on.

    Two rules hold. What was used since a look began is made up for before the next:
    that spreads the looks evenly. And no :data:`WINDOW_S` has more than the share, if
    the next look is as dear as the last. A look that is dearer than a whole window's
    share leaves the first rule alone, which then waits for longer than a window.

    :param share: Of one CPU, which it may take; ``None`` for any.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._last_ns = time.monotonic_ns(), cpu_ns()
        self._marks: deque[CpuMark] = deque()
        """Of the last window, and one before it."""

        self.start()

    def start(self) -> None:
        """Start with something that is to be made up for before it is done again."""
        self._started = self._mark()
        self._look_s: float | None = None
        """What it took, once it is known."""

    @property
    def earliest_s(self) -> float:
        """The moment, of the monotonic clock, before which nothing more may be done."""
        if self._share is None:
            return self._started.at_s
        now = self._mark()
        used_s = now.used_s - self._started.used_s
        if self._look_s is None:
            self._look_s = used_s
        made_up_s = self._started.at_s + used_s / self._share
        room_s = self._share * WINDOW_S - self._look_s
        return max(made_up_s, self._window_opens_s(now, room_s))

    def cost(self, began_ns: int) -> Cost:
        """Return what a sample has cost that is there now.

        :param began_ns: When the look began, of the monotonic clock.
        """
        (wall_ns, used_ns), now_ns = self._last_ns, time.monotonic_ns()
        self._last_ns = now_ns, cpu_ns()
        return Cost(
            cpu_ns=self._last_ns[1] - used_ns,
            wall_ns=now_ns - wall_ns,
            elapsed_ns=now_ns - began_ns,
            peak_bytes=peak_bytes(),
        )

    def _mark(self) -> CpuMark:
        """Return the CPU time that is used by now; keep it, if the last is not new."""
        now = CpuMark(time.monotonic(), cpu_ns() / SECOND_NS)
        if not self._marks or now.at_s - self._marks[-1].at_s >= _MARK_S:
            self._marks.append(now)
        while len(self._marks) > 1 and self._marks[1].at_s <= now.at_s - WINDOW_S:
            self._marks.popleft()
        return now

    def _window_opens_s(self, now: CpuMark, room_s: float) -> float:
        """Return the moment whose last window has no more than a number of seconds.

        What was used between two marks may all have been used just before the second.
        """
        first = self._marks[0]
        for mark in self._marks:
            if now.used_s - mark.used_s <= room_s:
                # Nothing was used before the first, or it is too long ago to count.
                return mark.at_s + (WINDOW_S if mark is not first else 0.0)
        return first.at_s
