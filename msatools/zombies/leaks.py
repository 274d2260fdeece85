# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find each ``struct pid`` with more references than known holders."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import PageReserved, follow_page
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.slab import slab_object_info
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.files import Descriptors
from msatools.kernel.percpu import possible_cpus
from msatools.kernel.pids import MAX_LEVEL, PID_MAX_LIMIT
from msatools.kernel.reader import Addresses, Reader, distinct, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.slab import SlabCache
from msatools.kernel.structs import (
    Booleans,
    Numbers,
    Structs,
    find_offset,
    find_rows,
    read_structs,
)
from msatools.kernel.walks import list_records
from msatools.locks.ownership import seen_on_stacks
from msatools.program.model import Address
from msatools.selfdesc.find import (
    ask,
    find_symbol,
    find_type,
    find_variable,
    member_of,
    offset_of,
)
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import saved_registers, stack_bytes
from msatools.tasks.waits import TaskClass, classify
from msatools.zombies.model import Leak
from msatools.zombies.slabscan import SlabScan, SlabWord

# --- Find the known kinds of holders of struct pid.
#
# A holder is a pointer to a struct pid that counts as one reference.


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
        """Addresses of all open ``struct file``, and their members :data:`_FILE`."""
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


# --- Find each struct pid with more references than known holders.
#
# kernel/pid.c: a struct pid has one reference while a task, a process group or a
# session has the number, and one for each get_pid() without put_pid(). A leaked one is
# never freed, nor is its PID namespace.
#
# Holders are searched in three steps: in known structures (above); for the rest, on
# the stacks of tasks and in the kernel's variables; then in all objects of slab
# caches. Not searched are variables of modules, per-CPU variables, vmalloc memory
# and whole pages.


_MAX_COUNT = 1 << 30
"""End of plausible reference counts: above, they are saturated or damaged."""

_MAX_VARIABLES = 1 << 28
"""Maximum size of the kernel's variables in bytes."""

_NAMED = "cad_pid"
"""The variable whose reference :class:`PidHolders` has counted already."""

# Pointers in these are no further references: tasks point to their own struct pid, and
# the IDR of a PID namespace (radix_tree_node) to each.
_NO_HOLDERS = frozenset({"task_struct", "signal_cache", "radix_tree_node", "pid"})
# Large caches whose objects never refer to processes.
_OF_FILES = frozenset({"dentry", "buffer_head", "kernfs_node_cache"})
_OF_MEMORY = frozenset(
    {"vm_area_struct", "vma_lock", "maple_node", "anon_vma", "anon_vma_chain"}
)
_INODES_WITH_PIDS = frozenset({"proc_inode_cache", "mqueue_inode_cache"})

_WITHOUT_PIDS = frozenset(
    {TaskClass.SIG, TaskClass.TMR, TaskClass.LCK, TaskClass.POL, TaskClass.KTW}
)
"""Classes of waits that hold no reference to a process."""

Found = Iterator[tuple[int, str]]
"""Index of a wanted ``struct pid``, and the kind of its holder."""


class _Pids(Struct, frozen=True):
    """All ``struct pid``, one row each, by ascending address."""

    address: Addresses
    number: Numbers
    """PID in the initial PID namespace."""

    references: Numbers
    in_use: Booleans
    """Whether a task, a process group or a session has the number."""

    task: Addresses
    """Address of the ``struct task_struct`` with the number; 0 if there is none."""

    def __len__(self) -> int:
        return len(self.address)


def find_pid_leaks(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> tuple[Leak, ...] | None:
    """Find each ``struct pid`` with more references than holders, sorted by PID.

    This reads all ``struct page``, and slabs if some references are unexplained; it may
    take a second or two. On a running kernel it is done twice, as concurrent changes
    look like leaks.

    :param tasks: All tasks.
    :return: ``None``, with a note, if the kernel has no SLUB, or its caches or all
        ``struct page`` cannot be read.
    """
    before = losses.lost.total()
    try:
        leaks = _suspects(reader, tasks, losses)
        if leaks and reader.is_live:
            again = _suspects(reader, TaskReader(reader).read_all(losses), losses)
            leaks = [leak for leak in leaks if leak in again]
    except LOST as error:
        losses.lose(Loss.LEAKS, f"leaked struct pids cannot be looked for: {error}")
        return None
    if leaks and losses.lost.total() > before:
        text = "not all that may hold struct pids was read: some leaks may be none"
        losses.note("leaks-unsure", text)
    return tuple(sorted(leaks, key=lambda leak: (leak.pid, leak.address)))


def _suspects(reader: Reader, tasks: TaskTable, losses: LossLog) -> list[Leak]:
    scan = SlabScan(reader, losses)
    pids = _read_pids(reader, scan, losses)
    losses.coverage["struct_pids"] = len(pids)
    ledger = _Ledger(pids)
    known = PidHolders(reader, tasks, pids.address, losses)
    places: set[int] = set()
    for holders in known.all():
        rows = find_rows(pids.address, holders.pids)
        ledger.add(rows[rows >= 0], holders.kind)
        if len(holders.places):
            places.update(holders.places[rows >= 0].tolist())
    searches: tuple[Callable[[Addresses], Found], ...] = (
        lambda wanted: _on_stacks(reader, tasks, wanted, losses),
        lambda wanted: _in_variables(reader, wanted, losses),
        lambda wanted: _in_slabs(reader, scan, wanted, places),
    )
    for search in searches:
        left = ledger.unexplained
        if not len(left):
            return []
        kinds: defaultdict[str, list[int]] = defaultdict(list)
        for row, kind in search(pids.address[left]):
            kinds[kind].append(row)
        for kind, found in kinds.items():
            ledger.add(left[found], kind)
    left = ledger.unexplained
    if CALLBACKS in known.lost:
        # A free number with one reference is about to be freed by RCU.
        left = left[pids.in_use[left] | (pids.references[left] > 1)]
    return [_leak(row, ledger, tasks) for row in left.tolist()]


class _Ledger:
    """The holders of each ``struct pid``, by kind."""

    def __init__(self, pids: _Pids) -> None:
        self.pids = pids
        self._kinds: dict[str, Numbers] = {}
        self._count = np.zeros(len(pids), np.int64)
        self.add(np.flatnonzero(pids.in_use), "number in use")

    def add(self, rows: npt.NDArray[np.intp], kind: str) -> None:
        """Add a holder for each of some rows, which may repeat."""
        added = np.bincount(rows, minlength=len(self.pids)).astype(np.int64)
        self._kinds[kind] = self._kinds.get(kind, 0) + added
        self._count += added

    @property
    def unexplained(self) -> npt.NDArray[np.intp]:
        """Rows with more references than holders."""
        return np.flatnonzero(self.pids.references > self._count)

    def named(self, row: int) -> dict[str, int]:
        """Return the number of holders by kind."""
        counts = {kind: int(holders[row]) for kind, holders in self._kinds.items()}
        return {kind: count for kind, count in counts.items() if count}


def _leak(row: int, ledger: _Ledger, tasks: TaskTable) -> Leak:
    pids = ledger.pids
    task = np.flatnonzero(tasks["address"] == pids.task[row])
    state = None
    if len(task):
        state = "zombie" if tasks["exit_state"][task[0]] else "alive"
    return Leak(
        address=Address(int(pids.address[row])),
        pid=int(pids.number[row]),
        references=int(pids.references[row]),
        named=ledger.named(row),
        task=state,
    )


def _read_pids(reader: Reader, scan: SlabScan, losses: LossLog) -> _Pids:
    """Read all ``struct pid`` in their slab caches that are not freed.

    A freed one has a reference count of 0.
    """
    prog = reader.prog
    space = find_variable(prog, "init_pid_ns")
    caches = {space.pid_cachep.value_()}
    # A static array of the caches of nested namespaces, by level.
    caches.update(cache.value_() for cache in find_variable(prog, "pid_cache"))
    addresses = [scan.objects(cache) for cache in caches & scan.caches.keys()]
    if not addresses:
        raise MissingError("the caches of struct pid are not there")
    address = distinct(np.concatenate(addresses))
    type_ = find_type(prog, "struct pid")
    kinds = member_of(type_, "tasks").type.length
    members = {
        "references": ("count.refs.counter", "count.counter"),
        "level": ("level",),
        "number": ("numbers[0].nr",),
        "space": ("numbers[0].ns",),
        **{f"tasks{kind}": (f"tasks[{kind}].first",) for kind in range(kinds)},
    }
    read = read_structs(reader, "struct pid", members, address, losses)
    there = (
        read.readable
        & (read["space"] == space.address_)
        & (read["level"] <= MAX_LEVEL)
        & (read["number"] > 0)
        & (read["number"] <= PID_MAX_LIMIT)
        & (read["references"] > 0)
        & (read["references"] < _MAX_COUNT)
    )
    in_use = np.any([read[f"tasks{kind}"] != 0 for kind in range(kinds)], axis=0)
    link = np.uint64(_pid_link(prog))
    first = read["tasks0"].astype(np.uint64)
    return _Pids(
        address=address[there],
        number=read["number"][there].astype(np.int64),
        references=read["references"][there].astype(np.int64),
        in_use=in_use[there],
        task=np.where(first != 0, first - link, 0).astype(np.uint64)[there],
    )


def _pid_link(prog: drgn.Program) -> int:
    offset: int = offset_of(find_type(prog, "struct task_struct"), "pid_links[0]")
    return offset


def _on_stacks(
    reader: Reader, tasks: TaskTable, wanted: Addresses, losses: LossLog
) -> Found:
    """Find tasks with a ``struct pid`` on their stack.

    Each task counts once, however often its stack has the address. Tasks in waits that
    hold no reference do not count: the address is left over from earlier calls.
    """
    rows = np.arange(len(tasks))
    number = {address: row for row, address in enumerate(wanted.tolist())}
    seen = seen_on_stacks(
        reader, tasks, rows, number.keys(), stack_bytes(reader.prog), losses
    )
    idle = _idle(reader, tasks, sorted(set().union(*seen.values())))
    for address, holders in seen.items():
        for row in holders:
            if row not in idle:
                yield number[address], "stack of a task"


def _idle(reader: Reader, tasks: TaskTable, rows: list[int]) -> set[int]:
    """Return those of *rows* whose tasks are in a wait that holds no reference."""
    part = tasks.only(np.array(rows, np.intp))
    part = part.only(asleep(part))
    stacks = StackCollector(reader, LossLog()).collect(
        part["address"],
        part["stack"].astype(np.uint64),
        saved_registers(part),
    )
    waits = [classify(stacks.names(stack)).task_class for stack in stacks.unique]
    idle = {
        int(address)
        for address, stack in zip(part["address"], stacks.index, strict=True)
        if waits[stack] in _WITHOUT_PIDS
    }
    return {row for row in rows if int(tasks["address"][row]) in idle}


def _in_variables(reader: Reader, wanted: Addresses, losses: LossLog) -> Found:
    """Find variables of the kernel proper that point to a ``struct pid``.

    Pages of init sections are skipped: they were freed after boot.
    """
    try:
        start = kernel_symbol(reader.prog, "_sdata")
        end = kernel_symbol(reader.prog, "_end")
    except MissingError as error:
        losses.lose(Loss.VARIABLES, f"variables are not searched for holders: {error}")
        return
    if not 0 < end - start <= _MAX_VARIABLES:
        return
    start &= -4096
    data, _ = reader.read_around_gaps(start, end - start & -8, 4096)
    words = np.frombuffer(data, "<u8")
    near = np.flatnonzero((words >= wanted.min()) & (words <= wanted.max()))
    for index in near[np.isin(words[near], wanted)].tolist():
        name = _variable(reader.prog, start + 8 * index)
        if name is not None and name != _NAMED:
            row = int(np.flatnonzero(wanted == words[index])[0])
            yield row, f"variable {name}"


def _variable(prog: drgn.Program, address: int) -> str | None:
    try:
        # virt_to_page() does not work for the kernel image.
        if not ask(
            PageReserved,
            ask(follow_page, find_variable(prog, "init_mm").address_of_(), address),
        ):
            return None
        name: str = find_symbol(prog, address).name
    except LOST:
        return None
    return name


def _in_slabs(
    reader: Reader, scan: SlabScan, wanted: Addresses, known: set[int]
) -> Found:
    """Find slab objects of any kind that point to a ``struct pid``.

    Freed objects and the allocator's arrays of free objects are not holders.

    :param known: Addresses of pointers that are already counted.
    """
    number = {address: row for row, address in enumerate(wanted.tolist())}
    sheaf = _sheaf_cache(reader.prog)
    for word in scan.search(wanted, _skipped):
        if word.address in known or not _is_allocated(reader.prog, word.address):
            continue
        if sheaf is not None and _is_sheaf(reader, word, sheaf, scan.caches):
            continue
        yield number[word.value], f"{word.cache.name}+{word.offset:#x}"


def _skipped(cache: SlabCache) -> bool:
    name = cache.name
    if name in _INODES_WITH_PIDS:
        return False
    return (
        name in _NO_HOLDERS | _OF_FILES | _OF_MEMORY
        or name.startswith("pid_")
        or name.endswith("_inode_cache")
    )


def _sheaf_cache(prog: drgn.Program) -> int | None:
    """Return the offset of ``slab_sheaf.cache``; a sheaf is an array of free objects.

    ``None`` before Linux v6.18 ("slab: add opt-in caching layer of percpu sheaves").
    """
    try:
        offset: int = member_of(find_type(prog, "struct slab_sheaf"), "cache").offset
    except MissingError:
        return None
    return offset


def _is_sheaf(
    reader: Reader, word: SlabWord, sheaf: int, caches: Collection[int]
) -> bool:
    """Return whether a word is in an array of free objects, which may be stale."""
    try:
        data = reader.read(word.address - word.offset + sheaf, 8)
    except UNREADABLE:
        return False
    return int.from_bytes(data, "little") in caches


def _is_allocated(prog: drgn.Program, address: int) -> bool:
    try:
        info = ask(slab_object_info, prog, address)
    except LOST:
        return True
    return info is None or bool(info.allocated)
