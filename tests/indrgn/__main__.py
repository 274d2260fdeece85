# SPDX-License-Identifier: LGPL-2.1-or-later

"""What of drgn works without debug info.

It compares drgn's crash commands and helpers on dumps of the lab, and the modules of
corelens if drgn-tools is at hand, and writes docs/in-drgn.md.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from fixtures import lab
from tests.indrgn import corelens, crash, helpers
from tests.indrgn.differences import between
from tests.indrgn.pairs import open_pair

PAGE = Path(__file__).parents[2] / "docs" / "in-drgn.md"
RUNS = (
    *("memory-5.10", "memory-6.1", "memory-6.12", "plain-7.x", "crash-6.12"),
    "plain-6.12arm64",
)
CORELENS = "## corelens"
HEAD = """\
# drgn without debug info

Written by `make in-drgn`, which opens a dump twice, with the kernel's debug info and
with what the dump says of itself ([In drgn](guides/in-drgn.md)), and compares.

A number is how many command lines of a command print the same; what its other lines
lack follows. {lines} lines were tried on each dump.

"""


def main(runs: Sequence[str], lines: Sequence[str], peer: Path | None) -> None:
    """Compare on each run, and write the page, which lists the runs so far."""
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    shares = {}
    modules: dict[str, Mapping[str, str]] = {}
    for run in runs:
        made = lab.build(run)
        pair = open_pair(made)
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
        if peer is not None:
            modules[run] = corelens.compare(peer, made, pair)
        head = HEAD.format(lines=len(lines))
        parts = _commands([*shares], rows), _helpers(shares), _corelens(modules)
        PAGE.write_text(head + "\n".join(parts))


def renew_corelens(runs: Sequence[str], peer: Path) -> None:
    """Compare the modules of corelens alone, and renew their part of the page."""
    kept, _, _ = PAGE.read_text().partition(CORELENS)
    modules = {}
    for run in runs:
        made = lab.build(run)
        modules[run] = corelens.compare(peer, made, open_pair(made))
        PAGE.write_text(kept.rstrip("\n") + "\n\n" + _corelens(modules))


def _commands(runs: list[str], rows: dict[str, dict[str, str]]) -> str:
    lines = [
        "## Crash commands\n",
        f"| %crash | {' | '.join(runs)} |",
        f"|---|{'---|' * len(runs)}",
    ]
    for command, cells in sorted(rows.items()):
        shown = "\\*" if command == "*" else command
        lines.append(f"| {shown} | {' | '.join(cells[run] for run in runs)} |")
    return "\n".join(lines) + "\n"


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


def _corelens(modules: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"{CORELENS}\n"]
    if not modules:
        lines.append("Not compared: drgn-tools was not at hand.")
        return "\n".join(lines) + "\n"
    lines += [
        "Modules of drgn-tools' corelens, with drgn 0.3, which is newer than the one",
        "that drgn-tools wants. Debug info is the kernel's without that of modules.\n",
        f"| corelens -M | {' | '.join(modules)} |",
        f"|---|{'---|' * len(modules)}",
    ]
    for name in next(iter(modules.values())):
        cells = " | ".join(found[name] for found in modules.values())
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def _peer(source: Path | None) -> Path | None:
    try:
        return corelens.environment(source)
    except corelens.NoPeerError as error:
        print(f"corelens is not compared: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.indrgn", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="leave out lines that walk all of a dump")
    add("--drgn-tools", type=Path, metavar="DIRECTORY", help="source of drgn-tools")
    add("--corelens", action="store_true", help="renew the part on corelens alone")
    add("runs", nargs="*", default=RUNS, metavar="RUN")
    args = parser.parse_args()
    if args.corelens:
        renew_corelens(args.runs, corelens.environment(args.drgn_tools))
        sys.exit()
    is_slow = crash.SLOW if args.quick else ()
    main(
        args.runs,
        [each for each in crash.LINES if not each.startswith(is_slow)],
        _peer(args.drgn_tools),
    )
