# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols of the kernel proper, from the tables that it keeps in its own memory.

A kernel that runs is read in the same way as a dump: its /proc/kallsyms says no more
than the tables do, and may hide the addresses (kptr_restrict).
"""

from functools import partial

from _drgn import (  # type: ignore[import-not-found]
    _linux_helper_load_builtin_kallsyms as _load_builtin,
)
from drgn import FaultError, PlatformFlags, Program, SymbolIndex

from msatools.selfdesc.kallsyms_shape import Search
from msatools.selfdesc.kallsyms_tables import (
    BadTablesError,
    Image,
    KallsymsTables,
    has_long_names,
)
from msatools.selfdesc.vmcoreinfo import vmcoreinfo

_MAX_SPAN = 32 << 20
"""From the first table to the end of the last, in bytes; a Debian 6.12 has 2.7 MiB."""

_ADDRESSES = 1 << 64


class NoSymbolsError(LookupError):
    """The kernel does not keep its symbols, or they cannot be read."""


def load_symbols(prog: Program) -> SymbolIndex:
    """Load the symbols of the kernel proper, functions and data.

    :raises NoSymbolsError: if it does not have them, with what is missing in words
    """
    symbols = _vmcoreinfo_symbols(prog)
    stext = symbols.get("_stext")
    if stext is None:
        raise NoSymbolsError("VMCOREINFO does not say where the kernel is")
    tables = _named_tables(symbols)
    try:
        index = _load(prog, tables, stext) if tables else _find(prog, stext)
    except (BadTablesError, FaultError) as error:
        raise NoSymbolsError(f"the kernel's symbols are damaged: {error}") from error
    if not index(prog, "init_task", None, True):
        raise NoSymbolsError(
            "the kernel keeps symbols of functions only (it was built without "
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
    """Take the tables' places from VMCOREINFO.

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


def _find(prog: Program, stext: int) -> SymbolIndex:
    """Find the tables in the kernel's memory and load them.

    :raises NoSymbolsError: if nothing there is them, or more than one thing
    """
    search = Search(prog, stext, *_word(prog))
    index = place = None
    for tables in search.tables():
        # One table may be understood in two ways that come to the same.
        found_at = tables.names, tables.offsets or tables.addresses
        if index is not None and found_at == place:
            continue
        try:
            found = _load(prog, tables, stext)
        except (BadTablesError, FaultError):
            continue
        if index is not None:
            raise NoSymbolsError("the kernel seems to have two tables of its symbols")
        index, place = found, found_at
        # The tables are among what is read only.
        end = found(prog, "__end_rodata", None, True)
        if end:
            search.end = min(search.end, end[0].address)
    if index is None:
        raise NoSymbolsError(
            "no table of symbols is in the kernel's memory (it was built without "
            "CONFIG_KALLSYMS, or that part of its memory is missing)"
        )
    return index


def _load(prog: Program, tables: KallsymsTables, stext: int) -> SymbolIndex:
    """Load the tables, all of them with one read.

    drgn's loader asks for each name by itself, which takes seconds where a read costs a
    round trip, and it believes what it reads. So it gets a program of its own, with
    nothing in it but tables that have been checked.

    :raises BadTablesError: if they are not sound, or do not say where *stext* is
    """
    word, little = _word(prog)
    start = tables.start()
    if start < 0:
        raise BadTablesError("they are said to start before all memory")
    size = tables.end(prog.read_u32(tables.num_syms), word) - start
    if size > _MAX_SPAN or start + size > _ADDRESSES:
        raise BadTablesError(f"they are said to take {size:,} bytes")
    image = Image(start, prog.read(start, size), word, little)
    # drgn tells by the version how lengths of names are encoded. Distributions take
    # such things into older versions; the tables themselves tell.
    release = "6.1" if has_long_names(tables, image) else "6.0"
    copy = Program(
        prog.platform,
        vmcoreinfo=f"OSRELEASE={release}\nPAGESIZE=4096\n"
        f"SYMBOL(swapper_pg_dir)={stext:x}\n",
    )
    copy.add_memory_segment(start, size, partial(_read, image.data))
    try:
        index: SymbolIndex = _load_builtin(
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
    """Return how many bytes a pointer has, and whether the lowest comes first."""
    assert prog.platform is not None
    flags = prog.platform.flags
    return (
        8 if flags & PlatformFlags.IS_64_BIT else 4,
        bool(flags & PlatformFlags.IS_LITTLE_ENDIAN),
    )
