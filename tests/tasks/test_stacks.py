# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of all tasks, unwound together, are those that drgn unwinds one by one."""

import random
from dataclasses import replace

import numpy as np
import pytest
from drgn import Object, Program

from msatools.errors import MissingError
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks import stacks
from msatools.tasks.stacks import NO_STACK, Stack, StackCollector, Stacks
from msatools.tasks.text import MAX_FRAMES, Base, End, Orc, OrcKind, Rule
from tests.support.dumps import TYPES, open_dump
from tests.support.overlay import PAGE, lose, lose_page, put
from tests.tasks.sleepers import USER_SPACE, Tasks, by_drgn, collect, tasks_of

NEWEST = "memory-6.12"
STACK_BYTES = 16384
BORDERS = {"io_schedule_timeout": "__sched_text_start"}


def each_stack(found: Stacks) -> list[int]:
    """Return the first and the last row of each distinct stack."""
    _, first = np.unique(found.index, return_index=True)
    _, last = np.unique(found.index[::-1], return_index=True)
    return sorted({*first.tolist(), *(len(found) - 1 - last).tolist()})


def rows_of(found: Stacks) -> list[Stack]:
    return [found[row] for row in range(len(found))]


def test_every_stack_is_drgns(tasks: Tasks) -> None:
    found = collect(tasks)
    assert len(found) == len(tasks.objects) > 50
    deep = 0
    for row in each_stack(found):
        task = tasks.objects[row]
        if not tasks.stacks[row]:
            assert found[row] == NO_STACK
            continue
        addresses, interrupted = by_drgn(task)
        assert found[row].addresses == addresses, task.comm
        assert found[row].interrupted == interrupted, task.comm
        deep += len(addresses) > 3
    assert found.asked == 0
    assert deep > 10


def test_all_end_at_an_entry(tasks: Tasks) -> None:
    found = collect(tasks)
    for row, task in enumerate(tasks.objects):
        stack, names = found[row], found.names(found[row])
        if stack == NO_STACK:
            continue
        if stack.end == End.START:
            # One that was just made has not slept yet.
            assert names[0] == "__schedule" or len(names) == 1
            assert names[-1] in ("ret_from_fork", "ret_from_fork_asm")
        else:
            assert names[0] == "__schedule"
            assert stack.end == End.ENTRY
            assert task.mm
            assert names[-1].startswith(("entry_SYSCALL_64", "asm_"))
        assert not stack.guessed


def test_names_are_drgns(tasks_btf: Tasks) -> None:
    """Names are those of drgn's symbols; without DWARF there are no inlined calls."""
    found = collect(tasks_btf)
    for row in each_stack(found):
        task = tasks_btf.objects[row]
        if tasks_btf.stacks[row]:
            names = tuple(
                frame.symbol().name
                for frame in task.prog_.stack_trace(task)
                if frame.pc >= USER_SPACE
            )
            ours = found.names(found[row])
            # At the start of a section of the text, drgn can name its boundary symbol.
            assert names in (ours, tuple(map(BORDERS.get, ours, ours)))


def test_one_read_per_stack_and_one_object_per_distinct_stack(tasks_btf: Tasks) -> None:
    reader, losses = Reader(tasks_btf.prog), LossLog()
    collector = StackCollector(reader, losses)
    assert collector.is_fast
    assert collector.stack_bytes == STACK_BYTES
    columns = (tasks_btf.tasks, tasks_btf.stacks, tasks_btf.pointers)
    # The pages of the ORC tables that these stacks need are read once.
    collector.collect(*columns)
    reads, size = reader.reads, reader.bytes
    found = collector.collect(*(np.tile(column, 9) for column in columns))
    rows = len(tasks_btf.tasks)
    has_stack = tasks_btf.stacks != 0
    count = int(np.count_nonzero(has_stack))
    assert len(found) == 9 * rows
    assert reader.reads - reads == 9 * count
    used = tasks_btf.stacks + np.uint64(STACK_BYTES) - tasks_btf.pointers
    assert reader.bytes - size == 9 * int(used[has_stack].sum())
    assert len(found.unique) < rows
    assert len(set(found.unique)) == len(found.unique)
    assert np.array_equal(found.index, np.tile(found.index[:rows], 9))
    assert losses.coverage["stacks"] == 10 * count
    assert losses.notes == {}


def test_blocks_make_one_table(
    tasks_btf: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = collect(tasks_btf)
    monkeypatch.setattr(stacks, "_AT_ONCE", 7)
    parts = collect(tasks_btf)
    assert rows_of(parts) == rows_of(whole)
    assert len(parts.unique) == len(whole.unique)


def test_tasks_without_a_stack_are_skipped(tasks_btf: Tasks) -> None:
    losses = LossLog()
    none = np.zeros(len(tasks_btf.tasks), np.uint64)
    found = collect(replace(tasks_btf, stacks=none), losses)
    assert found.unique == [NO_STACK]
    assert not found.index.any()
    assert losses.coverage["stack_pointers_bad"] == 0
    assert found.names(found[0]) == ()
    empty = none[:0]
    nobody = replace(tasks_btf, tasks=empty, stacks=empty, pointers=empty)
    assert len(collect(nobody)) == 0


@pytest.mark.parametrize("offset", [-8, STACK_BYTES, STACK_BYTES + 8, 4, 1 << 40, None])
def test_stack_that_cannot_be_read(offset: int | None) -> None:
    """A bad stack pointer or missing memory affects no other stack."""
    tasks = tasks_of(NEWEST, "btf")
    expected = rows_of(collect(tasks))
    if offset is None:
        lose(tasks.prog, int(tasks.stacks[3]), STACK_BYTES)
    else:
        tasks.pointers[3] = np.uint64((int(tasks.stacks[3]) + offset) % (1 << 64))
    losses = LossLog()
    found = rows_of(collect(tasks, losses))
    assert found == [*expected[:3], NO_STACK, *expected[4:]]
    assert losses.coverage["stack_pointers_bad"] == (offset is not None)
    assert losses.coverage["stacks_unreadable"] == (offset is None)
    assert losses.lost == ({} if offset is not None else {"stacks_unreadable": 1})


def test_stack_with_a_damaged_frame() -> None:
    """The frames before the damage are kept, and the stack is counted as incomplete."""
    tasks = tasks_of(NEWEST, "btf")
    expected = collect(tasks)[3].addresses
    pointer, end = int(tasks.pointers[3]), int(tasks.stacks[3]) + STACK_BYTES
    data = bytearray(tasks.prog.read(pointer, end - pointer))
    third = data.index(expected[2].to_bytes(8, "little"))
    data[third : third + 8] = bytes(8)
    put(tasks.prog, pointer, bytes(data))
    losses = LossLog()
    stack = collect(tasks, losses)[3]
    assert stack.addresses == expected[:2]
    assert stack.end is End.LOST
    assert losses.coverage["stacks_incomplete"] == 1


@pytest.mark.parametrize("name", ["memory-5.10", NEWEST])
def test_stacks_of_random_words(name: str) -> None:
    """Words are code addresses, stack addresses, small numbers, or anything."""
    tasks = tasks_of(name, "btf")
    chance = random.Random(0)
    text = tasks.prog.symbol("_stext").address
    end = tasks.prog.symbol("_etext").address
    real = sorted({a for stack in collect(tasks).unique for a in stack.addresses})
    for row, stack in enumerate(tasks.stacks.tolist()):
        choices = (
            lambda: chance.choice(real),
            lambda: chance.randrange(text, end),
            lambda stack=stack: stack + 8 * chance.randrange(STACK_BYTES // 8),
            lambda: chance.getrandbits(64),
            lambda: chance.getrandbits(8),
            # The area of modules and compiled BPF programs.
            lambda: 0xFFFF_FFFF_C000_0000 + chance.getrandbits(24),
        )
        words = [chance.choice(choices)() for _ in range(STACK_BYTES // 8)]
        put(tasks.prog, stack, np.array(words, "<u8").tobytes())
        offset = 8 * chance.randrange(STACK_BYTES // 8)
        tasks.pointers[row] = np.uint64(stack + offset)
        if row == 10:
            # The same return address throughout, to provoke a loop.
            loop = np.full(STACK_BYTES // 8, real[0], "<u8")
            put(tasks.prog, stack, loop.tobytes())
    losses = LossLog()
    found = collect(tasks, losses)
    assert losses.coverage["stacks_incomplete"] > len(found) / 2
    assert found.asked <= stacks.MAX_ASKED
    for stack in found.unique:
        assert len(stack.addresses) <= MAX_FRAMES
        assert len(found.names(stack)) == len(stack.addresses)


def test_without_orc_drgn_unwinds(idle: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only x86-64 has ORC."""
    expected = collect(idle)

    def none(*_: object) -> Orc:
        raise MissingError("there is none here")

    monkeypatch.setattr(stacks, "Orc", none)
    losses = LossLog()
    found = collect(idle, losses)
    assert rows_of(found) == rows_of(expected)
    assert found.asked == np.count_nonzero(idle.stacks)
    assert [note.code for note in losses.notes.values()] == ["stacks-slow"]


def test_where_drgn_cannot_unwind_a_note_says_so(
    idle: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> Orc:
        raise MissingError("there is none here")

    monkeypatch.setattr(stacks, "Orc", none)
    monkeypatch.setattr(stacks, "_drgn_unwinds", lambda prog: False)
    losses = LossLog()
    StackCollector(Reader(idle.prog), losses)
    assert [note.code for note in losses.notes.values()] == ["stacks-unread"]


def test_drgn_unwinds_a_limited_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """drgn unwinds stacks that need a register not saved for a sleeping task."""
    tasks = tasks_of(NEWEST, "btf")
    expected = collect(tasks)
    needs = Rule(OrcKind.CALL, Base.OTHER, 0, Base.NONE, 0, False)
    monkeypatch.setattr(Orc, "rule", lambda self, pc: needs)
    monkeypatch.setattr(stacks, "MAX_ASKED", 10)
    losses = LossLog()
    found = collect(tasks, losses)
    assert found.asked == losses.coverage["stacks_by_drgn"] == 10
    assert rows_of(found)[:10] == rows_of(expected)[:10]
    assert found[10].end is End.UNSUPPORTED
    assert found[10].addresses == expected[10].addresses[:1]
    assert losses.coverage["stacks_incomplete"] == len(found) - 10


@pytest.mark.parametrize("types", TYPES)
def test_functions_of_modules(types: str) -> None:
    """Modules have their own ORC and symbols, which the kernel's debug info lacks."""
    name, address = module_function(open_dump(NEWEST, "btf"))
    prog, losses = open_dump(NEWEST, types), LossLog()
    reader = Reader(prog)
    text = StackCollector(reader, losses).text
    orc = Orc(reader, text, losses)
    assert text.name(address) == name
    assert text.name(address - (1 << 30)) is None
    # At the start of a function, the stack pointer points to the return address.
    rule = orc.rule(address)
    assert rule is not None
    assert (rule.kind, rule.cfa, rule.cfa_offset) == (OrcKind.CALL, Base.SP, 8)
    reads = reader.reads
    assert orc.rule(address + 1) is not None
    assert reader.reads == reads
    assert losses.notes == {}


def module_function(prog: Program) -> tuple[str, int]:
    (symbol,) = prog.symbols("fw_cfg_sysfs_remove")
    return symbol.name, symbol.address


def kernel_orc() -> tuple[Orc, LossLog]:
    prog, losses = open_dump(NEWEST, "btf"), LossLog()
    reader = Reader(prog)
    return Orc(reader, StackCollector(reader, losses).text, losses), losses


def test_entries_read_by_page_are_those_of_the_whole_table() -> None:
    orc, losses = kernel_orc()
    whole, count = orc._read(*orc._place), orc._place[2]
    rows = {0, 1, 1023, 1024, 1025, count - 2, count - 1, *range(0, count, 9973)}
    for row in rows:
        entry = int(whole.pcs[row])
        for pc in (entry - 1, entry, entry + 1):
            assert orc._kernel.find(pc) == whole.find(pc)
    assert orc._kernel.find(0) is None
    assert losses.notes == {}


def test_entries_in_no_order_are_sorted() -> None:
    """Kernels before v5.6 sort them when they boot, and others may be damaged."""
    orc, losses = kernel_orc()
    pcs, entries, count = orc._place
    whole = orc._read(pcs, entries, count)
    pc = int(whole.pcs[count // 2])
    known = orc.rule(pc)
    orc, losses = kernel_orc()
    # An entry beside it that is far below all others.
    put(orc._reader.prog, pcs + 4 * (count // 2 + 5), (1 << 31).to_bytes(4, "little"))
    assert orc.rule(pc) == known
    assert type(orc._kernel) is type(whole)
    assert losses.notes == {}


def test_lost_page_of_entries_costs_a_note() -> None:
    orc, losses = kernel_orc()
    pcs, entries, count = orc._place
    whole = orc._read(pcs, entries, count)
    # The last page with no more than addresses of entries.
    page = (pcs + 4 * (count - 1024)) & -PAGE
    lost = int(whole.pcs[(page - pcs) // 4 + 512])
    known = int(whole.pcs[0])
    lose_page(orc._reader.prog, page)
    assert orc.rule(known) is not None
    assert losses.notes == {}
    assert orc.rule(lost) is None
    assert losses.lost == {"unwind_tables_unreadable": 1}
    assert losses.about == {"kernel": 1}


def test_damaged_module_costs_a_note() -> None:
    prog, losses = open_dump(NEWEST, "btf"), LossLog()
    _, address = module_function(prog)
    reader = Reader(prog)
    text = StackCollector(reader, losses).text
    orc = Orc(reader, text, losses)
    module = text.module(address)
    assert module is not None
    arch = Object(prog, "struct module", address=module.address).arch
    put(prog, arch.num_orcs.address_, (1 << 31).to_bytes(4, "little"))
    assert orc.rule(address) is None
    assert losses.lost == {"unwind_tables_unreadable": 1}
    assert losses.about == {module.name: 1}
