# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lengths of arrays that no type says, from the room that the kernel gives them.

Up to the next symbol there is padding, too, so that room alone says little: it is held
against what the elements are, or what the length can be, and what is left open stays
an array without a length.
"""

from collections.abc import Iterable

from drgn import FaultError, Program, Symbol, Type, sizeof

from msatools.selfdesc.tables import Symbols, SymbolTable, lost_symbols

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
    """Return an array with as many elements as fit its room; without, if unreadable.

    :param multiple: Number that divides the length. With 1, zeros at the end are no
        elements.
    """
    size = sizeof(array.type)
    if multiple > 1:
        # What is left is padding, which is less than so many elements.
        length = room // (size * multiple) * multiple
        return prog.array_type(array.type, length) if length else array
    try:
        data = prog.read(symbol.address, room)
    except FaultError:
        return array
    # What is no whole element is padding.
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

    :param arrays: Variables that have so many elements, and the bytes of each element.
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
    """Return what the configuration can leave of the 32 types of swap entries.

    Those that are no swap devices stand for pages that are elsewhere
    (include/linux/swap.h, SWP_DEVICE_NUM and the like).
    """

    def has(function: str) -> bool:
        return bool(symbols(prog, function, None, True))

    # Linux kernel commit ca92ea3dc5a2 ("mm: always compile in pte markers") (in v6.2)
    # leaves one of the types for markers and errors that came with v5.19.
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
    # with PG_anon_exclusive") (in v5.19) adds one for pages that migrate.
    migration = (3 if is_exclusive else 2) * has("migrate_pages")
    poison = int(has("memory_failure"))
    return {
        32 - migration - poison - each - marker for each in device for marker in markers
    }
