# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the tables of a kernel's symbols by their shape, where nothing names them.

What the kernel's ``scripts/kallsyms.c`` writes has been this, each table aligned:

* since v4.6: offsets, relative_base, num_syms, names, markers, token_table,
  token_index. A kernel whose addresses have no base has a table of addresses instead of
  the first two.
* since Linux kernel commit 60443c88f3a8 ("kallsyms: Improve the performance of
  kallsyms_lookup_name()") (in v6.2, and in v6.1.y): seqs_of_names after the markers.
* since Linux kernel commit 404bad70fcf7 ("scripts/kallsyms: change the output order")
  (in v6.4): num_syms, names, markers, token_table, token_index, offsets, relative_base.
* since Linux kernel commit a081b5789255 ("kallsyms: Get rid of kallsyms relative base")
  (in v7.0): the same without relative_base, at multiples of 4 bytes.

What is found here fits in its main parts; the caller has to check all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drgn import FaultError, Program

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
"""From the kernel's start, in bytes; a Debian 6.12 is 44 MiB large."""

# The assembler takes ``.align 8`` for 8 bytes or for two to the power of 8; ``.balign``
# put an end to that. 32-bit kernels have 4 in its place.
_ALIGNMENTS = (8, 4, 16, 256)

# Letters of symbols stand for themselves, and each kernel has all digits in some name.
_DIGITS = b"".join(b"%c\0" % digit for digit in b"0123456789")

_STEPS = (1 << 20, 1 << 16, 1 << 12)
"""How much to read at a time, in bytes; less where some of it is missing."""

_PAGE = _STEPS[-1]
_BEFORE_TOKENS = 8 << 20
"""The most bytes from names to tokens; a Debian 6.12 has 2 MiB."""
_MARKER_BYTES = 2 << 20
"""The most bytes from markers to tokens: enough for seqs_of_names of 690,000 names."""

_TOKEN_BYTES = 1 << 16
_BLOCK_BYTES = NAMES_PER_MARKER * 514
"""The most bytes that names between two markers take, each of up to 512 letters."""
_LEAST_BLOCK = NAMES_PER_MARKER * 2
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
        """Where to end; may be lowered while it is under way."""

    def tables(self) -> Iterator[KallsymsTables]:
        """Find what may be the tables, each once, lowest tokens first.

        :raises BadTablesError: if there are so many that none can be believed
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
        """Find where the tokens that stand for digits are."""
        tail, end = b"", 0
        for address, piece in self._readable(self.start, self.end, 0):
            data = tail + piece if address == end else piece
            end = address + len(piece)
            at = data.find(_DIGITS)
            while at >= 0:
                yield end - len(data) + at
                at = data.find(_DIGITS, at + 1)
            tail = data[1 - len(_DIGITS) :]

    def _readable(
        self, start: int, end: int, level: int
    ) -> Iterator[tuple[int, bytes]]:
        """Read piece after piece, passing over what cannot be read.

        Where some of a piece is missing, smaller ones are tried, but only if what lies
        before could be read: before tokens there are names, for more than any such
        piece.
        """
        before = True
        for address in range(start, end, _STEPS[level]):
            if address >= self.end:
                return
            size = min(_STEPS[level], end - address)
            data = self._read(address, size)
            if data is not None:
                yield address, data
            elif size > _PAGE and (before or not level):
                yield from self._readable(address, address + size, level + 1)
            before = data is not None

    def _read(self, address: int, size: int) -> bytes | None:
        if address + size > _ADDRESSES:
            return None
        try:
            data: bytes = self.prog.read(address, size)
        except FaultError:
            return None
        return data

    def _around(self, digits: int) -> Iterator[KallsymsTables]:
        """Find the other tables from where the digits among the tokens are."""
        most = _TOKEN_BYTES + MAX_ALIGNMENT + INDEX_BYTES
        tokens = _find_tokens(self._image(digits, _TOKEN_BYTES, most), digits)
        if tokens is not None:
            before = self._image(tokens.table, _BEFORE_TOKENS, 0)
            for names in _find_names(before, tokens.table):
                yield from _tables(names, tokens, self.word)

    def _image(self, address: int, before: int, after: int) -> Image:
        """Read what lies before and after an address, as far as it can be read."""
        middle = address & -_PAGE
        low = max(self.start, address - before)
        parts = []
        for page in range(middle, address + after + 1, _PAGE):
            data = self._read(page, _PAGE)
            if data is None:
                break
            parts.append(data)
        level, at = 0, middle
        while at > low and level < len(_STEPS):
            size = min(_STEPS[level], at - low)
            data = self._read(at - size, size)
            if data is None:
                level += 1
            else:
                parts.insert(0, data)
                at -= size
        return Image(at, b"".join(parts), self.word, self.little)


@dataclass(frozen=True)
class _Tokens:
    table: int
    index: int


@dataclass(frozen=True)
class _Names:
    label: int
    """Where num_syms was put, whatever part of it holds the number."""

    num_syms: int
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
    """Find names, the markers of which come before the tokens."""
    for at, markers, size in _find_markers(image, tokens):
        found = list(_find_names_before(image, tokens, at, markers, size))
        if found:
            return found
    return []


def _find_markers(image: Image, tokens: int) -> Iterator[tuple[int, list[int], int]]:
    """Find ascending numbers that begin with 0, nearest to the tokens first.

    :return: where they are, the numbers, and the size of each in bytes
    """
    sizes = {4, image.word}
    at = tokens - image.base
    low = max(0, at - _MARKER_BYTES)
    while (at := image.data.rfind(bytes(4), low, at)) >= 0:
        for size in sizes:
            # The zeros end here, or within the number after the one that is 0.
            start = (image.base + at + 4) // size * size - size
            markers = _ascending(image, start, tokens, size)
            if len(markers) > 1:
                yield start, markers, size


def _ascending(image: Image, start: int, end: int, size: int) -> list[int]:
    order: Literal["little", "big"] = "little" if image.little else "big"
    markers = [0]
    for at in range(start - image.base + size, end - image.base, size):
        value = int.from_bytes(image.data[at : at + size], order)
        if not _LEAST_BLOCK <= value - markers[-1] <= _BLOCK_BYTES:
            break
        markers.append(value)
    return markers


def _find_names_before(
    image: Image, tokens: int, at: int, markers: list[int], size: int
) -> Iterator[_Names]:
    # A number that happens to follow on the markers may look like one more.
    for number in (len(markers), len(markers) - 1):
        gap = tokens - (at + number * size)
        # What seqs_of_names takes, if it is there.
        most = NAMES_PER_MARKER * number * _SEQ_BYTES + 2 * MAX_ALIGNMENT
        if number < 2 or gap > most:
            continue
        for names in _counted_names(image, at, markers[:number]):
            seqs = gap - _SEQ_BYTES * names.count
            if gap < MAX_ALIGNMENT or 0 <= seqs < 2 * MAX_ALIGNMENT:
                yield names


def _counted_names(image: Image, at: int, markers: list[int]) -> Iterator[_Names]:
    """Find a number of symbols, and after it names, that fit to the markers."""
    last = at - markers[-1]
    low = max(last - _BLOCK_BYTES - 2 * MAX_ALIGNMENT, image.base) + 3 & -4
    words = image.numbers(low, max(0, last - low) // 4, 4)
    most = NAMES_PER_MARKER * len(markers)
    least = most - NAMES_PER_MARKER
    for number, count in enumerate(words):
        if least < count <= most:
            yield from _names_after(image, low + 4 * number, count, markers[1])


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
    """Return whether there are exactly as many names here as between two markers."""
    for long in (False, True):
        try:
            _, end = walk(names, NAMES_PER_MARKER, long)
        except BadTablesError:
            continue
        if end == len(names):
            return True
    return False


def _tables(names: _Names, tokens: _Tokens, word: int) -> Iterator[KallsymsTables]:
    """Return where addresses are, in each order that there has been."""
    alignment = names.alignment
    places = (names.names, tokens.table, tokens.index, names.num_syms)
    offsets_bytes = _align(4 * names.count, alignment)

    base = names.label - _align(word, alignment)
    yield KallsymsTables(*places, offsets=base - offsets_bytes, relative_base=base)
    addresses = names.label - _align(word * names.count, alignment)
    yield KallsymsTables(*places, addresses=addresses)

    after = _align(tokens.index + INDEX_BYTES, alignment)
    base = after + offsets_bytes
    yield KallsymsTables(*places, offsets=after, relative_base=base)
    yield KallsymsTables(*places, offsets=after)
    yield KallsymsTables(*places, addresses=after)


def _align(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment
