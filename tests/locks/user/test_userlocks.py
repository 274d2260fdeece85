# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes: who waits on which, in what order, and who has it."""

import struct
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from drgn import FaultError, Object
from drgn.helpers.linux.mm import access_remote_vm

from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.user import nptl, userlocks
from msatools.locks.user.futexes import Waiter, futex_queues, futex_waiters
from msatools.locks.user.usermemory import user_memory
from msatools.target import TargetSpec, open_target
from tests.locks.seen import Seen, damaged, look_at
from tests.support.overlay import lose, put

FUTEXES = ("futex", "pi_futex")
FILTERED = "user-memory-filtered"


def requests_of(dump: Seen, look: LockContext, name: str) -> list[Request]:
    return userlocks.requests(look, dump.case(name, look))


def owners(dump: Seen, look: LockContext, request: Request) -> list[tuple[int, str]]:
    found = userlocks.holders(look, request.lock)
    tasks = dump.pids(holder.task for holder in found)
    return list(zip(tasks, [holder.confidence for holder in found], strict=True))


def queue(dump: Seen, look: LockContext, request: Request) -> list[int]:
    found = userlocks.queue(look, request.lock)
    assert found is not None
    assert {each.mode for each in found} == {request.mode}
    return dump.pids(each.task for each in found)


def test_futexes_are_told_by_tables_and_by_stacks(tasks: Seen) -> None:
    """The tables of waiters tell the same as a task's own stack, alone or not."""
    looks = tasks.look(), tasks.look(alone=True)
    named = tasks.waits(*FUTEXES)
    assert len(named) > 7
    for name, task in named.items():
        found = userlocks.futex_requests(looks[0], tasks.address(name))
        on = task["on"]
        places = on.get("addresses", [on["address"]] if "address" in on else [])
        if name == "futex-shared":
            # It is known by where it is in the file.
            places = [None]
        assert [request.lock.address for request in found] == places, name
        owner = [(on["owner"], "exact")] if "owner" in on else []
        for look in looks:
            assert requests_of(tasks, look, name) == found, name
            for request in found:
                assert request.lock.type == on["kind"], name
                assert queue(tasks, look, request) == [task["tid"]], name
                assert owners(tasks, look, request) == owner, name
    assert not looks[0].findings.lost
    assert not looks[1].findings.lost


def test_condition_variables_have_no_owners(tasks: Seen) -> None:
    look = tasks.look()
    for server in tasks.run.workload["servers"].values():
        requests: Counter[Request] = Counter()
        for worker in server["workers"]:
            task = int(tasks.table["address"][tasks.rows[worker]])
            requests.update(userlocks.futex_requests(look, task))
        assert requests.total() == len(server["workers"])
        # They may be on either of its two words.
        assert [request.lock.address for request in requests] == [server["condition"]]
        queued = chain(*(queue(tasks, look, request) for request in requests))
        assert sorted(queued) == sorted(server["workers"])
        for request, count in requests.items():
            assert userlocks.is_condition(look, request.lock, 0)
            assert request.mode is None
            assert owners(tasks, look, request) == []
            assert userlocks.readers(look, request.lock) is None
            assert len(queue(tasks, look, request)) == count
    assert not look.findings.lost


def test_a_waiter_on_both_futexes_of_a_condition_variable(tasks: Seen) -> None:
    """It has moved from one queue to the other while they were read."""
    worker = tasks.run.workload["servers"]["server-broadcast"]["workers"][0]
    task = int(tasks.table["address"][tasks.rows[worker]])
    look = tasks.look()
    by_task, _ = futex_waiters(look)
    (waiter,) = by_task[task]
    (before,) = userlocks.futex_requests(look, task)
    key = waiter.key.moved(-4 if waiter.key.offset & 4 else 4)
    by_task[task].append(replace(waiter, key=key))
    assert userlocks.futex_requests(look, task) == [before]


def test_who_waits_on_no_futex(tasks: Seen) -> None:
    look = tasks.look()
    for name in ("nanosleep", "poll"):
        assert userlocks.futex_requests(look, tasks.address(name)) == []
        assert requests_of(tasks, look, name) == []


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_locks_of_the_c_library(stock: Seen, alone: bool) -> None:
    """Owners, order and address of every mutex, rwlock, condition and so on."""
    look = stock.look(alone)
    known = {lock["name"]: lock for lock in stock.locks()}
    wrong, compared = {}, 0
    for name, task in stock.waits(*FUTEXES).items():
        if name.startswith("herd-") and not name.endswith("0"):
            continue
        truth = known[task["on"]["lock"]]
        request = requests_of(stock, look, name)[0]
        said = (
            request.lock.type,
            owners(stock, look, request),
            queue(stock, look, request),
        )
        should = (
            truth["type"],
            [(owner["pid"], confidence(name)) for owner in truth.get("owners", [])],
            [waiter["pid"] for waiter in truth["waiters"]],
        )
        if said != should:
            wrong[name] = said, should
        # A condition variable goes by its start, whichever of its words it is.
        address = truth.get("condition") or truth.get("address")
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
def test_read_write_locks(stock: Seen, alone: bool) -> None:
    look = stock.look(alone)

    def told(name: str) -> tuple[str | None, int | None]:
        (request,) = requests_of(stock, look, name)
        return request.mode, userlocks.readers(look, request.lock)

    for number in (1, 2):
        assert told(f"rwlock-read-{number}") == ("read", 0)
        assert told(f"rwlock-write-{number}") == ("write", 0)
    assert told("rwlock-read-write") == ("write", 2)
    assert told("normal-1") == (None, None)


def test_parked_for_ever(stock: Seen) -> None:
    """The one that the kernel refused, and nobody else."""
    look = stock.look()
    parked = [
        name
        for name in stock.waits(*FUTEXES)
        for request in userlocks.futex_requests(look, stock.address(name))
        if userlocks.parked(look, stock.address(name), request)
    ]
    assert parked == ["pi-abba-2"]
    case = stock.case("pi-abba-2", look)
    (request,) = userlocks.requests(look, case)
    assert userlocks.what(look, case, request) == userlocks.PARKED


# --- what is not in the dump


def everything(look: LockContext) -> tuple[Counter[str], int]:
    """Ask for all; count owners by how sure they are, or lost, and locks."""
    found: Counter[str] = Counter()
    requests = {
        request
        for task in futex_waiters(look)[0]
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


def test_a_dump_without_user_memory(tasks: Seen) -> None:
    """The kernel itself still tells who waits, and who has what inherits priority."""
    path = tasks.run.dump("kdump-filtered")
    prog = open_target(TargetSpec(path=str(path), types="btf")).prog
    look = look_at(prog, tasks.run.name).look()
    found, count = everything(look)
    # A slab page of 6.12 may seem to be an anonymous page to makedumpfile.
    some = tasks.run.name != "tasks-6.1"
    assert found in [{"exact": 1}, {"lost": 1}][: 1 + some]
    assert count > 10
    findings = look.findings
    lost = findings.lost["futex_owners_unreadable"]
    assert not lost or some
    assert findings.coverage["futexes_not_read"] + lost == count - 1
    codes = [code for code, _ in look.findings.notes]
    assert codes.count(FILTERED) == 1


@pytest.mark.parametrize("member", ["mm_mt", "pgd"])
def test_damage_costs_a_note(stock: Seen, member: str) -> None:
    """A process's page tables, or its mappings, cannot be read."""
    whole, _ = everything(stock.look())
    assert whole["likely"] > 10
    dump = damaged(stock.run.name)
    look = dump.look()
    names = ("normal-1", "shared-file-1", "shared-file-owner")
    for mm in {int(stock.table["mm"][stock.row(name)]) for name in names}:
        lose(dump.prog, mm + look.layout.offset("mm_struct", member), 16)
    found, _ = everything(look)
    assert whole["likely"] > found["likely"] > 5
    assert found["exact"] == whole["exact"]
    findings = look.findings
    assert findings.lost or findings.coverage["futexes_not_read"]


def pi_futex(look: LockContext) -> Request:
    (request,) = {
        request
        for task in futex_waiters(look)[0]
        for request in userlocks.futex_requests(look, task)
        if request.lock.type == "pi_futex"
    }
    return request


def test_what_the_kernel_knows_of_an_owner(tasks: Seen) -> None:
    """It is believed only as far as it agrees."""
    look = damaged(tasks.run.name).look()
    lock = pi_futex(look).lock
    assert isinstance(lock.key, FutexKey)
    (waiter,) = futex_queues(look)[lock.key]

    def confidences() -> list[str]:
        return [holder.confidence for holder in userlocks.holders(look, lock)]

    assert confidences() == ["exact"]
    for member, value, left in (
        ("key", waiter.task, []),  # of another futex
        ("pi_mutex.owner", waiter.task, ["likely"]),  # another has the kernel's
        ("owner", 0, []),
    ):
        place = waiter.pi_state + look.layout.offset("futex_pi_state", member)
        before = look.reader.read(place, 8)
        put(look.reader.prog, place, struct.pack("<Q", value))
        assert confidences() == left, member
        put(look.reader.prog, place, before)
    assert confidences() == ["exact"]


def test_a_shared_page_that_was_never_touched(stock: Seen) -> None:
    """A child has its parent's mapping, and makes one of its own, which it uses."""
    look = stock.look()
    mm = int(stock.table["mm"][stock.row("shared-file-1")])
    key = futex_of(stock, look, "shared-file-1").key
    space = Object(stock.prog, "struct mm_struct *", value=mm)
    untouched, found = 0, set()
    for file in user_memory(look).shared_files(mm):
        if file.sequence != key.object:
            continue
        found.add(user_memory(look).read(mm, file.start, 40))
        try:
            access_remote_vm(space, file.start, 40)
        except FaultError:
            untouched += 1
    assert untouched == 1
    (data,) = found
    assert data is not None
    owner = stock.named["shared-file-1"]["on"]["owners"][0]["pid"]
    assert nptl.mutex(data, shared=True) == nptl.Mutex(owner, blocks_owner=True)


def test_memory_that_a_process_does_not_have(stock: Seen) -> None:
    look = stock.look()
    mm = int(stock.table["mm"][stock.row("normal-1")])
    assert user_memory(look).read(mm, 4096, 8) is None
    assert not look.findings.notes


def futex_of(dump: Seen, look: LockContext, name: str) -> Waiter:
    (waiter,) = futex_waiters(look)[0][dump.address(name)]
    return waiter
