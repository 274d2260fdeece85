# SPDX-License-Identifier: LGPL-2.1-or-later

"""The lab's dumps in which tasks wait, each on the kernels that it is built for."""

import pytest

from tests.locks.seen import MODULE, SPINNING, STOCK, TASKS, Seen, seen


@pytest.fixture(params=TASKS)
def tasks(request: pytest.FixtureRequest) -> Seen:
    """Tasks of every class."""
    return seen(request.param)


@pytest.fixture(params=STOCK)
def stock(request: pytest.FixtureRequest) -> Seen:
    """Locks that tasks of user space wait for, or the kernel for them."""
    return seen(request.param)


@pytest.fixture(params=MODULE)
def module(request: pytest.FixtureRequest) -> Seen:
    """Locks of a module, waited for by its threads."""
    return seen(request.param)


@pytest.fixture(params=[*STOCK, *MODULE])
def locks(request: pytest.FixtureRequest) -> Seen:
    """Those of either."""
    return seen(request.param)


@pytest.fixture(params=SPINNING)
def spinning(request: pytest.FixtureRequest) -> Seen:
    """CPUs that spin."""
    return seen(request.param)
