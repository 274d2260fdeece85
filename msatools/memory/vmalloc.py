# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of vmalloc areas, kernel stacks among them (mm/vmalloc.c)."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.kernel.cpus import possible_cpus
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import Findings
from msatools.kernel.walks import list_records

_SMALL_ARRAY = 8
"""Pointers to pages that are read as records of one size."""


@dataclass(frozen=True)
class VmallocArea:
    """One area that has pages of its own."""

    vm: int
    """Address of the ``struct vm_struct``."""

    caller: int
    """Return address in the function that asked for it."""

    pages: npt.NDArray[np.uint64]
    """Addresses of the struct pages."""


def vmalloc_areas(reader: Reader, findings: Findings) -> list[VmallocArea]:
    """Read all areas and the pages of each: one read an area, and some for them all."""
    type_ = reader.prog.type("struct vm_struct")
    addr_offset, pages_offset, count_offset, size_offset, caller_offset = (
        type_.member(name).offset
        for name in ("addr", "pages", "nr_pages", "size", "caller")
    )
    page_size = reader.prog["PAGE_SIZE"].value_()
    areas = np.array(_vm_structs(reader, findings), np.uint64)
    records, readable = reader.read_records(areas, drgn.sizeof(type_))
    arrays = column(records, pages_offset)
    counts = column(records, count_offset, 4)
    has_pages = (arrays != 0) & (counts != 0)
    possible = counts <= column(records, size_offset) // np.uint64(page_size)
    chosen = np.flatnonzero(has_pages & possible)
    pages = _page_arrays(reader, arrays[chosen], counts[chosen])
    # What a filtered ELF dump leaves out is read as zeros, and no area is at 0.
    readable &= column(records, addr_offset) != 0
    lost = np.count_nonzero(~readable) + np.count_nonzero(has_pages & ~possible)
    lost += sum(its_pages is None for its_pages in pages)
    findings.coverage["vmalloc_areas_unreadable"] += int(lost)
    callers = column(records, caller_offset)
    return [
        VmallocArea(area, caller, its_pages)
        for area, caller, its_pages in zip(
            areas[chosen].tolist(), callers[chosen].tolist(), pages, strict=True
        )
        if its_pages is not None
    ]


def _vm_structs(reader: Reader, findings: Findings) -> list[int]:
    """Find the ``struct vm_struct`` of each area in use."""
    type_ = reader.prog.type("struct vmap_area")
    at = type_.member("vm").offset
    found = [
        int.from_bytes(area[at : at + 8], "little")
        for head in _busy_lists(reader.prog)
        for _, area in list_records(
            reader,
            head,
            type_.member("list").offset,
            drgn.sizeof(type_),
            findings,
            "a list of vmalloc areas",
        )
    ]
    # Of vm_map_ram() and of regions not yet set up there is none.
    return [vm for vm in found if vm]


def _page_arrays(
    reader: Reader, arrays: Addresses, counts: Addresses
) -> list[Addresses | None]:
    """Read an array of pointers of each size; ``None`` for one that cannot be."""
    found: list[Addresses | None] = [None] * len(arrays)
    # Most are those of stacks.
    for count in range(1, _SMALL_ARRAY + 1):
        rows = np.flatnonzero(counts == count)
        records, readable = reader.read_records(arrays[rows], 8 * count)
        for row, words in zip(rows[readable], records[readable], strict=True):
            found[row] = words.view(np.uint64)
    for row in np.flatnonzero(counts > _SMALL_ARRAY):
        with suppress(drgn.FaultError):
            found[row] = reader.words(int(arrays[row]), int(counts[row]))
    return found


def _busy_lists(prog: drgn.Program) -> Iterator[int]:
    """Find the heads of the lists of areas in use."""
    try:
        nodes = prog["vmap_nodes"]
    except LookupError:
        # Before Linux kernel commit d093602919ad ("mm: vmalloc: remove global
        # vmap_area_root rb-tree") (in v6.9).
        yield prog["vmap_area_list"].address_
        return
    for i in range(prog["nr_vmap_nodes"].value_()):
        yield nodes[i].busy.head.address_of_().value_()


_STACK_CALLERS = frozenset(
    {
        # alloc_thread_stack_node() gives its return address as the caller, and
        # what it is inlined into may be inlined too.
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


def kernel_stacks(prog: drgn.Program, areas: list[VmallocArea]) -> list[VmallocArea]:
    """
    Pick the kernel stacks by the function of kernel/fork.c that took them.

    Stacks of exited tasks that CPUs keep are among them; the boot CPU's idle
    task has its stack in the kernel image.
    """
    callers = {area.caller for area in areas}
    stack_callers = {c for c in callers if symbol_name(prog, c) in _STACK_CALLERS}
    return [area for area in areas if area.caller in stack_callers]


def cached_stacks(prog: drgn.Program, findings: Findings) -> int:
    """Count the stacks of exited tasks that CPUs keep for the next fork."""
    try:
        cached = prog["cached_stacks"].address_of_()
        return sum(
            bool(stack)
            for cpu in possible_cpus(prog, findings)
            for stack in per_cpu_ptr(cached, cpu)[0]
        )
    except LookupError:
        return 0  # CONFIG_VMAP_STACK=n
    except drgn.FaultError as error:
        findings.note("no-cached-stacks", f"stacks that CPUs keep are lost: {error}")
        return 0


def caller_names(prog: drgn.Program, areas: list[VmallocArea]) -> list[str]:
    """Name the function that asked for each area."""
    callers = {area.caller for area in areas}
    names = {caller: symbol_name(prog, caller) for caller in callers}
    return [names[area.caller] for area in areas]


def symbol_name(prog: drgn.Program, address: int) -> str:
    """Name the function that an address lies in; the address if it is in none."""
    try:
        name: str = prog.symbol(address).name
    except LookupError:
        return hex(address)
    return name.partition(".")[0]
