# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages that the kernel maps: vmalloc areas, stacks, the percpu allocator."""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import function_name, kernel_symbol
from msatools.kernel.mm import PageTables
from msatools.kernel.percpu import possible_cpus, unit_offsets
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, struct_layout
from msatools.kernel.walks import list_columns, list_records
from msatools.program.arch import table_format
from msatools.program.linear import vmemmap_base
from msatools.selfdesc.find import (
    ask,
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Finds the pages of vmalloc areas, kernel stacks included (mm/vmalloc.c).
#
# An area either owns its pages, as a vmalloc() area does, or maps pages of another
# owner: vmap(), vm_map_ram(). The kernel has no list of mapped pages (a driver or a BPF
# ring buffer may have its own): they are found in the kernel's page tables.


class VmallocAreas(Struct, frozen=True):
    """The areas that have pages, as columns."""

    start: Addresses
    """First address of each area."""

    caller: Addresses
    """Return address in the function that allocated each area; 0 for areas of
    vm_map_ram(), which record none."""

    mapped: npt.NDArray[np.bool_]
    """Whether each area maps pages that were not allocated for it, which the kernel's
    counter of vmalloc pages leaves out."""

    pages: Addresses
    """Addresses of the struct pages of all areas."""

    rows: npt.NDArray[np.intp]
    """Index of each page's area."""

    at: Addresses
    """Address at which each page is mapped."""

    def __len__(self) -> int:
        return len(self.start)

    def lengths(self) -> npt.NDArray[np.intp]:
        """Return the number of pages of each area."""
        return np.bincount(self.rows, minlength=len(self))


_EMPTY = np.empty(0, np.uint64)
_NO_ROWS = np.empty(0, np.intp)
NO_AREAS = VmallocAreas(_EMPTY, _EMPTY, np.empty(0, np.bool_), _EMPTY, _NO_ROWS, _EMPTY)

# Bits of vm_struct.flags (include/linux/vmalloc.h). Macros, not in debug info.
_VM_MAP = 0x4
"""vmap() made the area."""

_VM_DMA_COHERENT = 0x10
"""dma_common_pages_remap() made the area: ``pages`` is set, but ``nr_pages`` is 0."""

_VM_MAP_PUT_PAGES = 0x200
"""The area took over the pages that it maps, and ``nr_pages`` is set. The kernel's
counter never includes them, but before a2e740e216f5 ("vmalloc: fix accounting with
i915") (in v6.13) vfree() subtracted them."""

_VM_SPARSE = 0x1000
"""Pages are mapped and unmapped one by one: BPF arenas. e6f798225a31 ("mm: Introduce
VM_SPARSE kind and vm_area_[un]map_pages().") (in v6.9); no other flag had this bit
before."""

_MAPPING = _VM_MAP | _VM_DMA_COHERENT | _VM_SPARSE


def vmalloc_areas(reader: Reader, losses: LossLog) -> VmallocAreas:
    """Read all areas and their pages, with about one read an area."""
    type_ = find_type(reader.prog, "struct vm_struct")
    addr_offset, pages_offset, count_offset, size_offset, flags_offset, offset = (
        member_of(type_, name).offset
        for name in ("addr", "pages", "nr_pages", "size", "flags", "caller")
    )
    page_size = np.uint64(find_variable(reader.prog, "PAGE_SIZE").value_())
    structs, nameless = _busy_areas(reader, losses)
    records, readable = reader.read_records(structs, drgn.sizeof(type_))
    arrays = column(records, pages_offset)
    counts = column(records, count_offset, 4)
    sizes = column(records, size_offset) // page_size
    flags = column(records, flags_offset)
    callers = column(records, offset)
    has_pages = (arrays != 0) & (counts != 0)
    possible = counts <= sizes
    chosen = np.flatnonzero(has_pages & possible)
    pages, rows, whole = reader.read_arrays(
        arrays[chosen], counts[chosen], reader.most(int(page_size))
    )
    starts = column(records, addr_offset)
    # Pages excluded from an ELF dump read as zeros, and no area is at address 0.
    readable &= starts != 0
    lost = np.count_nonzero(~readable) + np.count_nonzero(has_pages & ~possible)
    lost += np.count_nonzero(~whole)
    losses.lose(Loss.VMALLOC, count=int(lost))
    kept = chosen[whole]
    number = np.cumsum(whole) - 1
    own = VmallocAreas(
        start=starts[kept],
        caller=callers[kept],
        mapped=flags[kept] & np.uint64(_VM_MAP_PUT_PAGES) != 0,
        pages=pages,
        rows=number[rows],
        at=starts[kept][number[rows]] + page_size * _within(rows),
    )
    mapping = np.flatnonzero(readable & ~has_pages & (flags & np.uint64(_MAPPING) != 0))
    areas = _Areas(
        np.concatenate((starts[mapping], nameless.start)),
        np.concatenate((sizes[mapping], nameless.pages)),
        np.concatenate((callers[mapping], nameless.caller)),
    )
    return _joined(own, _mapped(areas, reader, losses))


class _Areas(Struct, frozen=True):
    """Areas whose pages are found by page tables, as columns."""

    start: Addresses
    pages: Addresses
    """Maximum number of pages of each area."""

    caller: Addresses


def _within(rows: npt.NDArray[np.intp]) -> Addresses:
    """Return the index of each page in its area; equal *rows* are consecutive."""
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    lengths = np.diff(first, append=len(rows))
    within = np.arange(len(rows)) - np.repeat(first, lengths)
    numbers: Addresses = within.astype(np.uint64)
    return numbers


def _mapped(areas: _Areas, reader: Reader, losses: LossLog) -> VmallocAreas:
    """Find the pages that areas map.

    If all together exceed :data:`_MAPPED_AT_MOST`, the dump is damaged: the largest
    areas are left out and counted as lost.
    """
    prog = reader.prog
    if not len(areas.start) or table_format(prog) is None:
        return NO_AREAS
    tables = PageTables(reader, losses)
    memmap, size = vmemmap_base(prog), drgn.sizeof(find_type(prog, "struct page"))
    page_size = find_variable(prog, "PAGE_SIZE").value_()
    order = np.argsort(areas.pages, kind="stable")
    sums = np.cumsum(areas.pages[order], dtype=np.float64)
    possible = np.sort(order[sums <= _MAPPED_AT_MOST * reader.most(page_size)])
    losses.lose(Loss.VMALLOC, count=len(order) - len(possible))
    pfns, rows, at = [_NO_PFNS], [_NO_ROWS], [_EMPTY]
    for row, area in enumerate(possible.tolist()):
        found = tables.pfns(int(areas.start[area]), max(int(areas.pages[area]), 1))
        is_there = np.flatnonzero(found >= 0)
        pfns.append(found[is_there])
        rows.append(np.full(len(is_there), row, np.intp))
        at.append(areas.start[area] + is_there.astype("u8") * np.uint64(page_size))
    words = np.concatenate(pfns).astype(np.uint64)
    return VmallocAreas(
        start=areas.start[possible],
        caller=areas.caller[possible],
        mapped=np.ones(len(possible), np.bool_),
        pages=np.uint64(memmap) + words * np.uint64(size),
        rows=np.concatenate(rows),
        at=np.concatenate(at),
    )


_NO_PFNS = np.empty(0, np.int64)
_MAPPED_AT_MOST = 4
"""Maximum size of all mapping areas, as a multiple of all memory: some share pages."""


def _joined(first: VmallocAreas, second: VmallocAreas) -> VmallocAreas:
    if not len(second):
        return first
    return VmallocAreas(
        start=np.concatenate((first.start, second.start)),
        caller=np.concatenate((first.caller, second.caller)),
        mapped=np.concatenate((first.mapped, second.mapped)),
        pages=np.concatenate((first.pages, second.pages)),
        rows=np.concatenate((first.rows, second.rows + len(first))),
        at=np.concatenate((first.at, second.at)),
    )


def _busy_areas(reader: Reader, losses: LossLog) -> tuple[Addresses, _Areas]:
    """Return the ``struct vm_struct`` of areas in use, and the areas without one.

    The latter belong to vm_map_ram(), or are blocks that it divides: page tables have
    only the mapped part of a block. Areas that are not yet set up look the same, but
    map nothing.
    """
    type_ = find_type(reader.prog, "struct vmap_area")
    node, vm, start, end = (
        member_of(type_, name).offset for name in ("list", "vm", "va_start", "va_end")
    )
    page_size = np.uint64(find_variable(reader.prog, "PAGE_SIZE").value_())
    offsets = (vm, start, end)
    what = "a list of vmalloc areas"
    lists = [
        list_columns(reader, head, node, offsets, losses, what)
        for head in _busy_lists(reader.prog, losses)
    ]
    structs, starts, ends = np.concatenate(
        [np.empty((3, 0), np.uint64), *lists], axis=1
    )
    nameless = (structs == 0) & (starts != 0) & (ends > starts)
    starts, ends = starts[nameless], ends[nameless]
    callers = np.zeros(len(starts), np.uint64)
    return structs[structs != 0], _Areas(starts, (ends - starts) // page_size, callers)


MAX_NODES = 1 << 10
"""Upper bound of ``nr_vmap_nodes``: one per CPU, at most 128 (vmap_init_nodes())."""


def _busy_lists(prog: drgn.Program, losses: LossLog) -> Iterator[int]:
    """Yield the addresses of the list heads of areas in use."""
    try:
        nodes = find_variable(prog, "vmap_nodes")
    except MissingError:
        # Before Linux kernel commit d093602919ad ("mm: vmalloc: remove global
        # vmap_area_root rb-tree") (in v6.9).
        yield find_variable(prog, "vmap_area_list").address_
        return
    count = find_variable(prog, "nr_vmap_nodes").value_()
    if not 0 < count <= MAX_NODES:
        losses.lose(Loss.VMALLOC, f"there cannot be {count:,} lists of vmalloc areas")
    for i in range(min(count, MAX_NODES)):
        yield nodes[i].busy.head.address_of_().value_()


_STACK_CALLERS = frozenset(
    {
        # alloc_thread_stack_node() passes its return address as the caller. It may be
        # inlined, and so may the function that it is inlined into.
        "alloc_thread_stack_node",
        "dup_task_struct",
        "copy_process",
        # The functions that call copy_process(): for user tasks and kernel
        # threads, for idle threads, for io_uring workers (5.12), for vhost
        # workers (6.4).
        "kernel_clone",
        "_do_fork",
        "fork_idle",
        "create_io_thread",
        "vhost_task_create",
    }
)


def has_vmapped_stacks(prog: drgn.Program) -> bool:
    """Return whether kernel stacks are areas of vmalloc."""
    return bool(find_type(prog, "struct task_struct").has_member("stack_vm_area"))


def kernel_stacks(reader: Reader, areas: VmallocAreas) -> npt.NDArray[np.bool_]:
    """
    Return which areas are kernel stacks: kernel/fork.c allocated them.

    Cached stacks of exited tasks are included; the boot CPU's idle task has its stack
    in the kernel image.
    """
    callers = distinct(areas.caller)
    group = callers.searchsorted(areas.caller)
    possible = np.ones(len(callers), np.bool_)
    known = np.zeros(len(callers), np.bool_)
    (init,) = np.nonzero(areas.start == _stack_of_init(reader))
    if len(init):
        # All stacks have the same size, and looking up a name is slow.
        lengths = areas.lengths()
        possible[group[lengths != lengths[init[0]]]] = False
        known[group[init[0]]] = True
    for row in np.flatnonzero(possible & ~known).tolist():
        known[row] = function_name(reader.prog, int(callers[row])) in _STACK_CALLERS
    stacks: npt.NDArray[np.bool_] = known[group]
    return stacks


def _stack_of_init(reader: Reader) -> int:
    """Return the address of the stack of the task after init_task; 0 if unreadable."""
    task = find_type(reader.prog, "struct task_struct")
    tasks = member_of(task, "tasks").offset
    try:
        first = find_variable(reader.prog, "init_task").tasks.next.value_() - tasks
        return int(reader.words(first + member_of(task, "stack").offset, 1)[0])
    except UNREADABLE:
        return 0


def cached_stacks(prog: drgn.Program, losses: LossLog) -> int:
    """Count the stacks of exited tasks that CPUs cache for the next fork."""
    try:
        cached = find_variable(prog, "cached_stacks").address_of_()
        return sum(
            bool(stack)
            for cpu in possible_cpus(prog, losses)
            for stack in ask(per_cpu_ptr, cached, cpu)[0]
        )
    except MissingError:
        return 0  # CONFIG_VMAP_STACK=n
    except UNREADABLE as error:
        losses.note("no-cached-stacks", f"cannot read stacks that CPUs keep: {error}")
        return 0


def freed_stacks(reader: Reader, starts: Addresses) -> int:
    """Count the stacks that wait for an RCU grace period before they are freed.

    The kernel's counter (NR_KERNEL_STACK_KB) no longer includes them, though their
    memory is still in use. Each has an rcu_head at its low end, whose function is
    cleared when the callback runs (kernel/fork.c, struct vm_stack; since "fork: Only
    cache the VMAP stack in finish_task_switch", in v5.18).

    :param starts: Lowest address of each stack.
    """
    try:
        free = kernel_symbol(reader.prog, "thread_stack_free_rcu")
    except MissingError:
        return 0
    heads, readable = reader.read_records(starts, 16)
    functions = heads.view("<u8")[:, 1]
    return int(np.count_nonzero(readable & (functions == np.uint64(free))))


# --- Finds the pages of the percpu allocator (mm/percpu.c).


_MAX_LISTS = 1 << 7
"""Upper bound of the number of lists: one per power of two and type of chunk."""


_CHUNK_TYPE = "struct pcpu_chunk"
_CHUNK: Members = {
    "base": ("base_addr",),
    "immutable": ("immutable",),
    "pages": ("nr_pages",),
}
_MAPS: Members = {
    **_CHUNK,
    # Two bitmaps with a bit for each _MIN_BYTES: whether they are allocated, and
    # whether an allocation begins or ends there.
    "allocated": ("alloc_map",),
    "bounds": ("bound_map",),
}
_MIN_BYTES = 4
"""Bytes for each bit of a chunk's bitmaps (PCPU_MIN_ALLOC_SIZE)."""

_MAX_PAGES = 1 << 16
"""Maximum number of pages of a unit: 256 MiB, far above PCPU_MIN_UNIT_SIZE."""


class PercpuPages(Struct, frozen=True):
    """The pages of percpu chunks, and by how much the kernel's count exceeds them."""

    pfns: list[int]
    uncounted: int
    """
    Number of pages by which ``pcpu_nr_populated`` times the number of units exceeds
    :attr:`pfns`: the first chunks are in reserved boot memory, and the number of units
    is rounded up, so that some units may have no CPU and no pages.
    """

    spare_units: int
    """Number of units without a CPU."""


def percpu_pages(reader: Reader, tables: PageTables, losses: LossLog) -> PercpuPages:
    """Find the pages of all chunks, except the first ones in reserved boot memory."""
    prog = reader.prog
    page_shift = find_variable(prog, "PAGE_SHIFT").value_()
    cpus = list(possible_cpus(prog, losses))
    units = unit_offsets(reader, cpus)
    type_ = find_type(prog, _CHUNK_TYPE)
    layout = struct_layout(reader, _CHUNK_TYPE, _CHUNK)
    if layout is None:
        raise MissingError(f"{_CHUNK_TYPE} has no members")
    populated = offset_of(type_, "populated")
    unit_pages = find_variable(prog, "pcpu_unit_pages").value_()
    size = max(populated + 8 * -(-unit_pages // 64), layout.end)
    pfns: list[int] = []
    for data in _chunks(reader, losses, type_, size):
        chunk = layout.decode(data[layout.start :])
        if chunk["immutable"]:
            continue
        bitmap = np.frombuffer(data, np.uint8, offset=populated)
        bits = np.unpackbits(bitmap, bitorder="little")[: max(chunk["pages"], 0)]
        for page in np.flatnonzero(bits).tolist():
            for unit in units:
                pfn = tables.pfn(chunk["base"] + unit + (page << page_shift))
                if pfn is not None:
                    pfns.append(pfn)
    boot = _boot_pages(prog, page_shift)
    spare = find_variable(prog, "pcpu_nr_units").value_() - len(cpus)
    populated_pages = find_variable(prog, "pcpu_nr_populated").value_()
    if not 0 <= boot <= min(unit_pages, populated_pages):
        raise DamagedDataError(f"the first unit has {boot:,} pages, of {unit_pages:,}")
    uncounted = boot * (len(cpus) + spare) + (populated_pages - boot) * spare
    return PercpuPages(pfns, uncounted, spare)


class PercpuPiece(Struct, frozen=True):
    """An allocation in a chunk, or free memory."""

    start: int
    """Byte offset of the allocation in the unit; for free memory, the offset that was
    passed to :meth:`PercpuChunk.piece`."""

    bytes: int | None
    """Size of the allocation; ``None`` for free memory."""

    allocated: bool


class PercpuChunk(Struct, frozen=True):
    """A ``struct pcpu_chunk``."""

    reader: Reader
    base: int
    """Address of the first unit, at unit offset 0."""

    bytes: int
    """Bytes of a unit."""

    allocated: int
    bounds: int
    """Addresses of the bitmaps ``alloc_map`` and ``bound_map``."""

    def piece(self, offset: int) -> PercpuPiece | None:
        """Return the piece at a byte offset in a unit; ``None`` if unreadable."""
        bits, number = self.bytes // _MIN_BYTES, offset // _MIN_BYTES
        try:
            allocated = _bitmap(self.reader, self.allocated, bits)
            bounds = _bitmap(self.reader, self.bounds, bits + 1)
        except UNREADABLE:
            return None
        if not allocated[number]:
            return PercpuPiece(offset, None, False)
        before = np.flatnonzero(bounds[: number + 1])
        after = np.flatnonzero(bounds[number + 1 :])
        if not len(before) or not len(after):
            return None
        start, end = int(before[-1]), number + 1 + int(after[0])
        return PercpuPiece(start * _MIN_BYTES, (end - start) * _MIN_BYTES, True)


class PercpuOffset(Struct, frozen=True):
    """An offset in the units of a chunk."""

    chunk: PercpuChunk
    offset: int
    """Byte offset in each unit."""


class PercpuUnits(Struct, frozen=True):
    """The units of all chunks, including the first chunk."""

    chunks: list[PercpuChunk]
    cpus: list[int]
    offsets: Addresses
    """Offset of each CPU's unit in a chunk."""

    def find(self, address: int) -> tuple[int, PercpuOffset] | None:
        """Return the CPU of an address and the offset in its unit; ``None`` if the
        address is in no unit."""
        for chunk in self.chunks:
            offsets = np.uint64(address) - (np.uint64(chunk.base) + self.offsets)
            rows = np.flatnonzero(offsets < np.uint64(chunk.bytes))
            if len(rows):
                row = int(rows[0])
                return self.cpus[row], PercpuOffset(chunk, int(offsets[row]))
        return None


def percpu_units(reader: Reader, losses: LossLog) -> PercpuUnits:
    """Read all chunks of the percpu allocator.

    :raises MissingError: if the kernel has none, or its types are unknown
    :raises drgn.FaultError: if the sizes of units cannot be read
    """
    prog = reader.prog
    cpus = list(possible_cpus(prog, losses))
    type_ = find_type(prog, _CHUNK_TYPE)
    layout = struct_layout(reader, _CHUNK_TYPE, _MAPS)
    if layout is None:
        raise MissingError(f"{_CHUNK_TYPE} has no members")
    page_size = find_variable(prog, "PAGE_SIZE").value_()
    records = list(_chunks(reader, losses, type_, layout.end))
    # The static variables of modules have a chunk of their own.
    with suppress(*LOST):
        reserved = find_variable(prog, "pcpu_reserved_chunk").value_()
        if reserved:
            records.append(reader.read(reserved, layout.end))
    chunks = [layout.decode(data[layout.start :]) for data in records]
    return PercpuUnits(
        [
            PercpuChunk(
                reader,
                chunk["base"],
                chunk["pages"] * page_size,
                chunk["allocated"],
                chunk["bounds"],
            )
            for chunk in chunks
            if 0 < chunk["pages"] <= _MAX_PAGES
        ],
        cpus,
        np.array(unit_offsets(reader, cpus), np.uint64),
    )


def _bitmap(reader: Reader, address: int, bits: int) -> npt.NDArray[np.uint8]:
    data = reader.read(address, 8 * -(-bits // 64))
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")


def _boot_pages(prog: drgn.Program, page_shift: int) -> int:
    """
    Return the number of pages of each CPU's first unit.

    The unit contains the kernel's static variables, the reserved chunk for static
    variables of modules, and the first dynamic chunk (pcpu_setup_first_chunk()).
    """
    first = find_variable(prog, "pcpu_first_chunk")
    end = first.base_addr.value_() + (first.nr_pages.value_() << page_shift)
    end -= first.end_offset.value_()
    size: int = end - find_variable(prog, "pcpu_base_addr").value_()
    return size >> page_shift


def _chunks(
    reader: Reader, losses: LossLog, type_: drgn.Type, size: int
) -> Iterator[bytes]:
    """Yield the first *size* bytes of each chunk on the kernel's lists."""
    prog = reader.prog
    try:
        lists = find_variable(prog, "pcpu_chunk_lists")
    except MissingError:
        lists = find_variable(prog, "pcpu_slot")  # up to v5.13
    count = find_variable(prog, "pcpu_nr_slots").value_()
    with suppress(MissingError):
        # Some versions have separate lists of chunks for memory cgroups.
        count *= find_constant(prog, "PCPU_NR_CHUNK_TYPES").value_()
    if not 0 < count <= _MAX_LISTS:
        raise DamagedDataError(f"there cannot be {count:,} lists of chunks")
    for slot in range(count):
        for _, data in list_records(
            reader,
            lists[slot].address_of_().value_(),
            member_of(type_, "list").offset,
            size,
            losses,
            "a list of percpu chunks",
        ):
            yield data
