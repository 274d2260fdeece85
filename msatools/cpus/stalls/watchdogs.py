# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's lockup detectors: their limits, and when they last ran on each CPU.

kernel/watchdog.c: a timer of each CPU wakes the stopper thread, which outranks all
other tasks, to stamp the time (``watchdog_touch_ts``). A CPU whose stamp is older than
twice ``watchdog_thresh`` has a soft lockup; one that took no such timer's interrupt for
``watchdog_thresh`` has a hard lockup.
"""

import drgn
from msgspec import Struct

from msatools.cpus.stalls.model import StallLimits
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader, column
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_variable

_SECOND = 1_000_000_000

_THRESH_S = 10
"""``watchdog_thresh``, unless the kernel says otherwise."""

_RCU_S = 21
"""CONFIG_RCU_CPU_STALL_TIMEOUT, likewise."""

_CALL_NS = 5 * _SECOND
"""``csd_lock_timeout`` of kernels with CONFIG_CSD_LOCK_WAIT_DEBUG, which are few."""

_HARD, _SOFT = 1, 2
"""Bits of ``watchdog_enabled`` (include/linux/nmi.h)."""

_STAMP_SHIFT = 30
"""Stamps count 2^30 ns: get_timestamp()."""

_MAX_S = 3600


class Watchdogs(Struct, frozen=True):
    """The limits, and the age of each CPU's stamp."""

    limits: StallLimits
    ages_ns: tuple[int | None, ...]
    """In the order of ``PerCpu.cpus``; ``None`` if the CPU has none."""


def read_watchdogs(
    reader: Reader, percpu: PerCpu, clocks: Clocks, losses: LossLog
) -> Watchdogs:
    """Read the limits, and the stamps of the detector of soft lockups if it is on."""
    enabled = _number(reader.prog, "watchdog_enabled", losses)
    thresh = _number(reader.prog, "watchdog_thresh", losses)
    rcu = _number(reader.prog, "rcu_cpu_stall_timeout", losses)
    # 0 turns it off; a damaged one is no limit.
    seconds = thresh if thresh and 0 < thresh <= _MAX_S else _THRESH_S
    rcu_s = rcu if rcu and 0 < rcu <= _MAX_S else _RCU_S
    is_soft = None if enabled is None else bool(enabled & _SOFT and thresh)
    is_hard = None if enabled is None else bool(enabled & _HARD and thresh)
    limits = StallLimits(
        no_tick_ns=seconds * _SECOND,
        no_switch_ns=2 * seconds * _SECOND,
        rcu_ns=rcu_s * _SECOND,
        call_ns=_CALL_NS,
        soft_watchdog=is_soft,
        hard_watchdog=is_hard,
    )
    none = (None,) * len(percpu.cpus)
    ages = _ages(reader, percpu, clocks) if is_soft else none
    return Watchdogs(limits, ages)


def _ages(reader: Reader, percpu: PerCpu, clocks: Clocks) -> tuple[int | None, ...]:
    try:
        addresses = percpu.addresses("watchdog_touch_ts")
    except MissingError:
        # Without CONFIG_SOFTLOCKUP_DETECTOR.
        return (None,) * len(percpu.cpus)
    records, _ = reader.read_records(addresses, 8)
    stamps = column(records, 0).tolist()
    # The clock is the local one. 0: never, or unreadable; a number with all bits set:
    # it is to start anew (up to v5.12).
    ages = (clocks.local_ns - (stamp << _STAMP_SHIFT) for stamp in stamps)
    return tuple(
        max(age, 0) if stamp and age > -(1 << _STAMP_SHIFT) else None
        for stamp, age in zip(stamps, ages, strict=True)
    )


def _number(prog: drgn.Program, name: str, losses: LossLog) -> int | None:
    """Read a variable; ``None`` if the kernel lacks it, or it cannot be read."""
    try:
        return int(find_variable(prog, name).value_())
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.lose(Loss.VARIABLES, f"{name} cannot be read: {error}", about=name)
        return None
