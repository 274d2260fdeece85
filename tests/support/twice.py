# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Run the tests of running guests; repeat those that fail, on guests booted again.

    python -m tests.support.twice [PYTEST-OPTION...]

Tests can fail by chance: guests are emulated on a busy machine, and QEMU has faults.
The summary names each test that needed a second try. The exit status is non-zero if a
test fails twice or was not run.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.support.ahead import ending_with_parent

LIVE = ("-m", "live and not long")
AGAIN = ("--anew", "--last-failed")
"""Options of the second run of pytest."""

POLL_SECONDS = 0.1
_RECORD = "--record"


@dataclass
class Outcome:
    """The outcome of one run of pytest; tests are listed by node ID."""

    status: int = pytest.ExitCode.INTERNAL_ERROR
    chosen: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Includes tests whose fixtures failed and modules that could not be collected."""

    @property
    def unfinished(self) -> list[str]:
        """The chosen tests without an outcome, because the run was interrupted."""
        done = {*self.passed, *self.skipped, *self.failed}
        return [test for test in self.chosen if test not in done]


class Recorder:
    """Records the outcome of a run: a pytest plugin."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.outcome.chosen = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report.nodeid)
        elif report.skipped:
            self.outcome.skipped.append(report.nodeid)
        elif report.when == "call":
            self.outcome.passed.append(report.nodeid)

    def _fail(self, test: str) -> None:
        # A test that passed counts as failed if the teardown of its fixtures fails.
        if test in self.outcome.passed:
            self.outcome.passed.remove(test)
        if test not in self.outcome.failed:
            self.outcome.failed.append(test)


def main(words: Sequence[str]) -> int:
    """Run the tests, then those that failed again.

    :return: pytest's exit status
    """
    with tempfile.TemporaryDirectory() as directory:
        first = run(Path(directory), *words)
        if first.status != pytest.ExitCode.TESTS_FAILED or not first.failed:
            return first.status
        print(f"\n{len(first.failed)} failed: once more, on guests booted anew")
        sys.stdout.flush()
        second = run(Path(directory), *words, *AGAIN)
    for line in summary(first, second):
        print(line)
    return status_of(first, second)


def summary(first: Outcome, second: Outcome) -> Iterator[str]:
    """Yield a line for each test that failed, with the outcome of the second try."""
    for test in first.failed:
        if test in second.failed:
            yield f"failed twice: {test}"
        elif test in second.passed:
            yield f"passed at the second try: {test}"
        else:
            yield f"failed, and not run a second time: {test}"
    if first.unfinished:
        yield f"not run at all: {len(first.unfinished)} tests"


def status_of(first: Outcome, second: Outcome) -> int:
    """Return the exit status of both runs together."""
    if second.status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return second.status
    if first.unfinished or not {*first.failed} <= {*second.passed}:
        return pytest.ExitCode.TESTS_FAILED
    return second.status


def run(directory: Path, *words: str) -> Outcome:
    """Run pytest in its own process, passing on an interrupt."""
    path = directory / "outcome"
    path.unlink(missing_ok=True)
    module = [sys.executable, "-m", "tests.support.twice", _RECORD, str(path)]
    cache = ["-o", f"cache_dir={directory / 'cache'}"]
    with caught(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        process = subprocess.Popen(
            [*ending_with_parent("INT"), *module, *LIVE, *cache, *words],
            # Otherwise Ctrl-C would reach it twice.
            start_new_session=True,
        )
        interrupted = False
        while process.poll() is None:
            if interrupts and not interrupted:
                # Only once: a second interrupt would stop the cleanup of guests.
                process.send_signal(signal.SIGINT)
                interrupted = True
            time.sleep(POLL_SECONDS)
    if not path.exists():
        return Outcome(
            pytest.ExitCode.INTERRUPTED if interrupted else process.returncode
        )
    return Outcome(**json.loads(path.read_text()))


@contextmanager
def caught(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Collect the signals received during the block."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in numbers
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def record(path: Path, words: Sequence[str]) -> int:
    """Run pytest in this process and write its outcome to a file."""
    recorder = Recorder()
    status = pytest.main([*words], plugins=[recorder])
    recorder.outcome.status = int(status)
    path.write_text(json.dumps(asdict(recorder.outcome)))
    return int(status)


if __name__ == "__main__":
    if sys.argv[1:2] == [_RECORD]:
        sys.exit(record(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
