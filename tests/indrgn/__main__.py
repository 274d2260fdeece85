# SPDX-License-Identifier: LGPL-2.1-or-later

"""What of drgn works without debug info: ``python -m tests.indrgn [--quick] [RUN...]``.

It compares drgn's crash commands and helpers on dumps of the lab, and writes
docs/in-drgn.md; with --quick it leaves out the lines that walk all of a dump.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from fixtures import lab
from tests.indrgn import crash, helpers
from tests.indrgn.differences import between
from tests.indrgn.pairs import open_pair

PAGE = Path(__file__).parents[2] / "docs" / "in-drgn.md"
RUNS = ("memory-5.10", "memory-6.1", "memory-6.12", "plain-7.x", "crash-6.12")
HEAD = """\
# drgn without debug info

Written by `make in-drgn`, which opens a dump twice, with the kernel's debug info and
with what the dump says of itself ([In drgn](guides/in-drgn.md)), and compares.

A number is how many command lines of a command print the same; what its other lines
lack follows. {lines} lines were tried on each dump.

"""


def main(runs: list[str], lines: Sequence[str]) -> None:
    """Compare on each run, and write the page, which lists the runs so far."""
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    shares = {}
    for run in runs:
        pair = open_pair(lab.build(run))
        places = crash.fields(pair.dwarf)
        equal: dict[str, int] = defaultdict(int)
        lacking: dict[str, dict[str, None]] = defaultdict(dict)
        for line in lines:
            command = "*" if line[0] == "*" else line.split()[0]
            dwarf, btf = (
                crash.say(prog, line, places) for prog in (pair.dwarf, pair.btf)
            )
            try:
                names = between(pair, line, dwarf, btf)
            except AssertionError as error:
                print(f"{run}: {error}", file=sys.stderr)
                names = [f"**{line} differs**"]
            equal[command] += not names
            lacking[command].update(dict.fromkeys(names))
        for command in equal:
            words = [str(equal[command]), *lacking[command]]
            rows[command][run] = "; ".join(words)
        shares[run] = helpers.compare(pair)
        head = HEAD.format(lines=len(lines))
        PAGE.write_text(head + _commands([*shares], rows) + _helpers(shares))


def _commands(runs: list[str], rows: dict[str, dict[str, str]]) -> str:
    lines = [
        "## Crash commands\n",
        f"| %crash | {' | '.join(runs)} |",
        f"|---|{'---|' * len(runs)}",
    ]
    for command, cells in sorted(rows.items()):
        shown = "\\*" if command == "*" else command
        lines.append(f"| {shown} | {' | '.join(cells[run] for run in runs)} |")
    return "\n".join(lines) + "\n\n"


def _helpers(shares: dict[str, helpers.Share]) -> str:
    lines = [
        "## Helpers\n",
        "Functions of `drgn.helpers.linux` that were called on objects of the dump.",
        "Others take arguments that the test does not know, or fail on these objects",
        "with debug info, too.\n",
        "| Dump | called | the same | what the others need |",
        "|---|---|---|---|",
    ]
    for run, share in shares.items():
        others = "; ".join(f"{name}: {why}" for name, why in share.others.items())
        lines.append(f"| {run} | {share.called} | {share.equal} | {others or '-'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    words = sys.argv[1:]
    all_lines = "--quick" not in words
    main(
        [word for word in words if word != "--quick"] or [*RUNS],
        [each for each in crash.LINES if all_lines or not each.startswith(crash.SLOW)],
    )
