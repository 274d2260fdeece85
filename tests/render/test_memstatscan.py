# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-memstat shows about its scan, and about changes during it."""

from msgspec.structs import replace

from msatools.memory.classes import CLASSES
from msatools.memory.model import Check, MemstatReport, ScanChanges
from msatools.render.memstat.report import memstat_blocks as blocks
from tests.memory.madereports import TARGET, report
from tests.render.screens import printed
from tests.support.golden import Golden

COUNTED = ("excluded_pages", "unreadable_pages", "memmap_reads", "offline_pages")
DUMP = replace(
    report(dict.fromkeys(CLASSES.values(), 0) | {"user.anon": 5}),
    coverage=dict.fromkeys((*COUNTED, "section_table_lost"), 0),
    scan_ns=12_345_678,
)
CHANGES = ScanChanges(
    allocated_pages=1234,
    freed_pages=1100,
    reread_pages=16384,
    changed_pages=20,
    changed_folios=6,
    about_folios=190,
)


def live(**changes: int | None) -> MemstatReport:
    target = replace(TARGET, kind="kcore", live=True)
    return replace(DUMP, target=target, changes=replace(CHANGES, **changes))


def test_golden(golden: Golden) -> None:
    """The lines about the scan; for a dump, they need ``-v``."""
    reports = {
        "live": live(),
        "nothing seen to change": live(
            changed_pages=0, changed_folios=0, about_folios=0
        ),
        "a kernel that counts nothing": live(allocated_pages=None, freed_pages=None),
        "nothing could be read again": live(
            reread_pages=0, changed_folios=0, about_folios=None
        ),
        "a dump": DUMP,
        "a dump, -v": replace(DUMP, vmalloc=()),
    }
    lines = []
    for title, made in reports.items():
        lines += [f"--- {title}", *(x for x in printed(blocks(made)) if "scanned" in x)]
    golden("memstatscan", lines)


def test_torn_memory() -> None:
    """What differs in it is said to be of different moments."""
    wrong = Check("user.anon", 5, "NR_ANON_MAPPED", 9, -4, None)
    for torn, words in ((0, "UNEXPLAINED"), (3, "(torn)")):
        made = replace(DUMP, target=replace(TARGET, torn=torn), checks=(wrong,))
        shown = "\n".join(printed(blocks(made)))
        assert f"-4  {words}" in shown
        assert ("the memory is torn" in shown) == bool(torn)
        assert ("taken from a running guest?" in shown) == bool(torn)
