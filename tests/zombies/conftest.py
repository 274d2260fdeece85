# SPDX-License-Identifier: LGPL-2.1-or-later

"""The zombies scenario, whole and to be damaged.

Types are BTF: that debug info makes no difference is shown of the whole report.
"""

import pytest
from drgn import Program

from tests.support.dumps import open_dump
from tests.zombies.dumps import Dump, read_dump


@pytest.fixture(params=["6.1", "6.12"])
def dump(request: pytest.FixtureRequest) -> Dump:
    """The zombies scenario, on each kernel."""
    return read_dump(f"zombies-{request.param}")


@pytest.fixture
def program() -> Program:
    """One dump opened anew, to be damaged."""
    return open_dump("zombies-6.12", "btf")
