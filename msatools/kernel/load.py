# SPDX-License-Identifier: LGPL-2.1-or-later

"""The load averages (kernel/sched/loadavg.c)."""

import drgn
from drgn.helpers.linux.sched import loadavg

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import ask


def load_averages(prog: drgn.Program, losses: LossLog) -> tuple[float, ...] | None:
    """Read the load averages over 1, 5 and 15 minutes; ``None`` if lost."""
    try:
        return ask(loadavg, prog)
    except LOST as error:
        losses.lose(Loss.LOAD, f"cannot read the load averages: {error}")
        return None
