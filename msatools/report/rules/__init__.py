# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rules of verdicts, by topic; their order is that of equally severe verdicts.

waits: tasks that wait; memory; cpus; crash: crashes, the log and the dump;
observations: oddities that need not be faults.
A new rule is a :class:`VerdictRule` in one of them and a name in :data:`RULES`, or in
:data:`LOG_RULES`.
"""

from typing import Any

from msatools.report.rule import VerdictRule
from msatools.report.rules import cpus, crash, memory, observations, waits

RULES: tuple[VerdictRule[Any], ...] = (
    crash.PANIC,
    # The verdicts of later rules may be consequences of an oops.
    crash.OOPS,
    *cpus.CPU_STALLED,
    *cpus.CPU_STARVED,
    cpus.CPU_THROTTLED,
    *cpus.CPU_STORM,
    cpus.IRQ_DISABLED,
    *cpus.RCU_STALLED,
    *cpus.WORKQUEUE_STALLED,
    memory.OUT_OF_MEMORY,
    memory.MEMORY_LOW,
    memory.MEMORY_UNRECLAIMABLE,
    memory.BALLOON,
    memory.MEMORY_LEAK,
    memory.SWAP_FULL,
    memory.MEMORY_POISONED,
    waits.DEADLOCK,
    waits.IO_STUCK,
    waits.HUNG_TASKS,
    waits.FROZEN_FILESYSTEM,
    waits.STOPPED_OWNER,
    waits.POSSIBLE_DEADLOCK,
    memory.CGROUP_AT_LIMIT,
    waits.PIDS_LIMIT,
    cpus.PRIORITY_INVERSION,
    waits.ZOMBIES,
    cpus.IRQ_IMBALANCE,
    memory.DYING_CGROUPS,
    memory.PAGE_TABLES,
    crash.DUMP_DAMAGED,
    *waits.LOCK_HERD,
    crash.KERNEL_WARNINGS,
    *observations.OBSERVATIONS,
)

LOG_RULES: tuple[VerdictRule[Any], ...] = (
    *RULES,
    waits.LOGGED_HUNG,
    crash.DEVICE_ERRORS,
)
"""Rules for a log without its kernel. For the last ones, a dump has better evidence."""
