# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a module leaks, and nothing else, is a leak."""

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import drgn
import pytest
from drgn import Program

from msatools.kernel.report import LossLog
from msatools.tasks.stackmemory import stack_bytes
from msatools.zombies import leaks, slabscan
from msatools.zombies.leaks import _is_allocated, find_leaks
from msatools.zombies.model import Leak
from msatools.zombies.pidholders import PidHolders
from msatools.zombies.slabscan import SlabScan
from tests.support.dumps import open_dump
from tests.support.overlay import put
from tests.zombies.dumps import Dump, read_dump

WITHOUT = (
    *("tasks-6.1", "tasks-6.12", "locks-6.1", "locks-6.12"),
    pytest.param("manytasks-6.12", marks=pytest.mark.long),
    # Where slabs are described in struct page.
    pytest.param("memory-5.10", marks=pytest.mark.kernels),
)
"""Where nothing leaks: with pidfds, sockets, terminals and waits of all kinds."""


def look(dump: Dump) -> tuple[tuple[Leak, ...], LossLog]:
    losses = LossLog()
    found = find_leaks(dump.reader, dump.table, losses)
    assert found is not None
    return found, losses


def codes(losses: LossLog) -> list[str]:
    return [note.code for note in losses.notes.values()]


def test_what_the_module_leaks(dump: Dump) -> None:
    """How much of it: tests/truth/zombies."""
    found, losses = look(dump)
    assert not losses.notes
    assert losses.coverage["struct_pids"] > len(dump.table)
    by_address = {leak.address: leak for leak in found}
    for one in dump.workload["leaks"]:
        leak = by_address.pop(int(one["address"], 16))
        # Others may have held it as the module counted, and others since.
        assert leak.named.get("number in use", 0) == (0 if one["reaped"] else 1)
        assert leak.task == (None if one["reaped"] else "zombie")
    assert by_address == {}
    assert [leak.pid for leak in found] == sorted(leak.pid for leak in found)


@pytest.mark.parametrize("name", WITHOUT)
def test_nothing_else_leaks(name: str) -> None:
    dump = read_dump(name)
    found, losses = look(dump)
    assert found == ()
    assert not losses.notes
    assert losses.coverage["struct_pids"] >= len(dump.table)


def none(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def others(dump: Dump) -> dict[int, Leak]:
    """Find leaks that are none of the module's, by PID."""
    leaked = {one["pid"] for one in dump.workload["leaks"]}
    return {leak.pid: leak for leak in look(dump)[0] if leak.pid not in leaked}


WAYS = {"pidfd": "_pidfds", "proc": "_proc_inodes", "owner": "_file_owners"}


@pytest.mark.parametrize("way", WAYS)
def test_holders_are_known_by_kind(
    dump: Dump, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held in a way that is not looked at looks like a leak."""
    monkeypatch.setattr(leaks, "_in_slabs", none)
    pid = dump.workload["held"][way]
    assert pid not in others(dump)
    monkeypatch.setattr(PidHolders, WAYS[way], none)
    assert others(dump)[pid].task is None


def test_waits_are_known(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_in_slabs", none)
    monkeypatch.setattr(leaks, "_on_stacks", none)
    tasks = dump.workload["tasks"]
    waited = {tasks[name]["waits_for"]["pid"] for name in waiting(dump)}
    assert waited
    assert waited <= others(dump).keys()


@pytest.mark.parametrize(("who", "holds"), [("leaks", False), ("waits", True)])
def test_what_is_left_on_a_stack_holds_nothing(who: str, holds: bool) -> None:
    """One waits for signals, whatever it did before; the other for a child."""
    dump = Dump(open_dump("zombies-6.12", "btf"), "zombies-6.12")
    (leak, *_) = (one for one in dump.workload["leaks"] if one["leaked"] == 1)
    if who == "leaks":
        tid = int(dump.table["pid"][dump.table["comm"] == b"leaks"][0])
    else:
        tid = dump.workload["tasks"][waiting(dump)[0]]["tid"]
    (stack,) = dump.table["stack"][dump.table["pid"] == tid].tolist()
    # A register that user mode had at its system call.
    saved = stack + stack_bytes(dump.prog) - _REGISTERS
    put(dump.prog, saved, struct.pack("<Q", int(leak["address"], 16)))
    found = {one.address for one in look(dump)[0]}
    assert (int(leak["address"], 16) not in found) == holds


_REGISTERS = 168 - 24
"""Bytes of ``struct pt_regs``, but for the first few."""


def waiting(dump: Dump) -> list[str]:
    """Tasks that wait for one child."""
    tasks = dump.workload["tasks"]
    return [name for name, task in tasks.items() if "pid" in task.get("waits_for", {})]


def test_search_finds_holders_of_any_kind(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without knowing where they are."""
    monkeypatch.setattr(PidHolders, "all", none)
    held = dump.workload["held"]
    assert not {held[way] for way in WAYS} & others(dump).keys()


def test_array_of_free_objects_is_no_holder(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels since v6.18 keep of objects to give out has stale pointers."""
    damaged = Dump(program, "zombies-6.12")
    scan = SlabScan(damaged.reader, LossLog())
    (kmalloc,) = [c.address for c in scan.caches.values() if c.name == "kmalloc-512"]
    cache = program["init_pid_ns"].pid_cachep.value_()
    leak, *_ = look(damaged)[0]
    place = next(
        int(each) for each in scan.objects(kmalloc) if _is_allocated(program, each)
    )
    put(program, place, struct.pack("<6Q", 0, 0, cache, 0, leak.address, leak.address))

    def found() -> set[int]:
        return {each.address for each in look(damaged)[0]}

    assert leak.address not in found()
    monkeypatch.setattr(leaks, "_sheaf_cache", lambda _: 16)
    assert leak.address in found()


def test_variable_is_a_holder(program: Program) -> None:
    damaged = Dump(program, "zombies-6.12")
    whole = {leak.address: leak for leak in look(damaged)[0]}
    leak = max(whole.values(), key=lambda leak: leak.references)
    place = program["core_pattern"].address_
    put(program, place + 8, struct.pack("<Q", leak.address))
    after = {each.address: each for each in look(damaged)[0]}
    named = {**leak.named, "variable core_pattern": 1}
    assert after == whole | {leak.address: replace(leak, named=named)}


def test_objects_come_after_their_padding(dump: Dump) -> None:
    """Which only debugging of slabs has (CONFIG_SLUB_DEBUG)."""
    scan = SlabScan(dump.reader, LossLog())
    address, cache = next(iter(scan.caches.items()))
    plain = scan.objects(address)
    scan.caches[address] = replace(cache, padding=64)
    assert (scan.objects(address) - plain == 64).all()


def test_kind_that_fails_is_noted(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise drgn.FaultError("gone", 0)

    whole, _ = look(dump)
    monkeypatch.setattr(PidHolders, "_callbacks", broken)
    found, losses = look(dump)
    # A number that is free with one reference may be about to be let go of.
    sure = tuple(leak for leak in whole if leak.task or leak.references > 1)
    assert 0 < len(sure) < len(whole)
    assert found == sure
    assert codes(losses) == ["lost", "leaks-unsure"]


def test_running_kernel_is_looked_at_twice(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, _ = look(dump)
    monkeypatch.setattr(dump.reader, "is_live", True)
    before = dump.reader.reads
    assert look(dump)[0] == once
    assert dump.reader.reads > before + len(dump.table)
    # Only what leaks both times does.
    looks = iter([[*once], [*once[1:]]])
    monkeypatch.setattr(leaks, "_suspects", lambda *_: next(looks))
    assert look(dump)[0] == once[1:]


def test_no_slub(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> tuple[int, int, int]:
        raise LookupError("no objects")

    monkeypatch.setattr(slabscan, "_slab_layout", missing)
    losses = LossLog()
    assert find_leaks(dump.reader, dump.table, losses) is None
    assert codes(losses) == ["lost"]


def test_search_is_bounded(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabscan, "_MAX_SEARCHED", 1 << 20)
    assert codes(look(dump)[1]) == ["search-cut-short"]
