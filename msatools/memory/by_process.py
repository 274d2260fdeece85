# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages by the process that maps them (``--by process``), from its page tables."""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Numbers
from msatools.memory.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.classify import Block
from msatools.memory.model import PageGroup, ProcessGroup, largest_first
from msatools.memory.owners import ScanContext
from msatools.program.arch import Words, table_format
from msatools.selfdesc.find import find_variable
from msatools.tasks.identity import AddressSpace, address_spaces

# --- Finds the pages that each address space maps, from its page tables.
#
# The tables of an address space are read level by level, one read a table, and many
# are decoded at once. Their format is in msatools.program.arch.


Indices = npt.NDArray[np.intp]

SPACE_BITS = 24
"""Number of key bits below the pfn; PID_MAX_LIMIT (2^22) limits address spaces."""

_SPACE_MASK = np.uint64((1 << SPACE_BITS) - 1)
_U64 = (1 << 64) - 1
_AT_ONCE = 256
"""Number of tables decoded at once: 1 MiB with 4 KiB each, which fits the L2 cache."""


class Mapped(Struct, frozen=True):
    """
    Every mapping of a page by an address space, in pfn order.

    A key is the pfn, shifted left by :data:`SPACE_BITS`, and the index of the address
    space in the bits below.
    """

    small: Words
    """Keys of the pages that PTEs map."""

    large: tuple[tuple[int, Words], ...]
    """Huge mappings by size: pages of an entry, and the keys of their first pages."""

    tables: Words
    """Keys of the page tables themselves, without top-level tables."""

    known: npt.NDArray[np.bool_]
    """Whether all tables could be read, by address space."""

    swapped: npt.NDArray[np.int64] | None
    """Pages in swap by address space; ``None`` if swap entries cannot be identified."""

    # A Mapped can be large. Workers of a scan inherit it by fork() and send back only
    # sums, so that copying or pickling need not include it.
    def __deepcopy__(self, memo: object) -> "Mapped":
        return self

    def __reduce__(self) -> tuple[type["Mapped"], tuple[object, ...]]:
        none = np.empty(0, np.uint64)
        return Mapped, (none, (), none, np.empty(0, np.bool_), None)

    def small_within(self, pfn: int, pages: int) -> tuple[Indices, Indices]:
        """Find the PTE mappings of a range of memory.

        :return: Index of each page in the range, and index of the address space.
        """
        keys = _within(self.small, pfn, pfn + pages)
        return _pages(keys, pfn), (keys & _SPACE_MASK).astype(np.intp)

    def tables_within(self, pfn: int, pages: int) -> tuple[Indices, Indices]:
        """Find the page tables in a range of memory, as :meth:`small_within` does."""
        keys = _within(self.tables, pfn, pfn + pages)
        return _pages(keys, pfn), (keys & _SPACE_MASK).astype(np.intp)

    def large_within(self, pfn: int, pages: int) -> tuple[Indices, Indices, Indices]:
        """Find the huge mappings of a range of memory.

        :return: Index of the first page in the range, index after the last one, and
            index of the address space.
        """
        firsts, ends, spaces = [], [], []
        for length, keys in self.large:
            near = _within(keys, max(pfn - length + 1, 0), pfn + pages)
            first = _pages(near, pfn)
            firsts.append(np.maximum(first, 0))
            ends.append(np.minimum(first + length, pages))
            spaces.append((near & _SPACE_MASK).astype(np.intp))
        return _joined(firsts), _joined(ends), _joined(spaces)


def _within(keys: Words, first: int, end: int) -> Words:
    # searchsorted() would convert the whole array if the types differed.
    ends = np.array((first << SPACE_BITS, end << SPACE_BITS), np.uint64)
    start, stop = np.searchsorted(keys, ends)
    return keys[start:stop]


def _pages(keys: Words, pfn: int) -> Indices:
    indices: Indices = (keys >> np.uint64(SPACE_BITS)).astype(np.intp) - pfn
    return indices


def _joined(parts: list[Indices]) -> Indices:
    return np.concatenate(parts) if parts else np.empty(0, np.intp)


class UserTables:
    """Walks the page tables of many address spaces."""

    def __init__(self, reader: Reader, losses: LossLog, end_pfn: int) -> None:
        """
        :param end_pfn: pfn after the last page of memory; entries beyond it are damage.
        :raises MissingError: if the format of this kernel's page tables is unknown
        """
        form = table_format(reader.prog)
        if form is None:
            raise MissingError("no known page tables")
        self._reader = reader
        self._losses = losses
        self._end = end_pfn
        self._form = form
        # Upper bound of reads: a table is a page, and shared hugetlb tables are read
        # again for each address space.
        self._left = 2 * end_pfn
        self._swaps = self._swap_types()
        self._small: list[Words] = []
        self._large: dict[int, list[Words]] = {}
        self._tables: list[Words] = []
        self._swapped = 0
        self._is_whole = True

    def walk(self, tops: Addresses) -> Mapped:
        """
        Find all pages that address spaces map, each identified by its index in *tops*.

        Unreadable tables and entries beyond the end of memory are counted as losses.

        :param tops: Virtual addresses of the top-level tables.
        """
        if len(tops) > int(_SPACE_MASK):
            left_out = len(tops) - int(_SPACE_MASK)
            text = f"{left_out:,} address spaces were not read: too many"
            self._losses.lose(Loss.ADDRESS_SPACES, text)
            tops = tops[: int(_SPACE_MASK)]
        known = np.zeros(len(tops), np.bool_)
        swapped = np.zeros(len(tops), np.int64)
        for space, top in enumerate(tops.tolist()):
            self._swapped, self._is_whole = 0, True
            self._walk_one(space, top)
            known[space], swapped[space] = self._is_whole, self._swapped
        return Mapped(
            _sorted(self._small),
            tuple((pages, _sorted(keys)) for pages, keys in self._large.items()),
            _sorted(self._tables),
            known,
            None if self._swaps is None else swapped,
        )

    def _swap_types(self) -> int | None:
        """Return the number of swap devices: entries of a higher type are not swap."""
        try:
            return int(find_variable(self._reader.prog, "nr_swapfiles").value_())
        except MissingError:
            # Either CONFIG_SWAP=n or missing debug info: they look the same.
            return None
        except UNREADABLE:
            return None

    def _walk_one(self, space: int, top: int) -> None:
        try:
            # Top-level entries after these map the kernel.
            entries = self._reader.words(top, self._form.user_entries)
        except UNREADABLE:
            self._lose_table()
            return
        first, *middle, _ = self._form.shifts
        self._take_large(entries, first, space)
        tables = self._form.tables(entries, first)
        for shift in middle:
            below = []
            for entries in self._read(tables, space):
                self._take_large(entries, shift, space)
                below.append(self._form.tables(entries, shift))
            tables = np.concatenate(below) if below else tables[:0]
        for entries in self._read(tables, space):
            self._take_small(entries, space)

    def _read(self, tables: Words, space: int) -> Iterator[Words]:
        """Read each table once, and yield the entries of many at a time."""
        tables = self._in_memory(distinct(tables), 1)
        if len(tables) > self._left:
            text = "there are more page tables than memory has room for"
            self._losses.lose(Loss.USER_TABLES, f"{text}: some were not read")
            tables = tables[: self._left]
            self._is_whole = False
        self._left -= len(tables)
        page_shift = np.uint64(self._form.page_shift)
        self._tables.append(
            (tables >> page_shift) << np.uint64(SPACE_BITS) | np.uint64(space)
        )
        for first in range(0, len(tables), _AT_ONCE):
            part = tables[first : first + _AT_ONCE].tolist()
            data = bytearray()
            for physical in part:
                try:
                    data += self._reader.read(
                        physical, self._form.table_bytes, physical=True
                    )
                except UNREADABLE:
                    self._lose_table()
            yield np.frombuffer(data, "<u8")

    def _lose_table(self) -> None:
        self._losses.lose(Loss.USER_TABLES)
        self._is_whole = False

    def _take_large(self, entries: Words, shift: int, space: int) -> None:
        """Add the huge mappings in entries of a higher table."""
        huge = self._form.huge_of(entries, shift)
        if huge is None or not huge.any():
            return
        # pmd_present(): a huge page that is being split has only the huge bit.
        pages = self._form.pages_of(shift)
        chosen = entries[huge & ((entries & np.uint64(self._form.special)) == 0)]
        # In a huge entry, the low bits of the pfn are flags.
        pfns = self._form.user_pfns(chosen) & np.uint64(~(pages - 1) & _U64)
        page_shift = np.uint64(self._form.page_shift)
        pfns = self._in_memory(pfns << page_shift, pages)
        self._large.setdefault(pages, []).append(
            (pfns >> page_shift) << np.uint64(SPACE_BITS) | np.uint64(space)
        )

    def _take_small(self, entries: Words, space: int) -> None:
        """Add the mappings in PTEs, and count the swap entries."""
        form = self._form
        page_shift = form.page_shift
        present = form.mapped_of(entries)
        chosen = entries[present & ((entries & np.uint64(form.special)) == 0)]
        addresses = form.user_pfns(chosen) << np.uint64(page_shift)
        addresses = self._in_memory(addresses, 1)
        self._small.append(
            addresses << np.uint64(SPACE_BITS - page_shift) | np.uint64(space)
        )
        if self._swaps:
            software = np.uint64(~form.hardware & _U64)
            absent = entries[~present & ((entries & software) != 0)]
            types = form.swap_types(absent)
            self._swapped += int(np.count_nonzero(types < np.uint64(self._swaps)))

    def _in_memory(self, addresses: Words, pages: int) -> Words:
        """Drop physical addresses beyond the end of memory, and count them."""
        last = self._end - pages
        valid = addresses <= np.uint64(max(last, 0) << self._form.page_shift)
        invalid = len(addresses) - int(np.count_nonzero(valid))
        if invalid:
            self._losses.lose(Loss.USER_TABLE_ENTRIES, count=invalid)
            addresses = addresses[valid]
        return addresses


def _sorted(parts: list[Words]) -> Words:
    if not parts:
        return np.empty(0, np.uint64)
    keys = np.concatenate(parts)
    parts.clear()
    keys.sort()
    return keys


# --- Counts pages by the process that maps them (--by process).
#
# A page that several map is divided among them as /proc/PID/smaps does for Pss: by the
# page's mapcount (fs/proc/task_mmu.c, smaps_account()).


PSS_SHIFT = 12
"""Shares are in units of 1/4096 byte, as in the kernel."""

_NOT_RESIDENT = (PageClass.HUGE_ZERO, PageClass.DEVICE)
"""Not counted: vm_normal_page_pmd() skips the huge zero page; devices are no RAM."""

_TABLES = (PageClass.PAGE_TABLES, PageClass.PAGE_TABLES_OWN)
_ANON = (PageClass.ANON, PageClass.KSM)
_COMPACT_AT = 1 << 20

_COLUMNS = (
    "rss_pages",
    "pss_bytes",
    "anon_pages",
    "private_pages",
    "hugetlb_pages",
    "swap_pages",
)
"""Columns of an address space in addition to its pages by class."""


class _SpaceSums(Struct):
    """Sums by pair of address space and class, without empty pairs."""

    keys: list[Numbers] = field(default_factory=list)
    """``space * NCLASSES + class``."""

    values: list[Numbers] = field(default_factory=list)
    """Shape ``(4, pairs)``: pages, pages that no other process maps, Pss, share."""

    _held: int = 0
    _most: int = _COMPACT_AT

    def add(self, keys: Numbers, values: Numbers) -> None:
        self.keys.append(keys)
        self.values.append(values)
        self._held += len(keys)
        if self._held > self._most:
            self.compact()
            # If all keys differ, do not compact again at each block.
            self._most = max(_COMPACT_AT, 2 * self._held)

    def compact(self) -> tuple[Numbers, Numbers]:
        """Sum up equal keys; return keys, ascending, and a column of values each."""
        if not self.keys:
            return np.empty(0, np.int64), np.empty((4, 0), np.int64)
        keys, values = np.concatenate(self.keys), np.concatenate(self.values, axis=1)
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[:, order]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        keys, values = keys[starts], np.add.reduceat(values, starts, axis=1)
        self.keys, self.values, self._held = [keys], [values], len(keys)
        return keys, values

    def merge(self, other: "_SpaceSums") -> None:
        for keys, values in zip(other.keys, other.values, strict=True):
            self.add(keys, values)


class MappedPages:
    """Counts the pages that address spaces map, by address space and class."""

    def __init__(self, mapped: Mapped, page_size: int) -> None:
        self._mapped = mapped
        self._whole = page_size << PSS_SHIFT
        self.totals = np.zeros(NCLASSES, np.int64)
        """Pages by class, mapped or not."""

        self.sums = _SpaceSums()

    def observe(self, block: Block) -> None:
        self.totals += np.bincount(block.codes, minlength=NCLASSES)
        self._observe_tables(block)
        pages, spaces = self._mapped.small_within(block.pfn, len(block))
        firsts, ends, owners = self._mapped.large_within(block.pfn, len(block))
        if not len(pages) and not len(firsts):
            return
        counts = mapcounts(block)
        mappings = np.bincount(pages, minlength=len(block) + 1)
        mappings[:-1] += np.cumsum(_edges(firsts, ends, len(block)))[:-1]
        pss = self._whole // np.maximum(counts, 1)
        share = self._whole // np.maximum(np.maximum(counts, mappings[:-1]), 1)
        values = np.stack((np.ones_like(pss), counts < 2, pss, share))
        # With prefix sums, the sum over a huge page takes one subtraction.
        prefix = np.zeros((4, len(block) + 1), np.int64)
        np.cumsum(values, axis=1, out=prefix[:, 1:])
        # A huge mapping with pages of several classes was split since, or is damaged:
        # its pages are counted one by one.
        changes = np.zeros(len(block), np.int64)
        np.cumsum(block.codes[1:] != block.codes[:-1], out=changes[1:])
        mixed = changes[firsts] != changes[ends - 1]
        more, of = _each_page(firsts[mixed], ends[mixed])
        pages = np.concatenate((pages, more))
        spaces = np.concatenate((spaces, owners[mixed][of]))
        self._add(spaces, block.codes[pages], values[:, pages])
        firsts, ends, owners = firsts[~mixed], ends[~mixed], owners[~mixed]
        self._add(owners, block.codes[firsts], prefix[:, ends] - prefix[:, firsts])

    def _observe_tables(self, block: Block) -> None:
        """Divide page tables among their address spaces: hugetlb shares some."""
        pages, spaces = self._mapped.tables_within(block.pfn, len(block))
        # In a damaged dump, the page of a table may be of another class: not counted.
        tables = np.isin(block.codes[pages], _TABLES)
        pages, spaces = pages[tables], spaces[tables]
        if len(pages):
            sharers = np.bincount(pages, minlength=len(block))
            values = np.zeros((4, len(pages)), np.int64)
            values[3] = self._whole // sharers[pages]
            self._add(spaces, block.codes[pages], values)

    def merge(self, later: "MappedPages") -> None:
        self.totals += later.totals
        self.sums.merge(later.sums)

    def _add(
        self,
        spaces: npt.NDArray[np.intp],
        codes: npt.NDArray[np.uint8],
        values: Numbers,
    ) -> None:
        resident = ~np.isin(codes, _NOT_RESIDENT)
        if not resident.any():
            return
        keys = spaces[resident] * NCLASSES + codes[resident]
        pairs, index = np.unique(keys, return_inverse=True)
        # Floating point is exact: the bytes of a block are far below 2^53 / 2^12.
        sums = [
            np.bincount(index, weights=row[resident], minlength=len(pairs))
            for row in values
        ]
        self.sums.add(pairs, np.stack(sums).astype(np.int64))


def _edges(
    firsts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp], length: int
) -> Numbers:
    """Return +1 where a huge page begins and -1 after its last page."""
    begun = np.bincount(firsts, minlength=length + 1)
    ended = np.bincount(ends, minlength=length + 1)
    return begun - ended


def _each_page(
    firsts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the index of each page of some ranges, and the index of its range."""
    lengths = ends - firsts
    of = np.repeat(np.arange(len(firsts)), lengths)
    before = np.cumsum(lengths) - lengths
    return firsts[of] + np.arange(len(of)) - before[of], of


def mapcounts(block: Block) -> Numbers:
    """
    Return the mapcount of each page as the kernel computes it for smaps.

    This is folio_precise_page_mapcount() since v6.11, page_mapcount() before: the
    page's own mapcount plus the entire mapcount of its compound page. A page that has
    a page type instead of a mapcount is not mapped.
    """
    layout = block.layout
    counts = np.maximum(block.words.view(np.int32).astype(np.int64) + 1, 0)
    heads = block.flagged(layout.bits["head"])
    heads = heads[(heads + 1 < len(block)) & ~np.isin(heads, block.fakes)]
    if not len(heads):
        return counts
    entire = np.zeros(len(block), np.int64)
    column = block.column(layout.entire_mapcount, "<i4", skip=1)
    entire[heads] = np.maximum(column[heads].astype(np.int64) + 1, 0)
    if "double_map" in layout.bits:
        # Up to Linux kernel commit cb67f4282bf9 ("mm,thp,rmap: simplify compound page
        # mapcount handling") (in v6.2), the pages of a file's huge page include its
        # entire mappings in their own mapcount. The pages of an anonymous huge page
        # with PG_double_map count one extra mapping.
        doubled = block.flags[heads + 1] & np.uint64(layout.bits["double_map"]) != 0
        anon = np.isin(block.codes[heads], _ANON)
        entire[heads] -= anon & doubled
        entire[heads[~anon & (block.codes[heads] != PageClass.USER_HUGETLB)]] = 0
    near = (block.tail_heads >= 0) & (block.tail_heads < len(block))
    entire[block.tails[near]] = entire[block.tail_heads[near]]
    counts += entire
    return np.maximum(counts, 0)


class ProcessView:
    """Address spaces by the pages they map, and the pages that none maps."""

    def __init__(self, context: ScanContext) -> None:
        self._whole = context.page_size << PSS_SHIFT
        end = max((part.pfn + part.pages for part in context.ranges), default=0)
        self._spaces = _find_spaces(context)
        tables = UserTables(context.reader, context.losses, end)
        tops = np.array([space.top for space in self._spaces], np.uint64)
        mapped = tables.walk(tops)
        self._known = mapped.known
        self._swapped = mapped.swapped
        self.observer = MappedPages(mapped, context.page_size)

    def groups(self) -> tuple[PageGroup, ...]:
        keys, values = self.observer.sums.compact()
        spaces, codes = keys // NCLASSES, keys % NCLASSES
        shares = _whole_pages(codes, values[3], self._whole)
        classes: list[dict[str, int]] = [{} for _ in self._spaces]
        left = self.observer.totals.copy()
        for space, code, pages in zip(
            spaces.tolist(), codes.tolist(), shares.tolist(), strict=True
        ):
            left[code] -= pages
            if pages:
                classes[space][CLASSES[code]] = pages
        columns = self._columns(spaces, codes, values)
        groups: list[PageGroup] = [
            ProcessGroup(
                key=str(space.pid),
                name=space.comm,
                pages=sum(classes[number].values()),
                classes=classes[number],
                pid=space.pid,
                page_table_bytes=space.table_bytes,
                **self._row(number, columns),
            )
            for number, space in enumerate(self._spaces)
        ]
        groups.append(_unmapped(left))
        return largest_first(groups)

    def _row(
        self, number: int, columns: Mapping[str, Numbers]
    ) -> dict[str, int | None]:
        """Return an address space's columns; all ``None`` if a table is unreadable."""
        if not self._known[number]:
            return dict.fromkeys(_COLUMNS)
        row = {name: int(column[number]) for name, column in columns.items()}
        return dict.fromkeys(_COLUMNS) | row

    def _columns(
        self, spaces: Numbers, codes: Numbers, values: Numbers
    ) -> dict[str, Numbers]:
        """Sum up the columns of smaps by address space; as in smaps, hugetlb apart."""
        huge = codes == PageClass.USER_HUGETLB
        anon = np.isin(codes, _ANON)

        def total(row: Numbers, which: npt.NDArray[np.bool_]) -> Numbers:
            # Not bincount(): values may exceed 2^53.
            sums = np.zeros(len(self._spaces), np.int64)
            np.add.at(sums, spaces[which], row[which])
            return sums

        return {
            "rss_pages": total(values[0], ~huge),
            "anon_pages": total(values[0], anon),
            "private_pages": total(values[1], ~huge),
            "hugetlb_pages": total(values[0], huge),
            "pss_bytes": total(values[2], ~huge) >> PSS_SHIFT,
            **({} if self._swapped is None else {"swap_pages": self._swapped}),
        }


def _unmapped(left: Numbers) -> ProcessGroup:
    return ProcessGroup(
        key="-",
        name="no process",
        pages=int(left.sum()),
        classes={name: int(left[code]) for code, name in CLASSES.items() if left[code]},
        pid=None,
        **dict.fromkeys(_COLUMNS),
    )


def _whole_pages(codes: Numbers, shares: Numbers, whole: int) -> Numbers:
    """
    Round shares to whole pages so that each class, with its rest, sums exactly.

    The rest is the part of a class that no process maps. All shares are rounded down;
    the missing pages then go to the largest fractions, of which the rest has one. So
    each error is below a page.
    """
    pages = shares // whole
    for code in distinct(codes).tolist():
        mine = np.flatnonzero(codes == code)
        fractions = shares[mine] % whole
        exact = int(fractions.sum())
        rest = -exact % whole
        missing = (exact + rest) // whole
        # The rest comes last among equals: mapped pages belong to a process.
        order = np.argsort(-fractions, kind="stable")
        above = int(np.count_nonzero(fractions >= rest))
        if rest and above < missing:
            missing -= 1
        pages[mine[order[:missing]]] += 1
    return pages


def _find_spaces(context: ScanContext) -> list[AddressSpace]:
    if table_format(context.prog) is None:
        context.losses.note(
            "no-user-tables",
            "this architecture's page tables are not read: no process has any page",
        )
        return []
    try:
        return address_spaces(context.reader, context.losses)
    except LOST as error:
        context.losses.lose(
            Loss.TASKS, f"pages cannot be attributed to processes: {error}"
        )
        return []
