# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the server of a network block device, if it is a process of this machine.

drivers/block/nbd.c: the device sends its requests through sockets that a program gave
it. What has the other end open serves the device: a socket of AF_UNIX has its peer, and
one of TCP has the addresses and ports of both ends, which the peer has the other way
round. A server that no process here is has at least its address.
"""

from functools import cached_property

import numpy as np

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, distinct
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.sockets import Sockets
from msatools.locks.io.disks import Disk
from msatools.target.addresses import KERNEL_HALF

_AF_UNIX = 1
_MAPPED = "::ffff:"
"""How an address of IPv4 begins as one of IPv6, as a server has it that takes both."""
_MAX_CONNECTIONS = 64
_MAX_SERVERS = 16


class NbdServers:
    """The servers of network block devices, each found once per context."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._found: dict[int, tuple[Holder, ...]] = {}

    def of_disk(self, disk: Disk) -> tuple[Holder, ...]:
        """Return the tasks that have the other end of a device's sockets open."""
        if not disk.name.startswith("nbd"):
            return ()
        if disk.address not in self._found:
            try:
                sockets = self._sockets(disk)
                files = [*self._unix_peers(sockets), *self._tcp_peers(sockets)]
                openers = self._openers if files else {}
                tasks = dict.fromkeys(
                    task for file in files for task in openers.get(file, ())
                )
                self._found[disk.address] = tuple(
                    Holder(task, "likely") for task in [*tasks][:_MAX_SERVERS]
                )
            except LOST as error:
                text = f"cannot read the server of {disk.name}: {error}"
                self._context.losses.lose(Loss.SERVERS, text)
                self._found[disk.address] = ()
        return self._found[disk.address]

    def addresses(self, disk: Disk) -> tuple[str, ...]:
        """Return the addresses of a device's servers by TCP: ``10.0.0.1:10809``."""
        if not disk.name.startswith("nbd"):
            return ()
        try:
            ends = self._ends(self._sockets(disk))
        except LOST as error:
            text = f"cannot read the server of {disk.name}: {error}"
            self._context.losses.lose(Loss.SERVERS, text)
            return ()
        return tuple(dict.fromkeys(peer for _, peer in ends))

    def _sockets(self, disk: Disk) -> list[int]:
        """Return each ``struct socket`` of a device."""
        layout = self._context.layout
        config = layout.member(disk.private, "nbd_device", "config")
        if config < KERNEL_HALF:
            return []
        sockets, count = layout.members(
            config, "nbd_config", "socks", "num_connections"
        )
        connections = (
            layout.word(sockets + 8 * number)
            for number in range(min(count, _MAX_CONNECTIONS))
        )
        return [layout.member(each, "nbd_sock", "sock") for each in connections]

    def _unix_peers(self, sockets: list[int]) -> list[int]:
        """Return the ``struct file`` of the other end of each socket of AF_UNIX."""
        layout, files = self._context.layout, []
        for socket in sockets:
            own = layout.member(socket, "socket", "sk")
            if layout.member(own, "sock", "__sk_common.skc_family") != _AF_UNIX:
                continue
            peer = layout.member(own, "unix_sock", "peer")
            end = layout.member(peer, "sock", "sk_socket") if peer else 0
            file = layout.member(end, "socket", "file") if end else 0
            if file:
                files.append(file)
        return files

    def _tcp_peers(self, sockets: list[int]) -> list[int]:
        """Return the ``struct file`` of the other end of each connection by TCP."""
        ends = self._ends(sockets)
        by_ends = self._files_by_ends if ends else {}
        return [by_ends[peer, own] for own, peer in ends if (peer, own) in by_ends]

    def _ends(self, sockets: list[int]) -> list[tuple[str, str]]:
        """Return the own address and the peer's of each connection by TCP."""
        found = self._read(np.array(sockets, np.uint64))
        return [ends for ends in found if ends is not None]

    def _read(self, sockets: Addresses) -> list[tuple[str, str] | None]:
        """Return both addresses of each ``struct socket`` that is connected by TCP."""
        context = self._context
        return [
            (_plain(each.local), _plain(each.peer))
            if each and each.type in ("tcp", "tcp6") and each.local and each.peer
            else None
            for each in Sockets(context.layout, context.losses).read(sockets)
        ]

    @cached_property
    def _files_by_ends(self) -> dict[tuple[str, str], int]:
        """Maps the ends of each connection to the ``struct file`` of the first."""
        files = np.array([*self._openers], np.uint64)
        private = self._context.descriptors.read_files(files, ("private",))["private"]
        found = self._read(private.astype(np.uint64))
        return {
            ends: file
            for ends, file in zip(found, files.tolist(), strict=True)
            if ends is not None
        }

    @cached_property
    def _openers(self) -> dict[int, list[int]]:
        """Maps each ``struct file`` that is a socket to the processes that have it."""
        context = self._context
        addresses = context.tasks["address"]
        operations = context.layout.symbol("socket_file_ops") or 0
        found: dict[int, list[int]] = {}
        for rows, opened in context.descriptors.by_table(addresses):
            files = distinct(opened[opened != 0])
            structs = context.descriptors.read_files(files, ("operations",))
            sockets = files[structs["operations"] == np.uint64(operations)]
            for file in sockets.tolist():
                found.setdefault(file, []).append(int(addresses[rows[0]]))
        return found


def _plain(address: str) -> str:
    """Return an address; one of IPv4 that was written as one of IPv6 as such."""
    inner, bracket, port = address.partition("]")
    if bracket and inner.startswith(f"[{_MAPPED}"):
        return f"{inner.removeprefix(f'[{_MAPPED}')}{port}"
    return address


@per_context
def nbd_servers(context: LockContext) -> NbdServers:
    """Return the reader of the servers of a context."""
    return NbdServers(context)
