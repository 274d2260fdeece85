# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the fair tasks that wait for their group's quota (cpu.max).

Since "sched/fair: Switch to task based throttle model" (in v6.18), such a task is on no
run queue: it is dequeued and put on a list of its group's queue (kernel/sched/fair.c).
"""

from collections.abc import Iterator

import drgn
import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.kernel.walks import list_nodes, list_records
from msatools.kernel.words import unsigned
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of

_UNLIMITED = (1 << 64) - 1
"""RUNTIME_INF: the quota of a group without one."""

_POINTER = 8


def limbo_tasks(
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
        return  # which is a loss already
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
    Return the queues of the groups that have a quota, or are below one that has.

    :param groups: Address of the list of all groups.
    :return: Addresses, shape ``(groups, cpus)``.
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
        if quotas[group] != _UNLIMITED:
            return True
        seen.add(group)
        group = parents[group]
    return False


def _elements(reader: Reader, array: int, percpu: PerCpu, losses: LossLog) -> Addresses:
    """Return a group's queue on each CPU; NULL if they are lost."""
    try:
        return reader.words(array, int(percpu.cpus.max()) + 1)[percpu.cpus]
    except UNREADABLE as error:
        losses.lose(Loss.QUEUED, f"cannot read the throttled tasks of a group: {error}")
        return np.zeros(len(percpu.cpus), np.uint64)
