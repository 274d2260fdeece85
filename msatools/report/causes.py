# SPDX-License-Identifier: LGPL-2.1-or-later

"""Causes of crashes, by the kernel's own words.

Two tables: one of the lines that begin a report of the kernel (an oops, a stall), one
of the words of panic(). Both are in the order in which they are tried.
"""

import re
from typing import Literal

Cause = Literal[
    "null-dereference",
    "page-fault",
    "protection-fault",
    "stack-overflow",
    "stack-corruption",
    "bug",
    "divide-error",
    "invalid-opcode",
    "oops",
    "memory-error",
    "warning",
    "soft-lockup",
    "hard-lockup",
    "rcu-stall",
    "hung-task",
    "workqueue-stall",
    "out-of-memory",
    "init-killed",
    "no-root",
    "sysrq",
    "nmi",
    "machine-check",
    "panic",
]
"""``memory-error``: of KASAN, KFENCE and their like. ``oops`` and ``panic``: of a kind
that is in no table."""

OOPSES: frozenset[Cause] = frozenset(
    {
        "null-dereference",
        "page-fault",
        "protection-fault",
        "stack-overflow",
        "stack-corruption",
        "bug",
        "divide-error",
        "invalid-opcode",
        "oops",
        "memory-error",
    }
)
"""Faults of the kernel's own code: each ends the task that it meets, or the kernel."""

WATCHDOGS: frozenset[Cause] = frozenset(
    {"soft-lockup", "hard-lockup", "rcu-stall", "hung-task", "workqueue-stall"}
)

_EVENTS: tuple[tuple[str, Cause], ...] = (
    # arch/x86/mm/fault.c and arch/arm64/mm/fault.c
    (r"BUG: kernel NULL pointer dereference", "null-dereference"),
    (r"Unable to handle kernel NULL pointer dereference", "null-dereference"),
    (r"BUG: unable to handle page fault for address", "page-fault"),
    (r"Unable to handle kernel (paging request|.* at virtual address)", "page-fault"),
    (r"kernel tried to execute NX-protected page", "page-fault"),
    # arch/x86/kernel/traps.c and dumpstack.c
    (r"BUG: \S+ stack guard page was hit", "stack-overflow"),
    (r"BUG: stack guard page was hit", "stack-overflow"),
    (r"(kernel|Insufficient) stack (overflow|space)", "stack-overflow"),
    (r"(Oops: )?general protection fault", "protection-fault"),
    # lib/bug.c
    (r"kernel BUG at ", "bug"),
    (r"(Oops: )?divide error: ", "divide-error"),
    (r"(traps: )?PANIC: double fault", "oops"),
    (r"BUG: (KASAN|KFENCE|KMSAN|KCSAN): ", "memory-error"),
    # lib/ubsan.c
    (r"UBSAN: ", "warning"),
    # kernel/watchdog.c, kernel/watchdog_perf.c
    (r"(watchdog: )?BUG: soft lockup", "soft-lockup"),
    (r"(watchdog: )?.*Watchdog detected hard LOCKUP", "hard-lockup"),
    (r"(watchdog: )?CPU\d+: Watchdog detected hard LOCKUP", "hard-lockup"),
    # kernel/rcu/tree_stall.h
    (r"rcu: INFO: \S+ .*stall", "rcu-stall"),
    # kernel/hung_task.c
    (r"INFO: task .* blocked (in I/O wait )?for more than \d+ seconds", "hung-task"),
    # kernel/workqueue.c
    (r"BUG: workqueue lockup", "workqueue-stall"),
    (r"WARNING: (CPU: \d+ PID: \d+ |\S+:\d+ )?at ", "warning"),
    (r"\S.* invoked oom-killer: ", "out-of-memory"),
    (r"BUG: (?!arch topology borken|MAX_\w+ too low|recent printk recursion)", "bug"),
    # Any other die(), which follows the lines above for those.
    (r"(Oops: )?invalid opcode: ", "invalid-opcode"),
    (r"Internal error: |Oops\b|double fault: ", "oops"),
)

_PANICS: tuple[tuple[str, Cause], ...] = (
    (r"sysrq triggered crash", "sysrq"),
    (r"SysRq : Trigger a crash", "sysrq"),
    (r"Out of memory|System is deadlocked on memory", "out-of-memory"),
    (r"Attempted to kill init", "init-killed"),
    (r"softlockup: hung tasks", "soft-lockup"),
    (r"Hard LOCKUP", "hard-lockup"),
    (r"RCU Stall", "rcu-stall"),
    (r"hung_task: blocked tasks", "hung-task"),
    (r"workqueue: ", "workqueue-stall"),
    (r"K[ACM]SAN|KFENCE|kasan|kfence|.*memory corruption", "memory-error"),
    (r".*panic_on_warn set", "warning"),
    (r"stack-protector: |corrupted stack end detected", "stack-corruption"),
    (r"kernel stack overflow", "stack-overflow"),
    (r".*[Mm]achine check|.*MCE", "machine-check"),
    (r"Timeout: Not all CPUs entered broadcast exception", "machine-check"),
    (r".*\bNMI\b", "nmi"),
    (r"VFS: Unable to mount root|No working init found", "no-root"),
)

EXCEPTION = re.compile(
    r"Fatal exception|Oops|BUG|Machine halted|Aiee, killing interrupt handler|"
    r"Attempted to kill the idle task"
)
"""What panic() says of an oops, whose own lines come before."""

_OF_PROGRAM = re.compile(r".{1,15}\[\d+\]: (segfault at|unhandled) ", re.DOTALL)
"""Faults of programs, whose lines begin with a name that the program chose:
show_signal_msg() in arch/x86/mm/fault.c, arm64_show_signal()."""

_COMPILED_EVENTS = [(re.compile(words, re.DOTALL), cause) for words, cause in _EVENTS]
_COMPILED_PANICS = [(re.compile(words), cause) for words, cause in _PANICS]


def event_cause(line: str) -> Cause | None:
    """Return the cause that a line reports, if one begins there; ``None`` if not."""
    if _OF_PROGRAM.match(line):
        return None
    for words, cause in _COMPILED_EVENTS:
        if words.match(line):
            return cause
    return None


def panic_cause(words: str) -> Cause:
    """Return the cause by what panic() said."""
    for pattern, cause in _COMPILED_PANICS:
        if pattern.match(words):
            return cause
    return "panic"
