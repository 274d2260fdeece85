# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which optional accounting of tasks the kernel has switched on.

A switch shows only the present state: a counter may hold what was counted before it was
switched off, and lack what happened before it was switched on.
"""

import struct
from typing import NamedTuple

import drgn
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_symbol, find_type

_COUNT = struct.Struct("<i")


class _Switch(NamedTuple):
    name: str
    address: int


class Accounting(Struct, frozen=True):
    """The switches at one moment."""

    schedstats: bool | None
    """Whether sleep statistics are kept (kernel/sched/stats.c); ``None`` if the kernel
    has no such statistics, or if the switch cannot be read."""

    delayacct: bool | None
    """Whether delay accounting is on (kernel/delayacct.c); ``None`` likewise."""

    irq_time: bool
    """Whether interrupt time is kept apart from the time of the interrupted tasks
    (IRQ_TIME_ACCOUNTING): then no task's CPU time includes it."""

    precise_cputime: bool
    """Whether some CPUs, those of nohz_full, split user from system time exactly and
    not by ticks (VIRT_CPU_ACCOUNTING_GEN)."""

    stable_clock: bool
    """Whether all CPUs share one clock; else each follows its own ticks
    (kernel/sched/clock.c)."""


class AccountingReader:
    """Reads the switches repeatedly; their addresses are looked up once."""

    def __init__(self, prog: drgn.Program) -> None:
        self._prog = prog
        # The member shows whether the kernel was built with it: the first lookup of a
        # symbol that does not exist is slow.
        has_irq_time = find_type(prog, "struct rq").has_member("prev_irq_time")
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
        """Read all switches; one that cannot be read costs a note."""
        stable = self._switch(self._stable, losses)
        return Accounting(
            schedstats=self._switch(self._schedstats, losses),
            delayacct=self._switch(self._delayacct, losses),
            irq_time=bool(self._switch(self._irq_time, losses)),
            precise_cputime=bool(self._switch(self._precise, losses)),
            # Without HAVE_UNSTABLE_SCHED_CLOCK the CPUs' clocks cannot differ.
            stable_clock=stable is None or stable,
        )

    def _switch(self, switch: _Switch | None, losses: LossLog) -> bool | None:
        """Read a switch; ``None`` if the kernel lacks it or it cannot be read.

        Each is an int, or begins with one: the enable count of a ``struct static_key``.
        So no type is needed.
        """
        if switch is None:
            return None
        try:
            (count,) = _COUNT.unpack(self._prog.read(switch.address, _COUNT.size))
        except UNREADABLE as error:
            losses.lose(Loss.ACCOUNTING, f"{switch.name} cannot be read: {error}")
            return None
        return bool(count)


def read_accounting(prog: drgn.Program, losses: LossLog) -> Accounting:
    """Read all switches once; one that cannot be read costs a note."""
    return AccountingReader(prog).read(losses)


def _find(prog: drgn.Program, *names: str) -> _Switch | None:
    """Find the first of *names* that this kernel has; ``None`` if not found."""
    for name in names:
        try:
            return _Switch(name, find_symbol(prog, name).address)
        except MissingError:
            continue
    return None
