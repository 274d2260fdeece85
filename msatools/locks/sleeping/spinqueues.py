# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs of a running kernel that wait in queues for spinlocks: how many, and no more.

kernel/locking/qspinlock.c: a CPU that waits behind the next in line takes one of its
own nodes, and ``count`` of the first says how many of them are in use. For which lock
it waits only its registers say, and a running CPU's cannot be read.

The next in line takes no node but sets a bit in the lock, so it is not counted; nor is
any CPU of a guest that spins without a queue (virt_spin_lock()).
"""

from collections.abc import Mapping

import drgn

from msatools.kernel.cpumask import online_cpus
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_struct, struct_layout
from msatools.locks.base.lock import Lock

MOST_NODES = 4
"""``_Q_MAX_NODES``: for a task, a softirq, an interrupt and an NMI."""

# Since Linux kernel commit 0fa809ca7f81 ("locking/pvqspinlock: Extend node size when
# pvqspinlock is configured") (in v4.20).
_NODE = "struct qnode"
_COUNT: Members = {"count": ("mcs.count",)}
"""How many nodes of its own a CPU uses, in the first of them."""

ANY = Lock("spinlock", None)
"""What such CPUs wait for: not one lock, but any."""

ANY_ID = "spinlock -"
ANY_NAME = "which: only registers of running CPUs say"


class SpinQueues:
    """Where each CPU says whether it is in a queue for a spinlock."""

    def __init__(self, reader: Reader, findings: LossLog) -> None:
        self._reader = reader
        self._findings = findings
        self._nodes = _nodes(reader, findings)

    def waiting(self) -> int:
        """Return how many online CPUs are in a queue; 0 of a kernel without queues.

        :raises drgn.FaultError: if that cannot be read
        """
        if not self._nodes:
            return 0
        online = online_cpus(self._reader, self._findings)
        places = (self._nodes.get(cpu) for cpu in online)
        return sum(self._waits(address) for address in places if address is not None)

    def _waits(self, address: int) -> bool:
        count: int = read_struct(self._reader, _NODE, _COUNT, address)["count"]
        return 0 < count <= MOST_NODES


def _nodes(reader: Reader, findings: LossLog) -> Mapping[int, int]:
    """Return the address of each possible CPU's first ``struct qnode``."""
    try:
        percpu = read_percpu(reader, findings)
        if struct_layout(reader, _NODE, _COUNT) is None:
            return {}
        nodes = percpu.addresses("qnodes")
    except (LookupError, drgn.FaultError):
        return {}
    return dict(zip(percpu.cpus.tolist(), nodes.tolist(), strict=True))
