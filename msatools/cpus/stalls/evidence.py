# SPDX-License-Identifier: LGPL-2.1-or-later

"""The evidence of stalls that was read, before anything follows from it."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from msatools.cpus.model import RunQueue
from msatools.cpus.stalls.model import (
    CrossCall,
    GracePeriod,
    HeldCpu,
    OverdueTimer,
    StallKind,
    StallLimits,
    StopMachine,
)

LATE_NS = 1_000_000_000
"""What stands still for less is not looked at: a turn of other tasks, a busy host."""


class StallEvidence(Struct, frozen=True, kw_only=True):
    """Everything that was read."""

    limits: StallLimits
    cpus: Mapping[int, HeldCpu]
    queues: Sequence[RunQueue]
    rcu: GracePeriod | None
    calls: Sequence[CrossCall]
    stop_machine: StopMachine | None
    timers: Sequence[OverdueTimer]
    halted_ns: int | None = None
    """Time since a crashing kernel stopped its other CPUs: no stall grows by it."""

    found: frozenset[StallKind] = frozenset()
    """What the kernel crashed because of."""
