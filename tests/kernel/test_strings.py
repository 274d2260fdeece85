# SPDX-License-Identifier: LGPL-2.1-or-later

"""Strings that end, that do not, and that end where memory does."""

import pytest
from drgn import FaultError

from msatools.kernel.strings import read_string

from .memory import BASE, reader_of

PAGE = 4096


def test_a_string_ends_with_a_zero() -> None:
    reader = reader_of(b"one\0two".ljust(PAGE, b"x"))
    assert read_string(reader, BASE, 100) == "one"


def test_the_next_page_is_not_looked_at() -> None:
    data = bytearray(b"x" * 2 * PAGE)
    data[PAGE - 4 : PAGE] = b"end\0"
    reader = reader_of(bytes(data), holes=(1,), granule=PAGE)
    assert read_string(reader, BASE + PAGE - 4, 100) == "end"


def test_a_string_of_several_pages() -> None:
    text = b"x" * (PAGE + 10)
    reader = reader_of((text + b"\0").ljust(2 * PAGE, b"y"))
    assert read_string(reader, BASE, len(text)) == text.decode()


@pytest.mark.parametrize("most", [10, PAGE - 1])
def test_a_string_that_does_not_end(most: int) -> None:
    reader = reader_of(b"x" * 2 * PAGE)
    with pytest.raises(FaultError, match="does not end"):
        read_string(reader, BASE, most)


def test_a_page_that_is_missing() -> None:
    reader = reader_of(b"x" * 2 * PAGE, holes=(1,), granule=PAGE)
    with pytest.raises(FaultError, match="hole"):
        read_string(reader, BASE, 2 * PAGE)


def test_what_is_no_text_is_escaped() -> None:
    reader = reader_of(b"a\xff\0".ljust(PAGE, b"x"))
    assert read_string(reader, BASE, 10) == "a\\xff"
