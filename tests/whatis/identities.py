# SPDX-License-Identifier: LGPL-2.1-or-later

"""Identities of addresses, found by drgn's helpers with debug info, object by object.

Each function yields addresses as msa-whatis is asked for them, and what it must answer.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from random import Random
from typing import Any

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
)
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.slab import _get_slab_cache_helper, for_each_slab_cache

from msatools.whatis.processes import MAX_MAPPERS

PAGE = 4096
COUNT = 100
Known = tuple[str, Any]
"""An address, and parts of the answer.

A value is compared; of a set the answer has one; a function is called with the answer.
"""


def text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def some(chance: Random, found: list[Any], count: int = COUNT) -> list[Any]:
    return chance.sample(found, min(count, len(found)))


def slab_objects(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield objects of slabs at random, half of them free, if so many are found.

    drgn's walk of a cache reads all pages for each cache; this one walks single slabs.
    """
    counts = {True: 0, False: 0}
    helpers: dict[int, Any] = {}
    for _ in range(400 * COUNT):
        if min(counts.values()) >= COUNT // 2:
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
        for allocated, objects in ((True, used), (False, every - used)):
            wanted = min(2, COUNT // 2 - counts[allocated])
            for each in some(chance, sorted(objects), wanted):
                counts[allocated] += 1
                slab_ = {"object": f"{each:#x}", "cache": name, "allocated": allocated}
                # The smallest objects have 8 bytes.
                yield f"{each + chance.randrange(8):#x}", {"slab": slab_}
    assert all(counts.values())


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


def tasks(prog: Program, chance: Random) -> Iterator[Known]:
    for task in for_each_task(prog):
        known = {
            "pid": task.pid.value_(),
            "comm": text(task.comm.string_()),
            "address": f"{task.value_():#x}",
        }
        answer = {"kind": "task", "type": "struct task_struct", "task": known}
        yield f"{task.value_() + chance.randrange(2000):#x}", answer


def stacks(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield places in stacks, and in the guard pages before them."""
    size = prog["THREAD_SIZE"].value_()
    for task in for_each_task(prog):
        start, pid = task.stack.value_(), task.pid.value_()
        if start:
            inside = {"kind": "stack", "stack": {"pid": pid, "bytes": size}}
            yield f"{start + chance.randrange(size):x}", inside
            guard = {"kind": "stack", "stack": {"pid": pid, "where": "guard"}}
            yield f"{start - 1 - chance.randrange(PAGE):x}", guard


def frames(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield the ends of frames of tasks that do not run.

    Without debug info, an address of arm64 is in one of two functions.
    """
    is_arm64 = prog.platform.arch == drgn.Architecture.AARCH64  # type: ignore[union-attr]
    found = []
    for task in for_each_task(prog):
        try:
            trace = prog.stack_trace(task)
        except (ValueError, drgn.FaultError, LookupError):
            continue
        whole = [frame for frame in trace if not frame.is_inline]
        for frame, outer in pairwise(whole):
            try:
                start, end = frame.sp, outer.sp
                name = prog.symbol(frame.pc - (not frame.interrupted)).name
            except LookupError:
                continue
            stack = task.stack.value_()
            if stack and stack <= start < end <= stack + 4 * PAGE:
                found += [(task.pid.value_(), at, name) for at in (start, end - 1)]
    for pid, address, name in some(chance, found, 2 * COUNT):
        stack = {"pid": pid, "where": "frame"}
        if is_arm64:
            yield (
                f"{address:#x}",
                lambda answer, name=name: (
                    name
                    in (answer["stack"]["function"], answer["stack"]["next_function"])
                ),
            )
            continue
        stack |= {"function": name, "next_function": None}
        yield f"{address:#x}", {"stack": stack}


def areas(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield places in areas of vmalloc, but for the kernel's image on arm64."""
    found = []
    for area in for_each_vmap_area(prog):
        caller = None
        if area.vm and area.vm.caller:
            try:
                caller = prog.symbol(area.vm.caller.value_()).name
            except LookupError:
                continue
        if caller != "paging_init":
            found.append((area.va_start.value_(), area.va_end.value_(), caller))
    assert len(found) > 100
    for start, end, caller in some(chance, found):
        area = {"start": f"{start:#x}", "bytes": end - start, "caller": caller}
        yield f"{chance.randrange(start, end):x}", {"vmalloc": area}
    guarded = ("load_module", "execmem_alloc", "bpf_prog_alloc_no_stats")
    assert {caller for *_, caller in found} & {*guarded}
    for start, end, caller in found:
        if caller in guarded:
            yield f"{end - 1:x}", {"vmalloc": {"guard": True, "start": f"{start:#x}"}}


def percpu_variables(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield static per-CPU variables; several may share an address."""
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
    for symbol in some(chance, symbols):
        cpu = chance.choice(cpus)
        offset = prog["__per_cpu_offset"][cpu].value_()
        alike = {each.name for each in symbols if each.address == symbol.address}
        place = {"cpu": cpu, "variable": alike, "offset": 0}
        yield f"{(symbol.address + offset) % (1 << 64):#x}", {"percpu": place}
    # What is in the kernel's image was copied for each CPU, and is none's.
    place = {"variable": "runqueues", "cpu": None, "offset": 8}
    linked = prog.symbol("runqueues").address
    yield f"{linked + 8:#x}", {"kind": "percpu", "percpu": place}


def percpu_allocations(prog: Program, chance: Random) -> Iterator[Known]:
    found = []
    member = "cpu_slab"
    if not prog.type("struct kmem_cache").has_member(member):
        member = "cpu_sheaves"
    for cache in for_each_slab_cache(prog):
        pointer = cache.member_(member).read_()
        if pointer:
            found += [(pointer, cpu) for cpu in for_each_online_cpu(prog)]
    for pointer, cpu in some(chance, found):
        place = {
            "cpu": cpu,
            "pointer": f"{pointer.value_():#x}",
            "offset": 0,
            "allocated": True,
            "bytes": range(sizeof(pointer.type_.type), 1 << 20),
        }
        yield f"{per_cpu_ptr(pointer, cpu).value_():#x}", {"percpu": place}


def file_pages(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield pages of mapped files, found through the mappings of processes."""
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
        # That within the file system.
        path = text(inode_path(inode) or b"")
        for index, page in islice(inode_for_each_page(inode), 2_000):
            if not page.value_() & 3:
                found.append((page, inode.i_ino.value_(), int(index) * PAGE, path))
    for page, number, offset, path in some(chance, found):
        file = {
            "inode": number,
            "offset": offset,
            "name": lambda name, path=path: name.endswith(path),
        }
        yield f"pfn:{page_to_pfn(page).value_()}", {"page": {"file": file}}


def mapping_name(vma: drgn.Object) -> str:
    """Return the name of a mapping, for a file outside any tree that of the file."""
    file = vma.vm_file.read_()
    if file and file.f_path.dentry.d_op and file.f_path.dentry.d_op.d_dname:
        return text(file.f_path.dentry.d_name.name.string_())
    return text(vma_name(vma)) or "[anon]"


def mapped_pages(prog: Program, chance: Random) -> Iterator[Known]:
    """Yield pages that processes map, by walks of their page tables."""
    found: list[Known] = []
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
            for address in some(chance, range(start, end, PAGE), 3):  # type: ignore[arg-type]
                try:
                    pfn = follow_pfn(task.mm, address).value_()
                    anonymous = pfn_to_page(prog, pfn).mapping.value_() & 3 == 1
                except drgn.FaultError:
                    continue
                # drgn does not name the last two, of arm64.
                names = {mapping_name(vma), "[vdso]", "[vvar]"}
                page: dict[str, Any] = {"pfn": pfn}
                if anonymous:
                    page["mappers"] = lambda mappers, address=address: (
                        len(mappers) == MAX_MAPPERS
                        or address in {int(each["address"], 16) for each in mappers}
                    )
                word = f"{task.pid.value_()}:{address + chance.randrange(PAGE):x}"
                user = {"state": "mapped", "mapping": names}
                found.append((word, {"user": user, "page": page}))
    yield from some(chance, found)
