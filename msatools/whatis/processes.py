# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processes whose memory or page tables an address or a page belongs to."""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import vma_name
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingMemberError
from msatools.kernel.pids import NoSuchPidError, find_task
from msatools.kernel.reader import U64, decode_string
from msatools.kernel.report import Loss
from msatools.kernel.structs import MAPPING_ANON, MAPPING_FLAGS
from msatools.kernel.walks import tree_records
from msatools.locks.user_memory import find_mapping
from msatools.memory.classes import PageClass
from msatools.program.arch import TableFormat, Words, table_format
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.selfdesc.find import ask, drgn_lookups, pointer_to
from msatools.tasks.identity import AddressSpace, address_spaces
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import PageMapper, TableOwner, Task, UserPlace
from msatools.whatis.pages import PageFound

# --- What the page tables of a process say about single addresses.


TableState = Literal["mapped", "swapped", "absent", "unknown"]


class UserEntry(Struct, frozen=True):
    """The entry for an address in the page tables of a process."""

    state: TableState
    pfn: int | None = None
    """The page that is mapped; ``None`` if none is."""


_UNKNOWN = UserEntry("unknown")
_ABSENT = UserEntry("absent")


class UserEntries:
    """Looks up single addresses in page tables of processes."""

    def __init__(self, lookup: Lookup) -> None:
        self._reader = lookup.reader
        self._structs = lookup.structs
        self._form = table_format(lookup.prog)

    def find(self, mm: int, address: int) -> UserEntry:
        """Return the entry for an address.

        :param mm: Address of the ``struct mm_struct``.
        """
        form = self._form
        if form is None:
            return _UNKNOWN
        try:
            top = self._structs.member(mm, "mm_struct", "pgd")
            return self._walk(form, top, address)
        except UNREADABLE:
            return _UNKNOWN

    def _walk(self, form: TableFormat, top: int, address: int) -> UserEntry:
        if address >> form.shifts[0] >= form.user_entries:
            return _ABSENT
        table, physical = top, False
        last = form.user_entries - 1
        for shift in form.shifts:
            place = table + 8 * (address >> shift & last)
            (entry,) = U64.unpack(self._reader.read(place, 8, physical=physical))
            words = np.array([entry], np.uint64)
            huge = form.huge_of(words, shift)
            is_leaf = shift == form.page_shift or (huge is not None and bool(huge[0]))
            if is_leaf and form.mapped_of(words)[0]:
                pages = form.pages_of(shift)
                first = int(form.user_pfns(words)[0]) & ~(pages - 1)
                within = address >> form.page_shift & (pages - 1)
                return UserEntry("mapped", first + within)
            if not form.present_of(words)[0]:
                software = entry & ~form.hardware
                # Entries of swap, of migration and the like are not distinguished.
                return UserEntry("swapped") if is_leaf and software else _ABSENT
            table, physical = form.address(entry), True
            last = form.entries - 1
        return _ABSENT


# --- The processes that map a page, by the kernel's reverse mapping (mm/rmap.c).
#
# An anonymous page points at its struct anon_vma, a page of a file at the file's struct
# address_space, a page of KSM at its node in the stable tree (mm/ksm.c). Each leads to
# the mappings that may have the page; their page tables say which do.


MAX_MAPPERS = 16
"""Maximum number of processes that are listed for a page."""

_MAX_TRIED = 1 << 10
"""Maximum number of mappings whose page tables are read for a page, in some 0.1 s."""

_KSM = 0b11
_MAPPERS_VMA = ("vm_start", "vm_end", "vm_mm")
_KSM_ITEMS = ("ksm_rmap_item", "rmap_item")
_KSM_NODES = ("ksm_stable_node", "stable_node")
"""Linux kernel commit 21fbd59136e0 ("ksm: add the ksm prefix to the names of the ksm
private structures") (in v6.1)"""

_Place = tuple[int, int]
"""Address of a ``struct mm_struct``, and an address in that memory."""


class Mappers:
    """Finds the processes that map single pages."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._structs = lookup.structs
        self._entries = UserEntries(lookup)

    def of(self, page: PageFound) -> tuple[PageMapper, ...]:
        """Return the processes that map a page, at most :data:`MAX_MAPPERS`."""
        found: list[PageMapper] = []
        try:
            for mm, address in islice(self._places(page), _MAX_TRIED):
                if self._entries.find(mm, address).pfn != page.pfn:
                    continue
                process = self._lookup.process_of(mm)
                if process is not None:
                    found.append(
                        PageMapper(
                            pid=process.pid,
                            comm=process.comm,
                            address=Address(address),
                        )
                    )
                if len(found) == MAX_MAPPERS:
                    break
        except LOST as error:
            text = f"cannot read mappings of a page: {error}"
            self._lookup.losses.lose(Loss.MAPPINGS, text)
        return tuple(found)

    def _places(self, page: PageFound) -> Iterator[_Place]:
        """Yield the places at which a page may be mapped."""
        pointer, flags = page.mapping & ~MAPPING_FLAGS, page.mapping & MAPPING_FLAGS
        if pointer < KERNEL_HALF:
            return
        if page.code == PageClass.KSM or flags == _KSM:
            yield from self._of_ksm(pointer)
        elif flags == MAPPING_ANON:
            vmas = self._anonymous(pointer)
            yield from self._within(vmas, page, self._anonymous_offset)
        elif not flags:
            vmas = self._of_file(pointer)
            yield from self._within(vmas, page, self._offset_in_file)

    def _within(
        self, vmas: Iterator[int], page: PageFound, first_of: Callable[[int], int]
    ) -> Iterator[_Place]:
        """Yield the places in some mappings at which a page may be.

        :param first_of: Returns the index of the first page of a mapping.
        """
        size = self._lookup.page_size
        for vma in vmas:
            start, end, mm = self._structs.members(vma, "vm_area_struct", *_MAPPERS_VMA)
            for index in _indexes(page):
                address = start + (index - first_of(vma)) * size
                if start <= address < end and mm >= KERNEL_HALF:
                    yield mm, address

    def _offset_in_file(self, vma: int) -> int:
        return self._structs.member(vma, "vm_area_struct", "vm_pgoff")

    def _anonymous_offset(self, vma: int) -> int:
        # In v7.3 private pages of files have an index of their own, as if they were of
        # no file; it is in two members.
        if not self._structs.has("vm_area_struct", "__vm_anon_pgoff_lo"):
            return self._offset_in_file(vma)
        low, high = self._structs.members(
            vma, "vm_area_struct", "__vm_anon_pgoff_lo", "__vm_anon_pgoff_hi"
        )
        return high << 32 | low

    def _anonymous(self, anon_vma: int) -> Iterator[int]:
        structs = self._structs
        root = anon_vma + structs.offset("anon_vma", "rb_root.rb_root")
        node = structs.offset("anon_vma_chain", "rb")
        vma = structs.offset("anon_vma_chain", "vma")
        for _, data in tree_records(
            self._lookup.reader,
            root,
            node,
            vma + 8,
            self._lookup.losses,
            "the tree of an anonymous page's mappings",
        ):
            yield U64.unpack_from(data, vma)[0]

    def _of_file(self, mapping: int) -> Iterator[int]:
        structs = self._structs
        root = mapping + structs.offset("address_space", "i_mmap.rb_root")
        node = structs.offset("vm_area_struct", "shared.rb")
        for vma, _ in tree_records(
            self._lookup.reader,
            root,
            node,
            0,
            self._lookup.losses,
            "a file's tree of mappings",
        ):
            yield vma

    def _of_ksm(self, stable: int) -> Iterator[_Place]:
        structs = self._structs
        name = next((each for each in _KSM_NODES if structs.has(each, "hlist")), None)
        item = next((each for each in _KSM_ITEMS if structs.has(each, "hlist")), None)
        if name is None or item is None:
            return
        following = structs.member(stable, name, "hlist.first")
        for _ in range(_MAX_TRIED):
            if following < KERNEL_HALF:
                return
            rmap = following - structs.offset(item, "hlist")
            mm, address, following = structs.members(
                rmap, item, "mm", "address", "hlist.next"
            )
            yield mm, address & -self._lookup.page_size


def _indexes(page: PageFound) -> Iterator[int]:
    """Yield the indices that a page may have in a mapping, in pages."""
    yield page.index
    if page.code == PageClass.USER_HUGETLB and page.order:
        # It was in huge pages before "mm/filemap: remove hugetlb special casing in
        # filemap.c" (a08c7193e4f1, in v6.7).
        within = page.pfn - page.head
        index = (page.index - within << page.order) + within
        if index != page.index:
            yield index


# --- The processes whose page tables are in a page.
#
# struct ptdesc (include/linux/mm_types.h) has pt_mm only for the top-level tables of
# x86. So the tables of all processes are walked down to those above the last level: one
# of them points to the table.


MAX_OWNERS = 16
"""Maximum number of processes listed for a table; several may share hugetlb tables."""

_MAX_READ = 1 << 16
"""Maximum number of tables read, a page each: the upper ones of 64 TiB of mappings."""

_MAX_LEVEL = 1 << 22
"""Maximum number of tables kept of a level, in 100 MB: the lowest ones of 8 TiB."""


class _Level(NamedTuple):
    """The tables of one level, of all processes."""

    bytes: int
    """Bytes that each table maps."""

    tables: Words
    """Physical address of each table."""

    spaces: npt.NDArray[np.intp]
    """Index of each table's process in the list of address spaces."""

    starts: Words
    """First address that each table maps."""


class TableOwners:
    """Finds the processes of page tables; all are walked once."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._form = table_format(lookup.prog)
        self._left = _MAX_READ

    def of(self, pfn: int) -> tuple[TableOwner, ...]:
        """Return the processes whose table is in a page, at most :data:`MAX_OWNERS`."""
        found = []
        for level in self._levels:
            pfns = level.tables // np.uint64(self._lookup.page_size)
            for row in np.flatnonzero(pfns == pfn)[:MAX_OWNERS].tolist():
                space = self._spaces[level.spaces[row]]
                found.append(
                    TableOwner(
                        pid=space.pid,
                        comm=space.comm,
                        start=Address(int(level.starts[row])),
                        bytes=level.bytes,
                    )
                )
        return tuple(found[:MAX_OWNERS])

    @cached_property
    def _spaces(self) -> list[AddressSpace]:
        return address_spaces(self._lookup.reader, self._lookup.losses)

    @cached_property
    def _levels(self) -> list[_Level]:
        """All tables, the top level first."""
        form = self._form
        if form is None:
            return []
        level = self._top(form)
        levels = [level]
        # Entries at the last level map pages.
        for shift in form.shifts[:-1]:
            is_top = level is levels[0]
            level = self._below(form, level, shift, is_top=is_top)
            levels.append(level)
        return levels

    def _top(self, form: TableFormat) -> _Level:
        """Return the top-level tables of all processes."""
        tables, spaces = [], []
        for number, space in enumerate(self._spaces):
            pages = self._lookup.tables
            pfn = None if pages is None else pages.pfn(space.top)
            if pfn is not None:
                within = space.top % self._lookup.page_size
                tables.append(pfn * self._lookup.page_size + within)
                spaces.append(number)
        return _Level(
            form.user_entries << form.shifts[0],
            np.array(tables, np.uint64),
            np.array(spaces, np.intp),
            np.zeros(len(tables), np.uint64),
        )

    def _below(
        self, form: TableFormat, level: _Level, shift: int, *, is_top: bool
    ) -> _Level:
        """Return the tables that the entries of a level point to.

        :param shift: Shift of these entries.
        """
        count = form.user_entries if is_top else form.entries
        tables, spaces, starts, left = [], [], [], _MAX_LEVEL
        rows = zip(
            level.tables.tolist(),
            level.spaces.tolist(),
            level.starts.tolist(),
            strict=True,
        )
        for table, space, start in rows:
            entries = self._read(table, count)
            if entries is None:
                continue
            places = np.flatnonzero(form.table_entries(entries, shift))
            named = form.addresses(entries[places])
            kept = self._in_memory(named)[:left]
            left -= len(kept)
            tables.append(named[kept])
            spaces.append(np.full(len(kept), space, np.intp))
            offsets = places[kept].astype(np.uint64) << np.uint64(shift)
            starts.append(offsets + np.uint64(start))
        if not left:
            self._lose(f"only {_MAX_LEVEL:,} page tables of a level are read")
        return _Level(
            1 << shift,
            _joined(tables, np.uint64),
            _joined(spaces, np.intp),
            _joined(starts, np.uint64),
        )

    def _in_memory(self, tables: Words) -> npt.NDArray[np.intp]:
        """Return the first row of each table that is in memory; others are damage."""
        distinct, rows = np.unique(tables, return_index=True)
        pfns = distinct // np.uint64(self._lookup.page_size)
        known = np.zeros(len(pfns), np.bool_)
        for part in self._lookup.memmap:
            known |= (pfns >= part.pfn) & (pfns < part.pfn + part.pages)
        if not known.all():
            self._lose("page tables of processes point outside of memory")
        kept: npt.NDArray[np.intp] = np.sort(rows[known])
        return kept

    def _lose(self, text: str) -> None:
        self._lookup.losses.lose(Loss.USER_TABLES, text)

    def _read(self, table: int, count: int) -> Words | None:
        """Return the entries of a table; ``None`` if it cannot be read."""
        if not self._left:
            self._lose(
                f"only {_MAX_READ:,} page tables are read to find the process of one"
            )
            return None
        self._left -= 1
        try:
            return self._lookup.reader.words(table, count, physical=True)
        except UNREADABLE:
            self._lose("page tables of processes cannot be read")
            return None


def _joined(parts: list[npt.NDArray[Any]], kind: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, kind)


# --- Places in the memory of processes: the mapping, and the page.


_USERS_VMA = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
_PROTECTION = ((0x1, "r"), (0x2, "w"), (0x4, "x"))
_MAY_SHARE = 0x80

PlaceState = Literal["mapped", "swapped", "absent", "none", "unknown"]


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

    def _place(self, task: Task, mm: int, address: int, state: PlaceState) -> UserPlace:
        structs = self._lookup.structs
        try:
            vma = find_mapping(structs, mm, address)
            if not vma:
                return _nowhere(task)
            start, end, first, file, flags = structs.members(
                vma, "vm_area_struct", *_USERS_VMA
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


def _nowhere(task: Task, state: PlaceState = "absent") -> UserPlace:
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
