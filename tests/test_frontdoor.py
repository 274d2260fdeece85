# SPDX-License-Identifier: LGPL-2.1-or-later

"""The command ``msa``."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import msatools
from msatools import frontdoor
from msatools.registry import NAMES, load
from tests.support.calls import CORE

SCRIPT = Path(sys.executable).with_name("msa")
ALL = ", ".join(frontdoor.ALL)

Ran = list[tuple[str, list[str]]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The commands that are run, which do nothing, and their arguments."""
    found: Ran = []

    def run(name: str, argv: Sequence[str]) -> int:
        found.append((name, [*argv]))
        return 7

    monkeypatch.setattr("msatools.console.run", run)
    return found


def run_script(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SCRIPT, *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_installed_script() -> None:
    """It is the command: the same output, and errors in the command's own name."""
    words = ("--types", "btf", "--json", CORE)
    command = subprocess.run(
        [SCRIPT.with_name("msa-zombies"), *words], capture_output=True, text=True
    )
    script = run_script("zombies", *words)
    assert script.stdout == command.stdout
    assert (script.returncode, script.stderr) == (0, "")
    failed = run_script("zombies", "nowhere")
    message = "msa-zombies: nowhere: no such file; check the path\n"
    assert (failed.returncode, failed.stderr) == (1, message)


def test_help_has_a_line_for_each_command() -> None:
    ran = run_script("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 88
    start = lines.index(next(line for line in lines if line.startswith("COMMANDS")))
    listed = dict(line.split(maxsplit=1) for line in lines[start + 1 :][: len(NAMES)])
    assert listed == {name: load(name).summary for name in NAMES}


def test_version() -> None:
    ran = run_script("--version")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"{msatools.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("memsat x", "memsat: no such command or file; did you mean memstat?"),
        ("xyz", f"xyz: no such command or file; name one of {ALL}"),
        ("a\x1b", r"a\x1b: no such command or file"),
    ],
)
def test_no_command(
    ran: Ran, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert frontdoor.main(words.split(" ") if words else []) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"msa: {message}")
    assert err.endswith("; see msa --help\n")
    assert err.count("\n") == 1
    assert ran == []


def test_it_imports_nothing_slow() -> None:
    """Not before the command, which imports what it needs, runs."""
    code = """
import sys
from msatools import console, frontdoor
console.run = lambda *_: print(*{"argparse", "drgn", "numpy", "rich"} & {*sys.modules})
frontdoor.main(["memstat"])
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=Path(msatools.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "\n"


def test_output_that_cannot_be_written() -> None:
    for words in ("--help", "--version"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [SCRIPT, words], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 1
        assert done.stderr.startswith("msa: standard output: ")
