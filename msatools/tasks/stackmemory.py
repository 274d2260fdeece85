# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the stacks of tasks that do not run: the part in use, one read each."""

from itertools import islice

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.list import list_for_each_entry
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.cpumask import is_pointer
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import ask_each, find_type, find_variable, member_of
from msatools.tasks.table import TaskTable
from msatools.tasks.text import kernel_symbol

_WORD = 8
_MAX_STACK_BYTES = 1 << 18
"""Limit for THREAD_SIZE: 16 KiB on x86-64, 64 KiB with KASAN."""

SAVED = ("sp", "fp", "pc")
"""Columns of the task table with registers that are saved; not all on x86-64."""

Rows = npt.NDArray[np.intp]


class StackMemory(Struct, frozen=True):
    """The words from each task's saved stack pointer to the end of its stack."""

    words: Addresses
    """The words of all stacks, one stack after the other."""

    first: Rows
    """Index in ``words`` of each stack's first word."""

    base: Addresses
    """Address of each stack's first word: the saved stack pointer."""

    size: Addresses
    """Bytes read of each stack; 0 if the task has none, or it could not be read."""

    saved: Addresses
    """Shape (stacks, registers): the registers that were saved when each task was last
    switched from, see :func:`saved_registers`."""

    def __len__(self) -> int:
        return len(self.base)

    def stack(self, row: int) -> Addresses:
        """Return the words of one stack."""
        first = int(self.first[row])
        return self.words[first : first + int(self.size[row]) // _WORD]

    def read(
        self, rows: Rows, addresses: Addresses
    ) -> tuple[Addresses, npt.NDArray[np.bool_]]:
        """
        Read one word of each of some stacks.

        :return: The words, 0 for addresses not in the stack; and whether each is.
        """
        offsets = addresses - self.base[rows]  # an address below wraps around
        inside = (offsets < self.size[rows]) & (offsets % _WORD == 0)
        indices = self.first[rows] + (offsets // _WORD).astype(np.intp)
        words = np.zeros(len(rows), np.uint64)
        words[inside] = self.words[indices[inside]]
        return words, inside


def saved_registers(tasks: TaskTable) -> Addresses | None:
    """
    Return the registers that were saved when each thread was last switched from.

    :return: Shape (threads, registers): the stack pointer; on arm64 also the frame
        pointer and the program counter, which x86-64 keeps on the stack. ``None`` if
        not known where they are.
    """
    if not tasks.has("sp"):
        return None
    names = [name for name in SAVED if tasks.has(name)]
    return np.stack([tasks[name].astype(np.uint64) for name in names], 1)


def stack_bytes(prog: drgn.Program) -> int:
    """Find the size of a kernel stack, THREAD_SIZE."""
    try:
        size = _mapped_size(prog) or _first_stack_size(prog)
    except UNREADABLE:
        size = _first_stack_size(prog)
    if not 0 < size <= _MAX_STACK_BYTES or size % 4096:
        # THREAD_SIZE of x86-64 and arm64 without KASAN.
        size = 4 * 4096
    return size


def _mapped_size(prog: drgn.Program) -> int:
    """Return the size of a task's mapped stack (CONFIG_VMAP_STACK); 0 if not found."""
    type_ = find_type(prog, "struct task_struct")
    if not type_.has_member("stack_vm_area"):
        return 0
    if not is_pointer(member_of(type_, "stack_vm_area").type):
        raise DamagedDataError("the types of tasks are damaged")
    tasks = find_variable(prog, "init_task").tasks.address_of_()
    for task in islice(
        ask_each(list_for_each_entry, "struct task_struct", tasks, "tasks"), 64
    ):
        if area := task.stack_vm_area.read_():
            return int(
                area.nr_pages.value_() * find_variable(prog, "PAGE_SIZE").value_()
            )
    return 0


def _first_stack_size(prog: drgn.Program) -> int:
    """Return the size of init_task's stack; 0 without its symbols, as in v6.12."""
    try:
        end = kernel_symbol(prog, "__end_init_task")
        start = kernel_symbol(prog, "__start_init_task")
    except MissingError:
        return 0
    return end - start


def read_stacks(
    reader: Reader,
    stacks: Addresses,
    saved: Addresses,
    stack_size: int,
    losses: LossLog,
) -> StackMemory:
    """
    Read each stack from the saved stack pointer to its end.

    :param stacks: ``task_struct.stack``, the lowest address; 0 if there is no stack.
    :param saved: Saved stack pointers; or with more registers, a row each.
    """
    saved = saved.reshape(len(stacks), -1)
    pointers = np.ascontiguousarray(saved[:, 0])
    used = stacks + np.uint64(stack_size) - pointers
    sane = (stacks != 0) & (used <= stack_size) & (used > 0)
    sane &= (pointers % _WORD == 0) & (stacks % _WORD == 0)
    losses.coverage["stack_pointers_bad"] += int(np.sum((stacks != 0) & ~sane))
    size = np.where(sane, used, 0).astype(np.uint64)
    parts: list[bytes] = []
    rows = np.flatnonzero(sane)
    wanted = rows.tolist(), pointers[rows].tolist(), size[rows].tolist()
    for row, pointer, length in zip(*wanted, strict=True):
        try:
            parts.append(reader.read(pointer, length))
        except UNREADABLE as error:
            size[row] = 0
            losses.lose(Loss.STACKS, f"a stack cannot be read: {error}")
    words = np.frombuffer(b"".join(parts), "<u8")
    ends = np.cumsum(size // _WORD).astype(np.intp)
    first = np.concatenate([np.zeros(1, np.intp), ends[:-1]]) if len(ends) else ends
    return StackMemory(words, first, pointers, size, saved)
