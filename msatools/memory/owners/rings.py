# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the pages of rings that the kernel shares with programs.

These are of perf events (kernel/events/ring_buffer.c), of io_uring (io_uring/memmap.c)
and of sockets that capture packets (net/packet/af_packet.c), by the open files. Rings
that are mapped anew (vmap, BPF's ring buffers) are areas of vmalloc, and found there.
A ring whose file is closed, and which is only mapped, is not found.
"""

import drgn
import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.files import OpenFiles
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import LossLog
from msatools.memory.owners.blocks import (
    MAX_ORDER,
    NO_PFNS,
    Pfns,
    direct_pfns,
    pages_of_blocks,
)
from msatools.selfdesc.find import find_type, member_of, offset_of

_MAX_PAGES = 1 << 20
"""Upper bound of the pages of one ring: 4 GiB."""

_AF_PACKET = 17
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
    events = files.private_data(("perf_fops",))
    event, buffer = find_type(prog, "struct perf_event"), "struct perf_buffer"
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
    contexts = files.private_data(("io_uring_fops",))
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


def _packets(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    prog = reader.prog
    sock = find_type(prog, "struct sock")
    packet = find_type(prog, "struct packet_sock")
    sockets = files.private_data(("socket_file_ops",))
    sk = member_of(find_type(prog, "struct socket"), "sk").offset
    socks = distinct(_members(reader, sockets, sk, losses))
    socks = socks[socks != 0]
    family = offset_of(sock, "__sk_common.skc_family")
    records, readable = reader.read_records(socks, family + 2)
    captures = socks[readable & (column(records, family, 2) == _AF_PACKET)]
    parts = [NO_PFNS]
    for address in captures.tolist():
        try:
            capture = drgn.Object(prog, packet, address=address)
            rings = capture.rx_ring, capture.tx_ring
            parts.extend(_packet_ring(reader, ring) for ring in rings)
        except UNREADABLE:
            losses.lose(Loss.RINGS)
    return np.concatenate(parts)


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
