# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages that devices read and write: requests of the block layer, DMA, DMA-BUFs."""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.reader import (
    U64,
    Addresses,
    Reader,
    column,
    distinct,
    is_left_out,
    unsigned,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import constant
from msatools.kernel.walks import list_nodes, list_words
from msatools.memory.classes import PageLayout
from msatools.memory.owned_pages import (
    NO_PFNS,
    Pfns,
    direct_pfns,
    driver_type,
    heads_of,
    pages_of_blocks,
)
from msatools.program.linear import vmemmap_base
from msatools.selfdesc.find import (
    drgn_lookups,
    find_symbol,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Finds the pages that the block layer's requests are in (block/blk-mq.c).


_MAX_QUEUES = 1 << 16
"""Upper bound of the hardware queues of all devices."""


def request_pages(reader: Reader, layout: PageLayout, losses: LossLog) -> Pfns:
    """Return the pfns that hold the requests of all drivers' and schedulers' tags.

    Requests for all tags of a queue are allocated in advance, in the largest blocks
    that are available.
    """
    prog = reader.prog
    type_ = find_type(prog, "struct blk_mq_tags")
    head = offset_of(type_, "page_list")
    base = np.uint64(vmemmap_base(prog))
    parts = [NO_PFNS]
    for tags in sorted(hardware_queues(reader, losses).tags):
        nodes = list_nodes(reader, tags + head, losses, "a list of requests' pages")
        pages = nodes - np.uint64(layout.lru)
        records, readable = reader.read_records(pages, layout.size)
        losses.lose(Loss.REQUESTS, count=int(np.count_nonzero(~readable)))
        # The order is kept in page->private.
        orders = column(records, layout.private)[readable].astype(np.int64)
        pfns = (pages[readable] - base) // np.uint64(layout.size)
        parts.append(pages_of_blocks(reader, pfns, orders, losses, Loss.REQUESTS))
    return np.concatenate(parts)


class HardwareQueues(Struct, frozen=True):
    """The tags and NVMe controllers of all hardware queues."""

    tags: set[int]
    """Addresses of ``struct blk_mq_tags``."""

    nvme: tuple[drgn.Object, ...]
    """The ``struct nvme_dev`` of each NVMe controller on PCI."""


def hardware_queues(reader: Reader, losses: LossLog) -> HardwareQueues:
    """Read all hardware queues, once per reader.

    Every hardware queue is on the list of a CPU hotplug state, CPUHP_BLK_MQ_DEAD
    (kernel/cpu.c).

    :raises MissingError: if the kernel has no such queues
    """
    return reader.once(hardware_queues, lambda: _hardware_queues(reader, losses))


def _hardware_queues(reader: Reader, losses: LossLog) -> HardwareQueues:
    found: set[int] = set()
    prog = reader.prog
    states = find_variable(prog, "cpuhp_hp_states")
    state = states[constant(prog, "CPUHP_BLK_MQ_DEAD")]
    type_ = find_type(prog, "struct blk_mq_hw_ctx")
    node = member_of(type_, "cpuhp_dead").offset
    offsets = [member_of(type_, name).offset for name in ("tags", "sched_tags")]
    queue = member_of(type_, "queue").offset
    queues: set[int] = set()
    size = drgn.sizeof(type_)
    seen: set[int] = set()
    try:
        at = int(state.list.first)
        while at and at not in seen and len(seen) < _MAX_QUEUES:
            seen.add(at)
            data = reader.read_near(at - node, size)
            for offset in offsets:
                (tags,) = U64.unpack_from(data, offset)
                if tags:
                    found.add(tags)
            queues.update(U64.unpack_from(data, queue))
            (at,) = U64.unpack_from(data, node)
        if at:
            losses.lose(Loss.REQUESTS, "the list of hardware queues is a loop")
    except UNREADABLE as error:
        losses.lose(Loss.REQUESTS, f"cannot read hardware queues: {error}")
    controllers = []
    with suppress(MissingError):
        for device, tags in _nvme(prog, queues, losses):
            found.update(tags)
            if device is not None:
                controllers.append(device)
    return HardwareQueues(found, tuple(controllers))


def _nvme(
    prog: drgn.Program, queues: set[int], losses: LossLog
) -> Iterator[tuple[drgn.Object | None, list[int]]]:
    """Yield each NVMe controller (``None`` if not on PCI) and its disks' tags.

    A controller without disks has requests for them, but no hardware queue
    (drivers/nvme/host/core.c).

    :param queues: Addresses of all ``struct request_queue``, including admin queues.
    """
    # Looked up once and only if needed: the types of a module take a millisecond.
    controller, pci, known = None, None, False
    for address in sorted(queues):
        try:
            with drgn_lookups:
                owned = drgn.Object(prog, "struct request_queue", address=address)
                admin = owned.tag_set
                if not admin or not admin.driver_data or _has_disk(owned):
                    continue
                if not known:
                    known = True
                    with suppress(MissingError):
                        controller = driver_type(prog, "nvme_ctrl", "nvme_core")
                    with suppress(MissingError):
                        pci = driver_type(prog, "nvme_dev", "nvme")
                data = int(admin.driver_data)
                device = None if pci is None else _nvme_device(pci, int(admin), data)
                if device is not None:
                    tags = device.tagset
                elif controller is not None:
                    tags = _nvme_set(controller, int(admin), data)
                else:
                    continue
                number = int(tags.nr_hw_queues)
                if number > _MAX_QUEUES:
                    text = f"an NVMe device cannot have {number:,} queues"
                    losses.lose(Loss.REQUESTS, text)
                    number = 0
                each = [int(tags.tags[at]) for at in range(number)]
                yield device, [one for one in each if one]
        except UNREADABLE:
            continue  # ``driver_data`` of another driver


def _has_disk(queue: drgn.Object) -> bool:
    """Return whether a queue is known to be a disk's, not an admin queue.

    A queue points to its disk since d152c682f03c ("block: add an explicit ->disk
    backpointer to the request_queue") (in v5.15).
    """
    return queue.type_.has_member("disk") and bool(queue.disk)


def _nvme_set(type_: drgn.Type, admin: int, data: int) -> drgn.Object:
    """Return the disks' ``struct blk_mq_tag_set`` of a controller not on PCI.

    :param type_: Type ``struct nvme_ctrl``.
    :param admin: Address of the tag set of the controller's admin queue.
    :param data: ``driver_data`` of that tag set.
    :raises FaultError: if the tag set is another driver's
    """
    controller = drgn.Object(type_.prog, type_, address=data)
    if int(controller.admin_tagset) != admin:
        raise drgn.FaultError("not of NVMe", data)
    return controller.tagset


def _nvme_device(type_: drgn.Type, admin: int, data: int) -> drgn.Object | None:
    """Return the ``struct nvme_dev`` of a controller; ``None`` if it is not on PCI."""
    with suppress(*UNREADABLE, MissingError):
        # ``driver_data`` is the nvme_dev itself on 6.1, its ``ctrl`` on 6.12.
        for start in (data, data - offset_of(type_, "ctrl")):
            device = drgn.Object(type_.prog, type_, address=start)
            if int(device.admin_tagset.address_of_()) == admin:
                return device
    return None


# --- Finds the pages that devices read and write by DMA.
#
# These are the queues of NVMe controllers (drivers/nvme/host/pci.c), the queues of
# virtio devices and the buffers posted to them (drivers/virtio/virtio_ring.c), such as
# receive buffers of a network device, and the pages of DMA pools (mm/dmapool.c).


_DMA_MAX_ENTRIES = 1 << 16
"""Upper bound of the entries of a queue."""

_MAX_BLOCK = 1 << 24
"""Upper bound of the bytes of a queue, and of a DMA pool's blocks."""

_VRING_ENTRY_BYTES = 16 + 2 + 8
"""Bytes of each entry of a split ring: its descriptor, and an element of the driver's
and of the device's ring (include/uapi/linux/virtio_ring.h). A packed ring has only
descriptors."""

_COMPLETION_BYTES = 16
"""``struct nvme_completion`` (include/linux/nvme.h), which the device writes."""


class _Queue(Struct, frozen=True):
    """Memory of a queue, or a block of a DMA pool."""

    address: int
    bytes: int
    whole: bool = True
    """Whether the memory is rounded up to a power of two of pages, as by
    dma_alloc_coherent(), and not only to a page, as by alloc_pages_exact()."""

    most: int = _MAX_BLOCK
    """Upper bound of the bytes: more is damage."""


def dma_pages(reader: Reader, layout: PageLayout, losses: LossLog) -> Pfns:
    """Return the pfns of device queues, DMA pools and posted buffers, and of the heads
    of compound pages that have posted buffers."""
    prog = reader.prog
    page = int(find_variable(prog, "PAGE_SIZE").value_())
    parts = [NO_PFNS]
    posted = [NO_PFNS]
    left = reader.most(page)
    for find in (_nvme_queues, _virtio_queues, _pools):
        try:
            for found in find(reader, losses):
                if not isinstance(found, _Queue):
                    posted.append(found)
                    continue
                pages = _page_count(found, page)
                if not 0 < found.bytes <= found.most or pages > left:
                    text = f"a device's queue cannot have {found.bytes:,} bytes"
                    losses.lose(Loss.DMA, text)
                    continue
                pfns = direct_pfns(prog, [found.address])
                left -= pages * len(pfns)
                parts += [pfn + np.arange(pages, dtype=np.uint64) for pfn in pfns]
        except MissingError:
            continue  # not configured, or no such device
        except UNREADABLE as error:
            # Most dumps leave out pages of zeros.
            if not is_left_out(error):
                losses.lose(Loss.DMA, f"cannot read queues of devices: {error}")
    pfns = distinct(direct_pfns(prog, np.concatenate(posted)))
    return np.concatenate([*parts, pfns, heads_of(reader, layout, pfns)])


def _page_count(queue: _Queue, page: int) -> int:
    pages = -(-queue.bytes // page)
    return 1 << max(pages - 1, 0).bit_length() if queue.whole else pages


def _nvme_queues(reader: Reader, losses: LossLog) -> Iterator[_Queue]:
    """Yield the queues of commands and completions of each controller."""
    for device in hardware_queues(reader, losses).nvme:
        queues = device.queues
        type_ = queues.type_.type
        count = _queue_count(device)
        if count > _MAX_QUEUES:
            losses.lose(Loss.DMA, f"an NVMe device cannot have {count:,} queues")
            continue
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
            if entries > _DMA_MAX_ENTRIES:
                text = f"a queue of NVMe cannot have {entries:,} entries"
                losses.lose(Loss.DMA, text)
            elif entries:
                yield _Queue(commands[at], entries << shift[at])
                yield _Queue(completions[at], entries * _COMPLETION_BYTES)


def _queue_count(device: drgn.Object) -> int:
    """Return the number of queues that have memory.

    nvme_free_queues() lowers ``queue_count`` and frees the memory, but leaves the
    pointers to it.
    """
    allocated = int(device.nr_allocated_queues)
    if not device.ctrl.type_.has_member("queue_count"):
        return allocated
    return min(allocated, int(device.ctrl.queue_count))


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
                # The first member of a vring_virtqueue is its struct virtqueue.
                yield from _virtqueue(
                    reader, drgn.Object(prog, queue, address=at - node), losses
                )
            except UNREADABLE as error:
                if not is_left_out(error):
                    losses.lose(Loss.DMA, f"cannot read a queue of virtio: {error}")


def _virtqueue(
    reader: Reader, queue: drgn.Object, losses: LossLog
) -> Iterator[_Queue | Addresses]:
    queue = queue.read_()
    if not queue.we_own_ring:
        return
    # "virtio_ring: introduce virtqueue ops" (in v7.0) replaces packed_ring by layout,
    # which is odd for packed rings. use_map_api is the newer name of use_dma_api.
    has_flag = queue.type_.has_member("packed_ring")
    is_packed = bool(queue.packed_ring if has_flag else int(queue.layout) & 1)
    renamed = queue.type_.has_member("use_map_api")
    by_dma = bool(queue.use_map_api if renamed else queue.use_dma_api)
    part = queue.packed if is_packed else queue.split
    number = int(part.vring.num)
    if not 0 < number <= _DMA_MAX_ENTRIES:
        losses.lose(Loss.DMA, f"a queue of virtio cannot have {number:,} entries")
        return
    page = int(find_variable(reader.prog, "PAGE_SIZE").value_())
    # The device's ring is aligned to at most a page; each ring also has flags.
    most = number * _VRING_ENTRY_BYTES + 2 * page
    if is_packed:
        size = int(part.ring_size_in_bytes)
        yield _Queue(int(part.vring.desc), size, by_dma, most)
        size = int(part.event_size_in_bytes)
        for event in (part.vring.driver, part.vring.device):
            yield _Queue(int(event), size, by_dma, page)
    else:
        size = int(part.queue_size_in_bytes)
        yield _Queue(int(part.vring.desc), size, by_dma, most)
    states = part.desc_state
    type_ = states.type_.type
    step = drgn.sizeof(type_) // 8
    words = reader.words(int(states), number * step)
    # Most drivers' ``data`` is a structure in a slab: slab pages keep their class.
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
