# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels of our own build, as far as that goes without building one."""

import pytest

from fixtures.lab import ownkernels

CONFIGURED = """\
# CONFIG_NUMA is not set
CONFIG_SWAP=y
CONFIG_LOCALVERSION="-lab"
"""


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        ("CONFIG_SWAP=y\n# A comment\n\n", []),
        ("CONFIG_SWAP=m\n", ["CONFIG_SWAP=m"]),
        ("CONFIG_KASAN=y\n", ["CONFIG_KASAN=y"]),
        ("# CONFIG_NUMA is not set\n", []),
        # Nothing that it depends on is on.
        ("# CONFIG_MEMCG is not set\n", []),
        ("# CONFIG_SWAP is not set\n", ["# CONFIG_SWAP is not set"]),
        ('CONFIG_LOCALVERSION="-lab"\n', []),
    ],
)
def test_options_that_the_kernel_refuses(wanted: str, lacking: list[str]) -> None:
    assert ownkernels.refused(wanted, CONFIGURED) == lacking
