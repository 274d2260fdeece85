# SPDX-License-Identifier: LGPL-2.1-or-later

"""An interrupt is disabled that has come before: who waits for it waits for ever."""

from msatools.report.findings import present_finding

RULE = present_finding("irq-disabled", "irq-disabled", "-i")
