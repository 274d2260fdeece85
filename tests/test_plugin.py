# SPDX-License-Identifier: LGPL-2.1-or-later

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drgn import Program
from drgn.commands import (
    DEFAULT_COMMAND_NAMESPACE,
    CommandArgumentError,
    CommandNotFoundError,
    run_command,
)

from fixtures import lab
from msatools.target import TargetSpec, open_target
from tests.support.terminal import Terminal

DRGN = Path(sys.executable).with_name("drgn")


@pytest.fixture(scope="module")
def prog(run_612: lab.Run) -> Program:
    return open_target(
        TargetSpec(path=str(run_612.elf), vmlinux=str(run_612.vmlinux))
    ).prog


def test_drgn_finds_the_plugin_and_imports_no_command() -> None:
    code = (
        "import sys, drgn\n"
        "from drgn.commands import DEFAULT_COMMAND_NAMESPACE as commands\n"
        "import os; prog = drgn.Program(); prog.set_pid(os.getpid())\n"
        "assert 'memstat' in commands._commands\n"
        "print(*(name for name in sys.modules if name.startswith('msatools')))\n"
        "print('numpy' in sys.modules, 'rich' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "msatools msatools.plugin\nFalse False\n"


def test_report_is_returned_and_printed(
    prog: Program, run_612: lab.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_command(prog, "memstat --by node --json")
    printed = json.loads(capsys.readouterr().out)
    assert printed["pages"] == report.pages
    assert printed["target"]["path"] == str(run_612.elf)
    assert sum(count.pages for count in report.classes) == report.pages
    assert [group.key for group in report.by["node"]]


def test_text_is_what_the_shell_prints(
    prog: Program,
    run_612: lab.Run,
    msa_memstat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_command(prog, "memstat -v")
    shell = subprocess.run(
        [msa_memstat, "-v", "-s", run_612.vmlinux, str(run_612.elf)],
        capture_output=True,
        text=True,
        check=True,
    )
    took = re.compile(r"^scanned in \S+s$", re.MULTILINE)
    printed = [took.sub("", text) for text in (capsys.readouterr().out, shell.stdout)]
    assert printed[0] == printed[1]
    assert printed[1] != shell.stdout


def test_pipe(prog: Program, capfd: pytest.CaptureFixture[str]) -> None:
    report = run_command(prog, "memstat --json | head -c 10 | tr '{' '['")
    assert capfd.readouterr().out == '["schema":'
    assert report.pages > 0


def test_pipe_that_nobody_reads(
    prog: Program, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(prog, "memstat --json | true").pages > 0
    assert capfd.readouterr() == ("", "")


def test_redirections(prog: Program, tmp_path: Path) -> None:
    out = tmp_path / "a b"
    run_command(prog, f"memstat --json > '{out}'")
    run_command(prog, f"memstat --json >> '{out}'")
    assert [json.loads(line)["schema"] for line in out.read_text().splitlines()] == [
        "msatools.memstat/1"
    ] * 2


@pytest.mark.parametrize(
    "words",
    [
        "vmcore", "-k", "-c vmcore", "-s vmlinux", "--qemu x", "--types dwarf",
        "--debuginfod", "5", "0", "--nonsense", "--by cpu",
    ],
)  # fmt: skip
def test_wrong_usage(prog: Program, words: str) -> None:
    with pytest.raises(CommandArgumentError, match=r"^%memstat: ") as caught:
        run_command(prog, f"memstat {words}")
    assert "\n" not in str(caught.value)


def test_help(prog: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(prog, "memstat -h") is None
    printed = capsys.readouterr().out
    assert printed.startswith("USAGE: %memstat [")
    command = DEFAULT_COMMAND_NAMESPACE.lookup(prog, "memstat")
    assert command.format_usage() == printed.splitlines()[0].removeprefix("USAGE: ")
    body = command.format_help(indent="    ")
    assert all(line.startswith("    ") for line in body.splitlines() if line)
    assert "--sections" in body
    assert "USAGE" not in body
    assert "\n" not in command.description()


def test_program_that_is_no_kernel() -> None:
    prog = Program()
    prog.set_pid(os.getpid())
    with pytest.raises(CommandNotFoundError):
        run_command(prog, "memstat")


def test_samples_of_a_guest_that_runs(
    live_qmp: str, run_612: lab.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    prog = open_target(TargetSpec(qemu=live_qmp, vmlinux=str(run_612.vmlinux))).prog
    last = run_command(prog, "memstat --json 0.2 2")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    # The clock of a guest whose CPUs all sleep may stand still.
    assert first["interval_ns"] >= 0
    assert first["taken_at_ns"] + second["interval_ns"] == second["taken_at_ns"]
    assert last.taken_at_ns == second["taken_at_ns"]


class Prompt:
    """An interactive session of drgn."""

    def __init__(self, *words: str | Path) -> None:
        # The plain prompt, which all versions of Python have.
        self._terminal = Terminal(
            [DRGN, *words], PYTHON_BASIC_REPL="1", TERM="dumb", INPUTRC="/dev/null"
        )
        self._terminal.read_until(">>> $")

    def ask(self, line: str) -> str:
        """Type a line and give what is printed up to the next prompt."""
        start = len(self._terminal.seen)
        self._terminal.press(line + "\n")
        self._terminal.read_until(r"\n>>> $", start)
        return self._terminal.seen[start:]

    def end(self) -> None:
        self._terminal.press("\x04")
        self._terminal.end()


@pytest.fixture
def prompt(run_612: lab.Run) -> Iterator[Prompt]:
    assert run_612.elf is not None
    prompt = Prompt("-c", run_612.elf, "-s", run_612.vmlinux, "--main-symbols")
    yield prompt
    prompt.end()


def test_prompt_without_debug_info(run_612: lab.Run) -> None:
    """One call gives drgn's own session types, and so does the first command."""
    assert run_612.elf is not None
    for first in ("from msatools.selfdesc import load_btf; load_btf(prog)", "%memstat"):
        prompt = Prompt("-c", run_612.elf, "--no-default-symbols")
        assert "could not find" in prompt.ask('prog.type("struct page")')
        assert "Traceback" not in prompt.ask(first)
        assert "flags" in prompt.ask('prog.type("struct page")')
        assert "swapper/0" in prompt.ask('prog["init_task"].comm')
        assert "schedule" in prompt.ask("prog.stack_trace(1)")
        assert " types: btf " in prompt.ask("%memstat")
        prompt.end()


def test_prompt(prompt: Prompt, tmp_path: Path) -> None:
    assert "CLASS" in prompt.ask("%memstat")
    assert re.search(r"\b\d{6}\b", prompt.ask("_.pages"))
    assert prompt.ask("%memstat | grep -c CLASS").splitlines()[1] == "1"
    prompt.ask(f"%memstat --json > {tmp_path}/out")
    assert json.loads((tmp_path / "out").read_text())
    assert "drgn: %memstat: prog: a dump does not" in prompt.ask("%memstat 5")
    assert "USAGE: %memstat" in prompt.ask("%memstat --help")
    assert "Traceback" not in prompt.ask("%memstat --nonsense")
