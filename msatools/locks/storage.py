# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the inode, block device or file system of data in memory; reads sockets."""

import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.files import device_number
from msatools.kernel.reader import Addresses, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    MAPPING_ANON,
    MAPPING_FLAGS,
    SWAP_TYPE_SHIFT,
    Members,
    WordArray,
    read_structs,
)
from msatools.locks.struct_reader import Layout
from msatools.program.linear import KERNEL_HALF

# --- Finds the inode, block device or file system that data in memory belongs to.


_INODE = {
    "mode": ("i_mode",),
    "super_block": ("i_sb",),
    "number": ("i_ino",),
}
_MAX_SUPER_BLOCKS = 1 << 16
_MAX_SWAP_FILES = 1 << 5
_MAX_RING = 128
"""Maximum number of buffers of a page: 64 KiB in blocks of 512 bytes."""

_MAX_NAME = 255
"""Maximum length of the name of a block device (DISK_NAME_LEN) or file system type."""


class Inode(Struct, frozen=True):
    """Some members of a ``struct inode``."""

    address: int
    number: int
    mode: int
    super_block: int


class Storage:
    """Finds inodes and devices; reads each once."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses
        self._devices: dict[int, str | None] = {}
        self._file_systems: dict[int, str | None] = {}
        self._inodes: dict[int, Inode] = {}
        # "mm: Introduce struct folio" (in v5.16)
        self._page = "folio" if layout.has("folio", "mapping") else "page"

    def inode(self, address: int) -> Inode:
        """Read an inode.

        :raises drgn.FaultError: if it cannot be read
        """
        inode = self._inodes.get(address)
        if inode is None:
            mode, super_block, number = self._layout.members(
                address, "inode", "i_mode", "i_sb", "i_ino"
            )
            inode = Inode(address, number, mode, super_block)
            self._inodes[address] = inode
        return inode

    def read_inodes(self, addresses: set[int]) -> None:
        """Read many inodes at once; skip those that cannot be read."""
        wanted = np.array(sorted(addresses - self._inodes.keys() - {0}), np.uint64)
        inodes = read_structs(
            self._layout.reader, "struct inode", _INODE, wanted, self._losses
        )
        for row in np.flatnonzero(inodes.readable).tolist():
            address = int(wanted[row])
            self._inodes[address] = Inode(
                address,
                int(inodes["number"][row]),
                int(inodes["mode"][row]),
                int(inodes["super_block"][row]),
            )

    def is_inode(self, address: int) -> bool:
        """Return whether an inode is at an address: ``i_data.host`` points back."""
        try:
            host = self._layout.member(address, "inode", "i_data.host")
            super_block = self._layout.member(address, "inode", "i_sb")
        except UNREADABLE:
            return False
        return host == address and self.is_super_block(super_block)

    def is_super_block(self, address: int) -> bool:
        """Return whether a super block is at an address: its root points back."""
        try:
            root = self._layout.member(address, "super_block", "s_root")
            owner = self._layout.member(root, "dentry", "d_sb")
        except UNREADABLE:
            return False
        return owner == address

    def is_data_of_device(self, inode: Inode) -> bool:
        """Return whether an inode is in the bdev file system, not a node in /dev."""
        if not stat.S_ISBLK(inode.mode):
            return False
        return self.file_system_type(inode.super_block) == "bdev"

    def host_of_file(self, file: int) -> Inode:
        """Return the inode that has the data of a ``struct file``.

        For a block device it is the one in the bdev file system, not the node in /dev.

        :raises drgn.FaultError: if it cannot be read
        """
        mapping = self._layout.member(file, "file", "f_mapping")
        return self.inode(self._layout.member(mapping, "address_space", "host"))

    def file_system_type(self, super_block: int) -> str:
        """Return the type of a file system: see :func:`file_system_type`."""
        return file_system_type(self._layout, super_block)

    def file_system_of(self, inode: Inode) -> str | None:
        """Return the name of a file system without block device.

        :return: Its type, and ``s_id`` if that differs: ``tmpfs``, ``btrfs sda1``.
            ``None`` if it has a block device, if the inode is that of a block device,
            or if it cannot be read.
        """
        super_block = inode.super_block
        if self.is_data_of_device(inode):
            return None
        if super_block not in self._file_systems:
            try:
                name = self._name_file_system(super_block)
            except UNREADABLE as error:
                self._losses.lose(
                    Loss.FILE_SYSTEMS, f"cannot read a file system: {error}"
                )
                name = None
            self._file_systems[super_block] = name
        return self._file_systems[super_block]

    def _name_file_system(self, super_block: int) -> str | None:
        device = self._layout.member(super_block, "super_block", "s_bdev")
        if device >= KERNEL_HALF:
            return None
        kind = self.file_system_type(super_block)
        name = self._layout.text(super_block, "super_block", "s_id")
        return kind if name in ("", kind) else f"{kind} {name}"

    def device_of(self, inode: Inode) -> str | None:
        """Return the name of an inode's block device; ``None`` if it has none.

        :raises drgn.FaultError: if the super block cannot be read
        """
        if self.is_data_of_device(inode):
            # BDEV_I() (block/bdev.c)
            device = inode.address - self._layout.offset("bdev_inode", "vfs_inode")
            device += self._layout.offset("bdev_inode", "bdev")
        else:
            device = self._layout.member(inode.super_block, "super_block", "s_bdev")
        return self.device(device) if device >= KERNEL_HALF else None

    def device(self, address: int) -> str | None:
        """Return the name and numbers of a ``struct block_device``, as ``vda 254:0``.

        :return: ``None`` if it cannot be read.
        """
        if address not in self._devices:
            try:
                self._devices[address] = self._name_device(address)
            except UNREADABLE as error:
                self._losses.lose(Loss.DEVICES, f"cannot read a block device: {error}")
                self._devices[address] = None
        return self._devices[address]

    def _name_device(self, address: int) -> str:
        numbers = self._layout.member(address, "block_device", "bd_dev")
        text = device_number(numbers)
        # "block: merge struct block_device and struct hd_struct" (in v5.11)
        if not self._layout.has("block_device", "bd_device.kobj.name"):
            name = self._disk_and_partition(address)
            return f"{name} {text}" if name else text
        pointer = self._layout.member(address, "block_device", "bd_device.kobj.name")
        if pointer < KERNEL_HALF:
            return text
        return f"{read_string(self._layout.reader, pointer, _MAX_NAME)} {text}"

    def _disk_and_partition(self, device: int) -> str | None:
        """Return the name of a device as disk_name() does (block/genhd.c, v5.10)."""
        disk = self._layout.member(device, "block_device", "bd_disk")
        if disk < KERNEL_HALF:
            return None
        number = self._layout.member(device, "block_device", "bd_partno")
        name = self._layout.text(disk, "gendisk", "disk_name")
        if not number:
            return name
        return f"{name}{'p' if name[-1:].isdigit() else ''}{number}"

    def host_of_folio(self, folio: int) -> Inode | None:
        """Return the inode that a page belongs to; ``None`` if it is of no file.

        :raises drgn.FaultError: if it cannot be read
        """
        mapping = self._layout.member(folio, self._page, "mapping")
        if mapping < KERNEL_HALF or mapping & MAPPING_FLAGS:
            return None
        host = self._layout.member(mapping, "address_space", "host")
        return self.inode(host) if host >= KERNEL_HALF else None

    def swap_of_folio(self, folio: int) -> str | None:
        """Return the name of the swap device of a page; ``None`` if it has none.

        :raises drgn.FaultError: if it cannot be read
        """
        mapping, entry = self._layout.members(folio, self._page, "mapping", "private")
        if mapping and not mapping & MAPPING_ANON:
            return None
        swap_type = entry >> SWAP_TYPE_SHIFT
        if swap_type >= _MAX_SWAP_FILES or not entry:
            return None
        swaps = self._layout.symbol("swap_info")
        if swaps is None:
            return None
        info = self._layout.word(swaps + 8 * swap_type)
        if info < KERNEL_HALF:
            return None
        return self.device(self._layout.member(info, "swap_info_struct", "bdev"))

    def device_of_buffer(self, address: int) -> str | None:
        """Return the name of the device of a ``struct buffer_head``.

        :return: ``None`` if the address is not that of a buffer: the buffers of its
            page do not include it.
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


def file_system_type(layout: Layout, super_block: int) -> str:
    """Return the type of a file system, as in /proc/filesystems.

    :raises drgn.FaultError: if it cannot be read
    """
    kind = layout.member(super_block, "super_block", "s_type")
    name = layout.member(kind, "file_system_type", "name")
    return read_string(layout.reader, name, _MAX_NAME)


def super_blocks(layout: Layout) -> Iterator[int]:
    """Yield the addresses of all super blocks.

    :raises MissingError: if the kernel's list is unknown
    :raises drgn.FaultError: if it cannot be read to its end
    """
    head = layout.symbol("super_blocks")
    if head is None:
        raise MissingError("there is no super_blocks")
    within = layout.offset("super_block", "s_list")
    node = layout.word(head)
    for _ in range(_MAX_SUPER_BLOCKS):
        if node == head:
            return
        if node < KERNEL_HALF:
            break
        yield node - within
        node = layout.word(node)
    raise DamagedDataError("their list leads nowhere", node)


# --- Reads sockets: type, local address and peer.
#
# include/net/sock.h, inet_sock.h and af_unix.h.


_SOCKET = {"sock": ("sk",), "type": ("type",)}
_COMMON = "__sk_common."
_SOCK: Members = {
    "family": (f"{_COMMON}skc_family",),
    "protocol": ("sk_protocol",),
    "peer": (f"{_COMMON}skc_daddr",),
    "local": (f"{_COMMON}skc_rcv_saddr",),
    "peer_port": (f"{_COMMON}skc_dport",),
    "port": (f"{_COMMON}skc_num",),
    "peer6": WordArray((f"{_COMMON}skc_v6_daddr",)),
    "local6": WordArray((f"{_COMMON}skc_v6_rcv_saddr",)),
}
_UNIX, _INET, _INET6 = 1, 2, 10
_FAMILIES = {16: "netlink", 17: "packet", 40: "vsock", 31: "bluetooth", 38: "alg"}
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp", 132: "sctp", 262: "mptcp"}
_TYPES = {1: "stream", 2: "dgram", 3: "raw", 5: "seqpacket"}
_MAX_PATH = 108


class Endpoints(Struct, frozen=True):
    """The type, the local address and the peer of a socket."""

    type: str
    local: str | None
    peer: str | None


class Sockets:
    """Reads sockets."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    def read(self, sockets: Addresses) -> list[Endpoints | None]:
        """Read many ``struct socket``; ``None`` for those that cannot be read."""
        reader, losses = self._layout.reader, self._losses
        outer = read_structs(reader, "struct socket", _SOCKET, sockets, losses)
        socks = outer["sock"].astype(np.uint64)
        inner = read_structs(reader, "struct sock", _SOCK, socks, losses)
        found: list[Endpoints | None] = []
        for row, address in enumerate(socks.tolist()):
            if not (outer.readable[row] and inner.readable[row]):
                found.append(None)
                continue
            values = {name: inner[name][row] for name in inner.columns}
            found.append(self._endpoints(address, int(outer["type"][row]), values))
        return found

    def _endpoints(self, sock: int, kind: int, values: dict[str, Any]) -> Endpoints:
        family = int(values["family"])
        form = _TYPES.get(kind, str(kind))
        if family == _UNIX:
            return self._unix(sock, form)
        if family not in (_INET, _INET6):
            return Endpoints(_FAMILIES.get(family, f"family {family}"), None, None)
        protocol = int(values["protocol"])
        # A raw socket is named by its type: any protocol may have raw sockets.
        name = _PROTOCOLS.get(protocol, form) if form != "raw" else form
        local, peer = values["local"], values["peer"]
        ends = [_ipv4(local), _ipv4(peer)]
        if family == _INET6:
            name += "6"
            ends = [_ipv6(values.get("local6")), _ipv6(values.get("peer6"))]
        ports = int(values["port"]), socket.ntohs(int(values["peer_port"]))
        texts = [
            f"{end}:{port}" if end is not None and port else None
            for end, port in zip(ends, ports, strict=True)
        ]
        return Endpoints(name, texts[0], texts[1])

    def _unix(self, sock: int, form: str) -> Endpoints:
        local = self._unix_name(sock)
        peer = None
        try:
            other = self._layout.member(sock, "unix_sock", "peer")
            peer = self._unix_name(other) if other >= KERNEL_HALF else None
        except LOST:
            pass
        return Endpoints(f"unix {form}", local, peer)

    def _unix_name(self, sock: int) -> str | None:
        """Read the name that a socket is bound to; an abstract one begins with @."""
        try:
            address = self._layout.member(sock, "unix_sock", "addr")
            if address < KERNEL_HALF:
                return None
            length = self._layout.member(address, "unix_address", "len")
            start = address + self._layout.offset("unix_address", "name")
            size = min(max(length - 2, 0), _MAX_PATH)
            # The path follows sun_family in struct sockaddr_un.
            data = self._layout.reader.read(start + 2, size)
        except LOST:
            return None
        name, _, abstract = data.partition(b"\0")
        data = name if name or not abstract else b"@" + abstract
        return data.decode("utf-8", "backslashreplace") or None


def _ipv4(value: Any) -> str | None:
    return socket.inet_ntoa(struct.pack("<I", int(value)))


def _ipv6(value: Any) -> str | None:
    if not isinstance(value, np.ndarray):
        return None
    return f"[{socket.inet_ntop(socket.AF_INET6, value.tobytes())}]"
