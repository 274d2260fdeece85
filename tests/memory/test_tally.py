# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sums by owner and kind are those of counting pages one by one."""

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from msatools.memory import breakdowns as module
from msatools.memory.breakdowns import OTHERS, Tally, TallySums, rank
from msatools.memory.classes import CLASSES, PageClass

Words = npt.NDArray[np.uint64]


def rows(seed: int, count: int, owners: int) -> tuple[Words, npt.NDArray[np.uint8]]:
    """Make owners and classes of pages, in runs."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 9, count)
    words = np.repeat(random.integers(0, owners, count), lengths).astype(np.uint64)
    codes = np.repeat(random.integers(0, 4, count), lengths).astype(np.uint8)
    return words, codes


def counted(sums: TallySums) -> Counter[tuple[int, int]]:
    pairs = zip(sums.owners.tolist(), sums.kinds.tolist(), strict=True)
    return Counter(dict(zip(pairs, sums.pages.tolist(), strict=True)))


@pytest.mark.parametrize("compact_at", [1, 1 << 20])
def test_sums_are_those_of_counting(
    monkeypatch: pytest.MonkeyPatch, compact_at: int
) -> None:
    monkeypatch.setattr(module, "_COMPACT_AT", compact_at)
    expected: Counter[tuple[int, int]] = Counter()
    first, later = Tally(_compact_at=compact_at), Tally(_compact_at=compact_at)
    for seed in range(6):
        words, codes = rows(seed, 500, 40)
        (first if seed < 3 else later).add(words, codes)
        expected.update(zip(words.tolist(), codes.tolist(), strict=True))
    first.merge(later)
    assert counted(first.sums()) == expected
    assert counted(first.sums()) == expected, "summing up changes nothing"
    keys = list(counted(first.sums()))
    assert keys == sorted(keys)


def test_too_many_owners_become_one() -> None:
    tally = Tally(most=10)
    words = np.repeat(np.arange(100, dtype=np.uint64), np.arange(1, 101))
    tally.add(words, np.full(len(words), PageClass.FILE, np.uint8))
    found = counted(tally.sums())
    others = found.pop((int(OTHERS), PageClass.FILE))
    assert found == {(owner, PageClass.FILE): owner + 1 for owner in range(95, 100)}
    assert others + found.total() == len(words)
    ranking = rank(tally.sums(), 3)
    assert [owner.word for owner in ranking.owners] == [99, 98, 97]
    assert ranking.rest is not None
    assert ranking.rest.pages == len(words) - 100 - 99 - 98
    assert ranking.left_out is None


def test_ranking() -> None:
    tally = Tally()
    words, codes = rows(7, 2000, 50)
    tally.add(words, codes)
    by_owner = Counter(words.tolist())
    none = by_owner.pop(0)
    ranking = rank(tally.sums(), 20)
    listed = [owner for owner in ranking.owners if owner.word]
    assert len(listed) == 20
    assert [o.pages for o in listed] == [n for _, n in by_owner.most_common(20)]
    (nobody,) = (owner for owner in ranking.owners if not owner.word)
    assert nobody.pages == none
    assert ranking.rest is not None
    assert ranking.left_out == 29
    total = sum(owner.pages for owner in ranking.owners) + ranking.rest.pages
    assert total == len(words)
    for owner in (*ranking.owners, ranking.rest):
        assert sum(owner.classes.values()) == owner.pages
    for owner in listed:
        mine = Counter(codes[words == owner.word].tolist())
        assert owner.classes == {CLASSES[code]: pages for code, pages in mine.items()}
