# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Reads stack traces that the kernel keeps once each (lib/stackdepot.c).

drgn has ``stack_depot_fetch()``, but not the pools of 7.0, and without debug info their
type is unknown: 6.3 renamed them, and later they became an array that is allocated.
"""

from functools import cached_property

import drgn
from msgspec import Struct

from msatools.errors import LOST, DamagedDataError, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.unattributed.symbolnames import SymbolNames
from msatools.selfdesc.find import drgn_lookups, find_type, offset_of
from msatools.tasks.text import kernel_symbol

_ALIGN_SHIFT = 4
"""DEPOT_STACK_ALIGN: offsets in a pool are multiples of 16 bytes."""

_MAX_FRAMES = 64
"""CONFIG_STACKDEPOT_MAX_FRAMES is 64."""


class _DepotLayout(Struct, frozen=True):
    """Where records are, and what they look like."""

    pools: int
    """Address of the array of pools."""

    size: int
    entries: int
    """Offsets of the number of frames and of the first, in ``struct stack_record``."""


class StackDepot:
    """Looks up stack traces by their handles."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._layout: _DepotLayout | None = None

    @cached_property
    def _symbols(self) -> SymbolNames:
        return SymbolNames(self._reader, self._losses)

    def stack(self, handle: int) -> tuple[str, ...] | None:
        """Return the function names of a stack, innermost first; ``None`` if lost."""
        try:
            with drgn_lookups:
                return tuple(map(self._name, self._addresses(handle)))
        except LOST as error:
            self._losses.lose(
                Loss.STACKS, f"cannot read a stack of page_owner: {error}"
            )
            return None

    def _addresses(self, handle: int) -> list[int]:
        if self._layout is None:
            self._layout = _layout(self._reader)
        reader, layout = self._reader, self._layout
        index, offset = _parts(reader.prog, handle)
        pool = reader.words(layout.pools + 8 * index, 1)[0].item() if index >= 0 else 0
        if not pool:
            raise DamagedDataError(f"no pool of stack {handle:#x}", 0)
        record = pool + (offset << _ALIGN_SHIFT)
        frames = int.from_bytes(reader.read(record + layout.size, 4), "little")
        count = min(frames, _MAX_FRAMES)
        found: list[int] = reader.words(record + layout.entries, count).tolist()
        return found

    def _name(self, address: int) -> str:
        # Behind the call, which may be the last instruction of its function.
        symbol = self._symbols.name(address - 1)
        if symbol is None:
            return hex(address)
        if symbol.symbol is None or symbol.module is None:
            return symbol.symbol or symbol.name
        return f"{symbol.symbol} [{symbol.module}]"


def _parts(prog: drgn.Program, handle: int) -> tuple[int, int]:
    """Return the number of the pool, and the offset in it, of a handle."""
    data = handle.to_bytes(4, "little")
    parts = drgn.Object.from_bytes_(prog, "union handle_parts", data)
    offset = parts.offset.value_()
    # a6c1d9cb9a68 ("stackdepot: rename pool_index to pool_index_plus_1") (in v6.9)
    if parts.type_.has_member("pool_index_plus_1"):
        return parts.pool_index_plus_1.value_() - 1, offset
    # 961c949b012f ("lib/stackdepot: rename slab to pool") (in v6.3)
    if parts.type_.has_member("pool_index"):
        return parts.pool_index.value_(), offset
    return parts.slabindex.value_(), offset


def _layout(reader: Reader) -> _DepotLayout:
    prog = reader.prog
    record = find_type(prog, "struct stack_record")
    return _DepotLayout(
        pools=_pools(reader),
        size=offset_of(record, "size"),
        entries=offset_of(record, "entries"),
    )


def _pools(reader: Reader) -> int:
    """Return the address of the first pool's address."""
    prog = reader.prog
    try:
        pools = kernel_symbol(prog, "stack_pools")
    except MissingError:
        return kernel_symbol(prog, "stack_slabs")
    try:
        # With the maximum a variable, the pools are allocated (seen in 7.3).
        kernel_symbol(prog, "stack_max_pools")
    except MissingError:
        return pools
    return int(reader.words(pools, 1)[0])
