# SPDX-License-Identifier: LGPL-2.1-or-later

"""Exactly the references that a module leaks are reported as leaks."""

import struct
from collections.abc import Iterator
from typing import Any

import drgn
import pytest
from drgn import Program
from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.kernel.report import LossLog
from msatools.tasks.unwind import stack_bytes
from msatools.zombies import leaks, slabscan
from msatools.zombies.leaks import PidHolders, _is_allocated, find_pid_leaks
from msatools.zombies.model import Leak
from msatools.zombies.slabscan import SlabScan
from tests.support.dumps import open_dump
from tests.support.overlay import put
from tests.zombies.dumps import Dump, read_dump

WITHOUT = (
    *("tasks-6.1", "tasks-6.12", "locks-6.1", "locks-6.12"),
    pytest.param("manytasks-6.12", marks=pytest.mark.long),
    # This kernel keeps slab fields in struct page.
    "memory-5.10",
)
"""Dumps without leaks, with pidfds, sockets, terminals and waits of all kinds."""


def find(dump: Dump) -> tuple[tuple[Leak, ...], LossLog]:
    losses = LossLog()
    found = find_pid_leaks(dump.reader, dump.table, losses)
    assert found is not None
    return found, losses


def codes(losses: LossLog) -> list[str]:
    return [note.code for note in losses.notes.values()]


def test_leaks_of_the_module(dump: Dump) -> None:
    """The numbers of leaked references are facts in tests/truth/zombies.py."""
    found, losses = find(dump)
    assert not losses.notes
    assert losses.coverage["struct_pids"] > len(dump.table)
    by_address = {leak.address: leak for leak in found}
    for recorded in dump.workload["leaks"]:
        leak = by_address.pop(int(recorded["address"], 16))
        # Other holders can have existed when the module counted, and since.
        assert leak.named.get("number in use", 0) == (0 if recorded["reaped"] else 1)
        assert leak.task == (None if recorded["reaped"] else "zombie")
    assert by_address == {}
    assert [leak.pid for leak in found] == sorted(leak.pid for leak in found)


@pytest.mark.parametrize("name", WITHOUT)
def test_nothing_else_leaks(name: str) -> None:
    dump = read_dump(name)
    found, losses = find(dump)
    assert found == ()
    assert not losses.notes
    assert losses.coverage["struct_pids"] >= len(dump.table)


def none(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def others(dump: Dump) -> dict[int, Leak]:
    """Return leaks that are not the module's, by PID."""
    leaked = {one["pid"] for one in dump.workload["leaks"]}
    return {leak.pid: leak for leak in find(dump)[0] if leak.pid not in leaked}


WAYS = {"pidfd": "_pidfds", "proc": "_proc_inodes", "owner": "_file_owners"}


@pytest.mark.parametrize("way", WAYS)
def test_holders_are_known_by_kind(
    dump: Dump, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference of a kind of holder that is not searched is reported as a leak."""
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
def test_stale_words_on_a_stack_are_not_holders(who: str, holds: bool) -> None:
    """A task that waits for signals holds nothing; one that waits for a child does."""
    dump = Dump(open_dump("zombies-6.12", "btf"), "zombies-6.12")
    (leak, *_) = (one for one in dump.workload["leaks"] if one["leaked"] == 1)
    if who == "leaks":
        tid = int(dump.table["pid"][dump.table["comm"] == b"leaks"][0])
    else:
        tid = dump.workload["tasks"][waiting(dump)[0]]["tid"]
    (stack,) = dump.table["stack"][dump.table["pid"] == tid].tolist()
    # A saved user-mode register.
    saved = stack + stack_bytes(dump.prog) - _REGISTERS
    put(dump.prog, saved, struct.pack("<Q", int(leak["address"], 16)))
    found = {one.address for one in find(dump)[0]}
    assert (int(leak["address"], 16) not in found) == holds


_REGISTERS = 168 - 24
"""Bytes of ``struct pt_regs`` without the first registers."""


def waiting(dump: Dump) -> list[str]:
    """Return tasks that wait for one child."""
    tasks = dump.workload["tasks"]
    return [name for name, task in tasks.items() if "pid" in task.get("waits_for", {})]


def test_search_finds_holders_of_any_kind(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holders are found by a search of all slab objects."""
    monkeypatch.setattr(PidHolders, "all", none)
    held = dump.workload["held"]
    assert not {held[way] for way in WAYS} & others(dump).keys()


def test_array_of_free_objects_is_no_holder(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since v6.18, arrays of free objects (sheaves) have stale pointers."""
    damaged = Dump(program, "zombies-6.12")
    scan = SlabScan(damaged.reader, LossLog())
    (kmalloc,) = [c.address for c in scan.caches.values() if c.name == "kmalloc-512"]
    cache = program["init_pid_ns"].pid_cachep.value_()
    leak, *_ = find(damaged)[0]
    sheaf = next(
        int(start) for start in scan.objects(kmalloc) if _is_allocated(program, start)
    )
    put(program, sheaf, struct.pack("<6Q", 0, 0, cache, 0, leak.address, leak.address))

    def found() -> set[int]:
        return {leak.address for leak in find(damaged)[0]}

    assert leak.address not in found()
    monkeypatch.setattr(leaks, "_sheaf_cache", lambda _: 16)
    assert leak.address in found()


def test_variable_is_a_holder(program: Program) -> None:
    damaged = Dump(program, "zombies-6.12")
    whole = {leak.address: leak for leak in find(damaged)[0]}
    leak = max(whole.values(), key=lambda leak: leak.references)
    variable = program["core_pattern"].address_
    put(program, variable + 8, struct.pack("<Q", leak.address))
    after = {found.address: found for found in find(damaged)[0]}
    named = {**leak.named, "variable core_pattern": 1}
    assert after == whole | {leak.address: replace(leak, named=named)}


def test_kind_that_fails_is_noted(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise drgn.FaultError("gone", 0)

    whole, _ = find(dump)
    monkeypatch.setattr(PidHolders, "_callbacks", broken)
    found, losses = find(dump)
    # A freed number with one reference can be about to be released.
    sure = tuple(leak for leak in whole if leak.task or leak.references > 1)
    assert 0 < len(sure) < len(whole)
    assert found == sure
    assert codes(losses) == ["lost", "leaks-unsure"]


def test_running_kernel_is_searched_twice(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, _ = find(dump)
    monkeypatch.setattr(dump.reader, "is_live", True)
    before = dump.reader.reads
    assert find(dump)[0] == once
    assert dump.reader.reads > before + len(dump.table)
    # Only leaks found both times are reported.
    suspects = iter([[*once], [*once[1:]]])
    monkeypatch.setattr(leaks, "_suspects", lambda *_: next(suspects))
    assert find(dump)[0] == once[1:]


def test_no_slub(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> tuple[int, int, int]:
        raise MissingError("no objects")

    monkeypatch.setattr(slabscan, "_slab_layout", missing)
    losses = LossLog()
    assert find_pid_leaks(dump.reader, dump.table, losses) is None
    assert codes(losses) == ["lost"]


def test_search_is_bounded(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabscan, "_MAX_SEARCHED", 1 << 20)
    assert codes(find(dump)[1]) == ["search-cut-short"]
