# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of vmalloc areas, kernel stacks among them (mm/vmalloc.c)."""

from collections.abc import Iterator
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.kernel.cpus import possible_cpus
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.walks import list_records


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
    """Read all areas and the pages of each, three reads an area."""
    prog = reader.prog
    area_type = prog.type("struct vmap_area")
    vm_offset = area_type.member("vm").offset
    vm_type = prog.type("struct vm_struct")
    vm_size = drgn.sizeof(vm_type)
    pages_offset, count_offset, size_offset, caller_offset = (
        vm_type.member(name).offset for name in ("pages", "nr_pages", "size", "caller")
    )
    page_size = prog["PAGE_SIZE"].value_()
    areas = []
    for head in _busy_lists(prog):
        for _, area in list_records(
            reader,
            head,
            area_type.member("list").offset,
            drgn.sizeof(area_type),
            findings,
            "a list of vmalloc areas",
        ):
            vm = int.from_bytes(area[vm_offset : vm_offset + 8], "little")
            if not vm:
                continue  # vm_map_ram() and regions not yet set up
            try:
                data = reader.read(vm, vm_size)
                pages = int.from_bytes(data[pages_offset : pages_offset + 8], "little")
                count = int.from_bytes(data[count_offset : count_offset + 4], "little")
                if not pages or not count:
                    continue
                size = int.from_bytes(data[size_offset : size_offset + 8], "little")
                if count > size // page_size:
                    findings.coverage["vmalloc_areas_unreadable"] += 1
                    continue
                addresses = reader.words(pages, count)
            except drgn.FaultError:
                findings.coverage["vmalloc_areas_unreadable"] += 1
                continue
            caller = int.from_bytes(data[caller_offset : caller_offset + 8], "little")
            areas.append(VmallocArea(vm, caller, addresses))
    return areas


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


def symbol_name(prog: drgn.Program, address: int) -> str:
    """Name the function that an address lies in; the address if it is in none."""
    try:
        name: str = prog.symbol(address).name
    except LookupError:
        return hex(address)
    return name.partition(".")[0]
