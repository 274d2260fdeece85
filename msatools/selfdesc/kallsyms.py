# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols of the kernel proper, from the kallsyms tables in its own memory.

A running kernel is read in the same way as a dump: its /proc/kallsyms has no more than
the tables, and may hide the addresses (kptr_restrict).
"""

import functools
from collections.abc import Mapping

import numpy as np
from _drgn import (  # type: ignore[import-not-found]
    _linux_helper_load_builtin_kallsyms as _load_builtin,
)
from drgn import PlatformFlags, Program

from msatools.errors import UNREADABLE, MissingError
from msatools.selfdesc.kallsyms_mend import PAGE, PartialImage, mended_symbols
from msatools.selfdesc.kallsyms_shape import Search
from msatools.selfdesc.kallsyms_tables import (
    BadTablesError,
    Image,
    KallsymsTables,
    addresses_of,
    expand_names,
    has_long_names,
)
from msatools.selfdesc.symbol_table import Symbols, SymbolTable, lost_symbols
from msatools.selfdesc.tables import NoNameError, index_names
from msatools.selfdesc.vmcoreinfo import vmcoreinfo

_MAX_SPAN = 32 << 20
"""Maximum size of all tables together, in bytes; a Debian 6.12 has 2.7 MiB."""

_ADDRESSES = 1 << 64


class NoSymbolsError(MissingError):
    """The kernel does not keep its symbols, or they cannot be read."""


def load_symbols(prog: Program) -> Symbols:
    """Load the symbols of the kernel proper, functions and data.

    :raises NoSymbolsError: if it lacks them; the text names what is missing
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

    It has them since Linux kernel commits 5fd8fea935a1 ("vmcoreinfo: include kallsyms
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
        # The tables are in .rodata.
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
    round trip, and it does not check the data. Where it stands in for the part in C, it
    gets a program of its own that contains nothing but checked tables.

    :raises BadTablesError: if they are not sound, or have another address for *stext*
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
    """Return where the tables begin, and their size.

    :raises BadTablesError: if they cannot be so large
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

    A page of zeros is taken for a lost one, as in a file that was copied in part.
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
    # drgn derives the encoding of names' lengths from the version. Distributions
    # backport the new encoding; so it is derived from the tables themselves.
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
    """Return the bytes of a pointer, and whether the target is little-endian."""
    assert prog.platform is not None
    flags = prog.platform.flags
    return (
        8 if flags & PlatformFlags.IS_64_BIT else 4,
        bool(flags & PlatformFlags.IS_LITTLE_ENDIAN),
    )
