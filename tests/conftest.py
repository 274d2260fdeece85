# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fixtures: dumps and guests from the lab, and commands run as console scripts."""

import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fixtures import lab
from tests.support.usage import free_programs

Msa = Callable[..., "subprocess.CompletedProcess[str]"]

pytest_plugins = [
    "tests.support.tiers",
    "tests.support.ahead",
    "tests.support.unavailable",
    "tests.support.usage",
    "tests.support.slowest",
    "tests.support.golden",
]


# The same cases each time, and no failures because the machine is busy.
settings.register_profile(
    "sure",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sure")


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background shell ignores SIGINT; the tests' own processes must not.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # Thousands of tests are garbage at no time: looking for some in them is 4 % of all.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    """The memory scenario, on each kernel."""
    return lab.build(f"memory-{request.param}")


@pytest.fixture(scope="session")
def run_612() -> lab.Run:
    """The memory scenario on one kernel."""
    return lab.build("memory-6.12")


@pytest.fixture(scope="session")
def live_guest() -> Iterator[lab.Live]:
    """A running guest."""
    with lab.live("memory-6.12") as guest:
        yield guest


@pytest.fixture
def live_qmp(live_guest: lab.Live) -> str:
    """The QMP socket of the running guest; it accepts one client at a time."""
    free_programs()
    return str(live_guest.qmp)


@pytest.fixture(scope="session")
def msa_memstat() -> Path:
    """The installed console script."""
    return Path(sys.executable).with_name("msa-memstat")


@pytest.fixture
def msa(msa_memstat: Path) -> Msa:
    """Return a function that runs msa-memstat to its end."""

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
