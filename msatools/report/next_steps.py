# SPDX-License-Identifier: LGPL-2.1-or-later

"""Command lines to go on with. Pure."""

from collections.abc import Iterator, Sequence

from msatools.report.command_lines import command_line
from msatools.report.model import NextStep, TriageVerdict
from msatools.target.model import Target

MOST, LEAST = 5, 2

_USUAL = (
    ("memstat", ("--by", "process"), "where the memory is, and whose"),
    ("prstat", ("-m",), "what each process does, and where its time went"),
    ("locks", (), "who waits for whom"),
    ("cpus", ("-v",), "what each CPU does, and who waits for it"),
)
"""What is worth a look anyway."""

_WHY = {
    "panic": "what ran, and what the crashed task did",
    "oops": "the log and all reports in full",
    "out-of-memory": "where the memory is, and whose",
    "memory-low": "where the memory is, and whose",
    "memory-unreclaimable": "whose it is, and what nobody owns",
    "cgroup-at-limit": "memory by control group",
    "memory-leak": "the slab caches, and whose objects they have",
    "memory-poisoned": "how many pages there are of each kind",
    "page-tables": "whose page tables they are",
    "dying-cgroups": "what is charged to removed control groups",
    "balloon": "what is left of memory beside the balloon",
    "swap-full": "whose memory is on swap",
    "hung-tasks": "what each hung task waits for in the end",
    "deadlock": "the tasks of the deadlock, with stacks",
    "possible-deadlock": "the tasks and locks, with stacks",
    "io-stuck": "what is waited for, and by whom",
    "frozen-filesystem": "who waits behind it",
    "lock-herd": "who is woken together, and by whom",
    "priority-inversion": "both tasks, with stacks",
    "cpu-stalled": "what each CPU does, and who waits for it",
    "cpu-starved": "who waits for which CPU",
    "rcu-stalled": "what each CPU does",
    "workqueue-stalled": "what each CPU does",
    "irq-imbalance": "interrupts by CPU",
    "zombies": "why the parent does not reap",
    "pids-limit": "which limits are near, and who uses them up",
    "dump-damaged": "how much of memory is in the dump",
}


def next_steps(
    target: Target, verdicts: Sequence[TriageVerdict]
) -> tuple[NextStep, ...]:
    """Return the command lines of verdicts, the most useful first.

    There are up to :data:`MOST`, and the usual ones if fewer than :data:`LEAST`.
    """
    return tuple(_steps(target, verdicts))[:MOST]


def _steps(target: Target, verdicts: Sequence[TriageVerdict]) -> Iterator[NextStep]:
    seen = set()
    for verdict in verdicts:
        if verdict.see not in seen:
            seen.add(verdict.see)
            yield NextStep(
                command=verdict.see, why=_WHY.get(verdict.code, verdict.code)
            )
    if len(seen) < LEAST:
        for name, arguments, why in _USUAL:
            command = command_line(target, name, arguments)
            if command not in seen:
                yield NextStep(command=command, why=why)
