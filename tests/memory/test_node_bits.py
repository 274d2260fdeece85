# SPDX-License-Identifier: LGPL-2.1-or-later

"""The number of node bits in page flags, also if the kernel does not export it."""

import pytest

from fixtures.demo import DEMOS
from msatools.memory import classes
from tests.memory.madepages import open_demo


@pytest.mark.parametrize("name", DEMOS)
def test_node_bits_from_types_are_those_exported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prog = open_demo(name)
    exported = classes._node_bits(prog)
    assert exported == 10
    # arm64 does not export the length of node_data.
    monkeypatch.setattr(classes, "vmcoreinfo", lambda prog: {})
    assert classes._node_bits(prog) == exported
