# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a piece of memory or a wait for data belongs to: an inode, a block device."""

import stat
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.report import Findings
from msatools.kernel.structs import read_structs
from msatools.locks.layout import Layout
from msatools.target.addresses import KERNEL_HALF

_INODE = {
    "mode": ("u2", ("i_mode",)),
    "super_block": ("u8", ("i_sb",)),
    "number": ("u8", ("i_ino",)),
}
_MINOR_BITS = 20
_MAPPING_FLAGS = 0b11
_ANONYMOUS = 0b1
_SWAP_TYPE_SHIFT = 58
"""Of the device's number in a swap entry (linux/swapops.h): 63 - 5 bits."""

_MAX_SWAP_FILES = 1 << 5
_MAX_RING = 128
"""Buffers of a page of 64 KiB, with blocks of 512 bytes."""

_NAME_BYTES = 32
"""DISK_NAME_LEN, which has room for any block device's name."""


@dataclass(frozen=True)
class Inode:
    """Some members of a ``struct inode``."""

    address: int
    number: int
    mode: int
    super_block: int


class Storage:
    """Tells inodes and devices; what it has read it keeps."""

    def __init__(self, layout: Layout, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self._devices: dict[int, str | None] = {}
        self._inodes: dict[int, Inode] = {}
        # "mm: Introduce struct folio" (in v5.16)
        self._page = "folio" if layout.has("folio", "mapping") else "page"

    def inode(self, address: int) -> Inode:
        """Read an inode.

        :raises drgn.FaultError: if it cannot be read
        """
        found = self._inodes.get(address)
        if found is None:
            mode, super_block, number = self._layout.members(
                address, "inode", "i_mode", "i_sb", "i_ino"
            )
            found = Inode(address, number, mode & 0xFFFF, super_block)
            self._inodes[address] = found
        return found

    def read_inodes(self, addresses: set[int]) -> None:
        """Read many inodes at once; what cannot be read is left out."""
        wanted = np.array(sorted(addresses - self._inodes.keys() - {0}), np.uint64)
        found = read_structs(
            self._layout.reader, "struct inode", _INODE, wanted, self._findings
        )
        for row in np.flatnonzero(found.readable).tolist():
            address = int(wanted[row])
            self._inodes[address] = Inode(
                address,
                int(found["number"][row]),
                int(found["mode"][row]),
                int(found["super_block"][row]),
            )

    def is_inode(self, address: int) -> bool:
        """Tell whether an inode is at an address: its own data knows it."""
        try:
            host = self._layout.member(address, "inode", "i_data.host")
            super_block = self._layout.member(address, "inode", "i_sb")
        except drgn.FaultError:
            return False
        return host == address and self.is_super_block(super_block)

    def is_super_block(self, address: int) -> bool:
        """Tell whether a file system is at an address: its root knows it."""
        try:
            root = self._layout.member(address, "super_block", "s_root")
            owner = self._layout.member(root, "dentry", "d_sb")
        except drgn.FaultError:
            return False
        return owner == address

    def device_of(self, inode: Inode) -> str | None:
        """Name the block device that an inode is, or is on; ``None`` if on none."""
        if stat.S_ISBLK(inode.mode):
            # That of the device's own data (block/bdev.c), not a node in /dev.
            within = self._layout.offset("bdev_inode", "vfs_inode")
            device = inode.address - within
            device += self._layout.offset("bdev_inode", "bdev")
        else:
            device = self._layout.member(inode.super_block, "super_block", "s_bdev")
        return self.device(device) if device >= KERNEL_HALF else None

    def device(self, address: int) -> str | None:
        """Name a ``struct block_device``: its name and numbers."""
        if address not in self._devices:
            try:
                self._devices[address] = self._name_device(address)
            except drgn.FaultError as error:
                self._findings.lose(Loss.DEVICES, f"a block device is lost: {error}")
                self._devices[address] = None
        return self._devices[address]

    def _name_device(self, address: int) -> str:
        numbers = self._layout.member(address, "block_device", "bd_dev", size=4)
        text = f"{numbers >> _MINOR_BITS}:{numbers & (1 << _MINOR_BITS) - 1}"
        # "block: merge struct block_device and struct hd_struct" (in v5.11)
        if not self._layout.has("block_device", "bd_device.kobj.name"):
            return text
        place = self._layout.member(address, "block_device", "bd_device.kobj.name")
        if place < KERNEL_HALF:
            return text
        data = self._layout.reader.read(place, _NAME_BYTES)
        name = data.partition(b"\0")[0].decode("utf-8", "backslashreplace")
        return f"{name} {text}"

    def host_of_folio(self, folio: int) -> Inode | None:
        """Find the inode that a page belongs to; ``None`` if to no file.

        :raises drgn.FaultError: if it cannot be read
        """
        mapping = self._layout.member(folio, self._page, "mapping")
        if mapping < KERNEL_HALF or mapping & _MAPPING_FLAGS:
            return None
        host = self._layout.member(mapping, "address_space", "host")
        return self.inode(host) if host >= KERNEL_HALF else None

    def swap_of_folio(self, folio: int) -> str | None:
        """Name the device that a page in the swap cache is swapped to.

        :raises drgn.FaultError: if it cannot be read
        """
        mapping, entry = self._layout.members(folio, self._page, "mapping", "private")
        if mapping and not mapping & _ANONYMOUS:
            return None
        number = entry >> _SWAP_TYPE_SHIFT
        if number >= _MAX_SWAP_FILES or not entry:
            return None
        swaps = self._layout.symbol("swap_info")
        if swaps is None:
            return None
        info = self._layout.word(swaps + 8 * number)
        if info < KERNEL_HALF:
            return None
        return self.device(self._layout.member(info, "swap_info_struct", "bdev"))

    def device_of_buffer(self, address: int) -> str | None:
        """Name the device of the ``struct buffer_head`` at an address.

        ``None`` if there is none: its page has to know it.

        :raises drgn.FaultError: if it cannot be read
        """
        names = ("b_this_page", ("b_folio", "b_page"), "b_bdev")
        following, page, device = self._layout.members(address, "buffer_head", *names)
        if min(following, page, device) < KERNEL_HALF:
            return None
        first = self._layout.member(page, self._page, "private")
        for _ in range(_MAX_RING):
            if first == address:
                return self.device(device)
            if following == address:
                return None
            if following == first:
                return self.device(device)
            following = self._layout.member(following, "buffer_head", "b_this_page")
        return None
