# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts page cache by file (``--by file``) and by file system (``--by fs``)."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
from msgspec import Struct, field

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.swap import read_swap
from msatools.memory.by.cachefiles import CachedFile, CachedFiles
from msatools.memory.by.compound import copy_to_tails
from msatools.memory.by.groups import (
    NO_OWNER,
    REST,
    FileGroup,
    FileSystemGroup,
    PageGroup,
    largest_first,
    unique_keys,
)
from msatools.memory.by.shmemswap import swapped_by_super_block
from msatools.memory.by.tally import OTHERS, Ranking, Tally, TallyOwner, rank, regroup
from msatools.memory.pages.classes import NCLASSES, PageClass
from msatools.memory.pages.classify import Block, Indices, Words, where
from msatools.memory.scan.context import ScanContext
from msatools.target.model import Address

MAX_FILES = 100_000
"""Maximum number of files to list, the largest."""

SWAP_CACHE, _UNREADABLE = 1, 2
"""Placeholders for a mapping or a file system."""

_UNMOUNTED = {"bdev": "block devices", "tmpfs": "shared memory without a path"}
"""Maps the type of an internal file system of the kernel to its name."""

_MAPPING_FLAGS = np.uint64(3)

_CACHED = np.zeros(NCLASSES, np.bool_)
_CACHED[
    [
        PageClass.FILE,
        PageClass.EXEC,
        PageClass.SHMEM,
        PageClass.BLOCKDEV,
        PageClass.USER_HUGETLB,
    ]
] = True


class MappingTally(Struct):
    """Counts pages by their ``struct address_space`` and class."""

    tally: Tally = field(default_factory=Tally)

    def observe(self, block: Block) -> None:
        self.tally.add(mappings_of(block), block.codes)

    def merge(self, later: "MappingTally") -> None:
        self.tally.merge(later.tally)


def mappings_of(block: Block) -> Words:
    """Return the mapping of each page; 0 if it is not cached."""
    mappings = block.mapping.copy()
    copy_to_tails(block, mappings)
    mappings[~_CACHED.take(block.codes)] = 0
    # Private pages of hugetlb are anonymous.
    mappings[mappings & _MAPPING_FLAGS != 0] = 0
    mappings[_in_swap_cache(block)] = SWAP_CACHE
    return mappings


def _in_swap_cache(block: Block) -> Indices:
    """Return the anonymous and shmem pages that are in the swap cache."""
    pages = where((block.codes == PageClass.ANON) | (block.codes == PageClass.SHMEM))
    heads = block.heads_of(pages)
    bits = np.uint64(block.layout.swapcache_bits)
    in_swap_cache: Indices = pages[block.flags[heads] & bits == bits]
    return in_swap_cache


class FileView:
    """Files by the pages of their page cache."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = MappingTally()
        self._files = CachedFiles(context.reader, context.losses)
        self._losses = context.losses

    def groups(self) -> tuple[PageGroup, ...]:
        ranking = rank(self.observer.tally.sums(), MAX_FILES, (0, SWAP_CACHE))
        owners = [owner for owner in ranking.owners if owner.word > SWAP_CACHE]
        mappings = np.array([owner.word for owner in owners], np.uint64)
        files = self._files.files(mappings)
        unreadable = sum(file is None for file in files)
        self._losses.lose(Loss.NAMES, count=unreadable)
        groups = [
            _file_group(owner, file) for owner, file in zip(owners, files, strict=True)
        ]
        groups += _other_groups(ranking, FileGroup)
        return largest_first(unique_keys(groups))


class FileSystemView:
    """File systems by the pages of their files' page cache."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = MappingTally()
        self._files = CachedFiles(context.reader, context.losses)
        self._losses = context.losses
        self._reader = context.reader

    def groups(self) -> tuple[PageGroup, ...]:
        sums = self.observer.tally.sums()
        mappings, index = np.unique(sums.owners, return_inverse=True)
        # Placeholders are not mappings: they stay as they are.
        are_files = (mappings > SWAP_CACHE) & (mappings != OTHERS)
        systems = mappings.copy()
        systems[are_files] = self._files.super_blocks(mappings[are_files])
        systems[are_files & (systems == 0)] = _UNREADABLE
        counts = Counter(systems[are_files].tolist())
        ranking = rank(regroup(sums, systems[index]), len(systems), (0, SWAP_CACHE))
        swapped = self._swapped()
        owners = [owner for owner in ranking.owners if owner.word > SWAP_CACHE]
        known = {owner.word for owner in owners}
        # All pages of these are on swap.
        owners += (
            TallyOwner(system, 0, {})
            for system, pages in swapped.items()
            if pages and system not in known
        )
        groups = [
            self._group(owner, counts[owner.word], swapped.get(owner.word))
            for owner in owners
        ]
        return largest_first(
            unique_keys([*groups, *_other_groups(ranking, FileSystemGroup)])
        )

    def _swapped(self) -> dict[int, int | None]:
        swap = read_swap(self._reader.prog)
        if swap.pages == swap.free_pages:
            return {}  # nothing is on swap
        try:
            return swapped_by_super_block(self._reader, self._losses)
        except MissingError:
            return {}
        except UNREADABLE as error:
            self._losses.lose(
                Loss.LISTS, f"cannot read file systems in memory: {error}"
            )
            return {}

    def _group(self, owner: TallyOwner, files: int, swapped: int | None) -> PageGroup:
        system = None
        if owner.word != _UNREADABLE:
            system = self._files.file_system(owner.word)
        if system is None:
            self._losses.lose(Loss.NAMES)
            name = "unreadable file systems"
            return _group(FileSystemGroup, f"{owner.word:#x}", name, owner)
        mounts = self._files.mount_points(system.address)
        return FileSystemGroup(
            key=system.number,
            name=mounts[0] if mounts else _UNMOUNTED.get(system.fstype, system.fstype),
            pages=owner.pages,
            classes=owner.classes,
            fstype=system.fstype,
            device=system.id,
            files=files,
            swap_pages=swapped,
            mounts=mounts,
            super_block=Address(system.address),
        )


def _file_group(owner: TallyOwner, file: CachedFile | None) -> PageGroup:
    if file is None:
        address = f"{owner.word:#x}"
        name = f"mapping {address}, whose inode is unreadable"
        return _group(FileGroup, address, name, owner)
    return FileGroup(
        key=file.key,
        name=file.name,
        pages=owner.pages,
        classes=owner.classes,
        kind=file.kind,
        mount=file.mount,
        fstype=file.fstype,
        device=file.device,
        path=file.path,
        inode=file.inode,
        deleted=file.deleted,
        size_bytes=file.size_bytes,
        mapping=Address(file.mapping),
    )


def _other_groups(ranking: Ranking, model: type[PageGroup]) -> Iterator[PageGroup]:
    names = {0: (NO_OWNER, "not of a file"), SWAP_CACHE: ("-swap", "swap cache")}
    for owner in ranking.owners:
        if owner.word in names:
            yield _group(model, *names[owner.word], owner)
    if ranking.rest is not None:
        count = "" if ranking.left_out is None else f"{ranking.left_out:,} "
        yield _group(model, REST, f"{count}smaller files", ranking.rest)


def _group(model: type[PageGroup], key: str, name: str, owner: TallyOwner) -> PageGroup:
    """Return a group without any of its type's own columns."""
    return model(key, name, owner.pages, owner.classes)
