# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of single tasks, unwound by drgn."""

import drgn

from msatools.errors import DamagedDataError, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog, logs_of
from msatools.selfdesc.find import ask, pointer_to


def stack_trace(
    prog: drgn.Program, task: drgn.Object | int, losses: LossLog | None = None
) -> drgn.StackTrace | None:
    """Return the stack of a task; ``None`` if drgn cannot unwind it.

    The reports that are under way count damaged unwind tables as a loss. It is no loss
    that a running task of a live kernel has no registers.

    :param task: ``struct task_struct *``, or its address
    :param losses: Counts a stack that cannot be read, unless the caller does.
    """
    if isinstance(task, int):
        task = pointer_to(prog, "struct task_struct", task)
    try:
        return ask(prog.stack_trace, task)
    except DamagedDataError as error:
        # A running task of a live kernel is a ValueError of drgn's; others, such as for
        # registers that libkdumpfile lacks, have no types of their own.
        if not isinstance(error.__cause__, ValueError):
            for log in logs_of(prog):
                text = f"drgn cannot unwind stacks: {error.__cause__}"
                log.lose(Loss.UNWINDING, text)
        return None
    except drgn.FaultError as error:
        if losses is not None:
            losses.lose(Loss.STACKS, f"cannot read the stack of a task: {error}")
        return None
    except MissingError:
        return None
