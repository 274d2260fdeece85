# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a CPU was doing when a dump was made."""

import drgn
from drgn.helpers.linux.percpu import per_cpu

from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.task_state import INTERRUPTS, running_frames
from msatools.tasks.text import KernelText


def doing(prog: drgn.Program, text: KernelText, cpu: int) -> str | None:
    """Tell what a CPU was doing, by its registers in a dump.

    :param text: names functions, also those of modules without debug info
    :return: ``user mode``, or ``kernel`` or ``interrupt`` with the innermost function;
        ``None`` where nothing tells, as on a live kernel, or of an offline CPU whose
        registers are not in the dump.
    """
    try:
        task = per_cpu(prog["runqueues"], cpu).curr.value_()
    except drgn.FaultError:
        return None
    frames = running_frames(prog, task)
    if not frames:
        return None
    innermost, _ = frames[0]
    if innermost < KERNEL_HALF:
        return "user mode"
    entered = any(name.startswith(INTERRUPTS) for _, name in frames)
    name = text.name(innermost) or hex(innermost)
    return f"{'interrupt' if entered else 'kernel'} {name}"
