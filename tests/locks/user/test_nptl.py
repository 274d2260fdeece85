# SPDX-License-Identifier: LGPL-2.1-or-later

"""Words of memory that look like a lock of glibc, and are none.

Locks of every kind are in the lab's guests (test_userlocks.py, test_clibrary.py).
"""

import struct
from dataclasses import dataclass, replace
from typing import Any

import pytest

from msatools.locks import c_library
from msatools.locks.c_library import MUTEX_BYTES, RWLOCK_BYTES, Mutex, Rwlock

RECURSIVE = 1
TID = 11_433
NOBODY = 4_000_000
"""A possible thread ID that no thread has."""

LINKS = (0x7F81_0010, 0x7F81)
PLAIN = (2, 0, TID, 1, 512, 0, 0, 0, 0, 0)
ROBUST = (TID | 1 << 31, 1, TID, 1, 512 | 128 | 16, 0, *LINKS, *LINKS)
RWLOCK = (11, 0, 3, 3, 0, 0, TID, 0, 0, 0, 0, 0, 0, 0)
"""A mutex, a robust one and a rwlock, as glibc 2.36 has them while a thread waits."""

WAIT_FOR_READ = 8
"""Offset of the futex of readers in a rwlock."""


def with_word(words: tuple[int, ...], word: int, value: int) -> bytes:
    changed = [*words[:word], value, *words[word + 1 :]]
    return struct.pack(f"<{len(words)}I", *changed)


@pytest.mark.parametrize(
    ("words", "word", "value"),
    [
        pytest.param(PLAIN, 0, 0, id="not locked"),
        pytest.param(PLAIN, 0, 3, id="another number"),
        pytest.param(PLAIN, 0, 1 << 31 | 2, id="as a robust one"),
        pytest.param(PLAIN, 1, 1, id="counted, and not recursive"),
        pytest.param(PLAIN, 2, 0, id="no owner"),
        pytest.param(PLAIN, 2, 1 << 22, id="no thread's ID"),
        pytest.param(PLAIN, 3, 0, id="no user"),
        pytest.param(PLAIN, 4, RECURSIVE, id="recursive, and not counted"),
        pytest.param(PLAIN, 4, 32, id="one that inherits priority"),
        pytest.param(PLAIN, 4, 64, id="one that protects"),
        pytest.param(PLAIN, 4, 128, id="shared"),
        pytest.param(PLAIN, 4, 1 << 10, id="no kind"),
        pytest.param(PLAIN, 4, NOBODY, id="another thread's ID"),
        pytest.param(PLAIN, 6, 8, id="linked"),
        pytest.param(PLAIN, 8, 8, id="linked to the next"),
        pytest.param(ROBUST, 0, NOBODY | 1 << 31, id="of two owners"),
        pytest.param(ROBUST, 1, 0, id="not counted"),
        pytest.param(ROBUST, 4, 0, id="not robust"),
        pytest.param(ROBUST, 0, TID | 3 << 30, id="its owner died"),
        pytest.param(ROBUST, 0, TID, id="nobody waits for it"),
    ],
)
def test_words_that_do_not_fit_a_mutex(
    words: tuple[int, ...], word: int, value: int
) -> None:
    shared, whole = words is ROBUST, with_word(words, 5, 0)
    assert c_library.glibc_mutex(whole, shared) == Mutex(TID, blocks_owner=True)
    assert c_library.glibc_mutex(whole, not shared) is None
    assert c_library.glibc_mutex(with_word(words, word, value), shared) is None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        pytest.param(0, 0, id="not locked"),
        pytest.param(0, 1, id="no writer in a write phase"),
        pytest.param(0, 1 << 3 | 2, id="a read phase, and a writer"),
        pytest.param(2, 0, id="an invalid phase"),
        pytest.param(2, 4, id="no such value"),
        pytest.param(3, 0, id="no writer has been let in"),
        pytest.param(4, 1, id="padding"),
        pytest.param(6, 0, id="the writer has gone"),
        pytest.param(6, 1 << 22, id="no thread's ID"),
        pytest.param(7, 1, id="shared"),
        pytest.param(9, 1, id="more padding"),
        pytest.param(12, 3, id="no such preference"),
        pytest.param(13, 1, id="its end"),
    ],
)
def test_words_that_do_not_fit_a_rwlock(word: int, value: int) -> None:
    whole, changed = with_word(RWLOCK, 1, 0), with_word(RWLOCK, word, value)
    found = c_library.glibc_rwlock(whole, WAIT_FOR_READ, False)
    assert found == Rwlock(TID, 0, "read")
    assert c_library.glibc_rwlock(changed, WAIT_FOR_READ, False) is None


@pytest.mark.parametrize("value", [0, 1, 2, TID])
def test_memory_full_of_one_number_is_no_lock(value: int) -> None:
    """Such as the rest of a semaphore, or of a condition variable."""
    data = struct.pack("<I", value) * (RWLOCK_BYTES // 4)
    for shared in (False, True):
        assert c_library.glibc_mutex(data[:MUTEX_BYTES], shared) is None
        for offset in (0, WAIT_FOR_READ, 12):
            assert c_library.glibc_rwlock(data, offset, shared) is None


@dataclass(frozen=True)
class Condition:
    """A condition variable in memory, by default with 30 and 20 waiters."""

    sequence: int = 2 * 550
    start: int = 2 * 450
    references: tuple[int, ...] = (2 * 20, 2 * 30)
    sizes: tuple[int, int] = (0, 30)
    original: int = 80 << 2
    flags: int = 50 << 3
    rest: tuple[int, ...] = ()

    def is_one(self, queued: tuple[int, int] = (20, 30)) -> bool:
        newer = not self.references
        words = [*self.references, *self.sizes, self.original, self.flags, 0, 0]
        data = struct.pack("<2Q8I", self.sequence, self.start, *words, *self.rest)
        return c_library.condition(data, newer, queued, False)


OLD = Condition()
NEW = replace(OLD, start=450, references=(), rest=(0, 0))


@pytest.mark.parametrize("made", [OLD, NEW], ids=["2.40", "2.41"])
@pytest.mark.parametrize(
    ("change", "fits"),
    [
        pytest.param({}, True, id="at rest"),
        pytest.param({"sizes": (-5 & 0xFFFFFFFF, 30)}, True, id="some gave up"),
        pytest.param({"sizes": (5, 30)}, False, id="more left than counted"),
        pytest.param({"sizes": (0, 81)}, False, id="more left than there were"),
        pytest.param({"sizes": (5, 81), "original": 80 << 2 | 1}, True, id="changing"),
        pytest.param({"original": 80 << 2 | 3}, False, id="invalid internal lock"),
        pytest.param({"original": 120 << 2}, False, id="ends after the next turn"),
        pytest.param({"sequence": 2 * 440}, False, id="starts after the next turn"),
        pytest.param({"sequence": 0x7F0012345678}, False, id="far too many turns"),
        pytest.param({"flags": 49 << 3}, False, id="fewer wait than are queued"),
        pytest.param({"flags": 551 << 3}, False, id="more wait than ever did"),
        pytest.param({"flags": 50 << 3 | 1}, False, id="shared between processes"),
    ],
)
def test_words_of_a_condition(made: Condition, change: Any, fits: bool) -> None:
    assert replace(made, **change).is_one() is fits


@pytest.mark.parametrize(
    "wrong",
    [
        replace(OLD, references=(2 * 19, 2 * 31)),
        replace(OLD, references=(2 * 20, 2 * 31)),
        replace(OLD, start=2 * 450 + 1),
        replace(NEW, rest=(0, 1)),
        replace(NEW, rest=(1, 0)),
    ],
)
def test_words_of_one_layout_only(wrong: Condition) -> None:
    assert not wrong.is_one()
