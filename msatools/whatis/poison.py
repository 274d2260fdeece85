# SPDX-License-Identifier: LGPL-2.1-or-later

"""Values that the kernel writes to mark memory as invalid (include/linux/poison.h).

They are no addresses: who finds one in a register or an oops used memory after it was
freed, or before it was written.
"""

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
