# SPDX-License-Identifier: LGPL-2.1-or-later

"""Draws the waits-for graph as a picture: a tree for each root.

A root is at the left; to its right are the locks that it holds and their waiters.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from msgspec import Struct, field

from msatools.locks.report import Deadlock, LocksReport, Root
from msatools.render.blocks import plural
from msatools.render.locks.tree import WaitGraph, lock_text
from msatools.render.memstat.picture import Box, Label, Picture
from msatools.report.rule import root_text
from msatools.reports.units import duration

ROOTS = 16
"""Maximum roots to draw, in the order of the report; likewise deadlocks."""

_CHILDREN = 6
"""Maximum waiters of a lock, and locks of an owner, to draw; others are counted."""

_DEPTH = 6
_NODES = 500
"""Maximum nodes of all trees, those nearest to the roots first."""

_LETTER_WIDTH, _HEIGHT = 7, 22
_GAP_X, _GAP_Y = 34, 6
_MARGIN = 12
_INSIDE = 6
"""Distance of text from the border of its box, in pixels."""

_LEAST_WIDTH = 360
"""Minimum width of the picture, in pixels, for the legend of the colours."""

_LETTERS = 32
"""Maximum characters of a node; the title on hover has the whole text."""

_COLOURS = {
    "root": "#f4c7c3",
    "lock": "#fff0b3",
    "task": "#d7e3f4",
    "more": "#eeeeee",
}
_KEY = {
    "root": "what all to its right wait for",
    "lock": "a lock, or another thing waited for",
    "task": "a task that waits, its state, and for how long",
    "more": "not drawn, or drawn already",
}
"""Maps the kind of a node to the meaning of its colour."""

_LINE = "#888888"
_THICK = 2
"""Width of a line in pixels: thinner lines vanish if the picture is scaled down."""


class _Node(Struct):
    text: str
    kind: str
    children: list["_Node"] = field(default_factory=list)


def wait_picture(report: LocksReport) -> Picture | None:
    """Draw the roots and deadlocks of a report; ``None`` if it has none."""
    trees = [*_trees(report)]
    if not trees:
        return None
    _prune(trees)
    drawing = _WaitDrawing([*_widths(trees)])
    drawing.add_key(kind for kind in _KEY if any(_has(tree, kind) for tree in trees))
    for tree in trees:
        drawing.add(tree)
    found = sum(root.kind != "cycle" for root in report.roots) + len(report.deadlocks)
    if left := found - len(trees):
        drawing.add_text(f"… {plural(left, 'more root')}")
    return drawing.picture()


def _prune(trees: Sequence[_Node]) -> None:
    """Remove nodes beyond :data:`_NODES`, those farthest from the roots."""
    level, room = [*trees], _NODES - len(trees)
    while level:
        below = []
        for node in level:
            kept = node.children[: max(room, 0)]
            room -= len(node.children)
            node.children = [*kept, *_rest(len(node.children) - len(kept))]
            below += kept
        level = below


def _widths(trees: Sequence[_Node]) -> Iterator[int]:
    """Yield the width of the boxes in each column, in pixels."""
    level = [*trees]
    while level:
        letters = max(len(_short(node.text)) for node in level)
        yield letters * _LETTER_WIDTH + 2 * _INSIDE
        level = [child for node in level for child in node.children]


def _has(tree: _Node, kind: str) -> bool:
    return tree.kind == kind or any(_has(child, kind) for child in tree.children)


def _trees(report: LocksReport) -> Iterator[_Node]:
    graph = WaitGraph(report)
    for deadlock in report.deadlocks[:ROOTS]:
        yield _cycle(deadlock, graph)
    for root in report.roots[:ROOTS]:
        if root.kind != "cycle":
            yield _root(root, graph)


def _cycle(deadlock: Deadlock, graph: WaitGraph) -> _Node:
    words = "deadlock" if deadlock.confidence == "exact" else "possible deadlock"
    top = node = _Node(words, "root")
    for pid, lock in zip(deadlock.pids, deadlock.locks, strict=False):
        task = _Node(_task(graph, pid), "task")
        row = graph.locks.get(lock)
        want = _Node(f"waits for {lock if row is None else lock_text(row)}", "lock")
        node.children.append(task)
        task.children.append(want)
        node = want
    first = deadlock.pids[0]
    node.children.append(_Node(f"again {_task(graph, first)}", "more"))
    return top


def _root(root: Root, graph: WaitGraph) -> _Node:
    node = _Node(root_text(root), "root")
    seen = {root.pid}
    if root.kind == "task" and root.pid is not None:
        node.children = _held(root.pid, graph, seen, _DEPTH)
    lock = graph.locks.get(root.lock or "")
    if lock is not None:
        node.children.append(
            _Node(lock_text(lock), "lock", _waiters(lock.waiters, graph, seen, _DEPTH))
        )
    elif root.kind == "external":
        node.children = _waiters(root.waiters, graph, seen, _DEPTH)
    return node


def _held(pid: int, graph: WaitGraph, seen: set[int | None], depth: int) -> list[_Node]:
    """Return the locks that a task holds, with their waiters."""
    if not depth:
        return []
    held = graph.held.get(pid, ())
    nodes = [
        _Node(
            lock_text(each.lock),
            "lock",
            _waiters(each.lock.waiters, graph, seen, depth - 1),
        )
        for each in held[:_CHILDREN]
    ]
    return [*nodes, *_rest(len(held) - len(nodes))]


def _waiters(
    pids: Sequence[int], graph: WaitGraph, seen: set[int | None], depth: int
) -> list[_Node]:
    nodes = []
    fresh = [pid for pid in pids if pid not in seen]
    # Waiters that hold locks, and so have waiters, come first.
    fresh.sort(key=lambda pid: pid not in graph.held)
    for pid in fresh[:_CHILDREN]:
        seen.add(pid)
        nodes.append(_Node(_task(graph, pid), "task", _held(pid, graph, seen, depth)))
    return [*nodes, *_rest(len(fresh) - len(nodes))]


def _rest(left: int) -> list[_Node]:
    return [_Node(f"{left:,} more", "more")] if left > 0 else []


def _task(graph: WaitGraph, pid: int) -> str:
    wait, comm = graph.waits.get(pid), graph.comm(pid)
    words = f"{pid} {comm}" if comm else str(pid)
    return words if wait is None else f"{words} {wait.state} {duration(wait.age_ns)}"


class _WaitDrawing:
    """Places nodes: columns by depth, a row for each leaf."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        self._lefts = [
            *accumulate((width + _GAP_X for width in widths), initial=_MARGIN)
        ]
        self._boxes: dict[str, list[Box]] = {_LINE: []}
        self._labels: list[Label] = []
        self._y = _MARGIN
        self._right = _LEAST_WIDTH

    def add_key(self, kinds: Iterable[str]) -> None:
        """Draw the legend of the colours, a line each."""
        for kind in kinds:
            box = Box(_MARGIN, self._y, _HEIGHT, _HEIGHT - _GAP_Y)
            self._boxes.setdefault(_COLOURS[kind], []).append(box)
            x, y = _MARGIN + _HEIGHT + _GAP_Y, self._y + box.height // 2
            self._labels.append(Label(x, y, _KEY[kind], 12))
            self._y += _HEIGHT
        self._y += _HEIGHT

    def add_text(self, words: str) -> None:
        self._labels.append(Label(_MARGIN, self._y + _HEIGHT // 2, words, 12))
        self._y += _HEIGHT

    def add(self, tree: _Node) -> None:
        self._place(tree, 0)
        self._y += _HEIGHT

    def _place(self, node: _Node, depth: int) -> int:
        """Place a node beside its children; return the y of its middle."""
        x, width = self._lefts[depth], self._widths[depth]
        middles = [self._place(child, depth + 1) for child in node.children]
        if middles:
            middle = middles[0]
            joint = x + width + _GAP_X // 2
            self._line(x + width, middle, _GAP_X // 2, _THICK)
            self._line(joint, middle, _THICK, middles[-1] - middle + _THICK)
            for each in middles:
                self._line(joint, each, _GAP_X - _GAP_X // 2, _THICK)
        else:
            middle = self._y + _HEIGHT // 2
            self._y += _HEIGHT + _GAP_Y
        box = Box(x, middle - _HEIGHT // 2, width, _HEIGHT)
        self._boxes.setdefault(_COLOURS[node.kind], []).append(box)
        self._labels.append(
            Label(x + _INSIDE, middle, _short(node.text), 12, title=node.text)
        )
        self._right = max(self._right, x + width)
        return middle

    def _line(self, x: int, y: int, width: int, height: int) -> None:
        self._boxes[_LINE].append(Box(x, y, width, height))

    def picture(self) -> Picture:
        width, height = self._right + _MARGIN, self._y + _MARGIN
        return Picture(width, height, self._boxes, self._labels, "Who waits for whom")


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
