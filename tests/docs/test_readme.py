# SPDX-License-Identifier: LGPL-2.1-or-later

"""The README's first table is what ``make demo`` prints."""

import re
from pathlib import Path

from msatools.commands.memstat import COMMAND

from tests.support.calls import call

ROOT = Path(__file__).parents[2]
DEMO = re.compile(r"on the dump that `make demo` shows:\n\n```\n(.*?)```\n", re.S)


def test_table_of_the_demo() -> None:
    (shown,) = DEMO.findall((ROOT / "README.md").read_text())
    makefile = (ROOT / "Makefile").read_text()
    (words,) = re.findall(r"\$\(BIN\)/msa-memstat (.*)", makefile)
    *options, path = words.split()
    assert call(COMMAND, *options, str(ROOT / path)).out == shown
