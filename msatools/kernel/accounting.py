# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a kernel keeps of its tasks beyond what it always keeps: what is on now.

A switch tells of the present alone: what was counted may be from before, and what was
not may have been before it was switched on.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog

_COUNT = struct.Struct("<i")


class _Switch(NamedTuple):
    """A switch."""

    name: str
    address: int


@dataclass(frozen=True)
class Accounting:
    """What is on at this moment."""

    schedstats: bool | None
    """Statistics of sleeps (kernel/sched/stats.c); ``None`` if the kernel has none, or
    if it cannot be told."""

    delayacct: bool | None
    """Delay accounting (kernel/delayacct.c); ``None`` likewise."""

    irq_time: bool
    """Whether time of interrupts is kept apart from that of the tasks they met
    (IRQ_TIME_ACCOUNTING): then it is in no task's time on the CPU."""

    precise_cputime: bool
    """Whether some CPUs split user from system time exactly, not by ticks
    (VIRT_CPU_ACCOUNTING_GEN): those of nohz_full."""

    stable_clock: bool
    """Whether all CPUs have one clock; else each goes by its own ticks
    (kernel/sched/clock.c)."""


class AccountingReader:
    """Reads what is on, as often as it is asked: where to look is found once."""

    def __init__(self, prog: drgn.Program) -> None:
        self._prog = prog
        # There is a member for it if the kernel was built so: to look for a symbol that
        # is not there takes long the first time.
        has_irq_time = prog.type("struct rq").has_member("prev_irq_time")
        self._schedstats = _find(prog, "sched_schedstats")
        # Linux kernel commit 0cd7c741f01d ("delayacct: Add sysctl to enable at
        # runtime") (in v5.14) has the key follow the variable; before, the variable
        # alone is always there.
        self._delayacct = _find(prog, "delayacct_on")
        # A static key for a while: Linux kernel commit 8722903cbb8f ("sched: Define
        # sched_clock_irqtime as static key") until f3fa0e40df17 (both in v6.14).
        self._irq_time = _find(prog, "sched_clock_irqtime") if has_irq_time else None
        # Linux kernel commit 74c578759f15 ("context_tracking: Rename
        # context_tracking_is_enabled() => context_tracking_enabled()") (in v5.5)
        self._precise = _find(prog, "context_tracking_key", "context_tracking_enabled")
        self._stable = _find(prog, "__sched_clock_stable")

    def read(self, losses: LossLog) -> Accounting:
        """Tell what is on; what cannot be read costs a note."""
        stable = self._switch(self._stable, losses)
        return Accounting(
            schedstats=self._switch(self._schedstats, losses),
            delayacct=self._switch(self._delayacct, losses),
            irq_time=bool(self._switch(self._irq_time, losses)),
            precise_cputime=bool(self._switch(self._precise, losses)),
            # Without HAVE_UNSTABLE_SCHED_CLOCK they cannot be apart.
            stable_clock=stable is None or stable,
        )

    def _switch(self, place: _Switch | None, losses: LossLog) -> bool | None:
        """Read a switch, if there is one.

        Each is an int or begins with one: the count of those who want a static key on
        (``struct static_key``). So no type is needed.
        """
        if place is None:
            return None
        try:
            (count,) = _COUNT.unpack(self._prog.read(place.address, _COUNT.size))
        except drgn.FaultError as error:
            losses.lose(Loss.ACCOUNTING, f"{place.name} cannot be read: {error}")
            return None
        return bool(count)


def read_accounting(prog: drgn.Program, losses: LossLog) -> Accounting:
    """Tell what is on; what cannot be read costs a note."""
    return AccountingReader(prog).read(losses)


def _find(prog: drgn.Program, *names: str) -> _Switch | None:
    """Find the first of some switches that there is."""
    for name in names:
        try:
            return _Switch(name, prog.symbol(name).address)
        except LookupError:
            continue
    return None
