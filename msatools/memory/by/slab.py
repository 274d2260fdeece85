# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Counts slab pages by cache (``--by slab``).

Full slabs are on no list of the allocator: they are found only in the memmap.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

import drgn
import numpy as np
from msgspec import Struct, field

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.slab import (
    SlabCache,
    merged_names,
    read_caches,
    slab_caches,
    slab_type,
)
from msatools.kernel.slab_free import free_in_use
from msatools.memory.by.compound import copy_to_tails
from msatools.memory.by.groups import (
    NO_OWNER,
    REST,
    PageGroup,
    SlabGroup,
    largest_first,
    unique_keys,
)
from msatools.memory.by.slabusers import (
    GENERAL,
    SlabContents,
    SlabSamples,
    SlabUsers,
)
from msatools.memory.by.tally import Tally, TallyOwner, TallySums, rank
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, where
from msatools.memory.scan.context import ScanContext
from msatools.selfdesc.find import member_of
from msatools.target.model import Address

_OBJECTS_MASK = np.uint64((1 << 31) - 1)
"""Mask of a slab's counters without the ``frozen`` bit."""


_LARGE = 0.01
"""Share of all pages from which on the objects of a general cache are looked into."""


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
    """Counts pages by ``struct kmem_cache`` and class, and slabs by objects."""

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
        """Yield the caches that have no slabs, which only the kernel's list has."""
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
        """Look into the objects of a general cache, if it is large."""
        context = self._context
        whole = sum(part.pages for part in context.ranges)
        if not cache.name.startswith(GENERAL) or owner.pages < _LARGE * whole:
            return None
        return self._contents.users(self.observer.samples.of(owner.word), cache.size)


def _other_names(
    cache: SlabCache, merged: Mapping[int, Sequence[str]]
) -> tuple[str, ...]:
    """Return the names of the caches that were merged into one."""
    return tuple(sorted({*merged.get(cache.address, ())} - {cache.name}))
