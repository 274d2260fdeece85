# SPDX-License-Identifier: LGPL-2.1-or-later

"""Comparisons of two numbers, read once or several times, and their verdicts."""

from collections.abc import Sequence

from msgspec import Struct

from msatools.selfcheck.model import SelfCheck, Verdict


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
