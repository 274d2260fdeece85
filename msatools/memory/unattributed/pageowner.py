# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Reads who allocated a page (CONFIG_PAGE_OWNER and page_owner=on).

mm/page_owner.c keeps a record for each page after the page's ``struct page_ext``
(mm/page_ext.c), with a handle of the stack trace (lib/stackdepot.c). Stock kernels do
not have it.
"""

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mmzone import pfn_to_section
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.words import bit
from msatools.memory.pages.memmap import pages_per_section
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

_INVALID = 1
"""PAGE_EXT_INVALID: set in a section's pointer while it goes offline."""

_AT_ONCE = 1 << 16
"""Records read at once: some 5 MiB."""

_GFP_FLAG = "___GFP_"
_GFP_BIT = "_BIT"

_RECLAIM = ("DIRECT_RECLAIM", "KSWAPD_RECLAIM")
_COMPOUNDS = (
    ("GFP_KERNEL", (*_RECLAIM, "IO", "FS")),
    ("GFP_NOFS", (*_RECLAIM, "IO")),
    ("GFP_NOIO", _RECLAIM),
    ("GFP_ATOMIC", ("HIGH", "KSWAPD_RECLAIM")),
    ("GFP_NOWAIT", ("KSWAPD_RECLAIM",)),
)
"""Flags that have one name together (linux/gfp_types.h), the largest first."""

Owners = npt.NDArray[np.void]

OWNER = np.dtype(
    [
        ("handle", "u4"),
        ("gfp", "u4"),
        ("pid", "i4"),
        ("order", "u2"),
        ("comm", "S16"),
    ]
)
"""Columns of a page's owner; all zero if unknown."""


class _OwnerLayout(Struct, frozen=True):
    """Layout of the records of page_owner."""

    stride: int
    """Bytes of a page's records (page_ext_size)."""

    allocated: int
    """Flag of a page that is allocated now (PAGE_EXT_OWNER_ALLOCATED)."""

    record: np.dtype[np.void]
    """The flags and the members of ``OWNER``, from the start of a page's records."""


class PageOwners:
    """Looks up who allocated pages."""

    def __init__(self, reader: Reader, losses: LossLog, layout: _OwnerLayout) -> None:
        self._reader = reader
        self._losses = losses
        self._layout = layout
        self._bases: dict[int, int | None] = {}
        self._per_section = pages_per_section(reader.prog)

    @classmethod
    def of(cls, reader: Reader, losses: LossLog) -> "PageOwners | None":
        """Return the page owners; ``None`` if this kernel does not record them."""
        try:
            with drgn_lookups:
                layout = _layout(reader.prog)
                return None if layout is None else cls(reader, losses, layout)
        except MissingError:
            return None
        except UNREADABLE as error:
            losses.lose(
                Loss.PAGE_OWNER, f"cannot determine who allocated pages: {error}"
            )
            return None

    def owners(self, pfns: npt.NDArray[np.int64]) -> Owners:
        """Return the owner of each page, one row of :data:`OWNER` each."""
        owners = np.zeros(len(pfns), OWNER)
        lost = 0
        for first in range(0, len(pfns), _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            lost += self._read_some(pfns[rows], owners[rows])
        if lost:
            text = f"who allocated {lost:,} blocks cannot be read"
            self._losses.lose(Loss.PAGE_OWNER, text)
        return owners

    def _read_some(self, pfns: npt.NDArray[np.int64], owners: Owners) -> int:
        """Fill in the owners of some pages; return how many cannot be read."""
        layout = self._layout
        numbers, index = np.unique(pfns // self._per_section, return_inverse=True)
        bases = [self._base(number) for number in numbers.tolist()]
        base = np.array([found or 0 for found in bases], np.uint64)[index]
        unreadable = np.array([found is None for found in bases])[index]
        known = np.flatnonzero(base)
        # 64-bit arithmetic of the kernel: a base may lie below 0.
        at = base[known] + np.uint64(layout.stride) * pfns[known].astype(np.uint64)
        data, readable = self._reader.read_records(at, layout.record.itemsize)
        records = np.ascontiguousarray(data).view(layout.record)[:, 0]
        flags = records["flags"].astype(np.uint64)
        taken = readable & (flags & np.uint64(layout.allocated) != 0)
        for name in OWNER.names or ():
            owners[name][known[taken]] = records[name][taken]
        return int(np.count_nonzero(unreadable) + np.count_nonzero(~readable))

    def _base(self, number: int) -> int | None:
        """
        Return the address of pfn 0's record relative to the records of a section.

        :return: 0 if the section has no records; ``None`` if that cannot be read.
        """
        if number not in self._bases:
            try:
                section = ask(
                    pfn_to_section, self._reader.prog, number * self._per_section
                )
                base = section.page_ext.value_() if section else 0
                self._bases[number] = 0 if base & _INVALID else base
            except UNREADABLE:
                self._bases[number] = None
        return self._bases[number]


def gfp_names(prog: drgn.Program, mask: int) -> tuple[str, ...] | None:
    """
    Return the names of the flags of an allocation.

    :return: ``None`` if the kernel's types do not have them: they are enumerators since
        "mm: enumerate all gfp flags" (in v6.10).
    """
    try:
        enumerators = find_constant(prog, f"{_GFP_FLAG}DMA{_GFP_BIT}").type_.enumerators
    except MissingError:
        return None
    left = {
        name.removeprefix(_GFP_FLAG).removesuffix(_GFP_BIT)
        for name, bit in enumerators or ()
        if name.startswith(_GFP_FLAG) and name.endswith(_GFP_BIT) and mask >> bit & 1
    }
    names = []
    for name, flags in _COMPOUNDS:
        if left >= set(flags):
            names.append(name)
            left -= set(flags)
    return (*names, *(f"__GFP_{flag}" for flag in sorted(left)))


def _layout(prog: drgn.Program) -> _OwnerLayout | None:
    """
    Read the layout of the records.

    :return: ``None`` if page_owner is not enabled.
    :raises MissingError: if the kernel has none (CONFIG_PAGE_OWNER=n)
    """
    offset = find_variable(prog, "page_owner_ops").offset.value_()
    # The record follows struct page_ext: an offset of 0 means it is not enabled.
    if not offset:
        return None
    stride = find_variable(prog, "page_ext_size").value_()
    owner = find_type(prog, "struct page_owner")
    members = {
        "handle": ("handle", "u4"),
        "gfp": ("gfp_mask", "u4"),
        "pid": ("pid", "i4"),
        "order": ("order", "u2"),
        "comm": ("comm", "S16"),
    }
    # "mm/page_owner: record task command name" (in v5.18)
    there = {
        name: (offset + offset_of(owner, member), format_)
        for name, (member, format_) in members.items()
        if owner.has_member(member)
    }
    flags = drgn.sizeof(member_of(find_type(prog, "struct page_ext"), "flags").type)
    # Linux kernel commit fdf3bf809162 ("mm, page_owner: rename flag indicating that
    # page is allocated") (in v5.4)
    flag = find_constant(prog, "PAGE_EXT_OWNER_ALLOCATED").value_()
    return _OwnerLayout(
        stride=stride,
        allocated=bit(flag),
        record=np.dtype(
            {
                "names": ["flags", *there],
                "formats": [f"<u{flags}", *(format_ for _, format_ in there.values())],
                "offsets": [0, *(at for at, _ in there.values())],
                "itemsize": offset + drgn.sizeof(owner),
            }
        ),
    )
