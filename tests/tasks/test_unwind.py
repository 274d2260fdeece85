# SPDX-License-Identifier: LGPL-2.1-or-later

"""Frames of every kind are unwound, on stacks made by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from msatools.model import values
from msatools.tasks.text import BY_FRAME_POINTER, Base, End, OrcKind, Rule
from msatools.tasks.unwind import Frames, StackMemory, Unwinder
from tests.support.madetypes import made_program, struct

TEXT = 0xFFFF_FFFF_8100_0000
STACK = 0xFFFF_C900_0000_0000
USER = 0x7F00_0000_1234
NEWBORN = TEXT + 0x9000

BY_SP = Rule(OrcKind.CALL, Base.SP, 24, Base.NONE, 0, False)
BARE = Rule(OrcKind.CALL, Base.SP, 8, Base.NONE, 0, False)
SAVES_BP = Rule(OrcKind.CALL, Base.SP, 16, Base.CFA, -16, False)
BY_BP = Rule(OrcKind.CALL, Base.BP, 16, Base.CFA, -16, False)
ALIGNED = Rule(OrcKind.CALL, Base.BP_AT, -8, Base.BP, 0, False)
WHOLE = Rule(OrcKind.REGS, Base.SP, 0, Base.NONE, 0, True)
PARTIAL = Rule(OrcKind.REGS_PARTIAL, Base.SP, 8, Base.NONE, 0, True)
LAST = Rule(OrcKind.END, Base.NONE, 0, Base.NONE, 0, False)
FAR_BP = Rule(OrcKind.CALL, Base.SP, 8, Base.CFA, -80, False)
BY_R10 = Rule(OrcKind.CALL, Base.OTHER, 0, Base.NONE, 0, False)


def unwinder(rules: dict[int, Rule]) -> Unwinder:
    """Return an unwinder.

    :param rules: offset in the text -> ORC rule
    """
    types = made_program()
    u64 = types.int_type("unsigned long", 8, False)
    names = ("r15", "r14", "r13", "r12", "bx", "bp", "ret_addr")
    members = {name: (u64, 8 * i) for i, name in enumerate(names)}
    saved = struct(types, "inactive_task_frame", 56, **members)
    prog: Any = SimpleNamespace(type=lambda name, filename: saved)
    orc: Any = SimpleNamespace(rule=lambda pc: rules.get(pc - TEXT))
    return Unwinder(prog, orc, NEWBORN)


def unwind(rules: dict[int, Rule], *stacks: list[int]) -> Frames:
    """Unwind stacks, given as words from the saved registers on.

    A few stacks are unwound one after the other, many together; results are the same.
    """
    few = unwind_together(rules, *stacks)
    many = unwind_together(rules, *stacks, *[[]] * 20)
    for found, one in zip(values(many).values(), values(few).values(), strict=True):
        assert found[: len(stacks)].tolist() == one.tolist()
    return few


def unwind_together(rules: dict[int, Rule], *stacks: list[int]) -> Frames:
    sizes = [8 * len(stack) for stack in stacks]
    first = np.cumsum([0, *(len(stack) for stack in stacks)])[: len(stacks)]
    memory = StackMemory(
        np.array([word for stack in stacks for word in stack], np.uint64),
        first.astype(np.intp),
        np.array([STACK + 0x10000 * i for i in range(len(stacks))], np.uint64),
        np.array(sizes, np.uint64),
        np.zeros((len(stacks), 1), np.uint64),
    )
    return unwinder(rules).unwind(memory)


def saved(pc: int, bp: int = 0) -> list[int]:
    return [0, 0, 0, 0, 0, bp, TEXT + pc]


def frames(found: Frames, row: int = 0) -> list[int]:
    return [pc - TEXT for pc in found.pcs[row].tolist() if pc]


# The rule of a return address N is looked up at N - 1.


def test_calls() -> None:
    stack = [*saved(0x10), 0, 0, TEXT + 0x20, TEXT + 0x30, 0]
    found = unwind({0xF: BY_SP, 0x1F: BARE, 0x2F: LAST}, stack)
    assert frames(found) == [0x10, 0x20, 0x30]
    assert found.ends.tolist() == [End.START]
    assert not found.guessed.any()


def test_frame_pointer_saved_by_an_earlier_frame() -> None:
    # The first frame saves it, the second uses the saved value.
    top = STACK + 8 * 11
    stack = [*saved(0x10), top, TEXT + 0x20, 0, 0, 0x77, TEXT + 0x30]
    found = unwind({0xF: SAVES_BP, 0x1F: BY_BP, 0x2F: LAST}, stack)
    assert frames(found) == [0x10, 0x20, 0x30]
    assert found.ends.tolist() == [End.START]


def test_realigned_stack() -> None:
    # The word before the frame pointer's target is the caller's stack pointer.
    bp = STACK + 8 * 8
    stack = [*saved(0x10, bp), STACK + 8 * 11, 0x55, 0, TEXT + 0x20]
    found = unwind({0xF: ALIGNED, 0x1F: LAST}, stack)
    assert frames(found) == [0x10, 0x20]


def regs(pc: int, sp: int, bp: int = 0) -> list[int]:
    words = [0] * 21
    words[4], words[16], words[19] = bp, pc, sp
    return words


def test_exception_in_the_kernel() -> None:
    """Its pc is not a return address, and all registers are known."""
    bp = STACK + 8 * 30
    after = STACK + 8 * 29
    stack = [*saved(0x10), *regs(TEXT + 0x40, after, bp), 0, 0, 0, TEXT + 0x50]
    found = unwind({0xF: WHOLE, 0x40: BY_BP, 0x4F: LAST}, stack)
    assert frames(found) == [0x10, 0x40, 0x50]
    assert found.interrupted.tolist() == [[False, True, False]]
    assert found.ends.tolist() == [End.START]


def test_exception_with_partial_registers() -> None:
    after = STACK + 8 * 13
    stack = [*saved(0x10), 0, TEXT + 0x40, 0, 0, after, 0, TEXT + 0x50]
    found = unwind({0xF: PARTIAL, 0x40: BARE, 0x4F: LAST}, stack)
    assert frames(found) == [0x10, 0x40, 0x50]


@pytest.mark.parametrize("pc", [USER, 0])
def test_entry_from_user_mode(pc: int) -> None:
    found = unwind({0xF: WHOLE}, [*saved(0x10), *regs(pc, 0x7FFF_0000_0000)])
    assert frames(found) == [0x10]
    assert found.ends.tolist() == [End.ENTRY]


def test_task_that_has_never_run() -> None:
    found = unwind({0x9000: LAST}, [*saved(0x9000), *regs(USER, 0)])
    assert frames(found) == [0x9000]
    assert found.ends.tolist() == [End.START]


def test_code_without_orc() -> None:
    bp = STACK + 8 * 7
    stack = [*saved(0x10, bp), 0, TEXT + 0x20]
    for rules in ({0x1F: LAST}, {0xF: BY_FRAME_POINTER, 0x1F: LAST}):
        found = unwind(rules, stack)
        assert frames(found) == [0x10, 0x20]
        assert found.guessed.tolist() == [True]


@pytest.mark.parametrize(
    ("rule", "stack", "end"),
    [
        (BY_R10, [*saved(0x10), 0, 0, TEXT + 0x20], End.UNSUPPORTED),
        (BY_SP, saved(0x10), End.LOST),  # past the end
        (FAR_BP, [*saved(0x10), TEXT + 0x20], End.LOST),  # saved elsewhere
        (BY_SP, [*saved(0x10), 0, 0, 0x1234], End.LOST),  # not a kernel address
        (BY_SP, [*saved(0x10), 0, 0, STACK], End.LOST),  # not code
        (BY_BP, [*saved(0x10, STACK - 64), 0, 0, TEXT + 0x20], End.LOST),  # outside
        (BY_BP, [*saved(0x10, STACK + 57), 0, 0, TEXT + 0x20], End.LOST),  # not aligned
        (BY_BP, [*saved(0x10, STACK + 40), 0, 0, TEXT + 0x20], End.LOST),  # backwards
    ],
)
def test_stack_that_cannot_be_unwound(rule: Rule, stack: list[int], end: End) -> None:
    found = unwind({0xF: rule, 0x1F: LAST}, stack)
    assert frames(found) == [0x10]
    assert found.ends.tolist() == [end]


def test_many_different_stacks() -> None:
    shallow, deep = [*saved(0x20)], [*saved(0x10), 0, 0, TEXT + 0x20]
    rules = {0xF: BY_SP, 0x1F: LAST}
    found = unwind(rules, deep, shallow, [], [0, 0, 0, 0, 0, 0, 5], deep)
    assert [frames(found, row) for row in range(5)] == [
        [0x10, 0x20],
        [0x20],
        [],
        [],
        [0x10, 0x20],
    ]
    assert found.ends.tolist() == [End.START, End.START, End.NONE, End.LOST, End.START]
