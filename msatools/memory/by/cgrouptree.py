# SPDX-License-Identifier: LGPL-2.1-or-later

"""All control groups of memory, and what their counters say (mm/page_counter.c).

Removed groups stay among the children of their parent until the last reference to them
is gone, so that the tree has those as well that no page is charged to.
"""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.kernel.walks import list_nodes
from msatools.selfdesc.find import drgn_lookups, find_type, find_variable, offset_of

Numbers = npt.NDArray[np.int64]

UNKNOWN = -1

_USED: Members = {"used": ("memory.usage.counter",), "subsystem": ("css.ss",)}
_SWAP: Members = {"swap": ("swap.usage.counter",)}
_BOTH: Members = {"both": ("memsw.usage.counter",)}
"""Version 1 counts memory and swap together, in the same place as ``swap``."""


class GroupTree(Struct, frozen=True):
    """The control groups of memory, each after its parent."""

    addresses: Addresses
    """Address of each ``struct mem_cgroup``, the root first."""

    parents: Numbers
    """Row of the parent; :data:`UNKNOWN` for the root."""


class OwnCharges(Struct, frozen=True):
    """Pages charged to each group itself; :data:`UNKNOWN` for the root."""

    memory: Numbers
    """Pages in memory: also objects of slabs, per-CPU memory, sockets, and what CPUs
    have charged ahead."""

    swap: Numbers
    """On swap; :data:`UNKNOWN` also without CONFIG_SWAP."""


def read_tree(reader: Reader, losses: LossLog, most: int) -> GroupTree:
    """Find the control groups of memory, breadth first.

    :param most: Maximum number of groups.
    :raises MissingError: if the kernel has none (CONFIG_MEMCG=n)
    """
    prog = reader.prog
    type_ = find_type(prog, "struct cgroup_subsys_state")
    children, sibling = offset_of(type_, "children"), offset_of(type_, "sibling")
    css = offset_of(find_type(prog, "struct mem_cgroup"), "css")
    root = int(find_variable(prog, "root_mem_cgroup").value_())
    groups, parents = [root], [UNKNOWN]
    row = 0
    while row < len(groups) and len(groups) < most:
        head = groups[row] + css + children
        nodes = list_nodes(reader, head, losses, "a list of control groups")
        below = (nodes - np.uint64(sibling + css)).tolist()[: most - len(groups)]
        groups += below
        parents += [row] * len(below)
        row += 1
    if len(groups) >= most:
        losses.note("groups-many", f"only {most:,} control groups of memory were read")
    return GroupTree(np.array(groups, np.uint64), np.array(parents, np.int64))


def own_charges(reader: Reader, tree: GroupTree, losses: LossLog) -> OwnCharges:
    """Read what is charged to each group, without the groups below it.

    :raises MissingError: if the types lack the counters
    """
    members = dict(_USED)
    structs = find_type(reader.prog, "struct mem_cgroup")
    has_swap = structs.has_member("swap") or structs.has_member("memsw")
    if has_swap:
        members |= _SWAP if is_unified(reader) else _BOTH
    found = read_structs(reader, "struct mem_cgroup", members, tree.addresses, losses)
    used = found["used"].astype(np.int64)
    # On a running kernel a group may have gone since the lists were read.
    subsystem = find_variable(reader.prog, "memory_cgrp_subsys").address_
    known = found.readable & (found["subsystem"] == np.uint64(subsystem))
    memory = _own(used, known, tree.parents)
    if not has_swap:
        return OwnCharges(memory, np.full(len(used), UNKNOWN, np.int64))
    if found.has("swap"):
        swap = found["swap"].astype(np.int64)
    else:
        swap = found["both"].astype(np.int64) - used
        # Without swap accounting the counter of both is not used.
        known &= swap >= 0
    return OwnCharges(memory, _own(swap, known, tree.parents))


def _own(totals: Numbers, readable: npt.NDArray[np.bool_], parents: Numbers) -> Numbers:
    """Return totals without those of the groups below."""
    own = totals.copy()
    below = np.flatnonzero(parents >= 0)
    np.subtract.at(own, parents[below], totals[below])
    # The counters of a running kernel change one after the other.
    own = np.maximum(own, 0)
    own[~readable] = UNKNOWN
    # A parent's counter includes that of a group that cannot be read.
    own[parents[below[~readable[below]]]] = UNKNOWN
    # The root is not charged for what is its own.
    own[0] = UNKNOWN
    return own


def is_unified(reader: Reader) -> bool:
    """Return whether memory is controlled by version 2 of control groups."""
    with drgn_lookups:
        controller = find_variable(reader.prog, "memory_cgrp_subsys")
        unified = find_variable(reader.prog, "cgrp_dfl_root").address_
        return bool(controller.root.value_() == unified)
