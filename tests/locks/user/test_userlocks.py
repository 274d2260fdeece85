# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes: who waits on which, in what order, and who has it."""

import struct
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.mm import access_remote_vm

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.locks.cases import read_cases
from msatools.locks.futexkey import Key
from msatools.locks.layout import Layout
from msatools.locks.lock import Request
from msatools.locks.look import Case, Look
from msatools.locks.user import nptl, userlocks
from msatools.locks.user.futexes import Waiter
from msatools.target import TargetSpec, open_target
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.table import TaskReader
from tests.locks.conftest import Seen, seen
from tests.support.dumps import open_dump
from tests.support.overlay import lay_over

KERNELS = ("6.1", "6.12")
TYPES = ("btf", "dwarf")
FUTEXES = ("futex", "pi_futex")
FILTERED = "user-memory-filtered"


@pytest.fixture(
    scope="module",
    params=[(f"tasks-{kernel}", types) for kernel in KERNELS for types in TYPES],
    ids=lambda param: "-".join(param),
)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(*request.param)


@pytest.fixture(
    scope="module",
    params=[(f"locks-{kernel}", types) for kernel in KERNELS for types in TYPES],
    ids=lambda param: "-".join(param),
)
def locks(request: pytest.FixtureRequest) -> Seen:
    return seen(*request.param)


def look_at(dump: Seen, alone: bool = False) -> Look:
    layout = Layout(dump.reader)
    return Look(layout, dump.table, Findings(), dump.clocks, alone=alone)


def case_of(dump: Seen, look: Look, row: int) -> Case:
    size = stack_bytes(dump.reader.prog)
    (case,) = read_cases(look, dump.now, np.array([row]), size)
    return case


def waits(dump: Seen) -> dict[str, dict[str, Any]]:
    """The named tasks that wait on futexes."""
    return {
        name: task
        for name, task in dump.named().items()
        if (task["on"] or {}).get("kind") in FUTEXES
    }


def address_of(dump: Seen, name: str) -> int:
    return int(dump.table["address"][dump.row(name)])


def pids(dump: Seen, tasks: list[int]) -> list[int]:
    known = dict(
        zip(dump.table["address"].tolist(), dump.table["pid"].tolist(), strict=True)
    )
    return [known[task] for task in tasks]


def owners(dump: Seen, look: Look, request: Request) -> list[tuple[int, str]]:
    found = userlocks.holders(look, request.lock)
    tasks = pids(dump, [holder.task for holder in found])
    return list(zip(tasks, [holder.confidence for holder in found], strict=True))


def queue(dump: Seen, look: Look, request: Request) -> list[int]:
    found = userlocks.queue(look, request.lock)
    assert found is not None
    assert {each.mode for each in found} == {request.mode}
    return pids(dump, [each.task for each in found])


def test_futexes_are_told_by_tables_and_by_stacks(dump: Seen) -> None:
    """The tables of waiters tell the same as a task's own stack, alone or not."""
    look, few = look_at(dump), look_at(dump, alone=True)
    named = waits(dump)
    assert len(named) > 7
    for name, task in named.items():
        found = userlocks.futex_requests(look, address_of(dump, name))
        row = dump.row(name)
        assert userlocks.requests(look, case_of(dump, look, row)) == found, name
        assert userlocks.requests(few, case_of(dump, few, row)) == found, name
        on = task["on"]
        places = on.get("addresses", [on["address"]] if "address" in on else [])
        if name == "futex-shared":
            # It is known by where it is in the file.
            places = [None]
        assert [request.lock.address for request in found] == places, name
        for request in found:
            assert request.lock.type == on["kind"], name
            assert queue(dump, look, request) == [task["tid"]], name
            assert queue(dump, few, request) == [task["tid"]], name
            owner = [(on["owner"], "exact")] if "owner" in on else []
            assert owners(dump, look, request) == owner, name
            assert owners(dump, few, request) == owner, name
    assert not look.findings.lost
    assert not few.findings.lost


def test_condition_variables_have_no_owners(dump: Seen) -> None:
    look = look_at(dump)
    for server in dump.run.workload["servers"].values():
        requests: Counter[Request] = Counter()
        for worker in server["workers"]:
            task = int(dump.table["address"][dump.rows[worker]])
            requests.update(userlocks.futex_requests(look, task))
        assert requests.total() == len(server["workers"])
        queued = chain(*(queue(dump, look, request) for request in requests))
        assert sorted(queued) == sorted(server["workers"])
        for request, count in requests.items():
            assert request.mode is None
            assert owners(dump, look, request) == []
            assert userlocks.readers(look, request.lock) is None
            assert len(queue(dump, look, request)) == count
    assert not look.findings.lost


def test_who_waits_on_no_futex(dump: Seen) -> None:
    look = look_at(dump)
    for name in ("nanosleep", "poll"):
        assert userlocks.futex_requests(look, address_of(dump, name)) == []
        case = case_of(dump, look, dump.row(name))
        assert userlocks.requests(look, case) == []


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_locks_of_the_c_library(locks: Seen, alone: bool) -> None:
    """Owners, order and address of every mutex, rwlock, condition and so on."""
    look = look_at(locks, alone)
    known = {lock["name"]: lock for lock in locks.run.workload["locks"]}
    wrong, compared = {}, 0
    for name, task in waits(locks).items():
        if name.startswith("herd-") and not name.endswith("0"):
            continue
        truth = known[task["on"]["lock"]]
        found = userlocks.requests(look, case_of(locks, look, locks.row(name)))
        request = found[0]
        said = (
            request.lock.type,
            owners(locks, look, request),
            queue(locks, look, request),
        )
        should = (
            truth["type"],
            [(owner["pid"], confidence(name)) for owner in truth.get("owners", [])],
            [waiter["pid"] for waiter in truth["waiters"]],
        )
        if said != should:
            wrong[name] = said, should
        address = truth.get("address")
        if address and request.lock.address is not None:
            assert hex(request.lock.address) == address, name
        compared += 1
    assert wrong == {}
    assert compared > 70
    assert not look.findings.lost


def confidence(name: str) -> str:
    """Of a thread that is to end the kernel itself knows what word it clears then."""
    return "exact" if name == "join" or "pi-" in f"{name}-" else "likely"


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_read_write_locks(locks: Seen, alone: bool) -> None:
    look = look_at(locks, alone)

    def told(name: str) -> tuple[str | None, int | None]:
        case = case_of(locks, look, locks.row(name))
        (request,) = userlocks.requests(look, case)
        return request.mode, userlocks.readers(look, request.lock)

    for number in (1, 2):
        assert told(f"rwlock-read-{number}") == ("read", 0)
        assert told(f"rwlock-write-{number}") == ("write", 0)
    assert told("rwlock-read-write") == ("write", 2)
    assert told("normal-1") == (None, None)


def test_parked_for_ever(locks: Seen) -> None:
    """The one that the kernel refused, and nobody else."""
    look = look_at(locks)
    parked = [
        name
        for name in waits(locks)
        for request in userlocks.futex_requests(look, address_of(locks, name))
        if userlocks.parked(look, address_of(locks, name), request)
    ]
    assert parked == ["pi-abba-2"]
    case = case_of(locks, look, locks.row("pi-abba-2"))
    (request,) = userlocks.requests(look, case)
    assert userlocks.what(look, case, request) == userlocks.PARKED


# --- what is not in the dump


def look_with(prog: Program) -> Look:
    reader, findings = Reader(prog), Findings()
    table = TaskReader(reader).read_all(Findings())
    clocks = read_clocks(reader, Findings())
    return Look(Layout(reader), table, findings, clocks, alone=False)


def everything(look: Look) -> tuple[Counter[str], int]:
    """Ask for all; count owners by how sure they are, or lost, and locks."""
    found: Counter[str] = Counter()
    requests = {
        request
        for task in look.waiters[0]
        for request in userlocks.futex_requests(look, task)
    }
    for request in requests:
        assert userlocks.queue(look, request.lock)
        try:
            holders = userlocks.holders(look, request.lock)
        except FaultError:
            found["lost"] += 1
            continue
        found.update(holder.confidence for holder in holders)
    return found, len(requests)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_dump_without_user_memory(kernel: str) -> None:
    """The kernel itself still tells who waits, and who has what inherits priority."""
    path = lab.build(f"tasks-{kernel}").dump("kdump-filtered")
    look = look_with(open_target(TargetSpec(path=str(path), types="btf")).prog)
    found, count = everything(look)
    # A slab page of 6.12 may seem to be an anonymous page to makedumpfile.
    kept = [{"exact": 1}] if kernel == "6.1" else [{"exact": 1}, {"lost": 1}]
    assert found in kept
    assert count > 10
    assert look.findings.coverage["futexes_not_read"] == count - 1
    codes = [code for code, _ in look.findings.notes]
    assert codes.count(FILTERED) == 1


@pytest.mark.parametrize("member", ["mm_mt", "pgd"])
def test_damage_costs_a_note(member: str) -> None:
    """A process's page tables, or its mappings, cannot be read."""
    whole = everything(look_with(open_dump("locks-6.1", "btf")))[0]
    assert whole["likely"] > 10
    prog = open_dump("locks-6.1", "btf")
    look = look_with(prog)
    dump = seen("locks-6.1")
    names = ("normal-1", "shared-file-1", "shared-file-owner")
    mms = {int(dump.table["mm"][dump.row(name)]) for name in names}

    def fault(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("gone", address)

    for mm in mms:
        lay_over(prog, mm + look.layout.offset("mm_struct", member), 16, fault)
    found, _ = everything(look)
    assert whole["likely"] > found["likely"] > 5
    assert found["exact"] == whole["exact"]
    findings = look.findings
    assert findings.lost or findings.coverage["futexes_not_read"]


def pi_futex(look: Look) -> Request:
    (request,) = {
        request
        for task in look.waiters[0]
        for request in userlocks.futex_requests(look, task)
        if request.lock.type == "pi_futex"
    }
    return request


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("member", "confidences"),
    [
        pytest.param("key", [], id="of another futex"),
        pytest.param("pi_mutex.owner", ["likely"], id="another has the kernel's"),
        pytest.param("owner", [], id="nobody"),
    ],
)
def test_what_the_kernel_knows_of_an_owner(
    kernel: str, member: str, confidences: list[str]
) -> None:
    """It is believed only as far as it agrees."""
    prog = open_dump(f"tasks-{kernel}", "btf")
    look = look_with(prog)
    lock = pi_futex(look).lock
    assert [holder.confidence for holder in userlocks.holders(look, lock)] == ["exact"]
    assert isinstance(lock.key, Key)
    (waiter,) = look.futex_queues[lock.key]
    place = waiter.pi_state + look.layout.offset("futex_pi_state", member)
    value = 0 if member == "owner" else waiter.task

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return struct.pack("<Q", value)[offset : offset + count]

    lay_over(prog, place, 8, read)
    found = userlocks.holders(look, lock)
    assert [holder.confidence for holder in found] == confidences


def test_a_shared_page_that_was_never_touched(locks: Seen) -> None:
    """A child has its parent's mapping, and makes one of its own, which it uses."""
    look = look_at(locks)
    mm = int(locks.table["mm"][locks.row("shared-file-1")])
    key = futex_of(locks, look, "shared-file-1").key
    space = Object(locks.reader.prog, "struct mm_struct *", value=mm)
    untouched, found = 0, set()
    for file in look.user_memory.shared_files(mm):
        if file.sequence != key.object:
            continue
        found.add(look.user_memory.read(mm, file.start, 40))
        try:
            access_remote_vm(space, file.start, 40)
        except FaultError:
            untouched += 1
    assert untouched == 1
    (data,) = found
    assert data is not None
    owner = locks.named()["shared-file-1"]["on"]["owners"][0]["pid"]
    assert nptl.mutex(data, shared=True) == nptl.Mutex(owner, blocks_owner=True)


def test_memory_that_a_process_does_not_have(locks: Seen) -> None:
    look = look_at(locks)
    mm = int(locks.table["mm"][locks.row("normal-1")])
    assert look.user_memory.read(mm, 4096, 8) is None
    assert not look.findings.notes


def futex_of(dump: Seen, look: Look, name: str) -> Waiter:
    (waiter,) = look.waiters[0][address_of(dump, name)]
    return waiter
