# SPDX-License-Identifier: LGPL-2.1-or-later

"""The dump is cut off or damaged, so that parts are missing."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.kernel.losses import Loss
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule

_LISTS = (Loss.LISTS, Loss.TREES, Loss.TASKS, Loss.NODES, Loss.SECTION_TABLE)
"""Losses that no dump level explains: the kernel's own structures are broken."""

_ZERO_PAGES = 1
"""``makedumpfile -d 1``: only zero pages are excluded."""


class _Damage(Struct, frozen=True):
    parts: ReportParts
    losses: dict[str, int]

    @property
    def is_filtered_too_much(self) -> bool:
        """Whether the dump is whole, and pages that hold lists were filtered out."""
        target = self.parts.target
        is_whole = not target.truncated and not target.bad_descriptors
        return is_whole and (target.dump_level or 0) > _ZERO_PAGES


def _when(parts: ReportParts) -> Iterator[_Damage]:
    target = parts.target
    if target.live:
        return
    counted = {loss.value: parts.coverage.get(loss.value, 0) for loss in _LISTS}
    losses = {key: count for key, count in counted.items() if count}
    if target.truncated or target.bad_descriptors or losses:
        yield _Damage(parts, losses)


def _words(subject: _Damage) -> str:
    if subject.parts.target.lacks_parts:
        return "parts of the split dump are missing: put all into one directory"
    if subject.parts.target.truncated:
        return "the dump is cut off: part of memory is missing"
    if subject.parts.target.bad_descriptors:
        return "the dump's file is damaged: some of its pages cannot be read"
    return "lists of the kernel are broken in the dump: some of it is missing here"


def _evidence(subject: _Damage) -> Iterator[str]:
    bad = subject.parts.target.bad_descriptors
    if bad:
        yield f"{bad:,} pages are not in the file, or have impossible sizes"
    for key, count in subject.losses.items():
        yield f"{key.replace('_', ' ')}: {count:,}"
    for part, why in subject.parts.errors.items():
        yield f"{part}: {why}"
    if subject.is_filtered_too_much:
        yield (
            "a makedumpfile that is older than the kernel leaves out pages that are "
            "needed: take the next dump with a newer one, or with -d 1"
        )


RULE = VerdictRule(
    code="dump-damaged",
    needs=(),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat", "-v"),
)
