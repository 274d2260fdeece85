# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-locks, and the views that they select."""

from typing import Any

import pytest
from msatools.commands.locks import COMMAND

from msatools.locks.report_builder import LocksOptions
from tests.locks.madelocks import lock, report, root, wait
from tests.support import commandline

SECOND = 1_000_000_000

RUN = "msatools.locks.locks.Locks"


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("", {}),
        ("-p 12,7,12", {"pids": (12, 7)}),
        ("--type mutex", {"types": frozenset({"mutex"})}),
        ("--type RWSEM,pi_futex", {"types": frozenset({"rwsem", "pi_futex"})}),
        ("--state D", {"states": frozenset("D")}),
        ("--state D,S", {"states": frozenset("DS")}),
        ("--min-age 30", {"min_age_ns": 30 * SECOND}),
        ("--min-age 0.5", {"min_age_ns": SECOND // 2}),
        ("--min-age 5m", {"min_age_ns": 300 * SECOND}),
        ("--stacks", {"stacks": True}),
        ("--by lock -n 3 -v", {}),
        ("--chains", {}),
    ],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, words: str, changed: dict[str, Any]
) -> None:
    """Options of collection are passed on; those of rendering are not."""
    found = commandline.given_options(COMMAND, RUN, monkeypatch, *words.split())
    assert found == LocksOptions(**changed)


def shown(*words: str) -> list[str]:
    made = report(
        [wait(2, "mutex 0x10"), wait(3, "mutex 0x10")],
        [lock("mutex 0x10", (2, 3), "=1")],
        [root(1, (2, 0))],
    )
    return commandline.shown(COMMAND, made, *words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "ROOT 1  pid 1 task-1  R 1.0s  runs on CPU 1  blocks 2 (2 D)"),
        ("--by root", "ROOT 1  pid 1 task-1  R 1.0s  runs on CPU 1  blocks 2 (2 D)"),
        ("--by lock", "      2    3.0s  mutex 0x10        -  =1 task-1  2 3"),
        ("--chains", "3 task-3  D 3.0s -> mutex 0x10 => 1 task-1: runs on CPU 1"),
        ("--dot", "digraph waits {"),
    ],
)
def test_views(words: str, line: str) -> None:
    assert line in shown(*words.split())


def test_rows_and_detail_reach_the_view() -> None:
    assert "… 1 more row: -n COUNT shows it" in shown("--by", "task", "-n", "1")
    assert "types of other modules: not asked for" in shown("-v")


@pytest.mark.parametrize(
    ("words", "asked"),
    [("", False), ("-p 1", True), ("--state D", True), ("--min-age 1", True)],
)
def test_nobody_is_blocked(words: str, asked: bool) -> None:
    texts = commandline.shown(COMMAND, report(), *words.split())
    of = "blocked task matches the selection" if asked else "task is blocked"
    assert f"No {of}." in texts
