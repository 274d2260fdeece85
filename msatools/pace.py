# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a run takes of the machine that it is on, and how much it may take."""

import os
import re
import time
from pathlib import Path

from msatools.kernel.report import Cost

NICENESS = 5
"""Tasks of the machine's own have three times as much of a CPU that both want; an
answer still comes within seconds where every CPU is busy."""


def be_nice() -> None:
    """Let others go first, if the user has not said who goes first."""
    if os.nice(0) == 0:
        os.nice(NICENESS)


def peak_bytes() -> int | None:
    """Tell the most memory that this process has had resident; ``None`` without /proc.

    getrusage() tells it as well, but not of this program alone: what was resident when
    it was started, in the process of which it is a copy, counts there.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None


class Pace:
    """Keeps count of the CPU time of this process, from sample to sample.

    :param share: Of one CPU, which it may take; ``None`` for any.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._last_ns = time.monotonic_ns(), time.process_time_ns()
        self.start()

    def start(self) -> None:
        """Start with something that is to be made up for before it is done again."""
        self._started_s = time.monotonic(), time.process_time()

    @property
    def earliest_s(self) -> float:
        """The moment, of the monotonic clock, before which nothing more may be done."""
        then_s, cpu_s = self._started_s
        if self._share is None:
            return then_s
        return then_s + (time.process_time() - cpu_s) / self._share

    def cost(self, began_ns: int) -> Cost:
        """Tell what a sample has cost that is there now.

        :param began_ns: When the look began, of the monotonic clock.
        """
        (wall_ns, cpu_ns), now_ns = self._last_ns, time.monotonic_ns()
        self._last_ns = now_ns, time.process_time_ns()
        return Cost(
            cpu_ns=self._last_ns[1] - cpu_ns,
            wall_ns=now_ns - wall_ns,
            elapsed_ns=now_ns - began_ns,
            peak_bytes=peak_bytes(),
        )
