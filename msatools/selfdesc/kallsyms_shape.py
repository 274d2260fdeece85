# SPDX-License-Identifier: LGPL-2.1-or-later

"""Search for a kernel's kallsyms tables by their shape, for use without VMCOREINFO.

The kernel's ``scripts/kallsyms.c`` writes these tables, each aligned, in this order:

* since v4.6: offsets, relative_base, num_syms, names, markers, token_table,
  token_index. A kernel without CONFIG_KALLSYMS_BASE_RELATIVE has a table of addresses
  instead of the first two.
* since Linux kernel commit 60443c88f3a8 ("kallsyms: Improve the performance of
  kallsyms_lookup_name()") (in v6.2, and in v6.1.y): seqs_of_names after the markers.
* since Linux kernel commit 404bad70fcf7 ("scripts/kallsyms: change the output order")
  (in v6.4): num_syms, names, markers, token_table, token_index, offsets, relative_base.
* since Linux kernel commit a081b5789255 ("kallsyms: Get rid of kallsyms relative base")
  (in v7.0): the same without relative_base, at multiples of 4 bytes.

Only the main parts of a result are checked here; the caller has to check the rest.
"""

from collections.abc import Iterator
from typing import Literal

from drgn import Program
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.selfdesc.kallsyms_tables import (
    INDEX_BYTES,
    MAX_ALIGNMENT,
    NAMES_PER_MARKER,
    TOKENS,
    BadTablesError,
    Image,
    KallsymsTables,
    walk,
)

_MAX_SEARCH = 128 << 20
"""Bytes to search from the kernel's start; a Debian 6.12 has 44 MiB."""

# Depending on the assembler, ``.align 8`` means 8 or 2^8 bytes; later kernels use
# ``.balign``. 32-bit kernels align to 4 bytes.
_ALIGNMENTS = (8, 4, 16, 256)

# The token of a character that occurs in symbols is the character itself, and each
# kernel has all digits in some name.
_DIGITS = b"".join(b"%c\0" % digit for digit in b"0123456789")

_STEPS = (1 << 20, 1 << 16, 1 << 12)
"""Bytes to read at a time; smaller steps are for pieces with missing parts."""

_PAGE = _STEPS[-1]
_BEFORE_TOKENS = 8 << 20
"""Maximum bytes from names to tokens; a Debian 6.12 has 2 MiB."""
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
    """A search for tables in the memory of a kernel."""

    def __init__(self, prog: Program, start: int, word: int, little: bool) -> None:
        self.prog = prog
        self.word = word
        self.little = little
        self.start = start & -_PAGE
        self.end = min(self.start + _MAX_SEARCH, _ADDRESSES)
        """End of the search; may be lowered during it."""

    def tables(self) -> Iterator[KallsymsTables]:
        """Yield the candidates, each once, those with the lowest tokens first.

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

        If a piece cannot be read, try smaller ones, but only if the piece before it
        could be read: tokens come after names, which are larger than any piece.
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
        """Read the memory before and after an address, up to unreadable parts."""
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
    """Address of the 32 bits of it that hold the number."""

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
    """Find names with markers before the tokens, nearest to the tokens first."""
    for start, markers, size in _find_markers(image, tokens):
        names = list(_find_names_before(image, tokens, start, markers, size))
        if names:
            return names
    return []


def _find_markers(image: Image, tokens: int) -> Iterator[tuple[int, list[int], int]]:
    """Yield runs of ascending numbers that begin with 0, nearest to the tokens first.

    :return: Address of each run, its numbers, and the bytes of a number.
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
    # The number after the last marker may happen to look like one more.
    for count in (len(markers), len(markers) - 1):
        gap = tokens - (start + count * size)
        # Room for seqs_of_names.
        max_gap = NAMES_PER_MARKER * count * _SEQ_BYTES + 2 * MAX_ALIGNMENT
        if count < 2 or gap > max_gap:
            continue
        for names in _counted_names(image, start, markers[:count]):
            padding = gap - _SEQ_BYTES * names.count
            if gap < MAX_ALIGNMENT or 0 <= padding < 2 * MAX_ALIGNMENT:
                yield names


def _counted_names(image: Image, start: int, markers: list[int]) -> Iterator[_Names]:
    """Find a number of symbols, followed by names, that agree with the markers."""
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
    """Yield the tables in each order that kernels have used."""
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
