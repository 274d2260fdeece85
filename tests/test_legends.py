# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legends have whatever a command prints, and all that shows them has the same."""

from collections.abc import Iterator
from typing import get_args

import pytest
from drgn import ProgramFlags

from fixtures.demo.questions import QUESTIONS
from msatools.cli.arguments import make_parser
from msatools.cli.options import parse_words
from msatools.cli.subcommands import run_group
from msatools.cpus.model import SetKind, State
from msatools.legends import find, legend_of
from msatools.locks.report import LockTypeName
from msatools.memory.classes import CLASSES
from msatools.registry import NAMES, load, load_group
from msatools.render.blocks import Block, Column, Table, Text, line
from msatools.render.legend import with_key
from msatools.render.memstat.report import GROUPS, REST
from msatools.report.model import Severity, VerdictConfidence
from msatools.tasks.states import LETTERS
from msatools.tasks.waits import TaskClass
from msatools.zombies.model import Verdict
from tests.contract.table import ROWS, Row
from tests.support.calls import CORE, call, demo


def names_of(command: str) -> set[str]:
    groups = legend_of(command)
    return {
        name
        for group in groups
        for entry in group.entries
        for name in (entry.name, entry.key, *group.columns)
    }


LABELS = [row.label for _, rows in GROUPS for row in rows] + [row.label for row in REST]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("prstat", [*TaskClass.__members__, *LETTERS, "~", "<", ">", "-"]),
        ("locks", [*TaskClass.__members__, *LETTERS, *get_args(LockTypeName)]),
        ("locks", ["=", "~", "?", "exact", "likely", "evidence", "R", "W"]),
        ("memstat", [*CLASSES.values(), *LABELS, "ok", "UNEXPLAINED", "(torn)"]),
        ("cpus", [*get_args(State), *get_args(SetKind)]),
        ("zombies", [*get_args(Verdict), *LETTERS]),
        ("report", [*get_args(Severity), *get_args(VerdictConfidence)]),
    ],
)
def test_it_has_all_that_a_command_prints(command: str, names: list[str]) -> None:
    assert {*names} <= names_of(command)


def test_it_has_the_code_of_each_verdict() -> None:
    """Those that docs/commands/report.md lists, which has to list all."""
    from tests.docs.pages import DOCS

    page = (DOCS / "commands/report.md").read_text()
    codes = [
        code.strip("` ")
        for line in page.splitlines()
        if line.startswith("| `") and not line.startswith("| `-")
        for code in line.split("|")[1].split(",")
    ]
    assert len(codes) > 20
    assert {*codes} <= names_of("report")


def tables(name: str, words: list[str]) -> Iterator[Table]:
    """Yield the tables that a command prints of the demo core."""
    command = load(name)
    parser = make_parser(command, in_drgn=True)
    args = parser.parse_intermixed_args(words)
    parse_words(args.words)
    found = demo()
    assert not found.prog.flags & ProgramFlags.IS_LIVE
    report = command.start(found.prog, found.target, args).report(lambda *_: None)
    blocks: list[Block] = [*command.blocks(report, args)]
    yield from (block for block in blocks if isinstance(block, Table))


PLAIN = {
    *("PID", "TID", "COMMAND", "USER", "CPUS", "IRQ", "NAME", "CGROUP", "NICE", "WORK"),
    *("FLAGS", "WORKQUEUE", "DISK", "OPERATION", "SECTOR", "AGE", "DRIVER", "TOTAL"),
    *(
        "FILE",
        "FS",
        "VMALLOC",
        "VECTOR",
        "SECTION",
        "CONTAINER",
        "REMOVED CGROUP",
        "COUNT",
        "SLAB",
        "PROCESS",
    ),
    *(
        "BLOCKS OF",
        "CORE",
        "DIE",
        "PACKAGE",
        "THREAD",
        "FUNCTION",
        "CALLER",
        "NR",
        "ZONE",
        "TYPE",
    ),
}
"""Headers that say what they are."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_headers_are_explained(question: str) -> None:
    name, *words = question.split()
    # With --full a report has the tables of all.
    legends = map(names_of, NAMES if name == "report" else [name])
    known = PLAIN.union(*legends)
    for table in tables(name, words):
        headers = {column.header for column in table.columns}
        unknown = {
            header
            for header in headers - known
            # Bars, sizes of blocks, CPUs and nodes say what they are.
            if not header.startswith(("[", "cpu", "node", "Node", "NO ")) and header
            if not header[0].isdigit()
        }
        assert not unknown, (question, unknown)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_plain(name: str) -> None:
    """A name is once in its group, and its meaning is short and no sentence."""
    for group in legend_of(name):
        names = [entry.name for entry in group.entries]
        assert len({*names}) == len(names), group.title
        for entry in group.entries:
            assert len(entry.meaning) <= 66, entry
            assert not entry.meaning.endswith("."), entry
            assert not entry.source or entry.source.endswith("."), entry


# --- --why


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_why_needs_no_target(row: Row) -> None:
    """Each name is explained, without a kernel and without root."""
    ran = call(row.command, "--why", "all", opening=None)  # type: ignore[arg-type]
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    for group in legend_of(row.name):
        for entry in group.entries:
            start = f"{entry.name}  {group.kind}"
            at = next(n for n, line in enumerate(lines) if line.startswith(start))
            assert lines[at + 1] == f"  {entry.text}"


@pytest.mark.parametrize(
    ("name", "word", "names"),
    [
        ("prstat", "KLK", ["KLK"]),
        ("prstat", "LCK", ["LCK", "LCK"]),
        ("prstat", "t", ["t"]),
        ("prstat", "klk", ["KLK"]),
        ("prstat", "~,D", ["~", "D"]),
        ("memstat", "kernel's tables", ["kernel's tables"]),
        ("memstat", "kernel.slab", ["slab"]),
        ("cpus", "XCAL,wt", ["xcal", "wt"]),
    ],
)
def test_what_a_name_stands_for(name: str, word: str, names: list[str]) -> None:
    (found,) = call(load(name), "--why", word, "--json").samples
    assert [each["name"] for each in found["why"]] == names


def test_of_a_target_the_kernel_decides() -> None:
    """Where one is named; the demo's kernel has no statistics of sleeps."""
    ran = call(load("prstat"), "--why", "IOW,KLK", CORE)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("IOW  - not kept\n")
    assert "kernel.sched_schedstats=1" in ran.out
    (klk,) = (entry for _, entry in find(legend_of("prstat"), "KLK"))
    assert f"KLK\n  {klk.text}" in ran.out
    assert "- not kept" not in call(load("prstat"), "--why", "IOW").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--why WHAT", "unknown name 'WHAT'"),
        ("--why R -v", "-v: no effect with --why"),
        ("--why R --strict", "--strict: no effect with --why"),
        ("--why R --qemu x 5", "--why: names are explained once"),
    ],
)
def test_why_is_refused(words: str, message: str) -> None:
    ran = call(load("locks"), *words.split())
    assert ran.status == 2
    assert message in ran.err


# --- below a report


def lines_of(blocks: list[Block], name: str) -> list[str]:
    """Return the lines that are added to a report of some blocks."""
    added = [*with_key(blocks, legend_of(name))][len(blocks) :]
    assert all(isinstance(line, Text) for line in added)
    return [
        "".join(cell if isinstance(cell, str) else cell.text for cell in line.spans)
        for line in added
        if isinstance(line, Text)
    ]


def test_key_has_what_the_report_has() -> None:
    table = Table((Column("STATE"), Column("FOR")), [("D", "~3ms"), ("S", "-")])
    assert lines_of([table], "prstat") == [
        "",
        "Columns  STATE: state, as in /proc;  FOR: how long it has been in NOW",
        "States of tasks  S: sleeps; a signal wakes it;"
        "  D: uninterruptible sleep: nothing but what it waits for ends it",
        "Marks before a value  ~: estimate;"
        "  -: not recorded by the kernel, or it could not be read",
    ]


def test_graph_has_no_key() -> None:
    assert lines_of([Text(("digraph {",), narrow="keep")], "locks") == []
    assert lines_of([line("nothing")], "locks") == []


@pytest.mark.parametrize("name", ["cpus", "locks", "prstat"])
def test_verbose_report_ends_with_the_key(name: str) -> None:
    ran = call(load(name), "-v", "--by" if name == "locks" else "-n",
               "task" if name == "locks" else "2", CORE)  # fmt: skip
    assert (ran.status, ran.err) == (0, "")
    plain = call(load(name), CORE).out
    for group in legend_of(name):
        assert f"\n{group.title}  " not in plain
    assert any(f"\n{group.title}  " in ran.out for group in legend_of(name))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_help_fits_80_columns(row: Row) -> None:
    ran = call(row.command, "--help")
    assert "\nEXAMPLES:\n" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_why_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    group = load_group("fleet")
    assert run_group(group, ["--why", "trend"]) == 0
    assert capsys.readouterr().out.startswith("TREND  column\n  Dumps by day")
    for words, message in (
        (["--why", "X"], "--why: unknown name 'X'"),
        (["--why"], "--why: takes NAME"),
        (["--why", "BUCKET", "x"], "--why: takes NAME"),
    ):
        assert run_group(group, words) == 2
        assert message in capsys.readouterr().err
