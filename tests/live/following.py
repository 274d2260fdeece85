# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whether the intervals of a run follow each other."""

from typing import Any


def gap_ns(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Return the time from the end of one interval to the start of the next."""
    return int(after["taken_at_ns"] - after["interval_ns"] - before["taken_at_ns"])


def clocks_ns(report: dict[str, Any]) -> int:
    """Return how far the gap may be from none.

    Intervals of msa-prstat are by the scheduler's clock, which departs from
    CLOCK_MONOTONIC: that is steered. A report says how far clocks may be apart.
    """
    return int(report.get("bound_ns", 0))
