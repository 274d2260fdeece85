# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts pages by the order of their block (``--by order``)."""

from msatools.kernel.report import LossLog
from msatools.memory.by.groups import PageGroup
from msatools.memory.pages.counting import Counts, named
from msatools.memory.pages.orders import NO_ORDER, ByOrder
from msatools.memory.scan.context import ScanContext
from msatools.memory.scan.freelists import listed_pages, pcp_lists


class OrderGroup(PageGroup, frozen=True):
    """The pages in free blocks and compound pages of one order."""

    blocks: int | None
    """
    Number of blocks.

    ``None`` for memory that was never in the allocator, or is not in the dump.
    """


class OrderView:
    """Groups by order, the lowest first."""

    def __init__(self, context: ScanContext) -> None:
        # Losses are counted when the classes are settled, not here.
        pcp = pcp_lists(context.reader, list(context.zones.values()), LossLog())
        listed = listed_pages(context.reader, context.layout, pcp)
        large = listed.orders > 0
        self.observer = ByOrder(listed.pfns[large], listed.orders[large])

    def groups(self) -> tuple[OrderGroup, ...]:
        rows = enumerate(self.observer.total())
        return tuple(_group(order, counts) for order, counts in rows if counts.any())


def _group(order: int, counts: Counts) -> OrderGroup:
    pages = int(counts.sum())
    if order == NO_ORDER:
        name = "no order: reserved, or not in the dump"
        return OrderGroup("-", name, pages, named(counts), None)
    name = f"order {order}"
    return OrderGroup(str(order), name, pages, named(counts), pages >> order)
