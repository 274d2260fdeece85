# SPDX-License-Identifier: LGPL-2.1-or-later

"""Unwind many x86-64 stacks at once, all of them a frame a step, as ORC says."""

from dataclasses import dataclass
from enum import IntEnum

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Addresses
from msatools.kernel.structs import each_once
from msatools.tasks.orc import BY_FRAME_POINTER, Base, Kind, Orc
from msatools.tasks.stackmemory import Rows, StackMemory
from msatools.tasks.text import kernel_symbol

MAX_FRAMES = 512
"""More than fit a stack of 16 KiB but in theory; one this deep is lost."""

_USER = np.uint64(1 << 63)
"""Addresses from here on are the kernel's."""

_CODE = np.uint64(0xFFFF_FFFF_8000_0000)
"""All code of the kernel lies in the last 2 GiB (its code model needs that)."""

# struct pt_regs: where a whole one and the part that the CPU pushes have them.
_REGS_BP, _REGS_IP, _REGS_SP = 32, 128, 152
_PARTIAL_IP, _PARTIAL_SP = 0, 24

Flags = npt.NDArray[np.bool_]


class End(IntEnum):
    """How a stack ends."""

    NONE = 0
    """There is no stack, or it could not be read."""

    ENTRY = 1
    """Where user mode entered the kernel."""

    START = 2
    """Where the thread started."""

    LOST = 3
    """Somewhere: the next frame is not to be found."""

    UNSUPPORTED = 4
    """Where a register is needed that is not known any more."""


@dataclass(frozen=True)
class Frames:
    """The frames of many stacks, one column a frame, innermost first."""

    pcs: Addresses
    """Shape (stacks, frames); 0 past the end of a stack."""

    interrupted: Flags
    """Whether a frame was left by an exception: its pc is no return address."""

    ends: npt.NDArray[np.uint8]
    """Members of :class:`End`."""

    guessed: Flags
    """Whether a frame was left by a guess: no table knows its code."""


@dataclass
class _State:
    """The stacks that go on: rows and registers."""

    rows: Rows
    pc: Addresses
    sp: Addresses
    bp: Addresses
    interrupted: Flags

    def keep(self, chosen: Flags) -> "_State":
        return _State(
            self.rows[chosen],
            self.pc[chosen],
            self.sp[chosen],
            self.bp[chosen],
            self.interrupted[chosen],
        )


class Unwinder:
    """
    Unwinds stacks of tasks that do not run.

    :param newborn: where a task goes when it is switched to for the first time
    :raises LookupError: if this kernel saves registers in an unknown way
    """

    def __init__(self, prog: drgn.Program, orc: Orc, newborn: int) -> None:
        # Since Linux kernel commit 0100301bfdf5 ("sched/x86: Rewrite the switch_to()
        # code") (in v4.9).
        saved = prog.type("struct inactive_task_frame")
        self._orc = orc
        self._saved_bp = np.uint64(saved.member("bp").offset)
        self._saved_ip = np.uint64(saved.member("ret_addr").offset)
        self._saved_size = np.uint64(drgn.sizeof(saved))
        self._newborn = np.uint64(newborn)
        self._known: dict[int, int] = {}
        self._rules: list[tuple[int, ...]] = []
        self._table = np.empty((0, 7), np.int64)

    def unwind(self, memory: StackMemory) -> Frames:
        """Unwind each stack until it ends."""
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

    def _start(self, memory: StackMemory, ends: npt.NDArray[np.uint8]) -> _State:
        rows = np.flatnonzero(memory.size)
        base = memory.base[rows]
        pc, has_pc = memory.read(rows, base + self._saved_ip)
        bp, _ = memory.read(rows, base + self._saved_bp)
        ends[rows] = End.LOST.value
        # A task that has never run starts where its stack ends.
        interrupted = pc == self._newborn
        state = _State(rows, pc, base + self._saved_size, bp, interrupted)
        return state.keep(has_pc & (pc >= _CODE))

    def _step(
        self,
        memory: StackMemory,
        state: _State,
        ends: npt.NDArray[np.uint8],
        guessed: Flags,
    ) -> _State:
        """Go on to the callers; stacks that end are told how in *ends*."""
        # To compare with a number takes numpy a tenth of what a member of an
        # enumeration takes: most of a step, if the stacks are few.
        # A return address may be past the end of the function that called.
        rules = self._find(np.where(state.interrupted, state.pc, state.pc - 1))
        kind, base, cfa_offset, bp_base, bp_offset, interrupted, guess = rules.T
        rows, sp, bp = state.rows, state.sp, state.bp
        guessed[rows[guess != 0]] = True
        ends[rows[kind == Kind.END.value]] = End.START.value
        unsupported = (base == Base.OTHER.value) | (base == Base.SP_AT.value)
        unsupported &= kind != Kind.END.value
        ends[rows[unsupported]] = End.UNSUPPORTED.value
        good = (kind != Kind.END.value) & ~unsupported

        cfa = np.where(base == Base.SP.value, sp, bp) + cfa_offset.astype(np.uint64)
        at = base == Base.BP_AT.value
        if at.any():
            cfa[at], there = memory.read(rows[at], cfa[at])
            good[at] &= there
        good &= (base != Base.NONE.value) & (base != Base.CFA.value)
        call, whole = kind == Kind.CALL.value, kind == Kind.REGS.value
        ip_at = np.where(whole, _REGS_IP, np.where(call, -8, _PARTIAL_IP))
        pc, there = memory.read(rows, cfa + ip_at.astype(np.uint64))
        good &= there
        next_sp = cfa.copy()
        if not call.all():
            sp_at = np.where(whole, _REGS_SP, _PARTIAL_SP).astype(np.uint64)
            saved, there = memory.read(rows[~call], (cfa + sp_at)[~call])
            next_sp[~call] = saved
            good[~call] &= there

        # Registers of user mode are no frame, wherever they point.
        left = good & (pc < _USER)
        ends[rows[left & ~call]] = End.ENTRY.value
        good &= (pc >= _CODE) & (next_sp > sp)

        bp_from = np.where(bp_base == Base.BP.value, bp, cfa)
        bp_from += bp_offset.astype(np.uint64)
        bp_from[whole] = cfa[whole] + _REGS_BP
        saved_bp = good & (whole | (bp_base != Base.NONE.value))
        bp = bp.copy()
        bp[saved_bp], there = memory.read(rows[saved_bp], bp_from[saved_bp])
        good[saved_bp] &= there
        return _State(rows, pc, next_sp, bp, interrupted != 0).keep(good)

    def _find(self, pcs: Addresses) -> npt.NDArray[np.int64]:
        """Find the rules of instructions, as rows of numbers."""
        unique, inverse = each_once(pcs)
        rows = [self._row(pc) for pc in unique.tolist()]
        if len(self._table) < len(self._rules):
            self._table = np.array(self._rules, np.int64)
        return self._table[np.array(rows, np.intp)[inverse]]

    def _row(self, pc: int) -> int:
        row = self._known.get(pc)
        if row is None:
            # Most rules are the same as others', but few addresses ever are.
            rule = self._orc.rule(pc)
            guess = rule is None or rule is BY_FRAME_POINTER
            rule = rule or BY_FRAME_POINTER
            row = self._known[pc] = len(self._rules)
            self._rules.append(
                (
                    rule.kind,
                    rule.cfa,
                    rule.cfa_offset,
                    rule.bp,
                    rule.bp_offset,
                    rule.interrupted,
                    guess,
                )
            )
        return row


def thread_start(prog: drgn.Program) -> int:
    """
    Find where a task goes when it is switched to for the first time.

    :raises LookupError: if this kernel has no such place
    """
    try:
        # ret_from_fork() itself is in C by v6.12; it was all there was in v6.1.
        return kernel_symbol(prog, "ret_from_fork_asm")
    except LookupError:
        return kernel_symbol(prog, "ret_from_fork")
