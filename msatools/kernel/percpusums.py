# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sums of the per-CPU parts of ``struct percpu_counter`` (lib/percpu_counter.c)."""

import numpy as np
import numpy.typing as npt

from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import lose_many
from msatools.kernel.words import PAGE

_BLOCK_SHIFT = 16
_U64_MAX = (1 << 64) - 1


def sum_parts(
    reader: Reader, parts: Addresses, losses: LossLog
) -> npt.NDArray[np.int64]:
    """Sum the parts of each counter over all CPUs.

    The parts of all counters lie in a few blocks, with the same layout on each CPU: so
    the reads are a few per CPU, not per counter. A CPU that goes offline adds its parts
    to the global count and leaves zeros. A part that cannot be read counts as a loss,
    and as zero.

    :param parts: Values of the member ``counters``: pointers to per-CPU ``s32``; NULL
        has no parts.
    :return: Shape ``(len(parts),)``.
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
        for first, offsets, rows in blocks:
            address = (first + offset) & _U64_MAX
            before = address % PAGE
            size = before + int(offsets[-1]) + 4
            data, gaps = reader.read_around_gaps(address - before, size, PAGE)
            starts = before + offsets
            span = np.frombuffer(data, np.uint8)
            sums[rows] += span[starts[:, None] + np.arange(4)].view("<i4")[:, 0]
            for gap in gaps:
                missing = (starts >= gap.offset) & (starts < gap.offset + gap.size)
                lost += int(np.count_nonzero(missing))
    lose_many(losses, "struct percpu_counter", lost)
    summed = np.zeros(len(parts), np.int64)
    summed[has] = sums[index]
    return summed
