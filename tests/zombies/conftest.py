# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps of the zombies scenario.

Types are BTF; a test of the whole report shows that DWARF gives the same.
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
    """A dump that the test can damage."""
    return open_dump("zombies-6.12", "btf")
