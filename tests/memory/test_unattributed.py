# SPDX-License-Identifier: LGPL-2.1-or-later

"""Unattributed pages: those that a module allocated, and blocks made by hand."""

import io
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from drgn import Program
from drgn.helpers.linux.module import for_each_module

from fixtures import lab
from msatools.memory import unattributed
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport, UnattributedGroup
from msatools.memory.unattributed import (
    OWNER,
    StackDepot,
)
from msatools.render.device import show
from msatools.render.memstat.breakdowns import unattributed_blocks
from tests.support.dumps import open_dump
from tests.support.overlay import lose, lose_page

from .sums import check_of, pages_of

PAGE = 4096
MODULE = "baremodule"
GUESSED = "kernel.large_kmalloc"
CLASS = "kernel.unattributed"


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def bare_run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"barepages-{request.param}")


def collected(prog: Program, **options: Any) -> MemstatReport:
    return collect_memstat(prog, unattributed=True, **options)


@pytest.fixture(scope="module")
def bare_report(bare_run: lab.Run) -> MemstatReport:
    return collected(open_dump(bare_run.name, "btf"))


@pytest.fixture
def damaged(bare_run: lab.Run) -> Program:
    return open_dump(bare_run.name, "btf")


def groups(report: MemstatReport) -> tuple[UnattributedGroup, ...]:
    assert report.unattributed is not None
    return report.unattributed


def sets(run: lab.Run) -> dict[str, dict[str, Any]]:
    return {made["name"]: made for made in run.workload["sets"]}


def like(
    report: MemstatReport, made: dict[str, Any], **more: object
) -> list[UnattributedGroup]:
    """Return the groups of blocks like a set that the module allocated."""
    wanted = {
        "class_name": GUESSED if made["compound"] else CLASS,
        "order": made["order"],
        "node": made["node"],
        **more,
    }
    return [
        group
        for group in groups(report)
        if all(getattr(group, name) == value for name, value in wanted.items())
    ]


def assert_sums(report: MemstatReport) -> None:
    """Check that the groups of each class sum to its pages."""
    for name in (CLASS, GUESSED):
        pages = sum(g.pages for g in groups(report) if g.class_name == name)
        assert pages == pages_of(report)[name]


def runs(made: dict[str, Any]) -> int:
    """Count the runs of consecutive pages in a set's blocks."""
    pages = sorted(
        first + page for first in made["pfns"] for page in range(1 << made["order"])
    )
    return 1 + sum(b != a + 1 for a, b in pairwise(pages))


@pytest.mark.parametrize(
    "name", ["singles", "elsewhere", "blocks", "large", "compounds"]
)
def test_pages_that_point_into_a_module(
    bare_run: lab.Run, bare_report: MemstatReport, name: str
) -> None:
    """The group has exactly the pages that the module allocated."""
    made = sets(bare_run)[name]
    (group,) = like(bare_report, made, owner=MODULE)
    assert group.content == "module"
    assert group.blocks == len(made["pfns"])
    assert group.pages == len(made["pfns"]) << made["order"]
    assert group.runs == runs(made)
    assert group.refcount == 1
    assert group.examples == tuple(sorted(made["pfns"])[:5])
    pointers = PAGE // 64 // 2 * len(made["pfns"])
    found = {(word.kind, word.name, word.owner): word.count for word in group.words}
    assert found == {
        ("module", f"{symbol} [{MODULE}]", MODULE): pointers
        for symbol in ("operations", "show")
    }


def test_pages_that_point_to_objects(
    bare_run: lab.Run, bare_report: MemstatReport
) -> None:
    made = sets(bare_run)["objects"]
    (group,) = like(bare_report, made, owner="baremodule_object")
    assert (group.content, group.blocks) == ("slab", len(made["pfns"]))
    (word,) = group.words
    assert word.count == PAGE // 64 * len(made["pfns"])


@pytest.mark.parametrize(("name", "content"), [("texts", "text"), ("zeros", "zeros")])
def test_pages_without_pointers(
    bare_run: lab.Run, bare_report: MemstatReport, name: str, content: str
) -> None:
    made = sets(bare_run)[name]
    (group,) = like(bare_report, made, content=content)
    assert group.owner is None
    # Other code can have allocated pages with the same contents.
    assert group.blocks is not None
    assert group.blocks >= len(made["pfns"])
    if content == "text":
        names = [word.name for word in group.words]
        assert len(names) == 5
        assert all(word.startswith("baremodule: text ") for word in names)


def test_groups_sum_to_their_classes(bare_report: MemstatReport) -> None:
    """Groups are sorted by class and size."""
    assert_sums(bare_report)
    assert min(pages_of(bare_report)[name] for name in (CLASS, GUESSED)) > 0
    found = [(g.class_name == GUESSED, -g.pages) for g in groups(bare_report)]
    assert found == sorted(found)
    assert found[0][0] is False
    assert found[-1][0] is True
    assert {group.stack for group in groups(bare_report)} == {None}
    assert bare_report.notes == ()


def shown(report: MemstatReport) -> str:
    out = io.StringIO()
    show(unattributed_blocks(groups(report), PAGE, None), out)
    return out.getvalue()


class SomeOwners:
    """Two stacks by the page frame number, of blocks that a module allocated."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self._made = made

    def owners(self, pfns: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        owners = np.zeros(len(pfns), OWNER)
        mine = np.isin(pfns, self._made["pfns"])
        owners["handle"][mine] = pfns[mine] // 8 % 2 + 1
        owners["order"][mine] = self._made["order"]
        owners["pid"][mine] = 70 + pfns[mine] % 2
        owners["comm"][mine] = b"insmod\x1b"
        return owners


def stack(depot: StackDepot, handle: int) -> tuple[str, ...]:
    return ("__alloc_pages", f"caller_{handle}")


def test_blocks_of_a_stack_are_one_group(
    bare_run: lab.Run, damaged: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are, whatever thread allocated them."""
    made = sets(bare_run)["blocks"]
    monkeypatch.setattr(unattributed.PageOwners, "of", lambda *_: SomeOwners(made))
    monkeypatch.setattr(unattributed.StackDepot, "stack", stack)
    report = collected(damaged)
    found = {group.stack: group for group in groups(report) if group.stack}
    numbers = Counter(pfn // 8 % 2 + 1 for pfn in made["pfns"])
    assert {stack: group.blocks for stack, group in found.items()} == {
        ("__alloc_pages", f"caller_{number}"): count
        for number, count in numbers.items()
    }
    for group in found.values():
        assert (group.content, group.owner) == ("module", MODULE)
        assert group.order == made["order"]
        assert group.allocators is not None
        assert {thread.pid for thread in group.allocators} <= {70, 71}
        assert sum(thread.pages for thread in group.allocators) == group.pages
    assert_sums(report)
    lines = shown(report)
    assert "was allocated by 7" in lines
    assert "insmod\\x1b" in lines
    assert f"__alloc_pages < caller_{min(numbers)}" in lines


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
@pytest.mark.parametrize("scenario", ["barepages", "owners"])
def test_types_and_workers_make_no_difference(scenario: str, kernel: str) -> None:
    """Symbols of DWARF make no difference either."""
    name = f"{scenario}-{kernel}"
    with_btf = collected(open_dump(name, "btf"), workers=2)
    with_dwarf = collected(open_dump(name, "dwarf"), workers=1)
    assert groups(with_btf) == groups(with_dwarf)
    assert_sums(with_btf)
    assert with_btf.notes == ()
    assert any(group.content == "symbol" for group in groups(with_btf))


def test_compound_pages_of_a_module_explain_the_slab_check(
    bare_run: lab.Run, bare_report: MemstatReport
) -> None:
    """They look like large kmallocs, but are in no slab counter."""
    made = sets(bare_run)["compounds"]
    check = check_of(bare_report, "kernel.slab")
    assert check.difference == len(made["pfns"]) << made["order"]
    assert check.explained_by == "drivers' compound pages look like large kmalloc"


# --- Limits and losses


def test_more_blocks_than_are_read(
    damaged: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unattributed, "MAX_LOOKED_INTO", 100)
    report = collected(damaged)
    (note,) = report.notes
    assert note.code == "not-all-contents"
    looked = [g for g in groups(report) if g.content != "not looked into"]
    assert sum(g.blocks or 0 for g in looked) == 100
    assert MODULE in {group.owner for group in looked}
    assert_sums(report)


def test_more_blocks_than_are_kept(
    damaged: Program, bare_report: MemstatReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unattributed, "MAX_KEPT", 500)
    report = collected(damaged)
    (left_out,) = (
        g for g in groups(report) if g.blocks is None and g.class_name == CLASS
    )
    assert left_out.content == "not looked into"
    assert_sums(report)
    assert report.classes == bare_report.classes


def test_contents_that_are_not_in_the_dump(bare_run: lab.Run, damaged: Program) -> None:
    made = sets(bare_run)["large"]
    lose(damaged, made["pfns"][0] * PAGE, PAGE, physical=True)
    report = collected(damaged)
    (readable,) = like(report, made, owner=MODULE)
    assert readable.blocks == len(made["pfns"]) - 1
    (gone,) = like(report, made, content="not in the dump")
    assert gone.examples == (made["pfns"][0],)
    assert gone.words == ()


def test_lost_symbols_of_the_module(bare_run: lab.Run, damaged: Program) -> None:
    """The module itself is still named."""
    modules = for_each_module(damaged)
    (module,) = (m for m in modules if m.name.string_() == MODULE.encode())
    lose_page(damaged, module.kallsyms.symtab.value_())
    report = collected(damaged)
    made = sets(bare_run)["singles"]
    (group,) = like(report, made, owner=MODULE)
    assert group.blocks == len(made["pfns"])
    assert [word.name for word in group.words] == [f"[{MODULE}]"]
    assert any(MODULE in note.text for note in report.notes)


def test_lost_records_of_ftrace(damaged: Program) -> None:
    before = pages_of(collected(damaged))["kernel.tracing"]
    lose_page(damaged, damaged["ftrace_pages_start"].value_())
    report = collected(damaged)
    assert any("ftrace" in note.text for note in report.notes)
    assert pages_of(report)["kernel.tracing"] < before - 100
