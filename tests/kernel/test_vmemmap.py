# SPDX-License-Identifier: LGPL-2.1-or-later

"""The base of the virtual memmap, by variable or by layout."""

import drgn
import pytest

from msatools.program.linear import vmemmap_base

VARIABLE, COMPUTED = 0x1000, 0x2000


@pytest.mark.parametrize(
    ("arch", "names", "base"),
    [
        ("X86_64", ("vmemmap", "vmemmap_base"), VARIABLE),
        ("X86_64", ("vmemmap",), COMPUTED),
        # On arm64, vmemmap_base is a symbol of KVM's hypervisor.
        ("AARCH64", ("vmemmap", "vmemmap_base"), COMPUTED),
    ],
)
def test_base_of_the_memmap(arch: str, names: tuple[str, ...], base: int) -> None:
    prog = drgn.Program(drgn.Platform(drgn.Architecture[arch]))
    word = prog.int_type("unsigned long", 8, False)
    values = {"vmemmap": COMPUTED, "vmemmap_base": VARIABLE}

    def find(
        prog: drgn.Program, name: str, flags: drgn.FindObjectFlags, file: str | None
    ) -> drgn.Object | None:
        return drgn.Object(prog, word, values[name]) if name in names else None

    prog.register_object_finder("lab", find, enable_index=0)
    assert vmemmap_base(prog) == base
