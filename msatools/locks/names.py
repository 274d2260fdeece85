# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of locks, by the structure or mapping that contains them, or by a waiter."""

import stat
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.reader import Addresses
from msatools.kernel.report import Loss
from msatools.kernel.structs import MAPPING_ANON, MAPPING_FLAGS
from msatools.locks.context import (
    FEW_READS,
    MAX_CANDIDATES,
    BlockedTask,
    LockContext,
    per_context,
)
from msatools.locks.described import (
    Name,
    describe,
    of_file,
    of_inode,
    of_path,
    process_of,
    short,
)
from msatools.locks.file_locks import FILE_LOCK
from msatools.locks.places import LockPlace, SlabObject, lock_places
from msatools.locks.relatives import RELATIVES
from msatools.locks.report import CONDITION, FutexKey, Lock
from msatools.locks.servers import fuse_mounts
from msatools.locks.user_locks import FUTEX, is_condition
from msatools.locks.user_memory import UserMapping, mapping_at, user_memory
from msatools.locks.wait_queues import wait_queues
from msatools.program.linear import KERNEL_HALF

__all__ = (
    "LockNames",
    "Name",
    "find_lock_place",
)

# --- Names of futexes, by the mapping that contains them.


class FutexNames:
    """Finds names of futexes; reads each mapping once, as many futexes may be in it."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._pids: dict[int, int | None] = {}
        self._mappings: dict[int, list[tuple[UserMapping, Name]]] = {}
        """Maps an address space to its known mappings and their names."""

    def name(self, lock: Lock, cases: Sequence[BlockedTask]) -> Name:
        """
        Return the name of a futex.

        :param cases: Some of its waiters, to find it in their memory.
        :raises drgn.FaultError: if a structure that leads to the name cannot be read
        """
        mms = list(dict.fromkeys(case.mm for case in cases if case.mm))
        if not mms:
            return Name()
        if isinstance(lock.key, FutexKey) and lock.key.of_inode:
            return self._in_file(lock.key, mms)
        if lock.address is None:
            return Name()
        return self._in_memory(lock.address, mms[0])

    def _in_file(self, key: FutexKey, mms: Sequence[int]) -> Name:
        offset = key.file_offset or 0
        for mm in mms:
            for shared in user_memory(self._context).shared_files(mm):
                end = shared.first + shared.end - shared.start
                if shared.sequence == key.object and shared.first <= offset < end:
                    inode = self._context.storage.inode(shared.inode)
                    path = self._context.path_of(inode)
                    return _at(of_path(self._context, inode, path), offset)
        return Name()

    def _in_memory(self, address: int, mm: int) -> Name:
        known = self._mappings.setdefault(mm, [])
        inside = (each for each in known if each[0].start <= address < each[0].end)
        found = next(inside, None)
        if found is None:
            mapping = mapping_at(self._context.layout, mm, address)
            if mapping is None:
                return Name(pid=self._pid(mm))
            found = mapping, self._of_mapping(mapping, mm)
            known.append(found)
        mapping, name = found
        if mapping.file >= KERNEL_HALF:
            return _at(name, mapping.file_offset(address))
        return name

    def _of_mapping(self, mapping: UserMapping, mm: int) -> Name:
        context, pid = self._context, self._pid(mm)
        if mapping.file >= KERNEL_HALF:
            return replace(of_file(context, mapping.file), pid=pid)
        members = ("start_brk", "brk", "start_stack")
        first, last, stack = context.layout.members(mm, "mm_struct", *members)
        if mapping.start < last and first < mapping.end:
            return Name(name="[heap]", pid=pid)
        on_stack = mapping.start <= stack < mapping.end
        return Name(name="[stack]" if on_stack else "anon", pid=pid)

    def _pid(self, mm: int) -> int | None:
        if mm not in self._pids:
            process = process_of(self._context, mm)
            self._pids[mm] = process[0] if process else None
        return self._pids[mm]


@per_context
def _futex_names(context: LockContext) -> FutexNames:
    return FutexNames(context)


def _at(name: Name, offset: int) -> Name:
    return replace(name, name=f"{name.name}+{offset:#x}")


# --- Names of locks, by the structure that contains them and by their waiters.


class LockNames:
    """Finds names of locks, each once per context."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._names: dict[Lock, Name] = {}
        self._futexes = _futex_names(context)

    def name(self, lock: Lock, cases: Sequence[BlockedTask]) -> Name:
        """
        Return the name of a lock.

        :param cases: Some of its waiters, or none if unknown. Some locks can be named
            only by the stack or system call of a waiter.
        """
        if lock not in self._names:
            try:
                self._names[lock] = self._lookup(lock, cases[:FEW_READS])
            except LOST as error:
                self._context.losses.lose(
                    Loss.LOCK_NAMES, f"cannot determine what a lock lies in: {error}"
                )
                self._names[lock] = Name()
        return self._names[lock]

    def _lookup(self, lock: Lock, cases: Sequence[BlockedTask]) -> Name:
        context, address = self._context, lock.address
        if lock.type in FUTEX.names:
            name = self._futexes.name(lock, cases)
            if cases and is_condition(context, lock, cases[0].mm):
                where = f" in {name.name}" if name.name else ""
                return replace(name, name=f"{CONDITION}{where}")
            return name
        if address is None:
            return Name()
        if lock.type == "folio":
            return _folio(context, address, cases)
        if lock.type in FILE_LOCK.names:
            return _file_lock(context, address)
        if lock.type in RELATIVES.names:
            return _process(context, lock)
        if lock.type == "vma":
            return describe(context, LockPlace("vm_lock", "vm_area_struct", address))
        found = self._on_stack(address)
        if found is not None:
            return found
        piece = lock_places(context).slab(address)
        cache = piece.cache if piece else None
        place = find_lock_place(context, lock.type, address, cases)
        if place is not None:
            return replace(self._described(place), cache=cache)
        if lock.type == "bit_wait":
            found = _word(context, address, piece)
            if found is not None:
                return replace(found, cache=cache)
        if lock.type == "wait_queue":
            found = _request(context, cases)
            if found is not None:
                return replace(found, cache=cache)
        if piece is None:
            return Name()
        name = Name(name=f"{piece.cache}+{address - piece.start:#x}", cache=cache)
        within = lock_places(context).inode_within(piece)
        if within is None:
            return name
        return of_inode(context, within, str(name.name), cache=cache)

    def _described(self, place: LockPlace) -> Name:
        """Return the name of a lock in a structure.

        If the structure cannot be read, the name is that of the member alone.
        """
        try:
            return describe(self._context, place)
        except LOST as error:
            self._context.losses.lose(
                Loss.LOCK_NAMES, f"cannot read all that a lock lies in: {error}"
            )
            return Name(name=place.name)

    @cached_property
    def _stacks(self) -> tuple[Addresses, Addresses]:
        """Start addresses of stacks, ascending, and the rows of their tasks."""
        starts = self._context.tasks["stack"].astype(np.uint64)
        order = np.argsort(starts).astype(np.uint64)
        return starts[order], order

    def _on_stack(self, address: int) -> Name | None:
        """Return the name of a lock that is on the stack of a task."""
        starts, rows = self._stacks
        index = int(np.searchsorted(starts, np.uint64(address), "right")) - 1
        if index < 0 or not starts[index]:
            return None
        if address - int(starts[index]) >= wait_queues(self._context).stack_bytes:
            return None
        pid = int(self._context.tasks["pid"][rows[index]])
        return Name(name=f"on the stack of {pid}", pid=pid)


def _process(context: LockContext, lock: Lock) -> Name:
    """Return the name of a wait for a process's threads, io_uring or PID namespace."""
    tasks = context.tasks
    rows = np.flatnonzero(tasks["signal"] == np.uint64(lock.address or 0))
    if not len(rows):
        return Name()
    pid = int(tasks["tgid"][rows[0]])
    what = {"threads": "threads", "io_uring": "io_uring"}.get(
        lock.type, "PID namespace"
    )
    return Name(name=f"{what} of {pid}", pid=pid)


_OF_PIPE = {"mutex": ("mutex",), "wait_queue": ("rd_wait", "wr_wait")}

_FD_ARGUMENT = {"splice": 2, "tee": 1, "vmsplice": 0, "sendfile": 0, "sendfile64": 0}
"""Maps a system call to the index of the argument to look up as the descriptor of a
pipe, besides :attr:`.BlockedTask.file`."""


def find_lock_place(
    context: LockContext, type_: str, address: int, cases: Sequence[BlockedTask]
) -> LockPlace | None:
    """
    Find the variable or structure that contains a lock.

    :param type_: One of :data:`.report.LockTypeName`.
    :param cases: Some of its waiters.
    :return: ``None`` if not found.
    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    place = lock_places(context).find(type_, address)
    if place is not None:
        return place
    for case in cases:
        place = _pipe(context, type_, address, case) or _mapping(
            context, type_, address, case
        )
        if place is not None:
            return place
    return None


def _mapping(
    context: LockContext, type_: str, address: int, case: BlockedTask
) -> LockPlace | None:
    """Find the mapping of a per-VMA lock; the waiter's stack has a pointer to it.

    The lock is a ``struct vma_lock`` of its own from "mm: separate vma->lock from
    vm_area_struct" (in v6.4) to v6.14.
    """
    if type_ != "rwsem" or not context.layout.has("vma_lock", "lock"):
        return None
    own = address - context.layout.offset("vma_lock", "lock")
    for pointer in case.stack.data_pointers()[:MAX_CANDIDATES]:
        try:
            vma_lock, mm = context.layout.members(
                pointer, "vm_area_struct", "vm_lock", "vm_mm"
            )
        except UNREADABLE:
            continue
        if vma_lock == own and mm == case.mm:
            return LockPlace("vm_lock", "vm_area_struct", pointer)
    return None


def _pipe(
    context: LockContext, type_: str, address: int, case: BlockedTask
) -> LockPlace | None:
    """Find the inode of a pipe by a waiter: a pipe has no pointer to its inode."""
    pipes = {
        address - context.layout.offset("pipe_inode_info", member): member
        for member in _OF_PIPE.get(type_, ())
        if context.layout.has("pipe_inode_info", member)
    }
    if not pipes:
        return None
    for inode in _inodes_of_call(context, case):
        try:
            pipe = context.layout.member(inode, "inode", "i_pipe")
            if pipe in pipes and context.storage.is_inode(inode):
                return LockPlace(pipes[pipe], "pipe_inode_info", inode)
        except UNREADABLE:
            continue
    return None


def _inodes_of_call(context: LockContext, case: BlockedTask) -> list[int]:
    """Return addresses that may be inodes of the files of a task's system call."""
    inodes = [case.file.inode] if case.file else []
    index = _FD_ARGUMENT.get(case.call or "")
    if index is not None:
        tables = context.descriptors.tables(np.array([case.address], np.uint64))
        fd = np.array([case.arguments[index] & 0x7FFF_FFFF], np.int64)
        file = int(context.descriptors.lookup(tables, fd)[0])
        if file:
            inodes.append(context.layout.member(file, "file", "f_inode"))
    if case.is_in("fifo_open", "wait_for_partner"):
        inodes += case.stack.data_pointers()[:MAX_CANDIDATES]
    return inodes


def _folio(context: LockContext, address: int, cases: Sequence[BlockedTask]) -> Name:
    """Return the name of a page of a file, of swap or of anonymous memory."""
    # "mm: Introduce struct folio" (in v5.16)
    type_name = "folio" if context.layout.has("folio", "mapping") else "page"
    mapping, index = context.layout.members(address, type_name, "mapping", "index")
    host = context.storage.host_of_folio(address)
    if host is not None:
        return of_inode(context, host.address, f"folio {index}")
    device = context.storage.swap_of_folio(address)
    anonymous = mapping & MAPPING_FLAGS == MAPPING_ANON
    # A page that is being swapped in has no mapping yet.
    if not anonymous and device is None:
        return Name(name="folio")
    # Several processes may map the page: name the one that all waiters are of, if any.
    mms = {case.mm for case in cases if case.mm}
    mm = mms.pop() if len(mms) == 1 else None
    if mm is None and anonymous:
        mm = lock_places(context).mm_of_anon_vma(mapping & ~MAPPING_FLAGS)
    process = process_of(context, mm) if mm else None
    if process is None:
        return Name(name="anon folio", device=device)
    return Name(name=f"anon folio of {process[0]}", pid=process[0], device=device)


def _word(context: LockContext, address: int, piece: SlabObject | None) -> Name | None:
    """Return the name of a word whose bit is waited for; ``None`` if unknown.

    Known are the state of a buffer, and that of an inode.
    """
    try:
        device = context.storage.device_of_buffer(address)
        if device is None and piece is not None and piece.cache == "buffer_head":
            # A journal's own copy of a buffer is not among the buffers of its page.
            part = context.layout.member(address, "buffer_head", "b_bdev")
            if lock_places(context).is_a("block_device", part):
                device = context.storage.device(part)
    except UNREADABLE:
        device = None
    if device is not None:
        return _buffer(context, address, device)
    # "inode: port __I_SYNC to var event" and the like (in v6.12): the word may be any
    # byte of the state.
    state = context.layout.offset("inode", "i_state")
    for inode in range(address - state, address - state - 8, -1):
        if context.storage.is_inode(inode):
            return of_inode(context, inode, "i_state")
    return None


def _request(context: LockContext, cases: Sequence[BlockedTask]) -> Name | None:
    """Return the name of a request to a FUSE server, with the path of the mount."""
    for case in cases:
        mount = fuse_mounts(context).client(case.names, case.stack)
        if mount is not None:
            place = LockPlace("FUSE request", "super_block", mount.super_block)
            return describe(context, place)
    return None


def _buffer(context: LockContext, address: int, device: str) -> Name:
    """Return the name of a buffer: its block, and its file if it has a file's data."""
    names = ("b_blocknr", ("b_folio", "b_page"))
    block, folio = context.layout.members(address, "buffer_head", *names)
    name = Name(name=f"buffer {block} of {short(device)}", device=device)
    try:
        host = context.storage.host_of_folio(folio) if folio >= KERNEL_HALF else None
    except UNREADABLE:
        host = None
    if host is None or not stat.S_ISREG(host.mode):
        return name
    data_name = of_inode(context, host.address, f"{name.name}, data")
    return replace(data_name, device=device)


def _file_lock(context: LockContext, lock: int) -> Name:
    """Return the name of the file that a lock is on."""
    # "filelock: split common fields into struct file_lock_core" (in v6.9)
    new = context.layout.has("file_lock", "c.flc_file")
    part, member = ("file_lock_core", "flc_file") if new else ("file_lock", "fl_file")
    file = context.layout.member(lock, part, member)
    if file < KERNEL_HALF:
        return Name()
    return of_file(context, file)
