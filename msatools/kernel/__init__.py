# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of kernel data that several domains need, each in one place.

``reader`` and ``structs`` read memory, ``walks`` walks lists and trees, ``report`` has
losses and the header of all reports; the other modules are named after what they read:
slab, files, pids, percpu, clocks, mm, code.
"""

__all__ = (
    "clocks",
    "code",
    "files",
    "mm",
    "percpu",
    "pids",
    "reader",
    "report",
    "slab",
    "structs",
    "walks",
)
