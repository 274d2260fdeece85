# SPDX-License-Identifier: LGPL-2.1-or-later

"""A search of all memory for words at a fixed place in a page.

VMCOREINFO begins a page of its own, so that one word of each page tells. Memory is
read in bulk; only that word is looked at.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from drgn import FaultError

from msatools.target.raw.memory import PAGE_BYTES, Memory

_CHUNK_BYTES = 1 << 20
"""Read at once: what fits into a CPU's cache costs least."""

_TELL_AFTER_S = 1.0
_TELL_EVERY_S = 0.5

_GIB = 1 << 30

_MOST_HITS = 1 << 16
"""A hostile file can consist of nothing else."""


class Words(NamedTuple):
    """Bytes to look for in each page."""

    offset: int
    """In a page; a multiple of 4."""

    text: bytes
    """At least 4 bytes."""


def find_words(memory: Memory, wanted: Sequence[Words]) -> Iterator[tuple[int, int]]:
    """Yield the address of each page that has some bytes, and which of *wanted*.

    Memory that cannot be read is left out.
    """
    buffer = np.empty(_CHUNK_BYTES // 4, "<u4")
    pages = buffer.reshape(-1, PAGE_BYTES // 4)
    view = buffer.data.cast("B")
    first = [int.from_bytes(each.text[:4], "little") for each in wanted]
    columns = [pages[:, each.offset // 4] for each in wanted]
    hits = 0
    with _Progress(memory) as progress:
        for start, end in memory.filled():
            # Pages begin at multiples of their size.
            for address in range(
                -(-start // PAGE_BYTES) * PAGE_BYTES, end, _CHUNK_BYTES
            ):
                size = min(_CHUNK_BYTES, end - address)
                count = _filled(memory, address, view[:size]) // PAGE_BYTES
                for number, column in enumerate(columns):
                    found = np.flatnonzero(column[:count] == first[number])
                    for row in found.tolist():
                        each = wanted[number]
                        here = row * PAGE_BYTES + each.offset
                        if view[here : here + len(each.text)] == each.text:
                            yield address + row * PAGE_BYTES, number
                            hits += 1
                    if hits > _MOST_HITS:
                        return
                progress.add(size)


def _filled(memory: Memory, address: int, buffer: memoryview) -> int:
    """Read as much as there is into a buffer; return the number of bytes."""
    done = 0
    while done < len(buffer):
        try:
            count = memory.fill(address + done, buffer[done:])
        except (FaultError, OSError):
            count = 0
        if not count:
            # What cannot be read has no words; the rest of it may.
            skipped = PAGE_BYTES - done % PAGE_BYTES
            buffer[done : done + skipped] = bytes(len(buffer[done : done + skipped]))
            count = min(skipped, len(buffer) - done)
        done += count
    return done


class _Progress:
    """Says on a terminal how far a search is, if it takes over a second."""

    def __init__(self, memory: Memory) -> None:
        self._size = max(memory.size, 1)
        self._out = sys.stderr if sys.stderr and sys.stderr.isatty() else None
        self._done = 0
        self._next_s = time.monotonic() + _TELL_AFTER_S
        self._has_told = False

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._has_told and self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def add(self, count: int) -> None:
        """Count bytes as done."""
        self._done += count
        if self._out is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _TELL_EVERY_S
        self._has_told = True
        done, size = self._done / _GIB, self._size / _GIB
        self._out.write(
            f"\rsearching memory for a kernel: {done:.1f} of {size:.1f} GiB\x1b[K"
        )
        self._out.flush()
