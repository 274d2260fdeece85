# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each break-down of memory promises: its groups are those of the table."""

from msatools.memory.model import Group, MemstatReport


def check(report: MemstatReport, view: str) -> tuple[Group, ...]:
    """Hold the groups of a view against the classes, and return them."""
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
