# SPDX-License-Identifier: LGPL-2.1-or-later

"""What to do at a frame of a stack, worked out of what ORC says of its code."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from msatools.tasks.orc import BY_FRAME_POINTER, Base, OrcKind, Rule

MAX_FRAMES = 512
"""More than fit a stack of 16 KiB but in theory; one this deep is lost."""

# struct pt_regs: where a whole one and the part that the CPU pushes have them.
_REGS_BP, _REGS_IP, _REGS_SP = 32, 128, 152
_PARTIAL_IP, _PARTIAL_SP = 0, 24

_WORDS = 1 << 64
"""Offsets are added modulo this: there are negative ones."""


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


class FrameRule(NamedTuple):
    """How to leave a frame; ``CFA`` is what its addresses are reckoned from."""

    guess: bool
    """Whether no table knows its code."""

    end: int
    """How the stack ends if this is the last frame that is found (:class:`End`)."""

    goes_on: bool
    """Whether there is another."""

    cfa_by_sp: bool
    """Whether the CFA is reckoned from the stack pointer, and not the frame pointer."""

    cfa_at: bool
    """Whether what is found so is only where it is kept."""

    cfa_offset: int
    regs: bool
    """Whether registers lie at the CFA, and not just a return address below it."""

    ip_offset: int
    """From the CFA, as the next: where the caller's instruction pointer is."""

    sp_offset: int
    """Where its stack pointer is, if registers lie there; else it is the CFA."""

    saves_bp: bool
    """Whether its frame pointer was saved; else it still holds."""

    bp_by_bp: bool
    """Whether that is reckoned from the frame pointer, and not from the CFA."""

    bp_offset: int
    interrupted: bool
    """Whether an exception has left the next frame."""


RULES = np.dtype(
    [
        (name, "u1" if name == "end" else "?" if kind is bool else "u8")
        for name, kind in FrameRule.__annotations__.items()
    ]
)
"""Many of them."""


def worked_out(rule: Rule | None) -> FrameRule:
    """Work out what to do by a rule; ``None`` where no table knows the code."""
    guess = rule is None or rule is BY_FRAME_POINTER
    rule = rule or BY_FRAME_POINTER
    whole = rule.kind is OrcKind.REGS
    regs = whole or rule.kind is OrcKind.REGS_PARTIAL
    end = End.LOST
    if rule.kind is OrcKind.END:
        end = End.START
    elif rule.cfa in (Base.OTHER, Base.SP_AT):
        end = End.UNSUPPORTED
    ip_offset = _PARTIAL_IP if regs else -8
    return FrameRule(
        guess=guess,
        end=end.value,
        goes_on=end is End.LOST and rule.cfa in (Base.SP, Base.BP, Base.BP_AT),
        cfa_by_sp=rule.cfa is Base.SP,
        cfa_at=rule.cfa is Base.BP_AT,
        cfa_offset=rule.cfa_offset % _WORDS,
        regs=regs,
        ip_offset=(_REGS_IP if whole else ip_offset) % _WORDS,
        sp_offset=_REGS_SP if whole else _PARTIAL_SP,
        saves_bp=whole or rule.bp is not Base.NONE,
        bp_by_bp=rule.bp is Base.BP and not whole,
        bp_offset=(_REGS_BP if whole else rule.bp_offset) % _WORDS,
        interrupted=rule.interrupted,
    )
