# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables on real pseudo-terminals of several sizes."""

import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from msatools.render.blocks import Block, Column, Table, free_text
from tests.support.calls import CORE
from tests.support.probe import COMMAND, GUEST, ProbeReport, on_terminal
from tests.support.terminal import Terminal

CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(command: str, *words: str, size: tuple[int, int]) -> list[str]:
    """Return the lines that a console script leaves on a terminal."""
    script = Path(sys.executable).with_name(f"msa-{command}")
    # Nothing on standard error, where a line shows the progress of a busy machine.
    shell = 'exec "$@" 2>/dev/null'
    words = ("sh", "-c", shell, "sh", str(script), "--types", "btf", *words, CORE)
    terminal = Terminal(words, size=size)
    assert terminal.end() == 0
    assert "\x1b[1m" in terminal.seen
    return CODE.sub("", terminal.seen).splitlines()


def test_memstat() -> None:
    lines = shown("memstat", size=(80, 24))
    assert max(map(len, lines)) <= 80
    rows = {line.strip().split("  ")[0]: line for line in lines}
    # The longest cell is cut, not broken; the shortest is whole; a reason is below.
    assert re.search(r"  nr_vmalloc_pages, with.*… +ok$", rows["vmalloc"])
    assert re.search(r"  -132$", rows["percpu"])
    assert lines[lines.index(rows["percpu"]) + 1] == (
        "    -132: 132 in reserved boot memory"
    )
    assert re.search(r"totalram_pages +ok$", rows["Managed"])
    assert lines[-1] == "18 checks: 16 exact, 2 explained"


def test_sandbox_knows_the_size() -> None:
    lines = shown("prstat", "--sandbox", size=(70, 30))
    assert 60 < max(map(len, lines)) <= 70
    assert 28 <= len(lines) <= 29


def blocks(report: ProbeReport, args: Namespace) -> Iterator[Block]:
    columns = (Column("NAME"), Column("COST", worth=1), free_text("CAUSE", least=10))
    yield Table(columns, [["a name", "12345", "a cause of many words"]] * 30)


def test_resize() -> None:
    """Columns and words come and go with the width, before the next sample."""
    command = replace(COMMAND, blocks=blocks)
    terminal = on_terminal(*GUEST, "0.05", "1000", command=command, size=(80, 24))
    terminal.read_until(r"a name  12345  a cause of many words *\r\n")
    for columns, row in (
        (30, r"a name  12345  a cause of man…"),
        (24, r"a name  a cause of many…"),
        (80, r"a name  12345  a cause of many words"),
    ):
        seen = len(terminal.seen)
        terminal.resize(columns, 9)
        terminal.read_until(rf"\n\r?{row} *\r\n", seen)
        if columns == 24:
            terminal.read_until(r"… left out: COST", seen)
    terminal.press("q")
    assert terminal.end() == 0
