# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the runs of all commands on a kernel have in common."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog, noting_refusals
from msatools.target.model import Target

Progress = Callable[[int, int], None]
"""``progress(done, total)``, in a unit of the caller's choice."""


def quietly(done: int, total: int) -> None:
    """Tell nobody how far it is."""


class KernelSession:
    """A run of reports on one kernel: see :class:`msatools.cli.command.Session`.

    What is found of the kernel itself when a run starts holds for all its reports;
    what one report finds, for that one.
    """

    def __init__(self, prog: Program, target: Target) -> None:
        self._prog = prog
        self._target = target
        self._reader = Reader(prog)
        self._findings = LossLog()
        self._lasting = LossLog()

    @property
    def period_s(self) -> float | None:
        """How long after one sample it wants the next: it wants none."""
        return None

    def sample(self) -> None:
        """Look at the kernel in the midst of an interval: there is nothing to see."""

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Keep what is found meanwhile for all reports."""
        with noting_refusals(self._prog, self._findings):
            yield
        self._lasting = self._findings.copy()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Gather the findings of one report apart from those of others before."""
        self._forget()
        with noting_refusals(self._prog, self._findings):
            yield

    def _forget(self) -> None:
        self._findings.reset(self._lasting)
        self._reader.reads = self._reader.bytes = 0

    def _coverage(self, always: Iterable[str]) -> dict[str, int]:
        """Tell what was read and what was lost for a report.

        :param always: Keys that are there, and first, also where they count nothing.
        """
        counted = self._findings.coverage
        counted["reads"] += self._reader.reads
        counted["bytes_read"] += self._reader.bytes
        return {
            **dict.fromkeys(always, 0),
            **{key: count for key, count in counted.items() if count},
        }
