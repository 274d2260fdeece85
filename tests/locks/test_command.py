# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-locks as people call it: what it understands, hands on and refuses."""

import io
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import pytest
from msatools.commands.locks import COMMAND

from msatools.arguments import make_parser
from msatools.cli import run_console
from msatools.locks.options import LocksOptions
from msatools.render.plain import lines
from tests.locks.madelocks import TARGET, lock, report, root, wait

SECOND = 1_000_000_000


def parsed(*words: str) -> Namespace:
    return make_parser(COMMAND, in_drgn=True).parse_intermixed_args(words)


def options(monkeypatch: pytest.MonkeyPatch, *words: str) -> LocksOptions:
    """Give the options that a run is started with."""
    started: list[Any] = []
    monkeypatch.setattr(
        "msatools.locks.locks.Locks", lambda *given: started.append(given)
    )
    COMMAND.start(None, TARGET, parsed(*words))  # type: ignore[arg-type]
    ((prog, target, found),) = started
    assert (prog, target) == (None, TARGET)
    assert isinstance(found, LocksOptions)
    return found


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("-p 12,7,12", {"pids": (12, 7)}),
        ("--type mutex", {"types": frozenset({"mutex"})}),
        ("--type RWSEM,pi_futex", {"types": frozenset({"rwsem", "pi_futex"})}),
        ("--state D", {"states": frozenset("D")}),
        ("--state D,S", {"states": frozenset("DS")}),
        ("--min-wait 30", {"min_wait_ns": 30 * SECOND}),
        ("--min-wait 0.5", {"min_wait_ns": SECOND // 2}),
        ("--min-wait 5m", {"min_wait_ns": 300 * SECOND}),
        ("--stack", {"stack": True}),
        ("--by lock -n 3 -v", {}),
        ("--chains", {}),
    ],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, words: str, given: dict[str, Any]
) -> None:
    """What is collected; how it is shown is the renderer's alone."""
    assert options(monkeypatch, *words.split()) == LocksOptions(**given)


REFUSED = {
    "-p x": "not a number: 'x'",
    "--type spin": "no type 'spin'; there are mutex, ww_mutex, rwsem",
    "--type ,": "no type ''",
    "--state Q": "states are some of R, S, D",
    "--state": "expected one argument",
    "--min-wait=-1": "not a duration such as 30 or 5m: '-1'",
    "--min-wait x": "not a duration",
    "--min-wait nan": "not a duration",
    "--by owner": "invalid choice",
    "--by root --chains": "not allowed with",
    "--chains --holders": "not allowed with",
    "--holders --dot": "not allowed with",
    "-n 0": "not a positive number",
    "--dot --json": "another form than --json",
    "--dot -n 3": "neither rows nor stacks",
    "--dot --stack": "neither rows nor stacks",
    "--dot 5": "a graph is of one moment",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_usage(words: str) -> None:
    """One line that says what is wrong, before any target is opened."""
    err = io.StringIO()
    with redirect_stderr(err):
        assert run_console(COMMAND, ["-k", *words.split()]) == 2
    (line,) = err.getvalue().splitlines()
    assert line.startswith("msa-locks: ")
    assert REFUSED[words] in line


def test_help() -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        assert run_console(COMMAND, ["-h"]) == 0
    text = out.getvalue()
    assert text.startswith("USAGE: msa-locks [OPTION...] [TARGET] [INTERVAL [COUNT]]")
    assert "who waits for whom" in text
    examples = text.partition("EXAMPLES:")[2]
    for words, what in COMMAND.examples:
        assert f"msa-locks {words} " in examples
        assert what in examples
    # Each example is one that the command understands.
    for words, _ in COMMAND.examples:
        args = parsed(*words.partition(" |")[0].split())
        assert COMMAND.complaint(args, False) is None
    assert max(map(len, text.splitlines())) <= 88


def shown(*words: str) -> list[str]:
    made = report(
        [wait(2, "mutex 0x10"), wait(3, "mutex 0x10")],
        [lock("mutex 0x10", (2, 3), "=1")],
        [root(1, (2, 0))],
    )
    blocks = COMMAND.blocks(made, parsed(*words))
    texts = ("".join(s.text for s in line) for block in blocks for line in lines(block))
    return [text.rstrip() for text in texts]


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
    [("", False), ("-p 1", True), ("--state D", True), ("--min-wait 1", True)],
)
def test_nobody_is_blocked(words: str, asked: bool) -> None:
    blocks = COMMAND.blocks(report(), parsed(*words.split()))
    texts = ["".join(s.text for s in line) for b in blocks for line in lines(b)]
    of = " of those that were asked for" if asked else ""
    assert f"No task{of} is blocked." in texts


@pytest.mark.parametrize(
    ("key", "on_a_dump", "live"),
    [
        ("tasks_unreadable", True, True),
        ("lists_broken", True, True),
        ("stacks_incomplete", True, False),
        ("futex_chains_broken", True, False),
        ("waits_unreadable", True, False),
        ("zombies", False, False),
        ("locks_unknown", False, False),
    ],
)
def test_strict(key: str, on_a_dump: bool, live: bool) -> None:
    made = report(coverage={key: 1})
    assert COMMAND.problems(made) == on_a_dump
    running = replace(made, target=replace(TARGET, live=True, kind="kcore"))
    assert COMMAND.problems(running) == live
    assert not COMMAND.problems(report(coverage={key: 0}))
