# SPDX-License-Identifier: LGPL-2.1-or-later

"""Command lines to go on with: of what was found, then of what is odd. Pure."""

from collections.abc import Iterator, Sequence

from msatools.report.command_lines import command_line
from msatools.report.model import NextStep, TriageVerdict
from msatools.report.parts import ReportParts
from msatools.report.waits import uninterruptible
from msatools.report.words import count_text
from msatools.reports.units import size

MOST, LEAST = 5, 3

_SELECTING = frozenset({"--state", "-p", "--parent"})
"""Options that leave out rows."""

Hint = tuple[str, tuple[str, ...], str]
"""A command's name, its arguments after the target, and what it shows."""

_USUAL = (
    ("memstat", ("--by", "process"), "where the memory is, and whose"),
    ("prstat", ("-m",), "what each process does, and where its time went"),
    ("locks", (), "who waits for whom"),
    ("cpus", ("-v",), "what each CPU does, and who waits for it"),
)
"""What is worth a look anyway."""

_MUCH = 0.10
"""Share of managed memory that makes a kind of memory worth a view of its own."""

_SOME = 0.05
"""The same for what processes hold without having it mapped."""

_MOSTLY = 0.50

_WHY = {
    "panic": "what ran, and what the crashed task did",
    "oops": "the log and all reports in full",
    "out-of-memory": "where the memory is, and whose",
    "memory-low": "where the memory is, and whose",
    "memory-unreclaimable": "whose memory it is, and pages without a known owner",
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
    "stopped-owner": "who waits for it, and for which lock",
    "blocked-tasks": "each task's way to what it waits for in the end",
    "kernel-memory": "whose it is",
    "memory-unattributed": "what these pages point to",
    "counter-unexplained": "all counters beside what the scan found",
    "cpu-throttled": "who is throttled, by which group",
    "cpu-storm": "what each CPU does",
    "rcu-backlog": "the state of RCU, and what stands still",
    "irq-disabled": "interrupts, and which are disabled",
    "kernel-warnings": "the report with all notes",
}


def next_steps(
    parts: ReportParts, verdicts: Sequence[TriageVerdict]
) -> tuple[NextStep, ...]:
    """Return the command lines of verdicts, then of hints, the most telling first.

    There are up to :data:`MOST`, and the usual ones if fewer than :data:`LEAST`.
    """
    steps: dict[str, str] = {}
    for verdict in verdicts:
        # The first is the worst.
        steps.setdefault(verdict.see, _WHY.get(verdict.code, verdict.code))
    tools = {command.split(" ", 1)[0] for command in steps}
    for name, arguments, why in _hints(parts):
        # A view of memory adds to another one; of the others one page is enough.
        if name == "memstat" or f"msa-{name}" not in tools:
            tools.add(f"msa-{name}")
            steps.setdefault(command_line(parts.target, name, arguments), why)
    steps = {
        command: why
        for command, why in steps.items()
        if not any(_covers(other, command) for other in steps)
    }
    for name, arguments, why in _USUAL:
        if len(steps) < LEAST and f"msa-{name}" not in tools:
            steps.setdefault(command_line(parts.target, name, arguments), why)
    found = [NextStep(command=command, why=why) for command, why in steps.items()]
    return tuple(found[:MOST])


def _covers(one: str, other: str) -> bool:
    """Return whether a command shows all that another one does, and more."""
    (tool, words), (other_tool, others) = _words(one), _words(other)
    is_narrower = any(word in _SELECTING for word in words ^ others)
    return tool == other_tool and words > others and not is_narrower


def _words(command: str) -> tuple[str, set[str]]:
    """Return the tool, and the other words: views that are joined by commas singly."""
    tool, *words = command.replace(",", " ").split(" ")
    return tool, {*words}


def _hints(parts: ReportParts) -> Iterator[Hint]:
    """Yield what the commands' summaries show and no verdict judges."""
    yield from _waits(parts)
    yield from _memory(parts)
    if parts.zombies is not None and (dead := len(parts.zombies.zombies)):
        yield "zombies", (), f"{count_text(dead, 'zombie')}: why they are not reaped"


def _waits(parts: ReportParts) -> Iterator[Hint]:
    if parts.locks is not None:
        blocked = len(uninterruptible(parts.locks))
        if blocked:
            arguments = ("--chains", "--state", "D")
            count = f"{count_text(blocked, 'task')} in state D"
            yield "locks", arguments, f"{count}: what each waits for in the end"
        elif roots := len(parts.locks.roots):
            yield "locks", (), f"{count_text(roots, 'root')}: who keeps others waiting"
    load, cpus = parts.load, parts.machine.cpus
    if load is not None and cpus and load.runnable > 2 * cpus:
        text = f"{load.runnable:,} tasks are runnable on {count_text(cpus, 'CPU')}"
        yield "cpus", ("-v",), f"{text}: who runs, and who waits"


def _memory(parts: ReportParts) -> Iterator[Hint]:
    """Yield the views of the kinds of memory that are large."""
    memstat, page = parts.memstat, parts.target.page_size
    if memstat is None or not memstat.managed_pages:
        return
    pages = {each.name: each.pages for each in memstat.classes}
    managed = memstat.managed_pages

    def hint(amount: int, share: float, what: str, *view: str) -> Iterator[Hint]:
        if amount >= share * managed:
            portion = f"{size(amount * page)} ({100 * amount / managed:.0f} %)"
            yield "memstat", view, f"{portion} {what}"

    held = sum(pages[name] for name in ("kernel.sockets", "kernel.pipes"))
    yield from hint(held, _SOME, "in sockets and pipes: whose", "--by", "file")
    shmem = pages["cache.shmem"]
    yield from hint(
        shmem, _MUCH, "tmpfs and shared memory: of which mounts", "--by", "fs,file"
    )
    unattributed = pages["kernel.unattributed"]
    yield from hint(unattributed, _SOME / 2, "without an owner", "--unattributed")
    slab = pages["kernel.slab"]
    yield from hint(slab, _MUCH, "slab: which caches", "--by", "slab")
    vmalloc = pages["kernel.vmalloc"]
    yield from hint(vmalloc, _SOME, "vmalloc: whose", "--by", "vmalloc")
    tables = pages["kernel.page_tables"]
    yield from hint(tables, _SOME / 2, "page tables: whose", "--by", "process")
    if parts.memory is not None and (groups := parts.memory.removed_groups or 0) > 1:
        what = f"{groups:,} removed control groups still exist: what keeps them"
        yield "memstat", ("--by", "cgroup"), what
    user = sum(n for name, n in pages.items() if name.startswith("user."))
    yield from hint(user, _MOSTLY, "of processes: whose", "--by", "process")
