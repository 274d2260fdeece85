# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the pages that devices read and write by DMA.

These are the queues of NVMe controllers (drivers/nvme/host/pci.c), those of virtio
devices with the buffers that are posted there (drivers/virtio/virtio_ring.c), such as
those that a network device is to fill, and the pages of DMA pools (mm/dmapool.c).
"""

from collections.abc import Iterator

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column, distinct, is_left_out
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_nodes, list_words
from msatools.kernel.words import unsigned
from msatools.memory.owners.blocklayer import hardware_queues
from msatools.memory.owners.blocks import (
    NO_PFNS,
    Pfns,
    direct_pfns,
    driver_type,
    heads_of,
    pages_of_blocks,
)
from msatools.memory.pages.layout import PageLayout
from msatools.selfdesc.find import (
    find_symbol,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

_MAX_QUEUES = 1 << 16
_MAX_ENTRIES = 1 << 16
"""Upper bound of the entries of a queue."""

_MAX_BLOCK = 1 << 24
"""Upper bound of the bytes of a DMA pool's blocks."""

_COMPLETION_BYTES = 16
"""``struct nvme_completion`` (include/linux/nvme.h), which the device writes."""


class _Queue(Struct, frozen=True):
    """Memory of a queue."""

    address: int
    bytes: int
    whole: bool = True
    """Whether it is a whole block, as by dma_alloc_coherent(), and not just its pages,
    as by alloc_pages_exact()."""


def dma_pages(reader: Reader, layout: PageLayout, losses: LossLog) -> Pfns:
    """Return the pfns of all pages; of a compound page its head, or all pages."""
    prog = reader.prog
    page = int(find_variable(prog, "PAGE_SIZE").value_())
    parts = [NO_PFNS]
    posted = [NO_PFNS]
    for find in (_nvme_queues, _virtio_queues, _pools):
        try:
            for found in find(reader, losses):
                if isinstance(found, _Queue):
                    parts.append(_pages(prog, found, page))
                else:
                    posted.append(found)
        except MissingError:
            continue  # not configured, or no such device
        except UNREADABLE as error:
            # Most dumps leave out pages of zeros.
            if not is_left_out(error):
                losses.lose(Loss.DMA, f"cannot read queues of devices: {error}")
    pfns = distinct(direct_pfns(prog, np.concatenate(posted)))
    return np.concatenate([*parts, pfns, heads_of(reader, layout, pfns)])


def _pages(prog: drgn.Program, queue: _Queue, page: int) -> Pfns:
    pages = -(-queue.bytes // page)
    pfns = direct_pfns(prog, [queue.address])
    if queue.whole:
        return pages_of_blocks(pfns, [max(pages - 1, 0).bit_length()] * len(pfns))
    return np.concatenate(
        [NO_PFNS, *(pfn + np.arange(pages, dtype=np.uint64) for pfn in pfns)]
    )


def _nvme_queues(reader: Reader, losses: LossLog) -> Iterator[_Queue]:
    """Yield the queues of commands and completions of each controller."""
    for device in hardware_queues(reader, losses).nvme:
        queues = device.queues
        type_ = queues.type_.type
        count = min(int(device.nr_allocated_queues), _MAX_QUEUES)
        size = drgn.sizeof(type_)
        addresses = np.arange(count, dtype=np.uint64) * np.uint64(size)
        records, readable = reader.read_records(addresses + np.uint64(queues), size)
        losses.lose(Loss.DMA, count=int(np.count_nonzero(~readable)))
        commands, completions, depth, shift = (
            column(records[readable], member.offset, drgn.sizeof(member.type)).tolist()
            for member in (
                member_of(type_, name)
                for name in ("sq_cmds", "cqes", "q_depth", "sqes")
            )
        )
        for at, entries in enumerate(depth):
            if 0 < entries <= _MAX_ENTRIES and shift[at] < 16:
                yield _Queue(commands[at], entries << shift[at])
                yield _Queue(completions[at], entries * _COMPLETION_BYTES)


def _devices(reader: Reader, losses: LossLog) -> Addresses:
    """Return the addresses of all ``struct device``."""
    kset = int(find_variable(reader.prog, "devices_kset").value_())
    head = kset + offset_of(find_type(reader.prog, "struct kset"), "list")
    node = offset_of(find_type(reader.prog, "struct device"), "kobj.entry")
    nodes = list_nodes(reader, head, losses, "the list of devices")
    return nodes - np.uint64(node)


def _virtio_queues(reader: Reader, losses: LossLog) -> Iterator[_Queue | Addresses]:
    """Yield the queues of each virtio device, and the buffers posted there."""
    prog = reader.prog
    bus = find_symbol(prog, "virtio_bus").address
    devices = reader.once(_devices, lambda: _devices(reader, losses))
    offset = member_of(find_type(prog, "struct device"), "bus").offset
    buses, _ = reader.words_near(devices + np.uint64(offset))
    devices = devices[buses == np.uint64(bus)]
    if not len(devices):
        return
    device = driver_type(prog, "virtio_device", "virtio")
    queue = driver_type(prog, "vring_virtqueue", "virtio_ring")
    node = offset_of(driver_type(prog, "virtqueue", "virtio"), "list")
    inside, vqs = (member_of(device, name).offset for name in ("dev", "vqs"))
    what = "the queues of a virtio device"
    for address in devices.tolist():
        head = address - inside + vqs
        for at in list_nodes(reader, head, losses, what).tolist():
            try:
                # Its first member is the struct virtqueue.
                yield from _virtqueue(
                    reader, drgn.Object(prog, queue, address=at - node)
                )
            except UNREADABLE as error:
                if not is_left_out(error):
                    losses.lose(Loss.DMA, f"cannot read a queue of virtio: {error}")


def _virtqueue(reader: Reader, queue: drgn.Object) -> Iterator[_Queue | Addresses]:
    queue = queue.read_()
    if not queue.we_own_ring:
        return
    # "virtio_ring: introduce virtqueue ops" (in v7.0) has a layout instead, and calls
    # the other use_map_api. Of its values, those of packed rings are odd.
    has_flag = queue.type_.has_member("packed_ring")
    is_packed = bool(queue.packed_ring if has_flag else int(queue.layout) & 1)
    renamed = queue.type_.has_member("use_map_api")
    by_dma = bool(queue.use_map_api if renamed else queue.use_dma_api)
    part = queue.packed if is_packed else queue.split
    number = int(part.vring.num)
    if not 0 < number <= _MAX_ENTRIES:
        return
    if is_packed:
        yield _Queue(int(part.vring.desc), int(part.ring_size_in_bytes), by_dma)
        for event in (part.vring.driver, part.vring.device):
            yield _Queue(int(event), int(part.event_size_in_bytes), by_dma)
    else:
        yield _Queue(int(part.vring.desc), int(part.queue_size_in_bytes), by_dma)
    states = part.desc_state
    type_ = states.type_.type
    step = drgn.sizeof(type_) // 8
    words = reader.words(int(states), number * step)
    # Most drivers have a structure there: then it is in a slab, whose class stays.
    yield words[member_of(type_, "data").offset // 8 :: step]


def _pools(reader: Reader, losses: LossLog) -> Iterator[_Queue]:
    """Yield the blocks of all DMA pools."""
    prog = reader.prog
    devices = reader.once(_devices, lambda: _devices(reader, losses))
    offset = member_of(find_type(prog, "struct device"), "dma_pools").offset
    heads = devices + np.uint64(offset)
    firsts, readable = reader.words_near(heads)
    heads = heads[readable & (firsts != heads) & (firsts != 0)]
    if not len(heads):
        return
    pool, page = find_type(prog, "struct dma_pool"), find_type(prog, "struct dma_page")
    node, pages, bytes_ = (
        member_of(pool, name) for name in ("pools", "page_list", "allocation")
    )
    link, address = (member_of(page, name).offset for name in ("page_list", "vaddr"))
    for head in heads.tolist():
        for at in list_nodes(reader, head, losses, "the DMA pools of a device"):
            start = int(at) - node.offset
            size = drgn.sizeof(bytes_.type)
            data = reader.read_near(start + bytes_.offset, size)
            count = unsigned(data, 0, size)
            if not 0 < count <= _MAX_BLOCK:
                losses.lose(Loss.DMA, f"no DMA pool has blocks of {count:,} bytes")
                continue
            for block in list_words(
                reader, start + pages.offset, link, address, losses, "a DMA pool"
            ).tolist():
                yield _Queue(block, count)
