# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory whose struct pages lie on itself: fixtures/lab/guest/fielddevices.py."""

import re

import pytest
from drgn import Program

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from tests.support.prompt import reported

from . import sums

SCENARIO = "fielddevices"
PAGE = 4096
SECTION = 128 << 20
STRUCT_PAGE = 64
ONLINE, OFFLINE = 2, 1
"""Blocks of plugged memory, as the guest left them."""


@pytest.fixture(scope="module")
def report(field_prog: Program) -> MemstatReport:
    by = ("zone", "section", "node")
    return collect_memstat(field_prog, by=by, sections=True)


def test_a_namespace_is_a_device_s_to_its_first_page(
    field_run: lab.Run, report: MemstatReport
) -> None:
    """Those of its struct pages that describe the others are not initialised."""
    namespace = field_run.workload["namespace"]
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


def test_parts_of_sections(field_run: lab.Run, report: MemstatReport) -> None:
    """A section of which only a part, in units of 2 MiB, has struct pages."""
    namespace = field_run.workload["namespace"]
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
    field_run: lab.Run, report: MemstatReport
) -> None:
    assert field_run.workload["memmap_on_memory"] in ("Y", "force")
    blocks = field_run.workload["plugged"]
    assert len(blocks) == ONLINE + OFFLINE
    each = field_run.workload["block_bytes"] // PAGE
    hosted = ONLINE * each * STRUCT_PAGE // PAGE
    (movable,) = (g for g in sums.view(report, "zone") if "Movable" in g.name)
    assert movable.pages == ONLINE * each
    assert movable.classes["reserved"] == hosted
    # Of a part of a section the struct pages lie elsewhere (vmemmap_populate()).
    namespace = field_run.workload["namespace"]
    inside = SECTION - namespace["resource"] % SECTION
    elsewhere = inside // PAGE * STRUCT_PAGE // PAGE
    assert sums.pages_of(report)["kernel.memmap"] == elsewhere
    assert report.coverage["offline_pages"] == OFFLINE * each
    total = re.search(r"^MemTotal: +(\d+)", field_run.truth("proc/meminfo").decode())
    assert total is not None
    assert report.managed_pages == int(total[1]) * 1024 // PAGE


def test_what_an_unloaded_module_left(field_run: lab.Run, field_prog: Program) -> None:
    """Its objects, by the name of the module that was unloaded last."""
    gone = f"{field_run.workload['gone']}? (unloaded)"
    leaks = collect_memstat(field_prog, leaks=True).leaks or ()
    (left,) = (leak for leak in leaks if leak.module == gone)
    assert left.confidence == "evidence"
    assert left.cache is not None
    assert left.objects is not None
    assert left.objects >= 160_000


def test_whatis_knows_the_first_page_of_a_namespace(
    field_run: lab.Run, field_prog: Program
) -> None:
    pfn = field_run.workload["namespace"]["resource"] // PAGE
    (answer,) = reported(field_prog, "whatis", f"pfn:{pfn}")["answers"]
    assert answer["page"]["class"] == "device"
