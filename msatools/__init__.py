# SPDX-License-Identifier: LGPL-2.1-or-later

"""Crash-dump and live-kernel analysis for Linux, on drgn.

For programs: :func:`thread`, :func:`process`, :func:`children` and :func:`self` tell
where the time of one task went, and :func:`open` makes any kernel or dump ready to be
asked the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msatools.query.api import children as children
    from msatools.query.api import open as open
    from msatools.query.api import process as process
    from msatools.query.api import self as self
    from msatools.query.api import thread as thread

__version__ = "0.1.0.dev0"

_QUERIES = ("children", "open", "process", "self", "thread")


def __getattr__(name: str) -> Any:
    # What they need is imported with the first one: drgn's plugin is in this package,
    # and starts with every session.
    if name not in _QUERIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from msatools.query import api

    found = globals()[name] = getattr(api, name)
    return found
