# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts of free objects that their slabs count as in use (mm/slub.c).

These objects are cached per CPU or per node. A slab that a CPU allocates from counts
all its objects as in use, including those on the CPU's freelist (``struct
kmem_cache_cpu``). Since Linux kernel commit 2d517aa09bbc ("slab: add opt-in caching
layer of percpu sheaves") (in v6.18) free objects are also in sheaves, arrays of CPUs
and of nodes, and since v7.0 CPUs have no freelists.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.nodemask import for_each_online_node
from msgspec import Struct

from msatools.errors import LOST, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, Structs, find_offset, read_structs
from msatools.selfdesc.find import ask_each, find_type

Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]

_CACHE: Members = {
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
"""Number of tries to read a list of a running kernel, which may change meanwhile."""

_LOST = -1
_MAX_LENGTH = 1 << 16
"""More than the length of any list."""


def free_in_use(
    reader: Reader, caches: Addresses, losses: LossLog
) -> Mapping[int, int]:
    """
    Count the free objects of some caches that their slabs count as in use.

    Objects that are freed after an RCU grace period are not included.

    :param caches: Addresses of ``struct kmem_cache``.
    :return: Counts by address; a cache whose count is unknown is left out, and counts
        as a loss.
    """
    try:
        known = read_structs(reader, "struct kmem_cache", _CACHE, caches, losses)
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
        """
        lengths = np.zeros(len(firsts), np.int64)
        objects, limits = firsts.copy(), self.limits[lists]
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
        # No longer in struct kmem_cache_node since Linux kernel commit 5ba6bc27b1f9
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
