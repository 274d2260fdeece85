# SPDX-License-Identifier: LGPL-2.1-or-later

"""Architectures: a module each, behind one interface."""

import drgn

from msatools.target.arch.arm64 import Arm64
from msatools.target.arch.model import Arch
from msatools.target.arch.riscv64 import Riscv64
from msatools.target.arch.x86_64 import X86
from msatools.target.paging import TableFormat

_ARCHITECTURES = {
    drgn.Architecture.X86_64: X86(),
    drgn.Architecture.AARCH64: Arm64(),
    drgn.Architecture.RISCV64: Riscv64(),
}
_UNKNOWN = Arch()


def arch_of(prog: drgn.Program) -> Arch:
    """Return the architecture of a program."""
    platform = prog.platform
    return _UNKNOWN if platform is None else architecture(platform.arch)


def architecture(arch: drgn.Architecture) -> Arch:
    """Return what is known of an architecture."""
    return _ARCHITECTURES.get(arch, _UNKNOWN)


def table_format(prog: drgn.Program) -> TableFormat | None:
    """Return the format of a kernel's page tables; ``None`` if unknown."""
    return arch_of(prog).table_format(prog)
