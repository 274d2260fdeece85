# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's timekeeper (kernel/time/timekeeping.c)."""

from typing import NamedTuple

import drgn

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.words import MAX_PLAUSIBLE, unsigned
from msatools.selfdesc.find import find_symbol, find_type, find_variable, offset_of

_TRIES = 4
"""How often a structure is read that the kernel changes meanwhile."""


class Update(NamedTuple):
    """The last update of the timekeeper, at each tick unless all CPUs are idle."""

    monotonic_ns: int
    """CLOCK_MONOTONIC then."""

    cycle: int
    """The hardware counter of the clock source then."""


def last_update(reader: Reader, losses: LossLog) -> Update | None:
    """Return the last update; ``None`` if it cannot be read."""
    try:
        core = _timekeeper(reader.prog)
        mono = "timekeeper.tkr_mono"
        base, fraction, shift, cycle, sequence = (
            offset_of(core.type_, member)
            for member in (
                f"{mono}.base",
                f"{mono}.xtime_nsec",
                f"{mono}.shift",
                f"{mono}.cycle_last",
                "seq.seqcount.sequence",
            )
        )
        size = drgn.sizeof(core.type_)
        for _ in range(_TRIES):
            data = reader.read(core.address_, size)
            before = unsigned(data, sequence, 4)
            steady = not before & 1
            if steady and reader.is_live:
                after = reader.read(core.address_ + sequence, 4)
                steady = before == unsigned(after, 0, 4)
            if steady:
                since = unsigned(data, fraction, 8) >> (unsigned(data, shift, 4) & 63)
                now = unsigned(data, base, 8) + since
                if now > MAX_PLAUSIBLE:
                    return None
                return Update(now, unsigned(data, cycle, 8))
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.lose(Loss.CLOCKS, f"the time cannot be read: {error}")
        return None
    losses.note("clocks-changing", "the kernel was just setting its clocks")
    return None


def _timekeeper(prog: drgn.Program) -> drgn.Object:
    try:
        type_ = find_type(prog, "struct tk_data")
    except MissingError:
        # Before v6.13 the type has no name.
        return find_variable(prog, "tk_core")
    try:
        # An array since there are auxiliary clocks (v6.17); the first is the system's.
        # The symbol is enough: finding out the length of the array takes long.
        symbol = find_symbol(prog, "timekeeper_data")
    except MissingError:
        symbol = find_symbol(prog, "tk_core")
    return drgn.Object(prog, type_, address=symbol.address)
