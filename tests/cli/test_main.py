# SPDX-License-Identifier: LGPL-2.1-or-later

"""What runs of all commands have in common, seen in one that is as small as can be.

What each command promises is in test_contract.py.
"""

import logging
import re
import select
import signal
import subprocess
import sys
import termios
import time
from typing import NoReturn

import pytest
from drgn import FaultError, Program
from msgspec.structs import replace

from msatools.cli.main import run_console
from msatools.cli.options import UsageError, Words, parse_words
from msatools.cli.screen import Keys
from msatools.errors import DamagedDataError, MissingError
from msatools.program import Opened, TargetSpec
from msatools.program.model import MovedError
from msatools.render.blocks import line
from msatools.selfdesc import BtfError
from tests.support.calls import MADE, Ran, call, end, open_nothing, start
from tests.support.probe import (
    COMMAND,
    DUMP,
    GUEST,
    on_terminal,
    run,
    start_probe,
)
from tests.support.terminal import Terminal

FOOTER = r"msa-probe: \d+\.\d\d s CPU, \d+\.\d % of one CPU{}, \d+\.\d+ [MG]iB"


# The words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Words()),
        ("vmcore", Words("vmcore")),
        ("5", Words(None, 5.0)),
        ("0.5 3", Words(None, 0.5, 3)),
        ("vmcore 5 3", Words("vmcore", 5.0, 3)),
        ("5 vmcore 3", Words("vmcore", 5.0, 3)),
        ("5 3 vmcore", Words("vmcore", 5.0, 3)),
        ("./5 5", Words("./5", 5.0)),
        (".5 +2", Words(None, 0.5, 2)),
        ("1e1 007", Words(None, 10.0, 7)),
        ("1E8 1", Words(None, 1e8, 1)),
        ("1_000", Words("1_000")),
        ("0x5", Words("0x5")),
        ("5s", Words("5s")),
        ("nanny", Words("nanny")),
    ],
)
def test_words(words: str, expected: Words) -> None:
    assert parse_words(words.split()) == expected


@pytest.mark.parametrize(
    "words",
    [
        "0", "0.0", "-5", "-0.5", "nan", "NaN", "inf", "Infinity", "1e999", "1.1e8",
        "5 0", "5 -1", "5 1.5", "5 nan", "5 1e3", "5 3 2", "vmcore vmcore", "./5 ./6",
    ],
)  # fmt: skip
def test_words_that_make_no_sense(words: str) -> None:
    with pytest.raises(UsageError):
        parse_words(words.split())


# Errors and output


def failing(error: Exception, **changes: object) -> Ran:
    """Run a command whose report fails, of a target that is otherwise."""

    def fail(*_: object) -> NoReturn:
        raise error

    def opening(_: TargetSpec) -> Opened:
        return Opened(Program(), replace(MADE, **changes))  # type: ignore[arg-type]

    return call(replace(COMMAND, start=fail), DUMP, opening=opening)


@pytest.mark.parametrize(
    ("error", "changes", "said"),
    [
        (FaultError("gone", 8), {}, "take a dump that leaves less out"),
        (FaultError("gone", 8), {"live": True}, "report needs (gone: 0x8); try again"),
        (FaultError("gone", 8), {"truncated": True}, "cut off, and too little is left"),
        (DamagedDataError("a loop", 8), {}, "its data are damaged (a loop: 0x8); copy"),
        (DamagedDataError("torn"), {"live": True}, "make no sense (torn); try again"),
        (BtfError("torn"), {}, "the types that the kernel carries are damaged: torn"),
        (
            MissingError("no type"),
            {},
            "lack something (no type); name the full vmlinux",
        ),
        (MemoryError(), {}, "there is not enough memory to read it; give it more"),
        (OSError(5, "I/O"), {"live": True}, "the kernel is gone: I/O; start it again"),
        (OSError(5, "I/O"), {}, "it cannot be read: I/O; check the disk, and copy"),
    ],
)
def test_report_that_cannot_be_made(
    error: Exception, changes: dict[str, object], said: str
) -> None:
    ran = failing(error, **changes)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert said in ran.err


def test_drgns_own_warnings_are_for_debugging() -> None:
    shown = []

    def opening(spec: TargetSpec) -> Opened:
        logger = logging.getLogger("drgn")
        levels = (logging.INFO, logging.WARNING, logging.CRITICAL)
        shown.append([logger.isEnabledFor(level) for level in levels])
        return open_nothing(spec)

    call(COMMAND, DUMP, "--debug", opening=opening)
    call(COMMAND, DUMP, opening=opening)
    assert shown == [[False, True, True], [False, False, False]]


@pytest.mark.parametrize(("times", "status"), [(2, 0), (3, 1)])
def test_report_is_begun_again_where_memory_moves(times: int, status: int) -> None:
    left = [MovedError()] * times

    def start_at_last(*given: object) -> object:
        if left:
            raise left.pop()
        return COMMAND.start(*given)  # type: ignore[arg-type]

    moving = replace(COMMAND, start=start_at_last)  # type: ignore[arg-type]
    assert call(moving, DUMP, opening=open_nothing).status == status


@pytest.mark.parametrize("error", [FaultError("gone", 8), DamagedDataError("torn")])
@pytest.mark.parametrize(
    ("live", "times", "status"), [(True, 2, 0), (True, 3, 1), (False, 1, 1)]
)
def test_running_kernel_is_read_again_if_it_makes_no_sense(
    error: Exception, live: bool, times: int, status: int
) -> None:
    """A dump stays what it is."""
    left = [error] * times

    def start_at_last(*given: object) -> object:
        if left:
            raise left.pop()
        return COMMAND.start(*given)  # type: ignore[arg-type]

    def opening(_: TargetSpec) -> Opened:
        return Opened(Program(), replace(MADE, live=live))

    torn = replace(COMMAND, start=start_at_last)  # type: ignore[arg-type]
    ran = call(torn, DUMP, "--json", opening=opening)
    assert ran.status == status
    if not status:
        (sample,) = ran.samples
        assert sample["coverage"]["samples_retried"] == times


def test_error_without_standard_error_is_in_no_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert run_console(COMMAND, ["--nonsense"]) == 2
    assert capsys.readouterr().out == ""


def test_no_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert run_console(COMMAND, ["-h"]) == 1
    said = "msa-probe: standard output: closed; give the command one\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_letters_that_the_encoding_lacks(errors: str) -> None:
    """A name in a dump may have any; Python's locale C has the second handler."""
    shown = replace(COMMAND, blocks=lambda *_: [line("é")])

    def encode() -> None:
        sys.stdout.reconfigure(encoding="ascii", errors=errors)

    ran = end(start(shown, DUMP, opening=open_nothing, before=encode))
    assert (ran.status, ran.out) == (0, "\\xe9\n")


def test_pipe_closed_while_it_prints() -> None:
    process = start_probe(DUMP, "--lines", "100000")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == -signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""


# Intervals; when they are is in test_intervals.py


def test_samples() -> None:
    """Each is from the one before to its end; the first look is at what was before."""
    began = time.monotonic()
    ran = run(*GUEST, "0.1", "3", "--json")
    assert time.monotonic() - began > 0.3
    assert ran.status == 0
    assert [(each["since"], each["number"]) for each in ran.samples] == [
        (1, 2),
        (2, 3),
        (3, 4),
    ]
    assert "cost" not in run(*GUEST, "--json").json


def test_samples_as_text() -> None:
    for words, share in (((), ""), (("--budget", "50%"), " of 50 % that it may")):
        lines = run(*GUEST, "0.1", "2", *words).out.splitlines()
        assert len(lines) == 6
        for (when, what, cost), number in ((lines[:3], 2), (lines[3:], 3)):
            assert re.fullmatch(r"\d\d:\d\d:\d\d", when)
            assert what == f"line 0 of report {number}"
            assert re.fullmatch(FOOTER.format(share), cost)


def test_strict_looks_at_every_sample() -> None:
    """Also after a clean end by a signal."""
    words = (*GUEST, "0.05", "--strict", "--json", "--lose-at", "2")
    assert run(*words, "2").status == 3
    assert run(*GUEST, "0.05", "2", "--strict").status == 0
    process = start_probe(*words)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert end(process).status == 3


# Signals


def test_ignored_signals_stay_ignored() -> None:
    """As after nohup."""

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = start_probe(DUMP, "--take", "0.5", before=ignore)
    process.send_signal(signal.SIGINT)
    assert end(process) == Ran(0, "line 0 of report 1\n", "")


# On a terminal


def test_progress_is_erased_when_stopped() -> None:
    terminal = on_terminal(DUMP, "--take", "60")
    terminal.read_until("33 %")
    terminal.press("\x03")
    assert terminal.end() == -signal.SIGINT
    assert terminal.seen.rindex("\r\x1b[K") > terminal.seen.rindex("%")


@pytest.mark.parametrize("key", ["q", "Q", "\x03"])
def test_keys_that_end_an_interval_run(key: str) -> None:
    terminal = on_terminal(*GUEST, "0.05")
    before = terminal.modes
    terminal.read_until("line 0")
    during = termios.tcgetattr(terminal.fd)
    terminal.press(f"x{key}")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen
    # Keys come one by one, and the modes are as they were in the end.
    assert before[3] & termios.ICANON
    assert not during[3] & termios.ICANON
    assert terminal.modes == before


@pytest.mark.parametrize(("key", "status"), [("q", 1), ("x", 0), ("\x04", 0)])
def test_key_pressed_while_it_is_busy(key: str, status: int) -> None:
    """It counts though nobody waits any more."""

    def press() -> int:
        keys = Keys()
        keys.take()
        print("ready", flush=True)
        select.select([0], [], [])
        found = keys.quit_before(time.monotonic() - 1)
        keys.give_back()
        return int(found)

    terminal = Terminal(press)
    terminal.read_until("ready")
    terminal.press(key)
    assert terminal.end() == status


def test_terminal_of_another_session() -> None:
    terminal = on_terminal(*GUEST, "0.05", "1", is_own=False)
    assert terminal.end() == 0
    assert "line 0" in terminal.seen


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--foo", ""),
        ("--colour", "--color"),
        ("--stric", "--strict"),
        ("--js", "--json"),
    ],
)
def test_only_what_is_near_is_suggested(word: str, near: str) -> None:
    hint = f"; did you mean {near}?" if near else ""
    expected = (
        f"msa-probe: unrecognized arguments: {word}{hint}; see msa-probe --help\n"
    )
    assert run(word).err == expected


def test_helpers_that_are_imported_singly_are_named_in_full() -> None:
    """A plugin of drgn (DRGN_PLUGINS) may do so, as after an import of the package."""
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
from msatools.cli.main import _import_helpers_singly
_import_helpers_singly()
import drgn.helpers.linux
import drgn.helpers.linux.pid
assert drgn.helpers.linux.pid.find_task
assert "drgn.helpers.linux.net" not in sys.modules
assert not hasattr(drgn.helpers.linux.pid, "no_such_thing")
with ThreadPoolExecutor(8) as threads:
    found = threads.map(lambda _: drgn.helpers.linux.for_each_task, range(8))
    assert len({*found}) == 1
assert not hasattr(drgn.helpers.linux, "no_such_thing")
assert "drgn.helpers.linux.net" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
