# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows of ``msa-locks --workqueues``: pools of workers, workqueues, delayed work."""

from typing import Annotated

from msgspec import Struct

from msatools.kernel.report import ADDED
from msatools.target.model import Address


class BusyWorker(Struct, frozen=True, kw_only=True):
    """A worker that executes a work item."""

    pid: int
    """ID of the thread."""

    comm: str
    function: str | None
    """Name of the work item's function; ``None`` if unknown."""

    workqueue: str | None
    """Name of the workqueue that the work item is of."""

    state: str | None
    """Letter of the task state, as in /proc; ``None`` if the task was not read."""

    age_ns: int | None
    """Time since the task entered its state; ``None`` if unknown."""

    work_age_ns: int | None
    """Time since it began the work item; ``None`` if the kernel does not record that,
    as before v7.1."""

    intensive: bool
    """Whether the work item does not count as running (``WORKER_CPU_INTENSIVE``), so
    that the pool starts others beside it."""

    rescuer: bool
    """Whether it is the rescuer of a workqueue, not a worker of the pool."""


class QueuedWork(Struct, frozen=True, kw_only=True):
    """A work item that no worker has begun."""

    function: str | None
    """Name of its function; ``None`` if unknown."""

    workqueue: str | None
    """Name of its workqueue."""

    waiter: int | None
    """For a barrier: ID of the thread that waits until what is before it is done."""


class WorkPool(Struct, frozen=True, kw_only=True):
    """A pool of workers (``struct worker_pool``)."""

    id: int
    """Number of the pool, as in the kernel's own messages."""

    address: Address
    """Address of the ``struct worker_pool``."""

    cpu: int | None
    """CPU that its workers are bound to; ``None`` for an unbound pool."""

    cpus: tuple[int, ...] | None
    """CPUs that the workers of an unbound pool may use; ``None`` for a bound pool, or
    if unknown."""

    node: int | None
    """NUMA node of an unbound pool; ``None`` if it is of none."""

    nice: int | None
    """Nice value of its workers; ``None`` if unknown."""

    flags: tuple[str, ...]
    """``bh`` (work is done in softirq context), ``manager-active`` (a worker is being
    made), ``disassociated`` (unbound, or its CPU is offline)."""

    pending: int
    """Number of work items that no worker has begun, barriers included."""

    progress_age_ns: int | None
    """Time since a worker last took a work item, if any are pending
    (``last_progress_ts``, ``watchdog_ts``).
    The kernel does not record when a work item was queued: the oldest waits for at
    least so long. ``None`` if none are pending, or unknown."""

    is_stalled: bool
    """Whether that is longer than the kernel's own limit (``wq_watchdog_thresh``)."""

    workers: int
    """Number of its workers."""

    idle: int
    """Number of them that are idle."""

    running: int
    """Number of workers that count as running (``nr_running``): while it is not 0, the
    pool wakes no other worker."""

    busy: tuple[BusyWorker, ...]
    """The workers that execute a work item."""

    works: tuple[QueuedWork, ...]
    """The first work items that no worker has begun, in order."""

    manager: int | None
    """ID of the worker that makes others; ``None`` if none does."""

    culprits: tuple[int, ...]
    """IDs of the threads that keep pending work waiting; empty if nothing is pending,
    or nobody does it."""

    why: str | None
    """Why pending work has not begun; ``None`` if nothing is pending."""


class Workqueue(Struct, frozen=True, kw_only=True):
    """A workqueue that holds back work, or asks for its rescuer."""

    name: str
    address: Address
    """Address of the ``struct workqueue_struct``."""

    flags: tuple[str, ...]
    """Its kind: ``unbound``, ``highpri``, ``mem-reclaim``, ``freezable``, ``ordered``
    and others, as ``enum wq_flags`` names them."""

    max_active: int | None
    """How many of its work items may be on a pool at a time."""

    active: int
    """Number of its work items that are on a pool, pending or executed."""

    inactive: int
    """Number of its work items that wait until ``max_active`` allows them."""

    works: tuple[QueuedWork, ...]
    """The first of these, in order."""

    rescuer: int | None
    """ID of its rescuer thread; ``None`` if it has none."""

    maydays: int
    """Number of pools from which it waits for the rescuer."""


class OfflineWork(Struct, frozen=True, kw_only=True):
    """A delayed work item whose timer is on an offline CPU, where it never fires."""

    cpu: int
    """Number of the offline CPU."""

    function: str | None
    """Name of the work item's function; ``None`` if unknown."""

    workqueue: str | None
    """Name of its workqueue; ``None`` if unknown."""

    expires_ns: int | None
    """Time at which the timer should have fired, in CLOCK_MONOTONIC."""


class Workqueues(Struct, frozen=True, kw_only=True):
    """The pools and workqueues of a kernel."""

    pools: tuple[WorkPool, ...]
    """All pools: first those with the longest pending work."""

    queues: tuple[Workqueue, ...]
    """The workqueues with inactive work items, or that wait for their rescuer."""

    offline: tuple[OfflineWork, ...]
    """Delayed work on offline CPUs."""

    stalled_after_ns: Annotated[int, ADDED] = 0
    """The kernel's own limit, after which a pool is stalled."""
