# SPDX-License-Identifier: LGPL-2.1-or-later

"""The graph of waits in Graphviz's language: see ``tests/golden/locks/dot.txt``."""

import re

import pytest

from msatools.locks.report import LocksReport
from msatools.render.locks.dot import digraph, quoted
from tests.locks.madelocks import deadlock, lock, owner, report, root, wait
from tests.render.screens import check_screens, printed
from tests.support.golden import Golden

HOSTILE = (
    'a"b',
    "back\\slash",
    "\\",
    "\\N\\G\\l",
    "new\nline\r",
    "\x1b[31m\x00\x7f",
    "<b>html</b>",
    "<",
    "&lt;&#60;",
    '"]; evil [label="',
    "} digraph {",
    "// # /* */",
    "\u202eright to left\ud800",
    "",
    "…ü",
)

STRING = r'"(?:[^"\\\n]|\\.)*"'


def unquoted(string: str) -> str:
    """Read a string as Graphviz shows it: first its escapes, then its entities."""
    known = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
    text = re.sub(r"\\.", lambda found: known[found[0]], string[1:-1], flags=re.DOTALL)
    return re.sub("&[a-z]*;?", lambda found: {"&amp;": "&"}[found[0]], text)


@pytest.mark.parametrize("text", HOSTILE)
def test_quoted_strings_are_read_back_the_same(text: str) -> None:
    string = quoted(text, "next")
    assert re.fullmatch(STRING, string)
    assert string.isprintable()
    shown, _, after = unquoted(string).partition("\n")
    assert after == "next"
    assert shown == text if text.isprintable() else shown.isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names(text: str) -> None:
    """Hostile names change no node, edge or attribute: strings alone differ."""

    def statements(name: str) -> list[str]:
        made = report(
            [wait(2, "mutex 1", comm=name, caller=name, call=name, why=name)],
            [
                lock("mutex 1", (2,), [owner("=1", name)], name=name),
                lock(f"mutex {name}", (2,)),
            ],
            [
                root(1, (1, 0), comm=name, reason=name),
                root(7, (1, 0), kind="external", comm=name, reason=name, waiters=(2,)),
            ],
        )
        return [re.sub(STRING, '""', line) for line in printed(digraph(made))]

    assert statements(text) == statements("name")


def graphs() -> dict[str, LocksReport]:
    task = wait(9, "rwsem 1", mode="read", comm="cat", caller="vfs_read", call="read")
    owners = [owner("=1", "boss"), owner("~2"), owner("?3")]
    crowd = tuple(range(100, 400))
    return {
        "confidence and labels": report(
            [task],
            [lock("rwsem 1", (9,), owners, name="i_rwsem of /a", readers=2)],
            [root(1, (1, 0), comm="boss", state="D", reason="vda 254:0")],
        ),
        "a deadlock is red": report(
            [wait(1, "mutex a"), wait(2, "mutex b"), wait(3, "mutex a")],
            [lock("mutex a", (1, 3), "=2"), lock("mutex b", (2,), "=1")],
            deadlocks=[deadlock("1 2", ["mutex a", "mutex b"])],
        ),
        "long queues are cut except for lock owners": report(
            [wait(pid, "mutex a") for pid in crowd] + [wait(1, "mutex b")],
            [lock("mutex a", crowd, "=9"), lock("mutex b", (1,), "=399")],
        ),
    }


def test_golden(golden: Golden) -> None:
    made = graphs()
    check_screens(golden, "locks/dot", {name: digraph(made[name]) for name in made})
    (*_, crowd) = made.values()
    whole = printed(digraph(crowd, verbose=True))
    assert sum(line.endswith(" -> l0;") for line in whole) == 300
