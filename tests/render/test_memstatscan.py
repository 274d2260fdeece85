# SPDX-License-Identifier: LGPL-2.1-or-later

"""What memstat says of its scan, and of what changed meanwhile."""

import io
from dataclasses import replace

import pytest

from msatools.memory.classes import CLASSES
from msatools.memory.model import Changes, MemstatReport
from msatools.render import show
from msatools.render.memstat import blocks
from tests.memory.madereports import TARGET, report

DUMP = replace(
    report(dict.fromkeys(CLASSES.values(), 0) | {"user.anon": 5}),
    coverage=dict.fromkeys(
        ("excluded_pages", "unreadable_pages", "memmap_reads", "offline_pages"), 0
    )
    | {"section_table_lost": 0},
    scan_ns=12_345_678,
)
CHANGES = Changes(
    allocated_pages=1234,
    freed_pages=1100,
    reread_pages=16384,
    changed_pages=20,
    changed_folios=6,
    about_folios=190,
)
LIVE = replace(DUMP, target=replace(TARGET, kind="kcore", live=True), changes=CHANGES)


def scanned(made: MemstatReport) -> list[str]:
    """The lines that tell of the scan."""
    out = io.StringIO()
    show(blocks(made), out)
    return [line for line in out.getvalue().splitlines() if "scanned" in line]


def test_live() -> None:
    assert scanned(LIVE) == [
        "scanned in 12ms, 1,234 pages allocated and 1,100 freed meanwhile; "
        "about 190 folios changed under it, by 6 in 16,384 pages read again"
    ]


def test_nothing_seen_to_change() -> None:
    quiet = replace(CHANGES, changed_pages=0, changed_folios=0, about_folios=0)
    (line,) = scanned(replace(LIVE, changes=quiet))
    assert line.endswith(" meanwhile; no folio changed in 16,384 pages read again")


def test_kernel_that_counts_nothing() -> None:
    uncounted = replace(CHANGES, allocated_pages=None, freed_pages=None)
    (line,) = scanned(replace(LIVE, changes=uncounted))
    assert line.startswith("scanned in 12ms; about 190 folios changed ")


def test_nothing_could_be_read_again() -> None:
    gone = replace(CHANGES, reread_pages=0, changed_folios=0, about_folios=None)
    (line,) = scanned(replace(LIVE, changes=gone))
    assert line.endswith(" meanwhile")


@pytest.mark.parametrize("verbose", [False, True])
def test_dump(verbose: bool) -> None:
    """Where nothing changes it is a detail."""
    lines = scanned(replace(DUMP, vmalloc=() if verbose else None))
    assert lines == (["scanned in 12ms"] if verbose else [])
