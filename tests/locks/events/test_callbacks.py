# SPDX-License-Identifier: LGPL-2.1-or-later

"""Callbacks of RCU: which thread makes them, and which rcu_barrier() waits for."""

from functools import cache
from typing import Any

import pytest

from fixtures import lab
from msatools.kernel.percpu import read_percpu
from msatools.kernel.report import LossLog
from msatools.locks.context import LockContext
from msatools.locks.rcu import QueuedCallback, awaited_callbacks, callback_thread
from tests.cpus.test_fieldcpus import workload
from tests.locks.seen import Seen, damaged, seen
from tests.support.dumps import spinning
from tests.support.overlay import put

KERNELS = ("6.1", "6.12", "7.x")
THROTTLED = ("6.1", "6.12")
"""Kernels whose thread of callbacks is throttled, so that rcu_barrier() waits."""

OTHER = 5
"""A CPU that makes its callbacks itself, and has none."""

Found = tuple[str, dict[int | None, str]]


@cache
def data_of(dump: Seen) -> dict[int, int]:
    """Return the ``struct rcu_data`` of each CPU."""
    percpu = read_percpu(dump.reader, LossLog())
    addresses = percpu.addresses("rcu_data").tolist()
    return dict(zip(percpu.cpus.tolist(), addresses, strict=True))


def thread_of(dump: Seen, cpu: int, *, is_ready: bool) -> int:
    context = dump.context()
    return callback_thread(context, QueuedCallback(cpu, data_of(dump)[cpu], is_ready))


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_an_offloaded_cpu_has_a_thread(kernel: str) -> None:
    """The others have one that sleeps or is parked: a softirq makes their callbacks."""
    name = f"fieldpackets-{kernel}"
    dump, cpu = seen(name), workload(name)["cpus"]["callbacks"]
    ready = {each: thread_of(dump, each, is_ready=True) for each in data_of(dump)}
    (thread,) = dump.pids([ready.pop(cpu)])
    assert thread == spinning(lab.build(name))["callbacks"]
    assert len(ready) > 1
    assert set(ready.values()) == {0}
    assert not any(thread_of(dump, each, is_ready=False) for each in ready)


@pytest.mark.parametrize("name", ["fieldcalls-6.1", "fieldcalls-6.12"])
def test_cpu_in_the_list_of_another(name: str) -> None:
    """Its group is led by a CPU that is not offloaded itself."""
    dump, cpu = seen(name), workload(name)["cpus"]["callbacks"]
    leader = dump.context().layout.member(data_of(dump)[cpu], "rcu_data", "nocb_gp_rdp")
    (leading,) = (each for each, data in data_of(dump).items() if data == leader)
    assert leading != cpu
    assert dump.pids([thread_of(dump, cpu, is_ready=True)]) == [
        spinning(lab.build(name))["callbacks"]
    ]
    assert thread_of(dump, leading, is_ready=True) == 0


# --- rcu_barrier()


def barrier(context: LockContext) -> Found | None:
    """Return what rcu_barrier() waits for, and the confidence of each owner."""
    state = context.layout.symbol("rcu_state")
    assert state is not None
    place = state + context.layout.offset("rcu_state", "barrier_completion")
    found = awaited_callbacks(context, place)
    if found is None:
        return None
    text, holders = found
    return text, {context.pid(each.task): each.confidence for each in holders}


class Stale:
    """A dump in which a CPU made its callback of rcu_barrier() long ago.

    It has others that are out of its list, as those have that are being made.
    """

    def __init__(self, name: str) -> None:
        self.dump = damaged(name)
        self.cpu = workload(name)["cpus"]["callbacks"]
        self._layout = self.dump.context().layout
        function = self._layout.symbol("rcu_barrier_callback")
        assert function is not None
        self._put(OTHER, "barrier_head.func", function)
        self._put(OTHER, "cblist.len", 3)

    def mark(self, is_made: bool) -> None:
        layout = self._layout
        head = data_of(self.dump)[OTHER] + layout.offset("rcu_data", "barrier_head")
        self._put(OTHER, "barrier_head.next", head if is_made else 0)

    def count(self, number: int) -> None:
        """Have rcu_barrier() wait for so many callbacks."""
        state = self._layout.symbol("rcu_state")
        assert state is not None
        place = state + self._layout.offset("rcu_state", "barrier_cpu_count")
        put(self.dump.prog, place, number.to_bytes(4, "little"))

    def found(self) -> Found | None:
        return barrier(self.dump.context())

    def _put(self, cpu: int, member: str, value: int) -> None:
        place = data_of(self.dump)[cpu] + self._layout.offset("rcu_data", member)
        put(self.dump.prog, place, value.to_bytes(8, "little"))


def test_callback_that_is_marked_as_made() -> None:
    name = "fieldpackets-6.12"
    truth: dict[str, Any] = spinning(lab.build(name))
    stale = Stale(name)
    stale.mark(True)
    found = stale.found()
    assert found is not None
    text, owners = found
    assert text == f"RCU callbacks of CPU {stale.cpu}"
    assert owners.keys() == {truth["callbacks"]}


@pytest.mark.parametrize("kernel", THROTTLED)
def test_more_callbacks_than_are_awaited(kernel: str) -> None:
    """Nothing marks the one that is made: which of both that is, is unknown."""
    stale = Stale(f"fieldpackets-{kernel}")
    stale.mark(False)
    stale.count(1)
    assert stale.found() is None
    stale.count(2)
    found = stale.found()
    assert found is not None
    text, owners = found
    assert text == f"RCU callbacks of CPUs {stale.cpu}-{OTHER}"
    # The other CPU's softirq is no task.
    assert list(owners.values()) == ["likely"]
