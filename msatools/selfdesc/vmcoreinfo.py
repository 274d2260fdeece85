# SPDX-License-Identifier: LGPL-2.1-or-later

"""The note in which a kernel describes itself to makedumpfile."""

from collections.abc import Mapping
from functools import lru_cache

import drgn


def vmcoreinfo(prog: drgn.Program) -> Mapping[str, str]:
    """Parse the VMCOREINFO note into a dict of its lines, empty without one."""
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
    """Look up a ``NUMBER(name)`` line; ``None`` if this kernel has none."""
    value = vmcoreinfo(prog).get(f"NUMBER({name})")
    return None if value is None else int(value)
