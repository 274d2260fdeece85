# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of ``--self-check``: comparisons of numbers, and their verdicts."""

from collections.abc import Mapping, Sequence
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


# --- Comparisons of two numbers, read once or several times, and their verdicts.


class Comparison(Struct, frozen=True, kw_only=True):
    """Two numbers at one reading of the kernel."""

    name: str
    left: str
    right: str
    left_value: int | None = None
    right_value: int | None = None
    least: int = 0
    most: int | None = 0
    """Range of ``left_value - right_value`` that is allowed; no upper end if
    ``None``."""

    reason: str | None = None
    """Why a difference is allowed."""

    absent: str | None = None
    """Why the comparison does not apply to this kernel, if so."""

    lost: str | None = None
    """Why a number could not be read, if so."""

    @property
    def difference(self) -> int | None:
        """The left number less the right one; ``None`` if one is unknown."""
        if self.left_value is None or self.right_value is None:
            return None
        return self.left_value - self.right_value

    @property
    def holds(self) -> bool:
        """Whether the difference is known and allowed."""
        if self.difference is None or self.difference < self.least:
            return False
        return self.most is None or self.difference <= self.most


def judge(readings: Sequence[Comparison]) -> SelfCheck:
    """
    Return the verdict on readings of the same two numbers, the latest last.

    Of several readings one that holds is enough. If none does, each number had some
    value between its least and its most: if these ranges allow a difference that would
    hold, the numbers moved; if not, they differ.
    """
    best = next((each for each in readings if each.holds), readings[-1])
    verdict, reason = _verdict(best, readings)
    return SelfCheck(
        name=best.name,
        left=best.left,
        right=best.right,
        left_value=best.left_value,
        right_value=best.right_value,
        difference=best.difference,
        allowed_least=best.least,
        allowed_most=best.most,
        reason=reason,
        verdict=verdict,
    )


def _verdict(
    best: Comparison, readings: Sequence[Comparison]
) -> tuple[Verdict, str | None]:
    if best.absent is not None:
        return "not-applicable", best.absent
    if best.difference is None:
        return "unknown", best.lost or "a number could not be read"
    if best.holds:
        return "ok", best.reason if best.difference else None
    if _may_have_held(readings):
        return "moved", f"changed between {len(readings)} readings of a running kernel"
    return "differs", best.reason


def _may_have_held(readings: Sequence[Comparison]) -> bool:
    """Return whether the ranges of both numbers allow a difference that holds."""
    left = [each.left_value for each in readings if each.left_value is not None]
    right = [each.right_value for each in readings if each.right_value is not None]
    if len(readings) < 2 or not (left and right):
        return False
    least = min(each.least for each in readings)
    lowest, highest = min(left) - max(right), max(left) - min(right)
    if any(each.most is None for each in readings):
        return highest >= least
    most = max(each.most for each in readings if each.most is not None)
    return lowest <= most and highest >= least
