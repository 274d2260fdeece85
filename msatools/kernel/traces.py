# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of single tasks, unwound by drgn."""

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog, logs_of


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
        task = drgn.Object(prog, "struct task_struct *", value=task)
    try:
        return prog.stack_trace(task)
    except drgn.FaultError as error:
        if losses is not None:
            losses.lose(Loss.STACKS, f"the stack of a task is lost: {error}")
        return None
    except (LookupError, ValueError, NotImplementedError):
        return None
    except Exception as error:
        # drgn has an exception for some of what can be wrong with a dump; the others,
        # such as registers that libkdumpfile lacks, are plain ones.
        for losses in logs_of(prog):
            losses.lose(Loss.UNWINDING, f"drgn cannot unwind stacks: {error}")
        return None
