# SPDX-License-Identifier: LGPL-2.1-or-later

"""Unwind many x86-64 stacks at once by ORC: each step unwinds one frame of all."""

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.reader import Addresses
from msatools.kernel.structs import each_once
from msatools.selfdesc.find import find_type, member_of
from msatools.target.addresses import KERNEL_HALF
from msatools.target.arch.x86_64 import START_KERNEL_MAP
from msatools.tasks.framerules import (
    MAX_FRAMES,
    RULES,
    End,
    FrameRule,
    worked_out,
)
from msatools.tasks.orc import BY_FRAME_POINTER, Orc
from msatools.tasks.stackmemory import Rows, StackMemory
from msatools.tasks.text import kernel_symbol
from msatools.tasks.unwindone import (
    OneMemory,
    OneStack,
    OneState,
    ReadsWords,
    unwind_one,
)

_FEW = 8
"""Number of stacks that are faster to unwind one by one: a vectorized step costs as
much as twenty single ones."""

_USER, _CODE = np.uint64(KERNEL_HALF), np.uint64(START_KERNEL_MAP)

Flags = npt.NDArray[np.bool_]


class Frames(Struct, frozen=True):
    """The frames of many stacks, one column a frame, innermost first."""

    pcs: Addresses
    """Shape (stacks, frames); 0 past the end of a stack."""

    interrupted: Flags
    """Whether a frame was left by an exception: its pc is no return address."""

    ends: npt.NDArray[np.uint8]
    """Members of :class:`End`."""

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
    Unwinds stacks of tasks that do not run.

    :param newborn: where a new task continues (:func:`thread_start`)
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
        """Return whether an ORC table says how to unwind from an instruction."""
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
        """Unwind one stack; *words* start at the saved stack pointer."""
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
        """Unwind from a frame on whose registers are known."""
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
        """Return the callers' state; set *ends* and *guessed*."""
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
        """Find the rules of instructions."""
        unique, inverse = each_once(pcs)
        rows = [self._row(pc) for pc in unique.tolist()]
        if len(self._table) < len(self._rules):
            self._table = np.array(self._rules, RULES)
        return self._table[np.array(rows, np.intp)[inverse]]

    def _row(self, pc: int) -> int:
        row = self._known.get(pc)
        if row is None:
            # Rules repeat more often than addresses, but addresses are few.
            row = self._known[pc] = len(self._rules)
            self._rules.append(worked_out(self._orc.rule(pc)))
        return row


def thread_start(prog: drgn.Program) -> int:
    """
    Find the address where a new task continues when it is first switched to.

    :raises MissingError: if this kernel has no such symbol
    """
    try:
        # In v6.1 it is ret_from_fork; by v6.12 that is a C function called by it.
        return kernel_symbol(prog, "ret_from_fork_asm")
    except MissingError:
        return kernel_symbol(prog, "ret_from_fork")
