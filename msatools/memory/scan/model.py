# SPDX-License-Identifier: LGPL-2.1-or-later

"""The part of a report that describes the scan itself."""

from msgspec import Struct


class ScanChanges(Struct, frozen=True):
    """Changes to pages of a running kernel while their struct pages were read."""

    allocated_pages: int | None
    """Pages that the kernel allocated meanwhile, by its own count, including those for
    msatools itself; ``None`` if it does not count them."""

    freed_pages: int | None
    """Pages that the kernel freed meanwhile; ``None`` if it does not count them."""

    reread_pages: int
    """Randomly chosen struct pages that were read again after the scan."""

    changed_pages: int
    """Reread pages whose class, owner or folio had changed."""

    changed_folios: int
    """Number of folios of the changed pages."""

    about_folios: int | None
    """Estimated number of changed folios in all memory, from the sample."""
