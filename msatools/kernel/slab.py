# SPDX-License-Identifier: LGPL-2.1-or-later

"""Caches of the slab allocator: ``struct kmem_cache`` (mm/slab.h, mm/slub.c).

Their names, including those of merged caches, and the layout of their objects.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.enums import enumerators
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.structs import Members, read_struct, read_structs, struct_layout
from msatools.kernel.walks import list_records, tree_records
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

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

_CACHE: Members = {
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
    return _cache(reader, address, read_struct(reader, _TYPE, _CACHE, address))


def read_caches(
    reader: Reader, addresses: Addresses, losses: LossLog
) -> list[SlabCache | None]:
    """Read many caches; ``None``, and one lost name, for each that cannot be read.

    :raises MissingError: if the type is unknown
    """
    read = read_structs(reader, _TYPE, _CACHE, addresses, losses)
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
    layout = struct_layout(reader, _TYPE, _CACHE)
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

    mm/slub.c, sysfs_slab_alias(): nothing else is left of a cache that was merged.

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
        return names  # CONFIG_SLAB, or CONFIG_SYSFS=n
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
