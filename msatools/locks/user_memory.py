# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the memory of processes, and files in the page cache."""

from collections.abc import Iterator

import drgn
from drgn.helpers.linux.mm import access_remote_vm
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, NotSupportedError
from msatools.kernel.reader import fault_reason
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import XArray, maple_entries, maple_load
from msatools.locks.context import LockContext, per_context
from msatools.locks.struct_reader import Layout, find_range
from msatools.program.linear import KERNEL_HALF, vmemmap_base
from msatools.selfdesc.find import ask, find_type

# --- The struct vm_area_struct of address spaces.
#
# drgn's helpers for it have no bounds: they may not end if the data is damaged.


_MAX_MAPPINGS = 1 << 20
"""Sixteen times the default limit of one address space (vm.max_map_count)."""


def find_mapping(layout: Layout, mm: int, address: int) -> int:
    """Find the ``struct vm_area_struct`` that contains an address of user memory.

    :param mm: Address of the ``struct mm_struct``.
    :return: Its address; 0 if nothing is mapped there.
    :raises drgn.FaultError: if something on the way is damaged
    """
    if layout.has("mm_struct", "mm_mt"):
        # d4af56c5c7c6 ("mm: start tracking VMAs with maple tree") (in v6.1)
        tree = mm + layout.offset("mm_struct", "mm_mt")
        return maple_load(layout.reader, tree, address)
    node = layout.member(mm, "mm_struct", "mm_rb.rb_node")
    ends = "vm_start", "vm_end"
    return find_range(layout, node, "vm_area_struct", "vm_rb", ends, address)


def vmas_of(layout: Layout, mm: int, losses: LossLog) -> Iterator[int]:
    """Yield the addresses of all ``struct vm_area_struct`` of an address space.

    :raises UNREADABLE: if the list of an older kernel is damaged; damage of a tree
        is counted
    """
    if layout.has("mm_struct", "mm_mt"):
        tree = mm + layout.offset("mm_struct", "mm_mt")
        found = maple_entries(layout.reader, tree, losses, "the tree of mappings")
        yield from (entry for _, _, entry in found)
        return
    # 763ecb035029 ("mm: remove the vma linked list") (in v6.1)
    seen: set[int] = set()
    mapping = layout.member(mm, "mm_struct", "mmap")
    while mapping:
        if mapping in seen or len(seen) >= _MAX_MAPPINGS:
            raise DamagedDataError("a loop of mappings", mapping)
        seen.add(mapping)
        yield mapping
        mapping = layout.member(mapping, "vm_area_struct", "vm_next")


# --- Contents of files, read from the page cache.


class FilePages:
    """Reads the pages of files that are in the page cache of a kernel."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prog = layout.reader.prog

    def read(self, file: int, offset: int, size: int) -> bytes:
        """
        Read a part of a file.

        :param file: Address of a ``struct file``.
        :raises UNREADABLE: if any page of the part is not in the page cache
        """
        parts = []
        page_size = self._layout.page_size
        for start, length in split_by_page(offset, size, page_size):
            data = self._page(file, *divmod(start, page_size), length)
            if data is None:
                raise DamagedDataError("not in the page cache", start)
            parts.append(data)
        return b"".join(parts)

    def read_around_gaps(self, file: int, offset: int, size: int) -> bytes:
        """Read a part of a file, with zeros in place of missing pages."""
        parts = []
        for start, length in split_by_page(offset, size, self._layout.page_size):
            try:
                parts.append(self.read(file, start, length))
            except UNREADABLE:
                parts.append(bytes(length))
        return b"".join(parts)

    def _page(self, file: int, index: int, offset: int, size: int) -> bytes | None:
        """Read from one page of a file; ``None`` if it is not in the page cache.

        :raises drgn.FaultError: if the page, or a structure that leads to it, cannot
            be read
        """
        layout = self._layout
        mapping = layout.member(file, "file", "f_mapping")
        pages = mapping + layout.offset("address_space", "i_pages")
        # load() also returns 0 for the shadow entry of a page that was reclaimed, and
        # for the swap entry of a page of tmpfs.
        head = XArray(layout.reader, pages).load(index)
        if head < KERNEL_HALF:
            return None
        # All slots of a large folio hold its head page since 4101196b19d7 ("mm: page
        # cache: store only head pages in i_pages") (in v5.4); 7b230db3b8d3 ("mm:
        # Introduce struct folio") (in v5.16) gave that a type of its own.
        type_name = "folio" if layout.has("folio", "index") else "page"
        pfn = (head - vmemmap_base(self._prog)) // layout.size("page")
        pfn += index - layout.member(head, type_name, "index")
        return layout.reader.read(pfn * layout.page_size + offset, size, physical=True)


def split_by_page(offset: int, size: int, page_size: int) -> Iterator[tuple[int, int]]:
    """Split a range at page boundaries; yield the start and the size of each part."""
    while size > 0:
        length = min(size, page_size - offset % page_size)
        yield offset, length
        offset += length
        size -= length


# --- Reads the memory of processes, if the dump has it.


_SHARED = 1 << 3
_HUGETLB = 1 << 22
"""``VM_HUGETLB``: ``vm_pgoff`` and indexes in the page cache have different units."""

_TRIES = 64
"""Number of excluded pages after which all user memory is assumed to be excluded."""


class SharedFile(Struct, frozen=True):
    """A shared mapping of a file."""

    start: int
    end: int
    first: int
    """Offset of its start in the file."""

    inode: int
    sequence: int
    """``inode.i_sequence``, as in keys of futexes; 0 if the file never had a futex."""


_EXECUTABLE = 4
"""``VM_EXEC``."""


class UserMapping(Struct, frozen=True):
    """A ``struct vm_area_struct``."""

    start: int
    end: int
    offset: int
    """Offset of its start in the file."""

    file: int
    """Address of the ``struct file``; 0 if it maps no file."""

    executable: bool

    def file_offset(self, address: int) -> int:
        """Return the offset of an address in the file."""
        return self.offset + address - self.start


def mapping_at(layout: Layout, mm: int, address: int) -> UserMapping | None:
    """Return the mapping at an address; ``None`` if nothing is mapped there."""
    if not mm:
        return None
    vma = find_mapping(layout, mm, address)
    if not vma:
        return None
    names = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
    start, end, page, file, flags = layout.members(vma, "vm_area_struct", *names)
    offset = page * layout.page_size
    return UserMapping(start, end, offset, file, bool(flags & _EXECUTABLE))


class UserMemory:
    """Reads memory of processes; makes a note if the dump has none at all."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._losses = losses
        self._filtered = 0
        self._any = False
        self._shared: dict[int, list[SharedFile]] = {}
        self._files = FilePages(layout)

    def read(self, mm: int, address: int, size: int) -> bytes | None:
        """Read memory of a process.

        :param mm: Address of its ``struct mm_struct``.
        :return: ``None`` if any byte is not in the dump.
        """
        if address < 0:
            return None  # around a futex that a program says is at NULL
        if not self._any and self._filtered >= _TRIES:
            return None
        try:
            data = self._read(mm, address, size)
        except UNREADABLE as error:
            if fault_reason(error) == "excluded":
                self._filtered += 1
                self._losses.note(
                    "user-memory-filtered",
                    "user memory is not in the dump: owners of futexes are unknown",
                )
            return None
        except NotSupportedError as error:
            self._losses.note(
                "user-memory-unknown", f"user memory is not read: {error}"
            )
            return None
        self._any = True
        return data

    def shared_files(self, mm: int) -> list[SharedFile]:
        """Return the shared mappings of files of an address space."""
        files = self._shared.get(mm)
        if files is None:
            self._shared[mm] = files = []
            try:
                for vma in vmas_of(self._layout, mm, self._losses):
                    file = self._shared_file(vma)
                    if file is not None:
                        files.append(file)
            except UNREADABLE as error:
                self._losses.lose(Loss.MAPPINGS, f"cannot read mappings: {error}")
        return files

    def shared_file(self, mm: int, address: int) -> SharedFile | None:
        """Return the shared mapping of a file at an address; ``None`` if there is none.

        :raises drgn.FaultError: if the mappings cannot be read
        """
        vma = find_mapping(self._layout, mm, address)
        return self._shared_file(vma) if vma else None

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
        offset = page * self._layout.page_size
        return SharedFile(start, end, offset, inode, sequence)

    def _read(self, mm: int, address: int, size: int) -> bytes:
        # Finding a type by name costs as much as reading a page.
        name = "struct mm_struct *"
        type_ = self._layout.reader.once(name, lambda: find_type(self._prog, name))
        space = drgn.Object(self._prog, type_, value=mm)
        parts = []
        for start, length in split_by_page(address, size, self._layout.page_size):
            try:
                data: bytes = ask(access_remote_vm, space, start, length)
            except UNREADABLE as error:
                # Only a page that is not mapped may have a copy in the page cache.
                if "not mapped" not in str(error):
                    raise
                data = self._read_from_file(mm, start, length, error)
            parts.append(data)
        return b"".join(parts)

    def _read_from_file(
        self, mm: int, address: int, size: int, error: drgn.FaultError
    ) -> bytes:
        """Read a page of a shared mapping that the process has not touched.

        :raises drgn.FaultError: *error*, or if the page is not in the page cache
        """
        vma = find_mapping(self._layout, mm, address)
        if not vma:
            raise error
        names = ("vm_start", "vm_pgoff", "vm_file", "vm_flags")
        start, first, file, flags = self._layout.members(vma, "vm_area_struct", *names)
        # A private page may have been changed and swapped out.
        if file < KERNEL_HALF or not flags & _SHARED or flags & _HUGETLB:
            raise error
        offset = first * self._layout.page_size + address - start
        return self._files.read(file, offset, size)


@per_context
def user_memory(context: LockContext) -> UserMemory:
    """Return the reader of the memory of processes."""
    return UserMemory(context.layout, context.losses)
