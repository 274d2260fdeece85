# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A pytest plugin that builds guests and dumps while other tests run.

Tests without dumps run first, then tests of dumps in the order of the builds.
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
    *("cpus-6.12", "cpulock-6.12"),
    *("crash-6.12", "locks-6.12", "lockmodule-6.12", "lockspin-6.12"),
    *("memory-6.12", "memory-6.1", "owners-6.12", "barepages-6.12"),
    *("tasks-6.12", "tasks-on-6.12", "zombies-6.12"),
)
"""The dumps that ``make test`` needs, in the order of its tests."""

GUESTS = {
    "kcore-6.12": ("commands", "kcore", "locks", "prstat", "terminal"),
    "storm-6.12": ("storm",),
    "cpulive-6.12": ("cpus",),
    "hotplug-6.12": ("hotplug",),
}
"""Guests in which commands run for minutes, the longest first, and their test modules.

The tests that boot guests of their own run first, then the tests of the last guest
here. So this process and the tests' both have a guest to build."""

PURE = (
    *("tests/cli/", "tests/demo/", "tests/derived/", "tests/fleet/", "tests/fuzz/"),
    *("tests/render/", "tests/test_"),
)
"""Modules with few or no tests that need a dump."""

MANY_MODULES = {"live": 8, "dumps": 100}
"""Minimum numbers of modules to run before anything is built ahead."""

END_SECONDS = 20.0
"""Time for a builder to end its guest after an interrupt."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests without dumps first, and tests that need ``GUESTS`` last.

    Otherwise keep the order.
    """
    items.sort(key=lambda item: _rank(item.nodeid))


def _rank(test: str) -> int:
    for number, modules in enumerate(reversed(GUESTS.values())):
        if test.startswith(tuple(f"tests/live/test_{name}.py" for name in modules)):
            return 2 + number
    return 0 if test.startswith(PURE) else 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to build the dumps or guests that the tests need, unless few tests run."""
    config = session.config
    if config.getoption("--no-lab") or config.getoption("--collect-only"):
        return
    # With xdist, only the first worker builds.
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return
    modules = {item.nodeid.partition("::")[0] for item in session.items}
    if "not live" in config.getoption("markexpr"):
        if len(modules) >= MANY_MODULES["dumps"]:
            make_ahead(config, DUMPS)
    # With --anew the tests rebuild the guests themselves.
    elif not config.getoption("--anew"):
        live = {name for name in modules if name.startswith("tests/live/")}
        if len(live) >= MANY_MODULES["live"]:
            make_ahead(config, [*GUESTS])


def make_ahead(config: pytest.Config, names: Sequence[str]) -> None:
    """Build scenarios in a process that ends with the tests."""
    lab = [sys.executable, "-m", "fixtures.lab", "build", *names]
    builder = start(lab, config.rootpath)
    config.add_cleanup(lambda: end(builder))


def start(command: Sequence[str], directory: Path) -> "subprocess.Popen[bytes]":
    """Start a program without output that is killed when this process dies."""
    return subprocess.Popen(
        [*ending_with_parent("KILL"), *command],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end(builder: "subprocess.Popen[bytes]", seconds: float = END_SECONDS) -> None:
    """Interrupt a builder, so that it ends its guest; kill it after *seconds*."""
    builder.send_signal(signal.SIGINT)
    try:
        builder.wait(seconds)
    except subprocess.TimeoutExpired:
        # Its guest dies with it.
        builder.kill()
        builder.wait()


def ending_with_parent(signal_name: str) -> list[str]:
    """Return a command prefix: the program gets a signal when this process dies.

    :param signal_name: the signal, without ``SIG``
    """
    host.require(["setpriv"])
    return ["setpriv", "--pdeathsig", signal_name]
