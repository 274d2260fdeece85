# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kallsyms tables of a kernel: checks, decoding, and a search for them by shape."""

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from drgn import Program
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.model import values
from msatools.selfdesc.tables import Words, at, library

# --- The kallsyms tables of a kernel, and checks that they are sound.
#
# No I/O in this part. The tables are written by the kernel's scripts/kallsyms.c. They
# are not trusted, as the dump may be damaged.


TOKENS = 256
NAMES_PER_MARKER = 256
MAX_SYMBOLS = 1 << 21
"""Maximum number of symbols; Debian's 6.12 has 155,000."""

MAX_TEXT = 1 << 28
"""Maximum size of all names, in bytes; Debian's 6.12 has 3.9 million."""

MAX_ALIGNMENT = 256
"""Maximum alignment of tables in bytes: some assemblers take ``.align 8`` as 2^8."""

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

        :raises BadTablesError: if some are outside this range
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
    # Check the first values before all: other data is usually out of order there.
    head = values[:NAMES_PER_MARKER]
    if not any(order(head) and order(values) for order in orders):
        raise BadTablesError("addresses of symbols do not ascend")


def ascends(values: npt.NDArray[Any]) -> bool:
    """Return whether no number is less than the one before it."""
    return bool((values[:-1] <= values[1:]).all())


def _ascends_around_base(offsets: npt.NDArray[np.uint32]) -> bool:
    """Return whether the addresses ascend if negative offsets count down from a base.

    Offsets of per-CPU symbols are positive and absolute (on x86, v4.6 to v6.14).
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
    """Return whether the addresses ascend if offsets are PC-relative (since v7.0)."""
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
    :return: The type letter and name of each symbol, with a NUL at the end; and the
        offset at which each begins.
    :raises BadTablesError: if the names are too long
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

    Kernels differ in what the offsets are relative to; one known address shows it.

    :param row: Row of the symbol whose address is known.
    :param address: Its address.
    :raises BadTablesError: if the symbol has another address in every encoding
    """
    for addresses in readings(tables, image):
        if int(addresses[row]) == address and ascends(addresses):
            return addresses
    raise BadTablesError("VMCOREINFO has another address for _stext")


def readings(tables: KallsymsTables, image: Image) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the addresses of all symbols once per encoding that kernels have used."""
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
    # Negative offsets count down from the base (on x86, v4.6 to v6.14).
    yield np.where(offsets >> 31 != 0, base + ~signed, signed)
    # PC-relative: each is relative to its own address, since Linux kernel commit
    # a081b5789255 ("kallsyms: Get rid of kallsyms relative base") (in v7.0).
    rows = np.arange(count, dtype=np.uint64)
    yield np.uint64(tables.offsets) + np.uint64(4) * rows + signed


# --- Search for a kernel's kallsyms tables by their shape, for use without VMCOREINFO.
#
# The kernel's scripts/kallsyms.c writes these tables, each aligned, in this order:
#
# * since v4.6: offsets, relative_base, num_syms, names, markers, token_table,
#   token_index. A kernel without CONFIG_KALLSYMS_BASE_RELATIVE has a table of addresses
#   instead of the first two.
# * since Linux kernel commit 60443c88f3a8 ("kallsyms: Improve the performance of
#   kallsyms_lookup_name()") (in v6.2, and in v6.1.y): seqs_of_names after the markers.
# * since Linux kernel commit 404bad70fcf7 ("scripts/kallsyms: change the output order")
#   (in v6.4): num_syms, names, markers, token_table, token_index, offsets,
#   relative_base.
# * since Linux kernel commit a081b5789255 ("kallsyms: Get rid of kallsyms relative
#   base") (in v7.0): the same without relative_base, at multiples of 4 bytes.
#
# A result is only a candidate, for has_long_names() and addresses_of() to check.


_MAX_SEARCH = 128 << 20
"""Bytes to search from the kernel's start; the image of Debian's 6.12 has 44 MiB."""

# Depending on the assembler, ``.align 8`` means 8 or 2^8 bytes; later kernels use
# ``.balign``. 32-bit kernels align to 4 bytes.
_ALIGNMENTS = (8, 4, 16, 256)

# The token of a character that occurs in symbols is the character itself, and each
# kernel has all digits in some name.
_DIGITS = b"".join(b"%c\0" % digit for digit in b"0123456789")

_STEPS = (1 << 20, 1 << 16, 1 << 12)
"""Bytes to read at a time: a smaller step if a piece cannot be read as a whole."""

_PAGE = _STEPS[-1]
_BEFORE_TOKENS = 8 << 20
"""Maximum bytes from names to tokens; Debian's 6.12 has 2 MiB."""

_MARKER_BYTES = 2 << 20
"""Maximum bytes from markers to tokens: room for seqs_of_names of 690,000 names."""

_TOKEN_BYTES = 1 << 16
_BLOCK_BYTES = NAMES_PER_MARKER * 514
"""Maximum bytes of the names between two markers, each of up to 512 characters."""
_MIN_BLOCK_BYTES = NAMES_PER_MARKER * 2
_SEQ_BYTES = 3
_ADDRESSES = 1 << 64
_MAX_HITS = 16
_MAX_TABLES = 64


class Search:
    """A search for tables in the memory of a kernel.

    :param start: Address of the kernel's start, ``_stext``.
    :param word: Bytes of a pointer.
    :param little: Whether the kernel is little-endian.
    """

    def __init__(self, prog: Program, start: int, word: int, little: bool) -> None:
        self.prog = prog
        self.word = word
        self.little = little
        self.start = start & -_PAGE
        self.end = min(self.start + _MAX_SEARCH, _ADDRESSES)
        """End of the search; may be lowered during it."""

    def tables(self) -> Iterator[KallsymsTables]:
        """Yield the candidates, each once, by ascending address of their tokens.

        :raises BadTablesError: if there are too many candidates
        """
        seen: set[KallsymsTables] = set()
        for hits, digits in enumerate(self._digits()):
            if hits == _MAX_HITS or len(seen) > _MAX_TABLES:
                raise BadTablesError("too many places look like them")
            for tables in self._around(digits):
                if tables not in seen:
                    seen.add(tables)
                    yield tables

    def _digits(self) -> Iterator[int]:
        """Yield the addresses where the tokens of the digits may be."""
        tail, end = b"", 0
        for address, piece in self._readable(self.start, self.end, 0):
            data = tail + piece if address == end else piece
            end = address + len(piece)
            offset = data.find(_DIGITS)
            while offset >= 0:
                yield end - len(data) + offset
                offset = data.find(_DIGITS, offset + 1)
            tail = data[1 - len(_DIGITS) :]

    def _readable(
        self, start: int, end: int, level: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the readable pieces of a range, with their addresses.

        If a piece cannot be read, its parts are tried. Parts of an unreadable part are
        tried only after a readable one: tokens come after names, which are larger.
        """
        was_readable = True
        for address in range(start, end, _STEPS[level]):
            if address >= self.end:
                return
            size = min(_STEPS[level], end - address)
            data = self._read(address, size)
            if data is not None:
                yield address, data
            elif size > _PAGE and (was_readable or not level):
                yield from self._readable(address, address + size, level + 1)
            was_readable = data is not None

    def _read(self, address: int, size: int) -> bytes | None:
        if address + size > _ADDRESSES:
            return None
        try:
            data: bytes = self.prog.read(address, size)
        except UNREADABLE:
            return None
        return data

    def _around(self, digits: int) -> Iterator[KallsymsTables]:
        """Find the tables around the tokens of the digits."""
        after = _TOKEN_BYTES + MAX_ALIGNMENT + INDEX_BYTES
        tokens = _find_tokens(self._image(digits, _TOKEN_BYTES, after), digits)
        if tokens is not None:
            before = self._image(tokens.table, _BEFORE_TOKENS, 0)
            for names in _find_names(before, tokens.table):
                yield from _tables(names, tokens, self.word)

    def _image(self, address: int, before: int, after: int) -> Image:
        """Read up to *before* and *after* bytes around an address; stop at a gap."""
        middle = address & -_PAGE
        low = max(self.start, address - before)
        parts = []
        for page in range(middle, address + after + 1, _PAGE):
            data = self._read(page, _PAGE)
            if data is None:
                break
            parts.append(data)
        level, start = 0, middle
        while start > low and level < len(_STEPS):
            size = min(_STEPS[level], start - low)
            data = self._read(start - size, size)
            if data is None:
                level += 1
            else:
                parts.insert(0, data)
                start -= size
        return Image(start, b"".join(parts), self.word, self.little)


class _Tokens(Struct, frozen=True):
    table: int
    index: int


class _Names(Struct, frozen=True):
    label: int
    """Address of the variable num_syms."""

    num_syms: int
    """Address of the 32 bits of this variable that hold the number."""

    names: int
    count: int
    alignment: int


def _find_tokens(image: Image, digits: int) -> _Tokens | None:
    end = digits - image.base
    for _ in range(TOKENS - ord("0")):
        end = image.data.find(0, end) + 1
        if not end:
            return None
    for alignment in (2, *_ALIGNMENTS):
        index = _align(image.base + end, alignment)
        try:
            table = digits - image.numbers(index, TOKENS, 2)[ord("0")]
            image.check_tokens(table, index)
        except BadTablesError:
            continue
        return _Tokens(table, index)
    return None


def _find_names(image: Image, tokens: int) -> list[_Names]:
    """Find the names that belong to the nearest markers before the tokens."""
    for start, markers, size in _find_markers(image, tokens):
        names = list(_find_names_before(image, tokens, start, markers, size))
        if names:
            return names
    return []


def _find_markers(image: Image, tokens: int) -> Iterator[tuple[int, list[int], int]]:
    """Yield possible tables of markers, the nearest to the tokens first.

    They are ascending numbers that begin with 0.

    :return: Address of each table, its numbers, and the bytes of a number.
    """
    sizes = {4, image.word}
    offset = tokens - image.base
    low = max(0, offset - _MARKER_BYTES)
    while (offset := image.data.rfind(bytes(4), low, offset)) >= 0:
        for size in sizes:
            # The zeros end with the number 0, or within the number after it.
            start = (image.base + offset + 4) // size * size - size
            markers = _ascending(image, start, tokens, size)
            if len(markers) > 1:
                yield start, markers, size


def _ascending(image: Image, start: int, end: int, size: int) -> list[int]:
    order: Literal["little", "big"] = "little" if image.little else "big"
    markers = [0]
    for offset in range(start - image.base + size, end - image.base, size):
        value = int.from_bytes(image.data[offset : offset + size], order)
        if not _MIN_BLOCK_BYTES <= value - markers[-1] <= _BLOCK_BYTES:
            break
        markers.append(value)
    return markers


def _find_names_before(
    image: Image, tokens: int, start: int, markers: list[int], size: int
) -> Iterator[_Names]:
    # The data after the last marker may look like one more marker.
    for count in (len(markers), len(markers) - 1):
        gap = tokens - (start + count * size)
        # Since v6.2, seqs_of_names follows the markers.
        max_gap = NAMES_PER_MARKER * count * _SEQ_BYTES + 2 * MAX_ALIGNMENT
        if count < 2 or gap > max_gap:
            continue
        for names in _counted_names(image, start, markers[:count]):
            padding = gap - _SEQ_BYTES * names.count
            if gap < MAX_ALIGNMENT or 0 <= padding < 2 * MAX_ALIGNMENT:
                yield names


def _counted_names(image: Image, start: int, markers: list[int]) -> Iterator[_Names]:
    """Yield num_syms and names before the markers at *start* that agree with these."""
    last = start - markers[-1]
    low = max(last - _BLOCK_BYTES - 2 * MAX_ALIGNMENT, image.base) + 3 & -4
    words = image.numbers(low, max(0, last - low) // 4, 4)
    most = NAMES_PER_MARKER * len(markers)
    for index, count in enumerate(words):
        if most - NAMES_PER_MARKER < count <= most:
            yield from _names_after(image, low + 4 * index, count, markers[1])


def _names_after(
    image: Image, num_syms: int, count: int, second: int
) -> Iterator[_Names]:
    # num_syms was as wide as a pointer before v4.20.
    shift = 0 if image.little or image.word == 4 else 4
    for alignment in _ALIGNMENTS:
        for label in {num_syms, num_syms - shift}:
            names = label + alignment
            if label % alignment or names <= num_syms:
                continue
            try:
                block = image.part(names, second)
                padding = image.part(num_syms + 4, names - num_syms - 4)
            except BadTablesError:
                continue
            if not any(padding) and _is_block(block):
                yield _Names(label, num_syms, names, count, alignment)


def _is_block(names: bytes) -> bool:
    """Return whether these are exactly the names between two markers."""
    for long in (False, True):
        try:
            _, end = walk(names, NAMES_PER_MARKER, long)
        except BadTablesError:
            continue
        if end == len(names):
            return True
    return False


def _tables(names: _Names, tokens: _Tokens, word: int) -> Iterator[KallsymsTables]:
    """Yield where the other tables are in each order that kernels have used."""
    alignment = names.alignment
    common = (names.names, tokens.table, tokens.index, names.num_syms)
    offsets_bytes = _align(4 * names.count, alignment)

    base = names.label - _align(word, alignment)
    yield KallsymsTables(*common, offsets=base - offsets_bytes, relative_base=base)
    addresses = names.label - _align(word * names.count, alignment)
    yield KallsymsTables(*common, addresses=addresses)

    after = _align(tokens.index + INDEX_BYTES, alignment)
    base = after + offsets_bytes
    yield KallsymsTables(*common, offsets=after, relative_base=base)
    yield KallsymsTables(*common, offsets=after)
    yield KallsymsTables(*common, addresses=after)


def _align(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment
