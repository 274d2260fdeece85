# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find addresses in the kernel's memory: per-CPU, slab objects, stacks, vmalloc."""

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import drgn
import numpy as np
from drgn import cast
from drgn.helpers.linux.mm import page_to_virt
from drgn.helpers.linux.slab import find_containing_slab_cache, slab_object_info
from msgspec import Struct

from msatools.errors import (
    LOST,
    UNREADABLE,
    DamagedDataError,
    MissingError,
    MissingMemberError,
    NotSupportedError,
)
from msatools.kernel.code import function_name, stack_trace
from msatools.kernel.percpu import read_percpu
from msatools.kernel.report import Loss
from msatools.kernel.slab import SlabCache, merged_names, read_cache
from msatools.locks.struct_reader import find_range
from msatools.memory.areas import MAX_NODES, PercpuUnits, percpu_units
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.selfdesc.find import ask, drgn_lookups, find_type, find_variable
from msatools.tasks.text import KernelText
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import PerCpuPlace, SlabPlace, StackPlace, Task, VmallocArea

# --- Places in per-CPU memory: variables, and memory of the percpu allocator.
#
# mm/percpu.c: a chunk has a unit for each CPU, all with the same layout.


_U64 = (1 << 64) - 1


class PerCpuPlaces:
    """Finds places in per-CPU memory."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def find(self, address: int) -> PerCpuPlace | None:
        """Return the place of an address; ``None`` if it is not in per-CPU memory."""
        known = self._lookup.variables.of_cpu(address)
        if known is not None:
            cpu, linked = known
            return self._variable(cpu, linked)
        units = self._units
        found = None if units is None else units.find(address)
        if found is None:
            return None
        cpu, place = found
        pointer = (address - self._offset(cpu)) & _U64
        piece = place.chunk.piece(place.offset)
        if piece is None:
            return PerCpuPlace(
                cpu=cpu,
                variable=None,
                offset=0,
                pointer=Address(pointer),
                bytes=None,
                allocated=None,
            )
        return PerCpuPlace(
            cpu=cpu,
            variable=None,
            offset=place.offset - piece.start,
            pointer=Address(pointer),
            bytes=piece.bytes,
            allocated=piece.allocated,
        )

    def of_linked(self, address: int) -> PerCpuPlace | None:
        """Return the per-CPU variable that is linked at an address in the image.

        On arm64, and on x86-64 since v6.15, that is its per-CPU pointer: the memory in
        the image was copied for each CPU, and freed.

        :return: ``None`` if there is none, or the kernel runs on one CPU without SMP.
        """
        percpu = read_percpu(self._lookup.reader, self._lookup.losses)
        return self._variable(None, address) if percpu.offsets.any() else None

    def of_pointer(self, pointer: int) -> PerCpuPlace | None:
        """Return the variable or allocation that a per-CPU pointer is in, if any."""
        variable = self._variable(None, pointer)
        percpu = read_percpu(self._lookup.reader, self._lookup.losses)
        if variable is not None or not len(percpu.offsets) or self._units is None:
            return variable
        address = (pointer + int(percpu.offsets[0])) & _U64
        found = self._units.find(address)
        piece = None if found is None else found[1].chunk.piece(found[1].offset)
        if found is None or piece is None or not piece.allocated:
            return None
        return PerCpuPlace(
            cpu=None,
            variable=None,
            offset=found[1].offset - piece.start,
            pointer=Address(pointer),
            bytes=piece.bytes,
            allocated=True,
        )

    def _variable(self, cpu: int | None, linked: int) -> PerCpuPlace | None:
        symbol = self._lookup.variables.per_cpu(linked)
        if symbol is None and cpu is None:
            return None
        return PerCpuPlace(
            cpu=cpu,
            variable=None if symbol is None else symbol.name,
            offset=0 if symbol is None else linked - symbol.address,
            pointer=Address(linked),
            bytes=None,
            allocated=None,
        )

    def _offset(self, cpu: int) -> int:
        percpu = read_percpu(self._lookup.reader, self._lookup.losses)
        (row,) = np.flatnonzero(percpu.cpus == cpu)
        return int(percpu.offsets[row])

    @cached_property
    def _units(self) -> PercpuUnits | None:
        try:
            with drgn_lookups:
                return percpu_units(self._lookup.reader, self._lookup.losses)
        except MissingError:
            return None
        except UNREADABLE as error:
            text = f"cannot read the memory of CPUs: {error}"
            self._lookup.losses.lose(Loss.VARIABLES, text)
            return None


# --- Objects of slab caches, and the types of caches that have objects of one type.


TYPES = {
    "TCP": "tcp_sock",
    "TCPv6": "tcp6_sock",
    "UDP": "udp_sock",
    "UDPv6": "udp6_sock",
    "UNIX": "unix_sock",
    "UNIX-STREAM": "unix_sock",
    "bdev_cache": "bdev_inode",
    "blkdev_ioc": "io_context",
    "cred_jar": "cred",
    "eventpoll_epi": "epitem",
    "eventpoll_pwq": "eppoll_entry",
    "ext4_inode_cache": "ext4_inode_info",
    "file_lock_cache": "file_lock",
    "files_cache": "files_struct",
    "filp": "file",
    "fs_cache": "fs_struct",
    "inode_cache": "inode",
    "kernfs_node_cache": "kernfs_node",
    "mnt_cache": "mount",
    "mqueue_inode_cache": "mqueue_inode_info",
    "posix_timers_cache": "k_itimer",
    "proc_inode_cache": "proc_inode",
    "radix_tree_node": "xa_node",
    "shmem_inode_cache": "shmem_inode_info",
    "sighand_cache": "sighand_struct",
    "signal_cache": "signal_struct",
    "skbuff_head_cache": "sk_buff",
    "sock_inode_cache": "socket_alloc",
    "uid_cache": "user_struct",
}
"""Maps the name of a cache to the tag of the structures in it, where these differ."""

_CUT = ("task_struct", "kmem_cache")
"""Structures of which only the part in use is allocated: their ends are arrays for the
state of the FPU (arch_task_struct_size), and for the nodes of NUMA."""


_MAX_BYTES = 4096
_NAMES = 3
"""Maximum bytes that are read of one object, and names that are listed for it."""


class SlabObjects:
    """Finds slab objects."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._prog = lookup.prog

    def find(self, address: int) -> SlabPlace | None:
        """Return the slab object at an address of the direct map.

        :return: ``None`` if there is none, or its slab cannot be read.
        """
        try:
            with drgn_lookups:
                info = ask(slab_object_info, self._prog, address)
                if info is None or not info.slab_cache:
                    return None
                cache = read_cache(self._lookup.reader, info.slab_cache.value_())
                shared = int(info.slab_cache.refcount.value_()) - 1
                start = int(info.address)
                in_slab = self._is_within(info.slab, start, cache)
        except NotSupportedError:
            return None
        except LOST as error:
            text = f"cannot read an object of a slab cache: {error}"
            self._lookup.losses.lose(Loss.SLABS, text)
            return None
        if not in_slab:
            return None
        return SlabPlace(
            cache=cache.name,
            object=Address(start),
            bytes=cache.size,
            offset=address - start,
            allocated=info.allocated,
            merged=max(shared, 0),
            merged_names=self._others(cache) if shared > 0 else (),
            object_bytes=self._object_bytes(info.slab_cache),
            points_to=self._points_to(cache, start) if info.allocated else (),
        )

    def _points_to(self, cache: SlabCache, start: int) -> tuple[str, ...]:
        """Return the symbols that a kmalloc object points to, modules' ones first."""
        if not cache.name.startswith("kmalloc"):
            return ()
        size = min(cache.size, _MAX_BYTES) // 8
        try:
            words = self._lookup.reader.words(start, size)
        except UNREADABLE:
            return ()
        symbols = self._lookup.symbols
        named = words[symbols.may_name(words)].tolist()
        found = [name for word in named if (name := symbols.name(word)) is not None]
        found.sort(key=lambda name: name.module is None)
        return tuple(dict.fromkeys(name.name for name in found))[:_NAMES]

    def cache_at(self, address: int) -> str | None:
        """Return the cache whose slab is at an address; ``None`` if unknown."""
        try:
            with drgn_lookups:
                cache = ask(find_containing_slab_cache, self._prog, address)
                return (
                    read_cache(self._lookup.reader, cache.value_()).name
                    if cache
                    else None
                )
        except LOST:
            return None

    def _others(self, cache: SlabCache) -> tuple[str, ...]:
        """Return the names of the other caches that were merged with *cache*."""
        return tuple(sorted({*self._aliases.get(cache.address, ())} - {cache.name}))

    @cached_property
    def _aliases(self) -> Mapping[int, list[str]]:
        return merged_names(self._lookup.reader, self._lookup.losses)

    @staticmethod
    def _object_bytes(cache: drgn.Object) -> int | None:
        try:
            with drgn_lookups:
                return int(cache.object_size.value_())
        except UNREADABLE:
            return None

    def _is_within(self, slab: drgn.Object, start: int, cache: SlabCache) -> bool:
        """Return whether an object is in front of the unused end of its slab."""
        try:
            with drgn_lookups:
                count = int(slab.objects.value_())
        except MissingMemberError:
            return True  # SLAB, up to v6.7, does not keep it
        first: int = (
            ask(page_to_virt, cast("struct page *", slab)).value_() + cache.padding
        )
        return 0 <= start - first < count * cache.size

    def type_of(self, found: SlabPlace) -> drgn.Type | None:
        """Return the type of the objects of a cache; ``None`` if it is not certain.

        A cache that is shared has objects of several types.
        """
        if found.merged:
            return None
        name = TYPES.get(found.cache, found.cache)
        if not name.isidentifier():
            return None
        try:
            type_ = find_type(self._prog, f"struct {name}")
        except MissingError:
            return None
        if not type_.is_complete():
            return None
        fits = drgn.sizeof(type_) <= found.bytes or type_.tag in _CUT
        return type_ if fits else None


# --- Places in the kernel stacks of tasks: the frame that an address is in.


Where = Literal["frame", "unused", "registers", "guard", "unknown"]


class _Frame(NamedTuple):
    """A frame of a stack."""

    start: int
    """Stack pointer in the frame, its lowest address; or an address within, where only
    the frame pointer is known."""

    is_exact: bool
    """Whether it is the stack pointer."""

    function: str | None


class _InStack(NamedTuple):
    """A place in a stack: see :class:`StackPlace`."""

    where: Where
    frame: int | None = None
    function: str | None = None
    next_function: str | None = None


class _Frames(Struct, frozen=True):
    """The frames of a stack, innermost first."""

    frames: tuple[_Frame, ...]
    end: int
    """End of the outermost frame; above it are registers of user mode, if any."""


class StackPlaces:
    """Finds the stacks that contain addresses; unwinds each of them once."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._frames = lru_cache(maxsize=None)(self._unwind)

    def find(self, address: int) -> tuple[Task, StackPlace] | None:
        """Return the task whose stack has an address, and the place, or ``None``."""
        # Stacks are aligned to their size (THREAD_ALIGN), at least to a page.
        return self._find(address & -self._lookup.stack_bytes, address)

    def find_guard(self, address: int) -> tuple[Task, StackPlace] | None:
        """Return the task whose stack has its guard page at an address.

        :param address: An address at which nothing is mapped.
        """
        start = (address & -self._lookup.page_size) + self._lookup.page_size
        return self._find(start, address)

    def _find(self, start: int, address: int) -> tuple[Task, StackPlace] | None:
        size = self._lookup.stack_bytes
        task = self._lookup.stacks.get(start)
        if task is None:
            return None
        try:
            of = self._lookup.task(task)
        except UNREADABLE as error:
            self._lookup.losses.lose(Loss.TASKS, f"a task cannot be read: {error}")
            return None
        in_guard = address < start
        place = _InStack("guard") if in_guard else self._place(task, address)
        return of, StackPlace(
            pid=of.pid,
            comm=of.comm,
            start=Address(start),
            bytes=size,
            offset=address - start,
            **place._asdict(),
        )

    def _place(self, task: int, address: int) -> _InStack:
        found = self._frames(task)
        frames = found.frames
        if not frames:
            return _InStack("unknown")
        if address < frames[0].start:
            return _InStack("unused")
        if address >= found.end:
            return _InStack("registers")
        number = sum(frame.start <= address for frame in frames) - 1
        following = None
        if number + 1 < len(frames) and not frames[number + 1].is_exact:
            following = frames[number + 1].function
        return _InStack("frame", number, frames[number].function, following)

    def _unwind(self, task: int) -> _Frames:
        """Unwind a stack with drgn; no frames if it cannot."""
        prog = self._lookup.prog
        trace = stack_trace(prog, task)
        if trace is None:
            return _Frames((), 0)
        stack = self._lookup.structs.member(task, "task_struct", "stack")
        size = self._lookup.stack_bytes
        end = stack + size - self._registers_bytes
        frames: list[_Frame] = []
        for frame in trace:
            start, is_exact = _start_of(frame)
            if start is None:
                break
            # The first frames may be on another stack, of an interrupt.
            if frame.is_inline or not stack <= start <= end:
                continue
            if frames and start < frames[-1].start:
                break
            address = frame.pc if frame.interrupted else frame.pc - 1
            frames.append(_Frame(start, is_exact, self._text.name(address)))
        return _Frames(tuple(frames), end)

    @cached_property
    def _registers_bytes(self) -> int:
        """Bytes of the registers of user mode at the end of a stack.

        task_pt_regs(): on x86-64 the stack may end before it by
        TOP_OF_KERNEL_STACK_PADDING.
        """
        try:
            return int(drgn.sizeof(find_type(self._lookup.prog, "struct pt_regs")))
        except MissingError:
            return 0

    @cached_property
    def _text(self) -> KernelText:
        return KernelText(self._lookup.reader, self._lookup.losses)


def _start_of(frame: drgn.StackFrame) -> tuple[int | None, bool]:
    """Return a frame's stack pointer and true, or else its frame pointer and false.

    On arm64 only debug info provides the stack pointer; the frame pointer, the address
    of the frame record, is always known. Locals may lie below the record.
    """
    try:
        with drgn_lookups:
            return int(frame.sp), True
    except MissingError:
        return frame.registers().get("x29"), False


# --- Areas of the kernel's vmalloc range (mm/vmalloc.c).


_USES = {0x1: "ioremap", 0x2: "vmalloc", 0x4: "vmap", 0x8: "vmalloc_user"}
"""VM_IOREMAP, VM_ALLOC, VM_MAP and VM_USERMAP (include/linux/vmalloc.h)."""

_ENDS = "va_start", "va_end"

_NO_GUARD = 0x40
"""VM_NO_GUARD: the area does not end with a page at which nothing is mapped."""


def find_area(lookup: Lookup, address: int) -> VmallocArea | None:
    """Return the area that contains an address; ``None`` if there is none."""
    try:
        with drgn_lookups:
            area = _find(lookup, address)
            if not area:
                return None
            start, end, vm = lookup.structs.members(area, "vmap_area", *_ENDS, "vm")
            if vm < KERNEL_HALF:
                return _area(start, end - start, address, "vm_map_ram")
            flags, caller, pages, physical = lookup.structs.members(
                vm, "vm_struct", "flags", "caller", "nr_pages", "phys_addr"
            )
    except MissingError:
        return None
    except UNREADABLE as error:
        lookup.losses.lose(Loss.VMALLOC, f"cannot read an area of vmalloc: {error}")
        return None
    use = next((use for bit, use in _USES.items() if flags & bit), "reserved")
    name = function_name(lookup.prog, caller) if caller else None
    device = Address(physical) if use == "ioremap" and not pages else None
    guard = not flags & _NO_GUARD and address >= end - lookup.page_size
    return _area(start, end - start, address, use, name, device, guard)


def _find(lookup: Lookup, address: int) -> int:
    """Return the ``struct vmap_area`` that contains an address; 0 if none does.

    :raises drgn.FaultError: if none is found, and a part of the trees cannot be read
    """
    lost: drgn.FaultError | None = None
    for root in _roots(lookup.prog):
        try:
            area = find_range(
                lookup.structs, root, "vmap_area", "rb_node", _ENDS, address
            )
        except UNREADABLE as error:
            lost = error
            continue
        if area:
            return area
    if lost is not None:
        raise lost
    return 0


def _roots(prog: drgn.Program) -> Iterator[int]:
    """Yield the address of the node at the root of each tree of areas in use."""
    try:
        nodes = find_variable(prog, "vmap_nodes")
    except MissingError:
        # Before Linux kernel commit d093602919ad ("mm: vmalloc: remove global
        # vmap_area_root rb-tree") (in v6.9).
        yield find_variable(prog, "vmap_area_root").rb_node.value_()
        return
    count = find_variable(prog, "nr_vmap_nodes").value_()
    if not 0 < count <= MAX_NODES:
        raise DamagedDataError(f"there cannot be {count:,} trees", nodes.value_())
    for i in range(count):
        yield nodes[i].busy.root.rb_node.value_()


def _area(
    start: int,
    size: int,
    address: int,
    use: str,
    caller: str | None = None,
    physical: Address | None = None,
    guard: bool = False,
) -> VmallocArea:
    return VmallocArea(
        start=Address(start),
        bytes=size,
        use=use,
        caller=caller,
        offset=address - start,
        guard=guard,
        physical=physical,
    )
