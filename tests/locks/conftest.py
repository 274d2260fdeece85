# SPDX-License-Identifier: LGPL-2.1-or-later

"""The lab's dumps with waiting tasks, on each kernel that they are built for."""

import pytest

from tests.locks.seen import MODULE, SPINNING, STOCK, TASKS, Seen, seen


@pytest.fixture(params=TASKS)
def tasks(request: pytest.FixtureRequest) -> Seen:
    """A dump with tasks of every class."""
    return seen(request.param)


@pytest.fixture(params=STOCK)
def stock(request: pytest.FixtureRequest) -> Seen:
    """A dump with locks that user tasks wait for."""
    return seen(request.param)


@pytest.fixture(params=MODULE)
def module(request: pytest.FixtureRequest) -> Seen:
    """A dump with locks of a module and its threads as waiters."""
    return seen(request.param)


@pytest.fixture(params=[*STOCK, *MODULE])
def locks(request: pytest.FixtureRequest) -> Seen:
    """A dump of either kind."""
    return seen(request.param)


@pytest.fixture(params=SPINNING)
def spinning(request: pytest.FixtureRequest) -> Seen:
    """A dump with CPUs that spin on locks."""
    return seen(request.param)
