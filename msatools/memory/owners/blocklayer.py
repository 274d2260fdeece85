# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages that the block layer's requests are in (block/blk-mq.c)."""

from collections.abc import Iterator
from itertools import islice

import drgn
import numpy as np
from drgn.helpers.linux.block import for_each_disk
from drgn.helpers.linux.xarray import xa_for_each

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.walks import list_nodes
from msatools.memory.owners.blocks import NO_PFNS, Pfns, pages_of_blocks
from msatools.memory.pages.layout import PageLayout
from msatools.selfdesc.find import ask_each, find_type, offset_of

_MAX_DISKS = 1 << 12
_MAX_QUEUES = 1 << 12


def request_pages(reader: Reader, layout: PageLayout, losses: LossLog) -> Pfns:
    """Return the pfns of the requests of all disks, of drivers and of schedulers.

    Requests are made for a whole set of tags in advance, in the largest blocks that can
    be had.
    """
    prog = reader.prog
    type_ = find_type(prog, "struct blk_mq_tags")
    head = offset_of(type_, "page_list")
    seen: set[int] = set()
    parts = [NO_PFNS]
    for tags in _tags(prog, losses):
        if not tags or tags in seen:
            continue
        seen.add(tags)
        nodes = list_nodes(reader, tags + head, losses, "a list of requests' pages")
        pages = nodes - np.uint64(layout.lru)
        records, readable = reader.read_records(pages, layout.size)
        losses.lose(Loss.REQUESTS, count=int(np.count_nonzero(~readable)))
        # The order is kept in page->private.
        orders = column(records, layout.private)[readable].astype(np.int64)
        base = np.uint64(vmemmap_base(prog))
        pfns = (pages[readable] - base) // np.uint64(layout.size)
        parts.append(pages_of_blocks(pfns, orders))
    return np.concatenate(parts)


def _tags(prog: drgn.Program, losses: LossLog) -> Iterator[int]:
    """Yield the address of each ``struct blk_mq_tags``, some several times."""
    for disk in islice(ask_each(for_each_disk, prog), _MAX_DISKS):
        try:
            queue = disk.queue
            if not queue.tag_set:
                continue  # bios alone, as the device mapper's
            sets = queue.tag_set
            count = min(int(sets.nr_hw_queues), _MAX_QUEUES)
            yield from (int(sets.tags[number]) for number in range(count))
            for context in islice(_contexts(queue), _MAX_QUEUES):
                yield int(context.sched_tags)
        except UNREADABLE as error:
            losses.lose(Loss.REQUESTS, f"the requests of a disk are lost: {error}")


def _contexts(queue: drgn.Object) -> Iterator[drgn.Object]:
    # "blk-mq: manage hctx map via xarray" (in v5.18), and "blk-mq: use array manage
    # hctx map instead of xarray" (in v6.19) back
    try:
        table = queue.hctx_table.address_of_()
    except AttributeError:
        for number in range(int(queue.nr_hw_queues)):
            yield queue.queue_hw_ctx[number]
        return
    for _, entry in ask_each(xa_for_each, table):
        yield drgn.cast("struct blk_mq_hw_ctx *", entry)
