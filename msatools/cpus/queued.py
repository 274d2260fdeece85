# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the tasks on each CPU's run queue, by class, without a walk of all tasks."""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import drgn
import numpy as np
from msgspec import Struct

from msatools.cpus.model import SchedClass
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.files import MAX_DEPTH
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, distinct, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Members,
    Structs,
    WordArray,
    find_offset,
    member_names,
    read_structs,
)
from msatools.kernel.walks import list_nodes, list_records, tree_records
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of
from msatools.tasks.states import MAX_RT_PRIO, UNLIMITED

# --- The order in which the fair class would run its tasks (kernel/sched/fair.c).


_ENTITY: Members = {
    # With CONFIG_FAIR_GROUP_SCHED.
    "parent": ("parent",),
    "queue": ("cfs_rq",),
    "on_rq": ("on_rq",),
    "vruntime": ("vruntime",),
    # "sched/fair: Implement an EEVDF-like scheduling policy" (in v6.6)
    "deadline": ("deadline",),
    "weight": ("load.weight",),
    "left": ("run_node.rb_left",),
    "right": ("run_node.rb_right",),
}

_QUEUE: Members = {
    # The base of vruntimes; zero_vruntime since "sched/eevdf: Fix min_vruntime vs
    # avg_vruntime" (in v6.19, and stable kernels).
    "zero": ("zero_vruntime", "min_vruntime"),
    "curr": ("curr",),
    "root": ("tasks_timeline.rb_root.rb_node",),
    # Sums over the waiting entities, for their average; renamed by "sched/fair: Rename
    # cfs_rq::avg_vruntime to ::sum_w_vruntime" and the like (in v7.0).
    "sum": ("sum_w_vruntime", "avg_vruntime"),
    "weights": ("sum_weight", "avg_load"),
    "shift": ("sum_shift",),
    # With CONFIG_CFS_BANDWIDTH: number of throttled groups from this one up.
    "throttles": ("throttle_count",),
}

# Scale of weights on 64 bits (scale_load_down() of kernel/sched/sched.h).
_WEIGHT_SHIFT = 10
_LEAST_WEIGHT = 2

_WRAP = 1 << 64

Turn = tuple[tuple[bool, int, int], ...]
"""Sort key of a fair task: the task that runs first has the lowest. For each entity
from the root group down to the task: whether it is not eligible, its deadline or
vruntime, and its position in the kernel's tree, which breaks ties."""


class FairTask(NamedTuple):
    """The turn of a fair task on a run queue."""

    turn: Turn
    throttled: bool
    """Whether one of its groups has used up its quota (cpu.max)."""


class _Entity(NamedTuple):
    """``struct sched_entity``: a task, or a group on one CPU."""

    parent: int
    queue: int
    on_rq: int
    vruntime: int
    deadline: int | None
    weight: int
    left: int
    right: int


class _Queue(NamedTuple):
    """``struct cfs_rq``: the child entities of one group on one CPU."""

    zero: int
    curr: int
    root: int
    sum: int
    weights: int
    shift: int
    throttled: bool


def read_fair(
    reader: Reader,
    tasks: Addresses,
    roots: Addresses,
    losses: LossLog,
) -> dict[int, FairTask]:
    """Return the turns of tasks of the fair class.

    Within a group, eligible entities come first (EEVDF, since v6.6), by deadline;
    before v6.6, the order is by virtual runtime. The tasks of a group come together,
    though the kernel may run others after the first one. Buddies, which the kernel may
    prefer for cache locality, are ignored.

    :param tasks: Addresses of tasks, including running ones, which count in averages.
    :param roots: Address of the root ``struct cfs_rq`` of each task's CPU.
    :return: Turns by the task's address, without tasks that cannot be read.
    """
    task = find_type(reader.prog, "struct task_struct")
    starts = tasks + np.uint64(offset_of(task, "se"))
    entities = _read_entities(reader, starts, roots, losses)
    queues = _read_queues(
        reader, sorted({entity.queue for entity in entities.values()}), losses
    )
    # Since "sched/fair: Switch to task based throttle model" (in v6.18), throttled
    # tasks are dequeued one by one.
    by_group = not task.has_member("throttled")
    node = offset_of(find_type(reader.prog, "struct sched_entity"), "run_node")
    positions = {
        address: position
        for queue in queues.values()
        for position, address in enumerate(_in_tree(queue.root, node, entities))
    }
    turns = {
        # The running entity and that of a throttled group are in no tree. The kernel
        # prefers an entity of the tree to a running one with the same deadline.
        address: _turn(entity, positions.get(address, len(entities)), queues, entities)
        for address, entity in entities.items()
        if entity.queue in queues
    }
    fair = {}
    for task_address, start in zip(tasks.tolist(), starts.tolist(), strict=True):
        path = _path(start, entities)
        if path and all(address in turns for address in path):
            throttled = by_group and queues[entities[start].queue].throttled
            turn = tuple(turns[address] for address in reversed(path))
            fair[task_address] = FairTask(turn, throttled)
    return fair


def _read_entities(
    reader: Reader, starts: Addresses, roots: Addresses, losses: LossLog
) -> dict[int, _Entity]:
    """Read the entities of tasks and of all groups above them, a level at a time."""
    entities: dict[int, _Entity] = {}
    level = starts
    for _ in range(MAX_DEPTH):
        if not len(level):
            break
        found = read_structs(reader, "struct sched_entity", _ENTITY, level, losses)
        none = np.zeros(len(level), np.uint64)
        parents = found.columns.get("parent", none).astype(np.uint64)
        rows = zip(
            level.tolist(),
            found.readable.tolist(),
            parents.tolist(),
            # Without group scheduling, all are in the root.
            found.columns.get("queue", roots).tolist(),
            found["on_rq"].tolist(),
            found["vruntime"].tolist(),
            found["deadline"].tolist()
            if found.has("deadline")
            else [None] * len(level),
            found["weight"].tolist(),
            found["left"].tolist(),
            found["right"].tolist(),
            strict=True,
        )
        for address, readable, *members in rows:
            if readable:
                entities[address] = _Entity(*members)
        above = distinct(parents[found.readable & (parents != 0)])
        level = above[~np.isin(above, np.fromiter(entities, np.uint64, len(entities)))]
    return entities


def _read_queues(
    reader: Reader, addresses: Sequence[int], losses: LossLog
) -> dict[int, _Queue]:
    at = np.array(addresses, np.uint64)
    found = read_structs(reader, "struct cfs_rq", _QUEUE, at, losses)
    none = [0] * len(at)

    def values(name: str) -> list[int]:
        return found[name].tolist() if found.has(name) else none

    rows = zip(
        addresses,
        found.readable.tolist(),
        *(values(name) for name in _Queue._fields[:-1]),
        [count > 0 for count in values("throttles")],
        strict=True,
    )
    return {
        address: _Queue(*members) for address, readable, *members in rows if readable
    }


def _in_tree(root: int, node: int, entities: dict[int, _Entity]) -> Iterator[int]:
    """Yield the entities of a queue's tree in order, as far as they were read.

    :param root: The address of the first node.
    :param node: The offset of ``run_node`` in an entity.
    """
    above: list[int] = []
    seen: set[int] = set()
    address = root - node
    while above or address in entities:
        if address in entities and address not in seen:
            seen.add(address)
            above.append(address)
            address = entities[address].left - node
            continue
        if not above:
            return  # a loop in a damaged dump
        last = above.pop()
        yield last
        address = entities[last].right - node


def _path(start: int, entities: dict[int, _Entity]) -> list[int]:
    """Return an entity's and all its parents' addresses; empty if one was not read."""
    path: list[int] = []
    address = start
    while address:
        if address not in entities or len(path) >= MAX_DEPTH:
            return []
        path.append(address)
        address = entities[address].parent
    return path


def _turn(
    entity: _Entity,
    position: int,
    queues: dict[int, _Queue],
    entities: dict[int, _Entity],
) -> tuple[bool, int, int]:
    queue = queues[entity.queue]
    vruntime = _signed(entity.vruntime - queue.zero)
    if entity.deadline is None:
        return False, vruntime, position
    total, weights = queue.sum, queue.weights
    curr = entities.get(queue.curr)
    # The running entity is not in the sums.
    if curr is not None and curr.on_rq:
        weight = _weight(curr, queue)
        total += _signed(curr.vruntime - queue.zero) * weight
        weights += weight
    is_eligible = total >= vruntime * weights
    return not is_eligible, _signed(entity.deadline - queue.zero), position


def _weight(entity: _Entity, queue: _Queue) -> int:
    weight = max(_LEAST_WEIGHT, entity.weight >> _WEIGHT_SHIFT)
    return max(_LEAST_WEIGHT, weight >> queue.shift) if queue.shift else weight


def _signed(difference: int) -> int:
    """Return a difference of 64-bit times as a signed number."""
    return (difference + _WRAP // 2) % _WRAP - _WRAP // 2


# --- The fair tasks that wait for their group's quota (cpu.max).
#
# Since "sched/fair: Switch to task based throttle model" (in v6.18), such a task is on
# no run queue: it is dequeued and put on a list of its group's queue
# (kernel/sched/fair.c).


_POINTER = 8


def quota_waiters(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> Iterator[tuple[int, int]]:
    """Yield the CPU and the address of each fair task that waits for a quota."""
    prog = reader.prog
    try:
        head = offset_of(find_type(prog, "struct cfs_rq"), "throttled_limbo_list")
        node = offset_of(find_type(prog, "struct task_struct"), "throttle_node")
        groups = find_variable(prog, "task_groups").address_of_().value_()
    except MissingError:
        return  # before v6.18, or no quotas (CONFIG_CFS_BANDWIDTH=n)
    cpus = percpu.cpus.tolist()
    if not cpus:
        return  # read_percpu() has recorded the loss
    queues = _limited_queues(reader, groups, percpu, losses)
    first = {"first": ("throttled_limbo_list.next",)}
    found = read_structs(reader, "struct cfs_rq", first, queues.ravel(), losses)
    heads = queues.ravel() + np.uint64(head)
    waits = found.readable & (found["first"] != heads) & (found["first"] != 0)
    for row in np.flatnonzero(waits).tolist():
        where = "a list of throttled tasks"
        for address in list_nodes(reader, int(heads[row]), losses, where).tolist():
            yield cpus[row % len(cpus)], address - node


def _limited_queues(
    reader: Reader, groups: int, percpu: PerCpu, losses: LossLog
) -> Addresses:
    """
    Return the queues of the groups that have a quota, or are below such a group.

    :param groups: Address of the list of all groups.
    :return: Addresses of ``struct cfs_rq``, shape ``(groups, cpus)``.
    """
    group = find_type(reader.prog, "struct task_group")
    members = ("list", "cfs_bandwidth.quota", "parent", "cfs_rq")
    node, *offsets = (offset_of(group, member) for member in members)
    size = max(offsets) + _POINTER
    quotas, parents, pointers = {}, {}, {}
    for address, data in list_records(
        reader, groups, node, size, losses, "the list of task groups", Loss.QUEUED
    ):
        quota, parent, pointer = (unsigned(data, offset, 8) for offset in offsets)
        quotas[address], parents[address], pointers[address] = quota, parent, pointer
    # An array by CPU became a per-CPU variable (seen in 7.3).
    is_array = member_of(group, "cfs_rq").type.type.kind == drgn.TypeKind.POINTER
    rows = []
    for address, pointer in pointers.items():
        if _is_limited(address, quotas, parents):
            queues = percpu.at(pointer)
            if is_array:
                queues = _elements(reader, pointer, percpu, losses)
            rows.append(queues)
    return np.array(rows, np.uint64).reshape(len(rows), len(percpu.cpus))


def _is_limited(group: int, quotas: dict[int, int], parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    while group in quotas and group not in seen:
        if quotas[group] != UNLIMITED:
            return True
        seen.add(group)
        group = parents[group]
    return False


def _elements(reader: Reader, array: int, percpu: PerCpu, losses: LossLog) -> Addresses:
    """Return the address of a group's queue on each CPU; all 0 if the array is lost."""
    try:
        return reader.words(array, int(percpu.cpus.max()) + 1)[percpu.cpus]
    except UNREADABLE as error:
        losses.lose(Loss.QUEUED, f"cannot read the throttled tasks of a group: {error}")
        return np.zeros(len(percpu.cpus), np.uint64)


# --- The tasks on each CPU's run queue, by class, without a walk of all tasks.
#
# kernel/sched: the fair class keeps a list of its tasks (rq->cfs_tasks) beside the
# trees of its groups. One walk finds all of them, including those of throttled groups,
# which are in no tree. The list is not sorted: see read_fair, above.


_REALTIME = WordArray(("rt.active.queue",))
_RQ: Members = {
    "running": ("nr_running",),
    "clock": ("clock",),
    "curr": ("curr",),
    "idle": ("idle",),
    "stop": ("stop",),
    # The time when the CPU went idle; 0 once a task was woken.
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
"""Members of ``struct task_struct``: a task's node in the queue of each class."""

_LIST_HEAD = 16
_LIST_HEADS = _LIST_HEAD * np.arange(MAX_RT_PRIO, dtype=np.uint64)
_TIME = struct.Struct("<Q")

_MAX_GROUPS = 256
"""Maximum number of realtime groups with tasks on one run queue."""

_TRIES = 3
"""Maximum attempts to walk a list of a live kernel, which may change during a walk."""


class QueuedTask(Struct, frozen=True):
    """A task on a run queue: running, waiting, or a delayed sleeper."""

    address: int
    sched_class: SchedClass
    throttled: bool = False


class RunQueueLists(Struct, frozen=True):
    """``struct rq`` of each CPU and its tasks, in the order of ``PerCpu.cpus``."""

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

    A damaged list is counted as lost, and read up to the damage.

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
        """Yield the tasks of the run queue at *rq*, whose members are in one row."""
        if self._stops[row]:
            yield QueuedTask(int(queues["stop"][row]), "stop")
        for address in self._deadline(rq, int(queues["deadline"][row])):
            yield QueuedTask(address, "deadline")
        throttled = queues.has("rt_throttled") and bool(queues["rt_throttled"][row])
        lists = rq + (self._in_rq["realtime"] or 0)
        heads = queues["realtime"][row].reshape(MAX_RT_PRIO, 2)
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
        """Return the addresses of deadline tasks, in the order of their deadlines."""
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
        """Yield the addresses of realtime tasks: by priority, then in list order.

        :param lists: Address of the list heads.
        :param heads: Pointers in the list heads, shape ``(MAX_RT_PRIO, 2)``.
        :param seen: Addresses of the list heads of groups walked so far: in a damaged
            dump groups may form a loop.
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
        """Return the address of a group's queue; 0 for a task, or if unreadable."""
        if self._rt_group is None:
            return 0
        try:
            return int(self._reader.words(entity + self._rt_group, 1)[0])
        except UNREADABLE as error:
            self._losses.lose(Loss.QUEUED, f"cannot read a realtime task: {error}")
            return 0

    def _heads(self, lists: int) -> Addresses:
        try:
            words = self._reader.words(lists, 2 * MAX_RT_PRIO)
        except UNREADABLE as error:
            self._losses.lose(Loss.QUEUED, f"cannot read realtime tasks: {error}")
            words = np.zeros(2 * MAX_RT_PRIO, np.uint64)
        return words.reshape(MAX_RT_PRIO, 2)

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
