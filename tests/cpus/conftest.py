# SPDX-License-Identifier: LGPL-2.1-or-later

"""A dump with CPUs in sets of all kinds, for tests that damage it."""

from collections.abc import Iterator

import pytest
from drgn import Program

from tests.cpus.damaged import borrowed


@pytest.fixture
def program() -> Iterator[Program]:
    """A dump that the test can damage."""
    with borrowed("cpus-6.12") as prog:
        yield prog
