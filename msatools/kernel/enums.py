# SPDX-License-Identifier: LGPL-2.1-or-later

"""Values of the kernel's enumerators, cached: some are looked up with each sample."""

import drgn

from msatools.errors import MissingSymbolError
from msatools.selfdesc.find import find_constant, find_type

_ENUMS, _CONSTANTS = "msatools.enumerators", "msatools.constants"
"""Keys of the program's cache."""


class Enumerators(dict[str, int]):
    """Values of an enum by name."""

    def __missing__(self, name: str) -> int:
        raise MissingSymbolError(f"the kernel has no {name}")


def enumerators(prog: drgn.Program, name: str) -> Enumerators:
    """
    Return the values of an enum by name, in their order; none if it is incomplete.

    A name that it lacks raises :class:`msatools.errors.MissingSymbolError`.

    They are looked up once per program: drgn makes an object of each enumerator at
    every call, and some enums have hundreds.

    :param name: Such as ``enum vm_event_item``.
    :raises MissingError: if the type is unknown
    """
    known: dict[str, Enumerators] = prog.cache.setdefault(_ENUMS, {})
    if name not in known:
        values = {
            item.name: item.value for item in find_type(prog, name).enumerators or ()
        }
        known[name] = Enumerators(values)
    return known[name]


def constant(prog: drgn.Program, name: str) -> int:
    """
    Return the value of a constant, such as an enumerator.

    It is looked up once per program, which takes drgn some 20 us.

    :raises MissingError: if the kernel has no constant of that name
    """
    known: dict[str, int] = prog.cache.setdefault(_CONSTANTS, {})
    if name not in known:
        known[name] = int(find_constant(prog, name).value_())
    return known[name]
