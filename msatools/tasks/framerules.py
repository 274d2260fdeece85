# SPDX-License-Identifier: LGPL-2.1-or-later

"""How to unwind a frame of a stack, computed from the ORC rule of its code."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from msatools.tasks.orc import BY_FRAME_POINTER, Base, OrcKind, Rule

MAX_FRAMES = 512
"""More than a stack of 16 KiB holds in practice; a deeper one is cut."""

# Offsets in struct pt_regs, and in the part of it that the CPU pushes.
_REGS_BP, _REGS_IP, _REGS_SP = 32, 128, 152
_PARTIAL_IP, _PARTIAL_SP = 0, 24

_MODULUS = 1 << 64
"""Offsets may be negative and are added modulo this."""


class End(IntEnum):
    """How a stack ends."""

    NONE = 0
    """There is no stack, or it could not be read."""

    ENTRY = 1
    """At the entry from user mode."""

    START = 2
    """At the function that the thread started in."""

    LOST = 3
    """Too early: the next frame cannot be found."""

    UNSUPPORTED = 4
    """At a frame that needs a register that was not saved."""


class FrameRule(NamedTuple):
    """How to find the caller of a frame. CFA: canonical frame address."""

    guess: bool
    """Whether no ORC table covers the code."""

    end: int
    """How the stack ends if this is its last frame (:class:`End`)."""

    goes_on: bool
    """Whether there is a caller."""

    cfa_by_sp: bool
    """Whether the CFA is relative to the stack pointer, not the frame pointer."""

    cfa_at: bool
    """Whether the CFA has to be loaded from the address so computed."""

    cfa_offset: int
    regs: bool
    """Whether registers lie at the CFA, not just a return address below it."""

    ip_offset: int
    """Offset from the CFA of the caller's instruction pointer."""

    sp_offset: int
    """Offset from the CFA of the caller's stack pointer, if *regs*; else it is the
    CFA."""

    saves_bp: bool
    """Whether the caller's frame pointer was saved; if not, it is unchanged."""

    bp_by_bp: bool
    """Whether *bp_offset* is relative to the frame pointer, not to the CFA."""

    bp_offset: int
    interrupted: bool
    """Whether the caller was left by an exception, not by a call."""


RULES = np.dtype(
    [
        (name, "u1" if name == "end" else "?" if kind is bool else "u8")
        for name, kind in FrameRule.__annotations__.items()
    ]
)
"""One record a :class:`FrameRule`."""


def worked_out(rule: Rule | None) -> FrameRule:
    """Convert an ORC rule; ``None`` if no table covers the code."""
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
        cfa_offset=rule.cfa_offset % _MODULUS,
        regs=regs,
        ip_offset=(_REGS_IP if whole else ip_offset) % _MODULUS,
        sp_offset=_REGS_SP if whole else _PARTIAL_SP,
        saves_bp=whole or rule.bp is not Base.NONE,
        bp_by_bp=rule.bp is Base.BP and not whole,
        bp_offset=(_REGS_BP if whole else rule.bp_offset) % _MODULUS,
        interrupted=rule.interrupted,
    )
