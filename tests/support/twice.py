# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Run the tests of running guests, and those that fail once more on guests booted anew.

    python -m tests.support.twice [PYTEST-OPTION...]

A guest's CPUs are emulated on a machine that has other things to do, and QEMU itself
makes mistakes. The summary names each test that needed a second try; what fails twice
is red, and so is what was not run.
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
"""How pytest is called the second time."""

POLL_SECONDS = 0.1
_RECORD = "--record"


@dataclass
class Outcome:
    """What became of the tests in one run of pytest; they go by their node IDs."""

    status: int = pytest.ExitCode.INTERNAL_ERROR
    chosen: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Also those whose fixtures failed, and modules that could not be collected."""

    @property
    def unfinished(self) -> list[str]:
        """The chosen tests that have no outcome, as the run was cut short."""
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
        # A test that passes fails all the same if what ends its fixtures does.
        if test in self.outcome.passed:
            self.outcome.passed.remove(test)
        if test not in self.outcome.failed:
            self.outcome.failed.append(test)


def main(words: Sequence[str]) -> int:
    """Run the tests, and those that failed once more.

    :return: the exit status, as pytest has it
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
    """Name each test that needed a second try, and what came of it."""
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
    """Run pytest in a process of its own; an interrupt is passed on to it."""
    path = directory / "outcome"
    path.unlink(missing_ok=True)
    module = [sys.executable, "-m", "tests.support.twice", _RECORD, str(path)]
    cache = ["-o", f"cache_dir={directory / 'cache'}"]
    with caught(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupts:
        process = subprocess.Popen(
            [*ending_with_parent("INT"), *module, *LIVE, *cache, *words],
            # So Ctrl-C at the terminal does not reach it by two ways.
            start_new_session=True,
        )
        told = False
        while process.poll() is None:
            if interrupts and not told:
                # Once: a second one would break off what ends the guests.
                process.send_signal(signal.SIGINT)
                told = True
            time.sleep(POLL_SECONDS)
    if not path.exists():
        return Outcome(pytest.ExitCode.INTERRUPTED if told else process.returncode)
    return Outcome(**json.loads(path.read_text()))


@contextmanager
def caught(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Collect the signals that come during the block."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in numbers
    }
    try:
        yield came
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def record(path: Path, words: Sequence[str]) -> int:
    """Run pytest in this process, and leave its outcome in a file."""
    recorder = Recorder()
    status = pytest.main([*words], plugins=[recorder])
    recorder.outcome.status = int(status)
    path.write_text(json.dumps(asdict(recorder.outcome)))
    return int(status)


if __name__ == "__main__":
    if sys.argv[1:2] == [_RECORD]:
        sys.exit(record(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
