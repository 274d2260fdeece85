# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages of vmalloc areas, kernel stacks included (mm/vmalloc.c)."""

from collections.abc import Iterator

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.functions import function_name
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_words
from msatools.records import dataclass
from msatools.selfdesc.find import ask, find_type, find_variable, member_of
from msatools.tasks.text import KernelText, kernel_symbol


@dataclass(frozen=True)
class VmallocAreas:
    """The areas that have their own pages, as columns."""

    start: Addresses
    """First address of each area."""

    caller: Addresses
    """Return address in the function that allocated each area."""

    pages: Addresses
    """Addresses of the struct pages of all areas."""

    rows: npt.NDArray[np.intp]
    """Row of each page's area."""

    def __len__(self) -> int:
        return len(self.start)

    def lengths(self) -> npt.NDArray[np.intp]:
        """Return the number of pages of each area."""
        return np.bincount(self.rows, minlength=len(self))


_EMPTY = np.empty(0, np.uint64)
NO_AREAS = VmallocAreas(_EMPTY, _EMPTY, _EMPTY, np.empty(0, np.intp))


def vmalloc_areas(reader: Reader, losses: LossLog) -> VmallocAreas:
    """Read all areas and their pages, with about one read an area."""
    type_ = find_type(reader.prog, "struct vm_struct")
    addr_offset, pages_offset, count_offset, size_offset, caller_offset = (
        member_of(type_, name).offset
        for name in ("addr", "pages", "nr_pages", "size", "caller")
    )
    page_size = find_variable(reader.prog, "PAGE_SIZE").value_()
    areas = _vm_structs(reader, losses)
    records, readable = reader.read_records(areas, drgn.sizeof(type_))
    arrays = column(records, pages_offset)
    counts = column(records, count_offset, 4)
    has_pages = (arrays != 0) & (counts != 0)
    possible = counts <= column(records, size_offset) // np.uint64(page_size)
    chosen = np.flatnonzero(has_pages & possible)
    # No page is in two areas: vmap() sets nr_pages only where it takes the pages over.
    pages, rows, whole = reader.read_arrays(
        arrays[chosen], counts[chosen], reader.most(page_size)
    )
    starts = column(records, addr_offset)
    # Pages excluded from an ELF dump read as zeros, and no area is at address 0.
    readable &= starts != 0
    lost = np.count_nonzero(~readable) + np.count_nonzero(has_pages & ~possible)
    lost += np.count_nonzero(~whole)
    losses.lose(Loss.VMALLOC, count=int(lost))
    kept = chosen[whole]
    number = np.cumsum(whole) - 1
    callers = column(records, caller_offset)[kept]
    return VmallocAreas(starts[kept], callers, pages, number[rows])


def _vm_structs(reader: Reader, losses: LossLog) -> Addresses:
    """Return the address of the ``struct vm_struct`` of each area in use."""
    type_ = find_type(reader.prog, "struct vmap_area")
    node, vm = (member_of(type_, name).offset for name in ("list", "vm"))
    lists = [
        list_words(reader, head, node, vm, losses, "a list of vmalloc areas")
        for head in _busy_lists(reader.prog, losses)
    ]
    structs = np.concatenate([_EMPTY, *lists])
    # Areas of vm_map_ram(), and those not yet set up, have none.
    used: Addresses = structs[structs != 0]
    return used


MAX_NODES = 1 << 10
"""Upper bound of the nodes: one a CPU, at most 128 (vmap_init_nodes())."""


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
    """Count the stacks that are freed after an RCU grace period.

    They are counted no more, but still there. Each has the callback at its low end,
    which is cleared when it runs (kernel/fork.c, struct vm_stack; since "fork: Only
    cache the VMAP stack in finish_task_switch", in v5.18).

    :param starts: Addresses of the areas of stacks.
    """
    try:
        free = kernel_symbol(reader.prog, "thread_stack_free_rcu")
    except MissingError:
        return 0
    heads, readable = reader.read_records(starts, 16)
    functions = heads.view("<u8")[:, 1]
    return int(np.count_nonzero(readable & (functions == np.uint64(free))))


def caller_modules(
    reader: Reader, areas: VmallocAreas, losses: LossLog
) -> dict[str, str]:
    """Map the names of functions of modules that allocated areas to their modules."""
    text = KernelText(reader, losses)
    found = {}
    for caller in set(areas.caller.tolist()):
        module = text.module_name(caller)
        if module is not None:
            found[function_name(reader.prog, caller)] = module
    return found


def caller_names(prog: drgn.Program, areas: VmallocAreas) -> list[str]:
    """Return the name of the function that allocated each area."""
    callers = areas.caller.tolist()
    names = {caller: function_name(prog, caller) for caller in set(callers)}
    return [names[caller] for caller in callers]
