# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Who allocated a page, where the kernel keeps it (CONFIG_PAGE_OWNER and page_owner=on).

mm/page_owner.c has a record of each page behind the page's ``struct page_ext``
(mm/page_ext.c), with a handle for the stack (lib/stackdepot.c). Stock kernels have none
of that.
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
"""Set in a section's pointer while its memory goes away (PAGE_EXT_INVALID)."""

_MAX_FRAMES = 64
"""CONFIG_STACKDEPOT_MAX_FRAMES is 64; page_owner keeps 16."""


@dataclass(frozen=True)
class _OwnerLayout:
    """Where the records of page_owner are, and what is in them."""

    each: int
    """Bytes of all that is kept of a page (page_ext_size)."""

    flags_bytes: int
    """Of ``page_ext.flags``, at the start."""

    allocated: int
    """The flag of a page that is allocated, and not just was."""

    handle: int
    """Offset of the stack's handle, from the start of it all."""


class PageOwners:
    """Looks up by whom pages were allocated."""

    def __init__(self, reader: Reader, losses: LossLog, layout: _OwnerLayout) -> None:
        self._reader = reader
        self._losses = losses
        self._layout = layout
        self._bases: dict[int, int] = {}
        self._per_section = int(reader.prog["PAGES_PER_SECTION"].value_())

    @classmethod
    def of(cls, reader: Reader, losses: LossLog) -> "PageOwners | None":
        """Find out whether this kernel keeps owners; ``None`` if not."""
        try:
            layout = _layout(reader.prog)
            return None if layout is None else cls(reader, losses, layout)
        except (LookupError, AttributeError):
            return None
        except drgn.FaultError as error:
            losses.lose(Loss.PAGE_OWNER, f"who allocated pages is lost: {error}")
            return None

    def handles(self, pfns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the handle of the stack that allocated each page, 0 if unknown."""
        layout, lost = self._layout, 0
        handles = np.zeros(len(pfns), np.int64)
        for place, pfn in enumerate(pfns.tolist()):
            try:
                base = self._base(pfn)
                if base is None:
                    continue
                record = self._reader.read(base + layout.each * pfn, layout.handle + 4)
            except drgn.FaultError:
                lost += 1
                continue
            flags = int.from_bytes(record[: layout.flags_bytes], "little")
            if flags & layout.allocated:
                handles[place] = int.from_bytes(record[layout.handle :], "little")
        if lost:
            text = f"who allocated {lost:,} blocks cannot be read"
            self._losses.lose(Loss.PAGE_OWNER, text)
        return handles

    def stack(self, handle: int) -> tuple[str, ...] | None:
        """Name the functions of a stack, the innermost first."""
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
        """Find where the record of page number 0 would be, had it that section's."""
        number = pfn // self._per_section
        if number not in self._bases:
            section = pfn_to_section(self._reader.prog, pfn)
            self._bases[number] = section.page_ext.value_() if section else 0
        base = self._bases[number]
        return None if not base or base & _INVALID else base


def _layout(prog: drgn.Program) -> _OwnerLayout | None:
    """
    Find out where the records are.

    :return: ``None`` if the kernel was not told to keep any.
    :raises LookupError: if it cannot (CONFIG_PAGE_OWNER=n)
    """
    offset = find_variable(prog, "page_owner_ops").offset.value_()
    # It comes after struct page_ext, unless nobody asked for it.
    if not offset:
        return None
    each = find_variable(prog, "page_ext_size").value_()
    owner = prog.type("struct page_owner")
    # Linux kernel commit fdf3bf809162 ("mm, page_owner: rename flag indicating that
    # page is allocated") (in v5.4)
    bit = prog.constant("PAGE_EXT_OWNER_ALLOCATED").value_()
    return _OwnerLayout(
        each=each,
        flags_bytes=drgn.sizeof(prog.type("struct page_ext").member("flags").type),
        allocated=1 << bit,
        handle=offset + drgn.offsetof(owner, "handle"),
    )
