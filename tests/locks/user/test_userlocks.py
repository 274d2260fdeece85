# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes: waiters in order, and owners."""

import struct
from collections import Counter
from itertools import chain

import pytest
from drgn import FaultError, Object
from drgn.helpers.linux.mm import access_remote_vm

from msatools.locks import c_library, user_locks
from msatools.locks.context import LockContext
from msatools.locks.futexes import Waiter, futex_queues, futex_waiters
from msatools.locks.report import FutexKey, Request
from msatools.locks.user_locks import condition_at
from msatools.locks.user_memory import user_memory
from msatools.program import TargetSpec, open_target
from tests.locks.seen import Seen, damaged, look_at
from tests.support.overlay import lose, put

FUTEXES = ("futex", "pi_futex")
FILTERED = "user-memory-filtered"


def requests_of(dump: Seen, context: LockContext, name: str) -> list[Request]:
    return user_locks.requests(context, dump.case(name, context))


def owners(dump: Seen, context: LockContext, request: Request) -> list[tuple[int, str]]:
    found = user_locks.holders(context, request.lock)
    tasks = dump.pids(holder.task for holder in found)
    return list(zip(tasks, [holder.confidence for holder in found], strict=True))


def queue(dump: Seen, context: LockContext, request: Request) -> list[int]:
    found = user_locks.queue(context, request.lock)
    assert found is not None
    assert {waiter.mode for waiter in found} == {request.mode}
    return dump.pids(waiter.task for waiter in found)


def test_futexes_by_tables_and_by_stacks(tasks: Seen) -> None:
    """Hash tables and a task's own stack give the same, for all tasks or one."""
    contexts = tasks.context(), tasks.context(alone=True)
    named = tasks.waits(*FUTEXES)
    assert len(named) > 7
    for name, task in named.items():
        found = user_locks.futex_requests(contexts[0], tasks.address(name))
        on = task["on"]
        addresses = on.get("addresses", [on["address"]] if "address" in on else [])
        if name == "futex-shared":
            # It is identified by file and offset.
            addresses = [None]
        assert [request.lock.address for request in found] == addresses, name
        owner = [(on["owner"], "exact")] if "owner" in on else []
        for context in contexts:
            assert requests_of(tasks, context, name) == found, name
            for request in found:
                assert request.lock.type == on["kind"], name
                assert queue(tasks, context, request) == [task["tid"]], name
                assert owners(tasks, context, request) == owner, name
    assert not contexts[0].losses.lost
    assert not contexts[1].losses.lost


def confidence(name: str) -> str:
    """Return the confidence of an owner.

    Owners of PI futexes and ended threads (clear_child_tid) are known to the kernel.
    """
    return "exact" if name == "join" or "pi-" in f"{name}-" else "likely"


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_locks_of_the_c_library(stock: Seen, alone: bool) -> None:
    """Owners, order of waiters and address of every lock."""
    context = stock.context(alone)
    known = {lock["name"]: lock for lock in stock.locks()}
    wrong, compared = {}, 0
    for name, task in stock.waits(*FUTEXES).items():
        if name.startswith("herd-") and not name.endswith("0"):
            continue
        truth = known[task["on"]["lock"]]
        request = requests_of(stock, context, name)[0]
        found = (
            request.lock.type,
            owners(stock, context, request),
            queue(stock, context, request),
        )
        expected = (
            truth["type"],
            [(owner["pid"], confidence(name)) for owner in truth.get("owners", [])],
            [waiter["pid"] for waiter in truth["waiters"]],
        )
        if found != expected:
            wrong[name] = found, expected
        # A condition variable is identified by its start.
        address = truth.get("condition") or truth.get("address")
        if address and request.lock.address is not None:
            assert hex(request.lock.address) == address, name
        compared += 1
    assert wrong == {}
    assert compared > 70
    assert not context.losses.lost


def test_thread_parked_by_the_c_library(stock: Seen) -> None:
    """Only the thread whose lock the kernel refused is parked."""
    context = stock.context()
    parked = [
        name
        for name in stock.waits(*FUTEXES)
        for request in user_locks.futex_requests(context, stock.address(name))
        if user_locks.parked(context, stock.address(name), request)
    ]
    assert parked == ["pi-abba-2"]
    case = stock.case("pi-abba-2", context)
    (request,) = user_locks.requests(context, case)
    assert user_locks.what(context, case, request) == user_locks.PARKED


# --- missing memory


def everything(context: LockContext) -> tuple[Counter[str], int]:
    """Return the owners by confidence (or unreadable), and the number of futexes.

    A condition variable has two, and is one lock only if its memory can be read.
    """
    found: Counter[str] = Counter()
    by_task, _ = futex_waiters(context)
    requests = {
        request
        for task in by_task
        for request in user_locks.futex_requests(context, task)
    }
    for request in requests:
        assert user_locks.queue(context, request.lock)
        try:
            holders = user_locks.holders(context, request.lock)
        except FaultError:
            found["lost"] += 1
            continue
        found.update(holder.confidence for holder in holders)
    return found, len({waiter.key for waiter in chain(*by_task.values())})


def test_dump_without_user_memory(tasks: Seen) -> None:
    """Waiters and owners of PI futexes are in kernel memory."""
    path = tasks.run.dump("kdump-filtered")
    prog = open_target(TargetSpec(path=str(path), types="btf")).prog
    context = look_at(prog, tasks.run.name).context()
    found, count = everything(context)
    # On 6.12 makedumpfile can mistake a slab page for an anonymous page.
    some = tasks.run.name != "tasks-6.1"
    assert found in [{"exact": 1}, {"lost": 1}][: 1 + some]
    losses = context.losses
    _, whole = everything(tasks.context())
    assert whole > 10
    # Such a page may have had a waiter, too, and with it the rest of its chain.
    broken = losses.lost["futex_chains_broken"]
    assert count == whole or (some and broken and 0 < count < whole)
    lost = losses.lost["futex_owners_unreadable"]
    assert not lost or some
    assert losses.coverage["futexes_not_read"] + lost == count - 1
    codes = [code for code, _ in context.losses.notes]
    assert codes.count(FILTERED) == 1


@pytest.mark.parametrize("member", ["mm_mt", "pgd"])
def test_damaged_address_spaces_are_noted(stock: Seen, member: str) -> None:
    """A process's page tables or mappings cannot be read."""
    whole, _ = everything(stock.context())
    assert whole["likely"] > 10
    dump = damaged(stock.run.name)
    context = dump.context()
    names = ("normal-1", "shared-file-1", "shared-file-owner")
    for mm in {int(stock.table["mm"][stock.row(name)]) for name in names}:
        lose(dump.prog, mm + context.layout.offset("mm_struct", member), 16)
    found, _ = everything(context)
    assert whole["likely"] > found["likely"] > 5
    assert found["exact"] == whole["exact"]
    losses = context.losses
    assert losses.lost or losses.coverage["futexes_not_read"]


def pi_futex(context: LockContext) -> Request:
    (request,) = {
        request
        for task in futex_waiters(context)[0]
        for request in user_locks.futex_requests(context, task)
        if request.lock.type == "pi_futex"
    }
    return request


def test_owner_of_a_pi_futex(tasks: Seen) -> None:
    """The kernel's owner is exact only if all of its records agree."""
    context = damaged(tasks.run.name).context()
    lock = pi_futex(context).lock
    assert isinstance(lock.key, FutexKey)
    (waiter,) = futex_queues(context)[lock.key]

    def confidences() -> list[str]:
        return [holder.confidence for holder in user_locks.holders(context, lock)]

    assert confidences() == ["exact"]
    for member, value, left in (
        ("key", waiter.task, []),  # of another futex
        ("pi_mutex.owner", waiter.task, ["likely"]),  # another owner of the rt_mutex
        ("owner", 0, []),
    ):
        address = waiter.pi_state + context.layout.offset("futex_pi_state", member)
        before = context.reader.read(address, 8)
        put(context.reader.prog, address, struct.pack("<Q", value))
        assert confidences() == left, member
        put(context.reader.prog, address, before)
    assert confidences() == ["exact"]


def test_untouched_page_of_a_shared_file(stock: Seen) -> None:
    """A child inherits its parent's mapping, but uses a mapping of its own."""
    context = stock.context()
    mm = int(stock.table["mm"][stock.row("shared-file-1")])
    key = futex_of(stock, context, "shared-file-1").key
    space = Object(stock.prog, "struct mm_struct *", value=mm)
    untouched, found = 0, set()
    for file in user_memory(context).shared_files(mm):
        if file.sequence != key.object:
            continue
        found.add(user_memory(context).read(mm, file.start, 40))
        try:
            access_remote_vm(space, file.start, 40)
        except FaultError:
            untouched += 1
    assert untouched == 1
    (data,) = found
    assert data is not None
    owner = stock.named["shared-file-1"]["on"]["owners"][0]["pid"]
    assert c_library.glibc_mutex(data, shared=True) == c_library.Mutex(
        owner, blocks_owner=True
    )


def test_unmapped_memory(stock: Seen) -> None:
    context = stock.context()
    mm = int(stock.table["mm"][stock.row("normal-1")])
    assert user_memory(context).read(mm, 4096, 8) is None
    # A program may say that its futex is anywhere, such as at NULL.
    assert user_memory(context).read(mm, -40, 48) is None
    assert condition_at(context, mm, 0) is None
    assert not context.losses.notes


def futex_of(dump: Seen, context: LockContext, name: str) -> Waiter:
    (waiter,) = futex_waiters(context)[0][dump.address(name)]
    return waiter
