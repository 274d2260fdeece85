# SPDX-License-Identifier: LGPL-2.1-or-later

"""Values of the kernel's enumerators, cached: some are looked up with each sample."""

from collections.abc import Mapping
from types import MappingProxyType

import drgn

_ENUMS, _CONSTANTS = "msatools.enumerators", "msatools.constants"
"""Keys of the program's cache."""


def enumerators(prog: drgn.Program, name: str) -> Mapping[str, int]:
    """
    Return the values of an enum by name, in their order; none if it is incomplete.

    They are looked up once per program: drgn makes an object of each enumerator at
    every call, and some enums have hundreds.

    :param name: Such as ``enum vm_event_item``.
    :raises LookupError: if the type is unknown
    """
    known: dict[str, Mapping[str, int]] = prog.cache.setdefault(_ENUMS, {})
    if name not in known:
        values = {item.name: item.value for item in prog.type(name).enumerators or ()}
        known[name] = MappingProxyType(values)
    return known[name]


def constant(prog: drgn.Program, name: str) -> int:
    """
    Return the value of a constant, such as an enumerator.

    It is looked up once per program, which takes drgn some 20 us.

    :raises LookupError: if the kernel has no constant of that name
    """
    known: dict[str, int] = prog.cache.setdefault(_CONSTANTS, {})
    if name not in known:
        known[name] = int(prog.constant(name).value_())
    return known[name]
