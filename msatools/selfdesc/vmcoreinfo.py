# SPDX-License-Identifier: LGPL-2.1-or-later

"""The VMCOREINFO note, in which a kernel describes itself to makedumpfile."""

from collections.abc import Mapping
from functools import lru_cache

import drgn

from msatools.errors import LOST, DamagedDataError
from msatools.selfdesc.find import find_variable


def vmcoreinfo(prog: drgn.Program) -> Mapping[str, str]:
    """Return the lines of the VMCOREINFO note by key; empty if it has no note."""
    try:
        text = find_variable(prog, "VMCOREINFO").string_()
    except LOST:
        return {}
    return _parse(text)


@lru_cache(maxsize=4)
def _parse(text: bytes) -> Mapping[str, str]:
    lines = text.decode(errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def vmcoreinfo_number(prog: drgn.Program, name: str) -> int | None:
    """Return the value of a ``NUMBER(name)`` line; ``None`` if not found.

    :raises DamagedDataError: if it is no number
    """
    value = vmcoreinfo(prog).get(f"NUMBER({name})")
    return None if value is None else number(value)


def number(text: str) -> int:
    """Return the number in a line, in any base that its prefix says.

    :raises DamagedDataError: if it is none
    """
    return _integer(text, 0)


def hex_number(text: str) -> int:
    """Return the number in a line without prefix, such as a symbol's address.

    :raises DamagedDataError: if it is none
    """
    return _integer(text, 16)


def _integer(text: str, base: int) -> int:
    try:
        return int(text, base)
    except ValueError as error:
        raise DamagedDataError(f"VMCOREINFO: {error}") from error
