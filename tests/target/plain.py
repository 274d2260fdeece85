# SPDX-License-Identifier: LGPL-2.1-or-later

"""A dump as it is opened, but with all its memory read through drgn's page walks."""

from unittest.mock import patch

from drgn import Program

from fixtures import lab
from msatools.target import TargetSpec, open_target


def open_plain(name: str, format: str = "elf") -> Program:
    """Open the lab's dump of this name."""
    path = lab.build(name).dump(format)
    with patch("msatools.target.open.map_kernel") as left_out:
        prog = open_target(TargetSpec(path=str(path), types="btf")).prog
    left_out.assert_called_once()
    return prog
