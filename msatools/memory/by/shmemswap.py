# SPDX-License-Identifier: LGPL-2.1-or-later

"""What file systems in memory have on swap (mm/shmem.c).

Each inode counts its pages on swap; no counter sums them up.
"""

import numpy as np

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.kernel.walks import list_nodes
from msatools.selfdesc.find import find_type, find_variable, offset_of

MAX_INODES = 1 << 22
"""Inodes that are looked at, of all file systems."""

_INFO = {"swapped": ("swapped",)}


def swapped_by_super_block(reader: Reader, losses: LossLog) -> dict[int, int | None]:
    """Return the pages on swap of each tmpfs, by the address of its super block.

    It is ``None`` if not all inodes could be read.

    The kernel's own tmpfs has memfds, System V segments and shared anonymous memory.

    :raises MissingError: if the kernel has no tmpfs (CONFIG_SHMEM=n)
    """
    prog = reader.prog
    operations = np.uint64(find_variable(prog, "shmem_ops").address_)
    type_ = find_type(prog, "struct super_block")
    head = find_variable(prog, "super_blocks").address_
    systems = list_nodes(reader, head, losses, "the list of file systems")
    systems -= np.uint64(offset_of(type_, "s_list"))
    found = read_structs(
        reader, "struct super_block", {"operations": ("s_op",)}, systems, losses
    )
    in_memory = found.readable & (found["operations"] == operations)
    inodes = offset_of(type_, "s_inodes")
    swapped: dict[int, int | None] = {}
    left = MAX_INODES
    for system in systems[in_memory].tolist():
        nodes = _list(reader, system + inodes, losses) if left > 0 else None
        swapped[system] = None if nodes is None else _swapped(reader, nodes, losses)
        left -= 0 if nodes is None else len(nodes)
    return swapped


def _list(reader: Reader, head: int, losses: LossLog) -> Addresses | None:
    """Return the inodes of a file system; ``None`` if their list breaks off."""
    aside = LossLog()
    nodes = list_nodes(reader, head, aside, "a list of inodes")
    losses.add(aside)
    return None if aside.lost else nodes


def _swapped(reader: Reader, nodes: Addresses, losses: LossLog) -> int | None:
    inode = find_type(reader.prog, "struct inode")
    info = find_type(reader.prog, "struct shmem_inode_info")
    node = offset_of(info, "vfs_inode") + offset_of(inode, "i_sb_list")
    infos = nodes - np.uint64(node)
    found = read_structs(reader, "struct shmem_inode_info", _INFO, infos, losses)
    return (
        int(found["swapped"].astype(np.int64).sum()) if found.readable.all() else None
    )
