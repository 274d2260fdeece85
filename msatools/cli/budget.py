# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPU time and memory of a run, and the limit of its CPU time."""

import os
import re
import resource
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from msatools.kernel.report import Cost

NICENESS = 5
"""Nice value of a run. A task with nice value 0 gets three times as much of a CPU that
both need; a report still takes only seconds if all CPUs are busy."""

SECOND_NS = 10**9
WINDOW_S = 30.0
"""Length of the sliding window in which a run never exceeds its share of a CPU."""

_MARK_S = 0.25
"""Minimum time between two marks."""


class CpuMark(NamedTuple):
    """CPU time used up to a moment."""

    at_s: float
    """The moment, by the monotonic clock."""

    used_s: float


def be_nice() -> None:
    """Raise the nice value, unless the user has changed it."""
    if os.nice(0) == 0:
        os.nice(NICENESS)


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process; ``None`` without /proc.

    getrusage() would include the memory that its parent had at fork().
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def cpu_ns() -> int:
    """Return the CPU time of this process and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round(
        (children.ru_utime + children.ru_stime) * SECOND_NS
    )


class Pace:
    """Delays the reports and samples of a run to keep it within its share of a CPU.

    There are two rules. After each of them the run waits until its CPU time since the
    start of that one is within the share: this spreads them evenly. And no window of
    :data:`WINDOW_S` exceeds the share, if the next one costs as much as the last. If
    one costs more than the share of a whole window, only the first rule applies, and
    the run waits for longer than a window.

    :param share: Maximum share of one CPU; ``None`` for no limit.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._last_ns = time.monotonic_ns(), cpu_ns()
        self._marks: deque[CpuMark] = deque()
        """Marks within the last window, and one before it."""

        self.start()

    def start(self) -> None:
        """Begin a report."""
        self._started = self._mark()
        self._report_s: float | None = None
        """CPU time of the report, once known."""

    @property
    def earliest_s(self) -> float:
        """The earliest start of the next report or sample, by the monotonic clock."""
        if self._share is None:
            return self._started.at_s
        now = self._mark()
        used_s = now.used_s - self._started.used_s
        if self._report_s is None:
            self._report_s = used_s
        within_share_s = self._started.at_s + used_s / self._share
        room_s = self._share * WINDOW_S - self._report_s
        return max(within_share_s, self._window_opens_s(now, room_s))

    def cost(self, began_ns: int) -> Cost:
        """Return the cost of a sample that has just ended.

        :param began_ns: Its start, by the monotonic clock.
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
        """Return the CPU time used until now; keep it if the last mark is old."""
        now = CpuMark(time.monotonic(), cpu_ns() / SECOND_NS)
        if not self._marks or now.at_s - self._marks[-1].at_s >= _MARK_S:
            self._marks.append(now)
        while len(self._marks) > 1 and self._marks[1].at_s <= now.at_s - WINDOW_S:
            self._marks.popleft()
        return now

    def _window_opens_s(self, now: CpuMark, room_s: float) -> float:
        """Return when the CPU time in the sliding window falls to *room_s*.

        All CPU time between two marks is assumed to be used just before the second.
        """
        first = self._marks[0]
        for mark in self._marks:
            if now.used_s - mark.used_s <= room_s:
                # CPU time before the first mark is none, or outside of the window.
                return mark.at_s + (WINDOW_S if mark is not first else 0.0)
        return first.at_s
