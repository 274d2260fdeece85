# SPDX-License-Identifier: LGPL-2.1-or-later

"""Real dumps and guests from the lab, and the commands as users start them."""

import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fixtures import lab

Msa = Callable[..., "subprocess.CompletedProcess[str]"]

AHEAD = tuple(
    f"{name}-{kernel}"
    for name in ("cpulive", "kcore", "lockdown", "hotplug", "storm")
    for kernel in ("6.1", "6.12")
)
"""Guests in which msatools runs for minutes, in the order in which tests need them."""

NEED_THEM = {"tests/cpus/test_live.py", "tests/live/test_storm.py"}
"""Of the modules that do, the first and the last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-lab",
        action="store_true",
        help="skip the tests that need guests, or dumps of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell in the background has it ignored, and so would what tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--no-lab"):
        for name in ("build", "live"):
            setattr(lab, name, no_lab)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have guests made while the tests before theirs run, if all are to run.

    Each keeps one CPU busy for the most part, as most tests do.
    """
    modules = {item.nodeid.partition("::")[0] for item in session.items}
    config = session.config
    if config.getoption("--no-lab") or config.getoption("--collect-only"):
        return
    if modules >= NEED_THEM:
        builder = subprocess.Popen(
            [sys.executable, "-m", "fixtures.lab", "build", *AHEAD],
            cwd=config.rootpath,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        config.add_cleanup(lambda: end(builder))


def end(builder: "subprocess.Popen[bytes]") -> None:
    """End what makes guests, and the guest that it makes."""
    builder.send_signal(signal.SIGINT)
    builder.wait()


def no_lab(name: str, *_: object, **__: object) -> NoReturn:
    pytest.skip(f"needs the lab's {name}, and --no-lab says not to make it")


@pytest.fixture(scope="session", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    """The memory scenario, on each kernel."""
    return lab.build(f"memory-{request.param}")


@pytest.fixture(scope="session")
def run_612() -> lab.Run:
    """The memory scenario, where one kernel will do."""
    return lab.build("memory-6.12")


@pytest.fixture(scope="session")
def live_guest() -> Iterator[lab.Live]:
    """A guest that runs."""
    with lab.live("memory-6.12") as guest:
        yield guest


@pytest.fixture
def live_qmp(live_guest: lab.Live) -> str:
    """A QMP socket of a guest that runs, which one client at a time can have."""
    # A program of a test before may be garbage, and still hold the socket.
    gc.collect()
    return str(live_guest.qmp)


@pytest.fixture(scope="session")
def msa_memstat() -> Path:
    """The installed console script."""
    return Path(sys.executable).with_name("msa-memstat")


@pytest.fixture
def msa(msa_memstat: Path) -> Msa:
    """Run msa-memstat with some words and give what it printed."""

    def run_it(*words: str | Path, **options: object) -> object:
        return subprocess.run(
            [msa_memstat, *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **options,
        )

    return run_it
