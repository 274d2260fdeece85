# SPDX-License-Identifier: LGPL-2.1-or-later

"""The order in which the fair class would run its tasks (kernel/sched/fair.c)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from msatools.kernel.cgroups import MAX_DEPTH
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.selfdesc.find import find_type, offset_of

_ENTITY: Members = {
    # With CONFIG_FAIR_GROUP_SCHED.
    "parent": ("parent",),
    "queue": ("cfs_rq",),
    "on_rq": ("on_rq",),
    "vruntime": ("vruntime",),
    # "sched/fair: Implement an EEVDF-like scheduling policy" (in v6.6)
    "deadline": ("deadline",),
    "weight": ("load.weight",),
}

_QUEUE: Members = {
    # The base of vruntimes; zero_vruntime since "sched/eevdf: Fix min_vruntime vs
    # avg_vruntime" (in v6.19, and stable kernels).
    "zero": ("zero_vruntime", "min_vruntime"),
    "curr": ("curr",),
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
"""Sort key of tasks. For each entity from the root group down to the task: whether it
is not eligible, its deadline or vruntime, and a number that breaks ties."""


class FairTask(NamedTuple):
    """A task on a run queue."""

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


class _Queue(NamedTuple):
    """``struct cfs_rq``: the tasks and groups of a group on one CPU."""

    zero: int
    curr: int
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

    :param tasks: Addresses of tasks, including running ones, which count in averages;
        in the order in which they were queued, which breaks ties.
    :param roots: Address of the root ``struct cfs_rq`` of each task's CPU.
    :return: Turns by address, without tasks that cannot be read.
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
    turns = {
        address: _turn(entity, number, queues, entities)
        for number, (address, entity) in enumerate(entities.items())
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
        *(values(name) for name in ("zero", "curr", "sum", "weights", "shift")),
        [count > 0 for count in values("throttles")],
        strict=True,
    )
    return {
        address: _Queue(*members) for address, readable, *members in rows if readable
    }


def _path(start: int, entities: dict[int, _Entity]) -> list[int]:
    """Return an entity and all its parents; empty if one of them was not read."""
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
    number: int,
    queues: dict[int, _Queue],
    entities: dict[int, _Entity],
) -> tuple[bool, int, int]:
    queue = queues[entity.queue]
    vruntime = _signed(entity.vruntime - queue.zero)
    if entity.deadline is None:
        return False, vruntime, number
    total, weights = queue.sum, queue.weights
    curr = entities.get(queue.curr)
    # The running entity is not in the sums.
    if curr is not None and curr.on_rq:
        weight = _weight(curr, queue)
        total += _signed(curr.vruntime - queue.zero) * weight
        weights += weight
    is_eligible = total >= vruntime * weights
    return not is_eligible, _signed(entity.deadline - queue.zero), number


def _weight(entity: _Entity, queue: _Queue) -> int:
    weight = max(_LEAST_WEIGHT, entity.weight >> _WEIGHT_SHIFT)
    return max(_LEAST_WEIGHT, weight >> queue.shift) if queue.shift else weight


def _signed(difference: int) -> int:
    """Return a difference of 64-bit times as a signed number."""
    return (difference + _WRAP // 2) % _WRAP - _WRAP // 2
