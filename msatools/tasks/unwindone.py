# SPDX-License-Identifier: LGPL-2.1-or-later

"""Unwind one x86-64 stack, by the same rules as :mod:`msatools.tasks.unwind`."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from msatools.target.addresses import KERNEL_HALF
from msatools.target.arch.x86_64 import START_KERNEL_MAP
from msatools.tasks.framerules import MAX_FRAMES, End, FrameRule

_WORD = 8
_ALL = (1 << 64) - 1


class OneStack(Struct, frozen=True):
    """The frames of a stack, innermost first."""

    pcs: list[int]
    interrupted: list[bool]
    """Whether a frame was left by an exception: its pc is no return address."""

    end: End
    guessed: bool


class ReadsWords(Protocol):
    """The memory that a stack is unwound in."""

    def read(self, address: int) -> int | None:
        """Return a word; ``None`` if it cannot be read."""


class OneMemory(Struct, frozen=True):
    """The words from a saved stack pointer to the end of the stack."""

    words: list[int]
    base: int

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


def unwind_one(
    memory: ReadsWords, state: OneState, rule_of: Callable[[int], FrameRule]
) -> OneStack:
    """Unwind a stack until it ends."""
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

    :return: ``None``; if the stack ends, whether it ends at the entry from user mode.
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
    # From a stack for interrupts on, the stack that was interrupted may lie anywhere.
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
