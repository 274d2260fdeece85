# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Guests and dumps made while other tests run: a pytest plugin.

Pure tests come first, then those of the dumps in the order in which these are made.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

DUMPS = tuple(
    f"{name}-6.12"
    for name in (
        "memory",
        "tasks",
        "locks",
        "zombies",
        "cpus",
        "owners",
        "barepages",
        "lockmodule",
        "lockspin",
        "cpulock",
        "crash",
    )
)
"""What ``make test`` needs, in the order of its tests."""

GUESTS = tuple(f"{name}-6.12" for name in ("kcore", "storm", "cpulive", "hotplug"))
"""Guests in which the commands run for minutes, the longest first."""

PURE = ("tests/render/", "tests/demo/", "tests/kernel/", "tests/test_")
"""Modules that need no dump, or hardly any."""

_ALL_OF_THEM = 100
"""Who runs fewer modules than this wants no dumps but those that these ask for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put pure tests first; the order stays the same otherwise."""
    items.sort(key=lambda item: not item.nodeid.startswith(PURE))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to make what most tests need, unless few tests run."""
    config = session.config
    if config.getoption("--no-lab") or config.getoption("--collect-only"):
        return
    # With workers, the first of them has collected the tests.
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return
    live = "not live" not in config.getoption("markexpr")
    modules = {item.nodeid.partition("::")[0] for item in session.items}
    if live and any(module.startswith("tests/live/") for module in modules):
        make_ahead(config, GUESTS)
    elif not live and len(modules) >= _ALL_OF_THEM:
        make_ahead(config, DUMPS)


def make_ahead(config: pytest.Config, names: Sequence[str]) -> None:
    """Make guests in a process that ends with the tests."""
    builder = subprocess.Popen(
        [sys.executable, "-m", "fixtures.lab", "build", *names],
        cwd=config.rootpath,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def end() -> None:
        # So it ends its guest, too.
        builder.send_signal(signal.SIGINT)
        builder.wait()

    config.add_cleanup(end)
