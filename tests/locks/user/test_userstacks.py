# SPDX-License-Identifier: LGPL-2.1-or-later

"""Return addresses on user stacks.

Real threads are tested in ``tests/live/test_herddumps.py``.
"""

import struct

import pytest

from msatools.locks.report import UserFrame
from msatools.locks.user_memory import UserMapping
from msatools.locks.user_stacks import Registers, frames_of_stack
from msatools.program.arch import Arm64, ends_with_call

CODE, STACK, PAGE = 0x400000, 0x7FFF0000, 4096
CALLS = frozenset({0x400100, 0x400200, 0x400300, 0x400400, 0x400500})
"""Addresses after call instructions."""


class Memory:
    """Memory with a stack and one page of code."""

    def __init__(self, *words: int) -> None:
        self._data = struct.pack(f"<{len(words)}Q", *words).ljust(PAGE, b"\0")

    def mapping(self, mm: int, address: int) -> UserMapping | None:
        file = 1 << 63 | 64
        if CODE <= address < CODE + PAGE:
            return UserMapping(CODE, CODE + PAGE, 0, file, executable=True)
        if STACK <= address < STACK + PAGE:
            return UserMapping(STACK, STACK + PAGE, 0, 0, executable=False)
        return None

    def read(self, mm: int, address: int, size: int) -> bytes | None:
        start = address - STACK
        return self._data[start : start + size] if 0 <= start < PAGE else None

    def is_behind_call(self, mapping: UserMapping, address: int) -> bool:
        return address in CALLS

    def frame(
        self, mm: int, mapping: UserMapping, address: int, back: int, guess: bool
    ) -> UserFrame:
        return UserFrame(function=None, offset=address, module=None, guess=guess)


def frames(*words: int, fp: int = 0) -> list[str]:
    """Return the frames of a stack; guesses have a question mark."""
    registers = Registers(0x400050, STACK, fp)
    found = frames_of_stack(Memory(*words), 1, registers)
    return [f"{frame.offset:x}{'?' * frame.guess}" for frame in found]


def test_words_that_follow_calls_are_guesses() -> None:
    words = (1, 0x400100, STACK + 8, 0x400108, 0x400200, 0xDEAD, 0x400300)
    assert frames(*words) == ["400050", "400100?", "400200?", "400300?"]


def test_frame_pointers_lead_to_callers() -> None:
    """Other words between frame pointers are not frames; words before them can be."""
    chain = [STACK + 8 * index for index in (2, 6)]
    words = (0x400100, 0, chain[1], 0x400200, 0x400300, 0, 0, 0x400400, 0x400500)
    assert frames(*words, fp=chain[0]) == ["400050", "400100?", "400200", "400400"]


@pytest.mark.parametrize(
    "fp", [STACK - 16, STACK + 4, STACK + 8, STACK + PAGE, 0, (1 << 64) - 8]
)
def test_invalid_frame_pointers(fp: int) -> None:
    words = (0x400100, 0, STACK, 0x400200)
    assert frames(*words, fp=fp) == ["400050", "400100?", "400200?"]


def test_frame_pointers_do_not_lead_back() -> None:
    words = (STACK + 16, 0x400100, STACK, 0x400200)
    assert frames(*words, fp=STACK) == ["400050", "400100", "400200?"]


def test_null_frame_pointer_ends_the_stack() -> None:
    words = (STACK + 16, 0x400100, 0, 0x400200, 0x400300)
    assert frames(*words, fp=STACK) == ["400050", "400100", "400200"]


def test_no_frames_outside_code() -> None:
    registers = Registers(STACK, STACK, 0)
    assert list(frames_of_stack(Memory(0x400100), 1, registers)) == []


@pytest.mark.parametrize(
    "text",
    [
        "e8 78 56 34 12",  # call 0x12345678
        "ff d0",  # call *%rax
        "41 ff d4",  # call *%r12
        "ff 17",  # call *(%rdi)
        "ff 50 10",  # call *0x10(%rax)
        "ff 97 00 01 00 00",  # call *0x100(%rdi)
        "ff 15 78 56 34 12",  # call *0x12345678(%rip)
        "ff 14 c3",  # call *(%rbx,%rax,8)
        "ff 14 c5 00 10 40 00",  # call *0x401000(,%rax,8)
        "41 ff 54 24 08",  # call *0x8(%r12)
        "ff 94 24 80 00 00 00",  # call *0x80(%rsp)
    ],
)
def test_calls(text: str) -> None:
    assert ends_with_call(bytes.fromhex(text))
    assert ends_with_call(b"\x90" * 7 + bytes.fromhex(text))
    assert not ends_with_call(bytes.fromhex(text) + b"\x90")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ff",
        "0f 05",  # syscall
        "ff e0",  # jmp *%rax
        "e9 78 56 34 12",  # jmp 0x12345678
        "ff 25 78 56 34 12",  # jmp *0x12345678(%rip)
        "ff 90 10",  # a part of call *0x..10(%rax)
        "ff c0",  # inc %eax
    ],
)
def test_other_instructions(text: str) -> None:
    assert not ends_with_call(bytes.fromhex(text))


@pytest.mark.parametrize(
    ("instruction", "is_call"),
    [
        (0x9400_0010, True),  # bl
        (0x97FF_FFF0, True),  # bl, backwards
        (0xD63F_0060, True),  # blr x3
        (0xD63F_0865, True),  # blraa x3, x5
        (0x1400_0010, False),  # b
        (0xD61F_0060, False),  # br x3
        (0xD65F_03C0, False),  # ret
    ],
)
def test_calls_of_arm64(instruction: int, is_call: bool) -> None:
    code = instruction.to_bytes(4, "little")
    assert Arm64().ends_with_call(code) is is_call
    assert not Arm64().ends_with_call(code[1:])
