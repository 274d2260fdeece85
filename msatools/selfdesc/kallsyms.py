# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols of the kernel proper, from the kallsyms tables in its own memory.

If pages of the tables are lost or damaged, the remaining symbols are read.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from _drgn import (  # type: ignore[import-not-found]
    _linux_helper_load_builtin_kallsyms as _load_builtin,
)
from drgn import PlatformFlags, Program
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.selfdesc.find import vmcoreinfo
from msatools.selfdesc.kallsyms_tables import (
    MAX_SYMBOLS,
    MAX_TEXT,
    NAMES_PER_MARKER,
    TWO_BYTE_LENGTH,
    BadTablesError,
    Image,
    KallsymsTables,
    Search,
    addresses_of,
    ascends,
    expand_names,
    has_long_names,
    readings,
    walk,
)
from msatools.selfdesc.tables import (
    NONE,
    NoNameError,
    Symbols,
    SymbolTable,
    Words,
    index_names,
    lost_symbols,
)

# --- Symbols that are left of kallsyms tables with lost or damaged pages.
#
# Names have no fixed size and no address: after a lost page, the next name that can be
# found is that of the next marker (markers are the offsets of each 256th name). A lost
# page of offsets takes the addresses of 1,024 symbols. Without the tokens, of which all
# names are composed, no symbol is left.
#
# No I/O here. Loading sound tables is faster, and has to be tried first.


PAGE = 4096
"""Unit of losses in bytes; pages of memory may be larger."""

_MOST_TOKENS = 512
"""Maximum number of tokens of a name: KSYM_NAME_LEN, as no token is empty."""

_MOST_BYTES = NAMES_PER_MARKER * (_MOST_TOKENS + 2)
_LEAST_BYTES = NAMES_PER_MARKER * 2
"""Minimum distance of two markers: a length and one token for each name."""


class PartialImage(Struct, frozen=True):
    """Memory of which some pages are lost."""

    image: Image
    """The memory, from a multiple of :data:`PAGE` on; lost pages are zeros."""

    lost: npt.NDArray[np.bool_]
    """Whether each page is lost, in the order of the image's pages."""

    def lacks(self, address: int, size: int) -> bool:
        """Return whether any of *size* bytes at *address* is lost."""
        first = (address - self.image.base) // PAGE
        last = (address + size - 1 - self.image.base) // PAGE
        return bool(self.lost[first : last + 1].any())

    def lacks_each(self, address: int, count: int, size: int) -> npt.NDArray[np.bool_]:
        """Return which of *count* numbers of *size* bytes each at *address* are lost.

        :raises BadTablesError: if they are not all in the image
        """
        self.image.part(address, count * size)
        firsts = address - self.image.base + size * np.arange(count)
        lost: npt.NDArray[np.bool_] = self.lost[firsts // PAGE]
        return lost | self.lost[(firsts + size - 1) // PAGE]


def mended_symbols(
    tables: KallsymsTables, partial: PartialImage, known: Mapping[str, int]
) -> SymbolTable:
    """Return the symbols whose name and address are both in the dump.

    :param known: Maps names to addresses, from VMCOREINFO. The tables must have at
        least one of these symbols, at that address.
    :raises BadTablesError: if they have none, or the tables contradict each other
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
    # Whether lengths may take two bytes is unknown: the right choice yields more names.
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
    """The names table, read with (``long``) or without two-byte lengths of names."""

    address: int
    data: bytes
    partial: PartialImage
    long: bool

    def blocks(self, markers: list[int], count: int) -> list[list[bytes]]:
        """Return a list per marker: the names from it up to the first lost name."""
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
        """Return the name at an offset, empty if it is not whole, and its end."""
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
        """Return the offset of the first lost byte; ``None`` if no page is lost.

        :param end: End of the block; ``None`` for the last, of unknown size.
        """
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

    :raises BadTablesError: if the table of markers is lost, and some names as well
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

    As a lost page has more than ``_MAX_ALIASES`` addresses, the symbol before it thus
    has size 0, and contains no address.

    :param has_address: Whether the address of each symbol is in the dump.
    :raises BadTablesError: if no known symbol is left, or all have other addresses
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


# --- Symbols of the kernel proper, from the kallsyms tables in its own memory.
#
# A running kernel is read in the same way as a dump: its /proc/kallsyms has no more
# than the tables, and may hide the addresses (kptr_restrict).


_MAX_SPAN = 32 << 20
"""Maximum size of all tables together, in bytes; Debian's 6.12 has 2.7 MiB."""

_ADDRESSES = 1 << 64


class NoSymbolsError(MissingError):
    """The kernel does not keep its symbols, or they cannot be read."""


def load_symbols(prog: Program) -> Symbols:
    """Load the symbols of the kernel proper, functions and data.

    :raises NoSymbolsError: if the kernel lacks them; the text names what is missing
    """
    symbols = _vmcoreinfo_symbols(prog)
    stext = symbols.get("_stext")
    if stext is None:
        raise NoSymbolsError("VMCOREINFO does not say where the kernel is")
    tables = _named_tables(symbols)
    try:
        if tables is None:
            index = _find(prog, stext)
        else:
            index = _load_or_mend(prog, tables, {"_stext": stext, **symbols})
    except (*UNREADABLE, BadTablesError) as error:
        raise NoSymbolsError(f"the kernel's symbols are damaged: {error}") from error
    if not index(prog, "init_task", None, True):
        lost = lost_symbols(index)
        raise NoSymbolsError(
            f"{lost:,} of the kernel's symbols are lost, init_task among them"
            if lost
            else "the kernel keeps symbols of functions only (it was built without "
            "CONFIG_KALLSYMS_ALL)"
        )
    return index


def _vmcoreinfo_symbols(prog: Program) -> dict[str, int]:
    symbols = {}
    for key, value in vmcoreinfo(prog).items():
        if key.startswith("SYMBOL(") and key.endswith(")"):
            try:
                address = int(value, 16)
            except ValueError:
                continue
            if 0 < address < _ADDRESSES:
                symbols[key[len("SYMBOL(") : -1]] = address
    return symbols


def _named_tables(symbols: dict[str, int]) -> KallsymsTables | None:
    """Return the tables' addresses from VMCOREINFO; ``None`` if they are not in it.

    They are since Linux kernel commits 5fd8fea935a1 ("vmcoreinfo: include kallsyms
    symbols") and f09bddbd8661 ("vmcoreinfo: add kallsyms_num_syms symbol") (in v6.0).
    """
    tables = KallsymsTables(
        **{
            name: symbols.get(f"kallsyms_{name}", 0)
            for name in KallsymsTables.__annotations__
        }
    )
    always = (tables.names, tables.token_table, tables.token_index, tables.num_syms)
    return tables if all(always) and (tables.offsets or tables.addresses) else None


def _find(prog: Program, stext: int) -> Symbols:
    """Find the tables in the kernel's memory and load them.

    :raises NoSymbolsError: if no tables are found, or more than one set of tables
    """
    search = Search(prog, stext, *_word(prog))
    index = addresses = None
    for tables in search.tables():
        # The same tables may be found with two equivalent layouts.
        candidate = tables.names, tables.offsets or tables.addresses
        if index is not None and candidate == addresses:
            continue
        try:
            loaded = _load(prog, tables, stext)
        except (*UNREADABLE, BadTablesError):
            continue
        if index is not None:
            raise NoSymbolsError("the kernel seems to have two tables of its symbols")
        index, addresses = loaded, candidate
        # The tables are in .rodata: another set beyond its end need not be searched.
        end = loaded(prog, "__end_rodata", None, True)
        if end:
            search.end = min(search.end, end[0].address)
    if index is None:
        raise NoSymbolsError(
            "no table of symbols is in the kernel's memory (it was built without "
            "CONFIG_KALLSYMS, or that part of its memory is missing)"
        )
    return index


def _load_or_mend(
    prog: Program, tables: KallsymsTables, known: Mapping[str, int]
) -> Symbols:
    """Load the tables, or what is left of them if pages of them are lost.

    :raises BadTablesError: if nothing is left
    """
    try:
        return _load(prog, tables, known["_stext"])
    except (*UNREADABLE, BadTablesError):
        start, size = _span(prog, tables)
        partial = _read_pages(prog, start & -PAGE, start + size)
        try:
            return mended_symbols(tables, partial, known)
        except (BadTablesError, NoNameError) as error:
            lost = int(partial.lost.sum())
            raise BadTablesError(f"{error} ({lost} pages)") from error


def _load(prog: Program, tables: KallsymsTables, stext: int) -> Symbols:
    """Load the tables, all of them with one read.

    drgn's loader reads each name separately, which takes seconds if a read costs a
    round trip, and it does not check the data. It is used only if the part in C was not
    built, on a program of its own that contains nothing but checked tables.

    :raises BadTablesError: if the tables are not sound, or have another ``_stext``
    """
    word, little = _word(prog)
    start, size = _span(prog, tables)
    image = Image(start, prog.read(start, size), word, little)
    long = has_long_names(tables, image)
    expanded = expand_names(tables, image, long)
    if expanded is None:
        return _load_with_drgn(prog, tables, image, stext, long)
    text, starts = expanded
    rows_of = index_names(text, starts + np.uint32(1))
    stext_rows = rows_of("_stext")
    if not stext_rows:
        raise BadTablesError("there is no symbol _stext")
    addresses = addresses_of(tables, image, stext_rows[0], stext)
    return SymbolTable(text, starts, rows_of, addresses)


def _span(prog: Program, tables: KallsymsTables) -> tuple[int, int]:
    """Return the lowest address of the tables, and the bytes from there to their end.

    :raises BadTablesError: if these are impossible
    """
    start = tables.start()
    if start < 0:
        raise BadTablesError("they are said to start before all memory")
    word, _ = _word(prog)
    size = tables.end(prog.read_u32(tables.num_syms), word) - start
    if size > _MAX_SPAN or start + size > _ADDRESSES:
        raise BadTablesError(f"they are said to take {size:,} bytes")
    return start, size


def _read_pages(prog: Program, start: int, end: int) -> PartialImage:
    """Read memory page by page, with zeros for those that cannot be read.

    A page of zeros counts as lost: a file that was copied in part has such pages.
    """
    nothing = bytes(PAGE)
    pages = []
    for address in range(start, end, PAGE):
        try:
            pages.append(prog.read(address, PAGE))
        except UNREADABLE:
            pages.append(nothing)
    lost = np.array([page == nothing for page in pages])
    return PartialImage(Image(start, b"".join(pages), *_word(prog)), lost)


def _load_with_drgn(
    prog: Program, tables: KallsymsTables, image: Image, stext: int, long: bool
) -> Symbols:
    # drgn derives from the version whether lengths of names may take two bytes (6.1).
    # Distributions backport that; so the version here follows from the tables.
    copy = Program(
        prog.platform,
        vmcoreinfo=f"OSRELEASE={'6.1' if long else '6.0'}\nPAGESIZE=4096\n"
        f"SYMBOL(swapper_pg_dir)={stext:x}\n",
    )
    copy.add_memory_segment(
        image.base, len(image.data), functools.partial(_read, image.data)
    )
    try:
        index: Symbols = _load_builtin(
            copy,
            tables.names,
            tables.token_table,
            tables.token_index,
            tables.num_syms,
            tables.offsets,
            tables.relative_base,
            tables.addresses,
            stext,
        )
    except Exception as error:
        # drgn raises bare exceptions here.
        raise BadTablesError(str(error)) from error
    found = index(prog, "_stext", None, True)
    if not found or found[0].address != stext:
        raise BadTablesError("VMCOREINFO has another address for _stext")
    return index


def _read(data: bytes, address: int, count: int, offset: int, physical: bool) -> bytes:
    return data[offset : offset + count]


def _word(prog: Program) -> tuple[int, bool]:
    """Return the size of a pointer in bytes, and whether it is little-endian."""
    assert prog.platform is not None
    flags = prog.platform.flags
    return (
        8 if flags & PlatformFlags.IS_64_BIT else 4,
        bool(flags & PlatformFlags.IS_LITTLE_ENDIAN),
    )
