# SPDX-License-Identifier: LGPL-2.1-or-later

"""The load averages (kernel/sched/loadavg.c)."""

import drgn
from drgn.helpers.linux.sched import loadavg

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog


def load_averages(prog: drgn.Program, losses: LossLog) -> tuple[float, ...] | None:
    """Read the load averages over 1, 5 and 15 minutes; ``None`` if lost."""
    try:
        return loadavg(prog)
    except (drgn.FaultError, LookupError) as error:
        losses.lose(Loss.LOAD, f"the load averages are lost: {error}")
        return None
