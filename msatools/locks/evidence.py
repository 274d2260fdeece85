# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds tasks that have certain addresses on their kernel stacks.

With the address of a lock there, a task took it, tried to, or did so earlier.
"""

from collections.abc import Collection

import drgn
import numpy as np
import numpy.typing as npt

from msatools.errors import MissingError
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.traces import stack_trace
from msatools.tasks.stackmemory import Rows, read_stacks
from msatools.tasks.table import TaskTable

_AT_ONCE = 1024
"""Number of stacks in memory at a time."""


def seen_on_stacks(
    reader: Reader,
    tasks: TaskTable,
    rows: Rows,
    addresses: Collection[int],
    stack_size: int,
    losses: LossLog,
) -> dict[int, list[int]]:
    """
    Find the tasks that have certain addresses in the used part of their stacks.

    The stack pointer of a running task is in the registers of a dump. On a running
    kernel registers cannot be read, so its running tasks are left out.

    :param rows: Rows of the tasks whose stacks are searched.
    :param stack_size: Bytes of a kernel stack.
    :return: Maps each address to the rows of tasks that have it, ascending.
    """
    wanted = np.array(sorted(addresses), np.uint64)
    found: dict[int, set[int]] = {int(address): set() for address in wanted.tolist()}
    if not len(wanted):
        return {}
    pointers = _pointers(reader.prog, tasks, stack_size)
    stacks = np.where(pointers != 0, tasks["stack"], 0).astype(np.uint64)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        # What cannot be read was counted when the stacks were unwound.
        memory = read_stacks(
            reader, stacks[part], pointers[part], stack_size, LossLog()
        )
        losses.coverage["stacks_searched"] += int(np.count_nonzero(memory.size))
        indexes = np.flatnonzero(_isin(memory.words, wanted))
        owners = part[np.searchsorted(memory.first, indexes, side="right") - 1]
        for address, row in zip(
            memory.words[indexes].tolist(), owners.tolist(), strict=True
        ):
            found[address].add(row)
    return {address: sorted(seen) for address, seen in found.items()}


def _isin(words: Addresses, ascending: Addresses) -> npt.NDArray[np.bool_]:
    """Return which words are among a few addresses, with few comparisons."""
    found: npt.NDArray[np.bool_] = (words >= ascending[0]) & (words <= ascending[-1])
    found[found] = np.isin(words[found], ascending)
    return found


def _pointers(prog: drgn.Program, tasks: TaskTable, stack_size: int) -> Addresses:
    """Return the stack pointer of each task; 0 if unknown."""
    saved = tasks["sp"] if tasks.has("sp") else np.zeros(len(tasks), np.uint64)
    stopped = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0)
    pointers = np.where(stopped, saved, 0).astype(np.uint64)
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return pointers
    runs = (tasks["on_cpu"] != 0) & (tasks["exit_state"] == 0)
    for row in np.flatnonzero(runs).tolist():
        stack = int(tasks["stack"][row])
        pointers[row] = _running_pointer(
            prog, int(tasks["address"][row]), range(stack, stack + stack_size)
        )
    return pointers


def _running_pointer(prog: drgn.Program, task: int, stack: range) -> int:
    """Return where a running task's own stack is in use from, in a dump.

    The CPU may be on an interrupt's stack, whose frames come first. If it was in user
    mode, the task's kernel stack has only the registers saved at its entry: 0.
    """
    try:
        frames = stack_trace(prog, task) or ()
        return next((frame.sp for frame in frames if frame.sp in stack), 0)
    except MissingError:
        return 0
