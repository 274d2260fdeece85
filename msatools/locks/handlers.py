# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Whether a function on a stack takes locks of a type, by its machine code.

A lock's address in a slot of a stack is evidence only in the frames of a function that
handles such a lock: other slots are left over from calls that have returned. What a
function calls is in the dump: a ``call`` of x86-64 has the distance to its target, a
``bl`` of arm64, too. A function may also take a lock by a helper, one call away.
"""

import numpy as np
import numpy.typing as npt

from msatools.errors import UNREADABLE
from msatools.locks.base.lock import LockTypeName
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.target.arch import arch_of
from msatools.tasks.stacks import Stack

_TAKES: dict[LockTypeName, str] = {
    "rwsem": """
        down_read down_read_killable down_read_interruptible down_read_trylock
        down_write down_write_killable down_write_trylock __down_read __down_write
        down_read_nested down_write_nested
    """,
    "semaphore": "down down_interruptible down_killable down_trylock down_timeout",
    "percpu_rwsem": "__percpu_down_read percpu_down_write percpu_down_read",
    "srcu": "__srcu_read_lock __srcu_read_lock_nmisafe",
}
_ENTRIES = (
    "do_syscall_64",
    "x64_sys_call",
    "entry_",
    "kthread",
    "ret_from_fork",
    "el0",
)
"""They call all system calls, or end threads."""

_MAX_CODE = 1 << 16
"""Maximum number of bytes of a function to search."""

_IMAGES = 0xFFFF_FFFF_8000_0000
"""Where the kernel and its modules lie on x86-64: code has the low half of these."""

_PADDING = 16
"""Some kernels call into the bytes before a function, or behind its first ones."""


def takes(context: LockContext, stack: Stack, type_: LockTypeName) -> bool:
    """Return whether any function on a stack takes locks of a type.

    True also if that cannot be told: without symbols or code.
    """
    finder = _calls(context)
    takers = finder.entries(type_)
    if not takers:
        return True
    for address in stack.instructions():
        symbol = context.text.symbol(address)
        if symbol is None or symbol.name.startswith(_ENTRIES):
            continue
        targets = finder.targets(symbol.address, symbol.size)
        if targets is None or not takers.isdisjoint(targets):
            return True
        for target in targets:
            helper = context.text.symbol(target + _PADDING)
            inner = helper and finder.targets(helper.address, helper.size)
            if inner and not takers.isdisjoint(inner):
                return True
    return False


def takes_variable(
    context: LockContext, stack: Stack, type_: LockTypeName, address: int
) -> bool:
    """Return whether a function on a stack takes a lock that its code names.

    Only x86-64's ways to name the address of a variable are known.
    """
    if address < _IMAGES or arch_of(context.reader.prog).has_frame_records:
        return False
    finder = _calls(context)
    takers = finder.entries(type_)
    for place in stack.instructions():
        symbol = context.text.symbol(place)
        if symbol is None or symbol.name.startswith(_ENTRIES):
            continue
        targets = finder.targets(symbol.address, symbol.size)
        if not targets or takers.isdisjoint(targets):
            continue
        if finder.names(symbol.address, symbol.size, address):
            return True
    return False


class _Calls:
    """Targets of the calls of functions; each function is read once."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._is_arm = arch_of(context.reader.prog).has_frame_records
        self._targets: dict[int, tuple[int, ...] | None] = {}
        self._entries: dict[LockTypeName, frozenset[int]] = {}

    def entries(self, type_: LockTypeName) -> frozenset[int]:
        """Return where calls enter the functions that take locks of a type."""
        if type_ not in self._entries:
            names = _TAKES.get(type_, "").split()
            found = (self._context.layout.symbol(name) for name in names)
            self._entries[type_] = frozenset(
                address + distance
                for address in found
                if address is not None
                for distance in range(-_PADDING, _PADDING + 1)
            )
        return self._entries[type_]

    def targets(self, start: int, size: int) -> tuple[int, ...] | None:
        """Return what a function may call or end with; ``None`` if unreadable."""
        if start not in self._targets:
            self._targets[start] = self._read(start, min(size, _MAX_CODE))
        return self._targets[start]

    def names(self, start: int, size: int, address: int) -> bool:
        """Return whether an immediate, or a distance, may be that of a variable."""
        try:
            code = self._context.reader.read(start, min(size, _MAX_CODE))
        except UNREADABLE:
            return False
        values = _words_at_each_byte(code)
        after = np.arange(start + 4, start + 4 + len(values), dtype=np.uint64)
        near = after + values.astype(np.int64).astype(np.uint64)
        return bool(
            np.any(values == np.uint32(address & 0xFFFF_FFFF).view(np.int32))
            or np.any(near == np.uint64(address))
        )

    def _read(self, start: int, size: int) -> tuple[int, ...] | None:
        try:
            code = self._context.reader.read(start, size)
        except UNREADABLE:
            return None
        found = _of_arm(code, start) if self._is_arm else _of_x86(code, start)
        return tuple(dict.fromkeys(found.tolist()))


def _of_x86(code: bytes, start: int) -> npt.NDArray[np.uint64]:
    """Return the targets of all that may be ``call rel32`` or ``jmp rel32``."""
    data = np.frombuffer(code, np.uint8)
    places = np.flatnonzero((data[:-4] == 0xE8) | (data[:-4] == 0xE9))
    distance = _words_at_each_byte(code)[places + 1]
    return _moved(start + 5, places, distance.astype(np.int64))


def _words_at_each_byte(code: bytes) -> npt.NDArray[np.int32]:
    """Return the 32-bit words that begin at each byte but the last three."""
    data = np.frombuffer(code, np.uint8)
    count = max(len(data) - 3, 0)
    parts = [
        data[byte : byte + count].astype(np.uint32) << (8 * byte) for byte in range(4)
    ]
    return (parts[0] | parts[1] | parts[2] | parts[3]).astype(np.int32)


def _of_arm(code: bytes, start: int) -> npt.NDArray[np.uint64]:
    """Return the targets of all ``bl`` and ``b``."""
    words = np.frombuffer(code[: len(code) & ~3], "<u4")
    places = np.flatnonzero((words & 0x7C00_0000) == 0x1400_0000)
    distance = (words[places] << 6).astype(np.int32).astype(np.int64) >> 4
    return _moved(start, 4 * places, distance)


def _moved(
    start: int, places: npt.NDArray[np.intp], distance: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    base = np.uint64(start) + places.astype(np.uint64)
    return base + distance.astype(np.uint64)


@per_context
def _calls(context: LockContext) -> _Calls:
    return _Calls(context)
