# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasklets, timers or works make more work for a CPU than others need."""

from msatools.report.findings import present_finding

RULE = present_finding("storm", "cpu-storm")
