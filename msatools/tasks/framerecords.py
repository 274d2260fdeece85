# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Unwind arm64 stacks by frame records: each step unwinds one frame of all.

A frame record is the caller's frame pointer (x29) and return address (x30). Each
function that calls others makes one, and x29 points to the newest
(arch/arm64/kernel/stacktrace.c). Where the CPU took an exception, the kernel makes one
within ``struct pt_regs``; that of the entry from user mode, or of the start of a
thread, is the last.
"""

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import Addresses
from msatools.selfdesc.find import find_type, member_of, offset_of
from msatools.selfdesc.vmcoreinfo import vmcoreinfo_number
from msatools.target.addresses import KERNEL_HALF, code_start
from msatools.tasks.framerules import MAX_FRAMES, End
from msatools.tasks.stackmemory import Rows, StackMemory
from msatools.tasks.text import kernel_symbol
from msatools.tasks.unwind import Flags, Frames
from msatools.tasks.unwindone import OneMemory, OneStack

_KERNEL_BITS = 0xFFF0_0000_0000_0000
"""Bits that are set in each address of the kernel, with 52 bits of addresses or less;
part of a signature (pointer authentication) if the kernel does not say which."""

_OF_REGISTERS = 2
"""FRAME_META_TYPE_PT_REGS."""

_EL = 0xF
"""PSR_MODE_MASK: exception level; 0 is user mode, of AArch32 too."""


class _RecordOffsets(Struct, frozen=True):
    """Offsets of members of ``struct pt_regs`` from the frame record in it."""

    fp: int
    pc: int
    pstate: int
    type: int | None
    """Of the type of the record; ``None`` if it has none."""


class FrameRecords:
    """
    Unwinds stacks of tasks that do not run.

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
        """Return the callers' frame pointers, program counters and whether these were
        interrupted, and which there are; set *ends*."""

        def read(offset: int) -> Addresses:
            words, _ = memory.read(rows, fp + np.uint64(offset % (1 << 64)))
            return words

        offsets = self._offsets
        above, found = memory.read(rows, fp)
        pc = read(8)
        is_last = found & (above == 0) & (pc == 0)
        saved_fp, saved_pc = read(offsets.fp), read(offsets.pc)
        if offsets.type is None:
            # It repeats what is beside it.
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
        """Return addresses without signatures, which replace bits that are set."""
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
        """Return frame pointer, program counter and whether it was interrupted."""
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
