# SPDX-License-Identifier: LGPL-2.1-or-later

"""The number of CPUs in spinlock queues, which samples of a running kernel count."""

from pathlib import Path

import drgn
import pytest

from fixtures import lab
from msatools.kernel.report import LossLog
from msatools.locks.spinlocks import SpinQueues
from msatools.program import TargetSpec, open_target
from tests.contract.table import LOCKS
from tests.locks.seen import Seen
from tests.support.calls import call
from tests.support.paused import paused


def queues(seen: Seen) -> SpinQueues:
    return SpinQueues(seen.reader, LossLog())


def test_all_but_the_first_waiter_are_in_a_queue(spinning: Seen) -> None:
    (lock,) = spinning.locks("spinlock")
    assert queues(spinning).waiting() == len(lock["waiters"]) - 1 == 1


def test_sample_counts_queued_cpus(tmp_path: Path) -> None:
    dump = lab.build("lockspin-6.12").dump("elf")
    with paused(dump, tmp_path) as address:
        guest = open_target(TargetSpec(qemu=address, types="btf"))
        words = ("--qemu", "guest", "--json", "0.01", "1")
        ran = call(LOCKS.command, *words, opening=lambda _: guest)
    assert (ran.status, ran.err) == (0, "")
    (spins,) = [row for row in ran.json["contention"] if row["type"] == "spinlock"]
    assert (spins["share"], spins["max_queue"], spins["owners"]) == (1, 1, [])
    # The lock is not in the report, because the task that waits for it is unknown.
    assert spins["lock"] not in {row["id"] for row in ran.json["locks"]}


def test_unreadable_count_is_a_fault(
    spinning: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = queues(spinning)
    read = found._reader.read
    count = drgn.offsetof(found._reader.prog.type("struct qnode"), "mcs.count")

    def lost(address: int, size: int) -> bytes:
        if address - count in found._nodes.values():
            raise drgn.FaultError("not in the dump", address)
        return read(address, size)

    monkeypatch.setattr(found._reader, "read", lost)
    with pytest.raises(drgn.FaultError):
        found.waiting()
