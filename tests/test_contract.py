# SPDX-License-Identifier: LGPL-2.1-or-later

"""The contract of every command, by its row in the table.

Commands run in this process, on a demo core that also serves as a running guest.
"""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn, get_args
from unittest.mock import patch

import msgspec
import pytest
from drgn import cast
from drgn.commands import (
    DEFAULT_COMMAND_NAMESPACE,
    CommandArgumentError,
    CommandError,
    run_command,
)
from drgn.helpers.linux.pid import for_each_task

import msatools
from fixtures import lab
from fixtures.demo.questions import words_of_json
from msatools.cli.arguments import examples_of, make_parser, operands_of
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.cli.main import run_console
from msatools.locks.report import LockTypeName
from msatools.memory.classes import CLASSES
from msatools.program import Opened, TargetError, TargetSpec, open_target
from msatools.registry import GROUPS
from msatools.tasks.states import LETTERS
from msatools.tasks.waits import TaskClass
from msatools.zombies.model import Verdict
from tests.contract.table import (
    PRSTAT,
    ROWS,
    SHARED_OPTIONS,
    TARGET_OPTIONS,
    ZOMBIES,
    Row,
)
from tests.contract.units import misfits_of_units
from tests.support import overlay
from tests.support.calls import (
    CORE,
    GUEST,
    Ran,
    as_named,
    call,
    demo,
    end,
    open_demo,
    start,
    with_operands,
)
from tests.support.golden import Golden

ROOT = Path(__file__).parents[1]
VARYING = re.compile(
    r"^(scanned in )\S+()$|\b()\d+( reads\b)|( bytes, )[\d.]+m?s()$", re.MULTILINE
)
"""Output that depends on the machine and on earlier reads."""

STYLE = re.compile(r"\x1b\[[0-9;]*m")
WIDTH = 88


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, Row) else None


each_row = pytest.mark.parametrize("row", ROWS, ids=name_of)
each_with_intervals = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.command.operands is None], ids=name_of
)
"""Commands without words of their own: these have no intervals."""

signals = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def each_of(*fields: str) -> pytest.MarkDecorator:
    """Parametrize over the arguments in some fields of each row."""
    pairs = [(row, words) for row in ROWS for f in fields for words in getattr(row, f)]
    ids = [f"{row.name} {words}" for row, words in pairs]
    return pytest.mark.parametrize(("row", "words"), pairs, ids=ids)


def untouched(spec: TargetSpec) -> NoReturn:
    pytest.fail(f"{spec} is opened")


@cache
def answer(row_name: str, *words: str) -> Ran:
    """Run a command on the demo, once."""
    return call(named(row_name).command, *words, CORE)


def named(row_name: str) -> Row:
    (row,) = (row for row in ROWS if row.name == row_name)
    return row


# --- the table


def test_every_command_has_a_row() -> None:
    names = [row.name for row in ROWS]
    modules = {path.stem for path in ROOT.glob("commands/[!_]*.py")}
    assert names == sorted(modules.difference(GROUPS))
    scripts = {
        script.name: script.value for script in entry_points(group="console_scripts")
    }
    assert {name: scripts[name] for name in scripts if name.startswith("msa-")} == {
        f"msa-{name}": f"msatools.console:{name}" for name in (*names, *GROUPS)
    }
    registered = [name for name, _ in DEFAULT_COMMAND_NAMESPACE.enabled(demo().prog)]
    assert {*registered} >= {*names}


@each_row
def test_options(row: Row) -> None:
    """A command's options are those of its row, which uses each of them."""
    for in_drgn, wanted in ((True, frozenset()), (False, TARGET_OPTIONS)):
        parser = make_parser(row.command, in_drgn=in_drgn)
        found = {word for action in parser._actions for word in action.option_strings}
        common = SHARED_OPTIONS - (set() if row.command.offers_diff else {"--diff"})
        assert found == row.options | common | wanted
    written = " ".join([*row.asked, *row.no_json, *row.wrong])
    assert row.options <= {*written.split()}


def test_names() -> None:
    """Names can be added, but not removed."""
    assert {*CLASSES.values()} >= {
        *("free.buddy", "free.pcp", "free.hugetlb", "free.unaccepted", "user.anon"),
        *("user.ksm", "user.hugetlb", "cache.file", "cache.exec", "cache.shmem"),
        *("cache.blockdev", "kernel.slab", "kernel.large_kmalloc"),
        *("kernel.page_tables", "kernel.page_tables_own", "kernel.stacks"),
        *("kernel.vmalloc", "kernel.percpu", "kernel.zsmalloc", "kernel.movable"),
        *("kernel.unattributed", "reserved", "offline", "hwpoison", "device"),
        *("excluded", "unreadable"),
    }
    assert {*LETTERS} == {*"RSDTtZXIP"}
    assert {*TaskClass.__members__} == {
        *("CPU", "USR", "SYS", "INT", "LAT", "LCK", "KLK", "FLK", "POL", "FLT"),
        *("SWP", "RCL", "DSK", "PIP", "NET", "TMR", "WAI", "SIG", "IPC", "TTY"),
        *("URG", "KTW", "STP", "TRC", "ZMB", "OTH", "WAK"),
    }
    assert {*get_args(LockTypeName)} >= {
        *("mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex", "percpu_rwsem"),
        *("spinlock", "futex", "pi_futex", "completion", "folio", "bit_wait"),
        *("wait_queue", "posix_lock", "flock"),
    }
    assert get_args(Verdict) == (
        *("leader-exited", "being-reaped", "traced", "parent-blocked"),
        *("parent-stopped", "reaper-never-reaps", "sigchld-blocked"),
        *("waiting-for-other", "clone-child", "handler-missed", "never-waits"),
        "unknown",
    )


# --- calling

INTERVALS_WRONG = {
    "0": "0: not a positive interval",
    "-5": "-5: not a positive interval",
    "nan": "nan: not a positive interval",
    "5 0": "0: not a positive count",
    "5 1.5": "1.5: not a positive count",
    "5 3 1": "1: a third number, after INTERVAL and COUNT",
    "a b": "b: a second target, after a",
    "a -k": "-k: a second target, after a",
    "-c a b": "a: a second target, after b",
    "--qemu x a": "x: a second target, after a",
    "a 5": "a: a dump does not change in an interval",
    "5 -c a": "a: a dump does not change in an interval",
}
"""Wrong usage of commands that take no words but a target, an interval and a count."""

CALLED_WRONG = {
    "-c a -k": "-k: a second target, after a",
    "--budget 10": "--budget: it is for samples, and no INTERVAL is named",
    "--budget 0 5": "not a share of one CPU, 0 to 100 %: '0'",
    "--budget 101% 5": "not a share of one CPU",
    "--budget nan 5": "not a share of one CPU",
    "--budget x 5": "not a share of one CPU",
    "--types c": "invalid choice: 'c'",
    "-s x --types btf": "-s: asks for debug info, and --types btf for none",
    "--debuginfod --types btf": "--debuginfod: asks for debug info",
    "--kernel 2": "--kernel: it is for dumps, and no dump is named",
    "--kernel 0 a": "not a number of a kernel, from 1: '0'",
    "--vmcoreinfo a --qemu b": "--vmcoreinfo: it is for dumps, and no dump is named",
    "-s": "expected one argument",
    "--nonsense": "unrecognized arguments: --nonsense",
    "-x": "unrecognized arguments: -x",
    "--jso": "unrecognized arguments: --jso",
}


@pytest.mark.parametrize("words", CALLED_WRONG)
@each_row
def test_called_wrong(row: Row, words: str) -> None:
    check_wrong(row, words, CALLED_WRONG[words])


@pytest.mark.parametrize("words", INTERVALS_WRONG)
@each_with_intervals
def test_wrong_intervals(row: Row, words: str) -> None:
    check_wrong(row, words, INTERVALS_WRONG[words])


@each_of("wrong")
def test_wrong_options(row: Row, words: str) -> None:
    check_wrong(row, words, row.wrong[words])
    if " 5" not in words:
        message = rf"^%{row.name}: .*{re.escape(row.wrong[words])}"
        given = with_operands(row.command, *words.split())
        with pytest.raises(CommandArgumentError, match=message):
            run_in_drgn(row.command, demo().prog, given)


@pytest.mark.parametrize("words", ["vmcore", "--qemu socket", "-c vmcore"])
@pytest.mark.parametrize("row", [PRSTAT, ZOMBIES], ids=["prstat", "zombies"])
def test_users_that_have_no_names(row: Row, words: str) -> None:
    """User names are accepted only for the running kernel."""
    message = "-u root: a dump has no user names"
    check_wrong(row, f"-u 0,root {words}", message)
    with pytest.raises(CommandArgumentError, match=message):
        run_in_drgn(row.command, demo().prog, ["-u", "0,root"])


def check_wrong(row: Row, words: str, message: str) -> None:
    """Check that a command prints one line with an error and opens no target."""
    ran = call(row.command, *words.split(), opening=untouched)
    assert (ran.status, ran.out) == (2, "")
    line = rf"msa-{row.name}: ([^\n]+); see msa-{row.name} --help\n"
    matched = re.fullmatch(line, ran.err)
    assert matched, ran.err
    assert message in matched[1]


INTERVALS_IN_DRGN = {
    "vmcore": "vmcore: the target is drgn's own",
    "5": "5: the dump does not change in an interval",
    "0": "0: not a positive interval",
}
REFUSED_IN_DRGN = {
    "-k": "-k: the target is drgn's own; name it where",
    "-c vmcore": "-c: the target is drgn's own; name it where",
    "-s vmlinux": "-s: the target is drgn's own; name it where",
    "--qemu x": "--qemu: the target is drgn's own; name it where",
    "--types dwarf": "--types: the target is drgn's own; name it where",
    "--debuginfod": "--debuginfod: the target is drgn's own; name it where",
    "--kernel 1": "--kernel: the target is drgn's own; name it where",
    "--vmcoreinfo x": "--vmcoreinfo: the target is drgn's own; name it where",
    "--sandbox": "--sandbox: the target is drgn's own; name it where",
    "--types=dwarf": "--types: the target is drgn's own; name it where",
    "--nonsense\x1b": r"unrecognized arguments: --nonsense\x1b",
}


@pytest.mark.parametrize("words", REFUSED_IN_DRGN)
@each_row
def test_called_wrong_in_drgn(row: Row, words: str) -> None:
    check_wrong_in_drgn(row, words, REFUSED_IN_DRGN[words])


@pytest.mark.parametrize("words", INTERVALS_IN_DRGN)
@each_with_intervals
def test_wrong_intervals_in_drgn(row: Row, words: str) -> None:
    check_wrong_in_drgn(row, words, INTERVALS_IN_DRGN[words])


def check_wrong_in_drgn(row: Row, words: str, message: str) -> None:
    message = f"%{row.name}: {message}"
    with pytest.raises(CommandArgumentError, match=f"^{re.escape(message)}"):
        run_command(demo().prog, f"{row.name} {words}")


OPENED = {
    "": TargetSpec(),
    "-k": TargetSpec(),
    "dump": TargetSpec(path="dump"),
    "-c dump": TargetSpec(path="dump"),
    "./5": TargetSpec(path="./5"),
    "0x5": TargetSpec(path="0x5"),
    "/proc/kcore 5": TargetSpec(path="/proc/kcore"),
    "5": TargetSpec(),
    "0.5 3 /proc/kcore": TargetSpec(path="/proc/kcore"),
    "--qemu g.sock 5 3": TargetSpec(qemu="g.sock"),
    "-s vmlinux dump": TargetSpec(path="dump", vmlinux="vmlinux"),
    "--types btf dump": TargetSpec(path="dump", types="btf"),
    "dump --types dwarf --debuginfod": TargetSpec(
        path="dump", types="dwarf", debuginfod=True
    ),
    "dump --kernel=2": TargetSpec(path="dump", kernel=2),
    "dump --vmcoreinfo note": TargetSpec(path="dump", vmcoreinfo="note"),
}


NUMBERS = ("0x5", "0.5 3 /proc/kcore")
"""Words that have another meaning for a command with words of its own."""


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param(row, words, id=f"{row.name} {words}")
        for row in ROWS
        for words in OPENED
        if row.command.operands is None or words not in NUMBERS
    ],
)
def test_opened_target(row: Row, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that reads the kernel it runs on lowers its own priority."""
    found, niced = [], []

    def refuse(spec: TargetSpec) -> NoReturn:
        found.append(spec)
        raise TargetError("it", "is not there", "do not look")

    monkeypatch.setattr("msatools.cli.execution.be_nice", lambda: niced.append(1))
    # Else another process would open it.
    monkeypatch.setattr("msatools.cli.sandbox.binding", lambda: None)
    ran = call(row.command, *words.split(), opening=refuse)
    takes_logs = row.command.reads_logs
    assert found == [msgspec.structs.replace(OPENED[words], takes_logs=takes_logs)]
    assert ran == Ran(1, "", f"msa-{row.name}: it: is not there; do not look\n")
    assert bool(niced) == (found[0].is_live and found[0].qemu is None)


@pytest.mark.parametrize("option", ["-h", "--help"])
@each_row
def test_help(row: Row, option: str) -> None:
    ran = call(row.command, option, "nonsense", "5", opening=untouched)
    assert (ran.status, ran.err) == (0, "")
    operands = operands_of(row.command, in_drgn=False)
    assert ran.out.startswith(f"USAGE: msa-{row.name} [OPTION...] {operands}\n")
    assert operands.startswith("[TARGET] ")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert row.command.summary in lines
    for word in row.options | SHARED_OPTIONS | TARGET_OPTIONS:
        assert re.search(rf"^  .*(?<!\S){re.escape(word)}(?![\w-])", ran.out, re.M)
    examples = lines[lines.index("EXAMPLES:") + 1 :]
    shared = ("vmcore", "-s vmlinux vmcore", "5 12", "")
    given = examples_of(row.command, in_drgn=False)
    assert len(given) >= len(row.command.examples)
    if row.command.operands is None:
        assert {*shared} <= {words for words, _ in given}
    for words, what in given:
        start = f"  msa-{row.name} {words}"
        beside = {e for e in examples if re.fullmatch(f"{re.escape(start)} +.*", e)}
        below = {
            e for e, then in itertools.pairwise(examples) if then == f"      {what}"
        }
        (line,) = {e for e in beside if e.endswith(f"  {what}")} | (
            below & {start.rstrip()}
        )
        asks = [word.strip("'") for word in words.partition(" |")[0].split()]
        args = make_parser(row.command, in_drgn=False).parse_intermixed_args(asks)
        assert row.command.complaint(args, "5" in asks) is None, line


@each_row
def test_help_in_drgn(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(demo().prog, f"{row.name} -h") is None
    printed = capsys.readouterr().out
    first, _, rest = printed.partition("\n")
    operands = operands_of(row.command, in_drgn=True)
    assert first == f"USAGE: %{row.name} [OPTION...] {operands}"
    assert not operands.startswith("[TARGET]")
    assert not re.search("vmcore|vmlinux|--qemu|--version|--debug", rest)
    assert re.search(
        rf"^  %{row.name} {re.escape(row.command.examples[0][0])}(  |$)", rest, re.M
    )
    command: Any = DEFAULT_COMMAND_NAMESPACE.lookup(demo().prog, row.name)
    assert command.format_usage() == first.removeprefix("USAGE: ")
    body = command.format_help(indent="    ")
    assert [line.removeprefix("    ") for line in body.splitlines()] == (
        rest.strip("\n").splitlines()
    )
    assert command.description() == row.command.summary
    assert len(row.command.summary) <= WIDTH


@each_row
def test_version(row: Row) -> None:
    """The installed script prints its name and version."""
    script = Path(sys.executable).with_name(f"msa-{row.name}")
    done = subprocess.run(
        [script, "--version", "nonsense"], capture_output=True, text=True, check=True
    )
    line = f"msa-{row.name} {msatools.__version__}\n"
    assert (done.stdout, done.stderr) == (line, "")
    ran = call(row.command, "--version", opening=untouched)
    assert ran == Ran(0, done.stdout, "")


# --- reports


@each_row
def test_text(row: Row, golden: Golden) -> None:
    """All characters are printable, and a whole core has no losses."""
    found = []
    for words in ("", *row.asked, *row.no_json):
        # Command lines in it name the dump, wherever that is.
        ran = call(row.command, "--strict", *words.split(), "vmcore")
        assert (ran.status, ran.err) == (0, "")
        lines = ran.out.splitlines()
        assert all(line.isprintable() for line in lines)
        found += [f"$ msa-{row.name} {words}", *lines, ""]
    golden(f"demo/{row.name}", [VARYING.sub(r"\1\3\5N\2\4\6", line) for line in found])


@each_row
def test_header(row: Row) -> None:
    lines = answer(row.name).out.splitlines()
    release = demo().target.release
    assert lines[0].startswith(f"{release}  vmcore (kdump zlib, level 31)  types: btf")
    sources = [
        line for line in answer(row.name, "-v").out.splitlines() if "types of" in line
    ]
    assert sources == [
        "types of kernel: btf, from the kernel itself",
        "types of other modules: not asked for",
    ]


def check_json(row: Row, found: dict[str, Any]) -> None:
    assert [*misfits_of_units(found)] == []
    assert found["schema"] == f"msatools.{row.name}/1"
    head = ["schema", "target", "taken_at_ns", "interval_ns", "coverage", "notes"]
    assert list(found)[:6] == head


@each_of("asked")
def test_json(row: Row, words: str) -> None:
    check_answer(row, words)


@each_row
def test_json_without_options(row: Row) -> None:
    check_answer(row, "")
    target = answer(row.name, "--json").json["target"]
    assert target == {
        "path": CORE,
        "kind": "kdump",
        "live": False,
        "release": demo().target.release,
        "arch": "x86_64",
        "page_size": 4096,
        "types": "btf",
        "dump_level": 31,
        "truncated": False,
        "crash": None,
        "format": "kdump zlib",
    }


def check_answer(row: Row, words: str) -> None:
    given = words_of_json(row.command, words.split())
    ran = answer(row.name, *given, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    assert ran.out.rstrip("\n").isascii()
    assert ran.out.rstrip("\n").isprintable()
    check_json(row, ran.json)


@pytest.mark.parametrize("row", [row for row in ROWS if row.rich], ids=name_of)
def test_json_of_a_rich_dump(row: Row) -> None:
    """Keys that are empty for the demo have their shape as well."""
    assert row.rich is not None
    run = lab.build(row.rich)
    opened = open_target(TargetSpec(path=str(run.dump("elf")), types="btf"))
    ran = call(row.command, "--json", "--strict", "dump", opening=lambda _: opened)
    assert (ran.status, ran.err) == (0, "")
    check_json(row, ran.json)
    empty = [key for key, value in ran.json.items() if value == []]
    assert set(empty) <= {"notes", "inversions", "losses"}
    if row.name == "zombies":
        assert any(leader["evidence"]["handler"] for leader in ran.json["groups"])


@each_of("absent")
def test_arguments_that_name_nothing(row: Row, words: str) -> None:
    for more in ((), ("--json",)):
        ran = answer(row.name, *words.split(), *more)
        assert (ran.status, ran.out) == (1, "")
        assert re.fullmatch(rf"msa-{row.name}: [^\n]+: [^\n]+; [^\n]+\n", ran.err)
        assert ran.err.startswith(f"msa-{row.name}: {row.absent[words]}")
    with pytest.raises(TargetError, match=re.escape(row.absent[words])):
        run_in_drgn(row.command, demo().prog, words.split())


# --- intervals


@each_with_intervals
def test_samples(row: Row) -> None:
    """A line per sample, with its cost; the demo's clock stands still."""
    ran = call(row.command, *GUEST, "0.01", "2", "--json")
    assert (ran.status, ran.err) == (0, "")
    first, second = ran.samples
    for sample in (first, second):
        check_json(row, sample)
        if row.name == "memstat":
            assert {each["delta_pages"] for each in sample["classes"]} == {0}
        assert sample["interval_ns"] == 0
        assert "clock-stands-still" in {note["code"] for note in sample["notes"]}
        assert sample["target"]["kind"] == "qmp"
        assert sample["target"]["live"] is True


@each_with_intervals
def test_samples_as_text(row: Row) -> None:
    ran = call(row.command, *GUEST, "0.01", "2")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    times = [n for n, line in enumerate(lines) if re.fullmatch(r"\d\d(:\d\d){2}", line)]
    assert len(times) == 2
    assert times[0] == 0
    cost = rf"msa-{row.name}: \d+\.\d\d s CPU, \d+\.\d % of one CPU, \d+\.\d+ [MG]iB"
    for last in (times[1] - 1, -1):
        assert re.fullmatch(cost, lines[last])
        note = "note: the kernel's clock stands still: it is paused, or hangs"
        assert lines[last - 1] == note


# --- strict


@cache
def damaged(row_name: str) -> Opened:
    """Open the demo without something that a command reads, once."""
    found = open_target(TargetSpec(path=CORE, types="btf"))
    named(row_name).damage(found.prog)
    return found


@each_row
def test_strict_on_damage(row: Row) -> None:
    """The report is printed in any case, with the losses."""
    for strict, status in (((), 0), (("--strict",), 3)):
        ran = call(row.command, CORE, "--json", *strict, opening=open_damaged(row))
        assert (ran.status, ran.err) == (status, "")
        check_json(row, ran.json)
        assert ran.json["coverage"][row.damaged] > 0
        assert "lost" in {note["code"] for note in ran.json["notes"]}
        if row.command.operands is not None:
            continue
        ran = call(row.command, *GUEST, "0.01", "2", *strict, opening=open_damaged(row))
        assert (ran.status, ran.err) == (status, "")
        assert "\nnote: " in ran.out


def open_damaged(row: Row) -> Callable[[TargetSpec], Opened]:
    found = damaged(row.name)
    return lambda spec: Opened(found.prog, as_named(found.target, spec))


@each_row
def test_strict_in_drgn(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    words = with_operands(row.command, "--strict")
    report = run_in_drgn(row.command, demo().prog, [*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert report is not None
    assert report.taken_at_ns == printed["taken_at_ns"]
    with pytest.raises(CommandError, match=rf"%{row.name}: the report is not complete"):
        run_in_drgn(row.command, damaged(row.name).prog, words)
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """The demo without its last page."""
    path = tmp_path_factory.mktemp("cut") / "vmcore"
    path.write_bytes(Path(CORE).read_bytes()[:-4096])
    return open_target(TargetSpec(path=str(path), types="btf"))


@each_row
def test_truncated(row: Row, cut: Opened) -> None:
    message = "truncated: the file ends before the last of its pages"
    ran = call(row.command, "--strict", "dump", opening=lambda _: cut)
    assert ran.err == ""
    assert ran.out.splitlines()[1] == message
    assert ran.status == 3
    ran = call(row.command, "--json", "dump", opening=lambda _: cut)
    assert ran.status == 0
    assert ran.json["target"]["truncated"] is True
    assert message not in answer(row.name).out


@each_row
@pytest.mark.parametrize("damaged", ["impossible", "unreadable"])
def test_a_damaged_clock_is_a_loss(row: Row, damaged: str) -> None:
    """An impossible clock puts CLOCK_MONOTONIC centuries from the scheduler's."""
    opened = open_target(TargetSpec(path=CORE, types="btf"))
    address = opened.prog["__gtod_offset"].address_
    if damaged == "impossible":
        overlay.put(opened.prog, address, (1 << 62).to_bytes(8, "little"))
    else:
        overlay.lose(opened.prog, address, 8)
    ran = call(row.command, "--strict", "--json", "dump", opening=lambda _: opened)
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["coverage"]["clocks_unreadable"] == 1
    assert "lost" in {note["code"] for note in ran.json["notes"]}


# --- errors


def check_error(row: Row, ran: Ran, message: str) -> None:
    assert (ran.status, ran.out) == (1, "")
    matched = re.fullmatch(rf"msa-{row.name}: ([^\n]+: [^\n]+; [^\n]+)\n", ran.err)
    assert matched, ran.err
    assert message in matched[1]


@each_row
def test_targets_that_cannot_be_opened(row: Row, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello\n")
    lines = {
        ("/nonexistent",): "/nonexistent: no such file",
        (
            "/nonexistent\x1b[31m\n[red]",
        ): r"/nonexistent\x1b[31m\x0a[red]: no such file",
        (str(tmp_path),): "a directory",
        (str(tmp_path / "empty"),): "empty",
        (str(tmp_path / "text"),): "not a dump",
        (sys.executable,): "not a core",
        (CORE, "-s", "/nonexistent"): "no such file",
        (CORE, "--types", "dwarf"): "no debug info found",
        ("--qemu", "/nonexistent"): "No such file",
    }
    for words, message in lines.items():
        check_error(row, call(row.command, *words, opening=open_target), message)


@each_row
def test_file_that_may_not_be_read(row: Row, tmp_path: Path) -> None:
    """Another user than root gets "permission denied"."""
    path = tmp_path / "vmcore"
    path.write_bytes(b"KDUMP   ")
    path.chmod(0)
    # Another user cannot search the directory, so the path is that of a descriptor.
    descriptor = os.open(path, os.O_PATH)

    def become_nobody() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    words = f"/proc/self/fd/{descriptor}"
    process = start(row.command, words, opening=open_target, before=become_nobody)
    check_error(row, end(process), "permission denied")
    os.close(descriptor)


# --- output


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(row: Row, *words: str) -> str:
    out = FakeTerminal()
    with patch("msatools.cli.execution.open_target", open_demo), redirect_stdout(out):
        assert run_console(row.command, with_operands(row.command, *words, CORE)) == 0
    return out.getvalue()


@each_row
def test_colours_are_for_terminals(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TERM": "xterm-256color",
        "NO_COLOR": "",
        "COLUMNS": "500",
        "LINES": "500",
    }.items():
        monkeypatch.setenv(name, value)
    text = answer(row.name).out
    styled = on_terminal(row)
    assert styled != text
    assert STYLE.sub("", styled) == text
    assert on_terminal(row, "--color", "never") == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(row) == text
    assert on_terminal(row, "--color", "always") == styled
    monkeypatch.delenv("NO_COLOR")
    assert on_terminal(row, "--json").startswith('{"schema": ')


@each_row
def test_colours_in_a_pipe(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    text = answer(row.name).out
    styled = answer(row.name, "--color", "always").out
    assert styled != text
    assert STYLE.sub("", styled) == text
    monkeypatch.setenv("COLUMNS", "40")
    lines = STYLE.sub("", call(row.command, "--color", "always", CORE).out).splitlines()
    # Command lines are to be copied.
    wrapped = [line for line in lines if not line.startswith("  msa-")]
    assert max(map(len, wrapped)) <= 40
    ran = call(row.command, "--color", "always", "--json", CORE)
    assert (ran.status, ran.out) == (2, "")
    assert "--color: no effect with --json" in ran.err


EVIL = b"a\x1b[31m\n[b]\xff"
ESCAPED = r"a\x1b[31m\x0a[b]"


@pytest.mark.parametrize(
    ("row", "words"),
    [(row, words) for row in ROWS for words in row.naming],
    ids=lambda value: value.name if isinstance(value, Row) else value,
)
def test_names_are_escaped(row: Row, words: str) -> None:
    """Names of tasks, which anyone can choose, and of kernel threads are escaped."""

    def rename() -> None:
        prog = demo().prog
        for task in for_each_task(prog):
            if task.comm.string_() in (b"python3", b"threads"):
                overlay.put(prog, task.comm.address_, EVIL.ljust(16, b"\0"))
            if task.comm.string_() == b"kswapd0":
                thread = cast("struct kthread *", task.worker_private)
                overlay.put(prog, thread.full_name.value_(), EVIL + b"\0")

    as_json = *words_of_json(row.command, words.split()), "--json"
    for given in (words.split(), as_json):
        ran = end(start(row.command, *given, CORE, before=rename))
        assert (ran.status, ran.err) == (0, "")
        assert all(line.isprintable() for line in ran.out.splitlines())
        if given is not as_json:
            assert ESCAPED in ran.out
        else:
            assert r"a\u001b[31m\n[b]" in ran.out


@each_row
def test_script_prints_the_same(row: Row) -> None:
    """The script, the command in this process and drgn's print the same."""
    ran = end(start(row.command, "-c", CORE, "--types", "btf", opening=open_target))
    assert ran == answer(row.name)
    out = io.StringIO()
    with redirect_stdout(out):
        run_command(demo().prog, " ".join((row.name, *with_operands(row.command))))
    # In drgn, neither the format nor the file is known.
    assert out.getvalue().splitlines()[1:] == ran.out.splitlines()[1:]


@each_row
def test_closed_pipe(row: Row) -> None:
    runs = [CORE], [CORE, "--json"], ["-h"], [*GUEST, "0.01"]
    for words in runs if row.command.operands is None else runs[:-1]:
        read, write = os.pipe()
        os.close(read)
        process = start(row.command, *words, stdout=write)
        os.close(write)
        assert end(process) == Ran(-signal.SIGPIPE, None, "")


@each_row
def test_full_disk(row: Row) -> None:
    with open("/dev/full", "w") as full:
        ran = end(start(row.command, CORE, stdout=full))
    message = "standard output: No space left on device; print it elsewhere"
    assert ran == Ran(1, None, f"msa-{row.name}: {message}\n")


# --- signals


@signals
@each_row
def test_signal_ends_a_report(row: Row, number: int) -> None:
    """The process dies of the signal and prints nothing."""

    def wait(spec: TargetSpec) -> NoReturn:
        print("opening", file=sys.stderr, flush=True)
        # A signal just before a sleep does not end it, so sleep in short steps.
        for _ in range(600):
            time.sleep(0.1)
        pytest.fail("it goes on")

    process = start(row.command, CORE, opening=wait)
    assert process.stderr is not None
    assert process.stderr.readline() == "opening\n"
    process.send_signal(number)
    assert end(process) == Ran(-number, "", "")


@signals
@each_with_intervals
def test_signal_ends_samples(row: Row, number: int) -> None:
    """The command exits with 0 after a complete sample."""
    process = start(row.command, *GUEST, "0.01", "--json")
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(number)
    ran = end(process)
    assert (ran.status, ran.err) == (0, "")
    assert json.loads(first)["schema"] == f"msatools.{row.name}/1"
    assert ran.out == "" or ran.out.endswith("\n")
    assert all(sample["cost"] for sample in ran.samples)
