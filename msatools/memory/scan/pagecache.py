# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classifies page-cache mappings: plain files, executed files, block devices."""

import stat
from collections import defaultdict

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, column, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_words, tree_records
from msatools.kernel.words import unsigned
from msatools.memory.pages.classes import PageClass
from msatools.memory.scan.result import ScanResult
from msatools.selfdesc.find import find_type, find_variable, member_of

_VM_EXEC = 0x4


class _Offsets(Struct, frozen=True):
    """Offsets of the members that are read."""

    i_mode: int
    i_data: int
    host: int
    i_mmap: int
    nrpages: int
    record: int
    """Bytes of ``struct inode`` to read, from its start."""

    rb: int
    """Offset of a VMA's node in its file's interval tree (i_mmap)."""

    vm_flags: int
    vma_record: int

    @classmethod
    def of(cls, prog: drgn.Program) -> "_Offsets":
        inode = find_type(prog, "struct inode")
        mapping = find_type(prog, "struct address_space")
        i_data = member_of(inode, "i_data").offset
        host = member_of(mapping, "host").offset
        i_mmap = member_of(mapping, "i_mmap").offset
        nrpages = member_of(mapping, "nrpages").offset
        vma = find_type(prog, "struct vm_area_struct")
        rb = member_of(vma, "shared").offset
        vm_flags = member_of(vma, "vm_flags").offset
        return cls(
            i_mode=member_of(inode, "i_mode").offset,
            i_data=i_data,
            host=host,
            i_mmap=i_mmap,
            nrpages=nrpages,
            record=max(
                member_of(inode, "i_mode").offset + 2,
                i_data + max(host, i_mmap, nrpages) + 8,
            ),
            rb=rb,
            vm_flags=vm_flags,
            vma_record=max(rb + 24, vm_flags + 8),
        )


def settle_cache(reader: Reader, result: ScanResult, losses: LossLog) -> None:
    """
    Move pages of executed files and block devices out of the class of plain files.

    A whole file counts as executed while a process maps part of it with permission to
    execute, as Solaris counts "exec and libs". The mappings come from the inode's
    i_mmap tree, so that the cost grows with the files in the page cache and not with
    the mappings of all processes.
    """
    mappings, keys, pages = result.cache.sum()
    unique, inverse = np.unique(mappings, return_inverse=True)
    cache = CacheClasses(reader)
    classes = cache.of(unique)
    for inode_losses in cache.take_losses().values():
        losses.add(inode_losses)
    for key in distinct(keys):
        for target in (PageClass.EXEC, PageClass.BLOCKDEV, PageClass.UNATTRIBUTED):
            chosen = (keys == key) & (classes[inverse] == target)
            result.move(int(key), PageClass.FILE, target, int(pages[chosen].sum()))


class CacheClasses:
    """Finds the classes of mappings from their inodes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._offsets = _Offsets.of(reader.prog)
        self._losses: dict[int, LossLog] = defaultdict(LossLog)

    def take_losses(self) -> dict[int, LossLog]:
        """Return and clear the losses by mapping."""
        losses, self._losses = self._losses, defaultdict(LossLog)
        return {mapping: losses[mapping] for mapping in sorted(losses)}

    def of(self, mappings: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        """Return the class of each mapping's pages; FILE if the inode is unreadable."""
        offsets = self._offsets
        classes = np.full(len(mappings), PageClass.FILE, np.uint8)
        inodes = mappings - np.uint64(offsets.i_data)
        records, readable = self._reader.read_records(inodes, offsets.record)
        for mapping in mappings[~readable].tolist():
            self._losses[mapping].lose(Loss.INODES)
        modes = column(records, offsets.i_mode, 2)
        hosts = column(records, offsets.i_data + offsets.host)
        roots = column(records, offsets.i_data + offsets.i_mmap)
        # Usually the mapping is its inode's i_data; a few file systems differ.
        for i in np.flatnonzero(readable & (hosts != inodes)):
            try:
                data = self._reader.read(int(hosts[i]) + offsets.i_mode, 2)
            except UNREADABLE:
                self._losses[int(mappings[i])].lose(Loss.INODES)
                continue
            modes[i] = int.from_bytes(data, "little")
        # perf sets the mapping of its ring buffers' pages to that of its file, which
        # has no page cache: these are kernel pages.
        counts = column(records, offsets.i_data + offsets.nrpages)
        classes[readable & (counts == 0)] = PageClass.UNATTRIBUTED
        block = stat.S_IFMT(0xFFFF) & modes == stat.S_IFBLK
        classes[block & (counts != 0)] = PageClass.BLOCKDEV
        for i in np.flatnonzero(readable & ~block & (roots != 0) & (counts != 0)):
            if self._is_executed(int(mappings[i])):
                classes[i] = PageClass.EXEC
        return classes

    def _is_executed(self, mapping: int) -> bool:
        """Return whether a file's i_mmap tree has an executable mapping."""
        losses = LossLog()
        vmas = tree_records(
            self._reader,
            mapping + self._offsets.i_mmap,
            self._offsets.rb,
            self._offsets.vma_record,
            losses,
            "a file's tree of mappings",
        )
        offset = self._offsets.vm_flags
        executed = any(unsigned(data, offset, 8) & _VM_EXEC for _, data in vmas)
        if losses.coverage:
            self._losses[mapping].add(losses)
        return executed


def blockdev_pages(reader: Reader, losses: LossLog) -> int | None:
    """
    Sum ``nrpages`` of all block devices; ``None`` if some are unreadable.

    The kernel computes ``Buffers`` of /proc/meminfo the same way (nr_blockdev_pages()
    in block/bdev.c).

    :raises MissingError: if the kernel has no block devices
    """
    prog = reader.prog
    inode = find_type(prog, "struct inode")
    nrpages = member_of(inode, "i_data").offset
    nrpages += member_of(find_type(prog, "struct address_space"), "nrpages").offset
    inodes = find_variable(prog, "blockdev_superblock").s_inodes.address_of_().value_()
    name = "the list of block devices"
    before = losses.about[name]
    node = member_of(inode, "i_sb_list").offset
    counts = list_words(reader, inodes, node, nrpages, losses, name)
    return sum(counts.tolist()) if losses.about[name] == before else None
