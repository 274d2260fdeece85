# SPDX-License-Identifier: LGPL-2.1-or-later

"""Failed tests of running guests are repeated."""

import subprocess
import sys
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
