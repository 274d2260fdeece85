# SPDX-License-Identifier: LGPL-2.1-or-later

"""The demos, opened as a user does who has no debug info."""

import pytest

from fixtures.demo import DEMOS, Demo
from msatools.program import Opened, TargetSpec, open_target


@pytest.fixture(scope="session", params=list(DEMOS))
def demo(request: pytest.FixtureRequest) -> Demo:
    """Each demo."""
    return DEMOS[request.param]


@pytest.fixture(scope="session")
def opened(demo: Demo) -> Opened:
    """Its core."""
    return open_target(TargetSpec(path=str(demo.core), types="btf"))
