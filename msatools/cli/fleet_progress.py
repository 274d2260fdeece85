# SPDX-License-Identifier: LGPL-2.1-or-later

"""The progress of msa-fleet on a terminal: done, failed, rate, time left."""

import time
from typing import TYPE_CHECKING, TextIO

from msatools.cli.output import StatusLine

if TYPE_CHECKING:
    from msatools.fleet.run import Progress

_REDRAW_S = 0.5


class FleetProgress:
    """A line that is written anew, and erased in the end; nothing in a pipe."""

    def __init__(self, out: TextIO | None) -> None:
        self._line = StatusLine(out)
        self._next_s = 0.0

    def __enter__(self) -> "FleetProgress":
        self._line.write("msa-fleet: starting", 0, 1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._line.erase()

    def dashboard(self, address: str | None) -> None:
        """Say where Dask's own dashboard is, if it runs."""
        if address:
            self._line.add(f"dashboard: {address}")

    def update(self, progress: "Progress") -> None:
        """Show how far the run is."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _REDRAW_S
            done = progress.skipped + progress.finished
            self._line.write(progress_text(progress), done, progress.total)


def progress_text(progress: "Progress") -> str:
    """Return the line: ``msa-fleet: 120 of 300, 3 failed, 1.4/s, 2:09 left``."""
    done = progress.skipped + progress.finished
    words = [f"msa-fleet: {done:,} of {progress.total:,}"]
    if progress.failed:
        words.append(f"{progress.failed:,} failed")
    if progress.workers == 0:
        words.append("waiting for workers")
    elif progress.finished:
        words.append(f"{progress.rate:.1f}/s")
        words.append(f"{_clock(progress.left / progress.rate)} left")
    return ", ".join(words)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
