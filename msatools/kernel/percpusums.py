# SPDX-License-Identifier: LGPL-2.1-or-later

"""The parts that CPUs have of many ``struct percpu_counter`` (lib/percpu_counter.c)."""

import numpy as np
import numpy.typing as npt

from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import lose_many

_PAGE = 4096
_BLOCK_SHIFT = 16
_WORD = (1 << 64) - 1


def sum_parts(
    reader: Reader, parts: Addresses, losses: LossLog
) -> npt.NDArray[np.int64]:
    """Sum over all CPUs what each has of some counters.

    Per CPU, the parts of all counters lie in a few blocks of the same shape, so that
    it takes some reads a CPU, not some a counter. A CPU that goes offline hands its
    parts over and leaves zeros. A part that cannot be read is counted, and zero.

    :param parts: Values of the member ``counters``: pointers to per-CPU ``s32``; NULL
        has no parts.
    """
    has = parts != 0
    unique, index = np.unique(parts[has], return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    starts = np.flatnonzero(np.diff(unique >> np.uint64(_BLOCK_SHIFT)) != 0) + 1
    blocks = [
        (int(block[0]), (block - block[0]).astype(np.int64), rows)
        for rows in np.split(np.arange(len(unique)), starts)
        if len(block := unique[rows])
    ]
    lost = 0
    for offset in read_percpu(reader, losses).offsets.tolist():
        for first, places, rows in blocks:
            address = (first + offset) & _WORD
            before = address % _PAGE
            size = before + int(places[-1]) + 4
            data, gaps = reader.read_around_gaps(address - before, size, _PAGE)
            at = before + places
            span = np.frombuffer(data, np.uint8)
            sums[rows] += span[at[:, None] + np.arange(4)].view("<i4")[:, 0]
            for gap in gaps:
                gone = (at >= gap.offset) & (at < gap.offset + gap.size)
                lost += int(np.count_nonzero(gone))
    lose_many(losses, "struct percpu_counter", lost)
    summed = np.zeros(len(parts), np.int64)
    summed[has] = sums[index]
    return summed
