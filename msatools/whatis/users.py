# SPDX-License-Identifier: LGPL-2.1-or-later

"""Places in the memory of processes: the mapping, and the page."""

from typing import Literal

import drgn
from drgn.helpers.linux.mm import vma_find, vma_name

from msatools.kernel.losses import Loss
from msatools.kernel.pids import NoSuchPidError, find_task
from msatools.kernel.strings import decode_string
from msatools.records import dataclass
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import Task, UserPlace
from msatools.whatis.usertables import UserEntries

_VMA = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
_PROTECTION = ((0x1, "r"), (0x2, "w"), (0x4, "x"))
_MAY_SHARE = 0x80

State = Literal["mapped", "swapped", "absent", "none", "unknown"]


@dataclass(frozen=True)
class UserFound:
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
        except drgn.FaultError as error:
            why = f"it cannot be read: {error}"
            raise NoSuchPidError(f"pid {pid}", why, hint) from error
        if mm < KERNEL_HALF:
            return UserFound(task, 0, _nowhere(task, "none"), None)
        entry = self._entries.find(mm, address)
        place = self._place(task, mm, address, entry.state)
        return UserFound(task, mm, place, entry.pfn)

    def _place(self, task: Task, mm: int, address: int, state: State) -> UserPlace:
        prog = self._lookup.prog
        try:
            space = drgn.Object(prog, "struct mm_struct *", value=mm)
            vma = vma_find(space, address)
            if not vma:
                return _nowhere(task)
            start, end, first, file, flags = self._lookup.structs.members(
                vma.value_(), "vm_area_struct", *_VMA
            )
            name = decode_string(vma_name(vma)) or "[anon]"
        except drgn.FaultError as error:
            self._lookup.losses.lose(Loss.MAPPINGS, f"a mapping is lost: {error}")
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
