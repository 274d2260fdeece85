# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whose stacks have a lock's address: who asked for it, and may have it."""

from collections.abc import Collection

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.stackmemory import Rows, read_stacks
from msatools.tasks.table import TaskTable

_AT_ONCE = 1024
"""Stacks in memory at a time."""


def seen_on_stacks(
    reader: Reader,
    tasks: TaskTable,
    rows: Rows,
    addresses: Collection[int],
    stack_size: int,
    findings: LossLog,
) -> dict[int, list[int]]:
    """
    Find which of some tasks have some addresses on their stacks, in the part in use.

    Of who runs, a dump's registers tell how far that reaches; a running kernel does
    not tell it, so those are not looked at.

    :param rows: Which tasks are looked at.
    :param stack_size: Bytes of a kernel stack.
    :return: By address the rows that have it, ascending.
    """
    wanted = np.array(sorted(addresses), np.uint64)
    found: dict[int, set[int]] = {int(address): set() for address in wanted.tolist()}
    if not len(wanted):
        return {}
    pointers = _pointers(reader.prog, tasks)
    stacks = np.where(pointers != 0, tasks["stack"], 0).astype(np.uint64)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        # What cannot be read was counted when the stacks were unwound.
        memory = read_stacks(
            reader, stacks[part], pointers[part], stack_size, LossLog()
        )
        places = np.flatnonzero(_isin(memory.words, wanted))
        owners = part[np.searchsorted(memory.first, places, side="right") - 1]
        for address, row in zip(
            memory.words[places].tolist(), owners.tolist(), strict=True
        ):
            found[address].add(row)
    searched = int(np.count_nonzero(stacks[rows]))
    findings.coverage["stacks_searched"] += searched
    return {address: sorted(seen) for address, seen in found.items()}


def _isin(words: Addresses, ascending: Addresses) -> npt.NDArray[np.bool_]:
    """Tell which words are among a few: far fewer look-ups than words are needed."""
    found: npt.NDArray[np.bool_] = (words >= ascending[0]) & (words <= ascending[-1])
    found[found] = np.isin(words[found], ascending)
    return found


def _pointers(prog: drgn.Program, tasks: TaskTable) -> Addresses:
    """Tell each task's stack pointer; 0 where it is not to be known."""
    saved = tasks["sp"] if tasks.has("sp") else np.zeros(len(tasks), np.uint64)
    stopped = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0)
    pointers = np.where(stopped, saved, 0).astype(np.uint64)
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return pointers
    runs = (tasks["on_cpu"] != 0) & (tasks["exit_state"] == 0)
    for row in np.flatnonzero(runs).tolist():
        pointers[row] = _running_pointer(prog, int(tasks["address"][row]))
    return pointers


def _running_pointer(prog: drgn.Program, task: int) -> int:
    """Take the stack pointer of who runs from its CPU's registers in the dump."""
    try:
        trace = prog.stack_trace(drgn.Object(prog, "struct task_struct *", task))
        for frame in trace:
            if frame.sp >= KERNEL_HALF:
                # In user mode when it was stopped, the kernel's stack is empty.
                return int(frame.sp)
    except (ValueError, LookupError, drgn.FaultError):
        pass
    return 0
