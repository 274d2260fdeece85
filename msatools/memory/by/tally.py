# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sums up pages by owner and kind while the memmap is scanned."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.memory.pages.classes import CLASSES
from msatools.memory.pages.classify import Words, where

Pages = npt.NDArray[np.int64]

OTHERS = np.uint64((1 << 64) - 1)
"""Owner of all pages whose owners were too many to keep and had the fewest pages."""

_MOST_OWNERS = 1 << 23
"""Maximum number of pairs to keep, 24 bytes each."""

_COMPACT_AT = 1 << 20

_SHORT = 4
"""Average rows of a run below which sorting the rows first is faster."""

_CODE_BITS = np.uint64(6)


class TallySums(Struct, frozen=True):
    """Pages by pair of owner and kind, ascending by both."""

    owners: Words
    kinds: Words
    pages: Pages

    def starts(self) -> npt.NDArray[np.intp]:
        """Return the index of each owner's first pair."""
        new = np.ones(len(self.owners), np.bool_)
        new[1:] = self.owners[1:] != self.owners[:-1]
        return where(new)


_EMPTY = np.empty(0, np.uint64)


class Tally(Struct):
    """
    Counts pages by two words, such as a file's mapping and a page's class.

    Its memory grows with the number of owners, not of pages.
    """

    most: int = field(default_factory=lambda: _MOST_OWNERS)
    _parts: list[TallySums] = field(default_factory=list)
    _held: int = 0
    _compact_at: int = _COMPACT_AT

    def add(self, owners: Words, kinds: npt.NDArray[np.unsignedinteger]) -> None:
        """Count one page for each row; neighbours often have the same pair."""
        if not len(owners):
            return
        starts = _starts(owners, kinds)
        if len(starts) * _SHORT > len(owners) and kinds.dtype == np.uint8:
            owners, kinds = _sorted_pairs(owners, kinds)
            starts = _starts(owners, kinds)
        lengths = np.diff(starts, append=len(owners))
        self._keep(TallySums(owners[starts], kinds[starts].astype(np.uint64), lengths))

    def merge(self, later: "Tally") -> None:
        """Add the counts of another tally."""
        self._keep(later.sums())

    def sums(self) -> TallySums:
        """Return the sums so far."""
        if not self._parts:
            return TallySums(_EMPTY, _EMPTY, np.empty(0, np.int64))
        sums = add_up(self._parts)
        if len(sums.owners) > self.most:
            sums = add_up([_without_least(sums, self.most // 2)])
        self._parts, self._held = [sums], len(sums.owners)
        # Otherwise very many owners would be summed up again at each block.
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
    """Return the indices of rows whose pair differs from the row before."""
    new = np.ones(len(owners), np.bool_)
    new[1:] = (owners[1:] != owners[:-1]) | (kinds[1:] != kinds[:-1])
    return where(new)


def _sorted_pairs(
    owners: Words, codes: npt.NDArray[np.unsignedinteger]
) -> tuple[Words, npt.NDArray[np.unsignedinteger]]:
    """
    Sort rows so that those of the same pair are adjacent.

    The upper bits of an address are all the same and leave room for a class. So one
    word holds a pair, and sorting words takes a tenth of the time of lexsort().
    """
    packed = (owners << _CODE_BITS) | codes
    if (_owners_of(packed) != owners).any():
        return owners, codes  # some are not addresses, as in a damaged dump
    packed.sort()
    return _owners_of(packed), packed & ((np.uint64(1) << _CODE_BITS) - np.uint64(1))


def _owners_of(packed: Words) -> Words:
    signed = packed.view(np.int64) >> np.int64(_CODE_BITS)
    return signed.view(np.uint64)


def add_up(parts: list[TallySums]) -> TallySums:
    """Sum up the rows that have the same owner and kind."""
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


class TallyOwner(Struct, frozen=True):
    """The pages of one owner."""

    word: int
    """The owner, as in :attr:`TallySums.owners`."""

    pages: int
    classes: dict[str, int]
    """Pages by class name, without empty classes, in the order of reports."""


class Ranking(Struct, frozen=True):
    """Owners by their pages."""

    owners: tuple[TallyOwner, ...]
    """The listed owners, the largest first."""

    rest: TallyOwner | None
    """All other owners together; ``None`` if all are listed."""

    left_out: int | None
    """Number of owners in the rest; ``None`` if unknown (:data:`OTHERS`)."""


def rank(sums: TallySums, most: int, always: Sequence[int] = (0,)) -> Ranking:
    """
    Rank owners by their pages.

    :param sums: Sums whose kinds are classes.
    :param most: Maximum number of owners to list.
    :param always: Placeholders, listed in addition however few pages they have.
    """
    starts = sums.starts()
    if not len(starts):
        return Ranking((), None, 0)
    words = sums.owners[starts]
    totals = np.add.reduceat(sums.pages, starts)
    order = np.argsort(-totals, kind="stable")
    special = np.isin(words[order], np.array(always, np.uint64))
    ordinary = ~special & (words[order] != OTHERS)
    listed = special | (ordinary & (np.cumsum(ordinary) <= most))
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
    left_out = None if words[-1] == OTHERS else int(np.count_nonzero(left))
    return Ranking(owners, rest, left_out)


def _owner(word: int, sums: TallySums, rows: slice) -> TallyOwner:
    codes, pages = sums.kinds[rows].tolist(), sums.pages[rows].tolist()
    by_code = dict(zip(codes, pages, strict=True))
    classes = {name: by_code[code] for code, name in CLASSES.items() if code in by_code}
    return TallyOwner(word, sum(pages), classes)


def regroup(sums: TallySums, words: Words) -> TallySums:
    """
    Replace the owners of sums, and sum up again.

    :param words: The new owner of each row of *sums*.
    """
    return add_up([TallySums(words, sums.kinds, sums.pages)])
