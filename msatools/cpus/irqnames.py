# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of interrupts' handlers and controllers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.structs import Booleans, read_structs

MAX_HANDLERS = 64
"""Maximum number of handlers of one interrupt that are read."""

_MAX_NAME = 256

_ACTION = {
    "next": ("next",),
    "name": ("name",),
    "handler": ("handler",),
    "thread": ("thread_fn",),
}
_CHIP = {
    "name": ("name",),
    "set_affinity": ("irq_set_affinity",),
}


class Chips(Struct, frozen=True):
    """The ``struct irq_chip`` of each interrupt's controller."""

    names: tuple[str | None, ...]
    can_move: Booleans
    """Whether it can move the interrupt to another CPU; true if unreadable."""


class Handler(NamedTuple):
    """A handler of an interrupt."""

    name: str
    function: int
    """Its address; of one that only stands for its thread's, that."""


class IrqNames:
    """Strings of the kernel, cached by address."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._known: dict[int, str | None] = {0: None}

    def at(self, address: int) -> str | None:
        """Return a name; ``None`` for NULL, and, with a note, if unreadable."""
        if address not in self._known:
            self._known[address] = self._read(address)
        return self._known[address]

    def all_at(self, addresses: Addresses) -> tuple[str | None, ...]:
        """Return many names."""
        return tuple(self.at(address) for address in addresses.tolist())

    def _read(self, address: int) -> str | None:
        try:
            return read_string(self._reader, address, _MAX_NAME)
        except UNREADABLE as error:
            self._losses.lose(Loss.NAMES, f"a name cannot be read: {error}")
            return None


def handlers(
    reader: Reader,
    actions: Addresses,
    primaries: Sequence[int],
    names: IrqNames,
    losses: LossLog,
) -> tuple[tuple[Handler, ...], ...]:
    """Return each interrupt's handlers, in their order.

    :param primaries: Addresses of handlers that only stand for the thread's.
    :param actions: Address of each interrupt's first ``struct irqaction``, or NULL.
    """
    found: list[list[Handler]] = [[] for _ in actions]
    rows = np.flatnonzero(actions)
    actions = actions[rows]
    for _ in range(MAX_HANDLERS):
        read = read_structs(reader, "struct irqaction", _ACTION, actions, losses)
        stands_for = np.isin(read["handler"], np.array(primaries, np.uint64))
        function = np.where(stands_for, read["thread"], read["handler"])
        for row, name, address in zip(
            rows.tolist(), names.all_at(read["name"]), function.tolist(), strict=True
        ):
            if name:
                found[row].append(Handler(name, address))
        more = read["next"] != 0
        rows, actions = rows[more], read["next"][more]
        if not len(rows):
            break
    else:
        text = "some interrupts have an impossible number of handlers"
        losses.lose(Loss.HANDLERS, text, count=len(rows))
    return tuple(map(tuple, found))


def read_chips(
    reader: Reader, chips: Addresses, names: IrqNames, losses: LossLog
) -> Chips:
    """Read the controller of each interrupt."""
    read = read_structs(reader, "struct irq_chip", _CHIP, chips, losses)
    unreadable = ~read.readable & (chips != 0)
    return Chips(names.all_at(read["name"]), unreadable | (read["set_affinity"] != 0))
