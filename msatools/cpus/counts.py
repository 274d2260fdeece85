# SPDX-License-Identifier: LGPL-2.1-or-later

"""Numbers that each CPU keeps, of which some may be lost."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Structs

Numbers = npt.NDArray[np.int64]
"""One a CPU."""

_MOST = 1 << 60
"""More than any time or count that a kernel comes to: 36 years in nanoseconds."""


@dataclass(frozen=True)
class Counts:
    """One number a CPU."""

    values: Numbers
    """0 where not known."""

    known: Booleans

    def __add__(self, other: "Counts") -> "Counts":
        """Return the sums, known where both are."""
        return counts(self.values + other.values, self.known & other.known)

    def less(self, other: "Counts") -> "Counts":
        """Return what of these is not those; none where those are more.

        They are not read or counted at one moment, so those may be a few more.
        """
        rest = np.maximum(self.values - other.values, 0)
        return counts(rest, self.known & other.known)

    def at(self, row: int) -> int | None:
        """Return the number of one CPU, ``None`` if it is not known."""
        return int(self.values[row]) if self.known[row] else None


def counts(values: npt.NDArray[Any], known: Booleans) -> Counts:
    """Return numbers that are 0 where not known."""
    return Counts(np.where(known, values, 0).astype(np.int64), known)


def total(parts: Iterable[Counts]) -> Counts | None:
    """Sum the parts that each CPU has, known where all are; ``None`` if none is."""
    several = list(parts)
    return reduce(Counts.__add__, several) if several else None


def believed(table: Structs, column: str, losses: LossLog) -> Counts | None:
    """Take a column of what CPUs keep; ``None`` if the kernel does not keep it.

    What cannot have been counted is of a damaged dump, and not known.
    """
    if not table.has(column):
        return None
    numbers = table[column]
    # As unsigned ones, those below zero are too many as well.
    possible = numbers.astype(np.uint64) <= _MOST
    wrong = int(np.count_nonzero(~possible))
    text = "some times or counts of CPUs cannot be"
    losses.lose(Loss.COUNTS, text, count=wrong)
    return counts(numbers, table.readable & possible)
