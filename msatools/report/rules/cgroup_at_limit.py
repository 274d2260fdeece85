# SPDX-License-Identifier: LGPL-2.1-or-later

"""A control group has used up its memory, and little of it can be reclaimed."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.memory import GroupAtLimit
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text
from msatools.reports.units import size

_CACHE = 0.1
"""A group with a greater share of file pages is at its limit as it should be."""


class _FullGroup(Struct, frozen=True):
    group: GroupAtLimit
    page_size: int


def _when(parts: ReportParts) -> Iterator[_FullGroup]:
    memory = parts.memory
    groups = [] if memory is None else [*memory.groups]
    for group in sorted(groups, key=lambda group: (-group.ooms, -group.pages)):
        can_swap = memory is not None and bool(memory.swap_free_pages)
        free = group.file_pages + (group.anon_pages if can_swap else 0)
        if free < _CACHE * group.max_pages or group.ooms:
            yield _FullGroup(group, parts.target.page_size)


def _words(subject: _FullGroup) -> str:
    group = subject.group
    limit = size(group.max_pages * subject.page_size)
    return f"control group {group.path or '-'} is at its limit of {limit}"


def _evidence(subject: _FullGroup) -> Iterator[str]:
    group, page = subject.group, subject.page_size
    yield (
        f"{size(group.pages * page)} charged: {size(group.anon_pages * page)} "
        f"anonymous, {size(group.file_pages * page)} of files"
    )
    if group.ooms:
        yield (
            f"out of memory {count_text(group.ooms, 'time')}, "
            f"{count_text(group.kills, 'process', 'es')} killed"
        )


RULE = VerdictRule(
    code="cgroup-at-limit",
    needs=("memory",),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat", "--by", "cgroup"),
)
