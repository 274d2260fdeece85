# SPDX-License-Identifier: LGPL-2.1-or-later

"""The groups of every view sum to the table of classes, and these to the counters."""

import pytest

from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from tests.support.dumps import open_dump

from .conftest import BY_OWNER, FIELD_KERNELS
from .sums import MOST_UNATTRIBUTED, check, pages_of

FIELD = ("fieldballoon", "fielddevices", "fielddmabuf", "fieldpages")
"""Guests with memory that only its users know."""


@pytest.mark.parametrize("view", BY_OWNER)
def test_groups_sum_to_the_table(
    owners_report: MemstatReport, by_owner: MemstatReport, view: str
) -> None:
    """Of the owners scenario, and of that with huge pages, swap and NUMA nodes."""
    for report in (owners_report, by_owner):
        (rest,) = (group for group in check(report, view) if group.key == "-")
        assert rest.name
        assert report.coverage["names_unreadable"] == 0
        assert [note.code for note in report.notes] == ["slab-charges"]


@pytest.mark.parametrize("kernel", FIELD_KERNELS)
@pytest.mark.parametrize("scenario", FIELD)
def test_counters(scenario: str, kernel: str) -> None:
    report = collect_memstat(open_dump(f"{scenario}-{kernel}", "btf"))
    assert not [c for c in report.checks if c.difference and c.explained_by is None]
    if scenario != "fielddevices":
        assert report.managed_pages
        left = pages_of(report)["kernel.unattributed"]
        assert left <= MOST_UNATTRIBUTED * report.managed_pages
