# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the mappings of page-cache pages belong to: files, code, block devices."""

import stat
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader, column
from msatools.kernel.report import Findings
from msatools.kernel.walks import list_records
from msatools.memory.classes import PageClass
from msatools.memory.scan import ScanResult

_VM_EXEC = 0x4
_MAX_VMAS = 1 << 20
"""Of one file: more than the mappings a machine can have at its default limits."""


@dataclass(frozen=True)
class _Offsets:
    """Where the few members that matter lie."""

    i_mode: int
    i_data: int
    host: int
    i_mmap: int
    record: int
    """Bytes of ``struct inode`` to read, from its start."""

    rb: int
    """Of a VMA's node in its file's interval tree."""

    vm_flags: int
    vma_record: int

    @classmethod
    def of(cls, prog: drgn.Program) -> "_Offsets":
        inode = prog.type("struct inode")
        mapping = prog.type("struct address_space")
        i_data = inode.member("i_data").offset
        host = mapping.member("host").offset
        i_mmap = mapping.member("i_mmap").offset
        vma = prog.type("struct vm_area_struct")
        rb = vma.member("shared").offset
        vm_flags = vma.member("vm_flags").offset
        return cls(
            i_mode=inode.member("i_mode").offset,
            i_data=i_data,
            host=host,
            i_mmap=i_mmap,
            record=max(
                inode.member("i_mode").offset + 2, i_data + max(host, i_mmap) + 8
            ),
            rb=rb,
            vm_flags=vm_flags,
            vma_record=max(rb + 24, vm_flags + 8),
        )


def settle_cache(reader: Reader, result: ScanResult, findings: Findings) -> None:
    """
    Move executed files and block devices out of the class of plain files.

    A file counts as executed, as a whole, while some process maps part of it
    with permission to execute, as Solaris counts "exec and libs". Its mappings
    are found through the inode's own tree of them, so that the cost grows with
    the files in the page cache and not with all mappings of all processes.
    """
    mappings, keys, pages = result.cache.sum()
    unique, inverse = np.unique(mappings, return_inverse=True)
    classes = _classes_of(reader, unique, findings)
    for key in np.unique(keys):
        for target in (PageClass.EXEC, PageClass.BLOCKDEV):
            chosen = (keys == key) & (classes[inverse] == target)
            result.move(int(key), PageClass.FILE, target, int(pages[chosen].sum()))


def _classes_of(
    reader: Reader, mappings: npt.NDArray[np.uint64], findings: Findings
) -> npt.NDArray[np.uint8]:
    offsets = _Offsets.of(reader.prog)
    classes = np.full(len(mappings), PageClass.FILE, np.uint8)
    inodes = mappings - np.uint64(offsets.i_data)
    records, readable = reader.read_records(inodes, offsets.record)
    findings.coverage["inodes_unreadable"] += int(np.count_nonzero(~readable))
    modes = column(records, offsets.i_mode, 2)
    hosts = column(records, offsets.i_data + offsets.host)
    roots = column(records, offsets.i_data + offsets.i_mmap)
    # The mapping is its inode's own, but for few file systems.
    for i in np.flatnonzero(readable & (hosts != inodes)):
        modes[i] = _mode(reader, int(hosts[i]) + offsets.i_mode)
    block = stat.S_IFMT(0xFFFF) & modes == stat.S_IFBLK
    classes[block] = PageClass.BLOCKDEV
    for i in np.flatnonzero(readable & ~block & (roots != 0)):
        if _is_executed(reader, offsets, int(roots[i]), findings):
            classes[i] = PageClass.EXEC
    lost = [findings.coverage[k] for k in ("inodes_unreadable", "vmas_unreadable")]
    if any(lost):
        findings.note(
            "files-unclear",
            f"{lost[0]:,} inodes and {lost[1]:,} mappings of files cannot be read: "
            "pages counted as file may be exec or block devices",
        )
    return classes


def _mode(reader: Reader, address: int) -> int:
    try:
        return int.from_bytes(reader.read(address, 2), "little")
    except drgn.FaultError:
        return 0


def _is_executed(
    reader: Reader, offsets: _Offsets, root: int, findings: Findings
) -> bool:
    """Search a file's tree of mappings for one that may be executed."""
    todo = [root]
    seen = 0
    while todo and seen < _MAX_VMAS:
        node = todo.pop()
        seen += 1
        try:
            data = reader.read(node - offsets.rb, offsets.vma_record)
        except drgn.FaultError:
            findings.coverage["vmas_unreadable"] += 1
            continue
        flags = int.from_bytes(data[offsets.vm_flags : offsets.vm_flags + 8], "little")
        if flags & _VM_EXEC:
            return True
        # struct rb_node: colour and parent, right, left.
        right, left = np.frombuffer(data, "<u8", 2, offsets.rb + 8).tolist()
        todo += [child for child in (right, left) if child]
    if todo:
        findings.note("vma-tree-broken", "a file's tree of mappings does not end")
    return False


def blockdev_pages(reader: Reader, findings: Findings) -> int | None:
    """
    Sum the pages that block devices say their caches hold.

    This is how the kernel makes ``Buffers`` of /proc/meminfo
    (nr_blockdev_pages() of block/bdev.c).
    """
    prog = reader.prog
    inode = prog.type("struct inode")
    nrpages = inode.member("i_data").offset
    nrpages += prog.type("struct address_space").member("nrpages").offset
    try:
        inodes = prog["blockdev_superblock"].s_inodes.address_of_().value_()
    except (LookupError, drgn.FaultError):
        return None
    return sum(
        int.from_bytes(data[nrpages : nrpages + 8], "little")
        for _, data in list_records(
            reader,
            inodes,
            inode.member("i_sb_list").offset,
            nrpages + 8,
            findings,
            "the list of block devices",
        )
    )
