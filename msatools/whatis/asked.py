# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses as users write or paste them, and values that mark memory as invalid.

Nothing here needs a kernel.
"""

import re
from typing import Literal

from msgspec import Struct

Space = Literal["kernel", "physical", "pfn", "user", "symbol"]

_HEX = r"(?:0[xX])?[0-9a-fA-F]{1,16}"
_NAME = r"[A-Za-z_][A-Za-z0-9_.$]*"

_PLAIN = re.compile(rf"({_HEX})")
_PHYSICAL = re.compile(rf"phys:({_HEX})")
_PFN = re.compile(r"pfn:(0[xX][0-9a-fA-F]{1,13}|[0-9]{1,16})")
_USER = re.compile(rf"([0-9]{{1,7}}):({_HEX})")
_OFFSET = re.compile(rf"({_NAME})\+({_HEX})(?:/{_HEX})?")
_SYMBOL = re.compile(_NAME)

_AROUND = "[]<>(),;"
"""Characters around an address in an oops, a stack trace, or a list."""


class AskedAddress(Struct, frozen=True):
    """An address that was asked about."""

    word: str
    """As it was written."""

    space: Space
    """What the address is: virtual, physical, a page frame number, of a process, or an
    offset from a symbol."""

    number: int
    """The address, page frame number or offset."""

    pid: int | None = None
    symbol: str | None = None


def looks_like_address(word: str) -> bool:
    """Return whether a word has the form of an address, and so is no path.

    A symbol is one only with an offset: ``jiffies+0``.
    """
    found = parse(word)
    return found is not None and (found.space != "symbol" or "+" in word)


def parse(word: str) -> AskedAddress | None:
    """Parse an address; ``None`` if a word is none.

    ================ =================================================================
    Written          Meaning
    ================ =================================================================
    ``ffff88800…``   virtual address, in hex with or without ``0x``; as in an oops,
                     ``[<ffffffff81000000>]``
    ``phys:ADDR``    physical address, in hex
    ``pfn:N``        page frame number, decimal unless it begins with ``0x``
    ``PID:ADDR``     address in the memory of a process
    ``NAME+OFFSET``  symbol and offset in hex, as in an oops: ``schedule+0x4c/0xf0``
    ================ =================================================================
    """
    bare = word.strip(_AROUND)
    # Kernels print addresses in front of colons, too.
    bare = bare.removesuffix(":")
    if found := _PLAIN.fullmatch(bare):
        return AskedAddress(word, "kernel", int(found[1], 16))
    if found := _PHYSICAL.fullmatch(bare):
        return AskedAddress(word, "physical", int(found[1], 16))
    if found := _PFN.fullmatch(bare):
        return AskedAddress(
            word, "pfn", int(found[1], 16 if "x" in bare.lower() else 10)
        )
    if found := _USER.fullmatch(bare):
        return AskedAddress(word, "user", int(found[2], 16), pid=int(found[1]))
    if found := _OFFSET.fullmatch(bare):
        return AskedAddress(word, "symbol", int(found[2], 16), symbol=found[1])
    if _SYMBOL.fullmatch(bare):
        return AskedAddress(word, "symbol", 0, symbol=bare)
    return None


# --- Options of a report of msa-whatis.


class WhatisOptions(Struct, frozen=True, kw_only=True):
    """What a report answers."""

    addresses: tuple[AskedAddress, ...]

    waits: bool = False
    """Whether to look through the waits of all tasks for locks in the objects found."""


# --- Values that the kernel writes to mark memory as invalid (include/linux/poison.h).
#
# They are no addresses: who finds one in a register or an oops used memory after it was
# freed, or before it was written.


_DELTA = 0xDEAD_0000_0000_0000
"""POISON_POINTER_DELTA: CONFIG_ILLEGAL_POINTER_VALUE of all 64-bit architectures here.
"""

_POINTERS = (
    (0x100, "LIST_POISON1", "next of an entry that was deleted from its list"),
    (0x122, "LIST_POISON2", "prev of an entry that was deleted from its list"),
    (0x200, None, ""),
    (0x300, "TIMER_ENTRY_STATIC", "list entry of a static timer"),
    (0x400, "TAIL_MAPPING", "mapping of a tail page of a compound page"),
    (0x500, "MUTEX_POISON_WW_CTX", "context of a ww_mutex that is gone"),
    (0x600, None, ""),
)
"""Distance from the delta, name and meaning of each pointer, ascending. It extends to
the next one: a member of what a pointer points at is some bytes further."""

_BYTES = {
    0x6B: ("POISON_FREE", "read from a freed slab object"),
    0x5A: ("POISON_INUSE", "read from slab memory that was never written"),
    0xA5: ("POISON_END", "read from the end of a slab object"),
    0xBB: ("SLUB_RED_INACTIVE", "read from the red zone of a free slab object"),
    0xCC: ("SLUB_RED_ACTIVE", "read from the red zone of a slab object, or init code"),
    0xAA: ("PAGE_POISON", "read from a freed page"),
}
"""Maps a byte that fills memory to its name and meaning."""

_FAR = 0x1000
"""Maximum offset of a member from a poisoned pointer."""


def poison_text(address: int) -> str | None:
    """Return which poison a value is, or is a little above; ``None`` if it is none."""
    found = None
    for distance, name, meaning in _POINTERS:
        if address - _DELTA >= distance:
            found = None if name is None else (distance, name, meaning)
    if found is not None:
        distance, name, meaning = found
        return _text(name, address - _DELTA - distance, meaning)
    for byte, (name, meaning) in _BYTES.items():
        offset = address - int.from_bytes(bytes([byte]) * 8, "little")
        if 0 <= offset < _FAR:
            return _text(name, offset, meaning)
    return None


def _text(name: str, offset: int, meaning: str) -> str:
    return f"{name}{f'+{offset:#x}' if offset else ''}, a poison: {meaning}"
