# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory whose struct pages lie on itself: fixtures/lab/guest/fielddevices.py."""

import io
import json
import re
from contextlib import redirect_stdout

import pytest
from msatools.commands.whatis import COMMAND

from fixtures import lab
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program import TargetSpec, open_target

from . import sums

PAGE = 4096
SECTION = 128 << 20
STRUCT_PAGE = 64
ONLINE, OFFLINE = 2, 1
"""Blocks of plugged memory, as the guest left them."""

KERNELS = ("6.1", "6.12", "7.x")


@pytest.fixture(scope="module", params=KERNELS)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"fielddevices-{request.param}")


@pytest.fixture(scope="module")
def report(run: lab.Run) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    by = ("zone", "section", "node")
    return collect_memstat(opened.prog, target=opened.target, by=by, sections=True)


def test_every_sum_is_the_kernel_s(report: MemstatReport) -> None:
    wrong = [c for c in report.checks if c.difference and c.explained_by is None]
    assert not wrong
    assert not report.notes


def test_a_namespace_is_a_device_s_to_its_first_page(
    run: lab.Run, report: MemstatReport
) -> None:
    """Those of its struct pages that describe the others are not initialised."""
    namespace = run.workload["namespace"]
    assert namespace["data_resource"] > namespace["resource"]
    pages = namespace["size"] // PAGE
    assert sums.pages_of(report)["device"] == pages
    (zone,) = (g for g in sums.view(report, "zone") if g.classes.get("device"))
    assert zone.name == "Node 0, zone Device"
    assert zone.pages == pages


def test_zones_have_names(report: MemstatReport) -> None:
    for view in ("section", "zone"):
        groups = sums.view(report, view)
        assert sum(group.pages for group in groups) == report.pages
    names = {g.name.removeprefix("Node 0, ") for g in sums.view(report, "zone")}
    known = {"zone DMA", "zone DMA32", "zone Movable", "zone Device", "in no zone"}
    assert {"zone DMA", "zone DMA32", "zone Movable", "zone Device"} <= names <= known


def test_parts_of_sections(run: lab.Run, report: MemstatReport) -> None:
    """A section of which only a part, in units of 2 MiB, has struct pages."""
    namespace = run.workload["namespace"]
    assert report.sections is not None
    first = namespace["resource"] // SECTION
    (section,) = (s for s in report.sections if s.nr == first)
    inside = (first + 1) * SECTION - namespace["resource"]
    assert inside < SECTION
    assert section.pages == inside // PAGE
    assert section.pfn == namespace["resource"] // PAGE
    assert (section.state, section.zones) == ("device", ("Device",))
    # The next has the rest of the namespace, and memory.
    (mixed,) = (s for s in report.sections if s.nr == first + 1)
    assert mixed.state == "online"
    assert "Device" in mixed.zones
    assert len(mixed.zones) == 2


def test_plugged_memory_that_has_its_own_memmap(
    run: lab.Run, report: MemstatReport
) -> None:
    assert run.workload["memmap_on_memory"] in ("Y", "force")
    blocks = run.workload["plugged"]
    assert len(blocks) == ONLINE + OFFLINE
    each = run.workload["block_bytes"] // PAGE
    hosted = ONLINE * each * STRUCT_PAGE // PAGE
    (movable,) = (g for g in sums.view(report, "zone") if "Movable" in g.name)
    assert movable.pages == ONLINE * each
    assert movable.classes["reserved"] == hosted
    # Of a part of a section the struct pages lie elsewhere (vmemmap_populate()).
    namespace = run.workload["namespace"]
    inside = SECTION - namespace["resource"] % SECTION
    elsewhere = inside // PAGE * STRUCT_PAGE // PAGE
    assert sums.pages_of(report)["kernel.memmap"] == elsewhere
    assert report.coverage["offline_pages"] == OFFLINE * each
    total = re.search(r"^MemTotal: +(\d+)", run.truth("proc/meminfo").decode())
    assert total is not None
    assert report.managed_pages == int(total[1]) * 1024 // PAGE


def test_what_an_unloaded_module_left(run: lab.Run) -> None:
    """Its objects, by the name of the module that was unloaded last."""
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    report = collect_memstat(opened.prog, target=opened.target, leaks=True)
    assert report.leaks is not None
    gone = f"{run.workload['gone']}? (unloaded)"
    (left,) = (leak for leak in report.leaks if leak.module == gone)
    assert left.confidence == "evidence"
    assert left.cache is not None
    assert left.objects is not None
    assert left.objects >= 160_000


def test_whatis_knows_the_first_page_of_a_namespace(run: lab.Run) -> None:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    pfn = run.workload["namespace"]["resource"] // PAGE
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, prog, ["--json", f"pfn:{pfn}"])
    (answer,) = json.loads(out.getvalue())["answers"]
    assert answer["page"]["class"] == "device"
