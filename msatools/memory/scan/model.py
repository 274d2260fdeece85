# SPDX-License-Identifier: LGPL-2.1-or-later

"""The part of a report on the scan itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScanChanges:
    """Changes to pages of a running kernel while their struct pages were read."""

    allocated_pages: int | None
    """That the kernel handed out meanwhile, by its own count; ``None`` if it keeps
    none. Pages that msatools itself was given are among them."""

    freed_pages: int | None
    """That it took back."""

    reread_pages: int
    """Struct pages, chosen at random, that were read a second time after the scan."""

    changed_pages: int
    """Those of them that were then of another class, owner or folio."""

    changed_folios: int
    """The folios that these pages belong to."""

    about_folios: int | None
    """Folios of the memory that had changed, if all of it is like those read twice."""
