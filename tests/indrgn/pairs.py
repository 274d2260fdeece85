# SPDX-License-Identifier: LGPL-2.1-or-later

"""One dump seen with debug info and without, and what differs between the answers."""

from dataclasses import dataclass

from drgn import Program

from fixtures import lab
from msatools.program import TargetSpec, open_target
from msatools.selfdesc import create_modules


@dataclass(frozen=True)
class Pair:
    """A dump opened twice."""

    dwarf: Program
    btf: Program


def open_pair(run: lab.Run) -> Pair:
    """Open a run's dump with its kernel's debug info, and with what it holds itself."""
    path = str(run.kept)
    pair = Pair(
        open_target(TargetSpec(path=path, vmlinux=str(run.vmlinux))).prog,
        open_target(TargetSpec(path=path, types="btf")).prog,
    )
    for prog in (pair.dwarf, pair.btf):
        create_modules(prog)
    return pair
