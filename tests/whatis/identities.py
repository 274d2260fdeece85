# SPDX-License-Identifier: LGPL-2.1-or-later

"""Identities of addresses, found by drgn's helpers with debug info, object by object.

Each function returns addresses that it knows the identity of, chosen at random.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from random import Random
from typing import Any, NamedTuple

import drgn
from drgn import Object, Program, cast, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu, for_each_possible_cpu
from drgn.helpers.linux.fs import inode_for_each_page, inode_path
from drgn.helpers.linux.mm import (
    PageSlab,
    compound_head,
    follow_pfn,
    for_each_vma,
    for_each_vmap_area,
    page_to_pfn,
    page_to_virt,
    pfn_to_page,
    vma_name,
    vmalloc_to_page,
)
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.slab import _get_slab_cache_helper, for_each_slab_cache

PAGE = 4096


class SlabTruth(NamedTuple):
    """An object of a slab cache."""

    address: int
    cache: str
    allocated: bool


def text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def slab_objects(prog: Program, chance: Random, count: int) -> list[SlabTruth]:
    """Return objects of slabs at random, half of them free, if so many are found.

    drgn's walk of a cache reads all pages for each cache; this one walks single slabs.
    """
    allocated: list[SlabTruth] = []
    free: list[SlabTruth] = []
    helpers: dict[int, Any] = {}
    for _ in range(400 * count):
        if min(len(allocated), len(free)) >= count // 2:
            break
        try:
            page = pfn_to_page(prog, chance.randrange(int(prog["max_pfn"])))
            page = compound_head(page)
            if not PageSlab(page):
                continue
        except drgn.FaultError:
            continue
        slab = cast(_slab_pointer(prog), page)
        cache = slab.slab_cache.read_()
        if cache.value_() not in helpers:
            helper = helpers[cache.value_()] = _get_slab_cache_helper(cache)
            helper._cache_free_objects = helper._sheaves_full_objects()
            helper._cache_free_objects |= helper._per_cpu_info().free_objects
        helper = helpers[cache.value_()]
        used = {
            each.value_()
            for each in helper._page_objects(page, slab, prog.type("void *"))
        }
        first = page_to_virt(page).value_() + _padding(cache)
        size = cache.size.value_()
        every = {first + number * size for number in range(slab.objects.value_())}
        name = text(cache.name.string_())
        for found, some in ((allocated, used), (free, every - used)):
            for each in chance.sample(sorted(some), min(2, len(some))):
                found.append(SlabTruth(each, name, found is allocated))
    return allocated[: count // 2] + free[: count // 2]


def _slab_pointer(prog: Program) -> drgn.Type:
    try:
        return prog.type("struct slab *")
    except LookupError:
        return prog.type("struct page *")


def _padding(cache: Object) -> int:
    try:
        return int(cache.red_left_pad.value_())
    except AttributeError:
        return 0


class TaskTruth(NamedTuple):
    """A task."""

    address: int
    pid: int
    comm: str
    stack: int


def tasks(prog: Program) -> list[TaskTruth]:
    return [
        TaskTruth(
            task.value_(),
            task.pid.value_(),
            text(task.comm.string_()),
            task.stack.value_(),
        )
        for task in for_each_task(prog)
    ]


class FrameTruth(NamedTuple):
    """A frame of the stack of a task that does not run."""

    pid: int
    address: int
    function: str
    """As drgn's symbols name it, without suffixes of the compiler."""


def frames(prog: Program, found: list[TaskTruth]) -> Iterator[FrameTruth]:
    """Yield the innermost byte of frames: each has a stack pointer of its own."""
    for task in found:
        if not task.stack:
            continue
        try:
            trace = prog.stack_trace(Object(prog, "struct task_struct *", task.address))
        except (ValueError, drgn.FaultError, LookupError):
            continue
        whole = [frame for frame in trace if not frame.is_inline]
        for frame, outer in pairwise(whole):
            try:
                start, end = frame.sp, outer.sp
                name = prog.symbol(frame.pc - (not frame.interrupted)).name
            except LookupError:
                continue
            if task.stack <= start < end <= task.stack + 4 * PAGE:
                yield FrameTruth(task.pid, start, name)
                yield FrameTruth(task.pid, end - 1, name)


def pfn_at(prog: Program, address: int) -> int:
    """Return the page that an address of vmalloc is mapped to."""
    page = vmalloc_to_page(prog, address)
    return int(page_to_pfn(page).value_())


class AreaTruth(NamedTuple):
    """An area of vmalloc."""

    start: int
    end: int
    caller: str | None


def areas(prog: Program) -> Iterator[AreaTruth]:
    for area in for_each_vmap_area(prog):
        caller = None
        if area.vm and area.vm.caller:
            try:
                caller = prog.symbol(area.vm.caller.value_()).name
            except LookupError:
                continue
        yield AreaTruth(area.va_start.value_(), area.va_end.value_(), caller)


class PerCpuTruth(NamedTuple):
    """A static per-CPU variable."""

    name: str
    address: int
    cpu: int
    others: frozenset[str]
    """Names of all variables at its address."""


def percpu_variables(prog: Program, chance: Random, count: int) -> list[PerCpuTruth]:
    start = prog.symbol("__per_cpu_start").address
    end = prog.symbol("__per_cpu_end").address
    symbols = [
        symbol
        for symbol in prog.symbols()
        if start <= symbol.address < end
        and symbol.size
        and symbol.kind == drgn.SymbolKind.OBJECT
    ]
    cpus = list(for_each_possible_cpu(prog))
    found = []
    for symbol in chance.sample(symbols, min(count, len(symbols))):
        cpu = chance.choice(cpus)
        offset = prog["__per_cpu_offset"][cpu].value_()
        alike = {each.name for each in symbols if each.address == symbol.address}
        found.append(
            PerCpuTruth(
                symbol.name,
                (symbol.address + offset) % (1 << 64),
                cpu,
                frozenset(alike),
            )
        )
    return found


class AllocatedTruth(NamedTuple):
    """Memory of the percpu allocator."""

    address: int
    cpu: int
    pointer: int
    least: int
    """Bytes that it has at least."""


def percpu_allocations(
    prog: Program, chance: Random, count: int
) -> list[AllocatedTruth]:
    found = []
    member = "cpu_slab"
    if not prog.type("struct kmem_cache").has_member(member):
        member = "cpu_sheaves"
    for cache in for_each_slab_cache(prog):
        pointer = cache.member_(member).read_()
        if not pointer:
            continue
        size = sizeof(pointer.type_.type)
        found += [
            AllocatedTruth(
                per_cpu_ptr(pointer, cpu).value_(), cpu, pointer.value_(), size
            )
            for cpu in for_each_online_cpu(prog)
        ]
    return chance.sample(found, min(count, len(found)))


class FilePageTruth(NamedTuple):
    """A page of the page cache."""

    pfn: int
    inode: int
    offset: int
    path: str | None


def file_pages(prog: Program, chance: Random, count: int) -> list[FilePageTruth]:
    """Return pages of mapped files, found through the mappings of processes."""
    inodes: dict[int, Object] = {}
    for task in for_each_task(prog):
        if not task.mm:
            continue
        for vma in for_each_vma(task.mm):
            if vma.vm_file and not vma.vm_flags & (1 << 22):
                inode = vma.vm_file.f_mapping.host.read_()
                inodes[inode.value_()] = inode
    found = []
    for inode in inodes.values():
        name = inode_path(inode)
        for index, page in islice(inode_for_each_page(inode), 2_000):
            if page.value_() & 3:
                continue
            found.append(
                FilePageTruth(
                    page_to_pfn(page).value_(),
                    inode.i_ino.value_(),
                    int(index) * PAGE,
                    text(name) if name else None,
                )
            )
    return chance.sample(found, min(count, len(found)))


class MappedTruth(NamedTuple):
    """A page that a process maps."""

    pid: int
    address: int
    pfn: int
    mapping: str
    anonymous: bool


def mapping_name(vma: drgn.Object) -> str:
    """Return the name of a mapping, for a file outside any tree that of the file."""
    file = vma.vm_file.read_()
    if file and file.f_path.dentry.d_op and file.f_path.dentry.d_op.d_dname:
        return text(file.f_path.dentry.d_name.name.string_())
    return text(vma_name(vma)) or "[anon]"


def mapped_pages(prog: Program, chance: Random, count: int) -> list[MappedTruth]:
    """Return pages that processes map, by walks of their page tables."""
    found: list[MappedTruth] = []
    seen = set()
    every = [task for task in for_each_task(prog) if task.mm]
    chance.shuffle(every)
    for task in every:
        mm = task.mm.value_()
        if mm in seen:
            continue
        seen.add(mm)
        for vma in for_each_vma(task.mm):
            start, end = vma.vm_start.value_(), vma.vm_end.value_()
            pages = range(start, end, PAGE)
            for address in chance.sample(pages, min(3, len(pages))):
                try:
                    pfn = follow_pfn(task.mm, address).value_()
                    flags = pfn_to_page(prog, pfn).mapping.value_() & 3
                except drgn.FaultError:
                    continue
                found.append(
                    MappedTruth(
                        task.pid.value_(),
                        address + chance.randrange(PAGE),
                        pfn,
                        mapping_name(vma),
                        flags == 1,
                    )
                )
    return chance.sample(found, min(count, len(found)))
