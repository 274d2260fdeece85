# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Load the parts in C; where they were not built, Python and numpy replace them.

Without them the results are the same, but take several times as long.
``MSATOOLS_NATIVE=no`` turns the parts in C off.
"""

import ctypes
import importlib.util
import os
import sys

SWITCH = "MSATOOLS_NATIVE"
"""Environment variable; ``no`` is the only value with an effect."""


def is_wanted() -> bool:
    """Return whether parts in C may be used."""
    return os.environ.get(SWITCH) != "no"


def load(name: str, version: str, expected: int) -> ctypes.CDLL | None:
    """Load a part; ``None`` if it was not built, or has another version.

    :param name: Name of the part, as of a module: it cannot be imported, but is built,
        installed and found like one.
    :param version: Name of its function that returns its version as an ``int64_t``: an
        editable installation may have a library of another version.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return None
    try:
        loaded = ctypes.CDLL(spec.origin)
        found = getattr(loaded, version)
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_int64
    return loaded if found() == expected else None
