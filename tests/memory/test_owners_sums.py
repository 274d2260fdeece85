# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whatever pages are told apart by, all of them together are those of the table."""

import pytest

from msatools.memory.model import Group, MemstatReport

from .conftest import BY_OWNER


def check(report: MemstatReport, view: str) -> tuple[Group, ...]:
    assert report.by is not None
    groups = report.by[view]
    sums: dict[str, int] = {}
    for group in groups:
        assert group.pages == sum(group.classes.values()) > 0
        for name, pages in group.classes.items():
            sums[name] = sums.get(name, 0) + pages
    expected = {count.name: count.pages for count in report.classes if count.pages}
    assert {name: pages for name, pages in sums.items() if pages} == expected
    assert len({group.key for group in groups}) == len(groups)
    sizes = [group.pages for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    return groups


@pytest.mark.parametrize("view", BY_OWNER)
def test_groups_sum_to_the_table(owners_report: MemstatReport, view: str) -> None:
    (rest,) = (group for group in check(owners_report, view) if group.key == "-")
    assert rest.name


@pytest.mark.parametrize("view", BY_OWNER)
def test_groups_of_all_kinds_of_memory(by_owner: MemstatReport, view: str) -> None:
    """Huge pages, swap and NUMA nodes among them."""
    check(by_owner, view)


def test_nothing_is_lost(by_owner: MemstatReport, owners_report: MemstatReport) -> None:
    for report in (by_owner, owners_report):
        assert report.coverage["names_unreadable"] == 0
        assert [note.code for note in report.notes] == ["slab-charges"]
