# SPDX-License-Identifier: LGPL-2.1-or-later

"""What of drgn works without debug info.

It compares drgn's crash commands and helpers on dumps of the lab, and the modules of
corelens if drgn-tools is at hand, and writes docs/in-drgn.md.
"""

import argparse
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from fixtures import lab
from tests.indrgn import corelens, crash, helpers
from tests.indrgn.differences import between
from tests.indrgn.pairs import Pair, open_pair

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


@dataclass(frozen=True)
class Found:
    """What was compared on one dump."""

    cells: Mapping[str, str]
    """Of each crash command, how many lines are equal, and what others lack."""

    share: helpers.Share
    modules: Mapping[str, str]
    """Of each module of corelens; empty without drgn-tools."""


def main(runs: Sequence[str], lines: Sequence[str], peer: Path | None) -> None:
    """Compare on each run, and write the page, which lists the runs so far."""
    found: dict[str, Found] = {}
    # Forked, as functions of __main__ have no other name; this one opens no dump.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(mp_context=context) as pool:
        work = {pool.submit(compare, run, lines, peer): run for run in runs}
        for done in as_completed(work):
            found[work[done]] = done.result()
            ordered = {run: found[run] for run in runs if run in found}
            head = HEAD.format(lines=len(lines))
            PAGE.write_text(head + "\n".join(_parts(ordered)))


def compare(run: str, lines: Sequence[str], peer: Path | None) -> Found:
    """Compare on one run."""
    made = lab.build(run)
    pair = open_pair(made)
    modules = {} if peer is None else corelens.compare(peer, made, pair)
    return Found(_compare_commands(run, pair, lines), helpers.compare(pair), modules)


def _compare_commands(run: str, pair: Pair, lines: Sequence[str]) -> dict[str, str]:
    places = crash.fields(pair.dwarf)
    equal: dict[str, int] = defaultdict(int)
    lacking: dict[str, dict[str, None]] = defaultdict(dict)
    for line in lines:
        command = "*" if line[0] == "*" else line.split()[0]
        dwarf, btf = (crash.say(prog, line, places) for prog in (pair.dwarf, pair.btf))
        try:
            names = between(pair, line, dwarf, btf)
        except AssertionError as error:
            print(f"{run}: {error}", file=sys.stderr)
            names = [f"**{line} differs**"]
        equal[command] += not names
        lacking[command].update(dict.fromkeys(names))
    return {name: "; ".join([str(equal[name]), *lacking[name]]) for name in equal}


def renew_corelens(runs: Sequence[str], peer: Path) -> None:
    """Compare the modules of corelens alone, and renew their part of the page."""
    kept, _, _ = PAGE.read_text().partition(CORELENS)
    modules = {}
    for run in runs:
        made = lab.build(run)
        modules[run] = corelens.compare(peer, made, open_pair(made))
        PAGE.write_text(kept.rstrip("\n") + "\n\n" + _corelens(modules))


def _parts(found: Mapping[str, Found]) -> Iterator[str]:
    yield _commands({run: each.cells for run, each in found.items()})
    yield _helpers({run: each.share for run, each in found.items()})
    yield _corelens({run: each.modules for run, each in found.items() if each.modules})


def _commands(cells: Mapping[str, Mapping[str, str]]) -> str:
    lines = [
        "## Crash commands\n",
        f"| %crash | {' | '.join(cells)} |",
        f"|---|{'---|' * len(cells)}",
    ]
    for command in sorted(next(iter(cells.values()))):
        shown = "\\*" if command == "*" else command
        row = " | ".join(of_run[command] for of_run in cells.values())
        lines.append(f"| {shown} | {row} |")
    return "\n".join(lines) + "\n"


def _helpers(shares: Mapping[str, helpers.Share]) -> str:
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
