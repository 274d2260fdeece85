# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every view of every command, on terminals of three sizes."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from unittest.mock import patch

import pytest

from fixtures.demo import QUESTIONS
from fixtures.demo.questions import command
from msatools.registry import NAMES
from msatools.render.blocks import Block, Table, Text
from msatools.render.device import Device
from msatools.render.plain import columns_of, lines
from msatools.render.terminal import Drawing, drawn
from tests.support.calls import call
from tests.support.golden import Golden

SIZES = {80: 24, 120: 40, 200: 60}
"""Lines of terminals, by their columns."""

ASKED = {question.split()[0] for question in QUESTIONS}
VIEWS = (
    *(question for question in QUESTIONS if "--stack" not in question),
    *(name for name in NAMES if name not in ASKED),
    "memstat --self-check",
    "locks --by task",
    "prstat -m",
    "prstat -mL -n 9",
    "prstat --stacks",
    "cpus -v",
    "cpus -i -v",
)
"""Stacks are long, and as they are on any terminal."""

CHANGING = re.compile(r"cost: .*|scanned in \S+|, [\d,]+ reads|could not read.*")
"""What depends on the machine and on versions."""


@cache
def blocks_of(view: str) -> tuple[Sequence[Block], bool]:
    """Return the blocks of a view of a demo core, and whether it shows all (``-v``)."""
    name, *words = view.split()
    shown: list[Block] = []
    devices: list[Device] = []

    def show(blocks: Iterable[Block], out: object, device: Device) -> None:
        shown.extend(blocks)
        devices.append(device)

    # What a process in the sandbox shows is out of reach.
    unconfined = patch("msatools.cli.execution._is_confined", return_value=False)
    with patch("msatools.render.device.show", show), unconfined:
        assert call(command(name), *words, "vmcore").status == 0
    (device,) = devices
    return shown, device.full


def lines_of(view: str, columns: int) -> Iterator[str]:
    blocks, full = blocks_of(view)
    device = Device(columns, SIZES[columns], full=full)
    for line in drawn(blocks, device):
        if line.startswith("-- for a bug report"):
            # It has what other tests have asked of the same program.
            return
        yield CHANGING.sub("(...)", line)


WIDE = ("locks", "memstat", "prstat")
"""Commands that have more to show on 200 columns; others look as they do on 120."""


@pytest.mark.parametrize(
    ("name", "columns"),
    [(name, size) for name in NAMES for size in SIZES if size < 200 or name in WIDE],
)
def test_golden(golden: Golden, name: str, columns: int) -> None:
    lines: list[str] = []
    for view in (view for view in VIEWS if view.split()[0] == name):
        lines += [f"--- msa-{view}", *lines_of(view, columns), ""]
    golden(f"widths/{name}-{columns}", lines)


@pytest.mark.parametrize("columns", [30, *SIZES])
@pytest.mark.parametrize("view", VIEWS)
def test_no_line_is_wider_than_the_terminal(view: str, columns: int) -> None:
    blocks, full = blocks_of(view)
    for block in blocks:
        if isinstance(block, Text) and block.narrow == "keep":
            # For another program.
            continue
        for text in drawn([block], Device(columns, full=full)):
            assert columns_of(text) <= columns, text


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("view", [view for view in VIEWS if " -v" not in view])
def test_each_row_is_one_line(view: str, columns: int) -> None:
    tables = [block for block in blocks_of(view)[0] if isinstance(block, Table)]
    for table in tables:
        body, _ = Drawing(Device(columns)).table_lines(table)
        rows = 1 + len(table.rows) + sum(map(len, table.notes.values()))
        narrower = rows
        if table.narrower is not None:
            narrower += sum(map(len, table.narrower.notes.values()))
        if table.keeps_all:
            # In parts, with an empty line between.
            assert not (sum(1 for _ in body) + 1) % (rows + 1)
        else:
            assert sum(1 for _ in body) in (rows, narrower)


@pytest.mark.parametrize("view", ["prstat", "prstat -m", "locks --by task"])
@pytest.mark.parametrize("lines", [24, 40])
def test_one_list_fills_the_screen(view: str, lines: int) -> None:
    """One line is for the prompt; how many rows there are besides is said."""
    blocks, _ = blocks_of(view)
    found = list(drawn(blocks, Device(80, lines)))
    whole = list(drawn(blocks, Device(80)))
    assert len(found) <= lines - 1
    if len(whole) > lines:
        assert len(found) >= lines - 2
        (left,) = re.findall(r"… (\d+) more", "\n".join(found))
        assert int(left) == len(whole) - len(found) + 1
    else:
        assert found == whole


@pytest.mark.parametrize("view", VIEWS)
def test_everything_is_in_a_pipe(view: str) -> None:
    blocks, _ = blocks_of(view)
    laid = (line for block in blocks for line in lines(block))
    text = ["".join(span.text for span in line) for line in laid]
    assert not any("left out" in line for line in text)
    for table in (block for block in blocks if isinstance(block, Table)):
        assert all(column.header in "".join(text) for column in table.columns)
