# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the tasks on each CPU's run queue, by class, without a walk of all tasks.

kernel/sched: the fair class keeps a list of its tasks (``rq->cfs_tasks``) beside the
trees of its groups. One walk finds all of them, including those of throttled groups,
which are in no tree. The list is not sorted: see :mod:`msatools.cpus.fairqueue`.
"""

import struct
from collections import Counter
from collections.abc import Iterator

import drgn
import numpy as np
from msgspec import Struct

from msatools.cpus.model import SchedClass
from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import (
    Members,
    Structs,
    WordArray,
    find_offset,
    member_names,
    read_structs,
)
from msatools.kernel.walks import list_records, tree_records
from msatools.selfdesc.find import find_type, offset_of

_PRIORITIES = 100
"""MAX_RT_PRIO, the number of lists (include/linux/sched/prio.h)."""

_REALTIME = WordArray(("rt.active.queue",))
_RQ: Members = {
    "running": ("nr_running",),
    "clock": ("clock",),
    "curr": ("curr",),
    "idle": ("idle",),
    "stop": ("stop",),
    # The time when it went idle; 0 once a task was woken.
    "idle_since": ("idle_stamp",),
    "deadline": ("dl.root.rb_root",),
    "realtime": _REALTIME,
    # Removed without CONFIG_RT_GROUP_SCHED by "sched/rt: Remove default bandwidth
    # control" (in v6.12)
    "rt_throttled": ("rt.rt_throttled",),
    "fair": ("cfs_tasks",),
    # "sched_ext: Implement BPF extensible scheduler class" (in v6.12)
    "ext": ("scx.runnable_list",),
}

_STOP: Members = {"on_rq": ("on_rq",)}

_NODES = {
    "deadline": ("dl.rb_node",),
    "realtime": ("rt.run_list",),
    "fair": ("se.group_node",),
    "ext": ("scx.runnable_node",),
}
"""The node of a task in the queue of each class."""

_LIST_HEAD = 16
_LIST_HEADS = _LIST_HEAD * np.arange(_PRIORITIES, dtype=np.uint64)
_TIME = struct.Struct("<Q")

_MAX_GROUPS = 256
"""Maximum number of realtime groups with tasks on one run queue."""

_TRIES = 3
"""Maximum attempts to walk a list of a live kernel, which may change meanwhile."""


class QueuedTask(Struct, frozen=True):
    """A task on a run queue: running, waiting, or a delayed sleeper."""

    address: int
    sched_class: SchedClass
    throttled: bool = False


class RunQueueLists(Struct, frozen=True):
    """``struct rq`` of each CPU, in the order of ``PerCpu.cpus``."""

    rq: Structs
    roots: Addresses
    """Address of the root ``struct cfs_rq`` of each CPU."""

    tasks: tuple[tuple[QueuedTask, ...], ...]
    """Tasks of each CPU: stop, deadline, realtime, fair, ext; deadline and realtime
    tasks in the order in which they run. The idle task is never queued."""

    servers: tuple[int, ...]
    """Number of deadline servers queued on each CPU, which reserve time for other
    classes. Before "sched/deadline: Don't count nr_running for dl_server proxy tasks"
    (in v6.16), the kernel counts them as runnable tasks."""


def read_queues(reader: Reader, percpu: PerCpu, losses: LossLog) -> RunQueueLists:
    """Read all run queues and find their tasks.

    A damaged list is noted, and read up to the damage.

    :raises MissingError: if no run queue can be found at all
    """
    addresses = percpu.addresses("runqueues")
    rq = read_structs(reader, "struct rq", _RQ, addresses, losses)
    walk = _Walk(reader, rq["stop"], losses)
    tasks = [
        tuple(walk.tasks(address, rq, row)) if readable else ()
        for row, (address, readable) in enumerate(
            zip(addresses.tolist(), rq.readable.tolist(), strict=True)
        )
    ]
    root = offset_of(find_type(reader.prog, "struct rq"), "cfs")
    servers = tuple(walk.servers[address] for address in addresses.tolist())
    return RunQueueLists(rq, addresses + np.uint64(root), tuple(tasks), servers)


class _Walk:
    """Walks the queues of one kernel, by its layout of the structures."""

    def __init__(self, reader: Reader, stops: Addresses, losses: LossLog) -> None:
        self.servers: Counter[int] = Counter()
        """Number of deadline servers by the address of the run queue."""
        self._reader = reader
        self._losses = losses
        # Stopper threads are rarely queued.
        found = read_structs(reader, "struct task_struct", _STOP, stops, losses)
        self._stops = found["on_rq"] != 0
        prog = reader.prog
        self._tries = _TRIES if prog.flags & drgn.ProgramFlags.IS_LIVE else 1
        rq, task = find_type(prog, "struct rq"), find_type(prog, "struct task_struct")
        self._rq_size = drgn.sizeof(rq)
        self._in_rq = {
            name: find_offset(rq, member_names(_RQ[name])) for name in _NODES
        }
        self._in_task = {name: find_offset(task, _NODES[name]) for name in _NODES}
        entity = find_type(prog, "struct sched_dl_entity")
        self._dl_size = drgn.sizeof(entity)
        self._dl_node = offset_of(entity, "rb_node")
        self._dl_deadline = offset_of(entity, "deadline")
        entity = find_type(prog, "struct sched_rt_entity")
        self._rt_node = offset_of(entity, "run_list")
        # With CONFIG_RT_GROUP_SCHED, groups are on the lists of tasks, too.
        self._rt_group = find_offset(entity, ("my_q",))
        self._rt_lists = offset_of(find_type(prog, "struct rt_rq"), "active.queue")

    def tasks(self, rq: int, queues: Structs, row: int) -> Iterator[QueuedTask]:
        """Find the tasks of one run queue."""
        if self._stops[row]:
            yield QueuedTask(int(queues["stop"][row]), "stop")
        for address in self._deadline(rq, int(queues["deadline"][row])):
            yield QueuedTask(address, "deadline")
        throttled = queues.has("rt_throttled") and bool(queues["rt_throttled"][row])
        lists = rq + (self._in_rq["realtime"] or 0)
        heads = queues["realtime"][row].reshape(_PRIORITIES, 2)
        for address in self._realtime(lists, heads, {lists}):
            yield QueuedTask(address, "realtime", throttled)
        if queues.has("fair"):
            first = int(queues["fair"][row])
            for address in self._listed(rq, "fair", first):
                yield QueuedTask(address, "fair")
        if queues.has("ext"):
            for address in self._listed(rq, "ext", int(queues["ext"][row])):
                yield QueuedTask(address, "ext")

    def _deadline(self, rq: int, root: int) -> list[int]:
        """Find deadline tasks, in the order of their deadlines."""
        if not root:
            return []
        tasks = []
        for address, data in tree_records(
            self._reader,
            rq + (self._in_rq["deadline"] or 0),
            self._dl_node,
            self._dl_size,
            self._losses,
            "a queue of deadline tasks",
            Loss.QUEUED,
        ):
            # "sched/fair: Add trivial fair server" (in v6.12) and later: a deadline
            # server is a member of the run queue.
            if rq <= address < rq + self._rq_size:
                self.servers[rq] += 1
            else:
                (deadline,) = _TIME.unpack_from(data, self._dl_deadline)
                tasks.append((deadline, address))
        to_node = (self._in_task["deadline"] or 0) - self._dl_node
        return [address - to_node for _, address in sorted(tasks)]

    def _realtime(self, lists: int, heads: Addresses, seen: set[int]) -> Iterator[int]:
        """Find realtime tasks, in the order of their priorities and lists.

        :param lists: Address of the list heads.
        :param heads: The list heads, shape ``(_PRIORITIES, 2)``.
        :param seen: Lists of the groups walked so far: in a damaged dump groups may
            form a loop.
        """
        empty = np.uint64(lists) + _LIST_HEADS
        for priority in np.flatnonzero(heads[:, 0] != empty).tolist():
            for node in self._nodes(int(empty[priority]), int(heads[priority, 0])):
                group = self._group(node - self._rt_node)
                below = group + self._rt_lists
                if not group:
                    yield node - (self._in_task["realtime"] or 0)
                elif below in seen or len(seen) > _MAX_GROUPS:
                    self._losses.lose(Loss.QUEUED, "groups of tasks are a loop")
                else:
                    seen.add(below)
                    yield from self._realtime(below, self._heads(below), seen)

    def _group(self, entity: int) -> int:
        """Return the queue of a group; 0 if the entity is a task, or unreadable."""
        if self._rt_group is None:
            return 0
        try:
            return int(self._reader.words(entity + self._rt_group, 1)[0])
        except UNREADABLE as error:
            self._losses.lose(Loss.QUEUED, f"cannot read a realtime task: {error}")
            return 0

    def _heads(self, lists: int) -> Addresses:
        try:
            words = self._reader.words(lists, 2 * _PRIORITIES)
        except UNREADABLE as error:
            self._losses.lose(Loss.QUEUED, f"cannot read realtime tasks: {error}")
            words = np.zeros(2 * _PRIORITIES, np.uint64)
        return words.reshape(_PRIORITIES, 2)

    def _listed(self, rq: int, name: str, first: int) -> list[int]:
        head, in_task = self._in_rq[name], self._in_task[name]
        if head is None or in_task is None:
            return []
        return [node - in_task for node in self._nodes(rq + head, first)]

    def _nodes(self, head: int, first: int) -> list[int]:
        """Return the nodes of the list at *head*, whose first node is *first*."""
        # A list that was never initialized is empty, too.
        if first in (0, head):
            return []
        for last in range(self._tries, 0, -1):
            losses = self._losses if last == 1 else LossLog()
            nodes = [
                node
                for node, _ in list_records(
                    self._reader,
                    head,
                    0,
                    _LIST_HEAD,
                    losses,
                    "a run queue",
                    Loss.QUEUED,
                )
            ]
            if not losses.lost:
                break
        return nodes
