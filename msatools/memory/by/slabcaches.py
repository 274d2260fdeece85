# SPDX-License-Identifier: LGPL-2.1-or-later

"""The caches of the slab allocator, by the addresses that slabs have of them."""

from collections import defaultdict
from dataclasses import dataclass

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.structs import read_structs
from msatools.kernel.walks import tree_records

_NAME_MAX = 255
_POINTER_BYTES = 8

_CACHE = {"name": ("u8", ("name",)), "size": ("u4", ("size",))}


@dataclass(frozen=True)
class SlabCache:
    """One ``struct kmem_cache``."""

    name: str
    bytes_each: int
    """Of the memory for one object, with all that the allocator puts around it."""

    merged: tuple[str, ...]
    """Names of other caches that are this one, in order."""


def read_caches(
    reader: Reader, addresses: Addresses, findings: LossLog
) -> list[SlabCache | None]:
    """Tell each cache; ``None`` if it cannot be read."""
    found = read_structs(reader, "struct kmem_cache", _CACHE, addresses, findings)
    merged = _merged_names(reader, findings)
    caches: list[SlabCache | None] = []
    for row, address in enumerate(addresses.tolist()):
        name = None
        if found.readable[row]:
            name = _string(reader, int(found["name"][row]), findings)
        if name is None:
            caches.append(None)
            continue
        others = sorted(set(merged[address]) - {name})
        caches.append(SlabCache(name, int(found["size"][row]), tuple(others)))
    return caches


def _merged_names(reader: Reader, findings: LossLog) -> dict[int, list[str]]:
    """
    Find the names that stand for a cache: links in /sys/kernel/slab.

    mm/slub.c, sysfs_slab_alias(): of caches that were merged only they are left.

    :return: Names by the address of the ``struct kmem_cache``.
    """
    names: dict[int, list[str]] = defaultdict(list)
    prog = reader.prog
    try:
        directory = prog["slab_kset"].kobj.sd
        root = directory.dir.children.address_of_().value_()
        is_link = prog.constant("KERNFS_LINK").value_()
        node = prog.type("struct kernfs_node")
        flags, rb, name, target, private = (
            drgn.offsetof(node, member)
            for member in ("flags", "rb", "name", "symlink.target_kn", "priv")
        )
        kobject = drgn.offsetof(prog.type("struct kmem_cache"), "kobj")
    except (LookupError, AttributeError):
        return names  # CONFIG_SLAB, or CONFIG_SYSFS=n
    except drgn.FaultError as error:
        findings.lose(Loss.NAMES, f"names of merged slab caches are lost: {error}")
        return names
    size, what = drgn.sizeof(node), "the tree of slab caches' names"
    for _, data in tree_records(reader, root, rb, size, findings, what):
        if not int.from_bytes(data[flags : flags + 2], "little") & is_link:
            continue
        text = _string(reader, _word(data, name), findings)
        try:
            (cache,) = reader.words(_word(data, target) + private, 1).tolist()
        except drgn.FaultError as error:
            findings.lose(Loss.NAMES, f"a merged slab cache's name is lost: {error}")
            continue
        if text is not None:
            names[cache - kobject].append(text)
    return names


def _word(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + _POINTER_BYTES], "little")


def _string(reader: Reader, address: int, findings: LossLog) -> str | None:
    try:
        return read_string(reader, address, _NAME_MAX)
    except drgn.FaultError as error:
        findings.lose(Loss.NAMES, f"a slab cache's name is lost: {error}")
        return None
