# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs that spin: which lock they want, and who has it."""

from typing import Any

import pytest
from drgn import FaultError, ProgramFlags

from msatools.kernel.report import Findings
from msatools.locks.layout import Layout
from msatools.locks.look import Look
from msatools.locks.sleeping import spinlocks
from msatools.locks.sleeping.spinlocks import Spin, may_be_wanted, spins
from msatools.tasks.stackmemory import stack_bytes
from tests.locks.conftest import Seen, seen

SPINNING = ("lockspin-6.1", "lockspin-6.12")
TYPES = ("btf", "dwarf")


@pytest.fixture(scope="module", params=SPINNING)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def look_at(dump: Seen) -> Look:
    layout = Layout(dump.reader)
    return Look(layout, dump.table, Findings(), dump.clocks, alone=False)


def spinning(dump: Seen) -> dict[int, Spin]:
    """By thread ID."""
    found = spins(look_at(dump), stack_bytes(dump.reader.prog))
    return {int(dump.table["pid"][spin.row]): spin for spin in found}


def truth(dump: Seen) -> list[dict[str, Any]]:
    locks: list[dict[str, Any]] = dump.run.workload["locks"]
    return locks


@pytest.mark.parametrize("types", TYPES)
def test_who_spins_for_which_lock_and_who_has_it(name: str, types: str) -> None:
    dump = seen(name, types)
    found = spinning(dump)
    tids = dump.table["address"].tolist()
    pids = dump.table["pid"].tolist()
    expected, told = {}, {}
    for lock in truth(dump):
        owners = [owner["pid"] for owner in lock["owners"]]
        for waiter in lock["waiters"]:
            address = int(lock["address"], 16)
            expected[waiter["pid"]] = (address, waiter["mode"], owners)
    for pid, spin in found.items():
        assert spin.request.lock.type == "spinlock"
        assert {holder.confidence for holder in spin.holders} == {"evidence"}
        owners = [pids[tids.index(holder.task)] for holder in spin.holders]
        told[pid] = (spin.request.lock.address, spin.request.mode, owners)
    assert told == expected
    assert len(told) >= 3


def test_nobody_is_told_where_two_may_have_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = seen(name)
    before = spinning(dump)
    words = spinlocks._words
    addresses = {spin.request.lock.address for spin in before.values()}

    def more(*arguments: Any) -> frozenset[int]:
        return words(*arguments) | {address for address in addresses if address}

    monkeypatch.setattr(spinlocks, "_words", more)
    after = spinning(dump)
    assert after.keys() == before.keys()
    for pid, spin in after.items():
        # Readers may be many.
        assert bool(spin.holders) == (spin.request.mode is not None), pid


def test_a_lock_is_told_only_if_it_is_not_free(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = seen(name)
    monkeypatch.setattr(spinlocks, "may_be_wanted", lambda value: False)
    assert spinning(dump) == {}


def test_the_tail_is_a_cpu_that_spins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the lock that has a queue, the last in line is the second CPU here."""
    dump = seen(name)
    look = look_at(dump)
    (lock,) = (lock for lock in truth(dump) if lock["type"] == "spinlock")
    last = lock["waiters"][-1]["cpu"]
    address = int(lock["address"], 16)
    assert spinlocks._is_wanted(look, address, {last})
    assert not spinlocks._is_wanted(look, address, {last + 1})
    monkeypatch.setattr(spinlocks, "per_cpu", lambda nodes, cpu: empty(nodes))
    assert not spinlocks._is_wanted(look, address, {last})


def empty(nodes: Any) -> Any:
    """The nodes of the first CPU, which is on no queue."""
    return spinlocks.drgn.helpers.linux.percpu.per_cpu(nodes, 0)


@pytest.mark.parametrize("quiet", ["tasks-6.1", "tasks-6.12"])
def test_nobody_spins_where_nobody_does(quiet: str) -> None:
    assert spinning(seen(quiet)) == {}


def test_cpus_that_cannot_be_read_cost_a_note(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = seen(name)

    def fails(*_: object) -> None:
        raise FaultError("not in the dump", 0)

    monkeypatch.setattr(spinlocks, "cpu_curr", fails)
    look = look_at(dump)
    assert spins(look, stack_bytes(dump.reader.prog)) == []
    assert look.findings.lost["CPUs"] > 1


def test_a_kernel_that_runs_has_no_registers(name: str) -> None:
    class Program:
        flags = ProgramFlags.IS_LIVE

    class Reader:
        prog = Program()

    class Live:
        reader = Reader()

    assert spins(Live(), 0) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "may_be"),
    [
        (0, False),
        (1, True),  # held; with no queue (virt_spin_lock())
        (0x101, True),  # held, one waits
        (0x80101, True),  # held, one waits, CPU 1 is the last in line
        (0x80000, True),  # free, just before the next takes it
        (3, True),  # held, who waits sleeps (qspinlock_paravirt.h)
        (0x100, False),  # just before it is taken, or anything else
        (2, False),
        (0x201, False),
        (0x8A4F_1C40, False),  # the low half of a pointer
    ],
)
def test_words_that_may_be_locks(value: int, may_be: bool) -> None:
    assert may_be_wanted(value) == may_be
