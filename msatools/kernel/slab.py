# SPDX-License-Identifier: LGPL-2.1-or-later

"""Slab caches (mm/slab.h, mm/slub.c), and free objects that slabs count as in use."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.nodemask import for_each_online_node
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import (
    MAX_ADDRESS,
    U64,
    Addresses,
    Reader,
    read_string,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Members,
    Structs,
    enumerators,
    find_offset,
    read_struct,
    read_structs,
    struct_layout,
)
from msatools.kernel.walks import list_records, tree_records
from msatools.selfdesc.find import (
    ask_each,
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Caches of the slab allocator: struct kmem_cache (mm/slab.h, mm/slub.c).
#
# Their names, including those of merged caches, and the layout of their objects.


_MAX_NAME = 511
"""Maximum bytes of a name; the longest are those of per-memcg caches, up to v5.8."""

MAX_OBJECT = 1 << 23
"""Maximum bytes of an object, far above KMALLOC_MAX_CACHE_SIZE."""

_TYPE = "struct kmem_cache"
_NODE_TYPE = "struct kernfs_node"
_NODE: Members = {
    "flags": ("flags",),
    "name": ("name",),
    "target": ("symlink.target_kn",),
}
_OBJECT: Members = {"object": ("priv",)}
"""``priv`` of a directory is its ``struct kobject``."""

_RECLAIM_ACCOUNT = 0x20000
"""SLAB_RECLAIM_ACCOUNT, a macro up to v6.8."""

_SLAB_CACHE: Members = {
    "name": ("name",),
    "size": ("size",),
    # With CONFIG_SLUB_DEBUG, and with CONFIG_DEBUG_SLAB.
    "padding": ("red_left_pad", "obj_offset"),
}


class SlabCache(Struct, frozen=True):
    """A ``struct kmem_cache``."""

    address: int
    name: str
    """Name of the cache; of merged caches, that of the first."""

    size: int
    """Bytes from one object to the next, including the allocator's metadata."""

    padding: int
    """Bytes before the first object."""


def slab_type(prog: drgn.Program) -> drgn.Type:
    """Return the type of a slab's descriptor, which overlays its ``struct page``.

    :raises MissingError: if the type is unknown
    """
    # Linux kernel commit d122019bf061 ("mm: Split slab into its own type") (in v5.17)
    try:
        return find_type(prog, "struct slab")
    except MissingError:
        return find_type(prog, "struct page")


def slab_cache_offset(prog: drgn.Program) -> int:
    """Return the offset of the pointer to the cache in a slab's ``struct page``.

    :raises MissingError: if the type is unknown
    """
    offset: int = member_of(slab_type(prog), "slab_cache").offset
    return offset


def read_cache(reader: Reader, address: int) -> SlabCache:
    """Read one cache.

    :raises drgn.FaultError: if it cannot be read, or is not a cache
    :raises MissingError: if the type is unknown
    """
    return _cache(reader, address, read_struct(reader, _TYPE, _SLAB_CACHE, address))


def read_caches(
    reader: Reader, addresses: Addresses, losses: LossLog
) -> list[SlabCache | None]:
    """Read many caches; ``None``, and one lost name, for each that cannot be read.

    :raises MissingError: if the type is unknown
    """
    read = read_structs(reader, _TYPE, _SLAB_CACHE, addresses, losses)
    caches: list[SlabCache | None] = []
    for row, address in enumerate(addresses.tolist()):
        cache = None
        if not read.readable[row]:
            losses.lose(Loss.NAMES)
        else:
            values = {name: int(read[name][row]) for name in read.columns}
            try:
                cache = _cache(reader, address, values)
            except UNREADABLE as error:
                text = f"cannot read a slab cache's name: {error}"
                losses.lose(Loss.NAMES, text)
        caches.append(cache)
    return caches


def slab_caches(reader: Reader, losses: LossLog) -> Iterator[SlabCache]:
    """Read all caches, in the order of the kernel's list.

    :raises drgn.FaultError: if one is not a cache, or its name cannot be read
    :raises MissingError: if the types are unknown
    """
    prog = reader.prog
    layout = struct_layout(reader, _TYPE, _SLAB_CACHE)
    if layout is None:
        raise MissingError(f"{_TYPE} has no members")
    node = offset_of(find_type(prog, _TYPE), "list")
    head, what = find_variable(prog, "slab_caches").address_, "the list of caches"
    for address, data in list_records(reader, head, node, layout.end, losses, what):
        yield _cache(reader, address, layout.decode(data[layout.start :]))


def reclaimable_caches(
    reader: Reader, addresses: Addresses, losses: LossLog
) -> frozenset[int]:
    """Return the caches whose slabs count as reclaimable (cache_vmstat_idx()).

    :param addresses: ``struct kmem_cache *``
    :raises MissingError: if the type is unknown
    """
    flag = _reclaim_flag(reader.prog)
    found = read_structs(reader, _TYPE, {"flags": ("flags",)}, addresses, losses)
    is_set = found["flags"].astype(np.uint64) & np.uint64(flag) != 0
    return frozenset(addresses[found.readable & is_set].tolist())


def _reclaim_flag(prog: drgn.Program) -> int:
    # Linux kernel commit cc61eb851461 ("mm, slab: use an enum to define SLAB_ cache
    # creation flags") (in v6.9)
    try:
        bits = enumerators(prog, "enum _slab_flag_bits")
    except MissingError:
        return _RECLAIM_ACCOUNT
    bit = bits.get("_SLAB_RECLAIM_ACCOUNT")
    return 0 if bit is None else 1 << bit  # CONFIG_SLUB_TINY lacks it


def merged_names(reader: Reader, losses: LossLog) -> Mapping[int, list[str]]:
    """
    Find the aliases of each cache: the symbolic links in /sys/kernel/slab.

    These links are all that is left of a merged cache (mm/slub.c, sysfs_slab_alias()).

    :return: Maps the address of a ``struct kmem_cache`` to its aliases.
    """
    names: dict[int, list[str]] = defaultdict(list)
    prog = reader.prog
    try:
        with drgn_lookups:
            directory = find_variable(prog, "slab_kset").kobj.sd
            root = directory.dir.children.address_of_().value_()
            is_link = find_constant(prog, "KERNFS_LINK").value_()
            rb = offset_of(find_type(prog, _NODE_TYPE), "rb")
            layout = struct_layout(reader, _NODE_TYPE, _NODE)
            kobject = offset_of(find_type(prog, _TYPE), "kobj")
    except MissingError:
        return names  # with CONFIG_SLAB, or without CONFIG_SYSFS
    except UNREADABLE as error:
        losses.lose(Loss.NAMES, f"cannot read names of merged slab caches: {error}")
        return names
    if layout is None:
        return names
    size = drgn.sizeof(find_type(prog, _NODE_TYPE))
    what = "the tree of slab caches' names"
    for _, data in tree_records(reader, root, rb, size, losses, what):
        link = layout.decode(data[layout.start :])
        if not link["flags"] & is_link:
            continue
        try:
            text = read_string(reader, link["name"], _MAX_NAME)
        except UNREADABLE as error:
            losses.lose(Loss.NAMES, f"cannot read a slab cache's name: {error}")
            continue
        try:
            target = read_struct(reader, _NODE_TYPE, _OBJECT, link["target"])
        except UNREADABLE as error:
            losses.lose(Loss.NAMES, f"cannot read a merged slab cache's name: {error}")
            continue
        names[target["object"] - kobject].append(text)
    return names


def _cache(reader: Reader, address: int, values: Mapping[str, Any]) -> SlabCache:
    size, name = int(values["size"]), int(values["name"])
    if not 0 < size <= MAX_OBJECT:
        raise DamagedDataError("no cache of objects", address)
    text = read_string(reader, name, _MAX_NAME)
    return SlabCache(address, text, size, int(values.get("padding", 0)))


# --- Counts of free objects that their slabs count as in use (mm/slub.c).
#
# These objects are cached per CPU or per node. A slab that a CPU allocates from counts
# all its objects as in use, including those on the CPU's freelist (struct
# kmem_cache_cpu). Since Linux kernel commit 2d517aa09bbc ("slab: add opt-in caching
# layer of percpu sheaves") (in v6.18) free objects are also in sheaves, arrays of CPUs
# and of nodes, and since v7.0 CPUs have no freelists.


Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]

_CPU_SLAB_CACHE: Members = {
    "cpu_slab": ("cpu_slab",),
    "cpu_sheaves": ("cpu_sheaves",),
    "capacity": ("sheaf_capacity",),
    # Offset of the pointer to the next free object in a free object.
    "offset": ("offset",),
    # With CONFIG_SLAB_FREELIST_HARDENED.
    "random": ("random",),
    # Its low 16 bits are the number of objects in a slab.
    "order": ("oo.x",),
}
_OBJECTS_MASK = (1 << 16) - 1
_ATTEMPTS = 3
"""Number of tries to read a list of a running kernel, which may change it."""

_LOST = -1
_MAX_LENGTH = 1 << 16
"""Length of a list that cannot be read to its end: more than any list has."""


def free_in_use(
    reader: Reader, caches: Addresses, losses: LossLog
) -> Mapping[int, int]:
    """
    Count the free objects of some caches that their slabs count as in use.

    Objects that wait for an RCU grace period to be freed are not included.

    :param caches: Addresses of ``struct kmem_cache``.
    :return: Counts by address; a cache whose count is unknown is left out, and counts
        as a loss.
    """
    try:
        known = read_structs(
            reader, "struct kmem_cache", _CPU_SLAB_CACHE, caches, losses
        )
        parts = [np.where(known.readable, 0, _LOST)]
        if known.has("cpu_slab"):
            parts.append(_on_lists(reader, known, losses))
        if known.has("cpu_sheaves"):
            parts.append(_in_sheaves(reader, known, losses))
            parts.append(_in_barns(reader, caches, known, losses))
    except LOST as error:
        losses.lose(Loss.SLABS, f"cannot read free objects of slab caches: {error}")
        return {}
    counts = zip(caches.tolist(), _add(*parts).tolist(), strict=True)
    return {cache: count for cache, count in counts if count != _LOST}


def _on_lists(reader: Reader, known: Structs, losses: LossLog) -> Counts:
    """Count the objects on per-CPU freelists."""
    addresses, cpus = _per_cpu(reader, known["cpu_slab"], losses)
    links = _Links(
        known["offset"].astype(np.uint64).repeat(cpus),
        known["random"].astype(np.uint64).repeat(cpus) if known.has("random") else None,
        (known["order"].astype(np.int64) & _OBJECTS_MASK).repeat(cpus),
    )
    lengths = np.full(len(addresses), _LOST, np.int64)
    for _ in range(_ATTEMPTS if reader.is_live else 1):
        rows = np.flatnonzero(lengths < 0)
        if not len(rows):
            break
        firsts = _values(
            reader, "struct kmem_cache_cpu", ("freelist",), addresses[rows], losses
        )
        lengths[rows] = _add(firsts.lost, links.count(reader, firsts.values, rows))
    lost = int(np.count_nonzero(lengths < 0))
    if lost:
        text = "lists of free objects of slab caches are broken"
        losses.lose(Loss.SLABS, text, count=lost)
    return _sum_rows(lengths, cpus)


class _Links(Struct, frozen=True):
    """Format of the links between the free objects of each list."""

    offsets: Addresses
    """Offset of the pointer to the next object in an object."""

    keys: Addresses | None
    """Keys that obfuscate the pointers: see ``freelist_ptr_encode()``."""

    limits: Counts
    """Maximum length of each list; a longer one is lost."""

    def count(self, reader: Reader, firsts: Addresses, lists: Rows) -> Counts:
        """Count the objects of some lists, following one link of each at a time.

        :param firsts: Address of the first object of each list, or 0.
        :param lists: Indices of the lists.
        :return: Length of each list; ``_LOST`` if longer than its limit or unreadable.
        """
        limits = self.limits[lists]
        if not reader.is_live:
            lengths = self._count_near(reader, firsts, lists)
            return np.where(lengths > limits, _LOST, lengths)
        lengths = np.zeros(len(firsts), np.int64)
        objects = firsts.copy()
        while len(rows := np.flatnonzero((objects != 0) & (lengths <= limits))):
            pointers = objects[rows] + self.offsets[lists[rows]]
            records, readable = reader.read_records(pointers, 8)
            words = records.view("<u8")[:, 0]
            if self.keys is not None:
                # With byteswap() since "slub: improve bit diffusion for freelist ptr
                # obfuscation" (in v5.7).
                words = words ^ self.keys[lists[rows]] ^ pointers.byteswap()
            lengths[rows] = np.where(readable, lengths[rows] + 1, _MAX_LENGTH)
            objects[rows] = words
        return np.where(lengths > limits, _LOST, lengths)

    def _count_near(self, reader: Reader, firsts: Addresses, lists: Rows) -> Counts:
        """Count the objects of some lists of a dump, one list after the other.

        The objects of a list lie in one slab, whose pages are read once.
        """
        none = np.zeros(len(self.offsets), np.uint64)
        keys = none if self.keys is None else self.keys
        columns = firsts, self.offsets[lists], keys[lists], self.limits[lists]
        found = []
        for first, offset, key, limit in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            length, object_ = 0, first
            while object_ and length <= limit:
                pointer = (object_ + offset) & MAX_ADDRESS
                try:
                    (object_,) = U64.unpack(reader.read_near(pointer, U64.size))
                except UNREADABLE:
                    length = _MAX_LENGTH
                    break
                if self.keys is not None:
                    swapped = int.from_bytes(pointer.to_bytes(8, "little"), "big")
                    object_ ^= key ^ swapped
                length += 1
            found.append(length)
        return np.array(found, np.int64)


def _in_sheaves(reader: Reader, known: Structs, losses: LossLog) -> Counts:
    """Count the objects in per-CPU sheaves."""
    addresses, cpus = _per_cpu(reader, known["cpu_sheaves"], losses)
    total = np.zeros(len(addresses), np.int64)
    for member in ("main", "spare"):
        sheaves = _values(
            reader, "struct slub_percpu_sheaves", (member,), addresses, losses
        )
        sizes = _values(reader, "struct slab_sheaf", ("size",), sheaves.values, losses)
        total = _add(total, sheaves.lost, sizes.lost, sizes.values.astype(np.int64))
    return _sum_rows(total, cpus)


def _in_barns(
    reader: Reader, caches: Addresses, known: Structs, losses: LossLog
) -> Counts:
    """Count the objects in the full sheaves of the nodes' barns."""
    total = np.zeros(len(caches), np.int64)
    capacity = known["capacity"].astype(np.int64)
    for node in ask_each(for_each_online_node, reader.prog):
        # struct kmem_cache_node has no barn since Linux kernel commit 5ba6bc27b1f9
        # ("slab: decouple pointer to barn from kmem_cache_node") (in v7.1).
        members = f"per_node[{node}].barn", f"node[{node}]"
        barns = _values(reader, "struct kmem_cache", members, caches, losses)
        if (
            find_offset(find_type(reader.prog, "struct kmem_cache"), members[:1])
            is None
        ):
            name = "struct kmem_cache_node"
            barns = _values(reader, name, ("barn",), barns.values, losses)
        full = _values(reader, "struct node_barn", ("nr_full",), barns.values, losses)
        count = full.values.astype(np.int64) * capacity
        total = _add(total, barns.lost, full.lost, count)
    return total


class _Values(Struct, frozen=True):
    """One member of many structures."""

    values: Addresses
    """Values of the member; 0 for a structure that is NULL or lost."""

    lost: Counts
    """``_LOST`` for a structure that is lost, else 0."""


def _values(
    reader: Reader,
    type_name: str,
    members: tuple[str, ...],
    addresses: Addresses,
    losses: LossLog,
) -> _Values:
    """Read a member of the structures at some addresses, which may be NULL.

    :param members: Names of the member, the newest first.
    :raises MissingError: if the kernel has no such member
    """
    wanted: Members = {"value": members}
    read = read_structs(reader, type_name, wanted, addresses, losses)
    if not read.has("value"):
        raise MissingError(f"{type_name} has no {members[0]}")
    lost = np.where((addresses != 0) & ~read.readable, _LOST, 0)
    return _Values(read["value"].astype(np.uint64), lost)


def _per_cpu(
    reader: Reader, pointers: npt.NDArray[Any], losses: LossLog
) -> tuple[Addresses, int]:
    """Return the addresses of per-CPU pointers on all CPUs, and the number of CPUs.

    :return: Addresses for the first pointer on all CPUs, then for the next; NULL for
        NULL.
    :raises MissingError: if no CPU is known
    """
    offsets = read_percpu(reader, losses).offsets
    if not len(offsets):
        raise MissingError("no CPU is known")
    bases = pointers.astype(np.uint64)[:, None]
    addresses: Addresses = np.where(bases == 0, np.uint64(0), bases + offsets)
    return addresses.ravel(), len(offsets)


def _add(*counts: Counts) -> Counts:
    """Add counts; if one of them is lost, so is the sum."""
    lost = np.logical_or.reduce([count < 0 for count in counts])
    return np.where(lost, _LOST, np.add.reduce(counts))


def _sum_rows(counts: Counts, columns: int) -> Counts:
    rows = counts.reshape(-1, columns)
    return np.where((rows < 0).any(axis=1), _LOST, rows.sum(axis=1))
