# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read parts of a report, and check that a breakdown sums to the total."""

from msatools.memory.model import CgroupGroup, Check, MemstatReport, PageGroup

MOST_UNATTRIBUTED = 0.003
"""Largest share of managed memory that may be unattributed."""


def view(report: MemstatReport, name: str) -> tuple[PageGroup, ...]:
    """Return the groups of a view that the report has."""
    assert report.by is not None
    return report.by[name]


def pages_of(report: MemstatReport) -> dict[str, int]:
    """Return the pages of each class."""
    return {count.name: count.pages for count in report.classes}


def check_of(report: MemstatReport, name: str) -> Check:
    (found,) = (check for check in report.checks if check.name == name)
    return found


def summed(groups: tuple[PageGroup, ...]) -> dict[str, int]:
    """Sum groups up by class."""
    sums: dict[str, int] = {}
    for group in groups:
        for name, pages in group.classes.items():
            sums[name] = sums.get(name, 0) + pages
    return sums


def _on_swap(group: PageGroup) -> int:
    swap = group.swap_pages if isinstance(group, CgroupGroup) else None
    return swap or 0


def check(report: MemstatReport, name: str) -> tuple[PageGroup, ...]:
    """Check that the groups of a view sum to the classes; return them."""
    groups = view(report, name)
    assert all(g.pages == sum(g.classes.values()) for g in groups)
    # Control groups come from the kernel's tree, and may have nothing.
    assert all(g.pages > 0 or isinstance(g, CgroupGroup) for g in groups)
    pages = pages_of(report)
    assert summed(groups) == {key: pages[key] for key in summed(groups)}
    assert sum(group.pages for group in groups) == report.pages
    assert len({group.key for group in groups}) == len(groups)
    sizes = [group.pages + _on_swap(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    return groups
