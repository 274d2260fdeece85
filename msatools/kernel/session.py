# SPDX-License-Identifier: LGPL-2.1-or-later

"""One run of a command, and what the runs of all commands on a kernel share."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import Head, LossLog, Report, noting_refusals, ns_between
from msatools.target.model import Target

R = TypeVar("R", bound=Report)
Options = TypeVar("Options")

Progress = Callable[[int, int], None]
"""``progress(done, total)``, in a unit of the caller's choice."""


def quietly(done: int, total: int) -> None:
    """Tell nobody how far it is."""


class Session(Generic[R]):
    """One run of a command on one target, and what it keeps between its reports.

    A run without an interval calls :meth:`report` once. One with an interval calls
    :meth:`begin` once and then, after each interval, :meth:`advance`; in between it
    calls :meth:`sample` as often as :attr:`period_s` asks for.

    A command implements :meth:`report`, and nothing else if all its reports are of one
    moment. If an interval is the difference of two reports, it implements
    :meth:`delta`, too; the other methods are for samples that no report holds.
    """

    _previous: R | None = None

    @property
    def period_s(self) -> float | None:
        """Seconds from one sample within an interval to the next; ``None``: none."""
        return None

    def report(self, progress: Progress) -> R:
        """Report the totals until now, and the state now."""
        raise NotImplementedError

    def delta(self, previous: R, current: R) -> R:
        """Return the current report with what changed since the previous one.

        Unless a command says more, that is the time.
        """
        return replace(current, interval_ns=ns_between(previous, current))

    def begin(self, progress: Progress) -> None:
        """Read what the first interval begins with."""
        self._previous = self.report(progress)

    def sample(self) -> None:
        """Read what is needed from within an interval."""

    def advance(self, progress: Progress) -> R:
        """Report the interval that ends now, at whose end the next begins."""
        previous, current = self._previous, self.report(progress)
        assert previous is not None, "no interval has begun"
        self._previous = current
        return self.delta(previous, current)


class KernelSession(Session[R], Generic[R, Options]):
    """A run of reports on one kernel, with the options that its command has.

    What is found of the kernel itself when a run starts holds for all its reports;
    what one report finds, for that one.
    """

    def __init__(self, prog: Program, target: Target, options: Options) -> None:
        self._prog = prog
        self._target = target
        self._options = options
        self._reader = Reader(prog)
        self._losses = LossLog()
        self._lasting = LossLog()

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Keep what is found meanwhile for all reports."""
        with noting_refusals(self._prog, self._losses):
            yield
        self._lasting = self._losses.copy()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Gather the losses of one report apart from those of others before."""
        self._forget()
        with noting_refusals(self._prog, self._losses):
            yield

    def _forget(self) -> None:
        self._losses.reset(self._lasting)
        self._reader.reads = self._reader.bytes = 0

    def _head(self, taken_at_ns: int | None, always: Iterable[str] = ()) -> Head:
        """Return the head of a report, of which all is read.

        :param always: Keys of the coverage: see :meth:`_coverage`.
        """
        return Head(
            target=self._target,
            taken_at_ns=taken_at_ns,
            interval_ns=None,
            coverage=self._coverage(always),
            notes=tuple(self._losses.notes.values()),
        )

    def _coverage(self, always: Iterable[str]) -> dict[str, int]:
        """Tell what was read and what was lost for a report.

        :param always: Keys that are there, and first, also where they count nothing.
        """
        counted = self._losses.coverage
        counted["reads"] += self._reader.reads
        counted["bytes_read"] += self._reader.bytes
        return {
            **dict.fromkeys(always, 0),
            **{key: count for key, count in counted.items() if count},
        }
