# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kallsyms tables of a kernel, and checks that they are sound.

It has no I/O. The tables are written by the kernel's ``scripts/kallsyms.c``. They are
not trusted, as the dump may be damaged.
"""

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.model import values
from msatools.selfdesc.tables import Words, at, library

TOKENS = 256
NAMES_PER_MARKER = 256
MAX_SYMBOLS = 1 << 21
"""Maximum number of symbols (a Debian 6.12 has 155,000)."""

MAX_TEXT = 1 << 28
"""Maximum size of all names, in bytes; a Debian 6.12 has 3.9 million."""

MAX_ALIGNMENT = 256
"""Maximum alignment in bytes that an assembler made of ``.align 8`` between tables."""

INDEX_BYTES = 2 * TOKENS
_TYPE_CODES = {2: "H", 4: "I", 8: "Q"}
_TOKEN = re.compile(rb"[!-~]*")
TWO_BYTE_LENGTH = 0x80


class BadTablesError(ValueError):
    """The tables contradict themselves or each other."""


class KallsymsTables(Struct, frozen=True):
    """Addresses of the tables; 0 for one that this kernel lacks."""

    names: int
    token_table: int
    token_index: int
    num_syms: int
    offsets: int = 0
    relative_base: int = 0
    addresses: int = 0

    def start(self) -> int:
        """Return the lowest address of any table."""
        addresses: Iterable[int] = values(self).values()
        return min(address for address in addresses if address)

    def end(self, count: int, word: int) -> int:
        """Return the highest end of tables of *count* symbols.

        :param word: Bytes of a pointer.
        """
        ends = [self.token_index + INDEX_BYTES, self.num_syms + word]
        if self.addresses:
            ends.append(self.addresses + word * count)
        if self.offsets:
            ends.append(self.offsets + 4 * count)
        if self.relative_base:
            ends.append(self.relative_base + word)
        return max(ends)


class Image(Struct, frozen=True):
    """A range of the target's memory."""

    base: int
    data: bytes
    word: int
    """Bytes of a pointer."""

    little: bool

    def part(self, address: int, size: int) -> bytes:
        """Return *size* bytes at *address*.

        :raises BadTablesError: if they are not all in this range
        """
        start = address - self.base
        if start < 0 or size < 0 or start + size > len(self.data):
            raise BadTablesError(f"a table reaches beyond {address:#x}")
        return self.data[start : start + size]

    def number(self, address: int) -> int:
        """Return the unsigned 32-bit number at *address*."""
        value: int = self.numbers(address, 1, 4)[0]
        return value

    def numbers(self, address: int, count: int, size: int) -> "array[int]":
        """Return *count* unsigned numbers of *size* bytes each at *address*."""
        values = array(_TYPE_CODES[size], self.part(address, size * count))
        if self.little != (sys.byteorder == "little"):
            values.byteswap()
        return values

    def check_tokens(self, table: int, index: int) -> list[bytes]:
        """Check and return the tokens, the strings that names are composed of.

        :raises BadTablesError: if they do not agree with the index
        """
        starts = self.numbers(index, TOKENS, 2).tolist()
        first = table - self.base
        end = self.data.find(0, first + starts[-1]) if first >= 0 else -1
        tokens = self.data[first:end].split(b"\0") if end >= 0 else []
        offsets = accumulate((len(token) + 1 for token in tokens), initial=0)
        if len(tokens) != TOKENS or list(offsets)[:-1] != starts:
            raise BadTablesError("parts of names do not lie where they should")
        if not all(map(_TOKEN.fullmatch, tokens)):
            raise BadTablesError("names have letters that no symbol has")
        return tokens

    def pack(self, values: list[int], size: int) -> bytes:
        """Return numbers as they lie in the target's memory."""
        packed = array(_TYPE_CODES[size], values)
        if self.little != (sys.byteorder == "little"):
            packed.byteswap()
        return packed.tobytes()


def has_long_names(tables: KallsymsTables, image: Image) -> bool:
    """Check the tables, and return whether lengths of names may have two bytes.

    They may since Linux kernel commit 73bbb94466fd ("kallsyms: support "big" kernel
    symbols") (in v6.1). Only the markers show it: each is the offset of a 256th name.

    :raises BadTablesError: if the tables are not as the kernel's build makes them
    """
    count = image.number(tables.num_syms)
    if not 0 < count <= MAX_SYMBOLS:
        raise BadTablesError(f"there cannot be {count:,} symbols")
    image.check_tokens(tables.token_table, tables.token_index)
    _check_order(tables, image, count)
    names = image.data[tables.names - image.base :]
    for long in (True, False):
        if _are_names_sound(names, count, long, image):
            return long
    raise BadTablesError("names of symbols do not lie where they should")


def _check_order(tables: KallsymsTables, image: Image, count: int) -> None:
    """Check that symbols ascend, as they are sorted when the kernel is built."""
    orders: list[Callable[[npt.NDArray[Any]], bool]]
    if tables.addresses:
        values = np.asarray(image.numbers(tables.addresses, count, image.word))
        orders = [ascends]
    else:
        values = np.asarray(image.numbers(tables.offsets, count, 4))
        orders = [ascends, _ascends_around_base, _ascends_pc_relative]
    # Other data is usually out of order within the first few.
    head = values[:NAMES_PER_MARKER]
    if not any(order(head) and order(values) for order in orders):
        raise BadTablesError("addresses of symbols do not ascend")


def ascends(values: npt.NDArray[Any]) -> bool:
    """Return whether no number is less than the one before it."""
    return bool((values[:-1] <= values[1:]).all())


def _ascends_around_base(offsets: npt.NDArray[np.uint32]) -> bool:
    """Return whether they ascend if negative ones count down from the base.

    The others, those of per-CPU symbols, are absolute (on x86, v4.6 to v6.14).
    """
    signed = offsets.view(np.int32)
    negative = np.flatnonzero(signed < 0)
    first = negative[0] if len(negative) else len(signed)
    relative = signed[first:]
    return (
        ascends(signed[:first])
        and ascends(relative[::-1])
        and bool((relative < 0).all())
    )


def _ascends_pc_relative(offsets: npt.NDArray[np.uint32]) -> bool:
    """Return whether they ascend if relative to their own addresses (since v7.0)."""
    return ascends(4 * np.arange(len(offsets)) + offsets.view(np.int32))


def _are_names_sound(names: bytes, count: int, long: bool, image: Image) -> bool:
    try:
        markers, end = walk(names, count, long)
    except BadTablesError:
        return False
    # Markers follow the names directly in all versions. They had the size of a pointer
    # before Linux kernel commit 80ffbaa5b1bd ("kallsyms: reduce size a little on
    # 64-bit") (in v4.20).
    return any(
        names.find(packed, end, end + MAX_ALIGNMENT + len(packed)) >= 0
        for packed in (image.pack(markers, size) for size in {4, image.word})
    )


def walk(names: bytes, count: int, long: bool) -> tuple[list[int], int]:
    """Walk over *count* names.

    :param long: Whether lengths may have two bytes.
    :return: Offset of each 256th name, and the end of the last name.
    :raises BadTablesError: if there are fewer names, or one is empty
    """
    loaded = library()
    if loaded is None:
        return _walk_in_python(names, count, long)
    markers = np.empty(-(-count // NAMES_PER_MARKER), np.uint32)
    end = loaded.msa_walk_names(names, len(names), count, long, at(markers))
    if end < 0:
        raise BadTablesError("names of symbols are cut off, or one is empty")
    return markers.tolist(), end


def _walk_in_python(names: bytes, count: int, long: bool) -> tuple[list[int], int]:
    markers = []
    offset = 0
    try:
        for block in range(0, count, NAMES_PER_MARKER):
            markers.append(offset)
            for _ in range(min(NAMES_PER_MARKER, count - block)):
                length = names[offset]
                if length & TWO_BYTE_LENGTH and long:
                    offset += 1
                    length = (length & ~TWO_BYTE_LENGTH) | names[offset] << 7
                offset += 1 + length
                if not length or offset > len(names):
                    raise IndexError
    except IndexError:
        raise BadTablesError("names of symbols are cut off, or one is empty") from None
    return markers, offset


def expand_names(
    tables: KallsymsTables, image: Image, long: bool
) -> tuple[bytes, Words] | None:
    """Expand the names of all symbols; ``None`` if the part in C was not built.

    :param long: What :func:`has_long_names` has returned: the tables have to be sound.
    :return: Each symbol's letter and name, with a NUL at the end, and where they begin.
    :raises BadTablesError: if they are too long
    """
    loaded = library()
    if loaded is None:
        return None
    count = image.number(tables.num_syms)
    names = image.data[tables.names - image.base :]
    tokens = image.data[tables.token_table - image.base :]
    index = np.asarray(image.numbers(tables.token_index, TOKENS, 2))
    starts = np.empty(count, np.uint32)

    def expand(text: "np.ndarray[Any, np.dtype[np.uint8]]") -> int:
        return int(
            loaded.msa_expand_names(
                *(names, count, long, tokens, len(tokens), at(index)),
                *(at(text), len(text), at(starts)),
            )
        )

    size = expand(np.empty(0, np.uint8))
    if not 0 < size <= MAX_TEXT:
        raise BadTablesError(f"names of symbols are said to take {size:,} bytes")
    text = np.empty(size, np.uint8)
    expand(text)
    return text.tobytes(), starts


def addresses_of(
    tables: KallsymsTables, image: Image, row: int, address: int
) -> npt.NDArray[np.uint64]:
    """Return the addresses of all symbols, ascending.

    Kernels differ in what the offsets are relative to; one symbol shows it.

    :param row: A symbol of which the address is known.
    :raises BadTablesError: if it has another address however the table is read
    """
    for addresses in readings(tables, image):
        if int(addresses[row]) == address and ascends(addresses):
            return addresses
    raise BadTablesError("VMCOREINFO has another address for _stext")


def readings(tables: KallsymsTables, image: Image) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the addresses by each meaning that the table has had."""
    count = image.number(tables.num_syms)
    if tables.addresses:
        words = image.numbers(tables.addresses, count, image.word)
        yield np.asarray(words).astype(np.uint64)
        return
    offsets = np.asarray(image.numbers(tables.offsets, count, 4))
    signed = offsets.view(np.int32).astype(np.int64).view(np.uint64)
    base = np.uint64(0)
    if tables.relative_base:
        base = np.uint64(image.numbers(tables.relative_base, 1, image.word)[0])
    yield base + offsets
    # Negative ones count down from the base (on x86, v4.6 to v6.14).
    yield np.where(offsets >> 31 != 0, base + ~signed, signed)
    # Relative to their own addresses: a081b5789255d ("kallsyms: Get rid of kallsyms
    # relative base") (in v7.0).
    rows = np.arange(count, dtype=np.uint64)
    yield np.uint64(tables.offsets) + np.uint64(4) * rows + signed
