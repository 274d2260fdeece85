# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages by owner and kind, summed up as blocks of the memmap come by."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import CLASSES
from msatools.memory.pages.classify import Words, where

Pages = npt.NDArray[np.int64]

OTHERS = np.uint64((1 << 64) - 1)
"""The owner of what those have together who had the least as there were too many."""

_MOST_OWNERS = 1 << 23
"""More than that, with 24 bytes each, are not told apart."""

_COMPACT_AT = 1 << 20

_SHORT = 4
"""Rows of a run on average, from which on it is quicker to sort what comes first."""

_CODE_BITS = np.uint64(6)


@dataclass(frozen=True)
class TallySums:
    """Pages of each pair of an owner and a kind, ascending by both."""

    owners: Words
    kinds: Words
    pages: Pages

    def starts(self) -> npt.NDArray[np.intp]:
        """Find where each owner's first pair is."""
        new = np.ones(len(self.owners), np.bool_)
        new[1:] = self.owners[1:] != self.owners[:-1]
        return where(new)


_NONE = np.empty(0, np.uint64)


@dataclass
class Tally:
    """
    Counts pages by two words, such as a file's mapping and a page's class.

    What it keeps grows with the owners, not with the pages.
    """

    most: int = field(default_factory=lambda: _MOST_OWNERS)
    _parts: list[TallySums] = field(default_factory=list)
    _held: int = 0
    _compact_at: int = _COMPACT_AT

    def add(self, owners: Words, kinds: npt.NDArray[np.unsignedinteger]) -> None:
        """Count one page for each row; neighbours often are of one owner and kind."""
        if not len(owners):
            return
        starts = _starts(owners, kinds)
        if len(starts) * _SHORT > len(owners) and kinds.dtype == np.uint8:
            owners, kinds = _together(owners, kinds)
            starts = _starts(owners, kinds)
        lengths = np.diff(starts, append=len(owners))
        self._keep(TallySums(owners[starts], kinds[starts].astype(np.uint64), lengths))

    def merge(self, later: "Tally") -> None:
        """Add what another one counted."""
        self._keep(later.sums())

    def sums(self) -> TallySums:
        """Sum up what has been counted."""
        if not self._parts:
            return TallySums(_NONE, _NONE, np.empty(0, np.int64))
        sums = add_up(self._parts)
        if len(sums.owners) > self.most:
            sums = add_up([_without_least(sums, self.most // 2)])
        self._parts, self._held = [sums], len(sums.owners)
        # Else a great many owners would be summed up anew with each block.
        self._compact_at = max(_COMPACT_AT, 2 * self._held)
        return sums

    def _keep(self, part: TallySums) -> None:
        self._parts.append(part)
        self._held += len(part.owners)
        if self._held > self._compact_at:
            self.sums()


def _starts(
    owners: Words, kinds: npt.NDArray[np.unsignedinteger]
) -> npt.NDArray[np.intp]:
    """Find where rows begin that are not of the same pair as the one before."""
    new = np.ones(len(owners), np.bool_)
    new[1:] = (owners[1:] != owners[:-1]) | (kinds[1:] != kinds[:-1])
    return where(new)


def _together(
    owners: Words, codes: npt.NDArray[np.unsignedinteger]
) -> tuple[Words, npt.NDArray[np.unsignedinteger]]:
    """
    Bring rows of the same pair together.

    One sort of single words takes a tenth of the time of one by two keys: the upper
    bits of an address are all the same, and leave room for a class.
    """
    packed = (owners << _CODE_BITS) | codes
    if (_owners_of(packed) != owners).any():
        return owners, codes  # not all are addresses, as in a damaged dump
    packed.sort()
    return _owners_of(packed), packed & ((np.uint64(1) << _CODE_BITS) - np.uint64(1))


def _owners_of(packed: Words) -> Words:
    signed = packed.view(np.int64) >> np.int64(_CODE_BITS)
    return signed.view(np.uint64)


def add_up(parts: list[TallySums]) -> TallySums:
    """Make one row of all that have the same owner and kind."""
    owners = np.concatenate([part.owners for part in parts])
    kinds = np.concatenate([part.kinds for part in parts])
    pages = np.concatenate([part.pages for part in parts])
    order = np.lexsort((kinds, owners))
    owners, kinds, pages = owners[order], kinds[order], pages[order]
    starts = _starts(owners, kinds)
    summed = np.add.reduceat(pages, starts) if len(pages) else pages
    return TallySums(owners[starts], kinds[starts], summed)


def _without_least(sums: TallySums, most: int) -> TallySums:
    """Assign all but the *most* largest rows to :data:`OTHERS`."""
    owners = sums.owners.copy()
    owners[np.argsort(-sums.pages, kind="stable")[most:]] = OTHERS
    return TallySums(owners, sums.kinds, sums.pages)


@dataclass(frozen=True)
class TallyOwner:
    """The pages of one owner."""

    word: int
    pages: int
    classes: dict[str, int]
    """Those classes that it has pages of, in the order of reports."""


@dataclass(frozen=True)
class Ranking:
    """Owners by what they have."""

    owners: tuple[TallyOwner, ...]
    """The largest first."""

    rest: TallyOwner | None
    """All that there are too many of to be listed, as one."""

    left_out: int | None
    """Number of those owners; ``None`` if more than could be kept apart."""


def rank(sums: TallySums, most: int, always: Sequence[int] = (0,)) -> Ranking:
    """
    Rank owners.

    :param sums: Of which the kinds are classes.
    :param most: How many to list.
    :param always: Words that are no owners, listed however few pages they have.
    """
    starts = sums.starts()
    if not len(starts):
        return Ranking((), None, 0)
    words = sums.owners[starts]
    totals = np.add.reduceat(sums.pages, starts)
    order = np.argsort(-totals, kind="stable")
    special = np.isin(words[order], np.array(always, np.uint64))
    can_be = ~special & (words[order] != OTHERS)
    listed = special | (can_be & (np.cumsum(can_be) <= most))
    ends = np.append(starts[1:], len(sums.owners))
    owners = tuple(
        _owner(int(words[row]), sums, slice(int(starts[row]), int(ends[row])))
        for row in order[listed].tolist()
    )
    left = np.zeros(len(starts), np.bool_)
    left[order[~listed]] = True
    if not left.any():
        return Ranking(owners, None, 0)
    pairs = np.repeat(left, ends - starts)
    together = TallySums(
        sums.owners[pairs] | OTHERS, sums.kinds[pairs], sums.pages[pairs]
    )
    summed = add_up([together])
    rest = _owner(int(OTHERS), summed, slice(0, len(summed.owners)))
    told_apart = words[-1] != OTHERS
    return Ranking(owners, rest, int(np.count_nonzero(left)) if told_apart else None)


def _owner(word: int, sums: TallySums, rows: slice) -> TallyOwner:
    codes, pages = sums.kinds[rows].tolist(), sums.pages[rows].tolist()
    found = dict(zip(codes, pages, strict=True))
    classes = {name: found[code] for code, name in CLASSES.items() if code in found}
    return TallyOwner(word, sum(pages), classes)


def give_to(sums: TallySums, words: Words) -> TallySums:
    """
    Sum up anew, by what owners belong to.

    :param words: For each of ``sums.owners``, those again and again included.
    """
    return add_up([TallySums(words, sums.kinds, sums.pages)])
