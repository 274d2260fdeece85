# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of ``--self-check``. Plain data, to be rendered as text or JSON."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec import Struct

from msatools.kernel.report import Report

Verdict = Literal["ok", "moved", "differs", "unknown", "not-applicable"]
"""``ok``: the numbers agree, or their difference is allowed. ``moved``: they differ,
but changed between readings of a running kernel by more than that. ``differs``: the
check failed. ``unknown``: a number could not be read. ``not-applicable``: this kernel
or target does not have what is compared."""

FAILED: frozenset[Verdict] = frozenset({"differs", "unknown"})
"""Verdicts that make the exit status 3 with ``--strict``."""


class SelfCheck(Struct, frozen=True, kw_only=True):
    """Two numbers that should agree."""

    name: str
    """A stable name, such as ``memory.slabs``."""

    left: str
    right: str
    """What is compared, in words without names of tasks, files or addresses."""

    left_value: int | None
    right_value: int | None
    difference: int | None
    """``left_value - right_value``."""

    allowed_least: int
    allowed_most: int | None
    """Range of differences that are allowed; ``None`` for no upper end."""

    reason: str | None
    """Why a difference is allowed, or why there is no verdict."""

    verdict: Verdict

    @property
    def has_failed(self) -> bool:
        """Whether the numbers differ, or could not be read."""
        return self.verdict in FAILED


class Software(Struct, frozen=True, kw_only=True):
    """Versions of what the command runs on."""

    msatools: str
    drgn: str
    python: str


class KernelFacts(Struct, frozen=True, kw_only=True):
    """Properties of a kernel that decide how it is read."""

    paging_levels: int | None
    """Levels of its page tables; ``None`` if msatools does not read them itself."""

    unwinder: Literal["own", "drgn"]
    """What unwinds stacks: the kernel's own tables, or drgn."""

    cpus_possible: int | None
    cpus_online: int | None
    nodes_possible: int | None
    features: Mapping[str, bool]
    """Parts of the kernel, such as ``memcg``, and whether it was built with them."""

    variables_missing: tuple[str, ...]
    """Variables that were looked up and are not in this kernel."""

    members_missing: tuple[str, ...]
    """Members that were looked up, by their newest name: ``struct rq.scx``."""

    members_older: Mapping[str, str]
    """Members that were found by an older name than the newest."""


class SelfCheckReport(Report, frozen=True, kw_only=True):
    """Whether the numbers of one command agree with others on a kernel."""

    schema: ClassVar[str] = "msatools.selfcheck/1"

    command: str
    """Name of the command, as in ``msa-NAME``."""

    checks: tuple[SelfCheck, ...]
    readings: int
    """How often the kernel was read: once, or more if numbers of a running kernel
    differed."""

    software: Software
    kernel: KernelFacts

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return any(check.has_failed for check in self.checks)
