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
from pathlib import Path

import pytest

from fixtures.lab import host

DUMPS = (
    *("cpus-6.12", "cpulock-6.12", "cpus-6.1"),
    *("crash-6.12", "locks-6.12", "lockmodule-6.12", "lockspin-6.12"),
    *("memory-6.12", "memory-6.1", "owners-6.12", "barepages-6.12"),
    *("tasks-6.12", "tasks-on-6.12", "tasks-6.1", "zombies-6.12", "zombies-6.1"),
)
"""What ``make test`` needs, in the order of its tests."""

GUESTS = {
    "kcore-6.12": ("commands", "kcore", "locks", "prstat", "terminal"),
    "storm-6.12": ("storm",),
    "cpulive-6.12": ("cpus",),
    "hotplug-6.12": ("hotplug",),
}
"""Guests in which the commands run for minutes, the longest first, and whose tests each
has. These begin with those of the last, so that two processes have guests to make; they
come after the tests that boot guests of their own."""

PURE = ("tests/render/", "tests/demo/", "tests/kernel/", "tests/test_")
"""Modules that need no dump, or hardly any."""

MANY_MODULES = {"live": 8, "dumps": 100}
"""Who runs fewer modules wants no guests but those that these ask for."""

END_SECONDS = 20.0
"""How long a builder has to end its guest when it is told to."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put pure tests first, and last those that wait for guests made ahead.

    The order stays the same otherwise.
    """
    items.sort(key=lambda item: _rank(item.nodeid))


def _rank(test: str) -> int:
    for number, modules in enumerate(reversed(GUESTS.values())):
        if test.startswith(tuple(f"tests/live/test_{name}.py" for name in modules)):
            return 2 + number
    return 0 if test.startswith(PURE) else 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to make what most tests need, unless few tests run."""
    config = session.config
    if config.getoption("--no-lab") or config.getoption("--collect-only"):
        return
    # With workers, the first of them has collected the tests.
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return
    modules = {item.nodeid.partition("::")[0] for item in session.items}
    if "not live" in config.getoption("markexpr"):
        if len(modules) >= MANY_MODULES["dumps"]:
            make_ahead(config, DUMPS)
    # A guest that another process has is not booted anew.
    elif not config.getoption("--anew"):
        live = {name for name in modules if name.startswith("tests/live/")}
        if len(live) >= MANY_MODULES["live"]:
            make_ahead(config, [*GUESTS])


def make_ahead(config: pytest.Config, names: Sequence[str]) -> None:
    """Make guests in a process that ends with the tests."""
    lab = [sys.executable, "-m", "fixtures.lab", "build", *names]
    builder = start(lab, config.rootpath)
    config.add_cleanup(lambda: end(builder))


def start(command: Sequence[str], directory: Path) -> "subprocess.Popen[bytes]":
    """Start a program that says nothing, and dies with this process."""
    return subprocess.Popen(
        [*ending_with_parent("KILL"), *command],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end(builder: "subprocess.Popen[bytes]", seconds: float = END_SECONDS) -> None:
    """Interrupt a builder, so that it ends its guest; kill it if it goes on."""
    builder.send_signal(signal.SIGINT)
    try:
        builder.wait(seconds)
    except subprocess.TimeoutExpired:
        # Its guest dies with it.
        builder.kill()
        builder.wait()


def ending_with_parent(signal_name: str) -> list[str]:
    """Return what starts a program that gets a signal when this process dies.

    :param signal_name: the signal, without ``SIG``
    """
    host.require(["setpriv"])
    return ["setpriv", "--pdeathsig", signal_name]
