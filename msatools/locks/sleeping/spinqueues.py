# SPDX-License-Identifier: LGPL-2.1-or-later

"""The number of CPUs in queues for spinlocks, on a running kernel.

kernel/locking/qspinlock.c: registers of a running CPU cannot be read. But a CPU that is
queued after the next in line uses one of its own nodes, and ``count`` of its first node
is the number of nodes in use. The next in line uses no node but sets a bit in the lock,
so it is not counted. Neither is a CPU of a guest that spins without a queue
(virt_spin_lock()).
"""

from collections.abc import Mapping

from msatools.errors import LOST
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_struct, struct_layout
from msatools.locks.base.lock import Lock

MAX_NODES = 4
"""``_Q_MAX_NODES``: for a task, a softirq, an interrupt and an NMI."""

# Since Linux kernel commit 0fa809ca7f81 ("locking/pvqspinlock: Extend node size when
# pvqspinlock is configured") (in v4.20).
_NODE = "struct qnode"
_COUNT: Members = {"count": ("mcs.count",)}
"""Number of nodes that a CPU uses; kept in the first of them."""

ANY = Lock("spinlock", None)
"""Stands for all spinlocks: which one a queued CPU waits for is unknown."""

ANY_ID = "spinlock -"
ANY_NAME = "which: only registers of running CPUs say"


class SpinQueues:
    """Counts the CPUs that are in a queue for a spinlock."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._nodes = _first_nodes(reader, losses)

    def waiting(self) -> int:
        """Return the number of online CPUs in a queue; 0 on a kernel without queues.

        :raises drgn.FaultError: if a node cannot be read
        """
        if not self._nodes:
            return 0
        online = online_cpus(self._reader, self._losses)
        nodes = (self._nodes.get(cpu) for cpu in online)
        return sum(self._is_used(node) for node in nodes if node is not None)

    def _is_used(self, node: int) -> bool:
        count: int = read_struct(self._reader, _NODE, _COUNT, node)["count"]
        return 0 < count <= MAX_NODES


def _first_nodes(reader: Reader, losses: LossLog) -> Mapping[int, int]:
    """Return the address of the first ``struct qnode`` of each possible CPU."""
    try:
        percpu = read_percpu(reader, losses)
        if struct_layout(reader, _NODE, _COUNT) is None:
            return {}
        nodes = percpu.addresses("qnodes")
    except LOST:
        return {}
    return dict(zip(percpu.cpus.tolist(), nodes.tolist(), strict=True))
