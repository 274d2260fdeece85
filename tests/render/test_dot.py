# SPDX-License-Identifier: LGPL-2.1-or-later

"""The graph of waits in Graphviz's language, read back by a small parser of it."""

import re
from dataclasses import dataclass, field

import pytest

from msatools.locks.report import LocksReport
from msatools.render.locks.dot import digraph, quoted
from tests.locks.madelocks import deadlock, lock, owner, report, root, wait
from tests.render.screens import printed

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
NODE = r"[tlr][0-9]+(?:more)?"
LINE = re.compile(rf"  ({NODE})(?: -> ({NODE}))?(?: \[(.*)\])?;")
ATTRIBUTE = re.compile(rf"([a-z]+)=({STRING})(?:, |$)")


@dataclass
class Parsed:
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    title: str = ""
    legend: list[str] = field(default_factory=list)


def parse(made: LocksReport, *, verbose: bool = False) -> Parsed:
    """Parse a graph; fail for a line that is not a statement of the language."""
    lines = printed(digraph(made, verbose=verbose))
    assert lines[:3] == ["digraph waits {", "  rankdir=LR;", "  node [shape=box];"]
    assert lines[3] == "  labelloc=t;"
    title = re.fullmatch(rf"  label=({STRING});", lines[4])
    assert title
    legend = lines.index("  subgraph cluster_legend {")
    assert lines[-2:] == ["  }", "}"]
    parsed = Parsed(title=unquoted(title[1]), legend=lines[legend + 1 : -2])
    for text in lines[5:legend]:
        matched = LINE.fullmatch(text)
        assert matched, text
        name, to, inside = matched.groups()
        given = {}
        while inside:
            attribute = ATTRIBUTE.match(inside)
            assert attribute, inside
            given[attribute[1]] = unquoted(attribute[2])
            inside = inside[attribute.end() :]
        if to is None:
            assert name not in parsed.nodes
            parsed.nodes[name] = given
        else:
            assert (name, to) not in parsed.edges
            parsed.edges[name, to] = given
    for edge in parsed.edges:
        assert set(edge) <= parsed.nodes.keys(), edge
    return parsed


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
    """Hostile names change no node, edge or attribute."""

    def made(name: str) -> LocksReport:
        return report(
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

    plain, hostile = parse(made("name")), parse(made(text))
    assert hostile.edges == plain.edges
    assert {name: given.keys() for name, given in hostile.nodes.items()} == {
        name: given.keys() for name, given in plain.nodes.items()
    }


def test_confidence_and_labels() -> None:
    task = wait(9, "rwsem 1", mode="read", comm="cat", caller="vfs_read", call="read")
    owners = [owner("=1", "boss"), owner("~2"), owner("?3")]
    one = lock("rwsem 1", (9,), owners, name="i_rwsem of /a", readers=2)
    boss = root(1, (1, 0), comm="boss", state="D", reason="vda 254:0")
    parsed = parse(report([task], [one], [boss]))
    styles = {to: parsed.edges["l0", to]["style"] for to in ("t1", "t2", "t3")}
    assert styles == {"t1": "solid", "t2": "dashed", "t3": "dotted"}
    assert parsed.edges["t9", "l0"] == {"label": "read"}
    assert parsed.nodes["t9"] == {"label": "9 cat\nD 9.0s\nvfs_read, read()"}
    label = "rwsem i_rwsem of /a\n2 readers"
    assert parsed.nodes["l0"] == {"shape": "ellipse", "label": label}
    label = "1 boss\nD 1.0s\nvda 254:0"
    assert parsed.nodes["t1"] == {"label": label, "penwidth": "2"}


def test_deadlock_is_red() -> None:
    made = report(
        [wait(1, "mutex a"), wait(2, "mutex b"), wait(3, "mutex a")],
        [lock("mutex a", (1, 3), "=2"), lock("mutex b", (2,), "=1")],
        deadlocks=[deadlock("1 2", ["mutex a", "mutex b"])],
    )
    parsed = parse(made)
    red_nodes = {name for name, given in parsed.nodes.items() if "color" in given}
    red_edges = {edge for edge, given in parsed.edges.items() if "color" in given}
    assert red_nodes == {"t1", "t2", "l0", "l1"}
    assert red_edges == {("t1", "l0"), ("l0", "t2"), ("t2", "l1"), ("l1", "t1")}
    assert ("t3", "l0") in parsed.edges


def test_long_queues_are_cut_except_for_lock_owners() -> None:
    crowd = tuple(range(100, 400))
    made = report(
        [wait(pid, "mutex a") for pid in crowd] + [wait(1, "mutex b")],
        [lock("mutex a", crowd, "=9"), lock("mutex b", (1,), "=399")],
    )
    few, everyone = parse(made), parse(made, verbose=True)
    shown = {int(name[1:]) for name, to in few.edges if to == "l0" and name[0] == "t"}
    assert shown == {100, 101, 102, 103, 104, 105, 399}
    assert few.nodes["l0more"] == {"label": "293 more"}
    assert ("l0more", "l0") in few.edges
    assert "l0more" not in everyone.nodes
    assert sum(to == "l0" for _, to in everyone.edges) == 300
