# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damage of the kernel's memory, at places that types lead to."""

import struct
from collections.abc import Callable, Iterator
from functools import cache
from random import Random

from drgn import FaultError, Object, Program, Type, TypeKind, sizeof
from drgn.helpers.linux.cgroup import css_for_each_descendant_pre
from drgn.helpers.linux.fs import for_each_file, for_each_mount
from drgn.helpers.linux.irq import for_each_irq_desc
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import for_each_vma
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.slab import for_each_slab_cache

from tests.fuzz.change import Change, integers
from tests.fuzz.dumps import PAGE, Dump, contents, page_of, program
from tests.fuzz.tables import changed_pages

_MOST = 300
"""Objects of a kind to choose from."""

NAMES = (
    b"\x1b]0;title\x07\x1b[2J",
    b"[red]x[/red]\n\n",
    b"\xff\xfe\x80\xc3",
    b"</svg><script>",
    b'"];}\\"',
    b"\xe2\x80\xae\xe2\x80\x8f",
    b"x" * 64,
)
"""Names that would do harm on a terminal, in JSON, SVG or dot."""


def _tasks(prog: Program) -> Iterator[Object]:
    yield from for_each_task(prog)


def _of_tasks(*members: str) -> Callable[[Program], Iterator[Object]]:
    def find(prog: Program) -> Iterator[Object]:
        for task in for_each_task(prog):
            value = task
            for member in members:
                value = value.member_(member)
                if not value:
                    break
            else:
                yield value

    return find


def _vmas(prog: Program) -> Iterator[Object]:
    for task in for_each_task(prog):
        if task.mm:
            yield from for_each_vma(task.mm)


def _files(prog: Program) -> Iterator[Object]:
    for task in for_each_task(prog):
        if task.files:
            yield from (file for _, file in for_each_file(task))


def _inodes(prog: Program) -> Iterator[Object]:
    yield from (file.f_inode for file in _files(prog))


def _zones(prog: Program) -> Iterator[Object]:
    for node in for_each_online_pgdat(prog):
        yield node
        for index in range(len(node.node_zones)):
            yield node.node_zones[index].address_of_()


def _queues(prog: Program) -> Iterator[Object]:
    for cpu in range(2):
        yield per_cpu(prog["runqueues"], cpu).address_of_()


def _cgroups(prog: Program) -> Iterator[Object]:
    root = prog["cgrp_dfl_root"].cgrp.self.address_of_()
    yield from (css.cgroup for css in css_for_each_descendant_pre(root))


def _modules(prog: Program) -> Iterator[Object]:
    return list_for_each_entry("struct module", prog["modules"].address_of_(), "list")


def _irqs(prog: Program) -> Iterator[Object]:
    yield from (desc for _, desc in for_each_irq_desc(prog))


OBJECTS: dict[str, Callable[[Program], Iterator[Object]]] = {
    "task": _tasks,
    "signal": _of_tasks("signal"),
    "mm": _of_tasks("mm"),
    "files": _of_tasks("files"),
    "fdtable": _of_tasks("files", "fdt"),
    "cred": _of_tasks("cred"),
    "pid": _of_tasks("thread_pid"),
    "nsproxy": _of_tasks("nsproxy"),
    "css_set": _of_tasks("cgroups"),
    "vma": _vmas,
    "file": _files,
    "inode": _inodes,
    "zone": _zones,
    "queue": _queues,
    "cgroup": _cgroups,
    "mount": lambda prog: for_each_mount(prog),
    "slab": for_each_slab_cache,
    "module": _modules,
    "irq": _irqs,
}

VARIABLES = (
    *("nr_cpu_ids", "__per_cpu_offset", "max_pfn", "page_offset_base", "vmemmap_base"),
    *("mem_section", "node_data", "slab_caches", "init_task", "init_mm", "modules"),
    *("vmap_nodes", "nr_vmap_nodes", "vmap_zone_size", "nr_swapfiles"),
    *("vmap_area_list", "free_vmap_area_root", "purge_vmap_area_lazy"),
    *("pid_max", "init_pid_ns", "threads-max", "nr_threads", "cgrp_dfl_root"),
    *("__cpu_online_mask", "__cpu_possible_mask", "__cpu_present_mask", "tk_core"),
    *("vm_node_stat", "vm_zone_stat", "swapper_spaces", "swap_info", "totalram_pages"),
    *(
        "irq_desc_tree",
        "sparse_irqs",
        "workqueues",
        "worker_pool_idr",
        "super_blocks",
        "hstates",
    ),
    *("jiffies_64", "avenrun", "pcpu_nr_units", "pcpu_slot", "pcpu_chunk_lists"),
)


@cache
def _objects(core: str, kind: str) -> tuple[tuple[int, int, Type], ...]:
    """Return address, size and type of a core's objects of a kind."""
    prog = program(core)
    found: dict[int, tuple[int, int, Type]] = {}
    try:
        for pointer in OBJECTS[kind](prog):
            type_ = pointer.type_.type
            address = pointer.value_()
            found[address] = (address, type_.size or 8, type_)
            if len(found) >= _MOST:
                break
    except (FaultError, LookupError, AttributeError):
        pass
    return tuple(found.values())


def places(core: str, chance: Random) -> Iterator[str]:
    """Yield words for msa-whatis: objects, stacks, and memory of processes."""
    prog = program(core)
    for kind in chance.sample(sorted(OBJECTS), 3):
        if _objects(core, kind):
            address, size, _ = chance.choice(_objects(core, kind))
            yield f"{address + chance.randrange(size):x}"
    address, _, type_ = chance.choice(_objects(core, "task"))
    task = Object(prog, type_, address=address)
    yield f"{task.stack.value_() + chance.randrange(2 * PAGE):x}"
    yield f"{task.pid.value_()}:{chance.randrange(1 << 47):x}"
    yield f"{task.pid.value_()}:400000"


def change(dump: Dump, chance: Random) -> list[Change]:
    """Return changes to the contents of memory."""
    pages: dict[int, bytes] = {}
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        try:
            address, data = chance.choice(KINDS)(dump.core, chance)
            put(dump.core, pages, address, data)
        except (LookupError, FaultError, ValueError, TypeError, IndexError):
            continue
    return changed_pages(dump, pages)


def put(core: str, pages: dict[int, bytes], address: int, data: bytes) -> None:
    """Write to the kernel's memory.

    :param pages: Contents of pages that are changed, by page frame number.
    :raises LookupError: if the core lacks a page
    """
    while data:
        pfn, offset = page_of(core, address)
        page = pages.get(pfn) or contents(core)[pfn]
        here = data[: PAGE - offset]
        pages[pfn] = page[:offset] + here + page[offset + len(here) :]
        address, data = address + len(here), data[len(here) :]


def _member(core: str, chance: Random) -> tuple[int, bytes]:
    """Change a word of an object."""
    address, size, _ = chance.choice(_objects(core, chance.choice(list(OBJECTS))))
    offset = chance.randrange(0, max(size - 7, 1), 8)
    return address + offset, _word(core, chance)


def _word(core: str, chance: Random) -> bytes:
    """Return a number that does harm, or a pointer to another object."""
    if chance.random() < 0.5:
        return integers(chance, 8)
    address, size, _ = chance.choice(_objects(core, chance.choice(list(OBJECTS))))
    return struct.pack("<Q", address + chance.choice((0, 0, 1, 8, size // 16 * 8)))


def _link(core: str, chance: Random) -> tuple[int, bytes]:
    """Change a link of a list or of a tree within an object."""
    address, _, type_ = chance.choice(_objects(core, chance.choice(list(OBJECTS))))
    links = [
        member.bit_offset // 8
        for member in type_.members
        if member.type.kind == TypeKind.STRUCT
        and member.type.tag
        in ("list_head", "hlist_node", "rb_node", "xarray", "maple_tree", "llist_node")
    ]
    place = address + chance.choice(links) + chance.choice((0, 8))
    own = struct.pack("<Q", chance.choice((place, place & -8, address)))
    return place, chance.choice((own, _word(core, chance)))


def _variable(core: str, chance: Random) -> tuple[int, bytes]:
    variable = program(core)[chance.choice(VARIABLES)]
    size = min(max(sizeof(variable), 8), 256)
    address = variable.address_
    if address is None:
        raise LookupError("a variable without an address")
    return address + chance.randrange(0, size, 8), _word(core, chance)


def _name(core: str, chance: Random) -> tuple[int, bytes]:
    address, _, type_ = chance.choice(_objects(core, "task"))
    offset = type_.member("comm").bit_offset // 8
    return address + offset, chance.choice(NAMES)[:16].ljust(16, b"\0")


def _struct_page(core: str, chance: Random) -> tuple[int, bytes]:
    prog = program(core)
    pfn = chance.choice(list(contents(core)))
    page = prog["vmemmap"] + pfn if "vmemmap" in prog else None
    if page is None:
        raise LookupError("no memmap")
    size = page.type_.type.size
    return page.value_() + chance.randrange(0, size, 8), _word(core, chance)


def _stack(core: str, chance: Random) -> tuple[int, bytes]:
    address, _, _ = chance.choice(_objects(core, "task"))
    task = Object(program(core), "struct task_struct *", address)
    start = task.thread.sp.value_() & -8
    return start + chance.randrange(0, 512, 8), _word(core, chance)


def _page_table(core: str, chance: Random) -> tuple[int, bytes]:
    """Change an entry of the kernel's top-level page table, or of a task's."""
    prog = program(core)
    table = prog["swapper_pg_dir"].address_of_().value_()
    address, _, _ = chance.choice(_objects(core, "mm"))
    of_task = Object(prog, "struct mm_struct *", address).pgd.value_()
    start = chance.choice((table, of_task))
    return start + chance.randrange(0, PAGE, 8), _word(core, chance)


def _loop(core: str, chance: Random) -> tuple[int, bytes]:
    """Have a node of a tree, or a table of pages, lead to itself from each slot."""
    prog = program(core)
    kind = chance.choice(("mm", "inode", "pid", "pgd", "areas", "entry"))
    if kind == "pid":
        return _looped_xarray(prog["init_pid_ns"].idr.idr_rt)
    if kind == "areas":
        root = _tree_of_areas(prog, chance).rb_node.value_()
        return root, struct.pack("<Q", root) * 3
    if kind == "entry":
        address, _, type_ = chance.choice(_objects(core, "file"))
        entry = Object(prog, type_, address=address).f_path.dentry
        return entry.d_parent.d_parent.address_ or 0, struct.pack("<Q", entry.value_())
    address, _, type_ = chance.choice(
        _objects(core, "inode" if kind == "inode" else "mm")
    )
    found = Object(prog, type_, address=address)
    if kind == "inode":
        return _looped_xarray(found.i_mapping.i_pages)
    if kind == "mm":
        root = found.mm_mt.ma_root.value_()
        return root & ~0xFF, struct.pack("<Q", root) * 32
    pfn, offset = page_of(core, found.pgd.value_())
    # Present, writable, of users, accessed, dirty; the lower half is of users.
    entry = struct.pack("<Q", pfn * PAGE + offset | 0x67)
    return found.pgd.value_(), entry * (PAGE // 16)


def _tree_of_areas(prog: Program, chance: Random) -> Object:
    """Return a ``struct rb_root`` of areas of vmalloc."""
    if "vmap_nodes" not in prog:
        return prog["vmap_area_root"]
    return prog["vmap_nodes"][chance.randrange(prog["nr_vmap_nodes"])].busy.root


def _looped_xarray(tree: Object) -> tuple[int, bytes]:
    slots = tree.prog_.type("struct xa_node").member("slots")
    head = tree.xa_head.value_()
    length = slots.type.length or 0
    return (head & ~3) + slots.offset, struct.pack("<Q", head) * length


def _anything(core: str, chance: Random) -> tuple[int, bytes]:
    """Change a whole page, or a part of one."""
    pfn = chance.choice(list(contents(core)))
    base = program(core)["page_offset_base"].value_()
    data = chance.choice((bytes(PAGE), chance.randbytes(PAGE), b"\xff" * 64))
    return base + pfn * PAGE, data


KINDS = (
    *(_member, _member, _member, _member, _link, _link, _link, _variable, _variable),
    *(_name, _struct_page, _stack, _page_table, _loop, _anything),
)
