# SPDX-License-Identifier: LGPL-2.1-or-later

"""The load averages (kernel/sched/loadavg.c)."""

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog

_FSHIFT = 11
"""Bits of the averages after the point (include/linux/sched/loadavg.h)."""


def load_averages(prog: drgn.Program, findings: LossLog) -> tuple[float, ...] | None:
    """Read the load averages over 1, 5 and 15 minutes."""
    try:
        values = prog["avenrun"].value_()
    except (drgn.FaultError, LookupError) as error:
        findings.lose(Loss.LOAD, f"the load averages are lost: {error}")
        return None
    return tuple(value / (1 << _FSHIFT) for value in values)
