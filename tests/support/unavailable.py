# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A pytest plugin that reports what the lab cannot have once in a run.

If a program, a kernel or disk space is not to be had, the first test that needs it
fails; the others that need it are skipped and name it.
"""

import hashlib
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from fixtures.lab.errors import UnavailableError


class FirstOnly:
    """Turns failures with an ``UnavailableError`` that was reported into skips."""

    def __init__(self, reported: Path) -> None:
        """
        :param reported: A directory of this run: a file for each error that a test
            failed with, in whichever process.
        """
        self._reported = reported

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: "pytest.CallInfo[None]"
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, UnavailableError) and not self._is_first(str(error)):
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = path, (line or 0) + 1, f"Skipped: {error}"
        return report

    def _is_first(self, message: str) -> bool:
        name = f"unavailable-{hashlib.sha256(message.encode()).hexdigest()}"
        try:
            (self._reported / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # xdist has a directory for each worker, in one of the run.
        reported = Path(config.option.basetemp).parent
    else:
        directory = tempfile.TemporaryDirectory()
        config.add_cleanup(directory.cleanup)
        reported = Path(directory.name)
    config.pluginmanager.register(FirstOnly(reported), "unavailable")
