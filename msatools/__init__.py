# SPDX-License-Identifier: LGPL-2.1-or-later

"""Crash-dump and live-kernel analysis for Linux, on drgn.

For programs: :func:`thread`, :func:`process`, :func:`children` and :func:`self` return
where the time of one task went; :func:`open` opens any kernel or dump for the same
queries.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msatools.query.kernel import children as children
    from msatools.query.kernel import open as open
    from msatools.query.kernel import process as process
    from msatools.query.kernel import self as self
    from msatools.query.kernel import thread as thread

__version__ = "1.0.0"

_QUERIES = ("children", "open", "process", "self", "thread")


def __getattr__(name: str) -> Any:
    # Imported lazily: drgn imports this package, for its plugin, with every session.
    if name not in _QUERIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from msatools.query import kernel

    function = globals()[name] = getattr(kernel, name)
    return function
