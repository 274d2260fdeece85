# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rules of verdicts, a file each; of equal severity the first come first.

A new rule is a file here and a name in :data:`RULES`.
"""

from typing import Any

from msatools.report.rule import VerdictRule
from msatools.report.rules import (
    balloon,
    cgroup_at_limit,
    cpu_stalled,
    cpu_starved,
    cpu_storm,
    cpu_throttled,
    deadlock,
    dump_damaged,
    dying_cgroups,
    frozen_filesystem,
    hung_tasks,
    io_stuck,
    irq_disabled,
    irq_imbalance,
    kernel_warnings,
    lock_herd,
    memory_leak,
    memory_low,
    memory_poisoned,
    memory_unreclaimable,
    observations,
    oops,
    out_of_memory,
    page_tables,
    panic,
    pids_limit,
    possible_deadlock,
    priority_inversion,
    rcu_stalled,
    stopped_owner,
    swap_full,
    workqueue_stalled,
    zombies,
)

RULES: tuple[VerdictRule[Any], ...] = (
    panic.RULE,
    # What follows may be its consequence.
    oops.RULE,
    *cpu_stalled.RULES,
    *cpu_starved.RULES,
    cpu_throttled.RULE,
    *cpu_storm.RULES,
    irq_disabled.RULE,
    *rcu_stalled.RULES,
    *workqueue_stalled.RULES,
    out_of_memory.RULE,
    memory_low.RULE,
    memory_unreclaimable.RULE,
    balloon.RULE,
    memory_leak.RULE,
    swap_full.RULE,
    memory_poisoned.RULE,
    deadlock.RULE,
    io_stuck.RULE,
    hung_tasks.RULE,
    frozen_filesystem.RULE,
    stopped_owner.RULE,
    possible_deadlock.RULE,
    cgroup_at_limit.RULE,
    pids_limit.RULE,
    priority_inversion.RULE,
    zombies.RULE,
    irq_imbalance.RULE,
    dying_cgroups.RULE,
    page_tables.RULE,
    dump_damaged.RULE,
    *lock_herd.RULES,
    kernel_warnings.RULE,
    *observations.RULES,
)
