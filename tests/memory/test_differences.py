# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages whose contents move to others while memstat looks at a running kernel.

khugepaged did that in the midst of looks inside of guests: of 50 looks on a busy
machine two were 513 and 898 pages off, with two huge pages made meanwhile.
"""

import pytest
from drgn import Program

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.vmstat import vm_events
from msatools.memory.differences import Difference, Meanwhile, Reason, explain

from . import truth

# Those that a guest does not add to while its truth is taken.
QUIET = ("THP_COLLAPSE_ALLOC", "PGMIGRATE_SUCCESS", "THP_FAULT_ALLOC", "PSWPOUT")


def test_events_are_those_of_proc(prog: Program, run: lab.Run) -> None:
    """Each is counted by CPU, and told in small letters."""
    found = vm_events(Reader(prog), (*QUIET, "NO_SUCH_EVENT"), Findings())
    said = truth.vmstat(run)
    assert found == {name: said[name.lower()] for name in QUIET}
    assert found["PGMIGRATE_SUCCESS"] > 0 or found["THP_FAULT_ALLOC"] > 0


def explained(name: str, walk: int, before: int, after: int, moved: int) -> str | None:
    difference = Difference(name, walk, after, before)
    return explain(difference, Meanwhile(moved=moved), 0, Findings())


@pytest.mark.parametrize("walk", [34_414, 34_921 + 1024])
def test_what_moved_explains_as_much(walk: int) -> None:
    """It may have been missed, or met twice."""
    words = "up to 1,024 pages moved to others during the scan"
    assert explained("user.anon", walk, 34_921, 34_927, 1024) == words


@pytest.mark.parametrize("walk", [34_921 - 1025, 34_927 + 1025])
def test_no_more_than_moved_is_explained(walk: int) -> None:
    assert explained("user.anon", walk, 34_921, 34_927, 1024) is None


def test_what_cannot_move_is_not_explained() -> None:
    assert explained("kernel.vmalloc", 1000, 1004, 1004, 1024) is None


def test_without_moves_the_counters_aloneexplain() -> None:
    assert explained("user.anon", 5, 6, 7, 0) is None
    words = "went from 5 to 7 during the scan"
    assert explained("user.anon", 6, 5, 7, 1024) == words


def test_what_was_freed_explains_as_much() -> None:
    """Pages that another process has had, and given back, meanwhile."""
    most, more = (Difference("user.anon", walk, 110, 100) for walk in (90, 89))
    freed = Meanwhile(freed=10)
    words = "up to 10 pages were freed during the scan, and used anew"
    assert explain(most, freed, 0, Findings()) == words
    assert explain(more, freed, 0, Findings()) is None


def test_a_reason_and_a_counter_that_went_on() -> None:
    reason = Reason(-132, "132 in reserved boot memory")
    words = "132 in reserved boot memory; went from 138 to 144 during the scan"
    both, neither = (
        Difference("kernel.percpu", walk, 144, 138, reason) for walk in (9, 13)
    )
    assert explain(both, Meanwhile(), 0, Findings()) == words
    assert explain(neither, Meanwhile(), 0, Findings()) is None


def test_others_come_to_the_lists_for_those_that_are_taken() -> None:
    most, more = (Difference("free.pcp", walk, 60, 50) for walk in (75, 76))
    least, less = (Difference("free.pcp", walk, 60, 50) for walk in (35, 34))
    taken = Meanwhile(allocated=11, freed=4)
    words = "up to 15 pages were taken or freed during the scan"
    for pair in (most, least):
        assert explain(pair, taken, 0, Findings()) == words
    for pair in (more, less):
        assert explain(pair, taken, 0, Findings()) is None


def test_on_a_dump_what_was_lost_explains_nothing() -> None:
    """Not even a list that broke off: that nobody counted."""
    lost = Findings()
    lost.coverage.update(pcp_lists_broken=19, vmalloc_areas_unreadable=1)
    for name in ("free.pcp", "kernel.vmalloc", "kernel.stacks"):
        difference = Difference(name, 1832, 1877, 1877)
        assert explain(difference, None, 0, lost) is None
        assert explain(difference, Meanwhile(), 0, lost) is not None


def test_struct_pages_that_are_missing_explain_as_many() -> None:
    words = "45 struct pages could not be read"
    assert explain(Difference("free.pcp", 5, 50), None, 45, Findings()) == words
    assert explain(Difference("free.pcp", 4, 50), None, 45, Findings()) is None
    assert explain(Difference("free.pcp", 51, 50), None, 45, Findings()) is None


def test_counters_of_cpus_that_are_missing_explain_what_they_can_hold() -> None:
    lost = Findings()
    lost.coverage["vmstat_cpus_unreadable"] = 2
    most, more = (Difference("user.anon", walk, 1000) for walk in (1254, 1255))
    assert explain(most, None, 0, lost) is not None
    assert explain(more, None, 0, lost) is None
    assert explain(Difference("kernel.vmalloc", 1001, 1000), None, 0, lost) is None
