# SPDX-License-Identifier: LGPL-2.1-or-later

"""Strings are read up to their NUL, without reading the next page needlessly."""

import pytest
from drgn import FaultError

from msatools.errors import DamagedDataError
from msatools.kernel.reader import read_string

from .memory import BASE, reader_of

PAGE = 4096


LONG = b"x" * (PAGE + 10)


@pytest.mark.parametrize(
    ("data", "offset", "most", "expected"),
    [
        (b"one\0two", 0, 100, "one"),
        # Bytes that are not UTF-8 are escaped.
        (b"a\xff\0", 0, 10, "a\\xff"),
        (LONG + b"\0", 0, len(LONG), LONG.decode()),
        # The next page is not read: it is a hole.
        (b"end\0".rjust(PAGE, b"x"), PAGE - 4, 100, "end"),
    ],
)
def test_string_ends_with_nul(
    data: bytes, offset: int, most: int, expected: str
) -> None:
    holes = (1,) if len(data) <= PAGE else ()
    reader = reader_of(data.ljust(2 * PAGE, b"y"), holes, granule=PAGE)
    assert read_string(reader, BASE + offset, most) == expected


@pytest.mark.parametrize("most", [10, PAGE - 1])
def test_string_that_does_not_end(most: int) -> None:
    reader = reader_of(b"x" * 2 * PAGE)
    with pytest.raises(DamagedDataError, match="does not end"):
        read_string(reader, BASE, most)


def test_string_with_a_missing_page() -> None:
    reader = reader_of(b"x" * 2 * PAGE, holes=(1,), granule=PAGE)
    with pytest.raises(FaultError, match="hole"):
        read_string(reader, BASE, 2 * PAGE)
