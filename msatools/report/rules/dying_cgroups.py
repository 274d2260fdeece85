# SPDX-License-Identifier: LGPL-2.1-or-later

"""Very many control groups were removed and still exist."""

from collections.abc import Iterator

from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule

_MANY = 1000
"""Each holds some 10 KiB and more per CPU, and each reading of a memory.stat above it
and each round of reclaim visits all."""


def _when(parts: ReportParts) -> Iterator[int]:
    memory = parts.memory
    if memory is not None and (memory.removed_groups or 0) >= _MANY:
        yield memory.removed_groups or 0


RULE = VerdictRule(
    code="dying-cgroups",
    needs=("memory",),
    when=_when,
    severity="info",
    confidence="exact",
    words=lambda count: f"{count:,} control groups were removed and live on",
    evidence=lambda count: (
        "page cache, files of tmpfs and swap that are charged to them keep them, also "
        "sockets and objects of the kernel",
    ),
    see=lambda count: ("memstat", "--by", "cgroup"),
)
