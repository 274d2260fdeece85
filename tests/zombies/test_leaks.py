# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a module leaks, and nothing else, is a leak."""

import struct
from collections.abc import Iterator
from typing import Any

import drgn
import pytest
from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.tasks.table import TaskReader
from msatools.zombies import leaks, slabscan
from msatools.zombies.leaks import _is_allocated, find_leaks
from msatools.zombies.model import Leak
from msatools.zombies.pidholders import PidHolders
from msatools.zombies.slabscan import SlabScan
from tests.support.dumps import pairs
from tests.zombies.conftest import put
from tests.zombies.dumps import ZOMBIES, Dump, read_dump

WITHOUT = (
    *("tasks-6.1", "tasks-6.12", "locks-6.1", "locks-6.12"),
    *("manytasks-6.1", "manytasks-6.12", "memory-5.10"),
)
"""Where nothing leaks: with pidfds, sockets, terminals and waits of all kinds."""


@pytest.fixture(scope="module", params=pairs(ZOMBIES))
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(*request.param)


@pytest.fixture(scope="module")
def found(dump: Dump) -> tuple[Leak, ...]:
    findings = Findings()
    found = find_leaks(dump.reader, dump.tasks, findings)
    assert found is not None
    assert not findings.notes
    assert findings.coverage["struct_pids"] > len(dump.tasks)
    return found


def test_what_the_module_leaks(dump: Dump, found: tuple[Leak, ...]) -> None:
    told = {leak.address: leak for leak in found}
    for one in dump.workload["leaks"]:
        leak = told.pop(int(one["address"], 16))
        assert leak.pid == one["pid"]
        assert leak.references - sum(leak.named.values()) == one["leaked"]
        later = dict(leak.named)
        assert later.pop("number in use", 0) == (0 if one["reaped"] else 1)
        # Who has come to hold it since the module counted is named.
        assert leak.references - sum(later.values()) == one["count"]
        assert leak.task == (None if one["reaped"] else "zombie")
    assert told == {}
    assert [leak.pid for leak in found] == sorted(leak.pid for leak in found)


@pytest.mark.parametrize("name", WITHOUT)
def test_nothing_else_leaks(name: str) -> None:
    dump = read_dump(name, "btf")
    findings = Findings()
    assert find_leaks(dump.reader, dump.tasks, findings) == ()
    assert not findings.notes
    assert findings.coverage["struct_pids"] >= len(dump.tasks)


def none(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def others(dump: Dump) -> dict[int, Leak]:
    """Those told that the module has not leaked, by PID."""
    leaked = {one["pid"] for one in dump.workload["leaks"]}
    found = find_leaks(dump.reader, dump.tasks, Findings())
    assert found is not None
    return {leak.pid: leak for leak in found if leak.pid not in leaked}


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
    reader, findings = Reader(program), Findings()
    tasks = TaskReader(reader).read_all(findings)
    scan = SlabScan(reader, findings)
    (kmalloc,) = [c.address for c in scan.caches.values() if c.name == "kmalloc-512"]
    cache = program["init_pid_ns"].pid_cachep.value_()
    leak, *_ = find_leaks(reader, tasks, findings) or ()
    place = next(
        int(each) for each in scan.objects(kmalloc) if _is_allocated(program, each)
    )
    put(program, place, struct.pack("<6Q", 0, 0, cache, 0, leak.address, leak.address))

    def told() -> set[int]:
        return {each.address for each in find_leaks(reader, tasks, findings) or ()}

    assert leak.address not in told()
    monkeypatch.setattr(leaks, "_sheaf_cache", lambda _: 16)
    assert leak.address in told()


def test_kind_that_fails_is_noted(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise drgn.FaultError("gone", 0)

    monkeypatch.setattr(PidHolders, "_callbacks", broken)
    findings = Findings()
    found = find_leaks(dump.reader, dump.tasks, findings)
    assert found is not None
    # A number that is free with one reference may be about to be let go of.
    leaked = dump.workload["leaks"]
    sure = {one["pid"] for one in leaked if not (one["reaped"] and one["count"] == 1)}
    assert {leak.pid for leak in found} == sure
    assert [note.code for note in findings.notes.values()] == ["lost", "leaks-unsure"]


def test_running_kernel_is_looked_at_twice(
    dump: Dump, found: tuple[Leak, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_is_live", lambda _: True)
    before = dump.reader.reads
    assert find_leaks(dump.reader, dump.tasks, Findings()) == found
    assert dump.reader.reads > before + len(dump.tasks)


def test_no_slub(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> tuple[int, int, int]:
        raise LookupError("no objects")

    monkeypatch.setattr(slabscan, "_slab_layout", missing)
    findings = Findings()
    assert find_leaks(dump.reader, dump.tasks, findings) is None
    assert [note.code for note in findings.notes.values()] == ["lost"]


def test_search_is_bounded(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabscan, "_MAX_SEARCHED", 1 << 20)
    findings = Findings()
    find_leaks(dump.reader, dump.tasks, findings)
    assert [note.code for note in findings.notes.values()] == ["search-cut-short"]
