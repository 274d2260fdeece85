# SPDX-License-Identifier: LGPL-2.1-or-later

"""A sandbox lets a dump be read, and nothing else be done."""

import ctypes
import faulthandler
import fcntl
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from msatools.cli import sandbox
from msatools.cli.output import Stopped
from msatools.cli.sandbox import in_sandbox
from msatools.program import open_target
from msatools.program.model import DamagedDumpError
from tests.contract.table import MEMSTAT, ROWS, Row
from tests.support.calls import CORE, Ran, call, open_demo


def sandboxed(work: Callable[[], int]) -> Ran:
    """Do work in a sandbox; return its exit status and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = in_sandbox("msa-test", "vmcore", work)
    return Ran(status, out.getvalue(), err.getvalue())


def answer(text: str) -> object:
    report = json.loads(text)
    report.pop("scan_ns", None)
    return report


# --- what it lets a command do


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_commands_print_the_same(row: Row) -> None:
    words = (CORE, "--json", "--sandbox")
    inside = call(row.command, *words, opening=open_demo)
    outside = call(row.command, *words[:-1], opening=open_demo)
    assert (inside.status, inside.err) == (0, "")
    assert answer(inside.out) == answer(outside.out)


def test_the_dump_is_opened_inside() -> None:
    words = (CORE, "--types", "btf", "--sandbox", "-j", "2")
    ran = subprocess.run(
        [Path(sys.executable).with_name("msa-memstat"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "checks:" in ran.stdout


def test_errors_are_the_same(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    inside = call(MEMSTAT.command, nothing, "--sandbox", opening=open_target)
    assert (inside.status, inside.out) == (1, "")
    assert inside.err == f"msa-memstat: {nothing}: no such file; check the path\n"


def test_it_prints_as_on_the_parents_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    monkeypatch.setattr(sandbox, "is_terminal", lambda stream: True)

    def work() -> int:
        print(sys.stdout.isatty(), os.environ["COLUMNS"], "\x1b[1mbold\x1b[0m")
        return 3

    assert sandboxed(work) == Ran(3, "True 123 \x1b[1mbold\x1b[0m\n", "")


# --- what it does not


def forbidden(path: Path) -> dict[str, Callable[[], object]]:
    """Return what must fail, by name."""
    return {
        "write": lambda: path.write_text("x"),
        "append": lambda: path.open("a"),
        "create": lambda: (path.parent / "new").open("x"),
        "remove": path.unlink,
        "rename": lambda: path.rename(path.with_name("other")),
        "mode": lambda: path.chmod(0o777),
        "link": lambda: path.with_name("link").symlink_to(path),
        "directory": lambda: path.with_name("folder").mkdir(),
        "fork": os.fork,
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "kill": lambda: os.kill(os.getppid(), 0),
        # Whoever owns a pipe gets a signal of choice when something is written to it.
        "signal by a pipe": lambda: fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid()),
        "which signal": lambda: fcntl.fcntl(1, fcntl.F_SETSIG, signal.SIGKILL),
        "network": lambda: socket.socket(socket.AF_INET),
        "unix socket": lambda: socket.socket(socket.AF_UNIX),
        "shared memory": lambda: os.memfd_create("x"),
        "priority": lambda: os.nice(-1),
        "root": lambda: os.chroot("/"),
    }


def test_what_is_forbidden(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")

    def work() -> int:
        for name, act in forbidden(file).items():
            try:
                act()
            except PermissionError:
                continue
            print(name)
        return 0

    assert sandboxed(work) == Ran(0, "", "")
    assert file.read_text() == "kept"
    assert [*tmp_path.iterdir()] == [file]


def test_all_of_it_is_possible_outside(tmp_path: Path) -> None:
    """Else the test above would show nothing; signals and the process are left out."""
    file = tmp_path / "file"
    acts = forbidden(file)
    for name in ("write", "append", "create", "mode", "link", "directory"):
        acts[name]()
    for name in ("network", "unix socket"):
        made = acts[name]()
        assert isinstance(made, socket.socket)
        made.close()


def test_control_characters_do_not_reach_the_terminal() -> None:
    def work() -> int:
        print("a\x1b]0;title\x07\x9b31m\u202eb")
        print("\x1b[2J", file=sys.stderr)
        return 0

    ran = sandboxed(work)
    assert ran.out == "a\\x1b]0;title\\x07\\x9b31m\\u202eb\n"
    assert ran.err == "\\x1b[2J\n"


@pytest.mark.parametrize("size", [1, 5, 7])
def test_codes_are_kept_together(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However few bytes are read at a time."""
    monkeypatch.setattr(sandbox, "_CHUNK", size)

    def work() -> int:
        print("\x1b[1;31mé\x1b[0m\x1b[5n")
        return 0

    assert sandboxed(work).out == "\x1b[1;31mé\x1b[0m\\x1b[5n\n"


# --- how it ends


def crash() -> int:
    faulthandler.disable()
    return ctypes.string_at(0)[0]


def test_a_crash_is_one_line() -> None:
    with pytest.raises(DamagedDumpError, match=r"^vmcore: reading it ended by SIGSEGV"):
        sandboxed(crash)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    with pytest.raises(DamagedDumpError, match="took over 1 s"):
        sandboxed(lambda: time.sleep(60) or 0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 1 << 30)

    def work() -> int:
        try:
            np.ones(1 << 28)
        except MemoryError:
            return 3
        return 0

    assert sandboxed(work).status == 3


def test_ctrl_c_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no handler for it."""
    children = []
    fork = os.fork

    def forked() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", forked)

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Stopped):
            sandboxed(lambda: time.sleep(60) or 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], 0)


def test_without_seccomp_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "binding", lambda: None)
    ran = sandboxed(lambda: 0)
    assert (ran.status, ran.err.count("\n")) == (0, 1)
    assert ran.err.startswith("msa-test: --sandbox: seccomp is unavailable")


def test_a_sandbox_that_cannot_be_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(seccomp: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(sandbox, "lock_down", refused)
    ran = sandboxed(lambda: 0)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert ran.err.startswith("msa-test: --sandbox: it cannot be set up (")


def test_files_that_were_open_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file, path.open("rb") as same:

        def work() -> int:
            same.read()
            try:
                file.write(b"x")
            except OSError:
                return 3
            return 0

        assert sandboxed(work).status == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sandbox", "it is for dumps"),
        ("--sandbox -k", "it is for dumps"),
        (f"--sandbox --debuginfod {CORE}", "there is no network"),
        (f"--sandbox {CORE} --map map.svg", "no file is written"),
        ("--sandbox --diff a b", "--sandbox: --diff reads no target"),
    ],
)
def test_usage(words: str, said: str) -> None:
    ran = call(MEMSTAT.command, *words.split())
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err
