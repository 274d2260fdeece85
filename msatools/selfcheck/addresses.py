# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of msa-whatis: whether what is at an address is what was read from there."""

from collections.abc import Iterator

from msatools.selfcheck.comparison import Comparison
from msatools.selfcheck.report_set import ReportSet
from msatools.whatis.asked import parse
from msatools.whatis.options import WhatisOptions
from msatools.whatis.whatis import Whatis

_MOST = 64
"""Maximum number of tasks whose addresses are asked for, spread over all."""


def tasks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare tasks with what lies at their addresses.

    A task's address comes from the list of tasks, the answer from slabs and symbols.
    """
    table = reports.tasks
    step = len(table.records) // _MOST + 1
    pids = table["pid"][::step].tolist()
    asked = [parse(f"{address:#x}") for address in table["address"][::step].tolist()]
    options = WhatisOptions(addresses=tuple(each for each in asked if each is not None))
    answers = Whatis(reports.prog, reports.target, options).report(lambda *_: None)
    found = [
        None if answer.task is None else answer.task.pid for answer in answers.answers
    ]
    yield Comparison(
        name="whatis.tasks",
        left="tasks that were asked for by address",
        right="answers that are these tasks",
        left_value=len(pids),
        right_value=sum(map(int.__eq__, pids, (pid or -1 for pid in found))),
    )


CHECKS = (tasks,)
