# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses as users write or paste them; nothing here needs a kernel."""

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
