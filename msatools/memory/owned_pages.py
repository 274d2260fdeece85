# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of kernel subsystems: memory pools, rings shared with programs, tracing.

The subsystems record the addresses.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import page_to_pfn

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.files import OpenFiles, processes
from msatools.kernel.percpu import possible_cpus
from msatools.kernel.reader import (
    U64,
    Addresses,
    Reader,
    column,
    distinct,
    fault_reason,
    is_left_out,
    unsigned,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import list_nodes, list_records, list_words, xarray_entries
from msatools.memory.classes import PageLayout
from msatools.program.linear import code_start, page_address, vmemmap_base
from msatools.selfdesc.find import (
    ask,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Blocks of pages that owners name by an address in the direct map and an order.


MAX_ORDER = 20
"""Above every MAX_PAGE_ORDER."""

PFN_BITS = 44
"""Bits of a pfn: 4 more than physical addresses of 52 bits and pages of 4 KiB need."""

Pfns = npt.NDArray[np.uint64]
NO_PFNS: Pfns = np.empty(0, np.uint64)


_DIRECT_PAGES = "msatools.direct pages"
"""Key in the program's cache."""


def direct_pfns(prog: drgn.Program, addresses: Addresses | Sequence[int]) -> Pfns:
    """Return the pfns of addresses in the direct map; others are left out."""
    words = np.asarray(addresses, np.uint64)
    # drgn takes 50 us to find these numbers, and there are dozens of calls.
    known: tuple[np.uint64, ...] | None = prog.cache.get(_DIRECT_PAGES)
    if known is None:
        shift = find_variable(prog, "PAGE_SHIFT").value_()
        numbers = page_address(prog, 0), code_start(prog), shift
        known = prog.cache[_DIRECT_PAGES] = tuple(map(np.uint64, numbers))
    start, end, shift = known
    pfns: Pfns = words[(words >= start) & (words < end)] - start >> shift
    return pfns


def pages_of_blocks(
    reader: Reader,
    pfns: Pfns,
    orders: Sequence[int] | npt.NDArray[np.int64],
    losses: LossLog,
    loss: Loss,
) -> Pfns:
    """Return all pages of blocks of ``1 << order`` pages.

    Blocks of impossible orders, or that exceed all memory, are left out and counted.

    :param pfns: First page of each block.
    :param orders: Order of each block.
    :param loss: The loss to count for each block that is left out.
    """
    parts = [NO_PFNS]
    left, lost = reader.most(_page_size(reader)), 0
    for pfn, order in zip(pfns.tolist(), list(orders), strict=True):
        pages = 1 << int(order) if 0 <= order <= MAX_ORDER else 0
        if not 0 < pages <= left or pfn >> PFN_BITS:
            lost += 1
            continue
        left -= pages
        parts.append(np.arange(pfn, pfn + pages, dtype=np.uint64))
    losses.lose(loss, "blocks of pages cannot be as large as recorded", count=lost)
    return np.concatenate(parts)


def _page_size(reader: Reader) -> int:
    return int(find_variable(reader.prog, "PAGE_SIZE").value_())


def heads_of(reader: Reader, layout: PageLayout, pfns: Pfns) -> Pfns:
    """Return the pfns of the heads of the tail pages in *pfns*."""
    base, size = np.uint64(vmemmap_base(reader.prog)), np.uint64(layout.size)
    pages = base + pfns * size
    words, _ = reader.words_near(pages + np.uint64(layout.compound_head))
    tails = words & np.uint64(1) != 0
    info = words[tails]
    heads = pages[tails] & info if layout.compound_mask else info - np.uint64(1)
    found: Pfns = (heads[heads >= base] - base) // size
    return found


def driver_type(prog: drgn.Program, name: str, module: str) -> drgn.Type:
    """Return the type of a structure of a driver, which is built in or a module.

    :raises MissingError: if the kernel has no such driver
    """
    try:
        return find_type(prog, f"struct {name}")
    except MissingError:
        return find_type(prog, f"struct {name}", module)


# --- Finds the pages that the kernel's memory pools keep in reserve.
#
# These are pools of single blocks (mm/mempool.c), and pools from which atomic context
# allocates DMA memory (kernel/dma/pool.c).


_POOLS = (
    # block/bio-integrity.c, since 7.0: two blocks of 2 MiB
    "integrity_buf_pool",
    "blk_crypto_bounce_page_pool",
    "fscrypt_bounce_page_pool",
)
"""Variables that are pools of pages, or pointers to them."""

_DMA_POOLS = ("atomic_pool_dma", "atomic_pool_dma32", "atomic_pool_kernel")
_MAX_CHUNK_BYTES = 1 << 30
_MAX_ELEMENTS = 1 << 12
"""Upper bound of the number of elements; these pools have 2 to 32."""


def mempool_pages(reader: Reader, losses: LossLog) -> Pfns:
    """Return the pfns of all pages in reserve."""
    parts = [NO_PFNS]
    for name in _POOLS:
        try:
            parts.append(_reserve(reader, find_variable(reader.prog, name), losses))
        except MissingError:
            continue  # the kernel has no such pool
        except UNREADABLE as error:
            losses.lose(Loss.MEMPOOLS, f"cannot read the pages of {name}: {error}")
    parts += _dma_pools(reader, losses)
    return np.concatenate(parts)


def _dma_pools(reader: Reader, losses: LossLog) -> Iterator[Pfns]:
    """Yield the pages of each chunk of the DMA pools; chunks that are not in the direct
    map are areas of vmalloc and left out."""
    prog = reader.prog
    page = _page_size(reader)
    left = reader.most(page)
    for name in _DMA_POOLS:
        try:
            pool = _pool(find_variable(prog, name))
            type_ = find_type(prog, "struct gen_pool_chunk")
            chunks = offset_of(find_type(prog, "struct gen_pool"), "chunks")
            node = member_of(type_, "next_chunk").offset
            first, last = (
                member_of(type_, member).offset for member in ("start_addr", "end_addr")
            )
            if not pool:
                continue
            records = list_records(
                reader, pool + chunks, node, last + 8, losses, name, Loss.MEMPOOLS
            )
            for _, data in records:
                start, end = (unsigned(data, at, 8) for at in (first, last))
                pages = (end + 1 - start) // page
                if not 0 < end - start < _MAX_CHUNK_BYTES or pages > left:
                    losses.lose(Loss.MEMPOOLS, f"a chunk of {name} is too large")
                    continue
                left -= pages
                pfns = direct_pfns(prog, [start])
                yield np.concatenate(
                    [NO_PFNS, *(pfn + np.arange(pages, dtype="u8") for pfn in pfns)]
                )
        except MissingError:
            continue
        except UNREADABLE as error:
            if not is_left_out(error):
                losses.lose(Loss.MEMPOOLS, f"cannot read the pages of {name}: {error}")


def _pool(variable: drgn.Object) -> int:
    """Return the address of a ``struct gen_pool``; 0 if it is not set up."""
    # The variable is a structure that has the pointer since v7.3.
    if variable.type_.kind == drgn.TypeKind.STRUCT:
        variable = variable.pool
    return int(variable.value_())


def _reserve(reader: Reader, pool: drgn.Object, losses: LossLog) -> Pfns:
    prog = reader.prog
    try:
        if pool.type_.kind == drgn.TypeKind.POINTER:
            if not pool:
                return NO_PFNS  # not set up
            pool = pool[0]
        if pool.alloc.value_() != kernel_symbol(prog, "mempool_alloc_pages"):
            return NO_PFNS
    except UNREADABLE as error:
        # Most dumps leave out pages of zeros: a pool in such a page is not set up.
        if fault_reason(error) == "excluded":
            return NO_PFNS
        raise
    elements = int(pool.curr_nr.value_())
    if not 0 <= elements <= _MAX_ELEMENTS:
        raise DamagedDataError(f"a pool cannot have {elements:,} elements")
    pfns = [
        ask(page_to_pfn, drgn.cast("struct page *", pool.elements[i])).value_()
        for i in range(elements)
    ]
    order = int(drgn.cast("unsigned long", pool.pool_data))
    return pages_of_blocks(
        reader, np.array(pfns, np.uint64), [order] * len(pfns), losses, Loss.MEMPOOLS
    )


# --- Finds the pages of rings that the kernel shares with programs.
#
# These are the rings of perf events (kernel/events/ring_buffer.c), of io_uring
# (io_uring/memmap.c) and of sockets that capture packets (net/packet/af_packet.c). A
# program may close the file and keep the mapping. So rings are found by the open files,
# by the lists of each thread group leader, and by the lists of each network namespace.
# A ring without an open file is not found if a thread other than the leader made it, or
# a process that has exited. Rings that are mapped by vmap(), such as BPF's, are found
# as areas of vmalloc.


_MAX_PAGES = 1 << 20
"""Upper bound of the pages of one ring: 4 GiB."""

_MAX_SOCKETS = 1 << 20
_NO_MMAP = 1 << 14
"""IORING_SETUP_NO_MMAP (include/uapi/linux/io_uring.h): the rings are memory of the
program."""


def ring_pages(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    """Return the pfns of all rings; of a compound page, only the head or all pages."""
    parts = [NO_PFNS]
    for find in (_perf, _io_uring, _packets):
        try:
            parts.append(find(reader, files, losses))
        except MissingError:
            continue  # not configured
    return np.concatenate(parts)


def _perf(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    """Return the pages of perf's rings: the user page, data pages and AUX pages."""
    prog = reader.prog
    lists = processes(reader, losses).perf_events
    lists = lists[lists != 0]
    open_ = files.private_data(("perf_fops",))
    # Types are looked up only if needed: most machines have no such ring.
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
        absurd = int(np.count_nonzero(number > _MAX_PAGES))
        losses.lose(Loss.RINGS, "a ring cannot have so many pages", count=absurd)
        words, _, whole = reader.read_arrays(array[wanted], number[wanted])
        losses.lose(Loss.RINGS, count=int(np.count_nonzero(~whole)))
        addresses.append(words)
    return direct_pfns(prog, np.concatenate(addresses))


def _io_uring(reader: Reader, files: OpenFiles, losses: LossLog) -> Pfns:
    """Return the first page of each queue; tails get the class of their head later."""
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
    """Yield, for each process, the ``struct io_ring_ctx`` that it has used."""
    tasks = processes(reader, losses).io_uring
    tasks = tasks[tasks != 0]
    if not len(tasks):
        return
    with suppress(MissingError):
        trees = member_of(find_type(reader.prog, "struct io_uring_task"), "xa").offset
        # Older kernels lack this type: an entry is the file itself.
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
            parts.extend(_packet_ring(reader, ring, losses) for ring in rings)
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


def _packet_ring(reader: Reader, ring: drgn.Object, losses: LossLog) -> Pfns:
    """Return the pages of a ring's blocks, except those that vmalloc() allocated."""
    count, order = int(ring.pg_vec_len), int(ring.pg_vec_order)
    if not ring.pg_vec or not count:
        return NO_PFNS
    if count > _MAX_PAGES:
        raise DamagedDataError(f"a ring cannot have {count:,} blocks")
    # struct pgv is one pointer.
    pfns = direct_pfns(reader.prog, reader.words(int(ring.pg_vec), count))
    return pages_of_blocks(reader, pfns, [order] * len(pfns), losses, Loss.RINGS)


def _members(
    reader: Reader, addresses: Addresses, offset: int, losses: LossLog
) -> Addresses:
    """Read the pointer at *offset* in each structure; unreadable ones are left out."""
    records, readable = reader.read_records(addresses + np.uint64(offset), 8)
    losses.lose(Loss.RINGS, count=int(np.count_nonzero(~readable)))
    return column(records, 0)[readable]


# --- Finds the pages of the kernel's own tracing.
#
# These are ftrace's records of functions (kernel/trace/ftrace.c), the saved names of
# tasks (kernel/trace/trace_sched_switch.c) and the trace buffers of each CPU
# (kernel/trace/ring_buffer.c).


_MAX_GROUPS = 1 << 16
"""Upper bound of the number of ``struct ftrace_page``: a few for each module."""

_MAX_BUFFER_PAGES = 1 << 22
"""Upper bound of the pages of one CPU's trace buffer: 16 GiB."""

_FLAGS = 3
"""Bits of ``next`` in a list of a buffer's pages (RB_FLAG_MASK)."""

_NAME_BYTES = 16 + 4
"""Bytes of each entry of the saved names: the task's name (TASK_COMM_LEN) and its PID
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
    # A group has its order since "ftrace: Store the order of pages allocated in
    # ftrace_page" (in v5.13); before, the number of records that fit.
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
    return pages_of_blocks(reader, pfns, orders, losses, Loss.FTRACE)


def _order(size: int, page: int) -> int:
    """Return the order of the smallest block that has *size* bytes."""
    return (max(-(-size // page), 1) - 1).bit_length()


def _saved_names(reader: Reader, losses: LossLog) -> Pfns:
    """Return the block with the names of traced tasks.

    They are one block since 0b18c852cc6f ("tracing: Have saved_cmdlines arrays all in
    one allocation") (in v6.8); before, they were slab objects, which are left out.
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
    return pages_of_blocks(reader, pfns, [order] * len(pfns), losses, Loss.FTRACE)


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
                # The type is found by name: 5.10's BTF only has a declaration here.
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
            parts.append(
                pages_of_blocks(reader, pfns, [order] * len(pfns), losses, Loss.FTRACE)
            )
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
    # ``buffers`` is an array of nr_cpu_ids pointers.
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
