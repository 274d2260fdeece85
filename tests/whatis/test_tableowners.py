# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page tables: whose they are, and what they map."""

from random import Random
from typing import Any

import numpy as np
import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.mm import follow_pfn
from drgn.helpers.linux.pid import find_task

from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.memory.classes import PageClass
from msatools.program.arch import table_format
from msatools.whatis import processes
from msatools.whatis.lookup import Lookup
from msatools.whatis.pages import Pages
from msatools.whatis.processes import TableOwners
from tests.support.dumps import open_dump
from tests.support.prompt import reported

DUMPS = ["memory-6.12", "memory-6.1", "memory-6.12arm64"]
COUNT = 150
PAGE, HUGE = 1 << 12, 1 << 21

each_dump = pytest.mark.parametrize("dump", DUMPS)


def lookup(prog: Program) -> Lookup:
    reader, losses = Reader(prog), LossLog()
    return Lookup(reader, read_clocks(reader, losses), losses)


def page_tables(prog: Program) -> list[int]:
    """Return the pfns of all pages that their struct pages mark as page tables."""
    found = lookup(prog)
    pages, pfns = Pages(found), []
    for part in found.memmap:
        for first in range(part.pfn, part.pfn + part.pages, 1 << 10):
            block = pages._block(part, first)
            rows = np.flatnonzero(block.codes == PageClass.PAGE_TABLES)
            pfns += (block.pfn + rows).tolist()
    return pfns


def ask(prog: Program, pfns: list[int]) -> list[Any]:
    answers = reported(prog, "whatis", *(f"pfn:{pfn}" for pfn in pfns))["answers"]
    return [answer["page"] for answer in answers]


@each_dump
def test_whose_page_tables_they_are(dump: str) -> None:
    """What a table's entries map is what drgn finds at these addresses."""
    plain, prog = open_dump(dump, "btf"), open_dump(dump, "dwarf")
    form = table_format(plain)
    assert form is not None
    chance = Random(7)
    pfns = page_tables(plain)
    known = checked = sparse = 0
    for page in ask(plain, pfns):
        assert page["class"] == "kernel.page_tables"
        if "table_owners" not in page:
            # Such as one that is kept for when a huge page is split.
            assert page["owner"] is None
            continue
        (owner,) = page["table_owners"]
        known += 1
        start = int(owner["start"], 16)
        text = f"{owner['pid']} ({owner['comm']}), for "
        assert page["owner"].startswith(text)
        assert page["owner"].endswith(f" at {start:#x}")
        if owner["bytes"] != HUGE:
            assert owner["bytes"] in (1 << 30, 1 << 39)
            continue
        sparse += owner["comm"] == "pagetables"
        entries = Reader(plain).words(page["pfn"] * PAGE, 512, physical=True)
        mapped = np.flatnonzero(form.present_of(entries)).tolist()
        if not mapped or checked == COUNT:
            continue
        checked += 1
        index = chance.choice(mapped)
        mm = find_task(prog, owner["pid"]).mm
        pfn = follow_pfn(mm, start + index * PAGE).value_()
        assert pfn == int(form.user_pfns(entries[[index]])[0])
    assert known > 0.95 * len(pfns)
    assert checked == COUNT
    # The guest maps a page in each 2 MiB of 1 GiB.
    assert sparse >= 512


@each_dump
def test_top_level_tables(dump: str) -> None:
    plain, prog = open_dump(dump, "btf"), open_dump(dump, "dwarf")
    found = lookup(plain)
    assert found.tables is not None
    tops = {}
    for pid in found.tasks["pid"].tolist():
        mm = find_task(prog, pid).mm
        if mm:
            pfn = found.tables.pfn(mm.pgd.value_())
            assert pfn is not None
            tops.setdefault(pfn, set()).add(pid)
    asked = ask(plain, [*tops])
    for page, pids in zip(asked, tops.values(), strict=True):
        if page["class"] == "kernel.slab":
            # On arm64 it may be smaller than a page.
            assert "table_owners" not in page
            continue
        (owner,) = page["table_owners"]
        assert owner["pid"] in pids
        assert (int(owner["start"], 16), page["class"]) == (
            0,
            "kernel.page_tables_own",
        )


def test_too_many_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    prog = open_dump("memory-6.12", "btf")
    pfns = page_tables(prog)
    monkeypatch.setattr(processes, "_MAX_READ", 50)
    found = lookup(prog)
    owners = TableOwners(found)
    known = [pfn for pfn in pfns if owners.of(pfn)]
    assert 0 < len(known) < len(pfns) // 2
    assert found.losses.coverage[Loss.USER_TABLES.value] > 0
    (note,) = found.losses.notes.values()
    assert note.text == "only 50 page tables are read to find the process of one"


@pytest.mark.parametrize("kind", ["garbage", "itself", "lost"])
def test_tables_that_are_damaged(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows by them, and each is counted."""
    prog = open_dump("memory-6.12", "btf")
    found = lookup(prog)
    owners = TableOwners(found)
    tops = owners._levels[0].tables.tolist()
    whole = [len(level.tables) for level in owners._levels]
    found, damaged = lookup(prog), tops[3]
    read = found.reader.words
    chance = np.random.default_rng(7)

    def words(address: int, count: int, *, physical: bool = False) -> Any:
        if address != damaged:
            return read(address, count, physical=physical)
        if kind == "lost":
            raise FaultError("not in the dump", address)
        if kind == "garbage":
            return chance.integers(0, 1 << 64, count, np.uint64)
        return np.full(count, damaged | 1, np.uint64)

    monkeypatch.setattr(found.reader, "words", words)
    owners = TableOwners(found)
    sizes = [len(level.tables) for level in owners._levels]
    if kind == "itself":
        assert sizes[-1] <= whole[-1] + 1
        return
    assert sizes[-1] < whole[-1]
    assert found.losses.coverage[Loss.USER_TABLES.value] == 1
