# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every kind of owner has a number, and the first claim to a page wins."""

import numpy as np
import pytest
from drgn import Program

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.memory import owners
from msatools.memory.classes import PageClass, page_layout
from msatools.memory.memmap import memmap_ranges
from msatools.memory.owned_pages import PFN_BITS
from msatools.memory.owners import Owners, collect_owners
from tests.support.dumps import open_dump
from tests.support.overlay import put

NAME = "fielddevices-6.12"
"""Its plugged memory has its memmap on itself."""

HUGE = 512


@pytest.fixture
def prog() -> Program:
    lab.build(NAME)
    return open_dump(NAME, "btf")


def collect(prog: Program, losses: LossLog) -> Owners:
    reader, layout = Reader(prog), page_layout(prog)
    ranges = memmap_ranges(reader, layout, losses)
    return collect_owners(reader, layout, ranges, losses)


def test_plugged_memory_and_a_huge_zero_page(prog: Program) -> None:
    """Plugged memory has two claims more, the huge zero page one."""
    before = collect(prog, LossLog())
    pfn = int(before.pages().pfns[-1]) // HUGE * HUGE + HUGE
    folio = prog["vmemmap_base"].value_() + pfn * prog.type("struct page").size
    address = prog["huge_zero_folio"].address_
    assert address
    put(prog, address, folio.to_bytes(8, "little"))
    losses = LossLog()
    after = collect(prog, losses)
    assert not losses.lost
    assert len(after.owned) == len(before.owned) + 1 > 16
    found = after.pages()
    of_zeros = found.pfns[found.codes == PageClass.HUGE_ZERO]
    assert of_zeros.tolist() == [*range(pfn, pfn + HUGE)]
    codes = {PageClass.RESERVED, PageClass.MEMMAP} & {*found.codes.tolist()}
    assert len(codes) == 2


def test_the_first_claim_wins_up_to_the_last_number() -> None:
    claimed = Owners()
    last = owners._MAX_CLAIMS - 1
    for number in range(last + 1):
        claimed.claim(number % 200, np.array([7, 1000 + number], np.uint64))
    found = claimed.pages()
    assert found.pfns.tolist() == [7, *range(1000, 1001 + last)]
    assert found.codes.tolist() == [0, *(number % 200 for number in range(last + 1))]


def test_impossible_pfns_are_dropped() -> None:
    claimed = Owners()
    pfns = [1, (1 << PFN_BITS) - 1, 1 << PFN_BITS, (1 << 64) - 1]
    claimed.claim(PageClass.VMALLOC, np.array(pfns, np.uint64))
    assert claimed.pages().pfns.tolist() == pfns[:2]


def test_more_claims_than_numbers_are_lost(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = collect(prog, LossLog())
    monkeypatch.setattr(owners, "_MAX_CLAIMS", 3)
    losses = LossLog()
    found = collect(prog, losses)
    assert [code for code, _ in found.owned] == [code for code, _ in whole.owned][:3]
    # Each of the others costs one loss; the memmap's two claims are one kind.
    assert losses.lost[Loss.OWNERS.value] == len(whole.owned) - 3 - 1


def test_absurd_memmap_of_a_block_is_lost(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = LossLog()
    whole = owners.self_hosted_pages(Reader(prog), losses)
    assert len(whole)
    assert not losses.lost
    monkeypatch.setattr(owners, "_MOST_PAGES", 1)
    assert not len(owners.self_hosted_pages(Reader(prog), losses))
    assert losses.lost[Loss.OWNERS.value] > 0
