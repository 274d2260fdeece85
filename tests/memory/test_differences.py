# SPDX-License-Identifier: LGPL-2.1-or-later

"""Differences between scan and counters are explained by events during the scan.

On a running kernel, khugepaged moves pages: of 50 scans in guests on a busy machine,
two were 513 and 898 pages off, with two huge pages made during the scan.
"""

import pytest
from drgn import Program

from fixtures import lab
from msatools.kernel.mm import vm_events
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.checks import Difference, Meanwhile, Reason, explain

from . import truth

# Events that do not happen while a guest records its truth.
QUIET = ("THP_COLLAPSE_ALLOC", "PGMIGRATE_SUCCESS", "THP_FAULT_ALLOC", "PSWPOUT")


def test_events_are_those_of_proc(prog: Program, run: lab.Run) -> None:
    """Events are summed over CPUs; /proc/vmstat has them in lower case."""
    found = vm_events(Reader(prog), (*QUIET, "NO_SUCH_EVENT"), LossLog())
    recorded = truth.vmstat(run)
    assert found == {name: recorded[name.lower()] for name in QUIET}
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
        # Moved pages can be missed or counted twice; they explain no more.
        (ANON, 34_921, 34_927, (34_414, 34_921 + 1024), MOVED, MOVES),
        (ANON, 34_921, 34_927, (34_921 - 1025, 34_927 + 1025), MOVED, None),
        # This class cannot move.
        (VMALLOC, 1004, 1004, (1000,), MOVED, None),
        # Only the change of the counter can explain it.
        (ANON, 6, 7, (5,), Meanwhile(), None),
        (ANON, 5, 7, (6,), MOVED, "went from 5 to 7 during the scan"),
        # Pages that were allocated and freed again during the scan.
        (ANON, 100, 110, (90,), Meanwhile(freed=10), FREED),
        (ANON, 100, 110, (89,), Meanwhile(freed=10), None),
        # Per-CPU lists are refilled as pages are allocated.
        (PCP, 50, 60, (75, 35), Meanwhile(allocated=11, freed=4), TAKEN),
        (PCP, 50, 60, (76, 34), Meanwhile(allocated=11, freed=4), None),
    ],
)
def test_events_explain_differences_up_to_their_count(
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
def test_reason_and_changed_counter(walk: int, why: str | None) -> None:
    difference = Difference("kernel.percpu", walk, 144, 138, REASON)
    assert explain(difference, Meanwhile(), 0, LossLog()) == why


def test_on_a_dump_uncounted_losses_explain_nothing() -> None:
    """The number of pages on a broken list is unknown."""
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
        # Missing per-CPU parts of counters explain at most their maximum.
        (ANON, 1254, 1000, 0, "2 per-CPU parts of counters could not be read"),
        (ANON, 1255, 1000, 0, None),
        (VMALLOC, 1001, 1000, 0, None),
    ],
)
def test_losses_explain_differences_up_to_their_count(
    name: str, walk: int, kernel: int, missing: int, why: str | None
) -> None:
    lost = LossLog()
    if not missing:
        lost.coverage["vmstat_cpus_unreadable"] = 2
    assert explain(Difference(name, walk, kernel), None, missing, lost) == why
