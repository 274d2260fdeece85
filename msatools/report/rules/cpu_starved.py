# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks get no turn on a CPU, as others with a higher priority do not leave it."""

from msatools.report.findings import present_finding
from msatools.report.stalls import present_stalls

RULES = (
    present_stalls("cpu-starved"),
    present_finding("no-turn", "cpu-starved", "-v"),
)
