# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The pages with ftrace's records, which point to every function of every module.

kernel/trace/ftrace.c takes them straight from the page allocator
(ftrace_allocate_records()); without this they look like the modules' own.
"""

import struct

import drgn
from drgn.helpers.linux.mm import pfn_to_virt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog

_POINTER = struct.Struct("<Q")
_MAX_GROUPS = 1 << 16
"""Some for each module."""

_ALIKE = "some records of ftrace look like others'"


def ftrace_pages(reader: Reader, findings: LossLog) -> frozenset[int]:
    """Find the first page of each block of records; none where nothing tells."""
    prog = reader.prog
    found: set[int] = set()
    seen: set[int] = set()
    try:
        group = prog["ftrace_pages_start"].value_()
    except LookupError:
        return frozenset()  # CONFIG_DYNAMIC_FTRACE=n
    except drgn.FaultError as error:
        # A page of zeros is left out of most dumps, and is no loss.
        findings.note("lost", f"{_ALIKE}: {error}", "ftrace")
        return frozenset()
    try:
        type_ = prog.type("struct ftrace_page")
        following, records = (
            drgn.offsetof(type_, name) for name in ("next", "records")
        )
        size = drgn.sizeof(type_)
        start = pfn_to_virt(prog, 0).value_()
        shift = prog["PAGE_SHIFT"].value_()
        while group:
            if group in seen or len(seen) >= _MAX_GROUPS:
                raise drgn.FaultError("their list is a loop", group)
            seen.add(group)
            data = reader.read(group, size)
            (address,) = _POINTER.unpack_from(data, records)
            found.add(address - start >> shift)
            (group,) = _POINTER.unpack_from(data, following)
    except (LookupError, drgn.FaultError) as error:
        findings.lose(Loss.FTRACE, f"{_ALIKE}: {error}")
    return frozenset(found)
