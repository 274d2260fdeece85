# SPDX-License-Identifier: LGPL-2.1-or-later

"""Spinlocks that CPUs spin on, and their likely holders."""

from typing import Any

import pytest
from drgn import FaultError

from msatools.locks import spinlocks
from msatools.locks.report import Holder, Lock, Request
from msatools.locks.spinlocks import Spin, _Cpu, _likely_holders, may_be_wanted, spins
from msatools.tasks.unwind import stack_bytes
from tests.locks.seen import Seen


def spins_of(dump: Seen) -> dict[int, Spin]:
    """Map thread IDs to spins."""
    found = spins(dump.context(), stack_bytes(dump.prog))
    return {int(dump.table["pid"][spin.row]): spin for spin in found}


def test_lock_with_its_address_on_all_stacks_has_no_holder(
    spinning: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = spins_of(spinning)
    read_words = spinlocks._words
    addresses = {spin.request.lock.address for spin in before.values()}

    def with_all_locks(*arguments: Any) -> frozenset[int]:
        return read_words(*arguments) | {address for address in addresses if address}

    monkeypatch.setattr(spinlocks, "_words", with_all_locks)
    # The code of one of them refers to the lock, which is static.
    for pid, spin in spins_of(spinning).items():
        if spin.request.mode is None:
            assert spin.holders == before[pid].holders
    monkeypatch.setattr(spinlocks, "refers_to", lambda *arguments: False)
    after = spins_of(spinning)
    assert after.keys() == before.keys()
    for pid, spin in after.items():
        # An rwlock can have many readers.
        assert bool(spin.holders) == (spin.request.mode is not None), pid


def test_free_lock_is_not_reported(
    spinning: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinlocks, "may_be_wanted", lambda value: False)
    assert spins_of(spinning) == {}


def test_tail_of_the_lock_is_a_spinning_cpu(
    spinning: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last CPU in the only queue of this dump is the second CPU."""
    context = spinning.context()
    (lock,) = spinning.locks("spinlock")
    last = lock["waiters"][-1]["cpu"]
    address = int(lock["address"], 16)
    assert spinlocks._is_wanted(context, address, {last})
    assert not spinlocks._is_wanted(context, address, {last + 1})
    monkeypatch.setattr(spinlocks, "per_cpu", lambda nodes, cpu: empty(nodes))
    assert not spinlocks._is_wanted(context, address, {last})


def empty(nodes: Any) -> Any:
    """Return the nodes of the first CPU, which is in no queue."""
    return spinlocks.drgn.helpers.linux.percpu.per_cpu(nodes, 0)


def test_unreadable_cpus_are_noted(
    spinning: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise FaultError("not in the dump", 0)

    monkeypatch.setattr(spinlocks, "cpu_curr", fails)
    context = spinning.context()
    assert spins(context, stack_bytes(spinning.prog)) == []
    assert context.losses.lost["cpus_unreadable"] > 1


@pytest.mark.parametrize(
    ("value", "may_be"),
    [
        (0, False),
        (1, True),  # held; with no queue (virt_spin_lock())
        (0x101, True),  # held, one waits
        (0x80101, True),  # held, one waits, CPU 1 is the tail
        (0x80000, True),  # free, just before the next takes it
        (3, True),  # held, the waiter sleeps (qspinlock_paravirt.h)
        (0x100, False),  # just before it is taken, or anything else
        (2, False),
        (0x201, False),
        (0x8A4F_1C40, False),  # the low half of a pointer
    ],
)
def test_values_of_wanted_locks(value: int, may_be: bool) -> None:
    assert may_be_wanted(value) == may_be


def test_lock_with_several_possible_holders_has_none() -> None:
    cpus = [
        _Cpu(number, task=100 + number, frames=[], spinning=None)
        for number in (1, 2, 3)
    ]
    lock = Lock("spinlock", 64)
    request = Request(lock)
    waits, other = {1: request}, {1: request, 2: Request(Lock("spinlock", 128))}
    words = {1: frozenset({64}), 2: frozenset({64}), 3: frozenset({128})}
    # The waiting CPU has the lock's address on its stack as well.
    assert _likely_holders(request, cpus, waits, words) == (Holder(102, "evidence"),)
    assert _likely_holders(request, cpus, other, words) == (Holder(102, "evidence"),)
    words[3] = frozenset({64})
    assert _likely_holders(request, cpus, waits, words) == ()
    reading = Request(lock, "read")
    assert len(_likely_holders(reading, cpus, {1: reading}, words)) == 2
