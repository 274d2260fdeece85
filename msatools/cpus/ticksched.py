# SPDX-License-Identifier: LGPL-2.1-or-later

"""The last tick of each CPU, and its next timer interrupt.

kernel/time/tick-sched.c, kernel/time/hrtimer.c
"""

import drgn
import numpy as np
from msgspec import Struct

from msatools.cpus.idle_time import TickRecords, bits_at, read_tick_records
from msatools.errors import LOST
from msatools.kernel.jiffies import Jiffies, read_jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.structs import lose_many
from msatools.kernel.words import MAX_PLAUSIBLE
from msatools.selfdesc.find import find_type, member_of, offset_of

_FAR_NS = 1_000_000_000
"""Much more than jiffies, or the last tick of a busy CPU, may lag."""


class TickSched(Struct, frozen=True):
    """One value a CPU, in the order of ``PerCpu.cpus``."""

    stopped: tuple[bool | None, ...]
    """Whether its tick is stopped; ``None`` if unreadable."""

    ticked_ns: tuple[int | None, ...]
    """CLOCK_MONOTONIC at which its last tick was due; ``None`` if unknown."""

    due_ns: tuple[int | None, ...]
    """CLOCK_MONOTONIC at which its next timer interrupt is due, also if its tick is
    stopped; ``None`` if none is due, or if unknown."""

    latest_ns: int
    """The latest of all these stamps, and of the update of jiffies; 0 if none."""


def read_tick_sched(reader: Reader, percpu: PerCpu, losses: LossLog) -> TickSched:
    """Read the last tick and the next timer interrupt of each CPU.

    The timer of a running tick expires one tick after the last one was due. A stopped
    tick has its last time stored (``last_tick``); a later tick caused by a timer is
    known by its jiffies (``last_tick_jiffies``). Offline CPUs have no tick. Ticks of
    the clock event device itself (without high resolution timers and NO_HZ) are not
    recorded.
    """
    try:
        jiffies = read_jiffies(reader.prog)
        found = read_tick_records(reader, percpu, losses)
    except LOST as error:
        losses.lose(Loss.TICKS, f"cannot determine when CPUs ticked: {error}")
        unknown = (None,) * len(percpu.cpus)
        return TickSched(unknown, unknown, unknown, 0)
    due = np.where(
        found.stopped,
        _words(found, "last_tick"),
        _words(found, "sched_timer.node.expires"),
    )
    ticked = [
        max(_before(moment, jiffies), jiffies.past_ns(count) or 0)
        for moment, count in zip(
            due.tolist(),
            # "tick: Detect and fix jiffies update stall" (in v5.18, and stable kernels)
            _words(found, "last_tick_jiffies").tolist(),
            strict=True,
        )
    ]
    idle = _words(found, "idle_entrytime").tolist()
    return TickSched(
        tuple(
            bool(is_stopped) if known else None
            for is_stopped, known in zip(found.stopped, found.readable, strict=True)
        ),
        tuple(moment or None for moment in ticked),
        _read_due(reader, percpu, losses),
        _latest(jiffies.updated_ns, ticked, idle),
    )


def _latest(updated: int, ticked: list[int], idle: list[int]) -> int:
    """Return the latest stamp, unless it is damaged.

    A CPU that stores a stamp also updates jiffies within some ticks (before "tick:
    Detect and fix jiffies update stall", one CPU did, or those that woke up). So a
    stamp much later than all others is damaged, and would make all CPUs look late.
    """
    idle = [moment if moment < MAX_PLAUSIBLE else 0 for moment in idle]
    noted = sorted([updated, *map(max, ticked, idle)])
    others = max(noted[:-1], default=0)
    return others if others and noted[-1] - others > _FAR_NS else noted[-1]


def _read_due(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> tuple[int | None, ...]:
    """Return when timer interrupts are due; ``None`` without high resolution timers."""
    name = "struct hrtimer_cpu_base"
    type_ = find_type(reader.prog, name)
    addresses = percpu.addresses("hrtimer_bases")
    records, readable = reader.read_records(addresses, drgn.sizeof(type_))
    lose_many(losses, name, int(np.count_nonzero(~readable)))
    known = bits_at(records, member_of(type_, "hres_active").bit_offset)
    due = column(records, offset_of(type_, "expires_next"))
    return tuple(
        moment if is_known and 0 < moment < MAX_PLAUSIBLE else None
        for is_known, moment in zip(known.tolist(), due.tolist(), strict=True)
    )


def _words(found: TickRecords, member: str) -> Addresses:
    """Return a member of 64 bits; zeros if the kernel does not have it."""
    words = found.words(member)
    return np.zeros(len(found.records), np.uint64) if words is None else words


def _before(due: int, jiffies: Jiffies) -> int:
    """Return the time of the tick before the one at *due*; 0 if impossible."""
    return due - jiffies.tick_ns if jiffies.tick_ns <= due < MAX_PLAUSIBLE else 0
