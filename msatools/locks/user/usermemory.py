# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory of processes, where the dump has it."""

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import drgn
from drgn.helpers.linux.mm import access_remote_vm, for_each_vma, vma_find

from msatools.kernel.losses import Loss
from msatools.kernel.reader import fault_reason
from msatools.kernel.report import LossLog
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.locks.user.filepages import FilePages
from msatools.target.addresses import KERNEL_HALF

_PAGE = 4096
_SHARED = 1 << 3
_HUGETLB = 1 << 22
"""Of ``vm_flags``; pages of such files are counted in another way."""

_MAX_MAPPINGS = 1 << 20
"""Sixteen times what one address space may have by default (vm.max_map_count)."""

_TRIES = 64
"""Pages that are filtered out before it is believed that all are."""


@dataclass(frozen=True)
class SharedFile:
    """A file that an address space maps, and shares with others."""

    start: int
    end: int
    first: int
    """Where in the file it starts."""

    inode: int
    sequence: int
    """The inode's, which futexes are known by; 0 if none was ever used."""


class UserMapping(NamedTuple):
    """A part of an address space, a ``struct vm_area_struct``."""

    start: int
    end: int
    page: int
    """Where in the file it starts, in pages."""

    file: int
    """The ``struct file``; 0 if it is of none."""

    def file_offset(self, address: int) -> int:
        """Return where in the file an address is."""
        return self.page * _PAGE + address - self.start


def mapping_at(layout: Layout, mm: int, address: int) -> UserMapping | None:
    """Find what is mapped at an address."""
    if not mm:
        return None
    space = drgn.Object(layout.reader.prog, "struct mm_struct *", value=mm)
    vma = vma_find(space, address)
    if not vma:
        return None
    names = ("vm_start", "vm_end", "vm_pgoff", "vm_file")
    return UserMapping(*layout.members(vma.value_(), "vm_area_struct", *names))


class UserMemory:
    """Reads memory of processes; that there is none at all is noted."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._losses = losses
        self._filtered = 0
        self._any = False
        self._shared: dict[int, list[SharedFile]] = {}
        self._files = FilePages(layout)

    def read(self, mm: int, address: int, size: int) -> bytes | None:
        """Read some bytes of the address space of a ``struct mm_struct``.

        ``None`` if any of them is not in the dump.
        """
        if not self._any and self._filtered >= _TRIES:
            return None
        try:
            data = self._read(mm, address, size)
        except drgn.FaultError as error:
            if fault_reason(error) == "excluded":
                self._filtered += 1
                self._losses.note(
                    "user-memory-filtered",
                    "user memory is not in the dump: owners of futexes are not told",
                )
            return None
        except NotImplementedError as error:
            self._losses.note(
                "user-memory-unknown", f"user memory is not read: {error}"
            )
            return None
        self._any = True
        return data

    def shared_files(self, mm: int) -> list[SharedFile]:
        """List the files that an address space shares with others."""
        found = self._shared.get(mm)
        if found is None:
            self._shared[mm] = found = []
            try:
                vmas = for_each_vma(self._space(mm))
                for vma in islice(vmas, _MAX_MAPPINGS):
                    file = self._shared_file(vma.value_())
                    if file is not None:
                        found.append(file)
            except drgn.FaultError as error:
                self._losses.lose(Loss.MAPPINGS, f"mappings are lost: {error}")
        return found

    def _space(self, mm: int) -> drgn.Object:
        return drgn.Object(self._prog, "struct mm_struct *", value=mm)

    def _shared_file(self, vma: int) -> SharedFile | None:
        names = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
        start, end, page, file, flags = self._layout.members(
            vma, "vm_area_struct", *names
        )
        if file < KERNEL_HALF or not flags & _SHARED:
            return None
        inode = self._layout.member(file, "file", "f_inode")
        # "futex: Fix inode life-time issue" (in v5.6)
        sequence = self._layout.member(inode, "inode", "i_sequence")
        return SharedFile(start, end, page * _PAGE, inode, sequence)

    def _read(self, mm: int, address: int, size: int) -> bytes:
        space = self._space(mm)
        parts = []
        while size:
            part = min(size, _PAGE - address % _PAGE)
            try:
                data: bytes = access_remote_vm(space, address, part)
            except drgn.FaultError as error:
                # What the page's own read could not get the file has not either.
                if "not mapped" not in str(error):
                    raise
                data = self._of_file(space, address, part, error)
            parts.append(data)
            address += part
            size -= part
        return b"".join(parts)

    def _of_file(
        self, space: drgn.Object, address: int, size: int, error: drgn.FaultError
    ) -> bytes:
        """Read what the process shares, but has not touched itself.

        :raises drgn.FaultError: if it is not there: *error* or another
        """
        vma = vma_find(space, address)
        if not vma:
            raise error
        names = ("vm_start", "vm_pgoff", "vm_file", "vm_flags")
        start, first, file, flags = self._layout.members(
            vma.value_(), "vm_area_struct", *names
        )
        # What is private may have been changed, and swapped out since.
        if file < KERNEL_HALF or not flags & _SHARED or flags & _HUGETLB:
            raise error
        return self._files.read(file, first * _PAGE + address - start, size)


@per_context
def user_memory(context: LockContext) -> UserMemory:
    """Return the reader of the memory of processes."""
    return UserMemory(context.layout, context.losses)
