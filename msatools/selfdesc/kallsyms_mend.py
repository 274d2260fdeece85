# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols that are left of kallsyms tables with lost or damaged pages.

Names follow each other and have no fixed size, so that a lost page also takes the names
behind it, up to the next marker: markers are the offsets of each 256th name. A lost
page of offsets takes the addresses of 1,024 symbols. Without the tokens, which all
names are composed of, nothing is left.

It has no I/O. It is slower than reading sound tables, which have to be tried first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.selfdesc.kallsyms_tables import (
    MAX_SYMBOLS,
    MAX_TEXT,
    NAMES_PER_MARKER,
    TWO_BYTE_LENGTH,
    BadTablesError,
    Image,
    KallsymsTables,
    ascends,
    readings,
    walk,
)
from msatools.selfdesc.symbol_table import SymbolTable
from msatools.selfdesc.tables import NONE, Words, index_names

PAGE = 4096
"""Unit of losses in bytes; pages of memory may be larger."""

_MOST_TOKENS = 512
"""Maximum number of tokens of a name: KSYM_NAME_LEN, as none is empty."""

_MOST_BYTES = NAMES_PER_MARKER * (_MOST_TOKENS + 2)
_LEAST_BYTES = NAMES_PER_MARKER * 2
"""Minimum distance of two markers: a length and one token for each name."""


class PartialImage(Struct, frozen=True):
    """Memory of which some pages are lost."""

    image: Image
    """It begins at a multiple of :data:`PAGE`; lost pages are zeros."""

    lost: npt.NDArray[np.bool_]
    """Whether a page is lost, from the image's first on."""

    def lacks(self, address: int, size: int) -> bool:
        """Return whether any of *size* bytes at *address* is lost."""
        first = (address - self.image.base) // PAGE
        last = (address + size - 1 - self.image.base) // PAGE
        return bool(self.lost[first : last + 1].any())

    def lacks_each(self, address: int, count: int, size: int) -> npt.NDArray[np.bool_]:
        """Return which of *count* numbers of *size* bytes each at *address* are lost.

        :raises BadTablesError: if they are not all in this range
        """
        self.image.part(address, count * size)
        firsts = address - self.image.base + size * np.arange(count)
        lost: npt.NDArray[np.bool_] = self.lost[firsts // PAGE]
        return lost | self.lost[(firsts + size - 1) // PAGE]


def mended_symbols(
    tables: KallsymsTables, partial: PartialImage, known: Mapping[str, int]
) -> SymbolTable:
    """Return the symbols of which both the name and the address are left.

    :param known: Addresses of some symbols, of which one has to be left.
    :raises BadTablesError: if nothing is left, or what is left contradicts itself
    """
    image = partial.image
    if partial.lacks(tables.num_syms, 4):
        raise BadTablesError("the number of symbols is lost")
    if tables.relative_base and partial.lacks(tables.relative_base, image.word):
        raise BadTablesError("the address that all others are relative to is lost")
    count = image.number(tables.num_syms)
    if not 0 < count <= MAX_SYMBOLS:
        raise BadTablesError(f"there cannot be {count:,} symbols")
    tokens = image.check_tokens(tables.token_table, tables.token_index)
    text, starts = _expanded(_names(tables, partial, count), count, tokens)
    width = image.word if tables.addresses else 4
    has_address = ~partial.lacks_each(tables.addresses or tables.offsets, count, width)
    starts[~has_address] = NONE
    after_letters = np.where(starts == NONE, starts, starts + np.uint32(1))
    rows_of = index_names(text, after_letters)
    addresses = _addresses(tables, image, has_address, rows_of, known)
    lost = int(np.count_nonzero(starts == NONE))
    return SymbolTable(text, starts, rows_of, addresses, lost)


def _expanded(
    names: Iterable[bytes | None], count: int, tokens: list[bytes]
) -> tuple[bytes, Words]:
    """Expand the names that are left, as :func:`.kallsyms_tables.expand_names` does.

    :return: The start of a lost name is :data:`NONE`.
    """
    starts = np.full(count, NONE, np.uint32)
    texts: list[bytes] = []
    end = 0
    for row, name in enumerate(names):
        if name is None:
            continue
        text = b"".join([tokens[token] for token in name])
        starts[row] = end
        texts.append(text)
        end += len(text) + 1
        if end > MAX_TEXT:
            raise BadTablesError("names of symbols are too long")
    if not texts:
        raise BadTablesError("no names of symbols are left")
    return b"\0".join([*texts, b""]), starts


def _names(
    tables: KallsymsTables, partial: PartialImage, count: int
) -> Iterator[bytes | None]:
    """Yield all names as they are stored, without their lengths; ``None`` if lost."""
    names = partial.image.data[tables.names - partial.image.base :]
    markers = _markers(tables, partial, count)
    # Few names are so long that their lengths take two bytes.
    blocks = [
        _PartialNames(tables.names, names, partial, long).blocks(markers, count)
        for long in (True, False)
    ]
    best = max(blocks, key=lambda found: sum(map(len, found)))
    for first, found in zip(range(0, count, NAMES_PER_MARKER), best, strict=True):
        yield from found
        expected = min(NAMES_PER_MARKER, count - first)
        yield from [None] * (expected - len(found))


class _PartialNames(Struct, frozen=True):
    """The names, read as a kernel with or without two-byte lengths writes them."""

    address: int
    data: bytes
    partial: PartialImage
    long: bool

    def blocks(self, markers: list[int], count: int) -> list[list[bytes]]:
        """Return the names behind each marker that are left: the first ones of 256."""
        ends: list[int | None] = [*markers[1:], None]
        wanted = (
            min(NAMES_PER_MARKER, count - first)
            for first in range(0, count, NAMES_PER_MARKER)
        )
        return [
            self._block(*block) for block in zip(markers, ends, wanted, strict=True)
        ]

    def _block(self, start: int, end: int | None, wanted: int) -> list[bytes]:
        found = []
        at = start
        stop = self._lost_from(start, end)
        for _ in range(wanted):
            name, at = self._name(at)
            if not name or (stop is not None and at > stop):
                break
            found.append(name)
        is_sound = stop is not None or (len(found) == wanted and end in (None, at))
        # Without a lost page, a block that does not end at a marker is damaged.
        return found if is_sound else []

    def _name(self, at: int) -> tuple[bytes, int]:
        """Return a name, empty if there is none, and its end."""
        head = self.data[at : at + 2]
        if len(head) < 2:
            return b"", at
        length, at = head[0], at + 1
        if self.long and length & TWO_BYTE_LENGTH:
            length, at = (length & ~TWO_BYTE_LENGTH) | head[1] << 7, at + 1
        name = self.data[at : at + length]
        is_whole = len(name) == length <= _MOST_TOKENS
        return (name if is_whole else b""), at + length

    def _lost_from(self, start: int, end: int | None) -> int | None:
        """Return where the first lost page begins; ``None`` if none is lost."""
        last = min(start + _MOST_BYTES if end is None else end, len(self.data))
        base = self.address - self.partial.image.base
        pages = self.partial.lost[
            (base + start) // PAGE : (base + last - 1) // PAGE + 1
        ]
        if not pages.any():
            return None
        first = (base + start) // PAGE + int(pages.argmax())
        return max(first * PAGE - base, start)


def _markers(tables: KallsymsTables, partial: PartialImage, count: int) -> list[int]:
    """Return the offset of each 256th name.

    :raises BadTablesError: if their table is lost, and some names as well
    """
    image = partial.image
    if count <= NAMES_PER_MARKER:
        return [0]
    for size in sorted({4, image.word}):
        markers = _stored_markers(tables, image, -(-count // NAMES_PER_MARKER), size)
        if markers:
            return markers
    names = image.data[tables.names - image.base :]
    for long in (True, False):
        try:
            markers, end = walk(names, count, long)
        except BadTablesError:
            continue
        if not partial.lacks(tables.names, end):
            return markers
    raise BadTablesError("names of symbols are lost, and where they begin")


def _stored_markers(
    tables: KallsymsTables, image: Image, blocks: int, size: int
) -> list[int]:
    """Find the table of markers between names and tokens; empty if it is lost.

    :param size: Bytes of a marker.
    """
    start = -(-tables.names // size) * size
    room = (tables.token_table - start) // size
    if room < blocks:
        return []
    words = np.asarray(image.numbers(start, room, size)).astype(np.int64)
    steps = np.diff(words)
    are_steps = (steps >= _LEAST_BYTES) & (steps <= _MOST_BYTES)
    for first in np.flatnonzero((words[:-1] == 0) & are_steps).tolist():
        last = first + blocks - 1
        if last >= len(words) or not are_steps[first:last].all():
            continue
        # Behind the last marker there are up to 256 names, and padding.
        rest = start + first * size - tables.names - int(words[last])
        if 0 < rest <= _MOST_BYTES:
            found: list[int] = words[first : last + 1].tolist()
            return found
    return []


def _addresses(
    tables: KallsymsTables,
    image: Image,
    has_address: npt.NDArray[np.bool_],
    rows_of: Callable[[str], list[int]],
    known: Mapping[str, int],
) -> npt.NDArray[np.uint64]:
    """Return all addresses, ascending; a lost one is that of the symbol before it.

    That one thus has no size, and no address is said to be in it.

    :raises BadTablesError: if no known symbol is left, or its address is another
    """
    found = [(rows_of(name), address) for name, address in known.items()]
    places = [(rows[0], address) for rows, address in found if len(rows) == 1]
    if not places:
        raise BadTablesError("no symbol is left whose address VMCOREINFO has")
    for addresses in readings(tables, image):
        left = addresses[has_address]
        if ascends(left) and any(int(addresses[row]) == at for row, at in places):
            kept = np.where(has_address, addresses, np.uint64(0))
            filled: npt.NDArray[np.uint64] = np.maximum.accumulate(kept)
            return filled
    raise BadTablesError("VMCOREINFO has other addresses of symbols")
