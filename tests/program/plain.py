# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open a dump as usual, but with all memory read through drgn's page walks."""

from unittest.mock import patch

from drgn import Program

from fixtures import lab
from msatools.program import TargetSpec, open_target


def open_plain(name: str, format: str = "elf") -> Program:
    """Open a dump of the lab, without :func:`map_kernel`."""
    path = lab.build(name).dump(format)
    with patch("msatools.program.open.map_kernel") as map_kernel:
        prog = open_target(TargetSpec(path=str(path), types="btf")).prog
    map_kernel.assert_called_once()
    return prog
