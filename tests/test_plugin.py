# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands inside drgn: as a plugin, in pipes, and at the prompt."""

import gc
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drgn import Program
from drgn.commands import (
    CommandNotFoundError,
    run_command,
)

from fixtures import lab
from msatools.plugin import drgn_prog_set
from msatools.program import TargetSpec, open_target
from msatools.prompt import _MARK, hint, matches
from msatools.registry import NAMES
from tests.support.calls import CORE, demo
from tests.support.paused import paused
from tests.support.terminal import Terminal

DRGN = Path(sys.executable).with_name("drgn")


@pytest.fixture
def prog() -> Program:
    return demo().prog


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
    assert done.stdout == "msatools msatools.registry msatools.plugin\nFalse False\n"


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


def test_dump_is_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    prog = open_target(TargetSpec(path=CORE, types="btf")).prog
    first = run_command(prog, "memstat --by node")
    out = capsys.readouterr().out
    assert run_command(prog, "memstat --by node") is first
    assert capsys.readouterr().out == out
    assert run_command(prog, "memstat --by node --json") is first
    assert json.loads(capsys.readouterr().out)["schema"] == "msatools.memstat/1"
    assert run_command(prog, "memstat") is not first
    assert run_command(prog, "zombies") is not None


def test_kernel_that_runs_is_read_each_time(
    run_612: lab.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with paused(run_612.elf, tmp_path) as address:
        prog = open_target(TargetSpec(qemu=address, types="btf")).prog
        assert run_command(prog, "zombies") is not run_command(prog, "zombies")


def test_debug_info_that_is_loaded_makes_another_report(
    run_612: lab.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    prog = Program()
    prog.set_core_dump(run_612.elf)
    assert run_command(prog, "zombies").target.types == "btf"
    prog.load_debug_info([run_612.vmlinux])
    assert run_command(prog, "zombies").target.types == "dwarf"


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
    # The clock of a guest whose CPUs are all idle can stand still.
    assert first["interval_ns"] >= 0
    assert first["taken_at_ns"] + second["interval_ns"] == second["taken_at_ns"]
    assert last.taken_at_ns == second["taken_at_ns"]


class Prompt:
    """An interactive session of drgn."""

    def __init__(self, *words: str | Path) -> None:
        # The basic prompt is the same in all versions of Python.
        self._terminal = Terminal(
            [DRGN, *words], PYTHON_BASIC_REPL="1", TERM="dumb", INPUTRC="/dev/null"
        )
        self._terminal.read_until(">>> $")

    def ask(self, line: str) -> str:
        """Type a line and return the output up to the next prompt."""
        start = len(self._terminal.seen)
        self._terminal.press(line + "\n")
        self._terminal.read_until(r"\n>>> $", start)
        return self._terminal.seen[start:]

    def end(self) -> None:
        self._terminal.press("\x04")
        self._terminal.end()


@pytest.fixture
def prompt() -> Iterator[Prompt]:
    prompt = Prompt("-c", CORE, "--no-default-symbols")
    yield prompt
    prompt.end()


def test_prompt_without_debug_info(prompt: Prompt) -> None:
    """The first lookup loads types; a command and ``load_btf`` would do so, too."""
    answer = prompt.ask('prog.type("struct page")')
    assert "msatools: no debug info is loaded" in answer
    assert "flags" in answer
    load = "from msatools.selfdesc import load_btf; load_btf(prog)"
    assert "msatools:" not in prompt.ask(load)
    assert "swapper/0" in prompt.ask('prog["init_task"].comm')
    assert "schedule" in prompt.ask("prog.stack_trace(1)")
    assert "  types: btf" in prompt.ask("%memstat")


def test_prompt(prompt: Prompt, tmp_path: Path) -> None:
    assert "CLASS" in prompt.ask("%memstat")
    assert re.search(r"\b\d{6}\b", prompt.ask("_.pages"))
    assert "flags" in prompt.ask('prog.type("struct page")')
    assert prompt.ask("%memstat | grep -c CLASS").splitlines()[1] == "1"
    prompt.ask(f"%memstat --json > {tmp_path}/out")
    assert json.loads((tmp_path / "out").read_text())
    assert "drgn: %memstat: 5: the dump does not" in prompt.ask("%memstat 5")
    assert "USAGE: %memstat" in prompt.ask("%memstat --help")
    assert "Traceback" not in prompt.ask("%memstat --nonsense")


def test_prompt_lists_commands(prompt: Prompt) -> None:
    """drgn 0.3 has no list of commands."""
    listed = prompt.ask("%help")
    assert re.findall(r"^  %(\w+) ", listed.partition("of drgn")[0], re.M) == [*NAMES]
    assert "%sh " in listed.partition("of drgn")[2]
    assert "usage: %memstat [OPTION...]" in prompt.ask("%help memstat")
    assert "drgn: %help: nothing: no such command" in prompt.ask("%help nothing")


def test_prompt_completes_commands(prompt: Prompt) -> None:
    assert "USAGE: %memstat" in prompt.ask("%mem\t--help")
    assert "pools with nothing to do" in prompt.ask("%locks --wo\t")
    # What begins otherwise is completed by drgn.
    assert "drgn.Platform" in prompt.ask("type(prog.platf\t)")


def test_prompt_shows_reports_as_the_command_does(prompt: Prompt) -> None:
    prompt.ask("%zombies > /dev/null")
    shown = prompt.ask("_")
    assert "\nNo zombie." in shown
    # As wide as the terminal.
    assert shown.partition("\n")[2] == prompt.ask("%zombies").partition("\n")[2]
    assert "<ZombiesReport of '" in prompt.ask("print(repr(_))")


def test_prompt_hints_at_failed_lookups(prompt: Prompt) -> None:
    """A traceback has the line that was typed alone."""
    prompt.ask("prog['jiffies']")
    shown = prompt.ask("prog['loops_per_jiffy']").splitlines()[1:-1]
    assert shown[:2] == [
        "Traceback (most recent call last):",
        '  File "<console>", line 1, in <module>',
    ]
    assert shown[2].startswith("msatools.errors.UntypedError: nothing says")
    assert shown[2].endswith("address=0xffffffffb7e10010)")
    for line in ("prog['nothing']", "prog.type('struct nothing')"):
        shown = prompt.ask(line).splitlines()[1:-1]
        assert "could not find" in shown[2]
        assert shown[3].startswith("msatools: the kernel's own types and symbols do")
        assert "linux-image-6.12.117+deb12-cloud-amd64-dbg" in shown[3]
    assert "msatools" not in prompt.ask("1 / 0")
    assert "msatools" not in prompt.ask("{}['nothing']")


def test_hint_at_what_modules_have(run_612: lab.Run) -> None:
    prog = open_target(TargetSpec(path=str(run_612.elf), types="btf")).prog
    module = "qemu_fw_cfg"
    name = "struct fw_cfg_sysfs_entry"
    with pytest.raises(LookupError) as caught:
        prog.type(name)
    found = hint(prog, caught.value)
    assert found == f"{name} is a type of the module {module}: prog.type({name!r}, " + (
        f"{module!r})"
    )
    assert prog.type(name, module).has_member("list")
    with pytest.raises(LookupError) as caught:
        prog["fw_cfg_sel_ko"]
    address = prog.symbol("fw_cfg_sel_ko").address
    assert str(hint(prog, caught.value)).endswith(f"(prog, TYPE, address={address:#x})")


def test_no_hint_with_debug_info(run_612: lab.Run) -> None:
    spec = TargetSpec(path=str(run_612.elf), vmlinux=str(run_612.vmlinux))
    assert hint(open_target(spec).prog, LookupError("could not find 'x'")) is None


def test_no_program_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a guest holds its socket, which serves one client at a time."""
    importlib.import_module("drgn.cli")
    completer: Any = importlib.import_module("drgn.internal.rlcompleter").Completer
    monkeypatch.setattr(completer, "complete", completer.complete)
    monkeypatch.delattr(completer, _MARK, raising=False)
    gc.collect()
    before = _programs()
    opened = open_target(TargetSpec(path=str(CORE), types="btf"))
    drgn_prog_set(opened.prog)
    assert hasattr(completer, _MARK)
    assert _programs() == before + 1
    del opened
    gc.collect()
    assert _programs() == before


def _programs() -> int:
    return sum(isinstance(each, Program) for each in gc.get_objects())


@pytest.mark.parametrize(
    ("line", "text", "expected"),
    [
        ("%zo", "zo", ["zombies "]),
        ("%zombies --tr", "tr", ["tree "]),
        ("%zombies -u 0 --str", "str", ["strict "]),
        ("%nothing --tr", "tr", []),
        ("%zombies ", "", []),
        ("%py --he", "he", []),
        ("%memstat --by pro", "pro", ["process "]),
        ("%memstat --by slab,pro", "pro", ["process "]),
        ("%memstat --by=slab,pro", "pro", ["process "]),
        ("%prstat --class LCK,KL", "KL", ["KLK "]),
    ],
)
def test_completion(
    prog: Program, line: str, text: str, expected: Sequence[str]
) -> None:
    assert matches(prog, line, text) == expected
