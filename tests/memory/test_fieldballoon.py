# SPDX-License-Identifier: LGPL-2.1-or-later

"""Half of a guest's memory in a balloon: fixtures/lab/guest/fieldballoon.py."""

import re

from drgn import Program

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from tests.report.judged import report_of

from .sums import pages_of

SCENARIO = "fieldballoon"


def test_the_balloon_has_what_the_guest_gave(
    field_run: lab.Run, field_prog: Program
) -> None:
    pages = pages_of(collect_memstat(field_prog))
    assert pages["offline"] == field_run.workload["balloon_pages"]


def test_parts_are_the_whole(field_run: lab.Run) -> None:
    """The line of memory names the balloon, and leaves nothing out."""
    line = report_of(field_run.name)["sections"]["memstat"]["summary"]
    assert "balloon" in line
    percents = [int(share) for share in re.findall(r"\((\d+) %\)", line)]
    assert 97 <= sum(percents) <= 103, line
