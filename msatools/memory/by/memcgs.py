# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the control groups that pages are charged to (mm/memcontrol.c)."""

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import LOST, MissingError
from msatools.kernel.cgroups import cgroup_paths
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Structs,
    find_offset,
    read_structs,
)
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
)

POINTER = ~np.uint64(7)
"""Address bits of the charge word in struct page; the lower bits are flags."""

MEMCG_DATA_OBJEXTS = np.uint64(1)
"""Flag of a slab's charge word: it points to the charges of its objects."""

_MEMBERS = ("memcg_data", "mem_cgroup")
"""Newest first: Linux kernel commit bcfe06bf2622 ("mm: memcontrol: Use helpers to
read page's memcg data") (in v5.11)."""

_MEM_CGROUP = {
    "subsystem": ("css.ss",),
    "cgroup": ("css.cgroup",),
    "flags": ("css.flags",),
}
_OBJ_CGROUP = {"group": ("memcg",)}
_CGROUP = {"node": ("kn",)}
_NODE = {"id": ("id.id", "id")}


def charge_offset(prog: drgn.Program) -> int | None:
    """Return the offset of the charge word in ``struct page``; ``None`` if missing."""
    # CONFIG_MEMCG=n
    return find_offset(find_type(prog, "struct page"), _MEMBERS)


class Memcg(Struct, frozen=True):
    """One ``struct mem_cgroup``."""

    address: int
    id: int
    """ID of its cgroup: the inode number of its directory."""

    path: str | None
    dying: bool
    """Whether it was removed but is kept while memory is charged to it."""


class Memcgs:
    """Finds the control groups that pages are charged to."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses

    def of_pages(self, pages: Addresses) -> Addresses:
        """Read the charge words of struct pages; 0 if one is unreadable."""
        members = {"word": _MEMBERS}
        structs = self._read("struct page", members, pages)
        words: Addresses = structs["word"].astype(np.uint64)
        return words

    def resolve(self, words: Addresses) -> Addresses:
        """
        Return the ``struct mem_cgroup`` of each charge word; 0 if not found.

        The word points to the group or to a ``struct obj_cgroup``, which moves to the
        parent when the group is removed. Kernel memory uses obj_cgroup since v5.11;
        user pages do as well once they are reparented. A group is recognized by its
        subsystem pointer.
        """
        pointers = words & POINTER
        known = self._are_groups(pointers)
        objects = np.where(known, np.uint64(0), pointers)
        if not objects.any():
            return pointers
        try:
            through = self._read("struct obj_cgroup", _OBJ_CGROUP, objects)
        except MissingError:
            return np.where(known, pointers, np.uint64(0))
        groups = through["group"].astype(np.uint64)
        groups[~self._are_groups(groups)] = 0
        return np.where(known, pointers, groups)

    def groups(self, groups: Addresses) -> list[Memcg]:
        """Return the control groups that :meth:`resolve` found."""
        if not len(groups):
            return []  # with CONFIG_MEMCG=n there is no such type
        memcgs = self._read("struct mem_cgroup", _MEM_CGROUP, groups)
        cgroups: Addresses = memcgs["cgroup"].astype(np.uint64)
        nodes = self._read("struct cgroup", _CGROUP, cgroups)["node"]
        ids = self._read("struct kernfs_node", _NODE, nodes.astype(np.uint64))["id"]
        paths = cgroup_paths(self._reader, cgroups, self._losses)
        online: int = find_constant(self._reader.prog, "CSS_ONLINE").value_()
        return [
            Memcg(
                address=int(group),
                id=int(ids[row]),
                path=paths[row],
                dying=not int(memcgs["flags"][row]) & online,
            )
            for row, group in enumerate(groups)
        ]

    def removed(self) -> int | None:
        """Count the removed groups of the default hierarchy that still exist.

        This is nr_dying_descendants of /sys/fs/cgroup/cgroup.stat.
        """
        try:
            with drgn_lookups:
                root = find_variable(self._reader.prog, "cgrp_dfl_root")
                count: int = root.cgrp.nr_dying_descendants.value_()
        except LOST:
            return None
        return count

    def _are_groups(self, addresses: Addresses) -> Booleans:
        # An address without a group is not a loss: it may be an obj_cgroup's.
        found = read_structs(
            self._reader, "struct mem_cgroup", _MEM_CGROUP, addresses, LossLog()
        )
        subsystem = find_variable(self._reader.prog, "memory_cgrp_subsys").address_
        known: Booleans = found.readable & (found["subsystem"] == np.uint64(subsystem))
        return known

    def _read(self, type_name: str, members: Members, addresses: Addresses) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)
