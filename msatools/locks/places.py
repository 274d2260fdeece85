# SPDX-License-Identifier: LGPL-2.1-or-later

"""The structure, slab object or variable that contains a lock, by its address."""

from collections.abc import Callable
from functools import cached_property, lru_cache

import drgn
import numpy as np
from drgn.helpers.linux.mm import PageSlab, compound_head
from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.code import CodeModules
from msatools.kernel.percpu import PerCpu, read_percpu
from msatools.kernel.reader import distinct
from msatools.kernel.report import LossLog
from msatools.kernel.slab import SlabCache, read_cache, slab_cache_offset, slab_type
from msatools.locks.context import LockContext, per_context
from msatools.locks.storage import Storage
from msatools.locks.struct_reader import Layout
from msatools.program.arch import arch_of
from msatools.program.linear import KERNEL_HALF, code_start, page_address, vmemmap_base
from msatools.selfdesc.find import ask, find_type, find_variable, member_of
from msatools.selfdesc.load import finders_of, is_served_by_btf
from msatools.selfdesc.tables import Symbols, SymbolTable
from msatools.tasks.table import TaskTable

# --- Finds the slab object that contains an address (mm/slub.c, mm/slab.c).
#
# drgn's own lookup also determines whether the object is allocated, and therefore reads
# the free objects of every CPU. Objects that tasks wait for are allocated.


class SlabObject(Struct, frozen=True):
    """An object of a slab cache."""

    cache: str
    """Name of the cache; for merged caches, that of the first one."""

    start: int
    size: int
    """Bytes, with the metadata of the allocator."""

    @property
    def end(self) -> int:
        """Address past the end."""
        return self.start + self.size


MAX_OBJECT = 8192
"""``KMALLOC_MAX_CACHE_SIZE``: maximum bytes of a slab object."""


class Slabs:
    """Finds slab objects; reads each cache once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._cache = lru_cache(maxsize=None)(self._read_cache)

    def find(self, address: int) -> SlabObject | None:
        """Find the object that contains an address; ``None`` if there is none.

        :raises drgn.FaultError: if a structure that leads to it cannot be read
        :raises MissingError: if the types are unknown
        """
        if address < KERNEL_HALF:
            return None
        page = self._page(address)
        if page is None or not ask(PageSlab, page):
            return None
        slab = page.value_()
        cache = self._cache(self._layout.word(slab + self._cache_offset))
        if cache is None:
            return None
        if self._first_object is not None:
            first = self._layout.word(slab + self._first_object)
        else:
            start, _ = self._memory
            first = (
                start + (slab - self._pages) // self._page_size * self._layout.page_size
            )
        first += cache.padding
        if address < first:
            return None
        index = (address - first) // cache.size
        return SlabObject(cache.name, first + index * cache.size, cache.size)

    def _page(self, address: int) -> drgn.Object | None:
        """Return the head page of an address in the direct map.

        drgn's virt_to_page() would look up the direct map for each address.
        """
        start, end = self._memory
        if address >= end:
            # Memory may have been hot-added.
            del self._memory
            start, end = self._memory
        if not start <= address < end:
            return None
        pfn = (address - start) // self._layout.page_size
        page = self._pages + pfn * self._page_size
        return ask(compound_head, drgn.Object(self._prog, self._pointer, value=page))

    @cached_property
    def _memory(self) -> tuple[int, int]:
        """Start and end of the direct map; the start is the address of pfn 0."""
        last = find_variable(self._prog, "max_low_pfn").value_()
        start, end = (page_address(self._prog, pfn) for pfn in (0, last))
        return start, end + self._layout.page_size

    @cached_property
    def _pages(self) -> int:
        return vmemmap_base(self._prog)

    @cached_property
    def _page_size(self) -> int:
        return self._layout.size("page")

    @cached_property
    def _pointer(self) -> drgn.Type:
        return find_type(self._prog, "struct page *")

    @cached_property
    def _cache_offset(self) -> int:
        return slab_cache_offset(self._prog)

    @cached_property
    def _first_object(self) -> int | None:
        """Offset of ``s_mem``, a pointer to the first object; ``None`` except with
        CONFIG_SLAB (up to v6.7)."""
        if not self._layout.has("kmem_cache", "colour_off"):
            return None
        offset: int = member_of(slab_type(self._prog), "s_mem").offset
        return offset

    def _read_cache(self, address: int) -> SlabCache | None:
        if address < KERNEL_HALF:
            return None
        return read_cache(self._layout.reader, address)


# --- Finds the variable that contains an address: of the kernel, of a module, per-CPU.


_LARGE = "rcu_state"
"""A variable of 359 KiB with locks in it; its type has the same name."""


class Variables:
    """Finds names of variables; reads modules when first needed."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._losses = losses
        self._code_start = code_start(layout.reader.prog)
        self._modules = CodeModules(layout.reader, losses)

    def name(self, address: int) -> str | None:
        """Return the name of the variable at an address; ``None`` if there is none.

        Examples: ``cgroup_mutex``, ``shrinker_idr+0x8``, ``runqueues of cpu1``.
        """
        start, end = self._image
        if start <= address < end:
            return _name(self._in_kernel(address), address) or self._large(address)
        if (per_cpu := self.of_cpu(address)) is not None:
            cpu, linked = per_cpu
            name = _name(self._static(linked), linked)
            return f"{name} of cpu{cpu}" if name else None
        # Data of modules is next to their code.
        if address < self._code_start:
            return None
        return _name(self._in_module(address), address)

    def _large(self, address: int) -> str | None:
        """Return the name of an address in ``rcu_state``; ``None`` for others.

        Lookups by symbol assume smaller variables if symbols have no sizes.
        """
        start = self._layout.symbol(_LARGE)
        if start is None or not self._layout.has(_LARGE, "barrier_mutex"):
            return None
        offset = address - start
        return f"{_LARGE}+{offset:#x}" if 0 <= offset < self._size else None

    @cached_property
    def _size(self) -> int:
        return self._layout.size(_LARGE)

    @cached_property
    def _image(self) -> tuple[int, int]:
        start, end = self._layout.symbol("_text"), self._layout.symbol("_end")
        if start is None or end is None:
            return 0, 0
        if end < start:
            # Debug info of arm64 has an _end that is not relocated.
            _, end = arch_of(self._prog).image_range(self._prog)
        return start, end

    def _in_kernel(self, address: int) -> list[drgn.Symbol]:
        if is_served_by_btf(self._prog):
            finder = finders_of(self._prog).symbols
            found = list(finder(self._prog, None, address, False))
            return _with_others(self._prog, finder, found)
        return list(self._prog.symbols(address))

    def _in_module(self, address: int) -> list[drgn.Symbol]:
        module = self._modules.find(address)
        if module is None:
            return []
        symbols = self._modules.symbols(module)
        return list(symbols(self._prog, None, address, False))

    @cached_property
    def _cpus(self) -> tuple[int, int, PerCpu] | None:
        """Start and end of the linked per-CPU section, and the offset of each CPU.

        ``None`` if unknown.
        """
        start, end = map(self._layout.symbol, ("__per_cpu_start", "__per_cpu_end"))
        if start is None or end is None:
            return None
        try:
            return start, end, read_percpu(self._layout.reader, self._losses)
        except LOST:
            return None

    def per_cpu(self, linked: int) -> drgn.Symbol | None:
        """Return the per-CPU variable at a linked address; ``None`` if not found."""
        if self._cpus is None or not self._cpus[0] <= linked < self._cpus[1]:
            return None
        return _best(self._static(linked))

    def of_cpu(self, address: int) -> tuple[int, int] | None:
        """Return the CPU and the linked address of an address in per-CPU data.

        :return: ``None`` if the address is not in the data of any CPU.
        """
        if self._cpus is None:
            return None
        start, end, percpu = self._cpus
        linked = np.uint64(address) - percpu.offsets
        inside = (linked >= start) & (linked < end) & (percpu.offsets != 0)
        rows = np.flatnonzero(inside)
        if not len(rows):
            return None
        return int(percpu.cpus[rows[0]]), int(linked[rows[0]])

    def _static(self, linked: int) -> list[drgn.Symbol]:
        """Find per-CPU variables by their linked address.

        A linked address is a small number, or, since "x86/percpu/64: Use relative
        percpu offsets" (in v6.15), an address in the kernel's data.
        """
        if is_served_by_btf(self._prog):
            finder = finders_of(self._prog).symbols
            found = list(finder(self._prog, None, linked, False))
            return _with_others(self._prog, finder, found)
        return list(self._linked(self._prog, None, linked, False))

    @cached_property
    def _linked(self) -> drgn.SymbolIndex:
        """All per-CPU variables: drgn finds no symbols at addresses outside of modules.

        This takes some 100 ms, once.
        """
        start, end, _ = self._cpus or (0, 0, None)
        return drgn.SymbolIndex(
            symbol for symbol in self._prog.symbols() if start <= symbol.address < end
        )


def _with_others(
    prog: drgn.Program, finder: Symbols, found: list[drgn.Symbol]
) -> list[drgn.Symbol]:
    """Return symbols, and all others at their addresses if one of them is no variable.

    kallsyms has no sizes. Of several symbols at one address, drgn's own index extends
    only the last to the next address, so that only that one is found.
    """
    if isinstance(finder, SymbolTable) or not any(map(_is_no_variable, found)):
        return found
    addresses = {symbol.address for symbol in found}
    symbols = finder(prog, None, None, False)
    return [symbol for symbol in symbols if symbol.address in addresses]


def _name(symbols: list[drgn.Symbol], address: int) -> str | None:
    """Return the name of the innermost variable, with the offset of an address in it.

    Of several, global ones are preferred; ``None`` if there is none.
    """
    best = _best(symbols)
    if best is None:
        return None
    offset = address - best.address
    return f"{best.name}+{offset:#x}" if offset else str(best.name)


def _best(symbols: list[drgn.Symbol]) -> drgn.Symbol | None:
    data = [symbol for symbol in symbols if symbol.kind != drgn.SymbolKind.FUNC]
    return max(data, key=_fitness, default=None)


def _fitness(symbol: drgn.Symbol) -> tuple[int, bool, bool, int, str]:
    is_global = symbol.binding == drgn.SymbolBinding.GLOBAL
    names = -len(symbol.name), symbol.name
    return symbol.address, not _is_no_variable(symbol), is_global, *names


_LABELS = ("__key", "__per_cpu_start", "__per_cpu_load")


def _is_no_variable(symbol: drgn.Symbol) -> bool:
    """Return whether a symbol has no size, and shares its address with a variable.

    It is one of the linker's labels of the first per-CPU variable, or, without lockdep,
    a ``struct lock_class_key``.
    """
    name: str = symbol.name
    return name in _LABELS or name.startswith("__key.")


# --- Finds the kernel structure that contains a lock, by the address of the lock.
#
# For each lock type, members of a few structures are tried. A structure is accepted if
# another one points back at it: i_data at its inode, a root dentry at its super block.


FREEZE_LEVELS = ("write", "page fault", "internal")
"""Operations that each lock of a frozen file system blocks (SB_FREEZE_LEVELS)."""

FREEZE_COMPLETE = 4
"""SB_FREEZE_COMPLETE, a value of ``super_block.s_writers.frozen``."""

_MAX_NODES = 1024
"""Maximum of MAX_NUMNODES on x86."""


class LockPlace(Struct, frozen=True):
    """The variable or structure that contains a lock."""

    name: str
    """Name of the member or variable that is the lock."""

    type_name: str | None = None
    """Tag of the structure; ``None`` for a variable."""

    address: int = 0
    """Address of the structure."""

    level: int | None = None
    """For a lock of a frozen file system: its index in :data:`FREEZE_LEVELS`."""


_Members = tuple[tuple[str, tuple[str, ...]], ...]

_MUTEXES: _Members = (
    ("super_block", ("s_vfs_rename_mutex", "s_sync_lock")),
    ("file", ("f_pos_lock",)),
    ("seq_file", ("lock",)),
    ("kernfs_open_file", ("mutex", "prealloc_mutex")),
    ("signal_struct", ("cred_guard_mutex",)),
    ("device", ("mutex",)),
    # "block: move the bd_mutex to struct gendisk" (in v5.14)
    ("gendisk", ("open_mutex",)),
    ("block_device", ("bd_fsfreeze_mutex", "bd_holder_lock", "bd_mutex")),
    (
        "request_queue",
        (
            *("sysfs_lock", "limits_lock", "elevator_lock", "mq_freeze_lock"),
            *("sysfs_dir_lock", "debugfs_mutex", "rq_qos_mutex"),
        ),
    ),
    ("journal_s", ("j_barrier", "j_checkpoint_mutex", "j_abort_mutex")),
    (
        "tty_struct",
        ("atomic_write_lock", "legacy_mutex", "throttle_mutex", "winsize_mutex"),
    ),
    ("unix_sock", ("iolock", "bindlock")),
    ("eventpoll", ("mtx",)),
)
_RWSEMS: _Members = (
    # "mm: Protect operations adding pages to page cache with invalidate_lock" (v5.15)
    ("inode", ("i_rwsem", "i_data.i_mmap_rwsem", "i_data.invalidate_lock")),
    # "mmap locking API: rename mmap_sem to mmap_lock" (in v5.8)
    ("mm_struct", ("mmap_lock", "mmap_sem")),
    ("super_block", ("s_umount", "s_dquot.dqio_sem")),
    # "exec: Transform exec_update_mutex into a rw_semaphore" (in v5.11)
    ("signal_struct", ("exec_update_lock",)),
    ("anon_vma", ("rwsem",)),
    # "kernfs: Introduce separate rwsem to protect inode attributes." (in v6.4) and
    # the like split one lock.
    (
        "kernfs_root",
        ("kernfs_rwsem", "kernfs_iattr_rwsem", "kernfs_supers_rwsem"),
    ),
    ("tty_struct", ("termios_rwsem", "ldisc_sem")),
)
_QUEUES: _Members = (
    ("sock", ("sk_lock.wq",)),
    ("socket", ("wq.wait",)),
    ("request_queue", ("mq_freeze_wq",)),
    (
        "journal_s",
        (
            *("j_wait_transaction_locked", "j_wait_done_commit", "j_wait_commit"),
            *("j_wait_updates", "j_wait_reserved", "j_fc_wait"),
        ),
    ),
    ("signal_struct", ("wait_chldexit",)),
    ("tty_struct", ("read_wait", "write_wait")),
    ("eventpoll", ("wq", "poll_wait")),
    ("backing_dev_info", ("wb_waitq",)),
    ("unix_sock", ("peer_wq.wait",)),
    (
        "pglist_data",
        (
            *("pfmemalloc_wait", "kswapd_wait", "kcompactd_wait"),
            # "mm/vmscan: throttle reclaim until some writeback completes if congested"
            # (in v5.16), and other reasons since.
            *(f"reclaim_wait[{reason}]" for reason in range(4)),
        ),
    ),
)
_SPINLOCKS: _Members = (
    ("inode", ("i_lock",)),
    ("super_block", ("s_inode_list_lock",)),
    ("mm_struct", ("page_table_lock",)),
    ("sock", ("sk_lock.slock",)),
    ("request_queue", ("queue_lock",)),
)
_BY_TYPE: dict[str, _Members] = {
    "mutex": _MUTEXES,
    "rwsem": _RWSEMS,
    # With CONFIG_PREEMPT_RT, mutexes and rwsems contain an rt_mutex.
    "rt_mutex": (*_MUTEXES, *_RWSEMS),
    "wait_queue": _QUEUES,
    "completion": (("device", ("power.completion",)),),
    "spinlock": _SPINLOCKS,
}

_Path = tuple[str, ...]
"""Alternating structures and members: each member points at the next structure."""

# Paths that lead from a structure back to it, which shows that it is of that type.
_ROUND: dict[str, _Path] = {
    "seq_file": ("seq_file", "file", "file", "private_data"),
    "eventpoll": ("eventpoll", "file", "file", "private_data"),
    "kernfs_open_file": ("kernfs_open_file", "seq_file", "seq_file", "private"),
    "kernfs_root": ("kernfs_root", "kn", "kernfs_node", "dir.root"),
    "device": ("device", "p", "device_private", "device"),
    "gendisk": ("gendisk", "part0", "block_device", "bd_disk"),
    "request_queue": ("request_queue", "disk", "gendisk", "queue"),
    "sock": ("sock", "sk_socket", "socket", "sk"),
    "unix_sock": ("sock", "sk_socket", "socket", "sk"),
    "socket": ("socket", "sk", "sock", "sk_socket"),
    "backing_dev_info": ("backing_dev_info", "wb.bdi"),
}
# Two paths that lead from a structure of that type to the same address.
_TWICE: dict[str, tuple[_Path, _Path]] = {
    "file": (
        ("file", "f_inode"),
        ("file", "f_path.dentry", "dentry", "d_inode"),
    ),
    "block_device": (
        ("block_device", "bd_queue"),
        ("block_device", "bd_disk", "gendisk", "queue"),
    ),
    "journal_s": (
        ("journal_s", "j_dev"),
        ("journal_s", "j_sb_buffer", "buffer_head", "b_bdev"),
    ),
    "tty_struct": (
        ("tty_struct", "ops"),
        ("tty_struct", "driver", "tty_driver", "ops"),
    ),
}


class Places:
    """Finds the structures that contain locks; looks each lock up once."""

    def __init__(
        self, layout: Layout, storage: Storage, losses: LossLog, tasks: TaskTable
    ) -> None:
        self._layout = layout
        self._storage = storage
        self._slabs = Slabs(layout)
        self._variables = Variables(layout, losses)
        self._mms: frozenset[int] = frozenset(distinct(tasks["mm"]).tolist()) - {0}
        self._found: dict[tuple[str, int], LockPlace | None] = {}
        self._objects: dict[int, SlabObject | None] = {}
        self._tests: dict[str, Callable[[int], bool]] = {
            "inode": storage.is_inode,
            "super_block": storage.is_super_block,
            "mm_struct": self._is_mm,
            "signal_struct": self._is_signal,
            "anon_vma": self._is_anon_vma,
            "pglist_data": self._is_node,
        }

    def find(self, type_: str, address: int) -> LockPlace | None:
        """
        Find the variable or known structure that contains a lock.

        :param type_: One of :data:`.report.LockTypeName`.
        :return: ``None`` if not found.
        """
        key = type_, address
        if key not in self._found:
            variable = self._variables.name(address)
            self._found[key] = (
                LockPlace(variable) if variable else self._in_structure(type_, address)
            )
        return self._found[key]

    def slab(self, address: int) -> SlabObject | None:
        """Find the slab object that contains an address; ``None`` if there is none.

        ``None`` also if its ``struct page`` cannot be read.
        """
        if address not in self._objects:
            try:
                self._objects[address] = self._slabs.find(address)
            except LOST:
                self._objects[address] = None
        return self._objects[address]

    def inode_within(self, piece: SlabObject) -> int | None:
        """Find the ``struct inode`` in a slab object of a file system's own inode type.

        It is found by its ``i_mapping``, which points at its own ``i_data``.

        :return: Its address; ``None`` if not found.
        :raises drgn.FaultError: if the object cannot be read
        """
        mapping = self._layout.offset("inode", "i_mapping")
        data = self._layout.offset("inode", "i_data")
        words = self._layout.reader.words(piece.start, piece.size // 8)
        addresses = piece.start + 8 * np.arange(len(words), dtype=np.uint64)
        inodes = addresses - np.uint64(mapping)
        for row in np.flatnonzero(words == inodes + np.uint64(data)).tolist():
            if self._storage.is_inode(int(inodes[row])):
                return int(inodes[row])
        return None

    def _in_structure(self, type_: str, address: int) -> LockPlace | None:
        if type_ == "percpu_rwsem":
            return self._freeze_lock(address)
        piece = self.slab(address)
        for type_name, members in _BY_TYPE.get(type_, ()):
            for member in members:
                if not self._layout.has(type_name, member):
                    continue
                start = address - self._layout.offset(type_name, member)
                if piece is not None and not self._fits(start, type_name, piece):
                    continue
                if self.is_a(type_name, start):
                    name = member.rpartition(".")[2] if "i_data" in member else member
                    return LockPlace(name, type_name, start)
        return None

    def _fits(self, start: int, type_name: str, piece: SlabObject) -> bool:
        end = start + self._layout.size(type_name)
        return piece.start <= start and end <= piece.end

    def is_a(self, type_name: str, address: int) -> bool:
        """Return whether a structure of a type is at an address."""
        try:
            if type_name in _ROUND:
                return self.follow(address, *_ROUND[type_name]) == address
            if type_name in _TWICE:
                one, other = _TWICE[type_name]
                end = self.follow(address, *one)
                return end is not None and self.follow(address, *other) == end
            return self._tests[type_name](address)
        except LOST:
            return False

    def _freeze_lock(self, address: int) -> LockPlace | None:
        """Find the super block that has a percpu_rwsem for freezing."""
        size = self._layout.size("percpu_rw_semaphore")
        first = self._layout.offset("super_block", "s_writers.rw_sem")
        for level in range(len(FREEZE_LEVELS)):
            start = address - first - level * size
            if self.is_a("super_block", start):
                return LockPlace("s_writers", "super_block", start, level)
        return None

    def _is_mm(self, address: int) -> bool:
        return address in self._mms or self.owner_of_mm(address) is not None

    def owner_of_mm(self, mm: int) -> int | None:
        """Return the ``struct task_struct`` that owns an address space.

        :return: Its address; ``None`` if unknown.
        """
        try:
            owner = self._layout.member(mm, "mm_struct", "owner")
            if owner >= KERNEL_HALF:
                own = self._layout.member(owner, "task_struct", "mm")
                return owner if own == mm else None
        except LOST:
            pass  # CONFIG_MEMCG=n has no mm_struct.owner
        return None

    def task_of_signal(self, signal: int) -> int | None:
        """Return the first thread of the process that has a ``struct signal_struct``.

        :raises drgn.FaultError: if it cannot be read
        """
        node = self._layout.member(signal, "signal_struct", "thread_head")
        task = node - self._layout.offset("task_struct", "thread_node")
        return task if self.follow(task, "task_struct", "signal") == signal else None

    def mm_of_anon_vma(self, anon_vma: int) -> int | None:
        """Return the ``struct mm_struct`` of one mapping of a ``struct anon_vma``.

        :raises drgn.FaultError: if it cannot be read
        """
        node = self._layout.member(anon_vma, "anon_vma", "rb_root.rb_root.rb_node")
        chain = node - self._layout.offset("anon_vma_chain", "rb")
        if self.follow(chain, "anon_vma_chain", "anon_vma") != anon_vma:
            return None
        vma = self._layout.member(chain, "anon_vma_chain", "vma")
        return self.follow(vma, "vm_area_struct", "vm_mm")

    def follow(self, address: int, *path: str) -> int | None:
        """Follow a path of pointers from a structure.

        :param path: Alternating structures and members.
        :return: The last pointer; ``None`` if one of them is no kernel address.
        :raises drgn.FaultError: if a member cannot be read
        :raises MissingError: if a type is unknown, or has no such member
        """
        for type_name, member in zip(path[::2], path[1::2], strict=True):
            if address < KERNEL_HALF:
                return None
            address = self._layout.member(address, type_name, member)
        return address if address >= KERNEL_HALF else None

    def _is_signal(self, address: int) -> bool:
        return self.task_of_signal(address) is not None

    def _is_anon_vma(self, address: int) -> bool:
        root = self.follow(address, "anon_vma", "root")
        if root is None or self.follow(root, "anon_vma", "root") != root:
            return False
        return self.mm_of_anon_vma(address) is not None

    def _is_node(self, address: int) -> bool:
        return address in self._nodes

    @cached_property
    def _nodes(self) -> frozenset[int]:
        """Addresses of each ``struct pglist_data``; without CONFIG_NUMA, the only one
        is a variable."""
        try:
            table = find_variable(self._layout.reader.prog, "node_data").address_
            count = int(find_variable(self._layout.reader.prog, "nr_node_ids").value_())
            words = self._layout.reader.words(table, min(max(count, 1), _MAX_NODES))
        except LOST:
            return frozenset()
        return frozenset(words.tolist()) - {0}


@per_context
def lock_places(context: LockContext) -> Places:
    """Return the finder of the variables and structures that contain locks."""
    return Places(context.layout, context.storage, context.losses, context.tasks)
