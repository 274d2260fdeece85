# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Looks up the stack trace that allocated a page (CONFIG_PAGE_OWNER and page_owner=on).

mm/page_owner.c keeps a record for each page after the page's ``struct page_ext``
(mm/page_ext.c), with a handle of the stack trace (lib/stackdepot.c). Stock kernels do
not have it.
"""

from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mmzone import pfn_to_section
from drgn.helpers.linux.stackdepot import stack_depot_fetch

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.variables import find_variable

_INVALID = 1
"""PAGE_EXT_INVALID: set in a section's pointer while it goes offline."""

_MAX_FRAMES = 64
"""CONFIG_STACKDEPOT_MAX_FRAMES is 64; page_owner keeps 16."""


@dataclass(frozen=True)
class _OwnerLayout:
    """Layout of the records of page_owner."""

    stride: int
    """Bytes of a page's records (page_ext_size)."""

    flags_bytes: int
    """Size of ``page_ext.flags``, at the start of the records."""

    allocated: int
    """Flag of a page that is allocated now (PAGE_EXT_OWNER_ALLOCATED)."""

    handle: int
    """Offset of the stack's handle from the start of a page's records."""


class PageOwners:
    """Looks up the stack traces that allocated pages."""

    def __init__(self, reader: Reader, losses: LossLog, layout: _OwnerLayout) -> None:
        self._reader = reader
        self._losses = losses
        self._layout = layout
        self._bases: dict[int, int] = {}
        self._per_section = int(reader.prog["PAGES_PER_SECTION"].value_())

    @classmethod
    def of(cls, reader: Reader, losses: LossLog) -> "PageOwners | None":
        """Return the page owners; ``None`` if this kernel does not record them."""
        try:
            layout = _layout(reader.prog)
            return None if layout is None else cls(reader, losses, layout)
        except (LookupError, AttributeError):
            return None
        except drgn.FaultError as error:
            losses.lose(Loss.PAGE_OWNER, f"who allocated pages is lost: {error}")
            return None

    def handles(self, pfns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the handle of the stack that allocated each page; 0 if unknown."""
        layout, lost = self._layout, 0
        handles = np.zeros(len(pfns), np.int64)
        for row, pfn in enumerate(pfns.tolist()):
            try:
                base = self._base(pfn)
                if base is None:
                    continue
                record = self._reader.read(
                    base + layout.stride * pfn, layout.handle + 4
                )
            except drgn.FaultError:
                lost += 1
                continue
            flags = int.from_bytes(record[: layout.flags_bytes], "little")
            if flags & layout.allocated:
                handles[row] = int.from_bytes(record[layout.handle :], "little")
        if lost:
            text = f"who allocated {lost:,} blocks cannot be read"
            self._losses.lose(Loss.PAGE_OWNER, text)
        return handles

    def stack(self, handle: int) -> tuple[str, ...] | None:
        """Return the function names of a stack, innermost first; ``None`` if lost."""
        prog = self._reader.prog
        try:
            trace = stack_depot_fetch(
                drgn.Object(prog, "depot_stack_handle_t", value=handle)
            )
        except (LookupError, AttributeError, ValueError, drgn.FaultError) as error:
            self._losses.lose(Loss.STACKS, f"a stack of page_owner is lost: {error}")
            return None
        if trace is None:
            return None
        return tuple(str(frame.name) for frame in list(trace)[:_MAX_FRAMES])

    def _base(self, pfn: int) -> int | None:
        """Return the address of pfn 0's record relative to the section's records."""
        number = pfn // self._per_section
        if number not in self._bases:
            section = pfn_to_section(self._reader.prog, pfn)
            self._bases[number] = section.page_ext.value_() if section else 0
        base = self._bases[number]
        return None if not base or base & _INVALID else base


def _layout(prog: drgn.Program) -> _OwnerLayout | None:
    """
    Read the layout of the records.

    :return: ``None`` if page_owner is not enabled.
    :raises LookupError: if the kernel has none (CONFIG_PAGE_OWNER=n)
    """
    offset = find_variable(prog, "page_owner_ops").offset.value_()
    # The record follows struct page_ext: an offset of 0 means it is not enabled.
    if not offset:
        return None
    stride = find_variable(prog, "page_ext_size").value_()
    owner = prog.type("struct page_owner")
    # Linux kernel commit fdf3bf809162 ("mm, page_owner: rename flag indicating that
    # page is allocated") (in v5.4)
    bit = prog.constant("PAGE_EXT_OWNER_ALLOCATED").value_()
    return _OwnerLayout(
        stride=stride,
        flags_bytes=drgn.sizeof(prog.type("struct page_ext").member("flags").type),
        allocated=1 << bit,
        handle=offset + drgn.offsetof(owner, "handle"),
    )
