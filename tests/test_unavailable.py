# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the lab cannot have fails one test of a run, in whichever process."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = 'pytest_plugins = ["tests.support.unavailable"]\n'
TESTS = """
import pytest
from fixtures.lab.errors import LabError, UnavailableError

@pytest.fixture
def guest():
    raise UnavailableError("missing on this machine: an emulator")

def test_guest(guest): pass
def test_same(): raise UnavailableError("missing on this machine: an emulator")
def test_other(): raise LabError("the guest failed")
def test_needs_nothing(): pass
"""


def test_first_fails_and_others_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    words = ["-c", str(tmp_path / "pytest.ini"), "-rA", "-n", "2", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, summary = done.stdout.partition("short test summary info")
    kinds = Counter(line.split()[0] for line in summary.splitlines()[1:-1])
    # An error of a fixture is an ERROR, of the test itself it is FAILED.
    assert kinds["PASSED"] == 2
    assert kinds["ERROR"] + kinds["FAILED"] == 1 + 2  # two of other faults
    assert sum(int(n) for n in skips(summary)) == 3
    assert "missing on this machine: an emulator" in summary


def skips(summary: str) -> list[str]:
    """Return the counts in lines such as ``SKIPPED [2] PLACE: WHY``."""
    lines = [line for line in summary.splitlines() if line.startswith("SKIPPED")]
    return [line.partition("[")[2].partition("]")[0] for line in lines]
