# SPDX-License-Identifier: LGPL-2.1-or-later

"""An interrupt is disabled that has come before.

Who waits for it waits until it is enabled. Some drivers disable theirs for a moment, so
that this alone is for information.
"""

from msatools.report.findings import present_finding

RULE = present_finding("irq-disabled", "irq-disabled", "-i", severity="info")
