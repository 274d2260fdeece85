# SPDX-License-Identifier: LGPL-2.1-or-later

"""Failed tests of running guests are repeated, and builders of guests end with them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 60.0

OPTION = """
def pytest_addoption(parser):
    parser.addoption("--anew", action="store_true")
"""
TESTS = """
import pytest

@pytest.fixture
def guest(request):
    if not request.config.getoption("--anew"):
        pytest.fail("it did not boot")

def test_good(): pass
def test_chance(guest): pass
def test_bad(): assert False
def test_untried(): pass
"""


def twice(directory: Path, *words: str) -> "subprocess.Popen[str]":
    """Start tests.support.twice on the tests in a directory, as if all were live."""
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = live\n")
    (directory / "conftest.py").write_text(OPTION)
    where = ["-c", str(directory / "pytest.ini"), "-m", "", "-q", str(directory)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.twice", *where, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_twice(directory: Path, tests: str, *words: str) -> tuple[int, list[str]]:
    """Run tests; return the exit status and the lines about second tries."""
    (directory / "test_some.py").write_text(tests)
    process = twice(directory, *words)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    tries = ("failed twice: ", "passed at ", "failed, and not ", "not run at all: ")
    return process.returncode, [
        line for line in out.splitlines() if line.startswith(tries)
    ]


def test_each_that_needed_a_second_try_is_named(tmp_path: Path) -> None:
    status, lines = run_twice(tmp_path, TESTS)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert lines == [
        "passed at the second try: test_some.py::test_chance",
        "failed twice: test_some.py::test_bad",
    ]


def test_what_was_not_run_is_not_green(tmp_path: Path) -> None:
    """The first failure ended the run, so the others were not run."""
    status, lines = run_twice(tmp_path, TESTS, "-x")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert lines[-1] == "not run at all: 2 tests"


def test_interrupt_lets_fixtures_end(tmp_path: Path) -> None:
    """Such a fixture can end a guest."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    (tmp_path / "test_some.py").write_text(f"""
import pathlib, pytest, time

@pytest.fixture
def guest():
    yield
    time.sleep(0.5)
    pathlib.Path({str(ended)!r}).touch()

def test_long(guest):
    pathlib.Path({str(begun)!r}).touch()
    time.sleep({PATIENCE_SECONDS})
""")
    process = twice(tmp_path)
    wait_for(begun)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert ended.exists()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- builders of guests


STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""


def test_builder_dies_with_the_tests(tmp_path: Path) -> None:
    """Even if the tests are killed."""
    started, pid = tmp_path / "started", tmp_path / "pid"
    program = f"""
import pathlib, sys, time
from tests.support import ahead
command = [sys.executable, "-c", {STUBBORN!r}, {str(started)!r}]
builder = ahead.start(command, pathlib.Path("/"))
pathlib.Path({str(pid)!r}).write_text(str(builder.pid))
time.sleep(1000)
"""
    tests = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    wait_for(started)
    tests.kill()
    tests.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_running(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # Its new parent may not reap it.
    return not text.rpartition(") ")[2].startswith("Z")
