# SPDX-License-Identifier: LGPL-2.1-or-later

"""One dump in a process of its own: whatever becomes of that is one outcome."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msatools.fleet import single
from msatools.fleet.single import Bounds, Outcome, report_dump
from tests.fleet.program import PROGRAM, file_of, file_of_report, made_report
from tests.support.calls import CORE

BOUNDS = Bounds(memory_bytes=2 << 30, seconds=300)
"""More than any machine needs, for what has to end by itself."""

PYTHON = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:] = {sys.path!r}; exec(sys.argv[1])",
)

SHORT = Bounds(memory_bytes=1 << 28, seconds=2)


def outcome(path: Path, contents: str, bounds: Bounds = BOUNDS) -> Outcome:
    path.write_text(contents)
    return report_dump(str(path), bounds, PROGRAM)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vmcore"


def test_report_is_that_of_msa_report() -> None:
    found = report_dump(CORE, BOUNDS)
    assert (found.state, found.error) == ("done", None)
    assert found.report is not None
    command = Path(sys.executable).with_name("msa-report")
    printed = subprocess.run(
        [command, "--json", CORE], capture_output=True, text=True, check=True
    )
    assert json.loads(found.report) == json.loads(printed.stdout)


def test_no_dump() -> None:
    found = report_dump("/etc/passwd", BOUNDS)
    assert (found.state, found.report) == ("failed", None)
    assert found.error is not None
    assert found.error.startswith("/etc/passwd: not a dump: ")


def test_made_report(path: Path) -> None:
    found = outcome(path, file_of_report(made_report()))
    assert (found.state, found.error) == ("done", None)
    assert found.seconds > 0


def test_bounds_are_passed_on(path: Path) -> None:
    code = "import sys; sys.exit(' '.join(sys.argv[1:]))"
    found = report_dump(str(path), BOUNDS, (sys.executable, "-c", code))
    words = f"{os.getpid()} {2 << 30} 300 report --json -c {path}"
    assert (found.state, found.error) == ("failed", words)


@pytest.mark.parametrize("word", ["hang", "spin"])
def test_time_is_bounded(path: Path, word: str) -> None:
    found = outcome(path, file_of(word), SHORT)
    assert (found.state, found.report) == ("timeout", None)
    assert found.error is not None
    assert found.error.startswith("reading it took over 2 s")


def test_memory_is_bounded(path: Path) -> None:
    found = outcome(path, file_of("eat"), Bounds(memory_bytes=1 << 28, seconds=300))
    assert (found.state, found.error) == ("failed", "MemoryError")


def test_output_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MAX_OUTPUT_BYTES", 1 << 20)
    found = outcome(path, file_of("flood"))
    assert (found.state, found.error) == (
        "failed",
        "its report has over 1,048,576 bytes",
    )


@pytest.mark.parametrize(
    ("name", "state", "error"),
    [
        ("SIGSEGV", "crashed", "reading it ended by SIGSEGV"),
        (
            "SIGKILL",
            "crashed",
            "reading it ended by SIGKILL: it was killed, or memory ran out",
        ),
        ("SIGXCPU", "timeout", "reading it took over 300 s of CPU"),
    ],
)
def test_signals(path: Path, name: str, state: str, error: str) -> None:
    found = outcome(path, file_of("die", name))
    assert (found.state, found.error, found.report) == (state, error, None)


def test_the_last_line_says_why(path: Path) -> None:
    found = outcome(path, file_of("fail", "warning\nmsa-report: vmcore: is cut off"))
    assert (found.state, found.error) == ("failed", "vmcore: is cut off")


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", '{"schema": "other/1"}', "[" * 100_000, "nul\0"]
)
def test_what_is_no_report(path: Path, text: str) -> None:
    found = outcome(path, file_of("report", text))
    assert (found.state, found.report) == ("crashed", None)
    assert found.error == "what was printed is no report"


def test_the_process_ends_with_its_parent(path: Path) -> None:
    """A worker that is killed leaves nothing behind."""
    path.write_text(file_of("hang"))
    code = (
        "from msatools.fleet.single import Bounds, report_dump\n"
        "from tests.fleet.program import PROGRAM\n"
        "bounds = Bounds(memory_bytes=1 << 30, seconds=300)\n"
        f"report_dump({str(path)!r}, bounds, PROGRAM)"
    )
    with subprocess.Popen([*PYTHON, code]) as parent:
        children: list[str] = []
        while not any(is_locked_down(int(child)) for child in children):
            assert parent.poll() is None, "it ended before"
            time.sleep(0.05)
            file = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            children = file.read_text().split()
        parent.kill()
    (child,) = children
    end_s = time.monotonic() + 60
    while is_alive(int(child)):
        assert time.monotonic() < end_s, "it lives on"
        time.sleep(0.05)


def is_locked_down(pid: int) -> bool:
    """Return whether a process may gain no privileges, which is set last but one."""
    return "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
