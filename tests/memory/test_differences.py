# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages whose contents move to others while memstat looks at a running kernel.

khugepaged did that in the midst of looks inside of guests: of 50 looks on a busy
machine two were 513 and 898 pages off, with two huge pages made meanwhile.
"""

import pytest
from drgn import Program

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.vmstat import vm_events
from msatools.memory.differences import Difference, Meanwhile, Reason, explain

from . import truth

# Those that a guest does not add to while its truth is taken.
QUIET = ("THP_COLLAPSE_ALLOC", "PGMIGRATE_SUCCESS", "THP_FAULT_ALLOC", "PSWPOUT")


def test_events_are_those_of_proc(prog: Program, run: lab.Run) -> None:
    """Each is counted by CPU, and told in small letters."""
    found = vm_events(Reader(prog), (*QUIET, "NO_SUCH_EVENT"), LossLog())
    said = truth.vmstat(run)
    assert found == {name: said[name.lower()] for name in QUIET}
    assert found["PGMIGRATE_SUCCESS"] > 0 or found["THP_FAULT_ALLOC"] > 0


ANON, PCP, VMALLOC = "user.anon", "free.pcp", "kernel.vmalloc"
MOVED = Meanwhile(moved=1024)
MOVES = "up to 1,024 pages moved to others during the scan"
FREED = "up to 10 pages were freed during the scan, and used anew"
TAKEN = "up to 15 pages were taken or freed during the scan"
REASON = Reason(-132, "132 in reserved boot memory")
BOTH = "132 in reserved boot memory; went from 138 to 144 during the scan"


@pytest.mark.parametrize(
    ("name", "before", "after", "walks", "meanwhile", "why"),
    [
        # It may have been missed, or met twice; no more than moved is explained.
        (ANON, 34_921, 34_927, (34_414, 34_921 + 1024), MOVED, MOVES),
        (ANON, 34_921, 34_927, (34_921 - 1025, 34_927 + 1025), MOVED, None),
        # What cannot move.
        (VMALLOC, 1004, 1004, (1000,), MOVED, None),
        # The counters alone explain it, or not.
        (ANON, 6, 7, (5,), Meanwhile(), None),
        (ANON, 5, 7, (6,), MOVED, "went from 5 to 7 during the scan"),
        # Pages that another process has had, and given back, meanwhile.
        (ANON, 100, 110, (90,), Meanwhile(freed=10), FREED),
        (ANON, 100, 110, (89,), Meanwhile(freed=10), None),
        # Others come to the lists for those that are taken.
        (PCP, 50, 60, (75, 35), Meanwhile(allocated=11, freed=4), TAKEN),
        (PCP, 50, 60, (76, 34), Meanwhile(allocated=11, freed=4), None),
    ],
)
def test_what_happens_meanwhile_explains_as_much(
    name: str,
    before: int,
    after: int,
    walks: tuple[int, ...],
    meanwhile: Meanwhile,
    why: str | None,
) -> None:
    for walk in walks:
        difference = Difference(name, walk, after, before)
        assert explain(difference, meanwhile, 0, LossLog()) == why


@pytest.mark.parametrize(("walk", "why"), [(9, BOTH), (13, None)])
def test_a_reason_and_a_counter_that_went_on(walk: int, why: str | None) -> None:
    difference = Difference("kernel.percpu", walk, 144, 138, REASON)
    assert explain(difference, Meanwhile(), 0, LossLog()) == why


def test_on_a_dump_what_was_lost_explains_nothing() -> None:
    """Not even a list that broke off: that nobody counted."""
    lost = LossLog()
    lost.coverage.update(pcp_lists_broken=19, vmalloc_areas_unreadable=1)
    for name in ("free.pcp", "kernel.vmalloc", "kernel.stacks"):
        difference = Difference(name, 1832, 1877, 1877)
        assert explain(difference, None, 0, lost) is None
        assert explain(difference, Meanwhile(), 0, lost) is not None


@pytest.mark.parametrize(
    ("name", "walk", "kernel", "missing", "why"),
    [
        (PCP, 5, 50, 45, "45 struct pages could not be read"),
        (PCP, 4, 50, 45, None),
        (PCP, 51, 50, 45, None),
        # Counters of CPUs that are missing explain what they can hold.
        (ANON, 1254, 1000, 0, "2 per-CPU parts of counters could not be read"),
        (ANON, 1255, 1000, 0, None),
        (VMALLOC, 1001, 1000, 0, None),
    ],
)
def test_what_is_missing_explains_as_much(
    name: str, walk: int, kernel: int, missing: int, why: str | None
) -> None:
    lost = LossLog()
    if not missing:
        lost.coverage["vmstat_cpus_unreadable"] = 2
    assert explain(Difference(name, walk, kernel), None, missing, lost) == why
