# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find what lies at an address; the most specific answer comes first."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import drgn
from msgspec.structs import replace

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import read_clocks
from msatools.kernel.code import kernel_symbol
from msatools.kernel.reader import MAX_ADDRESS
from msatools.kernel.report import KernelSession, Progress
from msatools.locks.locks import collect_locks
from msatools.locks.places import SlabObject
from msatools.memory.classes import CLASSES, PageClass
from msatools.program.linear import KERNEL_HALF, kernel_start
from msatools.program.model import Address, Target
from msatools.selfdesc.find import ask, find_symbol, find_type, find_variable
from msatools.selfdesc.load import finders_of, is_served_by_btf
from msatools.whatis.kernel_memory import (
    PerCpuPlaces,
    SlabObjects,
    StackPlaces,
    find_area,
)
from msatools.whatis.locks import WaitedLocks, from_waits, futex_at, read_lock
from msatools.whatis.lookup import (
    KernelMap,
    Lookup,
    describe_object,
    is_freed,
    lock_at,
    member_at,
)
from msatools.whatis.model import (
    AddressAnswer,
    AskedAddress,
    LockThere,
    Page,
    PageFile,
    PageStruct,
    SlabPlace,
    Symbol,
    TableOwner,
    Task,
    WhatisOptions,
    WhatisReport,
)
from msatools.whatis.pages import PageFound, Pages
from msatools.whatis.processes import Mappers, TableOwners, UserPlaces
from msatools.whatis.words import AddressEnds, owner_text, summary

# --- The class of a page of memory, and its owner.


_ANON = (PageClass.ANON, PageClass.KSM)
_MAPPED = (
    *_ANON,
    PageClass.FILE,
    PageClass.EXEC,
    PageClass.SHMEM,
    PageClass.USER_HUGETLB,
)
_TABLES = (PageClass.PAGE_TABLES, PageClass.PAGE_TABLES_OWN)
_MAX_PFN = 1 << 52


class PageAnswers:
    """Describes single pages."""

    def __init__(
        self, lookup: Lookup, pages: Pages, slabs: SlabObjects, kernel: KernelMap
    ) -> None:
        self._lookup = lookup
        self._pages = pages
        self._slabs = slabs
        self._map = kernel
        self._mappers = Mappers(lookup)
        self._tables = TableOwners(lookup)

    def of(self, pfn: int) -> Page | None:
        """Return the page with a pfn; ``None`` if it has no struct page."""
        if not 0 <= pfn < _MAX_PFN:
            return None
        found = self._pages.find(pfn)
        return None if found is None else self._page(found)

    def _page(self, found: PageFound) -> Page:
        file = self._pages.file(found)
        cached = None
        if file is not None:
            huge = found.code == PageClass.USER_HUGETLB
            cached = PageFile(
                name=file.name,
                inode=file.inode,
                offset=None if huge else found.index * self._lookup.page_size,
                fstype=file.fstype,
                device=file.device,
            )
        mappers = self._mappers.of(found) if found.code in _MAPPED else None
        page = Page(
            pfn=found.pfn,
            page_class=found.class_name,
            is_guess=found.is_guess,
            owner=None,
            flags=found.flags,
            order=found.order,
            node=found.node,
            references=found.references,
            cgroup=self._pages.cgroup(found),
            file=cached,
            mappers=mappers,
            cache=self._cache_of(found),
            table_owners=self._table_owners(found),
        )
        owner = owner_text(page)
        if owner is None and found.code == PageClass.RESERVED:
            image = self._map.in_image(found.pfn * self._lookup.page_size)
            owner = None if image is None else "of the kernel's image"
        return replace(page, owner=owner)

    def _table_owners(self, found: PageFound) -> tuple[TableOwner, ...] | None:
        """Return the processes that a page table belongs to; ``None`` if none."""
        return (self._tables.of(found.pfn) or None) if found.code in _TABLES else None

    def _cache_of(self, found: PageFound) -> str | None:
        """Return the name of the slab cache of a page; ``None`` if it is no slab."""
        if found.code != PageClass.SLAB:
            return None
        address = self._map.direct(found.pfn * self._lookup.page_size)
        return None if address is None else self._slabs.cache_at(address)


# --- Find what lies at an address: try each kind of memory in turn.


_AREA_CODES = PageClass.VMALLOC, PageClass.STACKS, PageClass.VMAP
_IN_AREAS = tuple(CLASSES[code] for code in _AREA_CODES)
_Facts = dict[str, Any]
"""Fields of an :class:`AddressAnswer`."""


class AddressFinder:
    """Finds what lies at addresses; reads shared by them are done once."""

    def __init__(self, lookup: Lookup, target: Target) -> None:
        self._lookup = lookup
        self._prog = lookup.prog
        self._pages = Pages(lookup)
        self._slabs = SlabObjects(lookup)
        self._map = KernelMap(lookup.prog)
        self._page_answers = PageAnswers(lookup, self._pages, self._slabs, self._map)
        self._stacks = StackPlaces(lookup)
        self._percpu = PerCpuPlaces(lookup)
        self._users = UserPlaces(lookup)
        self._waited = WaitedLocks(lookup, target)
        self.locks: dict[str, LockThere] = {}
        """The locks found so far, by ID."""

    def answer(self, asked: AskedAddress) -> AddressAnswer:
        """Return what lies at an address.

        :raises NoSuchPidError: if the address is of a process that does not exist
        """
        address, facts = self._facts(asked)
        facts |= self._of_waiter(address, facts)
        made = AddressAnswer(
            asked=asked.word,
            address=None if address is None else Address(address),
            kind="unknown",
            text="",
            readable=facts.pop("readable", None),
            **facts,
        )
        kind, text = summary(made, asked, self._ends)
        return replace(made, kind=kind, text=text)

    @cached_property
    def _ends(self) -> AddressEnds:
        # The halves of processes and of the kernel have the same size.
        user_end = (1 << 64) - kernel_start(self._prog)
        return AddressEnds(self._lookup.page_size, user_end)

    def _facts(self, asked: AskedAddress) -> tuple[int | None, _Facts]:
        if asked.space == "user":
            assert asked.pid is not None
            return asked.number, self._of_user(asked.pid, asked.number)
        if asked.space in ("physical", "pfn"):
            shift = int(find_variable(self._prog, "PAGE_SHIFT").value_())
            physical = asked.number
            if asked.space == "pfn":
                physical <<= shift
            return self._of_physical(physical)
        address = asked.number
        if asked.space == "symbol":
            start = self._symbol(asked.symbol or "")
            if start is None:
                return None, {}
            address = (start + asked.number) & MAX_ADDRESS
        return address, self._of_virtual(address)

    def _symbol(self, name: str) -> int | None:
        try:
            return kernel_symbol(self._prog, name)
        except MissingError:
            pass
        try:
            # Symbols of modules; per-CPU variables in debug info.
            return int(find_symbol(self._prog, name).address)
        except MissingError:
            return None

    def _of_user(self, pid: int, address: int) -> _Facts:
        found = self._users.find(pid, address)
        facts: _Facts = {"user": found.place}
        if found.pfn is not None:
            size = self._lookup.page_size
            facts |= self._of_page(found.pfn)
            facts["readable"] = self._is_readable(
                found.pfn * size + address % size, physical=True
            )
        if found.mm:
            facts |= self._of_lock(futex_at(self._lookup, found.mm, address))
        return facts

    def _of_physical(self, physical: int) -> tuple[int | None, _Facts]:
        """Return the address in the direct map, and what lies there."""
        pfn = physical // self._lookup.page_size
        address = self._map.direct(physical)
        facts: _Facts = {"readable": self._is_readable(physical, physical=True)}
        facts |= self._of_page(pfn)
        page = facts.get("page")
        if address is not None:
            facts |= self._of_memory(address, pfn)
        facts |= self._of_image(physical, page)
        if page is not None and page.page_class in _IN_AREAS:
            facts |= self._of_area(physical)
        return address, facts

    def _of_area(self, physical: int) -> _Facts:
        """Return the vmalloc area that maps a page, and the task if it is a stack."""
        size = self._lookup.page_size
        mapped = self._pages.mapped_at(physical // size)
        if mapped is None:
            return {}
        address = mapped + physical % size
        facts: _Facts = {}
        if (area := find_area(self._lookup, address)) is not None:
            facts["vmalloc"] = area
        found = self._stacks.find(address)
        if found is not None:
            facts["task"], facts["stack"] = found
        return facts

    def _of_virtual(self, address: int) -> _Facts:
        if address < KERNEL_HALF:
            place = self._percpu.of_pointer(address) if address else None
            return {} if place is None else {"percpu": place}
        if address < kernel_start(self._prog):
            return {}
        described = self._pages.number_of(address)
        if described is not None:
            pfn, offset = described
            facts: _Facts = {"page_struct": PageStruct(pfn=pfn, offset=offset)}
            facts["readable"] = self._is_readable(address)
            type_ = find_type(self._prog, "struct page")
            facts |= {"type": "struct page", "member": member_at(type_, offset)}
            return facts | self._of_page(pfn)
        linked = self._percpu.of_linked(address)
        if linked is not None:
            return {"percpu": linked}
        tables = self._lookup.tables
        pfn_there = None if tables is None else tables.pfn(address)
        facts = {"readable": self._is_readable(address)}
        # On arm64 the segments of the kernel's image are vmalloc areas, too.
        start, end = self._map.image
        is_image = start <= address < end
        area = None if is_image else find_area(self._lookup, address)
        if area is not None:
            facts["vmalloc"] = area
        if pfn_there is None:
            guarded = self._stacks.find_guard(address)
            if guarded is not None:
                facts["task"], facts["stack"] = guarded
            return facts | self._of_symbol(address, None)
        facts |= self._of_page(pfn_there)
        page = facts.get("page")
        facts |= self._of_symbol(address, page)
        facts |= self._of_memory(address, pfn_there)
        physical = pfn_there * self._lookup.page_size
        physical += address % self._lookup.page_size
        if "symbol" not in facts:
            facts |= self._of_image(physical, page)
        if "percpu" not in facts:
            facts |= self._of_mapped_percpu(physical)
        return facts

    def _of_image(self, physical: int, page: Page | None) -> _Facts:
        """Return the symbol at physical memory of the kernel's image."""
        image = self._map.in_image(physical)
        if image is None or is_freed(page):
            return {}
        facts = self._of_symbol(image, page)
        return facts | self._of_waiter(image, facts)

    def _of_mapped_percpu(self, physical: int) -> _Facts:
        """Return the per-CPU variable that has a second mapping, as stacks have."""
        address = self._map.direct(physical)
        place = None if address is None else self._percpu.find(address)
        if address is None or place is None or place.variable is None:
            return {}
        found = self._of_percpu(address, place.variable, place.offset)
        return {"percpu": place} | found

    def _of_symbol(self, address: int, page: Page | None) -> _Facts:
        """Return the symbol at an address, the type of a variable, and the task.

        :param page: The page there; ``None`` if none is mapped, or that is unknown.
        """
        found = self._lookup.symbols.name(address)
        if found is None:
            return {}
        start = found.start
        offset = 0 if start is None else address - start
        name = found.symbol or f"[{found.module}]"
        is_gone = self._map.in_init(address) if page is None else is_freed(page)
        freed = found.module is None and is_gone
        facts: _Facts = {
            "symbol": Symbol(name=name, offset=offset, module=found.module, freed=freed)
        }
        if start is None or found.module is not None or freed:
            return facts
        variable = self._variable(name)
        if variable is None or variable.address_ != start:
            return facts
        type_ = variable.type_
        if not 0 <= offset < _size(type_):
            return facts
        facts |= self._of_type(type_, start, offset)
        if name == "init_task":
            facts |= self._of_task(start)
        return facts

    def _of_type(self, type_: drgn.Type, start: int, offset: int) -> _Facts:
        """Return an object's type, and its member and lock at *offset*."""
        facts: _Facts = {"type": type_.type_name()}
        if (member := member_at(type_, offset)) is not None:
            facts["member"] = member
        lock = lock_at(type_, offset)
        if lock is not None:
            facts |= self._of_lock(
                read_lock(self._lookup, lock.type, start + lock.offset)
            )
        return facts

    def _of_waiter(self, address: int | None, facts: _Facts) -> _Facts:
        """Return the lock at an address of unknown type, if a task waits for it."""
        known = ("lock", "type", "page_struct", "stack", "user")
        if (
            address is None
            or address < KERNEL_HALF
            or not facts.keys().isdisjoint(known)
        ):
            return {}
        symbol = facts.get("symbol")
        # Without a symbol, try the address alone: objects may have several locks.
        offset = symbol.offset if symbol is not None else 0
        there = self._waited.find(address - offset, offset)
        if there is None and offset:
            there = self._waited.find(address, 0)
        return self._of_lock(there)

    def _of_lock(self, there: LockThere | None) -> _Facts:
        if there is None:
            return {}
        self.locks.setdefault(there.id, there)
        return {"lock": there.id}

    def _of_task(self, address: int) -> _Facts:
        try:
            return {"task": self._lookup.task(address)}
        except UNREADABLE:
            return {}

    def _of_memory(self, address: int, pfn: int | None) -> _Facts:
        """Return the stack, per-CPU memory and slab object at an address."""
        facts: _Facts = {}
        found = self._stacks.find(address)
        if found is not None:
            facts["task"], facts["stack"] = found
        if (place := self._percpu.find(address)) is not None:
            facts["percpu"] = place
            facts |= self._of_percpu(address, place.variable, place.offset)
        if pfn is not None and self._map.is_direct(address):
            facts |= self._of_slab(address)
        return facts

    def _of_percpu(self, address: int, name: str | None, offset: int) -> _Facts:
        if name is None:
            return {}
        variable = self._variable(name)
        if variable is None or not offset < _size(variable.type_):
            return {}
        return self._of_type(variable.type_, address - offset, offset)

    def _variable(self, name: str) -> drgn.Object | None:
        """Return a variable of the kernel; ``None`` if its type is not known."""
        flag = drgn.FindObjectFlags.VARIABLE
        try:
            if is_served_by_btf(self._prog):
                # It is no loss that BTF lacks most types of variables, so ask for this
                # one without a record of refusals.
                found = finders_of(self._prog).objects.find(name, flag)
            else:
                found = ask(self._prog.object, name, flag)
        except MissingError:
            return None
        return None if found is None or found.absent_ else found

    def _of_slab(self, address: int) -> _Facts:
        found = self._slabs.find(address)
        if found is None:
            return {}
        facts: _Facts = {"slab": found}
        type_ = self._slabs.type_of(found)
        if type_ is None and (task := self._task_at(found)) is not None:
            type_ = find_type(self._prog, "struct task_struct")
            facts["task"] = task
        if type_ is not None and found.offset < drgn.sizeof(type_):
            if found.allocated is False:
                # Freed: only the type that the object had is known.
                facts["type"] = type_.type_name()
                return facts
            facts |= self._of_type(type_, found.object, found.offset)
            if type_.tag == "task_struct":
                facts |= self._of_task(found.object)
        if found.allocated is not False and "task" not in facts:
            piece = SlabObject(found.cache, found.object, found.bytes)
            text = describe_object(self._lookup, type_, piece)
            if text:
                facts["object"] = text
        return facts

    def _task_at(self, found: SlabPlace) -> Task | None:
        """Return the task in an object of a merged cache; ``None`` if it is no task."""
        if found.bytes < self._lookup.structs.size("task_struct"):
            return None
        known = self._lookup.stacks.values()
        if found.object not in known:
            return None
        return self._lookup.task(found.object)

    def _of_page(self, pfn: int) -> _Facts:
        page = self._page_answers.of(pfn)
        return {} if page is None else {"page": page}

    def _is_readable(self, address: int, *, physical: bool = False) -> bool:
        try:
            self._lookup.reader.read(address, 1, physical=physical)
        except UNREADABLE:
            return False
        return True


def _size(type_: drgn.Type) -> int:
    return int(drgn.sizeof(type_)) if type_.is_complete() else 0


# --- Report what lies at addresses: the session of msa-whatis.


class Whatis(KernelSession[WhatisReport, WhatisOptions]):
    """A run of reports on one kernel: see :class:`msatools.kernel.report.Session`."""

    def report(self, progress: Progress) -> WhatisReport:
        """Report what lies at the addresses now."""
        asked = self._options.addresses
        with self._reporting():
            clocks = read_clocks(self._reader, self._losses)
            lookup = Lookup(self._reader, clocks, self._losses)
            finder = AddressFinder(lookup, self._target)
            answers = []
            for number, each in enumerate(asked):
                progress(number, len(asked))
                answers.append(finder.answer(each))
            locks = list(finder.locks.values())
            if self._options.waits:
                locks += self._waited_for(answers, finder.locks)
        head = self._head(clocks.monotonic_ns)
        return WhatisReport(**head, answers=tuple(answers), locks=tuple(locks))

    def _waited_for(
        self, answers: list[AddressAnswer], known: dict[str, LockThere]
    ) -> Iterator[LockThere]:
        """Yield the locks in the objects found that tasks wait for.

        The waits of all tasks are read to find them.
        """

        ranges = [_extent(answer) for answer in answers]
        for row in collect_locks(self._prog, target=self._target).locks:
            lock = from_waits(row)
            if lock is None or lock.id in known:
                continue
            if any(start <= lock.address < end for start, end in ranges):
                yield lock


def _extent(answer: AddressAnswer) -> tuple[int, int]:
    """Return start and end of the object of an answer; 0, 0 if it has none."""
    if answer.slab is not None:
        return answer.slab.object, answer.slab.object + answer.slab.bytes
    if answer.page_struct is not None or answer.address is None:
        return 0, 0
    if answer.address < KERNEL_HALF:
        # An address of a process: others may have a futex at the same address.
        return 0, 0
    return answer.address, answer.address + 1
