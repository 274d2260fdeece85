# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend has a line for each code and mark that reports can show."""

from typing import get_args

from msatools.cpus.model import State
from msatools.memory.classes import CLASSES
from msatools.render.blocks import BOUND_MARKS, NOT_KEPT
from msatools.render.cpus.columns import COLUMNS
from msatools.render.locks.tree import MARKS
from msatools.render.report import html_blocks as legend
from msatools.report.model import Severity, VerdictConfidence
from msatools.report.rule import DOUBTS
from msatools.tasks.states import LETTERS
from msatools.tasks.waits import TaskClass


def test_codes_of_tasks() -> None:
    assert legend.TASK_CLASSES.keys() == {each.name for each in TaskClass}
    assert {*LETTERS} <= legend.TASK_STATES.keys()


def test_marks() -> None:
    assert {*BOUND_MARKS.values(), NOT_KEPT} == {"", *legend.VALUE_MARKS}
    assert {*MARKS.values(), NOT_KEPT} == legend.OWNER_MARKS.keys()


def test_verdicts() -> None:
    assert legend.SEVERITIES.keys() == {*get_args(Severity)}
    assert DOUBTS.keys() == {*get_args(VerdictConfidence)}
    assert {*DOUBTS.values()} - {""} <= legend.DOUBT_WORDS.keys()


def test_memory() -> None:
    assert legend.MEMORY_CLASSES.keys() == {*CLASSES.values()}


def test_cpus() -> None:
    assert {*get_args(State)} <= legend.CPU_STATES.keys()
    described = {name.lower() for name in legend.CPU_COLUMNS}
    not_kept = {"smtx", "srw", "syscl"}
    assert {*COLUMNS} - not_kept <= described
