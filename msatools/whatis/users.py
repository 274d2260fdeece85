# SPDX-License-Identifier: LGPL-2.1-or-later

"""Places in the memory of processes: the mapping, and the page."""

from typing import Literal

import drgn
from drgn.helpers.linux.mm import vma_name
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingMemberError
from msatools.kernel.losses import Loss
from msatools.kernel.pids import NoSuchPidError, find_task
from msatools.kernel.strings import decode_string
from msatools.locks.user.mappings import find_mapping
from msatools.selfdesc.find import ask, drgn_lookups, pointer_to
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import Task, UserPlace
from msatools.whatis.usertables import UserEntries

_VMA = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
_PROTECTION = ((0x1, "r"), (0x2, "w"), (0x4, "x"))
_MAY_SHARE = 0x80

State = Literal["mapped", "swapped", "absent", "none", "unknown"]


class UserFound(Struct, frozen=True):
    """The place of an address, and the page that is there."""

    task: Task
    mm: int
    """Address of the ``struct mm_struct``; 0 if the task has none."""

    place: UserPlace
    pfn: int | None


class UserPlaces:
    """Finds places in the memory of processes."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._entries = UserEntries(lookup)

    def find(self, pid: int, address: int) -> UserFound:
        """Return the place of an address in the memory of a process.

        :raises NoSuchPidError: if there is no such task, or it cannot be read
        """
        hint = "name one of those that msa-prstat lists"
        try:
            address_of_task = find_task(self._lookup.reader, pid)
            if address_of_task is None:
                raise NoSuchPidError(f"pid {pid}", "no such task", hint)
            task = self._lookup.task(address_of_task)
            mm = self._lookup.structs.member(address_of_task, "task_struct", "mm")
        except UNREADABLE as error:
            why = f"it cannot be read: {error}"
            raise NoSuchPidError(f"pid {pid}", why, hint) from error
        if mm < KERNEL_HALF:
            return UserFound(task, 0, _nowhere(task, "none"), None)
        entry = self._entries.find(mm, address)
        place = self._place(task, mm, address, entry.state)
        return UserFound(task, mm, place, entry.pfn)

    def _place(self, task: Task, mm: int, address: int, state: State) -> UserPlace:
        structs = self._lookup.structs
        try:
            vma = find_mapping(structs, mm, address)
            if not vma:
                return _nowhere(task)
            start, end, first, file, flags = structs.members(
                vma, "vm_area_struct", *_VMA
            )
            name = self._name(vma, file)
        except UNREADABLE as error:
            self._lookup.losses.lose(Loss.MAPPINGS, f"cannot read a mapping: {error}")
            return _nowhere(task, "unknown")
        offset = address - start
        if file >= KERNEL_HALF:
            offset += first * self._lookup.page_size
        rights = "".join(sign if flags & bit else "-" for bit, sign in _PROTECTION)
        return UserPlace(
            pid=task.pid,
            comm=task.comm,
            mapping=name,
            offset=offset,
            start=Address(start),
            end=Address(end),
            protection=rights + ("s" if flags & _MAY_SHARE else "p"),
            state=state,
        )

    def _name(self, vma: int, file: int) -> str:
        """Return the name of a mapping, as in /proc/PID/maps.

        :raises UNREADABLE: if it cannot be read
        """
        structs = self._lookup.structs
        mapping = pointer_to(self._lookup.prog, "struct vm_area_struct", vma)
        if file < KERNEL_HALF or _is_named(mapping):
            return decode_string(ask(vma_name, mapping)) or "[anon]"
        mount, dentry = structs.members(file, "file", "f_path.mnt", "f_path.dentry")
        (path,) = self._lookup.paths.tell([(mount, dentry)])
        if path is None:
            raise DamagedDataError("the path of its file cannot be read", file)
        return path


def _is_named(mapping: drgn.Object) -> bool:
    """Return whether a program has named a mapping of shared memory.

    d09e8ca6cb93 ("mm: anonymous shared memory naming") (in v6.2) took the name out of a
    union with what mappings of files have.
    """
    try:
        with drgn_lookups:
            name = mapping.anon_name
    except MissingMemberError:
        return False
    return name.address_ != mapping.shared.address_ and bool(name)


def _nowhere(task: Task, state: State = "absent") -> UserPlace:
    return UserPlace(
        pid=task.pid,
        comm=task.comm,
        mapping=None,
        offset=None,
        start=None,
        end=None,
        protection=None,
        state=state,
    )
