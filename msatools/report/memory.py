# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the page allocator has left, and control groups that are at their limits.

mm/page_alloc.c: an allocation may take pages of a zone as long as more are free than a
watermark and what is reserved for allocations that cannot use other zones.
"""

from collections.abc import Iterator, Mapping, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.enums import enumerators
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.kernel.swap import read_swap
from msatools.kernel.vmstat import vm_counters
from msatools.kernel.zones import Zone, online_nodes, populated_zones
from msatools.memory.by.cgrouptree import (
    UNKNOWN,
    is_unified,
    own_charges,
    read_tree,
)
from msatools.memory.by.memcgs import Memcgs
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    object_at,
)

MAX_GROUPS = 4096
"""Control groups that are looked at, breadth first."""

_AT_LIMIT = 0.98
"""Share of a limit from which on a group is at it: CPUs charge 64 pages ahead."""

_MAX_PAGES = 1 << 40
"""A limit of so many pages, 4 PiB, is none (PAGE_COUNTER_MAX)."""

_LRU_LISTS = 5
"""Lists in enum lru_list: anonymous (inactive, active), of files, unevictable."""


class ZoneState(Struct, frozen=True, kw_only=True):
    """Free pages of a zone, and what an ordinary allocation may take."""

    node: int
    name: str
    managed: int
    free: int
    low: int
    """Below it kswapd reclaims."""

    min: int
    """Below it an allocation has to reclaim by itself."""

    reserve: int
    """Pages kept from allocations that could use a higher zone (lowmem_reserve)."""

    @property
    def to_min(self) -> int:
        """Pages that can be taken at once; 0 or less if there are none."""
        return self.free - self.reserve - self.min

    @property
    def to_low(self) -> int:
        """Pages that can be taken before kswapd has to run."""
        return self.free - self.reserve - self.low


class GroupAtLimit(Struct, frozen=True, kw_only=True):
    """A control group that has used up its memory."""

    path: str | None
    pages: int
    max_pages: int
    file_pages: int
    """Pages of files on its LRU lists, which reclaim can free."""

    anon_pages: int
    """Pages on its lists that only swap could free."""

    ooms: int
    """How often an allocation found nothing to reclaim (memory.events, oom)."""

    kills: int


class MemoryState(Struct, frozen=True, kw_only=True):
    """What is left of memory."""

    zones: tuple[ZoneState, ...]
    counters: Mapping[str, int | None]
    """Items of mm/vmstat.c by enumerator, in pages."""

    swap_pages: int | None
    swap_free_pages: int | None
    groups: tuple[GroupAtLimit, ...]
    removed_groups: int | None = None
    """Control groups that were removed and still exist."""

    removed_pages: int | None = None
    """Pages in memory that are charged to them."""

    @property
    def available_pages(self) -> int | None:
        """
        Estimate the pages that can be had without swapping.

        As MemAvailable in mm/show_mem.c: free pages above the reserves, and half of
        the page cache and of reclaimable slabs at least.
        """
        free = sum(max(zone.free - zone.low, 0) for zone in self.zones)
        low = sum(zone.low for zone in self.zones)
        file = self.sum("NR_ACTIVE_FILE", "NR_INACTIVE_FILE")
        slab = self.slab("NR_SLAB_RECLAIMABLE")
        if file is None or slab is None:
            return None
        return free + file - min(file // 2, low) + slab - min(slab // 2, low)

    def sum(self, *names: str) -> int | None:
        """Sum counters; ``None`` if one is lost."""
        total = 0
        for name in names:
            value = self.counters.get(name, 0)
            if value is None:
                return None
            total += value
        return total

    def slab(self, name: str) -> int | None:
        """Return a counter of slabs, whose names end with _B since v5.9."""
        return self.sum(f"{name}_B" if f"{name}_B" in self.counters else name)


def read_memory(reader: Reader, page_size: int, losses: LossLog) -> MemoryState:
    """Read what is left of memory.

    :raises MissingError: if the types lack what describes zones
    """
    nodes = online_nodes(reader.prog, losses)
    swap = read_swap(reader.prog)
    return MemoryState(
        zones=tuple(_zones(list(populated_zones(nodes)), losses)),
        counters=vm_counters(reader, nodes, losses),
        swap_pages=swap.pages,
        swap_free_pages=swap.free_pages,
        groups=tuple(_groups_at_limit(reader, losses)),
        removed_groups=_removed_groups(reader, losses),
        removed_pages=_removed_pages(reader, losses),
    )


def _zones(zones: Sequence[Zone], losses: LossLog) -> Iterator[ZoneState]:
    if not zones:
        return
    highest = max(zone.number for zone in zones)
    marks = enumerators(zones[0].object.prog_, "enum zone_watermarks")
    items = enumerators(zones[0].object.prog_, "enum zone_stat_item")
    for zone in zones:
        pages = zone.object
        try:
            boost = int(pages.watermark_boost.value_())
            yield ZoneState(
                node=zone.node,
                name=zone.name,
                managed=int(pages.managed_pages.counter.value_()),
                free=int(pages.vm_stat[items["NR_FREE_PAGES"]].counter.value_()),
                low=int(pages._watermark[marks["WMARK_LOW"]].value_()) + boost,
                min=int(pages._watermark[marks["WMARK_MIN"]].value_()) + boost,
                reserve=int(pages.lowmem_reserve[highest].value_()),
            )
        except UNREADABLE as error:
            losses.lose(Loss.NODES, f"cannot read a zone of memory: {error}")


# --- control groups


def _groups_at_limit(reader: Reader, losses: LossLog) -> Iterator[GroupAtLimit]:
    try:
        # The root has no limit.
        groups = read_tree(reader, losses, MAX_GROUPS).addresses[1:]
        found = read_structs(
            reader, "struct mem_cgroup", _members(reader.prog), groups, losses
        )
    except MissingError:
        return  # CONFIG_MEMCG=n
    most, used = found["max"].astype(np.int64), found["used"].astype(np.int64)
    at = found.readable & (most > 0) & (most < _MAX_PAGES) & (used >= most * _AT_LIMIT)
    rows = np.flatnonzero(at)
    names = Memcgs(reader, losses).groups(groups[rows])
    for row, group in zip(rows.tolist(), names, strict=True):
        anon, file = _list_sizes(reader, int(groups[row]))
        yield GroupAtLimit(
            path=group.path,
            pages=int(used[row]),
            max_pages=int(most[row]),
            anon_pages=anon,
            file_pages=file,
            ooms=int(found["ooms"][row]) if found.has("ooms") else 0,
            kills=int(found["kills"][row]) if found.has("kills") else 0,
        )


def _removed_groups(reader: Reader, losses: LossLog) -> int | None:
    """Count removed groups; ``None`` if those of memory are not on the hierarchy that
    counts them."""
    try:
        if is_unified(reader):
            return Memcgs(reader, losses).removed()
    except LOST:
        pass  # CONFIG_MEMCG=n
    return None


def _removed_pages(reader: Reader, losses: LossLog) -> int | None:
    """Sum the pages charged to removed groups themselves; ``None`` if some are unknown.

    A group is removed once CSS_ONLINE is cleared.
    """
    lists = losses.coverage[Loss.LISTS.value]
    try:
        tree = read_tree(reader, losses, MAX_GROUPS)
        own = own_charges(reader, tree, losses).memory
        members = {"flags": ("css.flags",)}
        found = read_structs(
            reader, "struct mem_cgroup", members, tree.addresses, losses
        )
        online = int(find_constant(reader.prog, "CSS_ONLINE").value_())
    except MissingError:
        return None  # CONFIG_MEMCG=n
    removed = found["flags"].astype(np.int64) & online == 0
    is_whole = len(own) < MAX_GROUPS and losses.coverage[Loss.LISTS.value] == lists
    if not is_whole or not found.readable.all() or (own[removed] == UNKNOWN).any():
        return None
    return int(own[removed].sum())


def _members(prog: drgn.Program) -> Members:
    events = enumerators(prog, "enum memcg_memory_event")
    members = {"used": ("memory.usage.counter",), "max": ("memory.max",)}
    for column, event in (("ooms", "MEMCG_OOM"), ("kills", "MEMCG_OOM_KILL")):
        if event in events:
            members[column] = (f"memory_events[{events[event]}].counter",)
    return members


def _list_sizes(reader: Reader, group: int) -> tuple[int, int]:
    """Return the anonymous and the file pages on a group's lists; 0 if unreadable."""
    prog = reader.prog
    anon = file = 0
    try:
        with drgn_lookups:
            info = find_type(prog, "struct mem_cgroup_per_node")
            nodes = object_at(prog, "struct mem_cgroup", group).nodeinfo
            for node in online_nodes(prog, LossLog()):
                address = int(nodes[node.node_id.value_()].value_())
                lists = _words(reader, info, address, "lru_zone_size", _LRU_LISTS)
                by_list = lists.reshape(-1, _LRU_LISTS).sum(0).tolist()
                by_age = _generations(reader, info, address)
                anon += by_list[0] + by_list[1] + by_age[0]
                file += by_list[2] + by_list[3] + by_age[1]
    except LOST:
        return 0, 0
    return anon, file


def _generations(reader: Reader, info: drgn.Type, address: int) -> tuple[int, int]:
    """Return the pages in generations, which take the place of the lists.

    Linux kernel commit ec1c86b25f4b ("mm: multi-gen LRU: groundwork") (in v6.1)
    """
    zones = enumerators(reader.prog, "enum zone_type")["__MAX_NR_ZONES"]
    try:
        words = _words(reader, info, address, "lruvec.lrugen.nr_pages", 2 * zones)
    except MissingError:
        return 0, 0
    # By generation, then anonymous and of files, then by zone.
    anon, file = words.reshape(-1, 2, zones).sum((0, 2)).tolist()
    return anon, file


def _words(
    reader: Reader, type_: drgn.Type, address: int, member: str, row: int
) -> npt.NDArray[np.int64]:
    """Read an array of longs, of as many dimensions as there may be.

    :param row: Number of longs that belong together.
    :raises DamagedDataError: if the array is not made of those
    """
    with drgn_lookups:
        found = drgn.Object(reader.prog, type_, address=0).subobject_(member)
    count = drgn.sizeof(found.type_) // 8
    if not row or count % row:
        raise DamagedDataError(f"{member} has {count} longs")
    return reader.words(address + found.address_, count).view(np.int64)
