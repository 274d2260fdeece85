# SPDX-License-Identifier: LGPL-2.1-or-later

"""What several domains ask of a kernel, each thing read in one place.

``reader`` and ``structs`` read memory, ``walks`` goes along lists and trees, ``report``
has losses and what all reports have; the others are named as the kernel's own: slab,
files, pids, percpu, clocks, mm, code.
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
