# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's own memory: by slab cache (``--by slab``) and vmalloc() caller."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import LOST
from msatools.kernel.reader import distinct
from msatools.kernel.report import Loss
from msatools.kernel.slab import (
    SlabCache,
    free_in_use,
    merged_names,
    read_caches,
    slab_caches,
    slab_type,
)
from msatools.memory.areas import VmallocAreas
from msatools.memory.breakdowns import Tally, TallyOwner, TallySums, copy_to_tails, rank
from msatools.memory.by_module import caller_modules, caller_names
from msatools.memory.classes import PageClass
from msatools.memory.classify import Block, Words, where
from msatools.memory.content_hints import Contents
from msatools.memory.dma_bufs import DmaBuf, dma_bufs, holders_of
from msatools.memory.model import (
    NO_OWNER,
    REST,
    BufferHolder,
    DmaBufGroup,
    PageGroup,
    PageWord,
    SlabGroup,
    VmallocGroup,
    largest_first,
    unique_keys,
)
from msatools.memory.owners import ScanContext, pfns_of
from msatools.program.model import Address
from msatools.selfdesc.find import member_of

# --- Finds the modules that use a general slab cache, by pointers in sampled objects.
#
# All callers of kmalloc() share these caches. An object that a driver allocated mostly
# has a pointer to a function or variable of that driver.


GENERAL = "kmalloc-"
"""Prefix of the names of general caches."""

SAMPLE = 32
"""Maximum number of slabs of a cache to read: the first page of each."""

_EVERY = 16

_MOST = 0.5
"""Minimum share of the objects that point to a module for it to be their owner."""

_KINDS = ("module", "symbol")
_WORDS = 5


class SlabUsers(Struct, frozen=True):
    """The modules and symbols that sampled objects point to."""

    module: str | None
    """The module that at least half of the objects point to; ``None`` if none."""

    share: float
    """Share of the objects that point to the module's most frequent target, 0 to 1."""

    words: tuple[PageWord, ...]
    """The most frequent targets, each with the number of objects that point to it."""


class SlabSamples:
    """Keeps the first and then every 16th slab of each cache in each block of struct
    pages."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.uint64]] = []

    def add(self, caches: npt.NDArray[np.uint64], pfns: npt.NDArray[np.uint64]) -> None:
        """Add the slabs of a block: the cache and first page frame of each."""
        order = np.argsort(caches, kind="stable")
        caches, pfns = caches[order], pfns[order]
        _, first, index = np.unique(caches, return_index=True, return_inverse=True)
        kept = (np.arange(len(caches)) - first[index]) % _EVERY == 0
        self._parts.append(np.stack((caches[kept], pfns[kept])))

    def merge(self, later: "SlabSamples") -> None:
        self._parts += later._parts

    def of(self, cache: int) -> npt.NDArray[np.int64]:
        """Return at most :data:`SAMPLE` page frames of a cache, spread over memory."""
        if not self._parts:
            return np.empty(0, np.int64)
        caches, pfns = np.concatenate(self._parts, axis=1)
        mine = distinct(pfns[caches == np.uint64(cache)]).astype(np.int64)
        rows = np.linspace(0, len(mine) - 1, min(SAMPLE, len(mine))).astype(np.int64)
        return mine[rows]


class SlabContents:
    """Reads slab objects to find the modules and symbols that they point to."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        self._contents: Contents | None = None

    def users(self, pfns: npt.NDArray[np.int64], bytes_each: int) -> SlabUsers:
        """Return the modules and symbols that the objects of slabs point to.

        :param pfns: Page frame of the first page of each slab.
        :param bytes_each: Bytes of an object, including the allocator's metadata.
        """
        if self._contents is None:
            self._contents = Contents(self._context)
        objects, counts = self._contents.in_objects(pfns, bytes_each)
        ranked = sorted(
            ((word, count) for word, count in counts.items() if word.kind in _KINDS),
            key=lambda item: (-item[1], item[0].name),
        )
        words = [replace(word, count=count) for word, count in ranked[:_WORDS]]
        return _users(words, objects)


def _users(words: Sequence[PageWord], objects: int) -> SlabUsers:
    for word in words:
        if word.kind == "module" and word.count >= _MOST * objects:
            return SlabUsers(word.owner, word.count / objects, tuple(words))
    return SlabUsers(None, 0.0, tuple(words))


# --- Counts slab pages by cache (--by slab).
#
# Full slabs are on no list of the allocator: they are found only in the memmap.


_OBJECTS_MASK = np.uint64((1 << 31) - 1)
"""Mask of a slab's counters without the ``frozen`` bit."""


_LARGE = 0.01
"""Minimum share of all pages for the objects of a general cache to be read."""


class SlabLayout(Struct, frozen=True):
    """Offsets of the members of ``struct slab``."""

    cache: int
    counters: int | None
    """Offset of ``inuse`` (16 bits), ``objects`` (15 bits); ``None`` without SLUB."""

    @classmethod
    def of(cls, prog: drgn.Program) -> "SlabLayout":
        type_ = slab_type(prog)
        counters = None
        if type_.has_member("inuse") and type_.has_member("objects"):
            in_use, objects = member_of(type_, "inuse"), member_of(type_, "objects")
            # The layout since SLUB was merged; no other is known.
            if objects.bit_offset == in_use.bit_offset + 16:
                counters = in_use.bit_offset // 8
        return cls(member_of(type_, "slab_cache").offset, counters)


class SlabTally(Struct):
    """Counts pages by ``struct kmem_cache`` and class, and slabs by their counters."""

    layout: SlabLayout
    by_cache: Tally = field(default_factory=Tally)
    by_objects: Tally = field(default_factory=Tally)
    """Slabs (not pages) by cache and counters: ``inuse``, and ``objects`` at bit 16."""

    samples: SlabSamples = field(default_factory=SlabSamples)

    def observe(self, block: Block) -> None:
        caches = np.zeros(len(block), np.uint64)
        slabs = where(block.codes == PageClass.SLAB)
        caches[slabs] = block.column(self.layout.cache)[slabs]
        copy_to_tails(block, caches)
        caches[block.codes != PageClass.SLAB] = 0
        self.by_cache.add(caches, block.codes)
        firsts = slabs[block.heads_of(slabs) == slabs]
        self.samples.add(caches[firsts], (firsts + block.pfn).astype(np.uint64))
        if self.layout.counters is not None:
            counters = block.column(self.layout.counters, "<u4")[firsts]
            objects = counters.astype(np.uint64) & _OBJECTS_MASK
            self.by_objects.add(caches[firsts], objects)

    def merge(self, later: "SlabTally") -> None:
        self.by_cache.merge(later.by_cache)
        self.by_objects.merge(later.by_objects)
        self.samples.merge(later.samples)


class SlabView:
    """Caches by the pages of their slabs."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = SlabTally(SlabLayout.of(context.prog))
        self._context = context
        self._contents = SlabContents(context)

    def groups(self) -> tuple[PageGroup, ...]:
        sums = self.observer.by_cache.sums()
        ranking = rank(sums, len(sums.owners))
        owners = [owner for owner in ranking.owners if owner.word]
        addresses = np.array([owner.word for owner in owners], np.uint64)
        context = self._context
        caches = read_caches(context.reader, addresses, context.losses)
        kept: Mapping[int, int] = {}
        if self.observer.layout.counters is not None:
            kept = free_in_use(context.reader, addresses, context.losses)
        merged = merged_names(context.reader, context.losses)
        slabs = self.observer.by_objects.sums()
        groups = [
            self._group(owner, cache, merged, slabs, kept)
            for owner, cache in zip(owners, caches, strict=True)
        ]
        groups += [
            SlabGroup(NO_OWNER, "not slabs", owner.pages, owner.classes)
            for owner in ranking.owners
            if not owner.word
        ]
        if ranking.rest is not None:
            # A damaged dump may have too many words that are not caches.
            rest = ranking.rest
            groups.append(SlabGroup(REST, "other caches", rest.pages, rest.classes))
        if context.verbose:
            groups += self._empty({*addresses.tolist()}, merged)
        return largest_first(unique_keys(groups))

    def _empty(
        self, known: Container[int], merged: Mapping[int, Sequence[str]]
    ) -> Iterator[PageGroup]:
        """Yield the caches without slabs, from the kernel's list of caches."""
        reader, losses = self._context.reader, self._context.losses
        none = None if self.observer.layout.counters is None else 0
        try:
            for cache in slab_caches(reader, losses):
                if cache.address in known:
                    continue
                yield SlabGroup(
                    key=cache.name,
                    name=cache.name,
                    pages=0,
                    classes={},
                    slabs=none,
                    objects=none,
                    objects_in_use=none,
                    bytes_each=cache.size,
                    merged=_other_names(cache, merged),
                    kmem_cache=Address(cache.address),
                )
        except LOST as error:
            losses.lose(Loss.SLABS, f"cannot read the list of slab caches: {error}")

    def _group(
        self,
        owner: TallyOwner,
        cache: SlabCache | None,
        merged: Mapping[int, Sequence[str]],
        slabs: TallySums,
        kept: Mapping[int, int],
    ) -> PageGroup:
        address = Address(owner.word)
        if cache is None:
            name = f"cache {address:#x}, which is unreadable"
            return SlabGroup(f"{address:#x}", name, owner.pages, owner.classes)
        ends = np.array((owner.word, owner.word + 1), np.uint64)
        rows = slice(*np.searchsorted(slabs.owners, ends).tolist())
        counts, objects = slabs.pages[rows], slabs.kinds[rows].astype(np.int64)
        counted = self.observer.layout.counters is not None
        in_use = None
        if owner.word in kept:
            used = int((counts * (objects & 0xFFFF)).sum())
            if used >= kept[owner.word]:
                in_use = used - kept[owner.word]
        users = self._users(owner, cache)
        return SlabGroup(
            key=cache.name,
            name=cache.name,
            pages=owner.pages,
            classes=owner.classes,
            module=users.module if users else None,
            module_share=round(users.share, 3) if users and users.module else None,
            words=users.words if users else None,
            slabs=int(counts.sum()) if counted else None,
            objects=int((counts * (objects >> 16)).sum()) if counted else None,
            objects_in_use=in_use,
            bytes_each=cache.size,
            merged=_other_names(cache, merged),
            kmem_cache=address,
        )

    def _users(self, owner: TallyOwner, cache: SlabCache) -> SlabUsers | None:
        """Find the users of a large general cache; ``None`` for other caches."""
        context = self._context
        whole = sum(part.pages for part in context.ranges)
        if not cache.name.startswith(GENERAL) or owner.pages < _LARGE * whole:
            return None
        return self._contents.users(self.observer.samples.of(owner.word), cache.size)


def _other_names(
    cache: SlabCache, merged: Mapping[int, Sequence[str]]
) -> tuple[str, ...]:
    """Return the names of the other caches that were merged into *cache*."""
    return tuple(sorted({*merged.get(cache.address, ())} - {cache.name}))


# --- Counts pages of vmalloc areas, kernel stacks included, by caller.


class OwnedTally(Struct):
    """Counts pages by class and by the number of their owner, from 1 on.

    The owner of a page of vmalloc is the caller that allocated its area.
    """

    pfns: Words
    """Pages of all owners, ascending."""

    owners: Words
    """Number of the owner of each page in :attr:`pfns`."""

    tally: Tally = field(default_factory=Tally)

    def observe(self, block: Block) -> None:
        owners = np.zeros(len(block), np.uint64)
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.pfns, ends)
        owners[self.pfns[first:last] - np.uint64(block.pfn)] = self.owners[first:last]
        self.tally.add(owners, block.codes)

    def merge(self, later: "OwnedTally") -> None:
        self.tally.merge(later.tally)


class VmallocView:
    """Functions by the pages of the vmalloc areas that they allocated."""

    def __init__(self, context: ScanContext) -> None:
        areas = context.owners.areas
        self._names, numbers = _numbered(context, areas)
        self._modules = caller_modules(context.reader, areas, context.losses)
        self._areas = Counter(numbers)
        pfns = pfns_of(areas.pages, context.prog, context.layout)
        callers = np.array(numbers, np.uint64)[areas.rows]
        order = np.argsort(pfns, kind="stable")
        self.observer = OwnedTally(pfns[order], callers[order])

    def groups(self) -> tuple[PageGroup, ...]:
        ranking = rank(self.observer.tally.sums(), len(self._names))
        groups: list[PageGroup] = []
        for owner in ranking.owners:
            pages, classes = owner.pages, owner.classes
            if not owner.word:
                groups.append(VmallocGroup(NO_OWNER, "in no area", pages, classes))
                continue
            name = self._names[owner.word - 1]
            areas = self._areas[owner.word]
            module = self._modules.get(name)
            shown = name if module is None else f"{name} [{module}]"
            groups.append(VmallocGroup(name, shown, pages, classes, areas, module))
        return largest_first(groups)


def _numbered(context: ScanContext, areas: VmallocAreas) -> tuple[list[str], list[int]]:
    """Number the callers' names from 1; return the names and each area's number."""
    names = caller_names(context.prog, areas)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    return list(numbers), [numbers[name] for name in names]


# --- Counts pages by the dma-buf that has or pins them (--by dmabuf).


class DmaBufView:
    """Dma-bufs by their pages; a page of several dma-bufs counts for the first."""

    def __init__(self, context: ScanContext) -> None:
        reader, losses = context.reader, context.losses
        files = context.owners.files(reader, losses)
        self._buffers = dma_bufs(reader, context.layout, files, losses)
        self._holders = holders_of(reader, self._buffers, losses)
        parts = [np.empty(0, np.uint64), *(each.pages for each in self._buffers)]
        lengths = [len(buffer.pages) for buffer in self._buffers]
        numbers = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.uint64), lengths)
        pfns, first = np.unique(np.concatenate(parts), return_index=True)
        self.observer = OwnedTally(pfns, numbers[first])

    def groups(self) -> tuple[PageGroup, ...]:
        ranking = rank(self.observer.tally.sums(), len(self._buffers) + 1)
        by_number = {int(owner.word): owner for owner in ranking.owners}
        groups: list[PageGroup] = []
        if rest := by_number.get(0):
            groups.append(
                DmaBufGroup(NO_OWNER, "in no dma-buf", rest.pages, rest.classes)
            )
        for number, buffer in enumerate(self._buffers, 1):
            owner = by_number.get(number)
            pages, classes = (0, {}) if owner is None else (owner.pages, owner.classes)
            holders = self._holders.get(buffer.address)
            groups.append(_group(buffer, holders, pages, classes))
        return largest_first(unique_keys(groups))


def _group(
    buffer: DmaBuf,
    holders: tuple[BufferHolder, ...] | None,
    pages: int,
    classes: dict[str, int],
) -> DmaBufGroup:
    words = buffer.exporter, buffer.name
    return DmaBufGroup(
        key=str(buffer.inode),
        name=" ".join(word for word in words if word),
        pages=pages,
        classes=classes,
        exporter=buffer.exporter,
        size_bytes=buffer.bytes,
        references=buffer.references,
        holders=holders,
        label=buffer.name,
        dma_buf=buffer.address,
    )
