# SPDX-License-Identifier: LGPL-2.1-or-later

"""Signal handlers of processes (``struct sighand_struct``)."""

from collections.abc import Sequence
from typing import Any

import drgn
import numpy as np
from msgspec import Struct

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import lose_many
from msatools.selfdesc.find import find_type, member_of, offset_of
from msatools.zombies.model import Disposition

_DEFAULT, _IGNORE = 0, 1
"""``SIG_DFL`` and ``SIG_IGN`` (include/uapi/asm-generic/signal-defs.h)."""


class Actions(Struct, frozen=True):
    """Signal handlers of one process."""

    handlers: tuple[int, ...]
    """``sa_handler`` by signal number less one."""

    ignored: int
    """Mask of ignored signals: ``SigIgn`` of /proc/PID/status."""

    caught: int
    """Mask of signals with a handler: ``SigCgt``."""

    def disposition(self, number: int) -> Disposition:
        """Return the disposition of a signal."""
        handler = self.handlers[number - 1]
        if handler == _DEFAULT:
            return "default"
        return "ignored" if handler == _IGNORE else "handler"

    def handler(self, number: int) -> int | None:
        """Return the address of a signal's handler; ``None`` if there is none."""
        handler = self.handlers[number - 1]
        return None if handler in (_DEFAULT, _IGNORE) else handler


def read_actions(
    reader: Reader, sighands: Addresses, losses: LossLog
) -> Sequence[Actions | None]:
    """Read the signal handlers of processes; ``None`` if unreadable.

    :param sighands: Addresses of ``struct sighand_struct``; 0 if already freed.
    """
    start, count, action = reader.once(Actions, lambda: _layout(reader.prog))
    length = count * action.itemsize
    records, readable = reader.read_records(sighands + np.uint64(start), length)
    lost = ~readable & (sighands != 0)
    lose_many(losses, "struct sighand_struct", int(np.count_nonzero(lost)))
    readable &= sighands != 0
    words = records.view(action)["handler"]
    bits = np.uint64(1) << np.arange(count, dtype=np.uint64)
    ignored = ((words == _IGNORE) * bits).sum(axis=1, dtype=np.uint64)
    caught = ((words > _IGNORE) * bits).sum(axis=1, dtype=np.uint64)
    columns = words.tolist(), ignored.tolist(), caught.tolist(), readable.tolist()
    return [
        Actions(tuple(handlers), *masks) if can_be_read else None
        for handlers, *masks, can_be_read in zip(*columns, strict=True)
    ]


def _layout(prog: drgn.Program) -> tuple[int, int, np.dtype[Any]]:
    """Return the offset of the first action, their number and their record."""
    type_ = find_type(prog, "struct sighand_struct")
    array = member_of(type_, "action").type
    action: np.dtype[Any] = np.dtype(
        {
            "names": ["handler"],
            "formats": ["<u8"],
            "offsets": [offset_of(array.type, "sa.sa_handler")],
            "itemsize": drgn.sizeof(array.type),
        }
    )
    return offset_of(type_, "action"), array.length or 0, action
