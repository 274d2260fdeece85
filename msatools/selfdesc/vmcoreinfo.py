# SPDX-License-Identifier: LGPL-2.1-or-later

"""The VMCOREINFO note, in which a kernel describes itself to makedumpfile."""

from collections.abc import Mapping
from functools import lru_cache

import drgn


def vmcoreinfo(prog: drgn.Program) -> Mapping[str, str]:
    """Return the lines of the VMCOREINFO note by key; empty if it has no note."""
    try:
        text = prog["VMCOREINFO"].string_()
    except (LookupError, drgn.FaultError):
        return {}
    return _parse(text)


@lru_cache(maxsize=4)
def _parse(text: bytes) -> Mapping[str, str]:
    lines = text.decode(errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def vmcoreinfo_number(prog: drgn.Program, name: str) -> int | None:
    """Return the value of a ``NUMBER(name)`` line; ``None`` if not found."""
    value = vmcoreinfo(prog).get(f"NUMBER({name})")
    return None if value is None else int(value, 0)
