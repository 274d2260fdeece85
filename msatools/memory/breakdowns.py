# SPDX-License-Identifier: LGPL-2.1-or-later

"""Break-downs of page classes (``--by``): their table, tallies, by order, by section.

A view passes an observer to the scan, and makes groups from the observer's counts. The
view may read the kernel before the scan, in its constructor, and after the scan, in
``groups()``. Node and zone need no view: the scan itself counts by both.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.kernel.mm import DEVICE_ZONE, Zone, spanning
from msatools.kernel.reader import distinct
from msatools.kernel.report import LossLog
from msatools.memory.classes import CLASSES
from msatools.memory.classify import (
    NO_ORDER,
    Block,
    ByOrder,
    Counts,
    Indices,
    Observer,
    Words,
    class_counts,
    named,
    node_and_zone,
    node_zone_keys,
    where,
)
from msatools.memory.memmap import MemmapRange, pages_per_section
from msatools.memory.model import PageGroup, Section
from msatools.memory.owners import ScanContext
from msatools.memory.refine import listed_pages, pcp_lists
from msatools.program.model import Address

# --- The break-downs of page classes by their names in --by.


class View(Protocol):
    """One break-down of the classes."""

    @property
    def observer(self) -> Observer:
        """The observer that the scan passes each block to; always the same object."""

    def groups(self) -> tuple[PageGroup, ...]:
        """Return the groups after the scan, the largest first."""


VIEWS = {
    "cgroup": "by_cgroup.CgroupView",
    "dmabuf": "by_kernel.DmaBufView",
    "file": "by_file.FileView",
    "fs": "by_file.FileSystemView",
    "order": "breakdowns.OrderView",
    "process": "by_process.ProcessView",
    "section": "breakdowns.SectionView",
    "slab": "by_kernel.SlabView",
    "vmalloc": "by_kernel.VmallocView",
}
"""Maps a name in ``--by`` to its view's module and class, imported only if used."""


def make_view(name: str, context: ScanContext) -> View:
    """Make the view of a name in :data:`VIEWS`."""
    module, _, view = VIEWS[name].partition(".")
    found = getattr(import_module(f"msatools.memory.{module}"), view)
    return cast(View, found(context))


# --- Copies members of a compound page's head to its tails.


def copy_to_tails(block: Block, words: npt.NDArray[Any]) -> Indices:
    """
    Copy each head's word to its tails.

    :param words: One word a page of the block; the words of tails are changed.
    :return: Indices of the tails whose head is outside the block, as their compound
        page is larger than a block. Their words are left unchanged.
    """
    tails, heads = block.tails, block.tail_heads
    near = (heads >= 0) & (heads < len(block))
    words[tails[near]] = words[heads[near]]
    far: Indices = tails[~near]
    return far


def far_heads(block: Block, tails: Indices) -> npt.NDArray[np.uint64]:
    """Return the addresses of the heads of tails that :func:`copy_to_tails` skipped."""
    indices = block.tail_heads[np.isin(block.tails, tails)]
    # Indices of heads before the block are negative: the sum wraps round.
    offsets = (indices.astype(np.int64) * block.layout.size).view(np.uint64)
    addresses: npt.NDArray[np.uint64] = offsets + np.uint64(block.address)
    return addresses


# --- Sums up pages by owner and kind while the memmap is scanned.


Pages = npt.NDArray[np.int64]

OTHERS = np.uint64((1 << 64) - 1)
"""Placeholder for the owners with the fewest pages, if there are too many to keep."""

_MOST_OWNERS = 1 << 23
"""Maximum number of pairs of owner and kind to keep, 24 bytes each."""

_COMPACT_AT = 1 << 20

_SHORT = 4
"""Average length of a run of equal pairs below which sorting rows first is faster."""

_CODE_BITS = np.uint64(6)


class TallySums(Struct, frozen=True):
    """Number of pages by pair of owner and kind, ascending by both; see Tally."""

    owners: Words
    kinds: Words
    pages: Pages

    def starts(self) -> npt.NDArray[np.intp]:
        """Return the index of each owner's first pair."""
        new = np.ones(len(self.owners), np.bool_)
        new[1:] = self.owners[1:] != self.owners[:-1]
        return where(new)


_EMPTY = np.empty(0, np.uint64)


class Tally(Struct):
    """
    Counts pages by two words, such as a file's mapping and a page's class.

    Its memory grows with the number of owners, not of pages.
    """

    most: int = field(default_factory=lambda: _MOST_OWNERS)
    _parts: list[TallySums] = field(default_factory=list)
    _held: int = 0
    _compact_at: int = _COMPACT_AT

    def add(self, owners: Words, kinds: npt.NDArray[np.unsignedinteger]) -> None:
        """Count one page for each row; fastest if adjacent rows have the same pair."""
        if not len(owners):
            return
        starts = _starts(owners, kinds)
        if len(starts) * _SHORT > len(owners) and kinds.dtype == np.uint8:
            owners, kinds = _sorted_pairs(owners, kinds)
            starts = _starts(owners, kinds)
        lengths = np.diff(starts, append=len(owners))
        self._keep(TallySums(owners[starts], kinds[starts].astype(np.uint64), lengths))

    def merge(self, later: "Tally") -> None:
        """Add the counts of another tally."""
        self._keep(later.sums())

    def sums(self) -> TallySums:
        """Return the sums so far."""
        if not self._parts:
            return TallySums(_EMPTY, _EMPTY, np.empty(0, np.int64))
        sums = add_up(self._parts)
        if len(sums.owners) > self.most:
            sums = add_up([_without_least(sums, self.most // 2)])
        self._parts, self._held = [sums], len(sums.owners)
        # Otherwise very many owners would be summed up again at each block.
        self._compact_at = max(_COMPACT_AT, 2 * self._held)
        return sums

    def _keep(self, part: TallySums) -> None:
        self._parts.append(part)
        self._held += len(part.owners)
        if self._held > self._compact_at:
            self.sums()


def _starts(
    owners: Words, kinds: npt.NDArray[np.unsignedinteger]
) -> npt.NDArray[np.intp]:
    """Return the indices of rows whose pair differs from the row before."""
    new = np.ones(len(owners), np.bool_)
    new[1:] = (owners[1:] != owners[:-1]) | (kinds[1:] != kinds[:-1])
    return where(new)


def _sorted_pairs(
    owners: Words, codes: npt.NDArray[np.unsignedinteger]
) -> tuple[Words, npt.NDArray[np.unsignedinteger]]:
    """
    Sort rows by pair; leave them unsorted if some owner is not an address.

    The upper bits of kernel addresses are all the same, so that one word can hold an
    address and a class. Sorting words takes a tenth of the time of lexsort().
    """
    packed = (owners << _CODE_BITS) | codes
    if (_owners_of(packed) != owners).any():
        return owners, codes  # some are not addresses, as in a damaged dump
    packed.sort()
    return _owners_of(packed), packed & ((np.uint64(1) << _CODE_BITS) - np.uint64(1))


def _owners_of(packed: Words) -> Words:
    signed = packed.view(np.int64) >> np.int64(_CODE_BITS)
    return signed.view(np.uint64)


def add_up(parts: list[TallySums]) -> TallySums:
    """Sum up the rows that have the same owner and kind."""
    owners = np.concatenate([part.owners for part in parts])
    kinds = np.concatenate([part.kinds for part in parts])
    pages = np.concatenate([part.pages for part in parts])
    order = np.lexsort((kinds, owners))
    owners, kinds, pages = owners[order], kinds[order], pages[order]
    starts = _starts(owners, kinds)
    summed = np.add.reduceat(pages, starts) if len(pages) else pages
    return TallySums(owners[starts], kinds[starts], summed)


def _without_least(sums: TallySums, most: int) -> TallySums:
    """Assign all but the *most* largest rows to :data:`OTHERS`."""
    owners = sums.owners.copy()
    owners[np.argsort(-sums.pages, kind="stable")[most:]] = OTHERS
    return TallySums(owners, sums.kinds, sums.pages)


class TallyOwner(Struct, frozen=True):
    """The pages of one owner."""

    word: int
    """The owner, as in :attr:`TallySums.owners`."""

    pages: int
    classes: dict[str, int]
    """Pages by class name, without empty classes, in the order of reports."""


class Ranking(Struct, frozen=True):
    """Owners by their pages."""

    owners: tuple[TallyOwner, ...]
    """The listed owners, the largest first."""

    rest: TallyOwner | None
    """All other owners together; ``None`` if all are listed."""

    left_out: int | None
    """Number of owners in the rest; ``None`` if unknown (:data:`OTHERS`)."""


def rank(sums: TallySums, most: int, always: Sequence[int] = (0,)) -> Ranking:
    """
    Rank owners by their pages.

    :param sums: Sums whose kinds are classes.
    :param most: Maximum number of owners to list.
    :param always: Placeholder owners to list in any case, in addition to *most*.
    """
    starts = sums.starts()
    if not len(starts):
        return Ranking((), None, 0)
    words = sums.owners[starts]
    totals = np.add.reduceat(sums.pages, starts)
    order = np.argsort(-totals, kind="stable")
    special = np.isin(words[order], np.array(always, np.uint64))
    ordinary = ~special & (words[order] != OTHERS)
    listed = special | (ordinary & (np.cumsum(ordinary) <= most))
    ends = np.append(starts[1:], len(sums.owners))
    owners = tuple(
        _owner(int(words[row]), sums, slice(int(starts[row]), int(ends[row])))
        for row in order[listed].tolist()
    )
    left = np.zeros(len(starts), np.bool_)
    left[order[~listed]] = True
    if not left.any():
        return Ranking(owners, None, 0)
    pairs = np.repeat(left, ends - starts)
    together = TallySums(
        sums.owners[pairs] | OTHERS, sums.kinds[pairs], sums.pages[pairs]
    )
    summed = add_up([together])
    rest = _owner(int(OTHERS), summed, slice(0, len(summed.owners)))
    left_out = None if words[-1] == OTHERS else int(np.count_nonzero(left))
    return Ranking(owners, rest, left_out)


def _owner(word: int, sums: TallySums, rows: slice) -> TallyOwner:
    codes, pages = sums.kinds[rows].tolist(), sums.pages[rows].tolist()
    by_code = dict(zip(codes, pages, strict=True))
    classes = {name: by_code[code] for code, name in CLASSES.items() if code in by_code}
    return TallyOwner(word, sum(pages), classes)


def regroup(sums: TallySums, words: Words) -> TallySums:
    """
    Replace the owners of sums, and sum up again.

    :param words: The new owner of each row of *sums*.
    """
    return add_up([TallySums(words, sums.kinds, sums.pages)])


# --- Counts pages by the order of their block (--by order).


class OrderGroup(PageGroup, frozen=True):
    """The pages in free blocks and compound pages of one order."""

    blocks: int | None
    """
    Number of blocks.

    ``None`` for memory that was never in the allocator, or is not in the dump.
    """


class OrderView:
    """Groups by order, the lowest first."""

    def __init__(self, context: ScanContext) -> None:
        # Losses are counted when the classes are settled, not here.
        pcp = pcp_lists(context.reader, list(context.zones.values()), LossLog())
        listed = listed_pages(context.reader, context.layout, pcp)
        large = listed.orders > 0
        self.observer = ByOrder(listed.pfns[large], listed.orders[large])

    def groups(self) -> tuple[OrderGroup, ...]:
        rows = enumerate(self.observer.total())
        return tuple(_group(order, counts) for order, counts in rows if counts.any())


def _group(order: int, counts: Counts) -> OrderGroup:
    pages = int(counts.sum())
    if order == NO_ORDER:
        name = "no order: reserved, or not in the dump"
        return OrderGroup("-", name, pages, named(counts), None)
    name = f"order {order}"
    return OrderGroup(str(order), name, pages, named(counts), pages >> order)


# --- Memory sections: as a list (--sections) and as a break-down.


class SectionGroup(PageGroup, frozen=True):
    """The pages of one memory section."""

    node: int | None
    zones: tuple[str, ...]


class SectionZones(Struct):
    """Collects the nodes and zones of each section, as recorded in struct pages."""

    section_pages: int
    """Pages of a section. A block lies within one section."""

    keys: dict[int, set[int]] = field(default_factory=dict)
    """Keys of ``node_zone_keys()`` by section number."""

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        unique = {keys} if isinstance(keys, int) else set(distinct(keys).tolist())
        self.keys.setdefault(block.pfn // self.section_pages, set()).update(unique)

    def merge(self, later: "SectionZones") -> None:
        for section, keys in later.keys.items():
            self.keys.setdefault(section, set()).update(keys)


class BySection(SectionZones):
    """Counts pages by section and class, and collects their nodes and zones."""

    counts: dict[int, Counts] = field(default_factory=dict)

    def observe(self, block: Block) -> None:
        super().observe(block)
        self._add(
            block.pfn // self.section_pages, class_counts(block.codes, len(block))[0]
        )

    def merge(self, later: SectionZones) -> None:
        super().merge(later)
        assert isinstance(later, BySection)
        for section, counts in later.counts.items():
            self._add(section, counts)

    def _add(self, section: int, counts: Counts) -> None:
        if section in self.counts:
            self.counts[section] += counts
        else:
            self.counts[section] = counts


class SectionView:
    """Groups by section in pfn order, not by size: most are equally large."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = BySection(pages_per_section(context.prog))
        self._context = context
        self._parts = _by_section(context.ranges)

    def groups(self) -> tuple[SectionGroup, ...]:
        return tuple(map(self._group, sorted(self.observer.counts)))

    def _group(self, section: int) -> SectionGroup:
        counts = self.observer.counts[section]
        parts = self._parts[section]
        last = parts[-1]
        zones = _zones(self.observer.keys[section], parts, self._context)
        return SectionGroup(
            key=str(section),
            name=f"pfn {parts[0].pfn:#x}-{last.pfn + last.pages - 1:#x}",
            pages=int(counts.sum()),
            classes=named(counts),
            node=zones[0].node if zones else None,
            zones=_names(self.observer.keys[section], zones, self._context),
        )


def list_sections(
    context: ScanContext, ranges: Iterable[MemmapRange], seen: SectionZones
) -> tuple[Section, ...]:
    """
    List the memory sections.

    :param ranges: The whole memmap, including offline sections.
    :param seen: Nodes and zones of the sections that were scanned.
    """
    return tuple(
        _section(nr, parts, seen.keys.get(nr, ()), context)
        for nr, parts in _by_section(ranges).items()
    )


def _section(
    nr: int, parts: Sequence[MemmapRange], keys: Iterable[int], context: ScanContext
) -> Section:
    first, last = parts[0], parts[-1]
    zones = _zones(keys, parts, context)
    return Section(
        nr=nr,
        state=first.state,
        early=first.early,
        pfn=first.pfn,
        pages=sum(part.pages for part in parts),
        memmap=Address(first.address),
        memmap_end=Address(last.address + (last.pages - 1) * context.layout.size),
        node=zones[0].node if zones else None,
        zones=_names(keys, zones, context),
    )


def _names(
    keys: Iterable[int], zones: Sequence[Zone], context: ScanContext
) -> tuple[str, ...]:
    """Return the names of zones, and of ZONE_DEVICE if a key has it: no zone in
    *zones* is, as none of its pages is present."""
    names = dict.fromkeys(zone.name for zone in zones)
    pairs = (node_and_zone(key, context.layout) for key in keys)
    device = context.layout.device_zone
    if any(pair is not None and pair[1] == device for pair in pairs):
        names[DEVICE_ZONE] = None
    return tuple(names)


def _by_section(ranges: Iterable[MemmapRange]) -> dict[int, list[MemmapRange]]:
    sections: dict[int, list[MemmapRange]] = {}
    for part in ranges:
        sections.setdefault(part.section, []).append(part)
    return sections


def _zones(
    keys: Iterable[int], parts: Sequence[MemmapRange], context: ScanContext
) -> Sequence[Zone]:
    """Return the zones recorded in a section's struct pages that also span it."""
    pairs = (node_and_zone(key, context.layout) for key in keys)
    known = {pair for pair in pairs if pair is not None}
    first, last = parts[0], parts[-1]
    return spanning(known, context.zones, first.pfn, last.pfn + last.pages)
