# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the reports of all commands have in common."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, ClassVar, TypedDict

from drgn import Program
from msgspec import Struct, field

from msatools.faults import OwnFault
from msatools.kernel.losses import Loss, is_loss
from msatools.model import Mark
from msatools.reports.presented import Presented
from msatools.selfdesc import refusals
from msatools.target.model import UNLISTED, Target

_LOGS = "msatools.logs"
"""Key of the program's cache."""

ADDED = Mark("added")
"""
Metadata of a field that is present on request only.

If such a field is ``None``, it was not requested, and JSON lacks its key; ``None`` of
any other field means that the kernel does not keep it, and is null in JSON.
"""


class Note(Struct, frozen=True):
    """One fact that limits how far a report can be trusted."""

    code: str
    """A stable, short, machine-readable name, such as ``pcp-list-broken``."""

    text: str
    """One sentence."""


class LossLog(Struct):
    """The notes and the coverage that a collector gathers for its report."""

    coverage: Counter[str] = field(default_factory=Counter)
    """Number of reads, and of losses by their key (:class:`.losses.Loss`)."""

    about: Counter[str] = field(default_factory=Counter)
    """Number of losses, by the name of the list or the like."""

    notes: dict[tuple[str, str], Note] = field(default_factory=dict)
    """Maps a code and a subject to the first such note."""

    def note(self, code: str, text: str, subject: str = "") -> None:
        """Note something, once for each code and subject."""
        self.notes.setdefault((code, subject), Note(code, text))

    def copy(self) -> "LossLog":
        """Return a copy of what was gathered so far."""
        return LossLog(self.coverage.copy(), self.about.copy(), dict(self.notes))

    def reset(self, to: "LossLog") -> None:
        """Return to the state of an earlier copy, before the next report."""
        kept = to.copy()
        self.coverage, self.about, self.notes = kept.coverage, kept.about, kept.notes

    def add(self, other: "LossLog") -> None:
        """Add what another log gathered."""
        self.coverage.update(other.coverage)
        self.about.update(other.about)
        for key, note in other.notes.items():
            self.notes.setdefault(key, note)

    def cover(self, other: "LossLog") -> None:
        """Add what another log has more: both may have lost the same things."""
        self.coverage |= other.coverage
        self.about |= other.about
        self.notes = {**other.notes, **self.notes}

    def lose(
        self, loss: str, text: str = "", *, count: int = 1, about: str = ""
    ) -> None:
        """Count a loss, and note the first of its kind.

        :param loss: A :class:`.losses.Loss`, or a :func:`.losses.struct_key`.
        :param text: Text of the note; none if the caller notes the loss elsewhere.
        :param count: How many are lost.
        :param about: Name that distinguishes it from others of its kind, which get a
            note each.
        """
        if not count:
            return
        key = loss.value if isinstance(loss, Loss) else loss
        assert is_loss(key), key
        self.coverage[key] += count
        if about:
            self.about[about] += count
        if text:
            self.note("lost", text, f"{key} {about}")

    @property
    def lost(self) -> Counter[str]:
        """Number of losses, by key in the coverage."""
        return Counter(
            {
                key: count
                for key, count in self.coverage.items()
                if count and is_loss(key)
            }
        )


def log_of(target: Target) -> LossLog:
    """Return a log with the losses from opening, which all reports have."""
    losses = LossLog()
    losses.lose(
        Loss.PAGE_DESCRIPTORS,
        "pages lie beyond the end of the file, or have impossible sizes",
        count=target.bad_descriptors,
    )
    # The head of the report says it.
    losses.lose(Loss.TORN, count=target.torn)
    losses.lose(
        Loss.SYMBOLS,
        f"{target.lost_symbols:,} of the kernel's symbols are lost with pages of their "
        "table; what they name is left out, or taken for something that this kernel "
        "lacks",
        count=target.lost_symbols,
    )
    return losses


def logs_of(prog: Program) -> list[LossLog]:
    """Return the logs of the reports on a program that are under way."""
    logs: list[LossLog] = prog.cache.setdefault(_LOGS, [])
    return logs


@contextmanager
def noting_refusals(prog: Program, losses: LossLog) -> Iterator[None]:
    """Note the variables whose type was not found meanwhile, and damaged tables."""
    logs = logs_of(prog)
    logs.append(losses)
    try:
        with refusals(prog) as refused:
            yield
    finally:
        # Compare by identity: logs may be equal.
        logs[:] = [log for log in logs if log is not losses]
    for name, why in refused.items():
        losses.lose(Loss.TYPES, f"{name} is left out: {why}", about=name)


class Cost(Struct, frozen=True, kw_only=True):
    """Cost of one of several samples, on the machine that msatools runs on."""

    cpu_ns: int
    """CPU time of this process since the previous sample, output included."""

    wall_ns: int
    """Time since the previous sample."""

    elapsed_ns: int
    """Time that it took to read the kernel and to make the report."""

    peak_bytes: int | None
    """Peak resident memory of this process; ``None`` if /proc does not show it."""


class Report(Presented, Struct, frozen=True, kw_only=True):
    """The head of every report; subclasses add the payload."""

    schema: ClassVar[str]

    target: Target
    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the target kernel."""

    interval_ns: int | None
    """Kernel time since the previous sample; ``None`` for a one-shot report."""

    coverage: Mapping[str, int]
    """Counts of what was read, missing, unreadable and retried, in the keys' units."""

    notes: tuple[Note, ...]

    cost: Annotated[Cost | None, ADDED] = None
    """Cost of the sample; ``None`` for a report without an interval."""

    faults: Annotated[tuple[OwnFault, ...], UNLISTED] = ()
    """Faults of msatools that cost a part of the report."""


class Head(TypedDict):
    """The fields of every report: ``FilesReport(**head, processes=...)``."""

    target: Target
    taken_at_ns: int | None
    interval_ns: int | None
    coverage: Mapping[str, int]
    notes: tuple[Note, ...]


def ns_between(before: Report, after: Report) -> int | None:
    """Return the kernel time between two reports; ``None`` if one has no time."""
    if before.taken_at_ns is None or after.taken_at_ns is None:
        return None
    return after.taken_at_ns - before.taken_at_ns
