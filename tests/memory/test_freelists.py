# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-CPU lists of free pages, which change between the scan and the look at them."""

import numpy as np
import pytest

from msatools.memory.classes import PageClass
from msatools.memory.freelists import PcpList, PcpLists, settle_pcp
from msatools.memory.scan import NCLASSES, CachePages, FreeCandidates, ScanResult

HEAD = 1
KEY = 0
CODE = PageClass.UNATTRIBUTED


def scanned(*lists: list[int]) -> ScanResult:
    """What a scan found: the nodes of each list in order, which begin with its head."""
    links = [
        (node, after, before)
        for nodes in lists
        for before, node, after in zip(
            nodes, nodes[1:], [*nodes[2:], nodes[0]], strict=False
        )
    ]
    columns = [np.array(column, np.uint64) for column in zip(*links, strict=True)]
    counts = np.zeros(NCLASSES, np.int64)
    counts[CODE] = 1000
    count = len(links)
    candidates = FreeCandidates(
        *([column] for column in columns),
        [np.full(count, CODE, np.uint8)],
        [np.full(count, KEY, np.int64)],
    )
    return ScanResult({KEY: counts}, CachePages(), candidates)


def settled(result: ScanResult, *lists: PcpList) -> tuple[int, int]:
    pages, broken = settle_pcp(result, PcpLists([*lists], None))
    assert result.totals()[PageClass.FREE_PCP] == pages
    assert result.totals()[CODE] == 1000 - pages
    return pages, broken


def test_whole_list() -> None:
    result = scanned([HEAD, 10, 11, 12])
    assert settled(result, PcpList(HEAD, 10, 12, order=2)) == (12, 0)


@pytest.mark.parametrize("first", [99, 11])
def test_front_that_has_changed(first: int) -> None:
    """One more page has come since, or one has gone: the others are found."""
    result = scanned([HEAD, 10, 11, 12, 13])
    if first == 99:
        # Behind the head no page is that was not there.
        assert settled(result, PcpList(HEAD, first, 13, order=0)) == (4, 0)
    else:
        assert settled(result, PcpList(HEAD, first, 13, order=0)) == (3, 0)


def test_middle_that_is_lost() -> None:
    """What is on this side of it, and on the other."""
    result = scanned([HEAD, 10, 11, 50], [51, 12, 13])
    # The second part ends at the head, its first is after what is lost.
    result.candidates.nexts[0][-1] = HEAD
    result.candidates.nexts[0][2] = 60
    assert settled(result, PcpList(HEAD, 10, 13, order=0)) == (5, 1)


def test_circle_ends() -> None:
    result = scanned([HEAD, 10, 11, 12])
    result.candidates.nexts[0][-1] = 10
    result.candidates.prevs[0][0] = 12
    assert settled(result, PcpList(HEAD, 10, 12, order=0)) == (3, 1)


def test_page_is_counted_once() -> None:
    result = scanned([HEAD, 10, 11, 12])
    twice = PcpList(HEAD, 10, 12, order=0)
    assert settled(result, twice, twice) == (3, 1)
