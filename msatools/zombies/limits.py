# SPDX-License-Identifier: LGPL-2.1-or-later

"""The limits that zombies count against, and how near each is.

kernel/fork.c, kernel/pid.c, kernel/cgroup/pids.c, kernel/ucount.c: a zombie counts as a
thread of the system, has a PID in its PID namespace and in each above, is charged to
its control group and to each above, and counts as a process of its user.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import drgn
import numpy as np
from msgspec.structs import replace

from msatools.errors import LOST, MissingError
from msatools.kernel.cgroups import MAX_DEPTH, cgroup_paths
from msatools.kernel.losses import Loss
from msatools.kernel.pidnamespaces import (
    MAX_LEVEL,
    RESERVED_PIDS,
    innermost_numbers,
    read_namespaces,
    reserved_taken,
)
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.selfdesc.find import find_constant, find_variable
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskTable
from msatools.zombies.model import Limit
from msatools.zombies.userlimits import make_limit, user_limits

_GROUP = {
    "used": ("counter.counter",),
    "most": ("limit.counter", "limit"),
    "cgroup": ("css.cgroup",),
    "parent": ("css.parent",),
}


def collect_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> tuple[Limit, ...]:
    """Return all limits that some dead tasks count against, the nearest first.

    :param tasks: All tasks.
    :param zombies: Rows of the dead tasks in the table.
    """
    return _nearest_first(
        [
            _system_limit(reader.prog, len(zombies), losses),
            *_namespace_limits(reader, tasks, zombies, losses),
            *_group_limits(reader, tasks, zombies, losses),
            *user_limits(reader, tasks, zombies, losses),
        ]
    )


def left(
    before: Iterable[Limit], after: Iterable[Limit], interval_ns: int
) -> tuple[Limit, ...]:
    """Set the time until each limit is hit, at the rate of an interval. Pure.

    It is ``None`` for limits whose use does not grow, and for new ones.

    :return: The limits of *after*, the first to be hit first.
    """
    known = {(limit.name, limit.scope): limit for limit in before}
    limits = []
    for limit in after:
        earlier = known.get((limit.name, limit.scope))
        left_ns = None if earlier is None else _left_ns(earlier, limit, interval_ns)
        limits.append(replace(limit, left_ns=left_ns))
    return _nearest_first(limits)


def _left_ns(before: Limit, after: Limit, interval_ns: int) -> int | None:
    room = after.left
    if room is None or after.used is None or before.used is None:
        return None
    if not room:
        return 0
    grown = after.used - before.used
    if grown <= 0 or interval_ns <= 0:
        return None
    return room * interval_ns // grown


def _nearest_first(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Sort limits by the time until they are hit, then by what is left."""

    def key(limit: Limit) -> tuple[bool, int, bool, int, str, str]:
        room = limit.left
        soon = limit.left_ns
        far = soon is None, soon or 0, room is None, room or 0
        return *far, limit.name, limit.scope

    ordered = sorted(limits, key=key)
    return tuple(
        replace(limit, first=not number and limit.left is not None)
        for number, limit in enumerate(ordered)
    )


def _system_limit(prog: drgn.Program, zombies: int, losses: LossLog) -> Limit:
    used = _variable(prog, "nr_threads", losses)
    most = _variable(prog, "max_threads", losses)
    return make_limit("threads-max", "system", used, most, zombies)


def _variable(prog: drgn.Program, name: str, losses: LossLog) -> int | None:
    try:
        value: int = find_variable(prog, name).value_()
    except LOST as error:
        losses.lose(Loss.LIMITS, f"{name} cannot be read: {error}", about=name)
        return None
    return value


def _namespace_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> Iterator[Limit]:
    """Yield the limits of the PIDs in each PID namespace, and in those above.

    All PIDs are below ``pid_max``. Once the allocation has wrapped around, only PIDs
    from :data:`RESERVED_PIDS` on are available (alloc_pid()).
    """
    pids = tasks["thread_pid"][zombies].astype(np.uint64)
    innermost, _ = innermost_numbers(reader, pids, losses)
    spaces = read_namespaces(reader, innermost, losses)
    dead: Counter[int] = Counter()
    for address, count in _counted(innermost):
        for _ in range(MAX_LEVEL + 1):
            if address not in spaces:
                break
            dead[address] += count
            address = spaces[address].parent
    for address, space in spaces.items():
        scope, used, most = f"pid_ns {space.inode}", space.taken, space.most
        low = reserved_taken(reader, space, losses)
        unusable = 0 if low is None else RESERVED_PIDS - low
        yield make_limit("pid_max", scope, used, most, dead[address], unusable)


def _counted(addresses: Addresses) -> Iterator[tuple[int, int]]:
    """Yield each different address but NULL, and its count."""
    unique, counts = np.unique(addresses, return_counts=True)
    for address, count in zip(unique.tolist(), counts.tolist(), strict=True):
        if address:
            yield address, count


def _group_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> Iterator[Limit]:
    """Yield the limits of control groups and of those above, but for the root group,
    which has no limit."""
    try:
        number = find_constant(reader.prog, "pids_cgrp_id").value_()
    except MissingError:
        # CONFIG_CGROUP_PIDS
        text = "this kernel has no limits on the tasks of control groups"
        losses.note("no-pids-controller", text)
        return
    of_task = tasks["cgroups"][zombies].astype(np.uint64)
    states: Members = {"state": (f"subsys[{number}]",)}
    sets = read_structs(reader, "struct css_set", states, of_task, losses)
    dead = Counter(dict(_counted(sets["state"].astype(np.uint64))))
    type_ = "struct pids_cgroup"
    found: dict[int, tuple[int, int, int]] = {}
    level = np.fromiter(dead, np.uint64, len(dead))
    parents: dict[int, int] = {}
    for _ in range(MAX_DEPTH):
        level = level[(level != 0) & ~np.isin(level, list(parents))]
        if not len(level):
            break
        read = read_structs(reader, type_, _GROUP, level, losses)
        for row in np.flatnonzero(read.readable).tolist():
            address = int(level[row])
            parents[address] = int(read["parent"][row])
            columns = ("used", "most", "cgroup")
            used, most, cgroup = (int(read[name][row]) for name in columns)
            found[address] = used, most, cgroup
        level = distinct(read["parent"].astype(np.uint64))
    below = _with_below(dead, parents)
    groups = [address for address, parent in parents.items() if parent]
    cgroups = np.array([found[address][2] for address in groups], np.uint64)
    paths = cgroup_paths(reader, cgroups, losses)
    for address, path in zip(groups, paths, strict=True):
        used, most, _ = found[address]
        # PIDS_MAX means no limit; it is PID_MAX_LIMIT + 1.
        limit = most if most <= PID_MAX_LIMIT else None
        scope = path or f"control group {address:#x}"
        yield make_limit("pids.max", scope, used, limit, below[address])


def _with_below(own: Counter[int], parents: dict[int, int]) -> Counter[int]:
    """Return the counts of each with those of all below it."""
    total: Counter[int] = Counter()
    for address, count in own.items():
        for _ in range(MAX_DEPTH):
            if address not in parents:
                break
            total[address] += count
            address = parents[address]
    return total
