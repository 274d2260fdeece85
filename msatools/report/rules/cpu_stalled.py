# SPDX-License-Identifier: LGPL-2.1-or-later

"""A CPU takes no interrupts, or does not switch to tasks that wait for it."""

from typing import Any

from msatools.report.rule import VerdictRule
from msatools.report.stalls import logged_stalls, present_stalls

RULES: tuple[VerdictRule[Any], ...] = (
    present_stalls("cpu-stalled"),
    logged_stalls("cpu-stalled", ("soft-lockup", "hard-lockup")),
)
