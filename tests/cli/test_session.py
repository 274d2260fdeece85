# SPDX-License-Identifier: LGPL-2.1-or-later

"""``msa drgn`` and ``msa crash``: drgn's prompt and its crash commands."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures import lab
from tests.program.raw import writers
from tests.support.calls import CORE
from tests.support.paused import paused
from tests.support.terminal import Terminal

MSA = Path(sys.executable).with_name("msa")


def msa(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [MSA, *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("words", [("-e",), (CORE, "-e")], ids=["before", "after"])
def test_code(words: tuple[str, ...]) -> None:
    code = "print(prog['init_task'].pid, find_task(1).pid, msatools.__name__)"
    rest = () if CORE in words else (CORE,)
    done = msa("drgn", *words, code, *rest)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "(pid_t)0 (pid_t)1 msatools\n"


def test_options_after_the_target(run_612: lab.Run) -> None:
    words = ["-s", run_612.vmlinux, "-e", "print(prog['schedule'].address_ > 0)"]
    assert msa("drgn", run_612.kept, *words).stdout == "True\n"
    done = msa("drgn", CORE, "--types", "btf", "-e", "print(1)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_command_of_ours_as_code() -> None:
    done = msa("drgn", CORE, "-e", "%memstat | head -2")
    assert done.stdout.splitlines()[1].startswith("CLASS")
    done = msa("drgn", CORE, "-e", "%memstat 5")
    assert done.returncode == 1
    assert done.stderr.startswith("%memstat: 5: the dump does not change")


def test_script_with_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:], prog['init_task'].pid)\n")
    assert msa("drgn", CORE, script, "-x", "y").stdout == "['-x', 'y'] (pid_t)0\n"


def test_standard_input() -> None:
    done = subprocess.run(
        [MSA, "drgn", CORE],
        input="print(stack_trace(1)[1].name)",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "schedule\n"


def test_crash_command() -> None:
    done = msa("crash", CORE, "ps", "-A")
    assert (done.returncode, done.stderr) == (0, "")
    assert "PPID" in done.stdout
    done = msa("crash", CORE, "nothing")
    assert (done.returncode, done.stderr) == (1, "nothing: command not found\n")


def test_dump_that_drgn_does_not_open(run_612: lab.Run) -> None:
    """QEMU's kdumps name no architecture."""
    done = msa("crash", run_612.dump("qemu-kdump-zlib"), "p", "init_task.pid")
    assert done.stdout == "init_task.pid = (pid_t)0\n"


def test_raw_memory(run_612: lab.Run, tmp_path: Path) -> None:
    """Nothing is loaded, nor warned of, while the kernel in it is searched for."""
    image = writers.lime(run_612.elf, tmp_path / "image")
    code = "print(find_task(1).comm, len({m.name for m in prog.modules()}) > 3)"
    done = msa("drgn", image, "-e", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == '(char [16])"python3" True\n'
    done = msa("crash", image, "bt", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "schedule at" in done.stdout


@pytest.mark.long
def test_arm64() -> None:
    run = lab.build("plain-6.12arm64")
    code = "print(find_task(1).comm.string_(), len(stack_trace(1)) > 5, prog.platform)"
    done = msa("drgn", run.kept, "-e", code)
    assert done.stdout.startswith("b'python3' True Platform(<Architecture.AARCH64")
    assert "MACHINE: aarch64" in msa("crash", run.kept, "sys").stdout


def test_traceback_of_a_script_has_no_frames_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("prog['loops_per_jiffy']\n")
    for words in ([script], ["-e", script.read_text()]):
        done = msa("drgn", CORE, *words)
        assert done.returncode == 1
        assert "/msatools/" not in done.stderr
        assert "nothing says the type of loops_per_jiffy" in done.stderr


def test_guest_and_debug_info(run_612: lab.Run, tmp_path: Path) -> None:
    with paused(run_612.elf, tmp_path) as address:
        done = msa("crash", "-s", run_612.vmlinux, "--qemu", address, "bt", "-l", "1")
    assert "kernel/sched/core.c: " in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("drgn", "nowhere"), 1, "msa drgn: nowhere: no such file; "),
        (
            ("drgn", "-k", "-c", "x"),
            2,
            "msa drgn: two targets are named; name one; see",
        ),
        (("drgn", "x", "-k"), 2, "msa drgn: two targets are named; name one; see"),
        (("drgn", "x", "-e"), 2, "msa drgn: argument -e: expected one argument; "),
        (("drgn", "x", "none.py"), 2, "msa drgn: none.py: no such script; "),
        (
            ("crash", "--types", "btf", "-s", "v", "x"),
            2,
            "msa crash: --types btf: asks",
        ),
    ],
)
def test_errors(words: tuple[str, ...], status: int, message: str) -> None:
    done = msa(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["crash", "drgn"])
def test_help(name: str) -> None:
    assert msa(name, "--help").stdout.startswith(f"USAGE: msa {name} [-k] [-c PATH]")


@pytest.fixture
def prompt() -> Iterator[Terminal]:
    terminal = Terminal(
        [MSA, "drgn", CORE], PYTHON_BASIC_REPL="1", TERM="dumb", INPUTRC="/dev/null"
    )
    terminal.read_until(">>> $")
    yield terminal
    terminal.press("\x04")
    terminal.end()


def test_prompt(prompt: Terminal) -> None:
    assert "types: btf" in prompt.seen
    for line, answer in (
        ("find_task(1).comm", "python3"),
        ("%mem\t--help", "USAGE: %memstat"),
        ("%help", "Commands of msatools"),
        ("%crash p init_task.pid | cat", "init_task.pid = (pid_t)0"),
    ):
        start = len(prompt.seen)
        prompt.press(line + "\n")
        prompt.read_until(r"\n>>> $", start)
        assert answer in prompt.seen[start:]
