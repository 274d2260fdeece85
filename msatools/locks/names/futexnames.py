# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of futexes, by the mapping that contains them."""

from collections.abc import Sequence

from msgspec.structs import replace

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import LockContext
from msatools.locks.names.described import Name, of_file, of_path, process_of
from msatools.locks.user.usermemory import UserMapping, mapping_at, user_memory
from msatools.target.addresses import KERNEL_HALF


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


def _at(name: Name, offset: int) -> Name:
    return replace(name, name=f"{name.name}+{offset:#x}")
