# SPDX-License-Identifier: LGPL-2.1-or-later

"""How many bits of a page's flags are the node's: on each architecture, from types."""

import pytest

from fixtures.demo import DEMOS
from msatools.memory.pages import layout
from tests.memory.madepages import open_demo


@pytest.mark.parametrize("name", DEMOS)
def test_types_tell_what_the_kernel_exports(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prog = open_demo(name)
    exported = layout._node_bits(prog)
    assert exported == 10
    # As on arm64, which does not export the length of node_data.
    monkeypatch.setattr(layout, "vmcoreinfo", lambda prog: {})
    assert layout._node_bits(prog) == exported
