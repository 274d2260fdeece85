# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory by the function that called vmalloc(), or by module (--leaks).

Also finds the names of unloaded modules.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import drgn

from msatools.errors import UNREADABLE
from msatools.kernel.code import function_name, module_area
from msatools.kernel.mm import PageTables
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.areas import VmallocAreas
from msatools.memory.model import (
    Leak,
    PageGroup,
    SlabGroup,
    UnattributedGroup,
    VmallocCaller,
    VmallocGroup,
)
from msatools.memory.owners import Owners
from msatools.program.arch import table_format
from msatools.tasks.text import KernelText

# --- The functions that allocated areas of vmalloc.


def vmalloc_callers(
    reader: Reader, owners: Owners, losses: LossLog
) -> tuple[VmallocCaller, ...]:
    """Return the vmalloc areas and pages of each function, the most pages first."""
    areas: dict[str, int] = defaultdict(int)
    pages: dict[str, int] = defaultdict(int)
    names = caller_names(reader.prog, owners.areas)
    modules = caller_modules(reader, owners.areas, losses)
    for caller, length in zip(names, owners.areas.lengths().tolist(), strict=True):
        areas[caller] += 1
        pages[caller] += length
    callers = (
        VmallocCaller(name, areas[name], pages[name], modules.get(name))
        for name in areas
    )
    return tuple(sorted(callers, key=lambda caller: (-caller.pages, caller.caller)))


def caller_modules(
    reader: Reader, areas: VmallocAreas, losses: LossLog
) -> dict[str, str]:
    """Map each function that allocated areas to its module, except built-in ones."""
    text = KernelText(reader, losses)
    found = {}
    for caller in set(areas.caller.tolist()) - {0}:
        module = text.module_name(caller)
        if module is not None:
            found[function_name(reader.prog, caller)] = module
    return found


def caller_names(prog: drgn.Program, areas: VmallocAreas) -> list[str]:
    """Return the name of the function that allocated each area."""
    callers = areas.caller.tolist()
    names = {caller: function_name(prog, caller) for caller in set(callers)}
    names[0] = "vm_map_ram"
    return [names[caller] for caller in callers]


# --- Lists the kernel memory that each module owns (--leaks).
#
# One dump does not distinguish a leak from use: the list has each module's memory and
# how certain its owner is. Two dumps (--diff) show growth.


_SURE = 0.9
"""Minimum share of sampled objects for the confidence ``likely``."""

_HOLDS = 3

_OWN = ("kernel.vmalloc", "kernel.vmap", "kernel.stacks")
"""Classes of pages that belong to the caller of vmalloc() or vmap()."""


def module_memory(
    slabs: Sequence[PageGroup],
    areas: Sequence[PageGroup],
    blocks: Sequence[UnattributedGroup],
    page_size: int,
) -> tuple[Leak, ...]:
    """Return the memory that modules own, the largest first.

    :param slabs: Slab caches (``--by slab``).
    :param areas: Callers of vmalloc (``--by vmalloc``).
    :param blocks: Pages that no owner explains.
    """
    found = [
        *_in_slabs(slabs, page_size),
        *_in_areas(areas, page_size),
        *_in_blocks(blocks, page_size),
    ]
    return tuple(sorted(found, key=lambda leak: (-leak.bytes, leak.module)))


def _in_slabs(groups: Sequence[PageGroup], page_size: int) -> Iterator[Leak]:
    for group in groups:
        if isinstance(group, SlabGroup) and group.module is not None:
            is_sure = (group.module_share or 0) >= _SURE
            is_sure &= not is_unloaded(group.module)
            yield Leak(
                cache=group.name,
                objects=group.objects_in_use,
                bytes=group.pages * page_size,
                holds=tuple(word.name for word in (group.words or ())[:_HOLDS]),
                module=group.module,
                confidence="likely" if is_sure else "evidence",
            )


def _in_areas(groups: Sequence[PageGroup], page_size: int) -> Iterator[Leak]:
    for group in groups:
        if isinstance(group, VmallocGroup) and group.module is not None:
            pages = sum(group.classes.get(name, 0) for name in _OWN)
            if not pages:
                continue  # the area maps pages of other owners
            yield Leak(
                area=group.key,
                objects=group.areas,
                bytes=pages * page_size,
                module=group.module,
                # The area itself records its caller.
                confidence="exact",
            )


def _in_blocks(groups: Sequence[UnattributedGroup], page_size: int) -> Iterator[Leak]:
    for group in groups:
        if group.content == "module" and group.owner is not None:
            yield Leak(
                order=group.order,
                objects=group.blocks,
                bytes=group.pages * page_size,
                holds=tuple(word.name for word in group.words[:_HOLDS]),
                module=group.owner,
                confidence="evidence",
            )


# --- Names unloaded modules, by pointers to the addresses that they had.


_SUFFIX = "? (unloaded)"
_TRAPS = b"\xcc" * 16
"""16 int3 instructions of x86-64."""

_PAGE_MASK = ~0xFFF
"""Mask for addresses in 4 KiB pages: results are kept for each page."""


def is_unloaded(module: str | None) -> bool:
    """Return whether a module's name is one that :class:`UnloadedModules` returned."""
    return module is not None and module.endswith(_SUFFIX)


class UnloadedModules:
    """Finds the module that was at an address until it was unloaded."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._area = module_area(reader.prog)
        self._text = KernelText(reader, losses)
        self._tables: PageTables | None = None
        if table_format(reader.prog) is not None:
            self._tables = PageTables(reader, LossLog())
        self._known: dict[int, str | None] = {}

    def name(self, address: int) -> str | None:
        """Return the unloaded module that may have been at an address.

        The kernel only keeps the name of the module that it unloaded last. An address
        that has code now is another user's, such as a trampoline.

        :return: A name such as ``foo? (unloaded)``; ``None`` if no module is known.
        """
        first, end = self._area
        if self._tables is None or not first <= address < end:
            return None
        page = address & _PAGE_MASK
        if page not in self._known:
            self._known[page] = self._find(address)
        return self._known[page]

    def _find(self, address: int) -> str | None:
        assert self._tables is not None
        if self._tables.pfn(address) is not None and not self._is_free(address):
            return None
        last = self._text.unloaded(address)
        return None if last is None else last + _SUFFIX

    def _is_free(self, address: int) -> bool:
        """Return whether code at an address was freed and its memory kept for reuse.

        Such memory is filled with traps: 2e45474ab14f ("execmem: add support for cache
        of large ROX pages") (in v6.13).
        """
        try:
            return self._reader.read(address, len(_TRAPS)) == _TRAPS
        except UNREADABLE:
            return False
