# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasklets, timers or works make more work for a CPU than others need.

Some devices need it: that it is so is for information, and who makes it is seen at one
moment.
"""

from msatools.report.findings import present_finding

RULE = present_finding("storm", "cpu-storm", severity="info", confidence="evidence")
