# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Run tests of running guests, those that fail once more on guests booted anew.

    python -m tests.support.twice [PYTEST-OPTION...]

A guest's CPUs are emulated on a machine that has other things to do, and what QEMU gets
wrong at times is no fault of ours. The summary names each test that needed a second
try; what fails twice is red.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        status = run(directory, *words)
        failed = last_failed(Path(directory))
        if status != 1 or not failed:
            return status
        print(f"\n{len(failed)} failed: once more, on guests booted anew", flush=True)
        again = run(directory, *words, "--anew", "--last-failed")
        twice = last_failed(Path(directory))
    for test in failed:
        verdict = "failed twice" if test in twice else "passed at the second try"
        print(f"{verdict}: {test}")
    return again


def run(cache: str, *words: str) -> int:
    command = [sys.executable, "-m", "pytest", "-m", "live and not long"]
    return subprocess.run([*command, "-o", f"cache_dir={cache}", *words]).returncode


def last_failed(cache: Path) -> list[str]:
    """Return the tests that failed in the last run."""
    path = cache / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
