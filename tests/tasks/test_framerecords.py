# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of arm64 by frame records: as drgn unwinds them, and made by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drgn import Object

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks import unwind
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader
from msatools.tasks.text import End
from msatools.tasks.unwind import FrameRecords, OneStack, StackMemory, saved_registers
from tests.support.dumps import open_dump

KERNEL_HALF = 1 << 63


@pytest.mark.parametrize("types", ["btf", "dwarf"])
@pytest.mark.parametrize("name", ["memory-6.12arm64"])
def test_all_are_as_drgn_unwinds_them(name: str, types: str) -> None:
    compare(name, types)


@pytest.mark.parametrize(
    "name", ["tasks-6.12arm64", "memory-6.1arm64", "tasks-6.1arm64"]
)
def test_those_of_tasks_of_every_class_and_of_an_older_kernel(name: str) -> None:
    compare(name, "dwarf")


def compare(name: str, types: str) -> None:
    prog = open_dump(name, types)
    reader, losses = Reader(prog), LossLog()
    tasks = TaskReader(reader).read_all(losses)
    tasks = tasks.only((tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0))
    collector = StackCollector(reader, losses)
    saved = saved_registers(tasks)
    assert saved is not None
    bases = tasks["stack"].astype(np.uint64)
    found = collector.collect(tasks["address"], bases, saved)
    assert found.asked == 0
    assert {stack.end for stack in found.unique} == {End.NONE, End.ENTRY, End.START}
    # One task for each stack.
    _, rows = np.unique(found.index, return_index=True)
    whole = 0
    for row in rows.tolist():
        stack, registers = found[row], saved[row].tolist()
        task = Object(prog, "struct task_struct *", value=int(tasks["address"][row]))
        trace = [frame for frame in prog.stack_trace(task) if not frame.is_inline]
        kernel = [frame.pc for frame in trace if frame.pc >= KERNEL_HALF]
        left = {row for row, frame in enumerate(trace) if frame.interrupted}
        # drgn takes what an exception left for a return address, and may go astray in
        # the rules of the instruction before that.
        known = min(set(stack.interrupted) - left, default=len(kernel)) + 1
        assert stack.addresses[:known] == tuple(kernel[:known]), task.comm
        whole += known > len(kernel)
        if known > len(kernel) and len(kernel) < len(trace):
            assert stack.end is End.ENTRY
        assert left & set(range(min(known, len(kernel)))) <= set(stack.interrupted)
        for index in stack.interrupted:
            if index:
                assert found.names(stack)[index - 1].startswith("el1")
        size = int(bases[row]) + collector.stack_bytes - registers[0]
        words = reader.words(registers[0], size // 8).tolist()
        assert collector.unwind(task.value_(), words, tuple(registers)) == stack
    assert whole > len(rows) / 2


BASE = 0xFFFF_8000_8123_0000
CODE = 0xFFFF_8000_8001_0000
SIGNED = 0x00A5_0000_0000_0000
"""A signature in bits that are set in addresses."""

FP, PC, PSTATE, RECORD, TYPE = 29, 32, 33, 36, 38
"""Words of ``struct pt_regs``."""


def unwinder(monkeypatch: pytest.MonkeyPatch, typed: bool) -> FrameRecords:
    def offsets(prog: object) -> Any:
        type_ = 8 * (TYPE - RECORD) if typed else None
        words = (8 * (word - RECORD) for word in (FP, PC, PSTATE))
        return unwind._RecordOffsets(*words, type_)

    for name, value in (
        ("_offsets", offsets),
        ("code_start", lambda prog: 0xFFFF_8000_0000_0000),
        ("kernel_symbol", lambda prog, name: CODE + 0x9000),
        ("vmcoreinfo_number", lambda prog, name: 0xFFFF_0000_0000_0000),
    ):
        monkeypatch.setattr(unwind, name, value)
    return FrameRecords(SimpleNamespace())  # type: ignore[arg-type]


def unwound(
    made: FrameRecords, words: list[int], fp: int, pc: int
) -> tuple[list[int], list[int], End]:
    """Unwind one stack in both ways, beside one that has none."""
    memory = StackMemory(
        np.array(words, np.uint64),
        np.array([0, len(words)], np.intp),
        np.array([BASE, 0], np.uint64),
        np.array([8 * len(words), 0], np.uint64),
        np.array([[BASE, fp, pc], [0, 0, 0]], np.uint64),
    )
    frames = made.unwind(memory)
    pcs = frames.pcs[0][frames.pcs[0] != 0].tolist()
    left = np.flatnonzero(frames.interrupted[0]).tolist()
    end = End(int(frames.ends[0]))
    assert End(int(frames.ends[1])) is End.NONE
    one = made.unwind_one(words, (BASE, fp, pc))
    flags = [row in left for row in range(len(pcs))]
    assert one == OneStack(pcs, flags, end, False)
    return pcs, left, end


def registers(fp: int, pc: int, user: bool, record: tuple[int, int, int]) -> list[int]:
    words = [0] * 42
    words[FP], words[PC], words[PSTATE] = fp, pc, 0 if user else 5
    words[RECORD : TYPE + 1] = record
    return words


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("user", [True, False])
def test_calls_exception_and_end(
    monkeypatch: pytest.MonkeyPatch, typed: bool, user: bool
) -> None:
    """Three calls, of which one was interrupted; addresses are signed."""
    made = unwinder(monkeypatch, typed)

    def at(word: int) -> int:
        return BASE + 8 * word

    last = 44 + 2 + RECORD
    interrupted = CODE + 0x300
    record = (0, 0, 2) if typed else (at(44), interrupted, 0)
    words = [
        *(at(2 + RECORD), CODE + 0x200 & ~SIGNED),
        *registers(at(44), interrupted, False, record),
        *(at(last), CODE + 0x400 & ~SIGNED),
        *registers(0x7FF0, 0x40_0000 if user else 0, user, (0, 0, 1 if typed else 0)),
    ]
    pcs, left, end = unwound(made, words, at(0), CODE + 0x100)
    assert pcs == [CODE + each for each in (0x100, 0x200, 0x300, 0x400)]
    assert left == [2]
    assert end is (End.ENTRY if user else End.START)


@pytest.mark.parametrize(
    ("words", "fp", "frames", "end"),
    [
        # Outside of the stack.
        ([0, 0], BASE + 0x100, 1, End.LOST),
        # To itself, and downwards.
        ([BASE, CODE + 8], BASE, 1, End.LOST),
        ([0, 0, BASE, CODE + 8], BASE + 16, 1, End.LOST),
        # No code.
        ([BASE + 16, 0x1234], BASE, 1, End.LOST),
        # Without a last record, as of kernel threads up to v5.13.
        ([0, CODE + 8], BASE, 2, End.START),
    ],
)
def test_broken_chains(
    monkeypatch: pytest.MonkeyPatch, words: list[int], fp: int, frames: int, end: End
) -> None:
    made = unwinder(monkeypatch, typed=False)
    pcs, _, found = unwound(made, words, fp, CODE)
    assert (len(pcs), found) == (frames, end)


def test_task_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    made = unwinder(monkeypatch, typed=False)
    words = registers(0, 0, False, (0, 0, 0))
    fp = BASE + 8 * RECORD
    pcs, left, end = unwound(made, words, fp, CODE + 0x9000)
    assert (pcs, left, end) == ([CODE + 0x9000], [0], End.START)
