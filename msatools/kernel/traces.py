# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of single tasks, unwound by drgn."""

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import logs_of


def stack_trace(prog: drgn.Program, task: drgn.Object | int) -> drgn.StackTrace | None:
    """Return the stack of a task; ``None`` if drgn cannot unwind it.

    The reports that are under way count damaged unwind tables as a loss. It is no loss
    that a running task of a live kernel has no registers.

    :param task: ``struct task_struct *``, or its address
    """
    if isinstance(task, int):
        task = drgn.Object(prog, "struct task_struct *", value=task)
    try:
        return prog.stack_trace(task)
    except (drgn.FaultError, LookupError, ValueError, NotImplementedError):
        return None
    except Exception as error:
        # drgn has an exception for some of what can be wrong with a dump; the others,
        # such as registers that libkdumpfile lacks, are plain ones.
        for losses in logs_of(prog):
            losses.lose(Loss.UNWINDING, f"drgn cannot unwind stacks: {error}")
        return None
