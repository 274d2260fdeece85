# SPDX-License-Identifier: LGPL-2.1-or-later

"""A pytest plugin that prints the slowest modules and guests at the end."""

import time
from collections import Counter

import pytest

from fixtures.lab.cache import default_cache
from fixtures.lab.store import built_since

MODULES = 15
"""Number of modules listed."""


class Slowest:
    """Sums the seconds of each module over all workers."""

    def __init__(self) -> None:
        self.began = time.time()
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        write = terminalreporter.write_line
        elapsed = time.time() - self.began
        total = sum(self.seconds.values())
        terminalreporter.section("what took longest")
        write(f"{elapsed:6.0f} s in all, {total:.0f} s of tests:")
        for module, seconds in self.seconds.most_common(MODULES):
            write(f"{seconds:6.1f} s  {module}")
        guests = built_since(default_cache(), self.began)
        write(f"guests built: {len(guests)}")
        for name, seconds in sorted(guests.items(), key=lambda guest: -guest[1]):
            write(f"{seconds:6.1f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Slowest(), "slowest")
