# SPDX-License-Identifier: LGPL-2.1-or-later

"""The groups of every view sum to the table of classes."""

import pytest

from msatools.memory.model import MemstatReport

from .conftest import BY_OWNER
from .sums import check


def assert_nothing_lost(report: MemstatReport) -> None:
    assert report.coverage["names_unreadable"] == 0
    assert [note.code for note in report.notes] == ["slab-charges"]


@pytest.mark.parametrize("view", BY_OWNER)
def test_groups_sum_to_the_table(owners_report: MemstatReport, view: str) -> None:
    (rest,) = (group for group in check(owners_report, view) if group.key == "-")
    assert rest.name
    assert_nothing_lost(owners_report)


@pytest.mark.parametrize("view", BY_OWNER)
def test_groups_of_all_kinds_of_memory(by_owner: MemstatReport, view: str) -> None:
    """The memory scenario has huge pages, swap and NUMA nodes."""
    check(by_owner, view)
    assert_nothing_lost(by_owner)
