# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-zombies, and the views that they select."""

from typing import Any

import pytest
from msatools.commands.zombies import COMMAND

from msatools.tasks.identity import Membership
from msatools.zombies.model import ZombiesOptions
from tests.support import commandline
from tests.support.golden import Golden
from tests.zombies.madezombies import asked, heir, leak, report, zombie

RUN = "msatools.zombies.zombies.Zombies"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("-p 12,13", {"pids": (12, 13)}),
        ("-p 12 --cost", {"pids": (12,), "cost": True}),
        ("--parent 147", {"parents": (147,)}),
        ("--parent 147,1,147", {"parents": (147, 1)}),
        (
            "--ns 4026531836,4026532168 --cgroup /a --cgroup /b,/c",
            {
                "membership": Membership(
                    namespaces=(4026531836, 4026532168), cgroups=("/a", "/b", "/c")
                )
            },
        ),
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
    """Options of collection are passed on; those of rendering are not."""
    found = commandline.given_options(COMMAND, RUN, monkeypatch, *words.split())
    assert found == ZombiesOptions(**given)


MADE = report(
    [zombie(2), zombie(3), zombie(4, 9, cgroup="/box", verdict="traced", tracer=5)],
    heirs=(heir(147, 1), heir(9, 1)),
    leaks=(leak(2, 3, task=1),),
)


def shown(*words: str, made: Any = MADE) -> list[str]:
    return commandline.shown(COMMAND, made, *words)


VIEWS = (
    *("", "--by parent", "--by cgroup", "--by verdict", "--by user"),
    *("--by ns", "--tree", "--leaks"),
)


def test_views(golden: Golden) -> None:
    lines = []
    for words in VIEWS:
        lines += [f"$ msa-zombies {words}", *shown(*words.split()), ""]
    golden("zombies/views", lines)


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
def test_no_zombies(words: str, some: bool) -> None:
    of = " matches the selection" if some else ""
    assert f"No zombie{of}." in shown(*words.split(), made=report())
