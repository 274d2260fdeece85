# SPDX-License-Identifier: LGPL-2.1-or-later

"""The enumerators of the kernel's enums, for all that look them up with each sample."""

from collections.abc import Mapping
from types import MappingProxyType

import drgn

_ENUMS, _CONSTANTS = "msatools.enumerators", "msatools.constants"
"""What those that were asked for are kept as, in the program's cache."""


def enumerators(prog: drgn.Program, name: str) -> Mapping[str, int]:
    """
    Return the values of an enum by name, in their order; none if it is incomplete.

    They are found once for each program: drgn makes an object of each enumerator
    whenever it is asked, and some enums have hundreds.

    :param name: Such as ``enum vm_event_item``.
    :raises LookupError: if nothing tells the type
    """
    known: dict[str, Mapping[str, int]] = prog.cache.setdefault(_ENUMS, {})
    if name not in known:
        found = {each.name: each.value for each in prog.type(name).enumerators or ()}
        known[name] = MappingProxyType(found)
    return known[name]


def constant(prog: drgn.Program, name: str) -> int:
    """
    Return the value of a constant, such as an enumerator.

    It is looked up once for each program, which takes drgn some 20 us.

    :raises LookupError: if the kernel has none of the name
    """
    known: dict[str, int] = prog.cache.setdefault(_CONSTANTS, {})
    if name not in known:
        known[name] = int(prog.constant(name).value_())
    return known[name]
