# SPDX-License-Identifier: LGPL-2.1-or-later

"""The disks of file systems that wait for them in ways of their own: XFS and btrfs.

XFS waits for the I/O of a ``struct xfs_buf`` by a completion in it (fs/xfs/xfs_buf.c),
and for its log by queues of that (fs/xfs/xfs_log_priv.h). Super blocks of btrfs have no
block device: a file system may have several, in the list of its
``struct btrfs_fs_devices`` (fs/btrfs/volumes.h). It waits for a block of its trees by a
bit of its ``struct extent_buffer``, or for the folio of that, and for the log of files
by a queue of their tree (fs/btrfs/tree-log.c).
"""

from collections.abc import Iterator

from msatools.errors import LOST, UNREADABLE
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import LockContext
from msatools.locks.io.disks import Disk, all_disks
from msatools.locks.io.inflight import in_flight
from msatools.target.addresses import KERNEL_HALF

_XFS_LOG = (
    ("xlog_in_core", ("ic_force_wait", "ic_write_wait"), "ic_log"),
    ("xfs_cil", ("xc_push_wait", "xc_start_wait", "xc_commit_wait"), "xc_log"),
    ("xlog", ("l_flush_wait",), ""),
)
"""Wait queues of an XFS log, and the way to its ``struct xlog``."""

_BTRFS_LOG = ("log_writer_wait", "log_commit_wait[0]", "log_commit_wait[1]")
"""Wait queues of a ``struct btrfs_root``."""

_MAX_DEVICES = 64
"""Maximum number of devices of one btrfs."""


def disk_of_lock(context: LockContext, lock: Lock) -> Disk | None:
    """Return the disk of the block of a file system that a lock is in.

    :return: ``None`` if it is in no such block, or in one of a file system with several
        disks of which it is not known which has the I/O.
    """
    if not lock.address:
        return None
    try:
        if lock.type == "completion":
            return _of_xfs(context, lock.address)
        if lock.type == "bit_wait":
            return _of_btrfs(context, lock.address)
        if lock.type == "wait_queue":
            disks = (_of_xfs_log, _of_btrfs_log)
            found = (disk(context, lock.address) for disk in disks)
            return next((disk for disk in found if disk), None)
    except LOST:
        # Most are in no such structure, and what lies there leads nowhere.
        pass
    return None


def disk_of_super_block(context: LockContext, super_block: int) -> Disk | None:
    """Return the disk of a btrfs; of several, the one that has I/O in flight."""
    storage, layout = context.storage, context.layout
    try:
        if storage.file_system_type(super_block) != "btrfs":
            return None
        info = layout.member(super_block, "super_block", "s_fs_info")
        return _busy(context, list(_disks_of_btrfs(context, info)))
    except LOST:
        return None


def _of_xfs(context: LockContext, completion: int) -> Disk | None:
    layout = context.layout
    if not layout.has("xfs_buf", "b_iowait"):
        return None
    buffer = completion - layout.offset("xfs_buf", "b_iowait")
    target = layout.member(buffer, "xfs_buf", "b_target")
    return _of_device(context, layout.member(target, "xfs_buftarg", "bt_bdev"))


def _of_xfs_log(context: LockContext, queue: int) -> Disk | None:
    """Return the disk of the log that a queue is of, if I/O is in flight there."""
    layout = context.layout
    for name, members, way in _XFS_LOG:
        for member in members:
            if not layout.has(name, member):
                continue
            start = queue - layout.offset(name, member)
            try:
                log = layout.member(start, name, way) if way else start
            except UNREADABLE:  # it is not in that structure
                continue
            disk = _of_log(context, log)
            if disk is not None:
                return disk
    return None


def _of_log(context: LockContext, log: int) -> Disk | None:
    layout = context.layout
    try:
        cil, target = layout.members(log, "xlog", "l_cilp", "l_targ")
        if layout.member(cil, "xfs_cil", "xc_log") != log:
            return None
        device = layout.member(target, "xfs_buftarg", "bt_bdev")
    except UNREADABLE:  # it is no log
        return None
    disk = _of_device(context, device)
    return disk if disk and in_flight(context).has_io(disk) else None


def _of_btrfs_log(context: LockContext, queue: int) -> Disk | None:
    """Return the disk of the btrfs whose log of files a queue is of, if it has I/O."""
    layout = context.layout
    for member in _BTRFS_LOG:
        if not layout.has("btrfs_root", member.partition("[")[0]):
            continue
        root = queue - layout.offset("btrfs_root", member)
        try:
            info = layout.member(root, "btrfs_root", "fs_info")
            disks = list(_disks_of_btrfs(context, info))
        except UNREADABLE:  # it is no root of a tree
            continue
        busy = [disk for disk in disks if in_flight(context).has_io(disk)]
        if busy:
            return _busy(context, busy)
    return None


def _of_btrfs(context: LockContext, word: int) -> Disk | None:
    layout = context.layout
    if not layout.has("extent_buffer", "bflags"):
        return None
    buffer = word - layout.offset("extent_buffer", "bflags")
    info = layout.member(buffer, "extent_buffer", "fs_info")
    return _busy(context, list(_disks_of_btrfs(context, info)))


def _disks_of_btrfs(context: LockContext, info: int) -> Iterator[Disk]:
    """Yield the disks of a ``struct btrfs_fs_info``."""
    layout = context.layout
    devices = layout.member(info, "btrfs_fs_info", "fs_devices")
    head = devices + layout.offset("btrfs_fs_devices", "devices")
    node = layout.word(head)
    for _ in range(_MAX_DEVICES):
        if node in (0, head):
            return
        device = node - layout.offset("btrfs_device", "dev_list")
        disk = _of_device(context, layout.member(device, "btrfs_device", "bdev"))
        if disk is not None:
            yield disk
        node = layout.word(node)


def _of_device(context: LockContext, device: int) -> Disk | None:
    if device < KERNEL_HALF:
        return None
    disk = context.layout.member(device, "block_device", "bd_disk")
    return all_disks(context).by_address.get(disk)


def _busy(context: LockContext, disks: list[Disk]) -> Disk | None:
    """Return the only disk, or the only one that has I/O in flight."""
    if len(disks) > 1:
        disks = [disk for disk in disks if in_flight(context).has_io(disk)]
    return disks[0] if len(disks) == 1 else None
