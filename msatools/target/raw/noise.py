# SPDX-License-Identifier: LGPL-2.1-or-later

"""What memory holds in which no kernel was found: noise, zeros, or something else."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from drgn import FaultError

from msatools.target.raw.memory import PAGE_BYTES, Memory

_SAMPLES = 1024
_RANDOM_SHARE = 0.98
_RANDOM_VALUES = 400.0
"""Maximum of the sum of squared deviations over the expected count (chi-squared) of
bytes that are random, of a page: 255 on average, with a standard deviation of 23."""

_WHAT = "no header of a dump, and no Linux kernel in what would be its memory"


def is_noise(memory: Memory) -> bool:
    """Return whether all of some pages, spread over memory, are random."""
    pages = list(_pages(memory))
    if not pages:
        return False
    noisy = sum(_is_random(page) for page in pages)
    return noisy >= _RANDOM_SHARE * len(pages)


def what_it_holds(memory: Memory) -> tuple[str, str]:
    """Return what memory without a kernel is, and what to do."""
    pages = list(_pages(memory))
    if not pages:
        return (
            "zeros where a header should be, and nothing else",
            "it was never written to its end: take it anew",
        )
    if is_noise(memory):
        return (
            "encrypted or compressed: every page of it is random",
            "an encrypted guest (SEV, TDX) is read from inside alone: have its kernel "
            "dump itself by kdump",
        )
    return f"not a dump: {_WHAT} (no VMCOREINFO)", "name a vmcore"


def _pages(memory: Memory) -> Iterator[bytes]:
    """Yield some pages that are not zeros."""
    extents = [
        (start, end) for start, end in islice(memory.filled(), 1 << 16) if end > start
    ]
    total = sum(end - start for start, end in extents)
    step = max(total // _SAMPLES // PAGE_BYTES, 1) * PAGE_BYTES
    for start, end in extents:
        for address in range(start, end, step):
            try:
                page = memory.read(address, min(PAGE_BYTES, end - address))
            except (FaultError, OSError):
                continue
            if any(page):
                yield page


def _is_random(page: bytes) -> bool:
    counts = np.bincount(np.frombuffer(page, np.uint8), minlength=256)
    expected = len(page) / 256
    return bool(((counts - expected) ** 2).sum() / expected < _RANDOM_VALUES)
