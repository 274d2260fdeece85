# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs of msa-memstat: each report is of one moment."""

from collections.abc import Callable

from msatools.kernel.session import Progress, Session
from msatools.memory.memstat import delta
from msatools.memory.model import MemstatReport


class MemstatSession(Session[MemstatReport]):
    """A run of reports on one kernel.

    :param collect: Returns a report of where the memory is now.
    """

    def __init__(self, collect: Callable[[Progress], MemstatReport]) -> None:
        self._collect = collect

    def report(self, progress: Progress) -> MemstatReport:
        """Return a report of where the memory is now."""
        return self._collect(progress)

    def delta(self, previous: MemstatReport, current: MemstatReport) -> MemstatReport:
        """Return the current report with the change of each class."""
        return delta(previous, current)
