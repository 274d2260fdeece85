# SPDX-License-Identifier: LGPL-2.1-or-later

"""All tasks of each kernel's dump, with debug info and without."""

import pytest

from tests.support.dumps import BUSY, IDLE, pairs
from tests.tasks.sleepers import Tasks, known

AT_REST = tuple(name for name in IDLE if not name.startswith("crash"))


@pytest.fixture(scope="session", params=pairs(AT_REST + BUSY))
def tasks(request: pytest.FixtureRequest) -> Tasks:
    return known(*request.param)


@pytest.fixture(scope="session", params=AT_REST)
def idle(request: pytest.FixtureRequest) -> Tasks:
    return known(request.param, "btf")


@pytest.fixture(scope="session", params=AT_REST + BUSY)
def tasks_btf(request: pytest.FixtureRequest) -> Tasks:
    return known(request.param, "btf")
