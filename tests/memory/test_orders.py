# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory by order, for struct pages made by hand and by the page flags of dumps."""

import re
from collections import Counter

import numpy as np
import pytest

from fixtures import lab
from msatools.memory.breakdowns import OrderGroup
from msatools.memory.classes import PageLayout
from msatools.memory.model import MemstatReport

from . import truth
from .madepages import Pages
from .sums import pages_of, summed, view

PAGES = 1024


@pytest.fixture
def pages(layout: PageLayout) -> Pages:
    return Pages(layout, PAGES)


def orders(cut_up: MemstatReport) -> dict[str, OrderGroup]:
    groups = view(cut_up, "order")
    found = {group.key: group for group in groups if isinstance(group, OrderGroup)}
    assert len(found) == len(groups)
    return found


def test_orders_sum_to_the_classes(
    cut_up: MemstatReport, report: MemstatReport
) -> None:
    assert cut_up.classes == report.classes
    assert summed(view(cut_up, "order")) == pages_of(report)
    for group in orders(cut_up).values():
        if group.key == "-":
            assert group.blocks is None
            assert re.match("no order", group.name)
        else:
            assert group.blocks is not None
            assert group.blocks << int(group.key) == group.pages


def test_compound_pages_by_order(run: lab.Run, cut_up: MemstatReport) -> None:
    flags = truth.page_flags(run)
    heads = np.flatnonzero(truth.having(flags, "COMPOUND_HEAD"))
    tails = truth.having(flags, "COMPOUND_TAIL")
    # A head's tails end at the first page that is not a tail.
    ends = np.flatnonzero(~tails)
    sizes = ends[np.searchsorted(ends, heads, side="right")] - heads
    expected: Counter[int] = Counter()
    for size in sizes.tolist():
        expected[size.bit_length() - 1] += size
    found = {
        int(key): group.pages - group.classes["free.buddy"] - group.classes["free.pcp"]
        for key, group in orders(cut_up).items()
        if key not in ("-", "0")
    }
    assert {order: pages for order, pages in found.items() if pages} == expected
