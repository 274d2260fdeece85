# SPDX-License-Identifier: LGPL-2.1-or-later

"""Groups of pages without a known owner."""

from msgspec import Struct, field


class PageWord(Struct, frozen=True):
    """A pointer or text in the contents of pages."""

    kind: str
    """``module``, ``symbol`` or ``slab`` for a pointer into it; ``text``."""

    name: str
    """The symbol and the offset from it; the slab cache; the text."""

    owner: str | None
    """Name of the module, symbol or slab cache; ``None`` for text."""

    count: int
    """Number of occurrences in the examined pages."""


class Allocator(Struct, frozen=True):
    """A thread that allocated blocks of a group; it may have exited since."""

    pid: int
    comm: str | None
    """Name at that time; ``None`` before 5.18."""

    blocks: int
    pages: int


class UnattributedGroup(Struct, frozen=True):
    """Similar blocks of pages without a known owner."""

    class_name: str = field(name="class")
    """``kernel.unattributed``, or ``kernel.large_kmalloc`` on kernels that do not mark
    it, where a driver's own compound page looks the same."""

    order: int | None
    """Order of the allocation, guessed unless compound or with page_owner; ``None`` if
    not a block."""

    pages: int
    """Pages of the blocks; all groups of a class sum to the class."""

    blocks: int | None
    runs: int | None
    """Number of runs of consecutive pages that the blocks form."""

    node: int | None
    """``None`` if the blocks of one stack are on several."""

    refcount: int | None
    """Reference count of the first page of each block; ``None`` if it differs."""

    content: str
    """Contents of the first page of each block, with page_owner of most: pointers into
    a ``module``, to a ``symbol`` of the kernel, into a ``slab`` cache; ``text``,
    ``data``, ``zeros``, ``not in the dump``, ``not looked into``.
    """

    owner: str | None
    """Module, symbol or slab cache that most of the pointers point to; the variable of
    a memory pool."""

    examples: tuple[int, ...]
    """Page frame numbers of some blocks."""

    words: tuple[PageWord, ...]
    """The most frequent words."""

    stack: tuple[str, ...] | None
    """Stack trace of the allocation, innermost first; ``None`` without page_owner, as
    all that follows."""

    gfp_mask: int | None = None
    gfp_names: tuple[str, ...] | None = None
    """Names of the flags in ``gfp_mask``; ``None`` too if the kernel's types lack them,
    as before 6.10."""

    allocators: tuple[Allocator, ...] | None = None
    """Threads with the most pages."""
