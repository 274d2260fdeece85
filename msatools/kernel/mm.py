# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory as a whole: nodes, zones, counters, swap, kernel page tables."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError, MissingMemberError
from msatools.kernel.code import has_function
from msatools.kernel.percpu import possible_cpus
from msatools.kernel.reader import Reader, distinct, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import enumerators
from msatools.kernel.walks import list_nodes
from msatools.program.arch import TableWalk, Words, table_format
from msatools.program.linear import vmemmap_base
from msatools.selfdesc.find import (
    ask,
    ask_each,
    drgn_lookups,
    find_type,
    find_variable,
    member_of,
)

# --- Nodes and zones of physical memory that can be read.


DEVICE_ZONE = "Device"
"""Name of the zone of devices' memory, of which no page counts as present."""

_MAX_NAME = 64
"""Maximum bytes of a zone's name; the longest has 7."""


class Zone(Struct, frozen=True):
    """One populated zone."""

    object: drgn.Object
    """The ``struct zone``."""

    node: int
    number: int
    """Index of the zone in the node, as in page flags (enum zone_type)."""

    name: str
    start_pfn: int
    end_pfn: int
    """End of the spanned range, holes included."""

    present_pages: int


def online_nodes(prog: drgn.Program, losses: LossLog) -> list[drgn.Object]:
    """Find the ``struct pglist_data`` of each online node that can be read."""
    nodes = []
    try:
        for pgdat in ask_each(for_each_online_pgdat, prog):
            try:
                nodes.append(pgdat[0].read_())
            except UNREADABLE as error:
                losses.lose(Loss.NODES, f"cannot read a memory node: {error}")
    except UNREADABLE as error:
        losses.lose(Loss.NODES, f"cannot read the list of memory nodes: {error}")
    return nodes


def populated_zones(nodes: list[drgn.Object]) -> Iterator[Zone]:
    """Yield the zones that have present pages, of nodes (``struct pglist_data``)."""
    for pgdat in nodes:
        for number, zone in enumerate(pgdat.node_zones):
            present = zone.present_pages.value_()
            if not present:
                continue
            start = zone.zone_start_pfn.value_()
            yield Zone(
                object=zone,
                node=pgdat.node_id.value_(),
                number=number,
                name=_name(zone),
                start_pfn=start,
                end_pfn=start + zone.spanned_pages.value_(),
                present_pages=present,
            )


def spanning(
    places: Iterable[tuple[int, int]],
    zones: Mapping[tuple[int, int], Zone],
    start_pfn: int,
    end_pfn: int,
) -> list[Zone]:
    """
    Return the zones that a range of pfns overlaps.

    :param places: Node and zone number from the flags of the range's struct pages. In
        holes at the end of memory they may name a distant zone, or none.
    :param zones: Zones by node and number.
    :param end_pfn: End of the range (exclusive).
    """
    candidates = (zones[place] for place in sorted(places) if place in zones)
    return [z for z in candidates if z.start_pfn < end_pfn and z.end_pfn > start_pfn]


def _name(zone: drgn.Object) -> str:
    try:
        return read_string(Reader(zone.prog_), zone.name.value_(), _MAX_NAME)
    except UNREADABLE:
        return "?"


# --- The counters of mm/vmstat.c, including per-CPU deltas not yet folded in.


def vm_counters(
    reader: Reader, nodes_online: list[drgn.Object], losses: LossLog
) -> dict[str, int | None]:
    """
    Sum all node and zone counters, by the name of their enumerator.

    The kernel adds a CPU's delta to the counters only when it exceeds a threshold;
    /proc/vmstat and drgn's helpers read the counters alone.

    :return: Pages, except for the few items that count something else; ``None`` for
        a counter that cannot be read.
    """
    prog = reader.prog
    zones = _names(prog, "enum zone_stat_item", "NR_VM_ZONE_STAT_ITEMS")
    nodes = _names(prog, "enum node_stat_item", "NR_VM_NODE_STAT_ITEMS")
    deltas: dict[str, int] = {}
    cpus = possible_cpus(prog, losses)
    populated = [zone.object for zone in populated_zones(nodes_online)]
    for names, objects, diff_of in (
        (nodes, nodes_online, _node_diff),
        (zones, populated, _zone_diff),
    ):
        total = np.zeros(len(names), np.int64)
        for owner, cpu in itertools.product(objects, cpus):
            try:
                address = diff_of(owner, cpu).address_of_().value_()
                data = reader.read(address, len(names))
            except UNREADABLE:
                losses.lose(Loss.VMSTAT_CPUS)
                continue
            total += np.frombuffer(data, "i1")
        deltas.update(zip(names, total.tolist(), strict=True))
    globals_ = {
        **_global(reader, "vm_zone_stat", zones, losses),
        **_global(reader, "vm_node_stat", nodes, losses),
    }
    return {
        name: None if value is None else value + deltas[name]
        for name, value in globals_.items()
    }


def vm_events(
    reader: Reader, names: Collection[str], losses: LossLog
) -> dict[str, int]:
    """
    Count events of ``enum vm_event_item``, over all CPUs and since boot.

    A CPU that goes offline adds its counts to those of another.

    :param names: Enumerators; those that this kernel lacks are left out.
    :raises MissingError: if the kernel counts no events (CONFIG_VM_EVENT_COUNTERS)
    :raises drgn.FaultError: if the counts of a CPU cannot be read
    """
    prog = reader.prog
    states = find_variable(prog, "vm_event_states").address_of_()
    indices = enumerators(prog, "enum vm_event_item")
    counts = {name: 0 for name in names if name in indices}
    length = max((indices[name] for name in counts), default=-1) + 1
    for cpu in possible_cpus(prog, losses):
        address = ask(per_cpu_ptr, states, cpu).value_()
        # struct vm_event_state has the array ``event`` as its only member.
        words = reader.words(address, length)
        for name in counts:
            counts[name] += int(words[indices[name]])
    return counts


PAGES_FREED = "PGFREE"
"""The event that counts freed pages."""


def pages_allocated(prog: drgn.Program) -> list[str]:
    """Return the names of the events that count allocated pages, one per zone type.

    :raises MissingError: if the types lack ``enum vm_event_item``
    """
    events = enumerators(prog, "enum vm_event_item")
    return [name for name in events if name.startswith("PGALLOC_")]


def _names(prog: drgn.Program, enum: str, end: str) -> list[str]:
    """Return an enum's names by ascending value, without *end*, which counts them."""
    names: dict[int, str] = {}
    count = 0
    for name, value in enumerators(prog, enum).items():
        if name == end:
            count = value
        else:
            names.setdefault(value, name)
    return [names[value] for value in range(count)]


def _global(
    reader: Reader, variable: str, names: list[str], losses: LossLog
) -> dict[str, int | None]:
    try:
        words = reader.words(find_variable(reader.prog, variable).address_, len(names))
    except UNREADABLE as error:
        losses.lose(Loss.COUNTERS, f"cannot read the kernel's counters: {error}")
        return dict.fromkeys(names)
    return dict(zip(names, words.view(np.int64).tolist(), strict=True))


def _node_diff(pgdat: drgn.Object, cpu: int) -> drgn.Object:
    return ask(per_cpu_ptr, pgdat.per_cpu_nodestats, cpu).vm_node_stat_diff


def _zone_diff(zone: drgn.Object, cpu: int) -> drgn.Object:
    try:
        with drgn_lookups:
            return ask(per_cpu_ptr, zone.per_cpu_zonestats, cpu).vm_stat_diff
    except MissingMemberError:
        # Before Linux kernel commit 28f836b6777b ("mm/page_alloc: split per cpu
        # page lists and zone stats") (in v5.14).
        return ask(per_cpu_ptr, zone.pageset, cpu).vm_stat_diff


# --- How much swap there is (mm/swapfile.c).


class Swap(Struct, frozen=True):
    """All swap devices and files; ``None`` if unknown, or without CONFIG_SWAP."""

    pages: int | None
    free_pages: int | None


def read_swap(prog: drgn.Program) -> Swap:
    """Read the sizes that /proc/meminfo shows."""
    return Swap(_variable(prog, "total_swap_pages"), _variable(prog, "nr_swap_pages"))


def _variable(prog: drgn.Program, name: str) -> int | None:
    try:
        with drgn_lookups:
            found = find_variable(prog, name)
            # nr_swap_pages is an atomic_long_t.
            is_atomic = found.type_.kind == drgn.TypeKind.TYPEDEF
            return int((found.counter if is_atomic else found).value_())
    except LOST:
        return None


# --- The kernel's page tables: the pages that they occupy, and what they map.
#
# drgn's own translation does not return the pages of tables, and reads the tables for
# each address again; here a table is read once. Their format is in
# msatools.program.arch.


_MAX_ADDRESS = 1 << 52
_BATCH = 1 << 10
"""Number of tables read at a time: 4 MiB, or more with larger pages."""


class PageTables:
    """The page tables of a kernel."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        """
        :raises MissingError: if the format of this kernel's page tables is unknown
        """
        form = table_format(reader.prog)
        if form is None:
            raise MissingError("no known page tables")
        self._reader = reader
        self._losses = losses
        self._form = form

    def kernel_tables(self) -> set[int]:
        """
        Find the pfns of all tables below the kernel's own top-level tables.

        With page table isolation a second top-level table follows the first; it has
        clones of the few kernel mappings that user mode needs.
        """
        prog, form = self._reader.prog, self._form
        top = find_variable(prog, "init_mm").pgd.value_()
        roots = (top, top + form.table_bytes) if _has_isolation(prog) else (top,)
        first = form.kernel_entry
        kernel_parts = (root + 8 * first for root in roots)
        entries = self._read_entries(
            kernel_parts, form.top_entries - first, physical=False
        )
        found: set[int] = set()
        self._descend(entries, form.shifts, found)
        return found

    def user_top_tables(self, spaces: Callable[[], Iterable[int]]) -> set[int]:
        """
        Find the pfns of the tables of processes that NR_PAGETABLE leaves out.

        These are each address space's top-level table (two pages with page table
        isolation) and the tables under it, down to the PUDs, whose entries point to
        PMD tables. A top-level table that does not fill a page is a slab object.

        :param spaces: Returns the addresses of the top-level tables of all processes;
            called if the kernel has no list of them.
        """
        form = self._form
        shifts = form.shifts[:-2]  # without PMDs and PTEs
        try:
            tops = self._top_level_pfns()
        except MissingError:
            # Only x86-64 has a list.
            found: set[int] = set()
            own = list(spaces())
            entries = self._read_entries(own, form.user_entries, physical=False)
            if form.user_bytes == form.table_bytes:
                found.update(self._pfns_behind(own))
            if len(shifts) > 1:
                self._descend(entries, shifts, found)
            return found
        found = set()
        in_pairs = self._isolated(tops)
        for start in range(0, len(tops), _BATCH):
            batch = tops[start : start + _BATCH]
            found.update(batch)
            if in_pairs:
                found.update([pfn + 1 for pfn in batch])
            tables = [pfn << form.page_shift for pfn in batch]
            entries = self._read_entries(tables, form.user_entries)
            self._descend(entries, shifts, found)
        return found

    def _pfns_behind(self, addresses: Iterable[int]) -> Iterator[int]:
        for address in addresses:
            pfn = self.pfn(address)
            if pfn is not None:
                yield pfn

    def _top_level_pfns(self) -> list[int]:
        """Read ``pgd_list``, all address spaces' top-level tables."""
        prog = self._reader.prog
        page = find_type(prog, "struct page")
        nodes = list_nodes(
            self._reader,
            find_variable(prog, "pgd_list").address_,
            self._losses,
            "the list of top-level page tables",
        )
        lru, memmap = member_of(page, "lru").offset, vmemmap_base(prog)
        pfns = (nodes - np.uint64(memmap) - np.uint64(lru)) // np.uint64(
            drgn.sizeof(page)
        )
        end = np.uint64(_MAX_ADDRESS >> self._form.page_shift)
        tops: list[int] = pfns[pfns < end].tolist()
        return tops

    def _isolated(self, tops: list[int]) -> bool:
        """
        Return whether top-level tables are pairs of pages.

        They are if page table isolation is in use or, up to v6.14, just compiled in.
        The refcount of the second page of a pair is 0.
        """
        if not _has_isolation(self._reader.prog):
            return False
        page = find_type(self._reader.prog, "struct page")
        refcount, size = member_of(page, "_refcount").offset, drgn.sizeof(page)
        memmap = vmemmap_base(self._reader.prog)
        for pfn in tops[:8]:
            try:
                second = memmap + (pfn + 1) * size + refcount
                if pfn & 1 or any(self._reader.read_near(second, 4)):
                    return False
            except UNREADABLE:
                continue
        return True

    def pfn(self, address: int) -> int | None:
        """Translate an address of the kernel; ``None`` if no page is mapped there."""
        try:
            found = self._kernel_walk.find(address)
        except UNREADABLE:
            return None  # counted where the table was read
        return None if found is None else found[0] >> self._form.page_shift

    def pfns(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """Translate the addresses of consecutive pages of the kernel.

        :param address: Address of the first page.
        :param count: Number of pages, at least 1.
        :return: The pfn of each page; -1 where none is mapped.
        """
        return self._kernel_walk.frames(address, count)

    @cached_property
    def _kernel_walk(self) -> TableWalk:
        top = find_variable(self._reader.prog, "init_mm").pgd.value_()

        def read(table: int) -> bytes:
            # Of the top-level table only the virtual address is known.
            size = self._form.table_bytes
            try:
                return self._reader.read(table, size, physical=table != top)
            except UNREADABLE:
                self._unreadable()
                raise

        return TableWalk(self._form, top, read)

    def _read_entries(
        self, tables: Iterable[int], count: int, *, physical: bool = True
    ) -> Words:
        """Read the first *count* entries of each table; skip unreadable tables."""
        parts = []
        for table in tables:
            try:
                parts.append(self._reader.read(table, 8 * count, physical=physical))
            except UNREADABLE:
                self._unreadable()
        return np.frombuffer(b"".join(parts), np.uint64)

    def _descend(
        self, entries: Words, shifts: tuple[int, ...], found: set[int]
    ) -> None:
        """
        Collect the pfns of the tables that *entries* point to, and of those below.

        :param shifts: Shift of the entries, then of each level to collect; tables of
            the last level are not read.
        """
        shift, *below = shifts
        page_shift = self._form.page_shift
        tables = self._form.tables(entries, shift)
        pfns = set((distinct(tables) >> np.uint64(page_shift)).tolist())
        new = sorted(pfns - found)
        found |= pfns
        if len(below) > 1:
            for start in range(0, len(new), _BATCH):
                batch = (pfn << page_shift for pfn in new[start : start + _BATCH])
                children = self._read_entries(batch, self._form.entries)
                self._descend(children, tuple(below), found)

    def _unreadable(self) -> None:
        self._losses.lose(Loss.PAGE_TABLES)


def _has_isolation(prog: drgn.Program) -> bool:
    """Return whether page table isolation is compiled in (arch/x86/mm/pti.c)."""
    return has_function(prog, "pti_init")


def pmd_order(prog: drgn.Program) -> int:
    """Return the order of the huge page that one PMD entry maps."""
    # A table fills a page and has entries of 8 bytes.
    return int(find_variable(prog, "PAGE_SHIFT").value_()) - 3
