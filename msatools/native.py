# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Loads the parts in C, for which Python and numpy stand in where they were not built.

The results are the same, in several times the time. ``MSATOOLS_NATIVE=no`` turns them
off.
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
    """Load a part; ``None`` if it was not built, or from another source.

    :param name: Its name as of a module: it cannot be imported, but it is built,
        installed and found like one.
    :param version: Its function that returns its version, as an ``int64_t``: an
        editable installation may have a library of another one.
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
