# SPDX-License-Identifier: LGPL-2.1-or-later

"""A view gets the same classes as the table."""

import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from drgn import Program
from msatools.commands.memstat import COMMAND

from msatools.memory import breakdowns as by
from msatools.memory.classes import CLASSES
from msatools.memory.classify import Block
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport, PageGroup
from msatools.memory.owners import ScanContext

from .sums import view


class ClassCounts:
    """Counts the pages of each class, and records the order of blocks."""

    def __init__(self) -> None:
        self.pages: Counter[int] = Counter()
        self.pfns: list[int] = []

    def observe(self, block: Block) -> None:
        codes, counts = np.unique(block.codes, return_counts=True)
        self.pages.update(dict(zip(codes.tolist(), counts.tolist(), strict=True)))
        self.pfns.append(block.pfn)

    def merge(self, later: "ClassCounts") -> None:
        self.pages.update(later.pages)
        self.pfns += later.pfns


class CountsView:
    """A view with one group of all pages."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = ClassCounts()

    def groups(self) -> tuple[PageGroup, ...]:
        pages = self.observer.pages
        assert self.observer.pfns == sorted(self.observer.pfns)
        classes = {name: pages[code] for code, name in CLASSES.items()}
        return (PageGroup("all", "all", pages.total(), classes),)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, prog: Program) -> MemstatReport:
    monkeypatch.setitem(by.VIEWS, "counts", "counts.CountsView")
    module = SimpleNamespace(CountsView=CountsView)
    monkeypatch.setitem(sys.modules, "msatools.memory.counts", module)
    return collect_memstat(prog, by=("counts",))


def test_view_gets_the_classes_of_the_table(
    counted: MemstatReport, report: MemstatReport, pages: dict[str, int]
) -> None:
    (group,) = view(counted, "counts")
    assert group.classes == pages
    assert counted.classes == report.classes
    assert counted.checks == report.checks
    assert counted.notes == report.notes


def test_by_accepts_all_views() -> None:
    argument = next(a for a in COMMAND.arguments if "--by" in getattr(a, "args", ()))
    words = set(argument.kwargs["type"](",".join(["node", "zone", *by.VIEWS])))
    assert words == {"node", "zone", *by.VIEWS}
