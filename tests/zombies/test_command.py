# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-zombies as people call it: what it understands, hands on and refuses."""

import io
from dataclasses import replace
from json import loads
from typing import Any

import pytest
from msatools.commands.zombies import COMMAND

from msatools.render import json
from msatools.zombies.model import Changes
from msatools.zombies.options import ZombiesOptions
from tests.support import commandline
from tests.zombies.madezombies import asked, heir, leak, limit, report, zombie

RUN = "msatools.zombies.zombies.Zombies"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("-p 12,13", {"pids": (12, 13)}),
        ("-p 12 --cost", {"pids": (12,), "cost": True}),
        ("--parent 147", {"parents": (147,)}),
        ("--parent 147,1,147", {"parents": (147, 1)}),
        ("--ns 4026531836,4026532168", {"namespaces": (4026531836, 4026532168)}),
        ("-u 0,1000", {"uids": (0, 1000)}),
        ("--verdict traced", {"verdicts": frozenset({"traced"})}),
        (
            "--verdict never-waits,Clone-Child",
            {"verdicts": frozenset({"never-waits", "clone-child"})},
        ),
        ("--tree", {"heirs": True}),
        ("--tree --parent 147", {"heirs": True, "parents": (147,)}),
        ("--leaks", {"leaks": True}),
        ("--by cgroup -n 3 -v", {}),
    ],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, words: str, given: dict[str, Any]
) -> None:
    """What is collected; how it is shown is the renderer's alone."""
    found = commandline.given_options(COMMAND, RUN, monkeypatch, *words.split())
    assert found == ZombiesOptions(**given)


MADE = report(
    [zombie(2), zombie(3), zombie(4, 9, cgroup="/box", verdict="traced", tracer=5)],
    heirs=(heir(147, 1), heir(9, 1)),
    leaks=(leak(2, 3, task=1),),
)


def shown(*words: str, made: Any = MADE) -> list[str]:
    return commandline.shown(COMMAND, made, *words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "    2  147 parent-147  S   ~2.0s..~3.0s  never waits for children"),
        (
            "--by parent",
            "    1  9 parent-9      S   ~4.0s         tracer must wait first",
        ),
        ("--by cgroup", "    1  /box    9 parent-9      ~4.0s         1 traced"),
        (
            "--by verdict",
            "    1  traced       9 parent-9      ~4.0s         tracer must wait first",
        ),
        (
            "--by user",
            "    3  0     147 parent-147 (2), 1 other  ~2.0s..~4.0s  "
            "2 never-waits, 1 traced",
        ),
        (
            "--by namespace",
            "    3  4026531836     147 parent-147 (2), 1 other  ~2.0s..~4.0s  "
            "2 never-waits, 1 traced",
        ),
        ("--tree", "|- 147 parent-147  2 zombies  its heir: subreaper"),
        ("--leaks", "  2  0xffff888000000002           3        2  zombie    1 task"),
    ],
)
def test_views(words: str, line: str) -> None:
    assert line in shown(*words.split())


def test_rows_and_detail_reach_the_view() -> None:
    assert "… 1 more group: -n COUNT shows it" in shown("-n", "1")
    assert "types of other modules: not asked for" in shown("-v")


def test_one_task() -> None:
    made = report(asked=(asked(5),), reads=12)
    assert "5 task-5  S for 5.0s, no zombie; parent 147 parent-147" in shown(
        *("-p", "5", "--cost"), made=made
    )


@pytest.mark.parametrize(
    ("words", "some"),
    [
        *(("", False), ("--by user", False), ("-n 3", False), ("--parent 1", True)),
        *(("--ns 1", True), ("-u 0", True), ("--verdict traced", True)),
    ],
)
def test_nobody_is_dead(words: str, some: bool) -> None:
    of = " of those that were asked for" if some else ""
    assert f"No zombie{of}." in shown(*words.split(), made=report())


def test_json() -> None:
    """What the contract names, and what was not asked for is not there."""
    made = report([zombie(2, tracer=5), zombie(3)], limits=[limit("pid_max", 1, 9)])
    out = io.StringIO()
    json.show(made, out)
    found = loads(out.getvalue())
    assert found["schema"] == "msatools.zombies/1"
    dead, other = found["zombies"]
    told = {"pid", "comm", "ppid", "parent_comm", "uid", "cgroup", "exit_code"}
    assert dead.keys() >= told | {"age_ns", "age_bound", "verdict"}
    assert ("tracer" in dead, "tracer" in other) == (True, False)
    (group,) = found["groups"]
    assert group.keys() >= {"ppid", "parent_comm", "count", "verdict", "evidence"}
    (most,) = found["limits"]
    assert most.keys() >= {"name", "scope", "used", "max"}
    extra = {"heirs", "leaks", "asked", "changes", "reads"}
    assert not found.keys() & extra
    assert not group.keys() & {"heir", "delta"}
    full = replace(
        made,
        heirs=(heir(147, None),),
        leaks=(leak(2, 3),),
        asked=(asked(2),),
        changes=Changes(begun=1, reaped=0),
        reads=5,
    )
    out = io.StringIO()
    json.show(full, out)
    found = loads(out.getvalue())
    assert found.keys() >= extra
    assert found["heirs"][0]["heir"] is None
