# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the pages of the kernel's own tracing.

These are ftrace's records of functions (kernel/trace/ftrace.c), the names of tasks
(kernel/trace/trace_sched_switch.c) and the trace buffers of each CPU
(kernel/trace/ring_buffer.c).
"""

from collections.abc import Iterator

import drgn
import numpy as np

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, is_left_out
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_nodes
from msatools.kernel.words import U64
from msatools.memory.owners.blocks import NO_PFNS, Pfns, direct_pfns, pages_of_blocks
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of
from msatools.tasks.text import kernel_symbol

_MAX_GROUPS = 1 << 16
"""Upper bound of the number of ``struct ftrace_page``: a few for each module."""

_MAX_BUFFER_PAGES = 1 << 22
"""Upper bound of the pages of one CPU's trace buffer: 16 GiB."""

_FLAGS = 3
"""Bits of ``next`` in a list of a buffer's pages (RB_FLAG_MASK)."""

_NAME_BYTES = 16 + 4
"""Of a task in the saved names: TASK_COMM_LEN and its number
(SAVED_CMDLINE_MAP_ELEMENT_SIZE)."""


def tracing_pages(reader: Reader, losses: LossLog) -> Pfns:
    """Return the pfns of all pages of tracing."""
    parts = [NO_PFNS]
    for find in (_records, _saved_names, _buffers, _temporary):
        try:
            parts.append(find(reader, losses))
        except MissingError:
            continue  # not configured
        except UNREADABLE as error:
            # Most dumps leave out pages of zeros.
            if not is_left_out(error):
                losses.lose(Loss.FTRACE, f"cannot read pages of tracing: {error}")
    return np.concatenate(parts)


def _records(reader: Reader, losses: LossLog) -> Pfns:
    prog = reader.prog
    group = find_variable(prog, "ftrace_pages_start").value_()
    type_ = find_type(prog, "struct ftrace_page")
    following, records = (offset_of(type_, name) for name in ("next", "records"))
    page = int(find_variable(prog, "PAGE_SIZE").value_())
    size = drgn.sizeof(type_)
    # The order since "ftrace: Store the order of pages allocated in ftrace_page" (in
    # v5.13); before, the number of records that fit.
    has_order = type_.has_member("order")
    length = member_of(type_, "order" if has_order else "size").offset
    each = drgn.sizeof(find_type(prog, "struct dyn_ftrace"))
    seen: set[int] = set()
    addresses, orders = [], []
    try:
        while group:
            if group in seen or len(seen) >= _MAX_GROUPS:
                raise DamagedDataError("the records of ftrace are a loop", group)
            seen.add(group)
            data = reader.read(group, size)
            (address,) = U64.unpack_from(data, records)
            number = int.from_bytes(data[length : length + 4], "little", signed=True)
            if address:
                addresses.append(address)
                orders.append(number if has_order else _order(number * each, page))
            (group,) = U64.unpack_from(data, following)
    except UNREADABLE as error:
        losses.lose(Loss.FTRACE, f"cannot read records of ftrace: {error}")
    pfns = direct_pfns(prog, addresses)
    if len(pfns) != len(orders):
        losses.lose(Loss.FTRACE, "records of ftrace are not in the direct map")
        return NO_PFNS
    return pages_of_blocks(pfns, orders)


def _order(size: int, page: int) -> int:
    """Return the order of the smallest block of pages with so many bytes."""
    return (max(-(-size // page), 1) - 1).bit_length()


def _saved_names(reader: Reader, losses: LossLog) -> Pfns:
    """Return the block with the names of traced tasks.

    One allocation since 0b18c852cc6f ("tracing: Have saved_cmdlines arrays all in one
    allocation") (in v6.8); before, objects of slab.
    """
    prog = reader.prog
    type_ = find_type(prog, "struct saved_cmdlines_buffer")
    names = member_of(type_, "saved_cmdlines").type
    if names.unaliased_kind() != drgn.TypeKind.ARRAY:
        return NO_PFNS
    saved = find_variable(prog, "savedcmd").value_()
    if not saved:
        return NO_PFNS
    buffer = drgn.Object(prog, type_, address=saved)
    count = int(buffer.cmdline_num)
    page = int(find_variable(prog, "PAGE_SIZE").value_())
    order = _order(drgn.sizeof(type_) + count * _NAME_BYTES, page)
    pfns = direct_pfns(prog, [saved])
    return pages_of_blocks(pfns, [order] * len(pfns))


def _buffers(reader: Reader, losses: LossLog) -> Pfns:
    prog = reader.prog
    type_ = find_type(prog, "struct trace_array")
    buffer_type = find_type(prog, "struct trace_buffer")
    head = find_variable(prog, "ftrace_trace_arrays").address_
    nodes = list_nodes(reader, head, losses, "the list of trace buffers")
    addresses: list[int] = []
    order = 0
    parts = [NO_PFNS]
    for node in nodes.tolist():
        array = drgn.Object(prog, type_, address=node - offset_of(type_, "list"))
        for name in ("array_buffer", "max_buffer", "snapshot_buffer"):
            if not type_.has_member(name):
                continue
            try:
                buffer = array.member_(name).buffer
                if not buffer:
                    continue
                # By its name: the pointer of 5.10's BTF is to a declaration alone.
                buffer = drgn.Object(prog, buffer_type, address=int(buffer))
                addresses = [a for a in _of_buffer(reader, buffer, losses) if a]
                # "ring-buffer: Set new size of the ring buffer sub page" (in v6.8)
                order = 0
                if buffer_type.has_member("subbuf_order"):
                    order = int(buffer.subbuf_order)
            except UNREADABLE as error:
                losses.lose(Loss.FTRACE, f"cannot read a trace buffer: {error}")
                continue
            pfns = direct_pfns(prog, addresses)
            parts.append(pages_of_blocks(pfns, [order] * len(pfns)))
    return np.concatenate(parts)


def _temporary(reader: Reader, losses: LossLog) -> Pfns:
    """Return the pages of the buffer for events that a trigger may drop
    (kernel/trace/trace.c, ``temp_buffer``)."""
    prog = reader.prog
    (address,) = reader.words(kernel_symbol(prog, "temp_buffer"), 1).tolist()
    if not address:
        return NO_PFNS
    buffer = drgn.Object(prog, find_type(prog, "struct trace_buffer"), address=address)
    return direct_pfns(prog, [*_of_buffer(reader, buffer, losses)])


def _of_buffer(reader: Reader, buffer: drgn.Object, losses: LossLog) -> Iterator[int]:
    """Yield the addresses of the pages of all CPUs' parts of a trace buffer."""
    # An array of nr_cpu_ids pointers.
    cpus = max(possible_cpus(reader.prog, losses), default=-1) + 1
    type_ = find_type(reader.prog, "struct buffer_page")
    node, data = offset_of(type_, "list"), member_of(type_, "page").offset
    for pointer in reader.words(int(buffer.buffers), cpus).tolist():
        if not pointer:
            continue
        part = drgn.Object(reader.prog, "struct ring_buffer_per_cpu", address=pointer)
        try:
            first = int(part.pages)
            most = min(int(part.nr_pages), _MAX_BUFFER_PAGES) + 1
            reader_page = int(part.reader_page)
            if reader_page:
                yield int(reader.words(reader_page + data, 1)[0])
            at, left = first, most
            while at and left:
                record = reader.read_near(at - node, drgn.sizeof(type_))
                yield U64.unpack_from(record, data)[0]
                at = U64.unpack_from(record, node)[0] & ~_FLAGS
                left -= 1
                if at == first:
                    break
        except LOST as error:
            losses.lose(Loss.FTRACE, f"cannot read a CPU's trace buffer: {error}")
