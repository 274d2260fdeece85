# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the server of a network block device, if it is a process of this machine.

drivers/block/nbd.c: the device sends its requests through sockets that a program gave
it. The other end of a socket of AF_UNIX is known; what has it open serves the device. A
server behind TCP is not looked for, as it is on another machine mostly.
"""

from functools import cached_property

import numpy as np

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.reader import distinct
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.io.disks import Disk
from msatools.target.addresses import KERNEL_HALF

_AF_UNIX = 1
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
                files = self._peers(disk)
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

    def _peers(self, disk: Disk) -> list[int]:
        """Return the ``struct file`` of the other end of each socket of AF_UNIX."""
        layout = self._context.layout
        config = layout.member(disk.private, "nbd_device", "config")
        if config < KERNEL_HALF:
            return []
        sockets, count = layout.members(
            config, "nbd_config", "socks", "num_connections"
        )
        files = []
        for number in range(min(count, _MAX_CONNECTIONS)):
            connection = layout.word(sockets + 8 * number)
            socket = layout.member(connection, "nbd_sock", "sock")
            own = layout.member(socket, "socket", "sk")
            if layout.member(own, "sock", "__sk_common.skc_family") != _AF_UNIX:
                continue
            peer = layout.member(own, "unix_sock", "peer")
            end = layout.member(peer, "sock", "sk_socket") if peer else 0
            file = layout.member(end, "socket", "file") if end else 0
            if file:
                files.append(file)
        return files

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


@per_context
def nbd_servers(context: LockContext) -> NbdServers:
    """Return the reader of the servers of a context."""
    return NbdServers(context)
