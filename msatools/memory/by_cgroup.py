# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages by the control group they are charged to (``--by cgroup``)."""

from collections.abc import Iterable, Iterator

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.files import cgroup_paths
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Numbers,
    Structs,
    constant,
    find_offset,
    lose_many,
    read_structs,
)
from msatools.kernel.walks import list_nodes
from msatools.memory.breakdowns import (
    Tally,
    TallyOwner,
    TallySums,
    copy_to_tails,
    far_heads,
    rank,
    regroup,
)
from msatools.memory.by_file import SWAP_CACHE, CachedFiles, mapping_words
from msatools.memory.classes import NCLASSES, PageClass
from msatools.memory.classify import Block, Words, where
from msatools.memory.model import (
    NO_OWNER,
    REST,
    CgroupGroup,
    PageGroup,
    PinningFile,
    unique_keys,
)
from msatools.memory.owners import ScanContext
from msatools.program.model import Address
from msatools.reports.units import size
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)
from msatools.tasks.stacks import charged_stack_pages

# --- Reads the tree of memory control groups and their counters (mm/page_counter.c).
#
# Removed groups stay among the children of their parent until the last reference to
# them is gone, so that the tree also has groups that no page is charged to.


UNKNOWN = -1

_USED: Members = {"used": ("memory.usage.counter",), "subsystem": ("css.ss",)}
_SWAP: Members = {"swap": ("swap.usage.counter",)}
_BOTH: Members = {"both": ("memsw.usage.counter",)}
"""Version 1 counts memory and swap together; ``memsw`` is in a union with ``swap``."""


class GroupTree(Struct, frozen=True):
    """The control groups of memory, each after its parent."""

    addresses: Addresses
    """Address of each ``struct mem_cgroup``, the root first."""

    parents: Numbers
    """Row of the parent; :data:`UNKNOWN` for the root."""


class OwnCharges(Struct, frozen=True):
    """Pages charged to each group itself, without the groups below; :data:`UNKNOWN`
    for the root and unreadable groups."""

    memory: Numbers
    """Pages in memory, including slab objects, per-CPU memory, sockets, and pages that
    CPUs have charged in advance."""

    swap: Numbers
    """Pages on swap; :data:`UNKNOWN` also with CONFIG_SWAP=n."""


def read_tree(reader: Reader, losses: LossLog, most: int) -> GroupTree:
    """Find the control groups of memory, breadth first.

    :param most: Maximum number of groups.
    :raises MissingError: if the kernel has none (CONFIG_MEMCG=n)
    """
    prog = reader.prog
    type_ = find_type(prog, "struct cgroup_subsys_state")
    children, sibling = offset_of(type_, "children"), offset_of(type_, "sibling")
    css = offset_of(find_type(prog, "struct mem_cgroup"), "css")
    root = int(find_variable(prog, "root_mem_cgroup").value_())
    groups, parents = [root], [UNKNOWN]
    row = 0
    while row < len(groups) and len(groups) < most:
        head = groups[row] + css + children
        nodes = list_nodes(reader, head, losses, "a list of control groups")
        below = (nodes - np.uint64(sibling + css)).tolist()[: most - len(groups)]
        groups += below
        parents += [row] * len(below)
        row += 1
    if len(groups) >= most:
        losses.note("groups-many", f"only {most:,} control groups of memory were read")
    return GroupTree(np.array(groups, np.uint64), np.array(parents, np.int64))


def own_charges(reader: Reader, tree: GroupTree, losses: LossLog) -> OwnCharges:
    """Read the pages charged to each group, without the groups below it.

    :raises MissingError: if the types lack the counters
    """
    members = dict(_USED)
    structs = find_type(reader.prog, "struct mem_cgroup")
    has_swap = structs.has_member("swap") or structs.has_member("memsw")
    if has_swap:
        members |= _SWAP if is_unified(reader) else _BOTH
    found = read_structs(reader, "struct mem_cgroup", members, tree.addresses, losses)
    used = found["used"].astype(np.int64)
    # On a running kernel a group may have been freed since the lists were read.
    subsystem = find_variable(reader.prog, "memory_cgrp_subsys").address_
    known = found.readable & (found["subsystem"] == np.uint64(subsystem))
    memory = _own(used, known, tree.parents)
    if not has_swap:
        return OwnCharges(memory, np.full(len(used), UNKNOWN, np.int64))
    if found.has("swap"):
        swap = found["swap"].astype(np.int64)
    else:
        swap = found["both"].astype(np.int64) - used
        # Without swap accounting ``memsw`` stays 0.
        known &= swap >= 0
    return OwnCharges(memory, _own(swap, known, tree.parents))


def _own(totals: Numbers, readable: npt.NDArray[np.bool_], parents: Numbers) -> Numbers:
    """Subtract from each group's total the totals of its children."""
    own = totals.copy()
    below = np.flatnonzero(parents >= 0)
    np.subtract.at(own, parents[below], totals[below])
    # Differences may be negative: a running kernel does not change counters together.
    own = np.maximum(own, 0)
    own[~readable] = UNKNOWN
    # A parent's counter includes the counters of unreadable children.
    own[parents[below[~readable[below]]]] = UNKNOWN
    # Pages of the root group itself are not charged.
    own[0] = UNKNOWN
    return own


class KernelBytes(Struct, frozen=True):
    """Bytes charged to each group itself; :data:`UNKNOWN` for the root and for removed
    groups, whose charges moved to their parents (memcg_reparent_objcgs())."""

    slab: Numbers
    percpu: Numbers


_ITEMS = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B", "MEMCG_PERCPU_B")
_STATS: Members = {"stats": ("vmstats",), "parts": ("vmstats_percpu",)}
_FLAGS: Members = {"flags": ("css.flags",)}
_MOST_PARTS = 1 << 18
"""Maximum number of per-CPU counters (groups times CPUs); reading them takes 1 s."""


def kernel_bytes(reader: Reader, tree: GroupTree, losses: LossLog) -> KernelBytes:
    """Read ``slab`` and ``percpu`` of memory.stat, without the groups below.

    A group's count includes the groups below once their counts are flushed
    (mem_cgroup_css_rstat_flush()). Unflushed counts are added, as memory.stat does.

    :raises MissingError: if the kernel has no such counts
    """
    prog = reader.prog
    counts = _kernel_counts(reader, tree, losses)
    if counts is None:
        unknown = np.full(len(tree.addresses), UNKNOWN, np.int64)
        return KernelBytes(unknown, unknown)
    totals, pending, known = counts
    flags = read_structs(reader, "struct mem_cgroup", _FLAGS, tree.addresses, losses)
    online = flags["flags"] & np.uint64(constant(prog, "CSS_ONLINE")) != 0
    known &= flags.readable
    lose_many(losses, "struct memcg_vmstats", int(np.count_nonzero(~known)))
    parents = tree.parents.tolist()
    for row in range(len(parents) - 1, 0, -1):
        pending[parents[row]] += pending[row]
        known[parents[row]] &= known[row]
    totals += pending
    own = totals.copy()
    below = np.flatnonzero((tree.parents >= 0) & online)
    np.subtract.at(own, tree.parents[below], totals[below])
    # Differences may be negative: a running kernel does not change counts together.
    own = np.maximum(own, 0)
    own[~known | ~online] = UNKNOWN
    # Memory of the root group itself is not charged.
    own[0] = UNKNOWN
    slab = np.where(own[:, 0] < 0, UNKNOWN, own[:, 0] + own[:, 1])
    return KernelBytes(slab, own[:, 2])


def _kernel_counts(
    reader: Reader, tree: GroupTree, losses: LossLog
) -> tuple[Numbers, Numbers, Booleans] | None:
    """Return the bytes of :data:`_ITEMS` by group, the bytes not yet flushed to the
    group and its ancestors, and whether both could be read; ``None`` if there are more
    than :data:`_MOST_PARTS`."""
    prog = reader.prog
    member = member_of(find_type(prog, "struct mem_cgroup"), "vmstats")
    kind = member.type.unaliased_kind()
    items = _item_offsets(reader)
    inside = tree.addresses + np.uint64(member.offset)
    if kind == drgn.TypeKind.ARRAY:
        # Before 2d146aa3aa84 ("mm: memcontrol: switch to rstat") (in v5.13), each CPU
        # adds its counts to the group and to all its ancestors, in batches.
        totals, known = _longs(reader, inside, items)
        return totals, np.zeros_like(totals), known
    pointers = read_structs(reader, "struct mem_cgroup", _STATS, tree.addresses, losses)
    # ``vmstats`` is a pointer since 410f8e82689e ("memcg: extract memcg_vmstats from
    # struct mem_cgroup") (in v6.1).
    is_inside = kind == drgn.TypeKind.STRUCT
    stats = inside if is_inside else pointers["stats"].astype(np.uint64)
    type_ = find_type(prog, "struct memcg_vmstats")
    totals, known = _longs(reader, stats, items + offset_of(type_, "state"))
    pending, readable = _longs(reader, stats, items + offset_of(type_, "state_pending"))
    known &= readable & pointers.readable
    type_ = find_type(prog, "struct memcg_vmstats_percpu")
    now, before = (items + offset_of(type_, name) for name in ("state", "state_prev"))
    percpu = read_percpu(reader, losses)
    if len(percpu.offsets) * len(stats) > _MOST_PARTS:
        text = "slab objects and per-CPU memory of control groups are not read"
        losses.note("groups-many", f"{text}: there are too many")
        return None
    parts = pointers["parts"].astype(np.uint64)
    for offset in percpu.offsets:
        counted, readable = _longs(reader, parts + offset, now)
        flushed, also = _longs(reader, parts + offset, before)
        pending += counted - flushed
        known &= readable & also
    return totals, pending, known


def _item_offsets(reader: Reader) -> npt.NDArray[np.uint64]:
    """Return the byte offsets of :data:`_ITEMS` in the arrays of a group's counts."""
    numbers = [constant(reader.prog, name) for name in _ITEMS]
    try:
        # Arrays have only the items in use since ff48c71c26aa ("memcg: reduce memory
        # for the lruvec and memcg stats") (in v6.10). Item 0 comes first.
        table = kernel_symbol(reader.prog, "mem_cgroup_stats_index")
    except MissingError:
        pass
    else:
        rows = reader.read(table, max(numbers) + 1)
        numbers = [rows[number] - rows[0] for number in numbers]
        if len({0, *numbers}) != 1 + len(_ITEMS) or min(numbers) < 0:
            raise DamagedDataError("impossible indices of counts", table)
    return np.array(numbers, np.uint64) * np.uint64(8)


def _longs(
    reader: Reader, addresses: Addresses, offsets: npt.NDArray[np.uint64]
) -> tuple[Numbers, Booleans]:
    """Read signed 64-bit words: a row an address, a column an offset.

    The second array has whether each row could be read.
    """
    places = (addresses[:, None] + offsets[None, :]).ravel()
    records, readable = reader.read_records(places, 8)
    shape = len(addresses), len(offsets)
    values = column(records, 0).view(np.int64).reshape(shape)
    whole: Booleans = np.all(readable.reshape(shape), axis=1)
    return values.copy(), whole


def is_unified(reader: Reader) -> bool:
    """Return whether memory is controlled by version 2 of control groups."""
    with drgn_lookups:
        controller = find_variable(reader.prog, "memory_cgrp_subsys")
        unified = find_variable(reader.prog, "cgrp_dfl_root").address_
        return bool(controller.root.value_() == unified)


# --- Finds the control groups that pages are charged to (mm/memcontrol.c).


POINTER = ~np.uint64(7)
"""Address bits of the charge word in struct page; the lower bits are flags."""

MEMCG_DATA_OBJEXTS = np.uint64(1)
"""Flag of a slab's charge word: it points to the charges of its objects."""

_MEMBERS = ("memcg_data", "mem_cgroup")
"""Names of the charge word, newest first: bcfe06bf2622 ("mm: memcontrol: Use helpers to
read page's memcg data") (in v5.11)."""

_MEM_CGROUP = {
    "subsystem": ("css.ss",),
    "cgroup": ("css.cgroup",),
    "flags": ("css.flags",),
}
_OBJ_CGROUP = {"group": ("memcg",)}
_CGROUP = {"node": ("kn",)}
_NODE = {"id": ("id.id", "id")}


def charge_offset(prog: drgn.Program) -> int | None:
    """Return the offset of the charge word in ``struct page``.

    :return: ``None`` with CONFIG_MEMCG=n.
    """
    return find_offset(find_type(prog, "struct page"), _MEMBERS)


class Memcg(Struct, frozen=True):
    """One ``struct mem_cgroup``."""

    address: int
    id: int
    """ID of its cgroup: the inode number of its directory."""

    path: str | None
    dying: bool
    """Whether it was removed but is kept while memory is charged to it."""


class Memcgs:
    """Finds the control groups that pages are charged to."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses

    def of_pages(self, pages: Addresses) -> Addresses:
        """Read the charge words of struct pages; 0 if one is unreadable."""
        members = {"word": _MEMBERS}
        structs = self._read("struct page", members, pages)
        words: Addresses = structs["word"].astype(np.uint64)
        return words

    def resolve(self, words: Addresses) -> Addresses:
        """
        Return the ``struct mem_cgroup`` of each charge word; 0 if not found.

        The word points to the group or to a ``struct obj_cgroup``, which moves to the
        parent when the group is removed. Kernel memory uses obj_cgroup since v5.11;
        user pages do as well once they are reparented. A group is recognized by its
        subsystem pointer.
        """
        pointers = words & POINTER
        known = self._are_groups(pointers)
        objects = np.where(known, np.uint64(0), pointers)
        if not objects.any():
            return pointers
        try:
            through = self._read("struct obj_cgroup", _OBJ_CGROUP, objects)
        except MissingError:
            return np.where(known, pointers, np.uint64(0))
        groups = through["group"].astype(np.uint64)
        groups[~self._are_groups(groups)] = 0
        return np.where(known, pointers, groups)

    def groups(self, groups: Addresses) -> list[Memcg]:
        """Return the control groups that :meth:`resolve` found."""
        if not len(groups):
            return []  # with CONFIG_MEMCG=n there is no such type
        memcgs = self._read("struct mem_cgroup", _MEM_CGROUP, groups)
        cgroups: Addresses = memcgs["cgroup"].astype(np.uint64)
        nodes = self._read("struct cgroup", _CGROUP, cgroups)["node"]
        ids = self._read("struct kernfs_node", _NODE, nodes.astype(np.uint64))["id"]
        paths = cgroup_paths(self._reader, cgroups, self._losses)
        online: int = find_constant(self._reader.prog, "CSS_ONLINE").value_()
        return [
            Memcg(
                address=int(group),
                id=int(ids[row]),
                path=paths[row],
                dying=not int(memcgs["flags"][row]) & online,
            )
            for row, group in enumerate(groups)
        ]

    def removed(self) -> int | None:
        """Count the removed groups of the default hierarchy that still exist.

        This is nr_dying_descendants of /sys/fs/cgroup/cgroup.stat; ``None`` if unknown.
        """
        try:
            with drgn_lookups:
                root = find_variable(self._reader.prog, "cgrp_dfl_root")
                count: int = root.cgrp.nr_dying_descendants.value_()
        except LOST:
            return None
        return count

    def _are_groups(self, addresses: Addresses) -> Booleans:
        # An address that is not a group's is not a loss: it may be an obj_cgroup's.
        found = read_structs(
            self._reader, "struct mem_cgroup", _MEM_CGROUP, addresses, LossLog()
        )
        subsystem = find_variable(self._reader.prog, "memory_cgrp_subsys").address_
        known: Booleans = found.readable & (found["subsystem"] == np.uint64(subsystem))
        return known

    def _read(self, type_name: str, members: Members, addresses: Addresses) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)


# --- Counts pages by the control group they are charged to (--by cgroup).
#
# Removed groups are included: they live on while memory is charged to them, usually
# page cache. The same scan finds the files of that page cache.


MAX_GROUPS = 100_000
"""Maximum number of control groups to list, the largest."""

MAX_PINNED = 1000
"""Maximum number of removed groups, the largest, to list pinning files for."""

PINS = 5
"""Maximum number of pinning files to list for a removed group."""

_PER_OBJECT, _UNREADABLE = 1, 2
"""Placeholders for control groups: slabs charged per object; unreadable groups."""

_FAR = np.uint64(4)
"""Flag on the address of a head page, whose charge word is read after the scan."""

_CHARGED = np.ones(NCLASSES, np.bool_)
_CHARGED[
    [
        PageClass.FREE_BUDDY,
        PageClass.FREE_PCP,
        PageClass.FREE_HUGETLB,
        PageClass.FREE_UNACCEPTED,
        PageClass.RESERVED,
        PageClass.OFFLINE,
        PageClass.DEVICE,
        PageClass.MEMMAP,
        PageClass.HWPOISON,
        PageClass.EXCLUDED,
        PageClass.UNREADABLE,
    ]
] = False


class ChargeTally(Struct):
    """Counts pages by their charge word (``page->memcg_data``)."""

    offset: int | None
    """Offset of the charge word in ``struct page``; ``None`` with CONFIG_MEMCG=n."""

    stack_pages: int = 1
    """Pages of a kernel stack if only the first has the charge word; otherwise 1."""

    by_class: Tally = field(default_factory=Tally)
    by_mapping: Tally = field(default_factory=Tally)
    """Pages of files by charge word and mapping."""

    def observe(self, block: Block) -> None:
        words = self._words(block)
        self.by_class.add(words, block.codes)
        mappings = mapping_words(block)
        pages = where((mappings > SWAP_CACHE) & (words != 0))
        self.by_mapping.add(words[pages], mappings[pages])

    def merge(self, later: "ChargeTally") -> None:
        self.by_class.merge(later.by_class)
        self.by_mapping.merge(later.by_mapping)

    def _words(self, block: Block) -> Words:
        if self.offset is None:
            return np.zeros(len(block), np.uint64)
        words: Words = block.column(self.offset).copy()
        far = copy_to_tails(block, words)
        if len(far):
            words[far] = far_heads(block, far) | _FAR
        words[~_CHARGED.take(block.codes)] = 0
        slabs = where(block.codes == PageClass.SLAB)
        words[slabs] &= MEMCG_DATA_OBJEXTS
        if self.stack_pages > 1:
            stacks = where(block.codes == PageClass.STACKS)
            # Pages that are allocated together are aligned to their number.
            behind = (stacks + block.pfn) % self.stack_pages
            words[stacks] = words[np.maximum(stacks - behind, 0)]
        return words


class _Pins(Struct, frozen=True):
    """The page cache charged to a removed group."""

    largest: list[PinningFile]
    files: int


class _Charges(Struct, frozen=True):
    """Charges of a group itself, in pages or bytes; ``None`` if unknown."""

    memory: int | None = None
    swap: int | None = None
    slab_bytes: int | None = None
    percpu_bytes: int | None = None


class CgroupView:
    """Control groups by the pages charged to them."""

    def __init__(self, context: ScanContext) -> None:
        prog = context.prog
        self.observer = ChargeTally(charge_offset(prog), charged_stack_pages(prog))
        self._losses = context.losses
        self._memcgs = Memcgs(context.reader, context.losses)
        self._files = CachedFiles(context.reader, context.losses)
        self._reader = context.reader
        self._page_size = context.page_size

    def groups(self) -> tuple[PageGroup, ...]:
        sums = self._by_group(self.observer.by_class.sums())
        ranking = rank(sums, MAX_GROUPS, (0, _PER_OBJECT))
        owners = {owner.word: owner for owner in ranking.owners}
        charges = self._charges()
        found = [word for word in owners if word > _UNREADABLE]
        if ranking.rest is None:
            found += sorted(charges.keys() - owners.keys())
        memcgs = self._memcgs.groups(np.array(found, np.uint64))
        pins = self._pins([memcg.address for memcg in memcgs if memcg.dying])
        found_groups = [
            _cgroup(
                owners.get(memcg.address, TallyOwner(memcg.address, 0, {})),
                memcg,
                pins.get(memcg.address),
                charges.get(memcg.address, _Charges()),
            )
            for memcg in memcgs
        ]
        self._note_removed(found_groups)
        groups: list[PageGroup] = [*found_groups]
        groups += self._placeholder_groups(ranking.owners)
        if ranking.rest is not None:
            groups.append(_group(REST, "smaller groups", ranking.rest))
        return tuple(sorted(unique_keys(groups), key=_with_swap))

    def _charges(self) -> dict[int, "_Charges"]:
        """Read the charges of all groups, by the address of their mem_cgroup."""
        try:
            tree = read_tree(self._reader, self._losses, MAX_GROUPS)
            charges = own_charges(self._reader, tree, self._losses)
        except MissingError:
            return {}  # CONFIG_MEMCG=n
        except UNREADABLE as error:
            self._losses.lose(Loss.LISTS, f"cannot read control groups: {error}")
            return {}
        kernel = self._kernel_bytes(tree)
        columns = charges.memory, charges.swap, kernel.slab, kernel.percpu
        return {
            address: _Charges(*map(_known, values))
            for address, *values in zip(
                tree.addresses.tolist(),
                *(numbers.tolist() for numbers in columns),
                strict=True,
            )
        }

    def _kernel_bytes(self, tree: GroupTree) -> KernelBytes:
        try:
            return kernel_bytes(self._reader, tree, self._losses)
        except MissingError:
            pass  # no MEMCG_PERCPU_B, as before v5.9
        except UNREADABLE as error:
            text = f"cannot read what control groups are charged: {error}"
            self._losses.lose(Loss.LISTS, text)
        unknown = np.full(len(tree.addresses), UNKNOWN, np.int64)
        return KernelBytes(unknown, unknown)

    def _by_group(self, sums: TallySums) -> TallySums:
        """Convert sums by charge word to sums by ``struct mem_cgroup``."""
        words, index = np.unique(sums.owners, return_inverse=True)
        charged = words > _PER_OBJECT
        groups = words.copy()
        groups[charged] = self._resolve(words[charged])
        return regroup(sums, groups[index])

    def _resolve(self, words: Addresses) -> Addresses:
        if not len(words):
            # As with CONFIG_MEMCG=n, where pages have no such word.
            return words
        far = words & _FAR != 0
        words = words.copy()
        words[far] = self._memcgs.of_pages(words[far] - _FAR)
        groups = self._memcgs.resolve(words)
        # The head of a tail marked _FAR may be charged to no group: its word is 0.
        groups[(groups == 0) & (words != 0)] = _UNREADABLE
        return groups

    def _pins(self, dying: list[int]) -> dict[int, _Pins]:
        """Find the files whose page cache is charged to removed groups."""
        sums = self._by_group(self.observer.by_mapping.sums())
        pins: dict[int, _Pins] = {}
        rows: dict[int, list[int]] = {}
        for group in dying[:MAX_PINNED]:
            ends = np.array((group, group + 1), np.uint64)
            first, end = np.searchsorted(sums.owners, ends).tolist()
            largest = np.argsort(-sums.pages[first:end], kind="stable")[:PINS]
            rows[group] = (first + largest).tolist()
            pins[group] = _Pins([], end - first)
        chosen = [row for group in rows for row in rows[group]]
        files = iter(self._files.files(sums.kinds[chosen]))
        for group, its_rows in rows.items():
            for row in its_rows:
                file = next(files)
                if file is not None:
                    pages = int(sums.pages[row])
                    pins[group].largest.append(PinningFile(file.key, file.name, pages))
        return pins

    def _note_removed(self, groups: Iterable[CgroupGroup]) -> None:
        dying = [group for group in groups if group.dying]
        empty = [group for group in dying if not group.pages]
        # Removed groups without the memory controller are not in its tree.
        removed = max(self._memcgs.removed() or 0, len(dying))
        without = removed - len(dying) + len(empty)
        if not without:
            return
        swapped = sum(group.swap_pages or 0 for group in empty) * self._page_size
        on_swap = f", but {size(swapped)} on swap" if swapped else ""
        self._losses.note(
            "removed-cgroups",
            f"{removed:,} removed control groups still exist; {without:,} of them have "
            f"no page of their own{on_swap}; their slab objects and per-CPU memory are "
            "charged to their parents",
        )

    def _placeholder_groups(
        self, owners: tuple[TallyOwner, ...]
    ) -> Iterator[PageGroup]:
        for owner in owners:
            if owner.word == 0:
                yield _group(NO_OWNER, "not charged", owner)
            elif owner.word == _UNREADABLE:
                self._losses.lose(Loss.NAMES)
                yield _group("-lost", "groups that cannot be read", owner)
            elif owner.word == _PER_OBJECT:
                yield _group("-slab", "slabs, charged object by object", owner)
                self._losses.note(
                    "slab-charges",
                    f"{owner.pages:,} slab pages are charged to control groups object "
                    "by object: they are one row here; SLAB has how much to each",
                )


def _with_swap(group: PageGroup) -> tuple[int, str]:
    swap = group.swap_pages if isinstance(group, CgroupGroup) else None
    return (-group.pages - (swap or 0), group.key)


def _known(pages: int) -> int | None:
    return None if pages == UNKNOWN else pages


def _cgroup(
    owner: TallyOwner, memcg: Memcg, pins: _Pins | None, charges: _Charges
) -> CgroupGroup:
    return CgroupGroup(
        key=str(memcg.id),
        name=memcg.path or "lost",
        pages=owner.pages,
        classes=owner.classes,
        dying=memcg.dying,
        swap_pages=charges.swap,
        charged_pages=charges.memory,
        slab_bytes=charges.slab_bytes,
        percpu_bytes=charges.percpu_bytes,
        pinned_by=tuple(pins.largest) if pins else None,
        files=pins.files if pins else None,
        mem_cgroup=Address(memcg.address),
    )


def _group(key: str, name: str, owner: TallyOwner) -> PageGroup:
    return CgroupGroup(key, name, owner.pages, owner.classes)
