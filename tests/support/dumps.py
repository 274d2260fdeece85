# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open the lab's dumps by name, with DWARF or BTF."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from drgn import Program

from fixtures import lab
from msatools.program import TargetSpec, open_target

IDLE = ("memory-5.10", "memory-6.1", "memory-6.12", "crash-6.1", "crash-6.12")
"""Idle machines: threads sleep, kernel threads wait for work."""

BUSY = ("tasks-6.1", "tasks-6.12")
"""Machines with tasks of every class."""

TYPES = ("btf", "dwarf")


def open_dump(name: str, types: str) -> Program:
    run = lab.build(name)
    path = str(run.kept)
    vmlinux = str(run.vmlinux) if types == "dwarf" else None
    spec = TargetSpec(path=path, types=types, vmlinux=vmlinux)
    return open_target(spec).prog


def spinning(run: lab.Run) -> dict[str, Any]:
    """Return what a guest printed when all of it was in place, after its truth.

    :raises LookupError: if it printed nothing
    """
    found = re.search(r"LAB-SPINNING (\{.*\})", run.console)
    if found is None:
        raise LookupError(f"{run.name} has nothing that is put in place")
    return dict(json.loads(found[1]))


def pairs(names: Iterable[str]) -> Iterator[object]:
    for name, types in product(names, TYPES):
        yield pytest.param((name, types), id=f"{name}-{types}")


def vmcoreinfo_of(dump: Path) -> bytes:
    """Return a guest's VMCOREINFO, by the note that QEMU has put in an ELF dump."""
    prog = Program()
    prog.set_core_dump(dump)
    return bytes(prog["VMCOREINFO"].string_())


def kernel_at(dump: Path) -> int:
    """Return the physical address of an x86-64 kernel, which KASLR decides."""
    text = vmcoreinfo_of(dump)
    base = re.search(rb"NUMBER\(phys_base\)=(-?\d+)", text)
    start = re.search(rb"SYMBOL\(_stext\)=(\w+)", text)
    assert base is not None
    assert start is not None
    return int(start[1], 16) - 0xFFFF_FFFF_8000_0000 + int(base[1])
