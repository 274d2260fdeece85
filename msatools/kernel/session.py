# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs of commands: the interface, and the base for commands that read a kernel."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from drgn import Program
from msgspec.structs import replace

from msatools.kernel.reader import Reader
from msatools.kernel.report import Head, Report, log_of, noting_refusals, ns_between
from msatools.target.model import Target

R = TypeVar("R", bound=Report)
Options = TypeVar("Options")

Progress = Callable[[int, int], None]
"""``progress(done, total)``, in a unit of the caller's choice."""


def quietly(done: int, total: int) -> None:
    """Ignore progress."""


class Session(Generic[R]):
    """One run of a command on one target, with its state between reports.

    A run without an interval calls :meth:`report` once. One with an interval calls
    :meth:`begin` once and then, after each interval, :meth:`advance`; in between it
    calls :meth:`sample` as often as :attr:`period_s` asks for.

    A command implements :meth:`report`, which is enough if each report is of one
    moment. If an interval is the difference of two reports, the command implements
    :meth:`delta`, too. The other methods are for samples within an interval.
    """

    _previous: R | None = None

    @property
    def period_s(self) -> float | None:
        """Seconds between samples within an interval; ``None`` for no samples."""
        return None

    def report(self, progress: Progress) -> R:
        """Return a report of the totals until now, and of the current state."""
        raise NotImplementedError

    def delta(self, previous: R, current: R) -> R:
        """Return the current report with the changes since the previous one.

        Unless a command overrides it, that is only the time between them.
        """
        return replace(current, interval_ns=ns_between(previous, current))

    def begin(self, progress: Progress) -> None:
        """Read the state at the start of the first interval."""
        self._previous = self.report(progress)

    def sample(self) -> None:
        """Take a sample within an interval."""

    def advance(self, progress: Progress) -> R:
        """Return a report of the interval that ends now, and begin the next."""
        previous, current = self._previous, self.report(progress)
        assert previous is not None, "no interval has begun"
        self._previous = current
        return self.delta(previous, current)


class KernelSession(Session[R], Generic[R, Options]):
    """A run of reports on one kernel, with the options of its command.

    Losses found while the run starts are part of all its reports; losses found during
    one report are part of that one only.
    """

    def __init__(self, prog: Program, target: Target, options: Options) -> None:
        self._prog = prog
        self._target = target
        self._options = options
        self._reader = Reader(prog)
        self._losses = log_of(target)
        self._lasting = self._losses.copy()

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Keep the losses found meanwhile for all reports."""
        with noting_refusals(self._prog, self._losses):
            yield
        self._lasting = self._losses.copy()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Gather the losses of one report, without those of earlier reports."""
        self._forget()
        with noting_refusals(self._prog, self._losses):
            yield

    def _forget(self) -> None:
        self._losses.reset(self._lasting)
        self._reader.reads = self._reader.bytes = 0

    def _head(self, taken_at_ns: int | None, always: Iterable[str] = ()) -> Head:
        """Return the head of a report, once all of it has been read.

        :param always: See :meth:`_coverage`.
        """
        return Head(
            target=self._target,
            taken_at_ns=taken_at_ns,
            interval_ns=None,
            coverage=self._coverage(always),
            notes=tuple(self._losses.notes.values()),
        )

    def _coverage(self, always: Iterable[str]) -> dict[str, int]:
        """Return the counts of reads and losses for a report.

        :param always: Keys to include, and first, even if their count is 0.
        """
        counted = self._losses.coverage
        counted["reads"] += self._reader.reads
        counted["bytes_read"] += self._reader.bytes
        return {
            **dict.fromkeys(always, 0),
            **{key: count for key, count in counted.items() if count},
        }
