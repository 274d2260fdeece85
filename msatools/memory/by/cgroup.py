# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Counts pages by the control group they are charged to (``--by cgroup``).

Removed groups are included: they live on while memory is charged to them, usually page
cache. The same scan finds the files of that page cache.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct, field

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses
from msatools.memory.by.cachefiles import CachedFiles
from msatools.memory.by.cgrouptree import UNKNOWN, own_charges, read_tree
from msatools.memory.by.compound import copy_to_tails, far_heads
from msatools.memory.by.file import SWAP_CACHE, mappings_of
from msatools.memory.by.groups import (
    NO_OWNER,
    REST,
    CgroupGroup,
    PageGroup,
    PinningFile,
    unique_keys,
)
from msatools.memory.by.memcgs import MEMCG_DATA_OBJEXTS, Memcg, Memcgs, charge_offset
from msatools.memory.by.tally import Tally, TallyOwner, TallySums, rank, regroup
from msatools.memory.owners.stacks import charged_stack_pages
from msatools.memory.pages.classes import NCLASSES, PageClass
from msatools.memory.pages.classify import Block, Words, where
from msatools.memory.scan.context import ScanContext
from msatools.reports.units import size
from msatools.target.model import Address

MAX_GROUPS = 100_000
"""Maximum number of control groups to list, the largest."""

MAX_PINNED = 1000
"""Maximum number of removed groups, the largest, to list pinning files for."""

PINS = 5
"""Maximum number of pinning files to list for a removed group."""

_PER_OBJECT, _UNREADABLE = 1, 2
"""Placeholders for a control group: slabs charged per object; unreadable groups."""

_FAR = np.uint64(4)
"""Flag on the address of a head page, whose charge word is read after the scan."""

_CHARGED = np.ones(NCLASSES, np.bool_)
_CHARGED[
    [
        PageClass.FREE_BUDDY,
        PageClass.FREE_PCP,
        PageClass.FREE_HUGETLB,
        PageClass.FREE_UNACCEPTED,
        PageClass.RESERVED,
        PageClass.OFFLINE,
        PageClass.DEVICE,
        PageClass.MEMMAP,
        PageClass.HWPOISON,
        PageClass.EXCLUDED,
        PageClass.UNREADABLE,
    ]
] = False


class ChargeTally(Struct):
    """Counts pages by their charge word (``page->memcg_data``)."""

    offset: int | None
    """Offset of the charge word in ``struct page``; ``None`` with CONFIG_MEMCG=n."""

    stack_pages: int = 1
    """Pages of a kernel stack of which only the first has the charge word."""

    by_class: Tally = field(default_factory=Tally)
    by_mapping: Tally = field(default_factory=Tally)
    """Pages of files by charge word and mapping."""

    def observe(self, block: Block) -> None:
        words = self._words(block)
        self.by_class.add(words, block.codes)
        mappings = mappings_of(block)
        pages = where((mappings > SWAP_CACHE) & (words != 0))
        self.by_mapping.add(words[pages], mappings[pages])

    def merge(self, later: "ChargeTally") -> None:
        self.by_class.merge(later.by_class)
        self.by_mapping.merge(later.by_mapping)

    def _words(self, block: Block) -> Words:
        if self.offset is None:
            return np.zeros(len(block), np.uint64)
        words: Words = block.column(self.offset).copy()
        far = copy_to_tails(block, words)
        if len(far):
            words[far] = far_heads(block, far) | _FAR
        words[~_CHARGED.take(block.codes)] = 0
        slabs = where(block.codes == PageClass.SLAB)
        words[slabs] &= MEMCG_DATA_OBJEXTS
        if self.stack_pages > 1:
            stacks = where(block.codes == PageClass.STACKS)
            # Pages that are allocated together are aligned to their number.
            behind = (stacks + block.pfn) % self.stack_pages
            words[stacks] = words[np.maximum(stacks - behind, 0)]
        return words


class _Pins(Struct, frozen=True):
    """The page cache charged to a removed group."""

    largest: list[PinningFile]
    files: int


class _Charges(Struct, frozen=True):
    """Pages by the counters of a group; ``None`` if unknown."""

    memory: int | None = None
    swap: int | None = None


class CgroupView:
    """Control groups by the pages charged to them."""

    def __init__(self, context: ScanContext) -> None:
        prog = context.prog
        self.observer = ChargeTally(charge_offset(prog), charged_stack_pages(prog))
        self._losses = context.losses
        self._memcgs = Memcgs(context.reader, context.losses)
        self._files = CachedFiles(context.reader, context.losses)
        self._reader = context.reader
        self._page_size = context.page_size

    def groups(self) -> tuple[PageGroup, ...]:
        sums = self._by_group(self.observer.by_class.sums())
        ranking = rank(sums, MAX_GROUPS, (0, _PER_OBJECT))
        owners = {owner.word: owner for owner in ranking.owners}
        charges = self._charges()
        found = [word for word in owners if word > _UNREADABLE]
        if ranking.rest is None:
            found += sorted(charges.keys() - owners.keys())
        memcgs = self._memcgs.groups(np.array(found, np.uint64))
        pins = self._pins([memcg.address for memcg in memcgs if memcg.dying])
        found_groups = [
            _cgroup(
                owners.get(memcg.address, TallyOwner(memcg.address, 0, {})),
                memcg,
                pins.get(memcg.address),
                charges.get(memcg.address, _Charges()),
            )
            for memcg in memcgs
        ]
        self._note_removed(found_groups)
        groups: list[PageGroup] = [*found_groups]
        groups += self._placeholder_groups(ranking.owners)
        if ranking.rest is not None:
            groups.append(_group(REST, "smaller groups", ranking.rest))
        return tuple(sorted(unique_keys(groups), key=_with_swap))

    def _charges(self) -> dict[int, "_Charges"]:
        """Read what all groups of the tree are charged, by address."""
        try:
            tree = read_tree(self._reader, self._losses, MAX_GROUPS)
            charges = own_charges(self._reader, tree, self._losses)
        except MissingError:
            return {}  # CONFIG_MEMCG=n
        except UNREADABLE as error:
            self._losses.lose(Loss.LISTS, f"cannot read control groups: {error}")
            return {}
        return {
            address: _Charges(_known(memory), _known(swap))
            for address, memory, swap in zip(
                tree.addresses.tolist(),
                charges.memory.tolist(),
                charges.swap.tolist(),
                strict=True,
            )
        }

    def _by_group(self, sums: TallySums) -> TallySums:
        """Convert sums by charge word to sums by ``struct mem_cgroup``."""
        words, index = np.unique(sums.owners, return_inverse=True)
        charged = words > _PER_OBJECT
        groups = words.copy()
        groups[charged] = self._resolve(words[charged])
        return regroup(sums, groups[index])

    def _resolve(self, words: Addresses) -> Addresses:
        if not len(words):
            # As with CONFIG_MEMCG=n, where pages have no such word.
            return words
        far = words & _FAR != 0
        words = words.copy()
        words[far] = self._memcgs.of_pages(words[far] - _FAR)
        groups = self._memcgs.resolve(words)
        # A compound page larger than a block may be charged to no group, too.
        groups[(groups == 0) & (words != 0)] = _UNREADABLE
        return groups

    def _pins(self, dying: list[int]) -> dict[int, _Pins]:
        """Find the files whose page cache is charged to removed groups."""
        sums = self._by_group(self.observer.by_mapping.sums())
        pins: dict[int, _Pins] = {}
        rows: dict[int, list[int]] = {}
        for group in dying[:MAX_PINNED]:
            ends = np.array((group, group + 1), np.uint64)
            first, end = np.searchsorted(sums.owners, ends).tolist()
            largest = np.argsort(-sums.pages[first:end], kind="stable")[:PINS]
            rows[group] = (first + largest).tolist()
            pins[group] = _Pins([], end - first)
        chosen = [row for group in rows for row in rows[group]]
        files = iter(self._files.files(sums.kinds[chosen]))
        for group, its_rows in rows.items():
            for row in its_rows:
                file = next(files)
                if file is not None:
                    pages = int(sums.pages[row])
                    pins[group].largest.append(PinningFile(file.key, file.name, pages))
        return pins

    def _note_removed(self, groups: Iterable[CgroupGroup]) -> None:
        dying = [group for group in groups if group.dying]
        empty = [group for group in dying if not group.pages]
        # Those without memory's controller are not in its tree.
        removed = max(self._memcgs.removed() or 0, len(dying))
        without = removed - len(dying) + len(empty)
        if not without:
            return
        swapped = sum(group.swap_pages or 0 for group in empty) * self._page_size
        on_swap = f", with {size(swapped)} on swap" if swapped else ""
        self._losses.note(
            "removed-cgroups",
            f"{removed:,} removed control groups live on, {without:,} of them without "
            f"a page of their own{on_swap}",
        )

    def _placeholder_groups(
        self, owners: tuple[TallyOwner, ...]
    ) -> Iterator[PageGroup]:
        for owner in owners:
            if owner.word == 0:
                yield _group(NO_OWNER, "not charged", owner)
            elif owner.word == _UNREADABLE:
                self._losses.lose(Loss.NAMES)
                yield _group("-lost", "groups that cannot be read", owner)
            elif owner.word == _PER_OBJECT:
                yield _group("-slab", "slabs, charged object by object", owner)
                self._losses.note(
                    "slab-charges",
                    f"{owner.pages:,} slab pages are charged to control groups object "
                    "by object, which is not split up",
                )


def _with_swap(group: PageGroup) -> tuple[int, str]:
    swap = group.swap_pages if isinstance(group, CgroupGroup) else None
    return (-group.pages - (swap or 0), group.key)


def _known(pages: int) -> int | None:
    return None if pages == UNKNOWN else pages


def _cgroup(
    owner: TallyOwner, memcg: Memcg, pins: _Pins | None, charges: _Charges
) -> CgroupGroup:
    return CgroupGroup(
        key=str(memcg.id),
        name=memcg.path or "lost",
        pages=owner.pages,
        classes=owner.classes,
        dying=memcg.dying,
        swap_pages=charges.swap,
        charged_pages=charges.memory,
        pinned_by=tuple(pins.largest) if pins else None,
        files=pins.files if pins else None,
        mem_cgroup=Address(memcg.address),
    )


def _group(key: str, name: str, owner: TallyOwner) -> PageGroup:
    return CgroupGroup(key, name, owner.pages, owner.classes)
