# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a kernel keeps of its tasks beyond what it always keeps: what is on now.

A switch tells of the present alone: what was counted may be from before, and what was
not may have been before it was switched on.
"""

import struct
from dataclasses import dataclass

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import Findings

_COUNT = struct.Struct("<i")


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


def read_accounting(prog: drgn.Program, findings: Findings) -> Accounting:
    """Tell what is on; what cannot be read costs a note."""
    stable = _switch(prog, findings, "__sched_clock_stable")
    # There is a member for it if the kernel was built so: to look for a symbol that is
    # not there takes long the first time.
    has_irq_time = prog.type("struct rq").has_member("prev_irq_time")
    return Accounting(
        schedstats=_switch(prog, findings, "sched_schedstats"),
        # Linux kernel commit 0cd7c741f01d ("delayacct: Add sysctl to enable at
        # runtime") (in v5.14) has the key follow the variable; before, the variable
        # alone is always there.
        delayacct=_switch(prog, findings, "delayacct_on"),
        # A static key for a while: Linux kernel commit 8722903cbb8f ("sched: Define
        # sched_clock_irqtime as static key") until f3fa0e40df17 (both in v6.14).
        irq_time=has_irq_time and bool(_switch(prog, findings, "sched_clock_irqtime")),
        # Linux kernel commit 74c578759f15 ("context_tracking: Rename
        # context_tracking_is_enabled() => context_tracking_enabled()") (in v5.5)
        precise_cputime=bool(
            _switch(prog, findings, "context_tracking_key", "context_tracking_enabled")
        ),
        # Without HAVE_UNSTABLE_SCHED_CLOCK they cannot be apart.
        stable_clock=stable is None or stable,
    )


def _switch(prog: drgn.Program, findings: Findings, *names: str) -> bool | None:
    """Read the first of some switches that there is.

    Each is an int or begins with one: the count of those who want a static key on
    (``struct static_key``). So no type is needed.
    """
    for name in names:
        try:
            address = prog.symbol(name).address
        except LookupError:
            continue
        try:
            (count,) = _COUNT.unpack(prog.read(address, _COUNT.size))
        except drgn.FaultError as error:
            findings.lose(Loss.ACCOUNTING, f"{name} cannot be read: {error}")
            return None
        return bool(count)
    return None
