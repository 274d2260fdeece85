# SPDX-License-Identifier: LGPL-2.1-or-later

"""The dump of CPUs in sets of all kinds, to be damaged."""

from collections.abc import Iterator

import pytest
from drgn import Program

from tests.cpus.damaged import borrowed


@pytest.fixture
def program() -> Iterator[Program]:
    """A dump to be damaged."""
    with borrowed("cpus-6.12") as prog:
        yield prog
