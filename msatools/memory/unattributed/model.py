# SPDX-License-Identifier: LGPL-2.1-or-later

"""Groups of pages that no owner explains."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PageWord:
    """A word that is in the contents of pages, and what it says."""

    kind: str
    """``module``, ``symbol`` or ``slab`` for a pointer there; ``text``."""

    name: str
    """The symbol and how far behind it; the slab cache; the text."""

    owner: str | None
    """Name of the module, symbol or slab cache, ``None`` for text."""

    count: int
    """How often the pages that were examined contain it."""


@dataclass(frozen=True)
class UnattributedGroup:
    """Blocks of pages that no owner explains, and that are like one another."""

    class_name: str = field(metadata={"key": "class"})
    """``kernel.unattributed``, or ``kernel.large_kmalloc`` where a kernel does not
    mark it: a driver's own compound page looks the same there."""

    order: int | None
    """Of the allocation, guessed unless compound; ``None`` for what is no block."""

    pages: int
    """All groups of a class sum to the class."""

    blocks: int | None
    runs: int | None
    """Runs of consecutive pages that the blocks make up."""

    node: int | None
    refcount: int | None
    """Of the first page of each block."""

    content: str
    """Contents of the first page of each block: pointers into a ``module``, to a
    ``symbol`` of the kernel, into a ``slab`` cache; ``ftrace`` (its records of
    functions), ``text``, ``data``, ``zeros``, ``not in the dump``, ``not looked into``.
    """

    owner: str | None
    """The module, symbol or slab cache that most pointers are to."""

    examples: tuple[int, ...]
    """Page frame numbers of some blocks."""

    words: tuple[PageWord, ...]
    """The most frequent of the most telling."""

    stack: tuple[str, ...] | None
    """The stack that allocated them, innermost first; ``None`` if the kernel keeps no
    page_owner."""
