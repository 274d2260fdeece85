# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read and unwind the stacks of tasks that do not run: many at once, or one.

Stacks of x86-64 are unwound by ORC, of arm64 by frame records.
"""

from collections.abc import Callable
from itertools import islice
from typing import Protocol

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.list import list_for_each_entry
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.percpu import is_pointer
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import each_once
from msatools.program.arch import START_KERNEL_MAP
from msatools.program.linear import KERNEL_HALF, code_start
from msatools.selfdesc.find import (
    ask_each,
    find_type,
    find_variable,
    member_of,
    offset_of,
    vmcoreinfo_number,
)
from msatools.tasks.table import TaskTable
from msatools.tasks.text import (
    BY_FRAME_POINTER,
    MAX_FRAMES,
    RULES,
    End,
    FrameRule,
    Orc,
    worked_out,
)

# --- Read the stacks of tasks that do not run: the part in use, one read each.


_WORD = 8
_MAX_STACK_BYTES = 1 << 18
"""Maximum plausible THREAD_SIZE: it is 16 KiB on x86-64, 64 KiB with KASAN."""

SAVED = ("sp", "fp", "pc")
"""Columns of the task table with the saved registers; x86-64 has only the first."""

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
    """The registers that were saved when each task was last switched from, see
    :func:`saved_registers`; shape (stacks, registers)."""

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

        :return: The words, and whether each address is in its stack; the word is 0 if
            not.
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
        the table has no stack pointers.
    """
    if not tasks.has("sp"):
        return None
    names = [name for name in SAVED if tasks.has(name)]
    return np.stack([tasks[name].astype(np.uint64) for name in names], 1)


def stack_bytes(prog: drgn.Program) -> int:
    """Return the size of a kernel stack in bytes (THREAD_SIZE)."""
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
    :param saved: The saved stack pointers, or rows of registers that begin with them.
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
    read = reader.read_each(pointers[rows], size[rows])
    for row, data in zip(rows.tolist(), read, strict=True):
        if isinstance(data, bytes):
            parts.append(data)
        else:
            size[row] = 0
            losses.lose(Loss.STACKS, f"a stack cannot be read: {data}")
    words = np.frombuffer(b"".join(parts), "<u8")
    ends = np.cumsum(size // _WORD).astype(np.intp)
    first = np.concatenate([np.zeros(1, np.intp), ends[:-1]]) if len(ends) else ends
    return StackMemory(words, first, pointers, size, saved)


# --- Unwind one x86-64 stack, by the same ORC rules as many at once (below).


_ALL = (1 << 64) - 1


class OneStack(Struct, frozen=True):
    """The frames of a stack, innermost first."""

    pcs: list[int]
    interrupted: list[bool]
    """Whether each frame was left by an exception: its pc is no return address."""

    end: End
    guessed: bool
    """Whether the code of a frame is in no ORC table."""


class ReadsWords(Protocol):
    """Memory with the stack that is unwound."""

    def read(self, address: int) -> int | None:
        """Return a word; ``None`` if it cannot be read."""


class OneMemory(Struct, frozen=True):
    """The words from a saved stack pointer to the end of the stack."""

    words: list[int]
    base: int
    """The saved stack pointer."""

    def read(self, address: int) -> int | None:
        """Return a word; ``None`` if *address* is not in the stack."""
        index, within = divmod(address - self.base, _WORD)
        return None if within or not 0 <= index < len(self.words) else self.words[index]


class OneState(Struct):
    """Registers of a frame."""

    pc: int
    sp: int
    bp: int
    interrupted: bool
    """Whether the frame was left by an exception: its pc is no return address."""


def unwind_one(
    memory: ReadsWords, state: OneState, rule_of: Callable[[int], FrameRule]
) -> OneStack:
    """Unwind a stack from *state*, which is changed, to its end."""
    pcs: list[int] = []
    interrupted: list[bool] = []
    end, guessed = End.LOST, False
    while len(pcs) < MAX_FRAMES:
        pcs.append(state.pc)
        interrupted.append(state.interrupted)
        # A return address may be past the end of the calling function.
        rule = rule_of(state.pc if state.interrupted else state.pc - 1)
        guessed |= rule.guess
        end = End(rule.end)
        if not rule.goes_on:
            break
        entered = _step(memory, state, rule)
        if entered is not None:
            end = End.ENTRY if entered else End.LOST
            break
    return OneStack(pcs, interrupted, end, guessed)


def _step(memory: ReadsWords, state: OneState, rule: FrameRule) -> bool | None:
    """Set *state* to the caller.

    :return: ``None`` if there is a caller; else whether the stack ends at the entry
        from user mode.
    """
    base = state.sp if rule.cfa_by_sp else state.bp
    cfa: int | None = base + rule.cfa_offset & _ALL
    if rule.cfa_at:
        cfa = memory.read(base + rule.cfa_offset & _ALL)
    if cfa is None:
        return False
    pc = memory.read(cfa + rule.ip_offset & _ALL)
    sp = memory.read(cfa + rule.sp_offset & _ALL) if rule.regs else cfa
    if pc is None or sp is None:
        return False
    # Saved registers of user mode end the stack.
    if rule.regs and pc < KERNEL_HALF:
        return True
    # A caller lies higher, unless it is on the other stack that an interrupt left.
    if pc < START_KERNEL_MAP or (sp <= state.sp and not rule.cfa_at):
        return False
    bp: int | None = state.bp
    if rule.saves_bp:
        bp = memory.read((state.bp if rule.bp_by_bp else cfa) + rule.bp_offset & _ALL)
    if bp is None:
        return False
    state.pc, state.sp, state.bp = pc, sp, bp
    state.interrupted = rule.interrupted
    return None


# --- Unwind many x86-64 stacks at once by ORC: each step unwinds one frame of all.


_FEW = 8
"""Maximum number of stacks that are unwound one by one: a vectorized step costs as much
as twenty single ones."""

_USER, _CODE = np.uint64(KERNEL_HALF), np.uint64(START_KERNEL_MAP)

Flags = npt.NDArray[np.bool_]


class Frames(Struct, frozen=True):
    """The frames of many stacks: one row for each stack, innermost frame first."""

    pcs: Addresses
    """Program counters; 0 past the end of a stack. Shape (stacks, frames)."""

    interrupted: Flags
    """Whether each frame was left by an exception: its pc is no return address."""

    ends: npt.NDArray[np.uint8]
    """How each stack ends: members of :class:`End`."""

    guessed: Flags
    """Whether each stack has a frame whose code is in no ORC table."""


class _UnwindState(Struct):
    """Rows and registers of the stacks that have not ended."""

    rows: Rows
    pc: Addresses
    sp: Addresses
    bp: Addresses
    interrupted: Flags

    def keep(self, chosen: Flags) -> "_UnwindState":
        return _UnwindState(
            self.rows[chosen],
            self.pc[chosen],
            self.sp[chosen],
            self.bp[chosen],
            self.interrupted[chosen],
        )


class Unwinder:
    """
    Unwinds x86-64 stacks of tasks that do not run, by ORC.

    :param newborn: address where a new task begins to run (:func:`thread_start`)
    :raises MissingError: if this kernel has no ``struct inactive_task_frame``
    """

    def __init__(self, prog: drgn.Program, orc: Orc, newborn: int) -> None:
        # Since Linux kernel commit 0100301bfdf5 ("sched/x86: Rewrite the switch_to()
        # code") (in v4.9).
        saved = find_type(prog, "struct inactive_task_frame")
        self._orc = orc
        self._saved_bp = np.uint64(member_of(saved, "bp").offset)
        self._saved_ip = np.uint64(member_of(saved, "ret_addr").offset)
        self._saved_size = np.uint64(drgn.sizeof(saved))
        self._newborn = np.uint64(newborn)
        self._known: dict[int, int] = {}
        self._rules: list[FrameRule] = []
        self._table = np.empty(0, RULES)

    def knows(self, pc: int) -> bool:
        """Return whether an ORC table has a rule for an instruction."""
        rule = self._orc.rule(pc)
        return rule is not None and rule is not BY_FRAME_POINTER

    def unwind(self, memory: StackMemory) -> Frames:
        """Unwind each stack until it ends."""
        if len(memory) <= _FEW:
            return self._unwind_few(memory)
        ends = np.zeros(len(memory), np.uint8)
        guessed = np.zeros(len(memory), np.bool_)
        columns: list[Addresses] = []
        flags: list[Flags] = []
        state = self._start(memory, ends)
        while len(state.rows):
            if len(columns) == MAX_FRAMES:
                ends[state.rows] = End.LOST.value
                break
            column = np.zeros(len(memory), np.uint64)
            column[state.rows] = state.pc
            columns.append(column)
            flag = np.zeros(len(memory), np.bool_)
            flag[state.rows] = state.interrupted
            flags.append(flag)
            state = self._step(memory, state, ends, guessed)
        shape = len(memory), len(columns)
        return Frames(
            np.stack(columns, 1) if columns else np.zeros(shape, np.uint64),
            np.stack(flags, 1) if flags else np.zeros(shape, np.bool_),
            ends,
            guessed,
        )

    def _unwind_few(self, memory: StackMemory) -> Frames:
        """Unwind one stack after the other, without vector operations."""
        stacks = [
            self.unwind_one(memory.stack(row).tolist(), (int(memory.base[row]),))
            for row in range(len(memory))
        ]
        shape = len(stacks), max((len(stack.pcs) for stack in stacks), default=0)
        pcs, interrupted = np.zeros(shape, np.uint64), np.zeros(shape, np.bool_)
        for row, stack in enumerate(stacks):
            pcs[row, : len(stack.pcs)] = stack.pcs
            interrupted[row, : len(stack.pcs)] = stack.interrupted
        return Frames(
            pcs,
            interrupted,
            np.array([stack.end for stack in stacks], np.uint8),
            np.array([stack.guessed for stack in stacks], np.bool_),
        )

    def unwind_one(self, words: list[int], saved: tuple[int, ...]) -> OneStack:
        """Unwind one stack; *words* start at the saved stack pointer, *saved*."""
        if not words:
            return OneStack([], [], End.NONE, False)
        (base,) = saved
        memory = OneMemory(words, base)
        pc = memory.read(base + int(self._saved_ip))
        if pc is None or pc < START_KERNEL_MAP:
            return OneStack([], [], End.LOST, False)
        state = OneState(
            pc=pc,
            sp=base + int(self._saved_size),
            bp=memory.read(base + int(self._saved_bp)) or 0,
            interrupted=pc == self._newborn,
        )
        return unwind_one(memory, state, self._rule)

    def unwind_from(self, memory: ReadsWords, state: OneState) -> OneStack:
        """Unwind from a frame whose registers are known."""
        return unwind_one(memory, state, self._rule)

    def _rule(self, pc: int) -> FrameRule:
        return self._rules[self._row(pc)]

    def _start(self, memory: StackMemory, ends: npt.NDArray[np.uint8]) -> _UnwindState:
        rows = np.flatnonzero(memory.size)
        base = memory.base[rows]
        pc, has_pc = memory.read(rows, base + self._saved_ip)
        bp, _ = memory.read(rows, base + self._saved_bp)
        ends[rows] = End.LOST.value
        # The saved address of a task that has never run is not a return address.
        interrupted = pc == self._newborn
        state = _UnwindState(rows, pc, base + self._saved_size, bp, interrupted)
        return state.keep(has_pc & (pc >= _CODE))

    def _step(
        self,
        memory: StackMemory,
        state: _UnwindState,
        ends: npt.NDArray[np.uint8],
        guessed: Flags,
    ) -> _UnwindState:
        """Return the state of the callers; set *ends* and *guessed*."""
        # A return address may be past the end of the calling function.
        rules = self._find(np.where(state.interrupted, state.pc, state.pc - 1))
        rows, sp, bp = state.rows, state.sp, state.bp
        guessed[rows] |= rules["guess"]
        ends[rows] = rules["end"]
        good = rules["goes_on"]

        cfa = np.where(rules["cfa_by_sp"], sp, bp) + rules["cfa_offset"]
        indirect = rules["cfa_at"]
        if indirect.any():
            cfa[indirect], inside = memory.read(rows[indirect], cfa[indirect])
            good[indirect] &= inside
        pc, inside = memory.read(rows, cfa + rules["ip_offset"])
        good = good & inside
        next_sp = cfa
        regs = rules["regs"]
        if regs.any():
            saved, inside = memory.read(rows[regs], (cfa + rules["sp_offset"])[regs])
            next_sp = cfa.copy()
            next_sp[regs] = saved
            good[regs] &= inside
            # Saved registers of user mode end the stack.
            ends[rows[regs & good & (pc < _USER)]] = End.ENTRY.value
        good &= (pc >= _CODE) & (next_sp > sp)

        saved_bp = good & rules["saves_bp"]
        if saved_bp.any():
            address = np.where(rules["bp_by_bp"], bp, cfa) + rules["bp_offset"]
            bp = bp.copy()
            bp[saved_bp], inside = memory.read(rows[saved_bp], address[saved_bp])
            good[saved_bp] &= inside
        return _UnwindState(rows, pc, next_sp, bp, rules["interrupted"]).keep(good)

    def _find(self, pcs: Addresses) -> npt.NDArray[np.void]:
        """Return the rule of each instruction, as records of ``RULES``."""
        unique, inverse = each_once(pcs)
        rows = [self._row(pc) for pc in unique.tolist()]
        if len(self._table) < len(self._rules):
            self._table = np.array(self._rules, RULES)
        # An index copies records field by field, which takes twenty times as long.
        return self._table.take(np.array(rows, np.intp)[inverse])

    def _row(self, pc: int) -> int:
        row = self._known.get(pc)
        if row is None:
            # Equal rules are not merged: there are few addresses.
            row = self._known[pc] = len(self._rules)
            self._rules.append(worked_out(self._orc.rule(pc)))
        return row


def thread_start(prog: drgn.Program) -> int:
    """
    Return the address where a new task begins to run when it is first switched to.

    :raises MissingError: if this kernel has no such symbol
    """
    try:
        # Not in v6.1; by v6.12 ret_from_fork is a C function that this one calls.
        return kernel_symbol(prog, "ret_from_fork_asm")
    except MissingError:
        return kernel_symbol(prog, "ret_from_fork")


# --- Unwind arm64 stacks by frame records: each step unwinds one frame of all.
#
# A frame record is the caller's frame pointer (x29) and return address (x30). Each
# function that calls others makes one, and x29 points to the newest
# (arch/arm64/kernel/stacktrace.c). Where the CPU took an exception, the kernel makes
# a record within struct pt_regs. The last record is that of the entry from user mode,
# or of the start of a thread.


_KERNEL_BITS = 0xFFF0_0000_0000_0000
"""Bits that are set in every kernel address of up to 52 bits; taken for the mask of
signatures (pointer authentication) if the kernel does not export KERNELPACMASK."""

_OF_REGISTERS = 2
"""FRAME_META_TYPE_PT_REGS."""

_EL = 0xF
"""PSR_MODE_MASK: exception level; 0 is user mode, also that of AArch32."""


class _RecordOffsets(Struct, frozen=True):
    """Offsets of members of ``struct pt_regs`` from the frame record in it."""

    fp: int
    pc: int
    pstate: int
    type: int | None
    """Offset of the record's type; ``None`` if this kernel's records have none."""


class FrameRecords:
    """
    Unwinds arm64 stacks of tasks that do not run, by frame records.

    :raises MissingError: if this kernel has no frame records in ``struct pt_regs``
    """

    def __init__(self, prog: drgn.Program) -> None:
        self._offsets = _offsets(prog)
        self._code = code_start(prog)
        self._newborn = kernel_symbol(prog, "ret_from_fork")
        signed = vmcoreinfo_number(prog, "KERNELPACMASK")
        self._signature = _KERNEL_BITS if signed is None else signed

    def unwind(self, memory: StackMemory) -> Frames:
        """
        Unwind each stack until it ends.

        :param memory: Stacks with the frame pointer and the program counter that were
            saved with the stack pointer.
        """
        count = len(memory)
        ends = np.zeros(count, np.uint8)
        rows: Rows = np.flatnonzero(memory.size)
        ends[rows] = End.LOST.value
        fp, pc = memory.saved[rows, 1], self._plain(memory.saved[rows, 2])
        # The saved address of a task that has never run is not a return address.
        interrupted = pc == np.uint64(self._newborn)
        good = pc >= np.uint64(self._code)
        columns: list[Addresses] = []
        flags: list[Flags] = []
        while good.any() and len(columns) < MAX_FRAMES:
            rows, fp, pc, interrupted = (
                rows[good],
                fp[good],
                pc[good],
                interrupted[good],
            )
            column, flag = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
            column[rows], flag[rows] = pc, interrupted
            columns.append(column)
            flags.append(flag)
            fp, pc, interrupted, good = self._step(memory, rows, fp, ends)
        return Frames(
            np.stack(columns, 1) if columns else np.zeros((count, 0), np.uint64),
            np.stack(flags, 1) if flags else np.zeros((count, 0), np.bool_),
            ends,
            np.zeros(count, np.bool_),
        )

    def _step(
        self,
        memory: StackMemory,
        rows: Rows,
        fp: Addresses,
        ends: npt.NDArray[np.uint8],
    ) -> tuple[Addresses, Addresses, Flags, Flags]:
        """Return for each stack the caller's frame pointer and program counter, whether
        the caller was interrupted, and whether there is one; set *ends*."""

        def read(offset: int) -> Addresses:
            words, _ = memory.read(rows, fp + np.uint64(offset % (1 << 64)))
            return words

        offsets = self._offsets
        above, found = memory.read(rows, fp)
        pc = read(8)
        is_last = found & (above == 0) & (pc == 0)
        saved_fp, saved_pc = read(offsets.fp), read(offsets.pc)
        if offsets.type is None:
            # The record within struct pt_regs repeats its fp and pc.
            interrupted = found & ~is_last & (saved_pc == pc) & (saved_fp == above)
        else:
            kinds = read(offsets.type) & np.uint64(0xFFFF_FFFF)
            interrupted = is_last & (kinds == _OF_REGISTERS)
            is_last &= ~interrupted
            above = np.where(interrupted, saved_fp, above)
            pc = np.where(interrupted, saved_pc, pc)
        of_user = (read(offsets.pstate) & np.uint64(_EL)) == 0
        entered = is_last & of_user & (saved_pc < np.uint64(KERNEL_HALF))
        # Up to v5.13 the stack of a kernel thread ends without a record.
        ends[rows[is_last | (fp == 0)]] = End.START.value
        ends[rows[entered]] = End.ENTRY.value
        pc = self._plain(pc)
        good = found & ~is_last & (pc >= np.uint64(self._code))
        return above, pc, interrupted, good & ((above > fp) | (above == 0))

    def _plain(self, pcs: Addresses) -> Addresses:
        """Return addresses with the bits set that signatures may have replaced."""
        return np.where(pcs == 0, pcs, pcs | np.uint64(self._signature))

    def unwind_one(self, words: list[int], saved: tuple[int, ...]) -> OneStack:
        """
        Unwind one stack, without the cost of arrays.

        :param words: The words from the saved stack pointer to the end of the stack.
        :param saved: The saved stack pointer, frame pointer and program counter.
        """
        if not words:
            return OneStack([], [], End.NONE, False)
        base, fp, pc = saved
        memory = OneMemory(words, base)
        pcs: list[int] = []
        flags: list[bool] = []
        pc |= self._signature
        is_interrupted = pc == self._newborn
        while pc >= self._code and len(pcs) < MAX_FRAMES:
            pcs.append(pc)
            flags.append(is_interrupted)
            above, pc_found = memory.read(fp), memory.read(fp + 8)
            if above is None or pc_found is None:
                end = End.LOST if fp else End.START
                return OneStack(pcs, flags, end, False)
            caller = self._caller(memory, fp, above, pc_found)
            if isinstance(caller, End):
                return OneStack(pcs, flags, caller, False)
            above, pc, is_interrupted = caller
            if above and above <= fp:
                break
            fp = above
        return OneStack(pcs, flags, End.LOST, False)

    def _caller(
        self, memory: OneMemory, fp: int, above: int, pc: int
    ) -> tuple[int, int, bool] | End:
        """Return the caller's frame pointer and program counter, and whether it was
        interrupted; or how the stack ends. *above* and *pc* are the record at *fp*."""
        offsets = self._offsets
        saved_fp = memory.read(fp + offsets.fp) or 0
        saved_pc = memory.read(fp + offsets.pc) or 0
        if above or pc:
            repeats = (saved_fp, saved_pc) == (above, pc)
            interrupted = offsets.type is None and repeats
            return above, pc | self._signature, interrupted
        if offsets.type is not None:
            kind = (memory.read(fp + offsets.type) or 0) & 0xFFFF_FFFF
            if kind == _OF_REGISTERS:
                return saved_fp, saved_pc | self._signature, True
        mode = (memory.read(fp + offsets.pstate) or 0) & _EL
        return End.ENTRY if mode == 0 and saved_pc < KERNEL_HALF else End.START


def _offsets(prog: drgn.Program) -> _RecordOffsets:
    registers = find_type(prog, "struct pt_regs")
    record = member_of(registers, "stackframe")
    start = record.offset
    type_: int | None = None
    # Since "arm64: stacktrace: unwind exception boundaries" (in v6.13); an array of
    # two words before.
    if record.type.kind == drgn.TypeKind.STRUCT:
        type_ = offset_of(registers, "stackframe.type") - start
    return _RecordOffsets(
        fp=offset_of(registers, "regs[29]") - start,
        pc=offset_of(registers, "pc") - start,
        pstate=offset_of(registers, "pstate") - start,
        type=type_,
    )
