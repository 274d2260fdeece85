# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lookup of kernel symbols and names of types, and lengths of arrays of variables.

``_tables.c`` walks and indexes the tables in C; else Python and numpy do the same.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from drgn import FaultError, Program, Symbol, SymbolBinding, SymbolKind, Type, sizeof

import msatools.native as native

# --- Walks over tables of types and symbols in C (_tables.c), and indexes of names.


Words = npt.NDArray[np.uint32]

NONE = 0xFFFFFFFF
"""In place of a name's offset: the row has no name."""

NAME_LEN = 512
"""Maximum bytes of a name, with its NUL: KSYM_NAME_LEN of include/linux/kallsyms.h,
which also limits names in BTF (kernel/bpf/btf.c, __btf_name_valid())."""

_VERSION = 1


class NoNameError(ValueError):
    """The offset of a row's name is outside the text; the argument is the row."""


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    loaded = native.load("msatools.selfdesc._tables", "msa_tables_version", _VERSION)
    if loaded is None:
        return None
    here, number, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    for name, arguments in {
        "msa_walk_btf": (here, number, here, here, number, here, here, here),
        "msa_walk_names": (here, number, number, number, here),
        "msa_expand_names": (
            *(here, number, number, here, number, here),
            *(here, number, here),
        ),
        "msa_index_names": (here, number, here, number, here, word, here),
        "msa_find_name": (here, here, here, word, here, here, here, number),
    }.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = number
    return loaded


def library() -> ctypes.CDLL | None:
    """Return the compiled library; ``None`` if not built, or turned off."""
    return _loaded() if native.is_wanted() else None


def index_names(text: bytes, starts: Words) -> Callable[[str], list[int]]:
    """Return a function that returns the rows of a name, ascending.

    Names longer than :data:`NAME_LEN` are not indexed: in damaged text, very many rows
    may share one name of some MiB.

    :param text: All names, each with a NUL at its end.
    :param starts: Offset of each row's name, or :data:`NONE`.
    :raises NoNameError: if an offset is outside the text
    """
    loaded = library()
    if loaded is None:
        return _index_in_python(text, starts)
    count = len(starts)
    mask = (1 << max(8, count.bit_length())) - 1
    heads, following = np.empty(mask + 1, np.uint32), np.empty(count, np.uint32)
    done = loaded.msa_index_names(
        text, len(text), at(starts), count, at(heads), mask, at(following)
    )
    if done < 0:
        raise NoNameError(-done - 1)
    return _NameIndex(loaded, text, starts, heads, mask, following).find


class _NameIndex:
    """The rows of names, found in C.

    The addresses of the arrays are looked up once: numpy takes longer for that than C
    takes to find a name.
    """

    def __init__(
        self,
        loaded: ctypes.CDLL,
        text: bytes,
        starts: Words,
        heads: Words,
        mask: int,
        following: Words,
    ) -> None:
        self._find = loaded.msa_find_name
        # Keeps the arrays alive, as C uses their addresses.
        self._arrays = text, starts, heads, following
        self._tables = text, at(starts), at(heads), mask, at(following)
        self._make_room(8)

    def find(self, name: str) -> list[int]:
        """Return the rows of a name, ascending."""
        if "\0" in name:
            return []
        wanted = name.encode("utf-8", "surrogateescape")
        while True:
            found = self._find(*self._tables, wanted, self._room, len(self._rows))
            if found <= len(self._rows):
                ascending: list[int] = self._rows[:found].tolist()
                return ascending
            self._make_room(found)

    def _make_room(self, count: int) -> None:
        self._rows = np.empty(count, np.uint32)
        self._room = at(self._rows)


def _index_in_python(text: bytes, starts: Words) -> Callable[[str], list[int]]:
    rows: dict[bytes, list[int]] = {}
    for row, start in enumerate(starts.tolist()):
        if start == NONE:
            continue
        if start >= len(text):
            raise NoNameError(row)
        end = text.find(b"\0", start, start + NAME_LEN)
        if end < 0:
            continue
        rows.setdefault(text[start:end], []).append(row)

    def find(name: str) -> list[int]:
        return rows.get(name.encode("utf-8", "surrogateescape"), [])

    return find


def at(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array's data, as an argument for C."""
    address: int = array.ctypes.data
    return address


# --- Symbols of the kernel proper, by name and by address.
#
# It replaces drgn's own loader of kallsyms, and takes a tenth of the time: drgn reads
# each name by itself and sorts all of them, which takes longer than most reports.


_MAX_SIZE = 0x10000
"""Distance to the next symbol from which a symbol's size is unknown; as in drgn."""

_MAX_ALIASES = 64
"""Symbols at one address beyond which their size is unknown; kernels have a dozen."""

# Kinds by letters as in nm(1); lower-case ones are usually local, but not always.
_KINDS = {
    **dict.fromkeys("bcdgrv", SymbolKind.OBJECT),
    "t": SymbolKind.FUNC,
}
_WEAK = "vVwW"

Symbols = Callable[[Program, str | None, int | None, bool], list[Symbol]]
"""A symbol finder as drgn defines it, called ``symbols(prog, name, address, one)``."""


class SymbolTable:
    """A table of symbols, called like drgn's ``SymbolIndex``.

    :param text: Each symbol's letter and name, with a NUL at the end; ASCII.
    :param starts: Offset in *text* of each symbol; :data:`NONE` if it is lost.
    :param rows_of: Returns the rows of a name.
    :param addresses: The symbols' addresses, ascending.
    :param lost: Number of symbols whose name or address is lost.
    """

    def __init__(
        self,
        text: bytes,
        starts: Words,
        rows_of: Callable[[str], list[int]],
        addresses: npt.NDArray[np.uint64],
        lost: int = 0,
    ) -> None:
        self._text = text
        self._starts = starts
        self._rows_of = rows_of
        self._addresses = addresses
        self.lost = lost

    def __call__(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Return the symbols that have *name*, if any, and contain *address*, if any.

        With *one*, at most one symbol.
        """
        found = []
        for row in self._rows(name, address):
            if self._starts[row] == NONE:
                continue
            symbol = self._symbol(row)
            if address is None or _contains(symbol, address):
                found.append(symbol)
                if one:
                    break
        return found

    def before(self, address: int) -> tuple[list[Symbol], int | None]:
        """Find the symbols with the highest start address up to *address*.

        A call with an address finds no symbol of 64 KiB or more; this method does.

        :return: All symbols that start there, which may be none, as where their names
            are lost, and the start of the next symbol, ``None`` if there is no next.
        """
        addresses = self._addresses
        past = int(np.searchsorted(addresses, np.uint64(address), "right"))
        following = int(addresses[past]) if past < len(addresses) else None
        if not past:
            return [], following
        first = int(np.searchsorted(addresses, addresses[past - 1], "left"))
        rows = (row for row in range(first, past) if self._starts[row] != NONE)
        return [self._symbol(row) for row in rows], following

    def _rows(self, name: str | None, address: int | None) -> Iterable[int]:
        if name is not None:
            return self._rows_of(name)
        if address is None:
            return range(len(self._addresses))
        # The best name first: drgn takes the first of several at an address.
        addresses = self._addresses
        after = int(np.searchsorted(addresses, np.uint64(address), "right"))
        if not after:
            return ()
        rows = range(int(np.searchsorted(addresses, addresses[after - 1])), after)
        return rows if len(rows) == 1 else sorted(rows, key=self._unfitness)

    def _unfitness(self, row: int) -> int:
        """Return a sort key: global names before local ones, and the shortest first.

        drgn prefers global symbols of ELF, so a name is the same as with debug info.
        """
        start = int(self._starts[row])
        if start == NONE or not chr(self._text[start]).isupper():
            return NAME_LEN
        end = self._text.index(b"\0", start)
        # Names of a section's borders, last, as scripts/kallsyms.c recognises them.
        is_border = self._text[start + 1 : end].endswith((b"_start", b"_end"))
        return NAME_LEN + 1 if is_border else end - start

    def _symbol(self, row: int) -> Symbol:
        start = int(self._starts[row])
        end = self._text.index(b"\0", start)
        letter, name = chr(self._text[start]), self._text[start + 1 : end]
        address = int(self._addresses[row])
        size = 0
        for following in self._addresses[row + 1 : row + _MAX_ALIASES]:
            if following != address:
                distance = int(following) - address
                size = distance if distance < _MAX_SIZE else 0
                break
        return Symbol(
            name.decode("ascii"),
            address,
            size,
            _binding(letter),
            _KINDS.get(letter.lower(), SymbolKind.UNKNOWN),
        )


def lost_symbols(symbols: Symbols) -> int:
    """Return the number of symbols that were lost with pages of their table."""
    return symbols.lost if isinstance(symbols, SymbolTable) else 0


def _contains(symbol: Symbol, address: int) -> bool:
    return bool(symbol.address <= address < symbol.address + symbol.size)


def _binding(letter: str) -> SymbolBinding:
    if letter == "u":
        return SymbolBinding.UNIQUE
    if letter in _WEAK:
        return SymbolBinding.WEAK
    return SymbolBinding.GLOBAL if letter.isupper() else SymbolBinding.UNKNOWN


# --- Lengths of arrays that no type records, from the bytes up to the next symbol.
#
# This room of an array may end with padding, so it is checked against the contents of
# the elements, or against the possible lengths. If the length remains uncertain, the
# array has none.


MAX_SWAPFILES = "MAX_SWAPFILES"
"""Macro of include/linux/swap.h: entries of each array of swap devices."""


def room_of(prog: Program, symbols: Symbols, symbol: Symbol) -> int:
    """Return the bytes from a symbol up to the next one; 0 if unknown."""
    if isinstance(symbols, SymbolTable):
        _, following = symbols.before(symbol.address)
        return following - symbol.address if following is not None else 0
    same_place = symbols(prog, None, symbol.address, False)
    return max(
        (other.size for other in same_place if other.address == symbol.address),
        default=0,
    )


def counted(
    prog: Program, symbol: Symbol, array: Type, multiple: int, room: int
) -> Type:
    """Return an array type with as many elements as fit the variable's room.

    It has no length if none fits, or if the elements are to be read and cannot be.

    :param array: The type without a length.
    :param multiple: Number that divides the length. With 1, the memory is read, and
        zeros at the end do not count as elements.
    :param room: Bytes up to the next symbol.
    """
    size = sizeof(array.type)
    if multiple > 1:
        # The remainder, less than *multiple* elements, is padding.
        length = room // (size * multiple) * multiple
        return prog.array_type(array.type, length) if length else array
    try:
        data = prog.read(symbol.address, room)
    except FaultError:
        return array
    # A part of an element at the end is padding.
    filled = len(data[: len(data) // size * size].rstrip(b"\0"))
    if not filled:
        return array
    # A string ends with a NUL, which is a part of it.
    length = min(filled + 1, room) if size == 1 else -(-filled // size)
    return prog.array_type(array.type, length)


def max_swapfiles(
    prog: Program,
    symbols: Symbols,
    arrays: Iterable[tuple[Symbol, int]],
    *,
    is_exclusive: bool,
) -> int | None:
    """Return MAX_SWAPFILES; ``None`` unless just one number agrees with the kernel.

    :param arrays: Variables with MAX_SWAPFILES elements, and the bytes of an element.
    :param is_exclusive: Whether the kernel has PG_anon_exclusive.
    """
    rooms = [(symbol, size, room_of(prog, symbols, symbol)) for symbol, size in arrays]
    known = [each for each in rooms if each[2]]
    if not known or lost_symbols(symbols):
        return None
    possible = _possible_swapfiles(prog, symbols, is_exclusive)
    for symbol, size, room in known:
        following = symbol.address + room
        # Padding is less than the alignment of what follows.
        alignment = following & -following
        possible = {each for each in possible if room - alignment < each * size <= room}
    return possible.pop() if len(possible) == 1 else None


def _possible_swapfiles(
    prog: Program, symbols: Symbols, is_exclusive: bool
) -> set[int]:
    """Return the possible values of MAX_SWAPFILES, which configuration decides.

    It is 32 types of swap entries less those that stand for other than swapped pages
    (include/linux/swap.h, SWP_DEVICE_NUM and the like).
    """

    def has(function: str) -> bool:
        return bool(symbols(prog, function, None, True))

    # Types for PTE markers and for errors came with v5.19, each optional. Linux kernel
    # commit ca92ea3dc5a2 ("mm: always compile in pte markers") (in v6.2) keeps one.
    markers = {0, 1, 2} if is_exclusive else {0}
    if has("make_device_exclusive"):
        # Linux kernel commit c25465eb7630 ("mm: use single SWP_DEVICE_EXCLUSIVE entry
        # type") (in v6.15), of the series that renamed the function
        device, markers = {3}, {1}
    elif has("make_device_exclusive_range"):
        # Linux kernel commit b756a3b5e7ea ("mm: device exclusive memory access") (in
        # v5.14)
        device = {4}
    else:
        device = {0} if is_exclusive else {0, 2}
    # Linux kernel commit 6c287605fd56 ("mm: remember exclusively mapped anonymous pages
    # with PG_anon_exclusive") (in v5.19) adds a type for pages that migrate.
    migration = (3 if is_exclusive else 2) * has("migrate_pages")
    poison = int(has("memory_failure"))
    return {
        32 - migration - poison - each - marker for each in device for marker in markers
    }
