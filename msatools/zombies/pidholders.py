# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the known kinds of holders of ``struct pid``.

A holder is a pointer to it in memory that counts as one reference.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property

import numpy as np
from drgn.helpers.linux.percpu import per_cpu_ptr
from msgspec import Struct

from msatools.errors import LOST, DamagedDataError, MissingError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.files import Descriptors
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Structs, find_offset, read_structs
from msatools.kernel.walks import list_records
from msatools.kernel.words import unsigned
from msatools.selfdesc.find import ask, find_type, find_variable, offset_of
from msatools.tasks.table import TaskTable
from msatools.tasks.text import kernel_symbol

CALLBACKS = "callbacks of RCU"

_WORD = 8
_MAX_CALLBACKS = 1 << 20

_FILE = ("operations", "private", "owner", "owned")


class Holders(Struct, frozen=True):
    """Holders of one kind."""

    kind: str
    pids: Addresses
    """The pointer of each holder: to a ``struct pid``, NULL, or invalid."""

    places: Addresses
    """Address of each pointer; empty if it is not in a slab."""


_NOWHERE = np.empty(0, np.uint64)


class PidHolders:
    """Finds holders, one kind after the other."""

    def __init__(
        self, reader: Reader, tasks: TaskTable, pids: Addresses, losses: LossLog
    ) -> None:
        """Prepare the search for the holders of some ``struct pid``."""
        self._reader = reader
        self._pids = pids
        self._prog = reader.prog
        self._tasks = tasks
        self._losses = losses
        self.lost: set[str] = set()
        """Kinds that could not be read."""

    def all(self) -> Iterator[Holders]:
        """Yield the holders of all kinds; note kinds that cannot be read."""
        kinds = {
            "inodes of /proc": self._proc_inodes,
            "pidfds": self._pidfds,
            "owners of files": self._file_owners,
            "peers of sockets": self._socket_peers,
            "terminals": self._terminals,
            CALLBACKS: self._callbacks,
            "cad_pid": self._ctrl_alt_del,
        }
        for kind, walk in kinds.items():
            try:
                yield from walk()
            except LOST as error:
                self.lost.add(kind)
                text = (
                    f"not all holders of struct pid were searched for: {kind}: {error}"
                )
                self._losses.lose(Loss.HOLDERS, text, about=kind)

    def _proc_inodes(self) -> Iterator[Holders]:
        """Yield inodes of /proc, open or cached."""
        type_ = find_type(self._prog, "struct proc_inode")
        offset = offset_of(type_, "pid")
        inode = offset_of(type_, "vfs_inode")
        node = inode + offset_of(find_type(self._prog, "struct inode"), "i_sb_list")
        size = max(node + 2 * _WORD, offset + _WORD)
        pids, places = [], []
        for head in self._inode_lists(kernel_symbol(self._prog, "proc_sops")):
            for address, data in list_records(
                self._reader, head, node, size, self._losses, "the list of inodes"
            ):
                pids.append(unsigned(data, offset, _WORD))
                places.append(address + offset)
        found = np.array(pids, np.uint64), np.array(places, np.uint64)
        yield Holders("inode of /proc", *found)

    def _pidfds(self) -> Iterator[Holders]:
        """Yield pidfds, open or in flight in a socket.

        Since Linux kernel commit cb12fd8e0dab ("pidfd: add pidfs") (in v6.9) the inode
        of a pidfd has the reference; it is in no list, but the ``struct pid`` points to
        its dentry. Before, each file has a reference.
        """
        files, read = self._files
        operations = self._operations("pidfs_file_operations", "pidfd_fops")
        own = np.isin(read["operations"], operations)
        private = offset_of(find_type(self._prog, "struct file"), "private_data")
        pids = read["private"][own].astype(np.uint64)
        yield Holders("pidfd", pids, files[own] + np.uint64(private))
        known = "struct pid", {"dentry": ("stashed",)}
        stashed = read_structs(self._reader, *known, self._pids, self._losses)
        if stashed.has("dentry"):
            dentries = stashed["dentry"].astype(np.uint64)
            inodes = self._members("struct dentry", "d_inode", dentries, "").pids
            yield self._members("struct inode", "i_private", inodes, "pidfd")

    def _inode_lists(self, operations: int) -> Iterator[int]:
        """Find the lists of inodes of the file systems with some ``s_op``."""
        block = find_type(self._prog, "struct super_block")
        node, own, inodes = (
            offset_of(block, member) for member in ("s_list", "s_op", "s_inodes")
        )
        for address, data in list_records(
            self._reader,
            find_variable(self._prog, "super_blocks").address_,
            node,
            max(node + 2 * _WORD, own + _WORD),
            self._losses,
            "the list of file systems",
        ):
            if unsigned(data, own, _WORD) == operations:
                yield address + inodes

    def _file_owners(self) -> Iterator[Holders]:
        """Yield receivers of SIGIO (fs/fcntl.c)."""
        files, read = self._files
        type_ = find_type(self._prog, "struct file")
        if read.has("owner"):
            offset = np.uint64(offset_of(type_, "f_owner.pid"))
            pids = read["owner"].astype(np.uint64)
            yield Holders("owner of a file", pids, files + offset)
        else:
            owners = read["owned"].astype(np.uint64)
            yield self._members("struct fown_struct", "pid", owners, "owner of a file")

    def _socket_peers(self) -> Iterator[Holders]:
        _, read = self._files
        sockets = np.isin(read["operations"], self._operations("socket_file_ops"))
        addresses = read["private"][sockets].astype(np.uint64)
        socks = self._members("struct socket", "sk", distinct(addresses), "").pids
        yield self._members("struct sock", "sk_peer_pid", socks, "peer of a socket")

    def _terminals(self) -> Iterator[Holders]:
        """Yield foreground groups and sessions of terminals, and ``tty_old_pgrp``."""
        signals = distinct(self._tasks["signal"]).astype(np.uint64)
        ttys = distinct(self._members("struct signal_struct", "tty", signals, "").pids)
        # Linux kernel commit 64d608db38ff ("tty: cumulate and document
        # tty_struct::ctrl* members") (in v5.13)
        for member in ("session", "pgrp"):
            names = f"ctrl.{member}", member
            yield self._members("struct tty_struct", names, ttys, "terminal")
        yield self._members("struct signal_struct", "tty_old_pgrp", signals, "terminal")

    def _callbacks(self) -> Iterator[Holders]:
        """Yield pending RCU callbacks that drop a reference (free_pid())."""
        within = offset_of(find_type(self._prog, "struct pid"), "rcu")
        pids: list[int] = []
        data = find_variable(self._prog, "rcu_data").address_of_()
        for cpu in possible_cpus(self._prog, self._losses):
            own = ask(per_cpu_ptr, data, cpu)
            heads = [own.cblist.head]
            if own.type_.type.has_member("nocb_bypass"):
                heads.append(own.nocb_bypass.head)
            for head in heads:
                node = head.value_()
                while node:
                    if len(pids) >= _MAX_CALLBACKS:
                        raise DamagedDataError("there are too many")
                    pids.append(node - within)
                    node = int(self._reader.words(node, 1)[0])
        found = np.array(pids, np.uint64)
        yield Holders("callback of RCU", found, _NOWHERE)

    def _ctrl_alt_del(self) -> Iterator[Holders]:
        """Yield the receiver of SIGINT on Ctrl-Alt-Del (kernel/reboot.c)."""
        pid = np.array([find_variable(self._prog, "cad_pid").value_()], np.uint64)
        yield Holders("cad_pid", pid, _NOWHERE)

    def _members(
        self,
        type_name: str,
        members: str | tuple[str, ...],
        addresses: Addresses,
        kind: str,
    ) -> Holders:
        """Read a pointer member of some structures."""
        names = (members,) if isinstance(members, str) else members
        addresses = distinct(addresses[addresses != 0])
        offset = find_offset(find_type(self._prog, type_name), names)
        if offset is None:
            raise MissingError(f"{type_name} has no {names[0]}")
        wanted = {"value": names}
        read = read_structs(self._reader, type_name, wanted, addresses, self._losses)
        values = read["value"].astype(np.uint64)
        return Holders(kind, values, addresses + np.uint64(offset))

    @cached_property
    def _files(self) -> tuple[Addresses, Structs]:
        """Addresses and members of all open files."""
        descriptors = Descriptors(self._reader, self._losses)
        _, first = np.unique(self._tasks["files"], return_index=True)
        with_files = first[self._tasks["files"][first] != 0]
        tables = descriptors.tables(
            self._tasks["address"][with_files].astype(np.uint64)
        )
        found = [descriptors.all_files(tables, row) for row in range(len(with_files))]
        files = distinct(np.concatenate([_NOWHERE, *found]))
        files = files[files != 0]
        read = descriptors.read_files(files, _FILE)
        return files, read

    def _operations(self, *names: str) -> Addresses:
        """Return the addresses of those ``struct file_operations`` that exist."""
        found = []
        for name in names:
            with suppress(MissingError):
                found.append(kernel_symbol(self._prog, name))
        return np.array(found, np.uint64)
