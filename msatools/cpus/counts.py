# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-CPU numbers, some of which may be unknown."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Structs
from msatools.kernel.words import MAX_PLAUSIBLE

Numbers = npt.NDArray[np.int64]
"""One value a CPU."""


class Counts(Struct, frozen=True):
    """One number a CPU."""

    values: Numbers
    """The numbers; 0 if unknown."""

    known: Booleans

    def __add__(self, other: "Counts") -> "Counts":
        """Return the sums; known if both numbers are."""
        return counts(self.values + other.values, self.known & other.known)

    def less(self, other: "Counts") -> "Counts":
        """Subtract numbers that are a part of these; 0 if they are more.

        They are not read or counted at the same moment, so they may be a few more.
        """
        rest = np.maximum(self.values - other.values, 0)
        return counts(rest, self.known & other.known)

    def at(self, row: int) -> int | None:
        """Return the number of one CPU; ``None`` if unknown."""
        return int(self.values[row]) if self.known[row] else None


def counts(values: npt.NDArray[Any], known: Booleans) -> Counts:
    """Return :class:`Counts` with unknown values set to 0."""
    return Counts(np.where(known, values, 0).astype(np.int64), known)


def total(parts: Iterable[Counts]) -> Counts | None:
    """Sum up by CPU; known if all parts are; ``None`` if there are no parts."""
    all_parts = list(parts)
    return reduce(Counts.__add__, all_parts) if all_parts else None


def believed(table: Structs, column: str, losses: LossLog) -> Counts | None:
    """Return a column of a table; ``None`` if the kernel does not keep it.

    Impossible numbers, as in a damaged dump, are unknown.
    """
    if not table.has(column):
        return None
    numbers = table[column]
    # As unsigned numbers, negative ones are too large as well.
    possible = numbers.astype(np.uint64) <= MAX_PLAUSIBLE
    wrong = int(np.count_nonzero(~possible))
    text = "some times or counts of CPUs are impossible"
    losses.lose(Loss.COUNTS, text, count=wrong)
    return counts(numbers, table.readable & possible)
