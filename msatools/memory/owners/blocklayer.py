# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages that the block layer's requests are in (block/blk-mq.c)."""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.enums import constant
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.walks import list_nodes
from msatools.kernel.words import U64
from msatools.memory.owners.blocks import (
    NO_PFNS,
    Pfns,
    driver_type,
    pages_of_blocks,
)
from msatools.memory.pages.layout import PageLayout
from msatools.selfdesc.find import (
    drgn_lookups,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

_MAX_QUEUES = 1 << 16
"""Upper bound of the hardware queues of all devices."""


def request_pages(reader: Reader, layout: PageLayout, losses: LossLog) -> Pfns:
    """Return the pfns of the requests of all queues, of drivers and of schedulers.

    Requests are made for a whole set of tags in advance, in the largest blocks that can
    be had.
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
        parts.append(pages_of_blocks(pfns, orders))
    return np.concatenate(parts)


class HardwareQueues(Struct, frozen=True):
    """What the hardware queues of all disks lead to."""

    tags: set[int]
    """Addresses of ``struct blk_mq_tags``."""

    nvme: tuple[drgn.Object, ...]
    """The ``struct nvme_dev`` of each NVMe controller on PCI."""


def hardware_queues(reader: Reader, losses: LossLog) -> HardwareQueues:
    """Read all hardware queues, once per reader.

    Every hardware queue is told when a CPU goes: it is an instance of that state
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
    except UNREADABLE as error:
        losses.lose(Loss.REQUESTS, f"cannot read hardware queues: {error}")
    controllers = []
    with suppress(MissingError):
        for device, tags in _nvme(prog, queues):
            found.update(tags)
            if device is not None:
                controllers.append(device)
    return HardwareQueues(found, tuple(controllers))


def _nvme(
    prog: drgn.Program, queues: set[int]
) -> Iterator[tuple[drgn.Object | None, list[int]]]:
    """Yield each NVMe controller, if it is on PCI, and the tags for its disks: one
    without disks has no queue of them, but requests (drivers/nvme/host/core.c).

    :param queues: Addresses of all ``struct request_queue``, those for administration
        as well.
    """
    for address in sorted(queues):
        try:
            with drgn_lookups:
                owned = drgn.Object(prog, "struct request_queue", address=address)
                admin = owned.tag_set
                if not admin or not admin.driver_data:
                    continue
                data = int(admin.driver_data)
                device = _nvme_device(prog, int(admin), data)
                tags = (
                    _nvme_set(prog, int(admin), data)
                    if device is None
                    else device.tagset
                )
                number = min(int(tags.nr_hw_queues), _MAX_QUEUES)
                each = [int(tags.tags[at]) for at in range(number)]
                yield device, [one for one in each if one]
        except UNREADABLE:
            continue  # what another driver has there


def _nvme_set(prog: drgn.Program, admin: int, data: int) -> drgn.Object:
    """Return the ``struct blk_mq_tag_set`` for disks beside that for administration, of
    a controller that is not on PCI.

    :param data: What the latter has as ``driver_data``.
    :raises FaultError: if it is another driver's, which has other data there
    """
    type_ = driver_type(prog, "nvme_ctrl", "nvme_core")
    controller = drgn.Object(prog, type_, address=data)
    if int(controller.admin_tagset) != admin:
        raise drgn.FaultError("not of NVMe", data)
    return controller.tagset


def _nvme_device(prog: drgn.Program, admin: int, data: int) -> drgn.Object | None:
    """Return the ``struct nvme_dev`` of a controller; ``None`` if it is not on PCI."""
    with suppress(*UNREADABLE, MissingError):
        type_ = driver_type(prog, "nvme_dev", "nvme")
        # What the driver has there: the structure itself on 6.1, its part on 6.12.
        for start in (data, data - offset_of(type_, "ctrl")):
            device = drgn.Object(prog, type_, address=start)
            if int(device.admin_tagset.address_of_()) == admin:
                return device
    return None
