# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Reads dma-bufs: buffers that drivers and programs share (drivers/dma-buf/dma-buf.c).

Who exports a buffer has its pages: those of the system heap are pages of its own
(drivers/dma-buf/heaps/system_heap.c), those of udmabuf are pages of a memfd, which it
pins (drivers/dma-buf/udmabuf.c). Other exporters' pages are not known.
"""

from collections.abc import Iterator

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.files import OpenFiles
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.walks import list_nodes
from msatools.memory.owners.blocks import NO_PFNS, Pfns, driver_type
from msatools.memory.pages.layout import PageLayout
from msatools.selfdesc.find import (
    drgn_lookups,
    find_symbol,
    find_type,
    find_variable,
    member_of,
)
from msatools.target.model import Address
from msatools.tasks.text import kernel_symbol

_LISTS = ("dmabuf_list", "debugfs_list", "db_list")
"""Names of the list of all dma-bufs: "dma-buf: Rename debugfs symbols" (in v6.16), from
when on kernels without debugfs have it, too; the last is the first member of a
structure."""

_MAX_NAME = 255
_MAX_ENTRIES = 1 << 22
_MAX_PAGES = 1 << 28
_SG_FLAGS = np.uint64(3)
"""Flags in ``scatterlist.page_link`` (include/linux/scatterlist.h)."""


class DmaBuf(Struct, frozen=True):
    """A dma-buf."""

    address: Address
    inode: int
    """Number of its inode, as in /sys/kernel/debug/dma_buf/bufinfo."""

    exporter: str
    """Who made it, such as ``system`` or ``udmabuf``."""

    name: str | None
    """The name that a program gave it."""

    bytes: int
    references: int
    """References to its file: open files, mappings, devices that use it."""

    pages: Pfns
    """Its pages, as far as its exporter is known."""

    own: bool
    """Whether it has its pages to itself; those of a file are pinned otherwise."""


def dma_bufs(
    reader: Reader, layout: PageLayout, files: OpenFiles, losses: LossLog
) -> list[DmaBuf]:
    """Return all dma-bufs, once per reader; none if the kernel has no such thing."""
    return reader.once(dma_bufs, lambda: [*_read_all(reader, layout, files, losses)])


def _read_all(
    reader: Reader, layout: PageLayout, files: OpenFiles, losses: LossLog
) -> Iterator[DmaBuf]:
    try:
        found = _addresses(reader, files, losses)
        if not len(found):
            return
        type_ = find_type(reader.prog, "struct dma_buf")
        exporters = _Exporters(reader, layout)
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
        # Most kernels have none: do not look for the type then.
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
    # A reference count of its own: "fs: port files to file_ref" (in v6.13), where 0
    # stands for one reference.
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
    )


class _Exporters:
    """Finds the pages of a dma-buf by its operations."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        self._reader = reader
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
        """Return the pages, and whether nobody else has them."""
        operations, private = int(buffer.ops), int(buffer.priv)
        prog = self._reader.prog
        if operations and operations == self._heap:
            type_ = driver_type(prog, "system_heap_buffer", "system_heap")
            heap = drgn.Object(prog, type_, address=private)
            return self._of_table(heap.sg_table), True
        if operations and operations == self._udmabuf:
            type_ = driver_type(prog, "udmabuf", "udmabuf")
            return self._of_array(drgn.Object(prog, type_, address=private)), False
        return NO_PFNS, False

    def _of_table(self, table: drgn.Object) -> Pfns:
        """Return the pages of a ``struct sg_table`` (lib/scatterlist.c)."""
        type_ = table.sgl.type_.type
        size = drgn.sizeof(type_)
        length = member_of(type_, "length").offset
        at, left = int(table.sgl), min(int(table.orig_nents), _MAX_ENTRIES)
        each = self._page_size // size
        parts = [NO_PFNS]
        while at and left > 0:
            # Where a page of entries is not enough, its last one leads to the next.
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
            # All pages of each block: their first plus their number in it.
            ends = np.cumsum(pages)
            within = np.arange(pages.sum()) - np.repeat(ends - pages, pages)
            parts.append(np.repeat(first, pages) + within.astype(np.uint64))
        return np.concatenate(parts)

    def _of_array(self, buffer: drgn.Object) -> Pfns:
        """Return the pages of a ``struct udmabuf``."""
        count = min(int(buffer.pagecount), _MAX_PAGES)
        if buffer.type_.has_member("pages"):
            # Up to v6.11, and again since v7.0 or so.
            words = self._reader.words(int(buffer.pages), count)
        else:
            # "udmabuf: Convert the driver to use folios" (in v6.12)
            words = self._reader.words(int(buffer.folios), count)
            offsets = self._reader.words(int(buffer.offsets), count)
            words = words + offsets // np.uint64(self._page_size) * self._size
        pfns: Pfns = (words - self._memmap) // self._size
        return pfns
