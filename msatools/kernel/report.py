# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the reports of all commands have in common."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, TypedDict

from drgn import Program

from msatools.kernel.losses import Loss, is_loss
from msatools.selfdesc import refusals
from msatools.target.model import Target

ADDED = MappingProxyType({"added": True})
"""
Metadata of a field that is there on request only.

Its ``None`` means that nobody asked, and no key; elsewhere ``None`` means that the
kernel does not keep it, and null.
"""


@dataclass(frozen=True)
class Note:
    """One thing the reader of a report must know to trust it."""

    code: str
    """A stable, short, machine-readable name, such as ``pcp-list-broken``."""

    text: str
    """One sentence."""


@dataclass
class LossLog:
    """What a collector gathers for the notes and the coverage of its report."""

    coverage: Counter[str] = field(default_factory=Counter)
    """How often something was read, or lost (:class:`.losses.Loss`)."""

    about: Counter[str] = field(default_factory=Counter)
    """How often something was lost, by the names of lists and the like."""

    notes: dict[tuple[str, str], Note] = field(default_factory=dict)
    """What happens a thousand times is noted once and counted."""

    def note(self, code: str, text: str, subject: str = "") -> None:
        """Note something, once for each code and subject."""
        self.notes.setdefault((code, subject), Note(code, text))

    def copy(self) -> "LossLog":
        """Keep what is known so far."""
        return LossLog(self.coverage.copy(), self.about.copy(), dict(self.notes))

    def reset(self, to: "LossLog") -> None:
        """Forget what was found since, as another report begins."""
        kept = to.copy()
        self.coverage, self.about, self.notes = kept.coverage, kept.about, kept.notes

    def add(self, other: "LossLog") -> None:
        """Add what was found elsewhere."""
        self.coverage.update(other.coverage)
        self.about.update(other.about)
        for key, note in other.notes.items():
            self.notes.setdefault(key, note)

    def lose(
        self, loss: str, text: str = "", *, count: int = 1, about: str = ""
    ) -> None:
        """Count what is lost, and note the first of its kind.

        :param loss: A :class:`.losses.Loss`, or the key of a structure.
        :param text: What to note; nothing, if that is said elsewhere.
        :param count: How much is lost.
        :param about: What tells this from others of its kind that are noted, too.
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
        """How often something was lost, by its key in the coverage."""
        found = ((key, self.coverage[key]) for key in self.coverage if is_loss(key))
        return Counter({key: count for key, count in found if count})


@contextmanager
def noting_refusals(prog: Program, losses: LossLog) -> Iterator[None]:
    """Note what the kernel has but nothing told the type of meanwhile."""
    with refusals(prog) as refused:
        yield
    for name, why in refused.items():
        losses.lose(Loss.TYPES, f"{name} is left out: {why}", about=name)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one sample of many took of the machine that msatools runs on."""

    cpu_ns: int
    """CPU time of this process since the sample before, all that it does."""

    wall_ns: int
    """How long that is ago."""

    elapsed_ns: int
    """How long the look at the kernel took, and what was made of it."""

    peak_bytes: int | None
    """The most resident memory that this process has had, if /proc tells it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The head of every report; subclasses add the payload."""

    schema: ClassVar[str]

    target: Target
    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the kernel looked at."""

    interval_ns: int | None
    """Kernel time since the sample before, ``None`` for a one-shot report."""

    coverage: Mapping[str, int]
    """What was read, missing, unreadable and retried, in units the keys name."""

    notes: tuple[Note, ...]

    cost: Cost | None = field(default=None, metadata=ADDED)
    """Of a sample; a report without an interval has none."""


class Head(TypedDict):
    """The fields that every report has: ``FilesReport(**head, processes=...)``."""

    target: Target
    taken_at_ns: int | None
    interval_ns: int | None
    coverage: Mapping[str, int]
    notes: tuple[Note, ...]


def ns_between(before: Report, after: Report) -> int | None:
    """Tell how much time of the kernel is between two reports, if both know theirs."""
    if before.taken_at_ns is None or after.taken_at_ns is None:
        return None
    return after.taken_at_ns - before.taken_at_ns
