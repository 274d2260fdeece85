# SPDX-License-Identifier: LGPL-2.1-or-later

"""A grace period of RCU does not end, so that memory is not freed."""

from typing import Any

from msatools.report.rule import VerdictRule
from msatools.report.stalls import logged_stalls, present_stalls

RULES: tuple[VerdictRule[Any], ...] = (
    present_stalls("rcu-stalled"),
    logged_stalls("rcu-stalled", ("rcu-stall",)),
)
