# SPDX-License-Identifier: LGPL-2.1-or-later

import drgn
import pytest

from msatools.errors import MissingSymbolError
from msatools.selfdesc.find import find_variable


def program() -> drgn.Program:
    """A kernel that defines ``here`` and only declares ``declared``."""
    prog = drgn.Program(drgn.Platform(drgn.Architecture.X86_64))
    number = prog.int_type("int", 4, True)
    objects = {
        "here": drgn.Object(prog, number, address=0xFFFF_FFFF_8000_0000),
        "declared": drgn.Object(prog, number),
    }

    def find(
        prog: drgn.Program, name: str, flags: drgn.FindObjectFlags, file: str | None
    ) -> drgn.Object | None:
        return objects.get(name)

    prog.register_object_finder("lab", find, enable_index=0)
    return prog


def test_variable_that_is_there_is_returned() -> None:
    assert find_variable(program(), "here").address_ == 0xFFFF_FFFF_8000_0000


@pytest.mark.parametrize("name", ["declared", "never heard of"])
def test_variable_without_a_place_is_missing(name: str) -> None:
    with pytest.raises(MissingSymbolError, match=name):
        find_variable(program(), name)
