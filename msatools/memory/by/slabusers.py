# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whose the objects of general slab caches are, by pointers in a sample of them.

All callers of kmalloc() share these caches. An object that a driver allocated mostly
has a pointer to a function or variable of it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.memory.scan.context import ScanContext
from msatools.memory.unattributed.content_hints import Contents
from msatools.memory.unattributed.model import PageWord

GENERAL = "kmalloc-"
"""How the names of general caches begin."""

SAMPLE = 32
"""Slabs of a cache that are looked into: the first page of each."""

_EVERY = 16

_MOST = 0.5
"""Share of the objects from which on a module is said to have most."""

_KINDS = ("module", "symbol")
_WORDS = 5


class SlabUsers(Struct, frozen=True):
    """Where the objects of a sample point to."""

    module: str | None
    """The module that at least half of them point into."""

    share: float
    """Share of the objects that point to the most frequent place in it."""

    words: tuple[PageWord, ...]
    """The most frequent places, each with the number of objects that point there."""


class SlabSamples:
    """Keeps the first slab of each cache in each block of struct pages, and every 16th:
    where most are, most are looked at."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.uint64]] = []

    def add(self, caches: npt.NDArray[np.uint64], pfns: npt.NDArray[np.uint64]) -> None:
        """Add the slabs of a block, by the page frame of their first page."""
        order = np.argsort(caches, kind="stable")
        caches, pfns = caches[order], pfns[order]
        _, first, index = np.unique(caches, return_index=True, return_inverse=True)
        kept = (np.arange(len(caches)) - first[index]) % _EVERY == 0
        self._parts.append(np.stack((caches[kept], pfns[kept])))

    def merge(self, later: "SlabSamples") -> None:
        self._parts += later._parts

    def of(self, cache: int) -> npt.NDArray[np.int64]:
        """Return at most :data:`SAMPLE` page frames, from all of memory."""
        if not self._parts:
            return np.empty(0, np.int64)
        caches, pfns = np.concatenate(self._parts, axis=1)
        mine = np.unique(pfns[caches == np.uint64(cache)]).astype(np.int64)
        rows = np.linspace(0, len(mine) - 1, min(SAMPLE, len(mine))).astype(np.int64)
        return mine[rows]


class SlabContents:
    """Looks into objects."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        self._contents: Contents | None = None

    def users(self, pfns: npt.NDArray[np.int64], bytes_each: int) -> SlabUsers:
        """Return where objects point to.

        :param pfns: The first pages of some slabs.
        :param bytes_each: Size of an object with the allocator's metadata.
        """
        if self._contents is None:
            self._contents = Contents(self._context)
        objects, counts = self._contents.in_objects(pfns, bytes_each)
        ranked = sorted(
            ((word, count) for word, count in counts.items() if word.kind in _KINDS),
            key=lambda item: (-item[1], item[0].name),
        )
        words = [replace(word, count=count) for word, count in ranked[:_WORDS]]
        return _users(words, objects)


def _users(words: Sequence[PageWord], objects: int) -> SlabUsers:
    for word in words:
        if word.kind == "module" and word.count >= _MOST * objects:
            return SlabUsers(word.owner, word.count / objects, tuple(words))
    return SlabUsers(None, 0.0, tuple(words))
