# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the pages of rings that the kernel shares with programs.

These are of perf events (kernel/events/ring_buffer.c), of io_uring (io_uring/memmap.c)
and of sockets that capture packets (net/packet/af_packet.c). A program may close the
file and keep the mapping: so rings are found by the open files, and by what the kernel
keeps of each process and of each network namespace. Not found is a ring without an open
file that another thread than the leader made, or a process that has exited. Rings that
are mapped anew (vmap, BPF's ring buffers) are areas of vmalloc, and found there.
"""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.files import OpenFiles, processes
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_nodes, list_words
from msatools.kernel.words import U64
from msatools.kernel.xarray import xarray_entries
from msatools.memory.owners.blocks import (
    MAX_ORDER,
    NO_PFNS,
    Pfns,
    direct_pfns,
    pages_of_blocks,
)
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of

_MAX_PAGES = 1 << 20
"""Upper bound of the pages of one ring: 4 GiB."""

_MAX_SOCKETS = 1 << 20
_NO_MMAP = 1 << 14
"""IORING_SETUP_NO_MMAP (include/uapi/linux/io_uring.h): the rings are memory of the
program."""


def ring_pages(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    """Return the pfns of all rings; of a compound page its head, or all pages."""
    parts = [NO_PFNS]
    for find in (_perf, _io_uring, _packets):
        try:
            parts.append(find(reader, files, losses))
        except MissingError:
            continue  # not configured
    return np.concatenate(parts)


def _perf(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    """Return the pages of perf's rings: what the event says, and data."""
    prog = reader.prog
    lists = processes(reader, losses).perf_events
    lists = lists[lists != 0]
    open_ = files.private_data(("perf_fops",))
    # Types are asked for where there is something: most machines have no ring.
    if not len(lists) and not len(open_):
        return NO_PFNS
    event, buffer = find_type(prog, "struct perf_event"), "struct perf_buffer"
    node = np.uint64(member_of(event, "owner_entry").offset)
    opened = [
        list_nodes(reader, head, losses, "the perf events of a process") - node
        for head in lists.tolist()
    ]
    events = distinct(np.concatenate([open_, *opened]))
    type_ = find_type(prog, buffer)
    count, user, data, aux_count, aux = (
        member_of(type_, name).offset
        for name in (
            *("nr_pages", "user_page", "data_pages"),
            *("aux_nr_pages", "aux_pages"),
        )
    )
    rings = distinct(_members(reader, events, member_of(event, "rb").offset, losses))
    records, readable = reader.read_records(rings[rings != 0], data)
    losses.lose(Loss.RINGS, count=int(np.count_nonzero(~readable)))
    addresses = [column(records, user)]
    rings = rings[rings != 0]
    for array, number in (
        (rings + np.uint64(data), column(records, count, 4)),
        (column(records, aux), column(records, aux_count, 4)),
    ):
        wanted = (number > 0) & (number <= _MAX_PAGES)
        words, _, whole = reader.read_arrays(array[wanted], number[wanted])
        losses.lose(Loss.RINGS, count=int(np.count_nonzero(~whole)))
        addresses.append(words)
    return direct_pfns(prog, np.concatenate(addresses))


def _io_uring(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    """Return the first page of each queue; if compound, the others follow."""
    prog = reader.prog
    open_ = files.private_data(("io_uring_fops",))
    contexts = distinct(np.concatenate([open_, *_used_contexts(reader, losses)]))
    if not len(contexts):
        return NO_PFNS
    type_ = find_type(prog, "struct io_ring_ctx")
    flags = offset_of(type_, "flags")
    records, readable = reader.read_records(contexts + np.uint64(flags), 4)
    own = column(records, 0, 4) & np.uint64(_NO_MMAP) == 0
    contexts = contexts[readable & own]
    addresses = [
        _members(reader, contexts, offset_of(type_, name), losses)
        for name in ("rings", "sq_sqes")
    ]
    return direct_pfns(prog, distinct(np.concatenate(addresses)))


def _used_contexts(reader: Reader, losses: LossLog) -> Iterator[Addresses]:
    """Yield the rings that processes have used, by process."""
    tasks = processes(reader, losses).io_uring
    tasks = tasks[tasks != 0]
    if not len(tasks):
        return
    with suppress(MissingError):
        trees = member_of(find_type(reader.prog, "struct io_uring_task"), "xa").offset
        # In older kernels an entry is the file itself.
        node = find_type(reader.prog, "struct io_tctx_node")
        offset = member_of(node, "ctx").offset
        for task in tasks.tolist():
            entries = xarray_entries(reader, task + trees, losses, "a process's rings")
            nodes = np.array([entry for _, _, entry in entries], np.uint64)
            yield _members(reader, nodes, offset, losses)


def _packets(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    prog = reader.prog
    parts = [NO_PFNS]
    for address in _captures(reader, losses):
        try:
            packet = find_type(prog, "struct packet_sock")
            capture = drgn.Object(prog, packet, address=address)
            rings = capture.rx_ring, capture.tx_ring
            parts.extend(_packet_ring(reader, ring) for ring in rings)
        except UNREADABLE:
            losses.lose(Loss.RINGS)
    return np.concatenate(parts)


def _captures(reader: Reader, losses: LossLog) -> Iterator[int]:
    """Yield each ``struct sock`` that captures packets, of all network namespaces."""
    prog = reader.prog
    net = find_type(prog, "struct net")
    node, first = member_of(net, "list").offset, offset_of(net, "packet.sklist.first")
    link = offset_of(find_type(prog, "struct sock"), "__sk_common.skc_node")
    head = int(find_variable(prog, "net_namespace_list").address_)
    seen: set[int] = set()
    try:
        for at in list_words(reader, head, node, first, losses, "network namespaces"):
            following = int(at)
            while following and following not in seen and len(seen) < _MAX_SOCKETS:
                seen.add(following)
                yield following - link
                (following,) = U64.unpack(reader.read_near(following, 8))
    except UNREADABLE:
        losses.lose(Loss.RINGS)


def _packet_ring(reader: Reader, ring: drgn.Object) -> Pfns:
    """Return the pages of a ring's blocks; those of vmalloc are areas of it."""
    count, order = int(ring.pg_vec_len), int(ring.pg_vec_order)
    if not ring.pg_vec or not 0 < count <= _MAX_PAGES or order > MAX_ORDER:
        return NO_PFNS
    # struct pgv is one pointer.
    pfns = direct_pfns(reader.prog, reader.words(int(ring.pg_vec), count))
    return pages_of_blocks(pfns, [order] * len(pfns))


def _members(
    reader: Reader, addresses: Addresses, offset: int, losses: LossLog
) -> Addresses:
    """Read the pointer at an offset of each of some structures."""
    records, readable = reader.read_records(addresses + np.uint64(offset), 8)
    losses.lose(Loss.RINGS, count=int(np.count_nonzero(~readable)))
    return column(records, 0)[readable]
