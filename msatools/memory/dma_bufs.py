# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dma-bufs, which drivers and programs share: their pages and holders.

They are in drivers/dma-buf/dma-buf.c. The exporter of a buffer keeps its pages: the
system heap allocates them (drivers/dma-buf/heaps/system_heap.c), udmabuf pins pages of
a memfd (drivers/dma-buf/udmabuf.c). The pages of other exporters are not found.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.files import Descriptors, OpenFiles
from msatools.kernel.reader import (
    U64,
    Addresses,
    Reader,
    column,
    read_string,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import list_nodes, tree_records
from msatools.memory.classes import PageLayout
from msatools.memory.model import BufferHolder
from msatools.memory.owned_pages import NO_PFNS, Pfns, driver_type
from msatools.program.linear import vmemmap_base
from msatools.program.model import Address
from msatools.selfdesc.find import (
    drgn_lookups,
    find_symbol,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

if TYPE_CHECKING:
    from msatools.tasks.table import TaskTable

_LISTS = ("dmabuf_list", "debugfs_list", "db_list")
"""Names of the list of all dma-bufs, the newest first: "dma-buf: Rename debugfs
symbols" (in v6.16). Since then kernels without debugfs have the list, too. The oldest,
``db_list``, is a structure whose first member is the list."""

_MAX_NAME = 255
_MAX_PAGES = 1 << 28
"""Upper bound of the pages of a dma-buf, where the size of memory is unknown."""

_SG_FLAGS = np.uint64(3)
"""Flags in ``scatterlist.page_link`` (include/linux/scatterlist.h)."""


class DmaBuf(Struct, frozen=True):
    """A ``struct dma_buf``, with its file and pages."""

    address: Address
    inode: int
    """Number of its inode, as in /sys/kernel/debug/dma_buf/bufinfo."""

    exporter: str
    """Name of its exporter, such as ``system`` or ``udmabuf``."""

    name: str | None
    """The name that a program gave it."""

    bytes: int
    references: int
    """References to its file: open files, mappings, devices that use it."""

    pages: Pfns
    """pfns of its pages; empty for unknown exporters."""

    own: bool
    """Whether the pages are its own; otherwise it pins pages of a file."""

    file: Address
    """Address of its ``struct file``."""

    mapping: Address
    """Address of the ``struct address_space`` by which it is mapped."""


def dma_bufs(
    reader: Reader, layout: PageLayout, files: OpenFiles, losses: LossLog
) -> list[DmaBuf]:
    """Read all dma-bufs, once per reader; empty if the kernel does not have dma-buf."""
    return reader.once(dma_bufs, lambda: [*_read_all(reader, layout, files, losses)])


def _read_all(
    reader: Reader, layout: PageLayout, files: OpenFiles, losses: LossLog
) -> Iterator[DmaBuf]:
    try:
        found = _addresses(reader, files, losses)
        if not len(found):
            return
        type_ = find_type(reader.prog, "struct dma_buf")
        exporters = _Exporters(reader, layout, losses)
    except MissingError:
        return
    except UNREADABLE as error:
        losses.lose(Loss.DMABUFS, f"cannot read the list of dma-bufs: {error}")
        return
    for address in found.tolist():
        try:
            with drgn_lookups:
                buffer = drgn.Object(reader.prog, type_, address=address)
                yield _read(reader, buffer, exporters)
        except (*UNREADABLE, MissingError) as error:
            losses.lose(Loss.DMABUFS, f"cannot read a dma-buf: {error}")


def _addresses(reader: Reader, files: OpenFiles, losses: LossLog) -> Addresses:
    """Return the addresses of all ``struct dma_buf``.

    :raises MissingError: if the kernel has none
    """
    for name in _LISTS:
        try:
            head = kernel_symbol(reader.prog, name)
        except MissingError:
            continue
        # Most dumps have no dma-buf: then the type is not looked up.
        if reader.read_near(head, 8) == head.to_bytes(8, "little"):
            return NO_PFNS
        type_ = find_type(reader.prog, "struct dma_buf")
        node = np.uint64(member_of(type_, "list_node").offset)
        return list_nodes(reader, head, losses, "the list of dma-bufs") - node
    # Without debugfs older kernels have no list.
    return files.private_data(("dma_buf_fops",))


def _read(reader: Reader, buffer: drgn.Object, exporters: "_Exporters") -> DmaBuf:
    address = Address(buffer.address_)
    buffer = buffer.read_()
    pages, own = exporters.pages(buffer)
    name = int(buffer.name)
    file = buffer.file
    # Since "fs: port files to file_ref" (in v6.13), the reference count of files has a
    # type of its own, in which 0 stands for one reference.
    if file.type_.type.has_member("f_ref"):
        references = int(file.f_ref.refcnt.counter) + 1
    else:
        references = int(file.f_count.counter)
    return DmaBuf(
        address=address,
        inode=int(file.f_inode.i_ino),
        exporter=read_string(reader, int(buffer.exp_name), _MAX_NAME),
        name=read_string(reader, name, _MAX_NAME) if name else None,
        bytes=int(buffer.size),
        references=references,
        pages=pages,
        own=own,
        file=Address(int(buffer.file)),
        mapping=Address(int(file.f_mapping)),
    )


class _Exporters:
    """Finds the pages of a dma-buf by its operations."""

    def __init__(self, reader: Reader, layout: PageLayout, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._size = np.uint64(layout.size)
        prog = reader.prog
        self._memmap = np.uint64(vmemmap_base(prog))
        self._page_size = int(find_variable(prog, "PAGE_SIZE").value_())
        self._heap = self._symbol("system_heap_buf_ops")
        self._udmabuf = self._symbol("udmabuf_ops")

    def _symbol(self, name: str) -> int:
        try:
            return int(find_symbol(self._reader.prog, name).address)
        except MissingError:
            return 0

    def pages(self, buffer: drgn.Object) -> tuple[Pfns, bool]:
        """Return the pfns of the pages, and whether they are the buffer's own.

        Pages beyond the size of the buffer, or of memory, are left out as a loss.
        """
        operations, private = int(buffer.ops), int(buffer.priv)
        prog = self._reader.prog
        if operations and operations == self._heap:
            type_ = driver_type(prog, "system_heap_buffer", "system_heap")
            heap = drgn.Object(prog, type_, address=private)
            return self._of_table(heap.sg_table, self._most(buffer)), True
        if operations and operations == self._udmabuf:
            type_ = driver_type(prog, "udmabuf", "udmabuf")
            array = drgn.Object(prog, type_, address=private)
            return self._of_array(array, self._most(buffer)), False
        return NO_PFNS, False

    def _most(self, buffer: drgn.Object) -> int:
        """Return the maximum number of pages of a ``struct dma_buf``."""
        pages = -(-int(buffer.size) // self._page_size)
        return min(pages, self._reader.most(self._page_size), _MAX_PAGES)

    def _bounded(self, count: int, most: int) -> int:
        if count > most:
            text = "a dma-buf has more pages than its size; the others are not counted"
            self._losses.lose(Loss.DMABUFS, text)
        return min(count, most)

    def _of_table(self, table: drgn.Object, most: int) -> Pfns:
        """Return the pages of a ``struct sg_table`` (lib/scatterlist.c).

        :param most: Number of pages after which to stop.
        """
        type_ = table.sgl.type_.type
        size = drgn.sizeof(type_)
        length = member_of(type_, "length").offset
        # Each entry has at least a page.
        at, left = int(table.sgl), self._bounded(int(table.orig_nents), most)
        each = self._page_size // size
        parts = [NO_PFNS]
        while at and left > 0:
            # If there are more entries, the last one of a page links to the next page.
            count = min(each, left)
            data = self._reader.read(at, count * size)
            records = np.frombuffer(data, np.uint8).reshape(count, size)
            links, lengths = column(records, 0), column(records, length, 4)
            at = 0
            if left > count:
                at = int(links[-1] & ~_SG_FLAGS)
                links, lengths = links[:-1], lengths[:-1]
            left -= len(links)
            first = ((links & ~_SG_FLAGS) - self._memmap) // self._size
            pages = -(-lengths.astype(np.int64) // self._page_size)
            # The pfn of each page is the first of its block plus its index in it.
            ends = np.cumsum(pages)
            total = int(pages.sum())
            if self._bounded(total, most) < total:
                pages = np.minimum(pages, np.maximum(most - (ends - pages), 0))
                ends = np.cumsum(pages)
                at = 0
            most -= int(pages.sum())
            within = np.arange(pages.sum()) - np.repeat(ends - pages, pages)
            parts.append(np.repeat(first, pages) + within.astype(np.uint64))
        return np.concatenate(parts)

    def _of_array(self, buffer: drgn.Object, most: int) -> Pfns:
        """Return the pages of a ``struct udmabuf``."""
        count = self._bounded(int(buffer.pagecount), most)
        if buffer.type_.has_member("pages"):
            # Up to v6.10, and again in 7.x.
            words = self._reader.words(int(buffer.pages), count)
        else:
            # "udmabuf: convert udmabuf driver to use folios" (in v6.11)
            words = self._reader.words(int(buffer.folios), count)
            offsets = self._reader.words(int(buffer.offsets), count)
            words = words + offsets // np.uint64(self._page_size) * self._size
        pfns: Pfns = (words - self._memmap) // self._size
        return pfns


_MOST_HOLDERS = 64
"""Maximum number of holders of a buffer that are listed."""


def holders_of(
    reader: Reader, buffers: Sequence[DmaBuf], losses: LossLog
) -> dict[Address, tuple[BufferHolder, ...]]:
    """Return the processes that have a buffer open or mapped, by the buffer's address.

    The result is empty if tasks cannot be read. Devices that use a buffer, descriptors
    in flight through a socket, and mappings whose file the exporter replaced are not
    found.
    """
    if not buffers:
        return {}
    # Imported here, as memstat's table alone needs no tasks.
    from msatools.tasks.table import TaskReader

    found: dict[int, dict[BufferHolder, None]] = defaultdict(dict)
    try:
        tasks = TaskReader(reader).read_all(losses)
        for file, holder in _openers(reader, {b.file for b in buffers}, tasks, losses):
            found[file][holder] = None
        for buffer in buffers:
            for holder in _mappers(reader, buffer.mapping, tasks, losses):
                found[buffer.file][holder] = None
    except (*UNREADABLE, MissingError) as error:
        losses.lose(Loss.DMABUFS, f"cannot determine who holds dma-bufs: {error}")
        return {}
    return {
        buffer.address: tuple(found[buffer.file])[:_MOST_HOLDERS] for buffer in buffers
    }


def _openers(
    reader: Reader, files: set[Address], tasks: "TaskTable", losses: LossLog
) -> Iterator[tuple[int, BufferHolder]]:
    """Yield each file with a process that has it open."""
    wanted = np.array(sorted(files), np.uint64)
    addresses = tasks["address"].astype(np.uint64)
    for rows, opened in Descriptors(reader, losses).by_table(addresses):
        for number in np.flatnonzero(np.isin(opened, wanted)).tolist():
            row = _leader(tasks, rows)
            yield int(opened[number]), _holder(tasks, row, f"fd {number}")


def _mappers(
    reader: Reader, mapping: int, tasks: "TaskTable", losses: LossLog
) -> Iterator[BufferHolder]:
    """Yield each process that maps a file."""
    space = find_type(reader.prog, "struct address_space")
    vma = find_type(reader.prog, "struct vm_area_struct")
    root = mapping + offset_of(space, "i_mmap.rb_root")
    node, mm = offset_of(vma, "shared.rb"), member_of(vma, "vm_mm").offset
    name = "the mappings of a dma-buf"
    for _, data in tree_records(reader, root, node, mm + 8, losses, name):
        (owner,) = U64.unpack_from(data, mm)
        rows = np.flatnonzero(tasks["mm"] == owner).tolist()
        # The mm of kernel threads is 0, which a damaged mapping must not match.
        if owner and rows:
            yield _holder(tasks, _leader(tasks, rows), "mapped")


def _leader(tasks: "TaskTable", rows: Sequence[int]) -> int:
    """Return the row of a thread group leader, or of any thread."""
    return next((row for row in rows if tasks.leaders[row]), rows[0])


def _holder(tasks: "TaskTable", row: int, how: str) -> BufferHolder:
    from msatools.tasks.identity import comm_text

    return BufferHolder(int(tasks["pid"][row]), comm_text(tasks["comm"][row]), how)
