# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names modules that were unloaded, by what still points to where they were."""

from msatools.errors import UNREADABLE
from msatools.kernel.modules import module_area
from msatools.kernel.pagetables import PageTables
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.text import KernelText

_SUFFIX = "? (unloaded)"
_TRAPS = b"\xcc" * 16
"""int3 of x86-64."""

_PAGE_MASK = ~0xFFF
"""Any part of a page of whatever size tells whether it is mapped."""


def is_unloaded(module: str | None) -> bool:
    """Return whether a module's name is one that :class:`UnloadedModules` returned."""
    return module is not None and module.endswith(_SUFFIX)


class UnloadedModules:
    """Looks up addresses at which no module is any longer."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._area = module_area(reader.prog)
        self._text = KernelText(reader, losses)
        self._tables: PageTables | None = None
        if PageTables.supported(reader.prog):
            self._tables = PageTables(reader, LossLog())
        self._known: dict[int, str | None] = {}

    def name(self, address: int) -> str | None:
        """Return the module that may have been there, such as ``foo? (unloaded)``.

        The kernel only keeps the name of the module that it unloaded last. Where code
        is now, no module was unloaded: trampolines lie there, too.
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
        """Return whether code was freed there, and the memory is kept for other code.

        It is filled with traps: 2e45474ab14f ("execmem: add support for cache of large
        ROX pages") (in v6.13).
        """
        try:
            return self._reader.read(address, len(_TRAPS)) == _TRAPS
        except UNREADABLE:
            return False
