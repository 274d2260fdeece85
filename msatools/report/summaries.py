# SPDX-License-Identifier: LGPL-2.1-or-later

"""Summarize each command's report in a line, and suggest next commands. Pure."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msatools.cpus.model import CpusReport
from msatools.kernel.report import LossLog, Report
from msatools.locks.report import LocksReport
from msatools.memory.model import MemstatReport
from msatools.prstat.model import Load, LoadGroup, PrstatReport
from msatools.report.model import (
    STDIN,
    NextStep,
    ReportSection,
    TriageVerdict,
    command_line,
)
from msatools.report.rule import (
    KERNEL_KINDS,
    ReportParts,
    count_text,
    pid_text,
    root_text,
    uninterruptible,
)
from msatools.reports.units import duration, size
from msatools.zombies.model import ZombiesReport

_KINDS = {
    "free": ("free.",),
    "user": ("user.",),
    "cache": ("cache.",),
    "kernel": ("kernel.",),
}
_BESIDE = {
    "balloon": "offline",
    "poisoned": "hwpoison",
    "not in the dump": "excluded",
    "unreadable": "unreadable",
}
"""Further kinds of memory, listed if present. Reserved memory was never managed."""

_HELD = ("kernel.dmabuf", "kernel.rings")
"""Kernel memory that programs hold, and that no counter of the kernel includes: it is
named if it is large."""

_LOAD_GROUPS = 3


def section(name: str, parts: ReportParts) -> ReportSection:
    """Return the section of a command: its summary, or why it failed."""
    report: Report | None = getattr(parts, name)
    if report is None:
        return ReportSection(error=parts.errors.get(name, "not asked for"))
    return ReportSection(
        summary=f"{_SUMMARIES[name](report, parts)}{_incomplete(report)}"
    )


def _incomplete(report: Report) -> str:
    """Return a remark on a report for which something could not be read."""
    return "; incomplete" if LossLog(Counter(report.coverage)).lost else ""


_COUNTED = {
    "managed": "managed",
    "free": "free.buddy",
    "anon": "user.anon",
    "cache": "cache",
    "slab": "kernel.slab",
}


def _memstat(report: MemstatReport) -> str:
    if not report.pages:
        counted = {each.name: each.kernel_pages for each in report.checks}
        words = [
            f"{label} {size(amount * report.target.page_size)}"
            for label, name in _COUNTED.items()
            if (amount := counted.get(name)) is not None
        ]
        return f"no struct page is left; by the kernel's counters {', '.join(words)}"
    words = []
    amounts = kinds_of_pages(report)
    whole = sum(amounts.values())
    for label, amount in amounts.items():
        held = _held(report, whole) if label == "kernel" else ""
        share = f" ({100 * amount / whole:.0f} %{held})" if whole else ""
        words.append(f"{size(amount * report.target.page_size)} {label}{share}")
    wrong = [
        check.name
        for check in report.checks
        if check.difference and check.explained_by is None
    ]
    why = "differ in torn memory" if report.target.torn else "unexplained"
    checks = f"; {why}: {', '.join(wrong)}" if wrong else ""
    total = size(whole * report.target.page_size)
    balloon = " with the balloon" if "balloon" in amounts else ""
    return f"{total}{balloon}: {', '.join(words)}{checks}"


def _held(report: MemstatReport, whole: int) -> str:
    """Return the kinds of :data:`_HELD` that are large, for a remark in brackets."""
    pages = {each.name: each.pages for each in report.classes}
    large = [name for name in _HELD if pages[name] >= _SOME * whole > 0]
    return "".join(
        f", {size(pages[name] * report.target.page_size)} of it {KERNEL_KINDS[name][0]}"
        for name in large
    )


def kinds_of_pages(report: MemstatReport) -> dict[str, int]:
    """Return the number of pages by kind of memory, without reserved ones."""
    pages = {each.name: each.pages for each in report.classes}
    amounts = {
        label: sum(n for name, n in pages.items() if name.startswith(prefixes))
        for label, prefixes in _KINDS.items()
    }
    return amounts | {label: n for label, name in _BESIDE.items() if (n := pages[name])}


def _prstat(report: PrstatReport, load: Load | None) -> str:
    totals = report.totals
    states = ", ".join(f"{n:,} {state}" for state, n in totals.states.items() if n)
    words = (
        f"{count_text(totals.processes, 'process', 'es')}, "
        f"{count_text(totals.threads, 'thread')}: {states}"
    )
    return "; ".join([words, *_load(load, totals.load_averages)])


def _load(load: Load | None, averages: tuple[float, ...] | None) -> Iterator[str]:
    if load is None:
        return
    text = (
        "" if averages is None else " " + " ".join(f"{each:.2f}" for each in averages)
    )
    now = f"now {load.runnable:,} runnable, {load.uninterruptible:,} in state D"
    groups = "; ".join(map(_load_group, load.groups[:_LOAD_GROUPS]))
    yield f"load{text}, {now}{f' ({groups})' if groups else ''}"


def _load_group(group: LoadGroup) -> str:
    count = len(group.pids)
    many = f"{count:,} x " if count > 1 else ""
    where = f" in {group.function}" if group.function else ""
    return f"{many}{group.comm} {group.state}{where} {duration(group.max_age_ns)}"


def _locks(report: LocksReport) -> str:
    blocked_d = sum(wait.state == "D" for wait in report.waits)
    words = [f"{count_text(len(report.waits), 'task')} blocked ({blocked_d:,} D)"]
    if report.roots:
        worst = root_text(report.roots[0])
        more = ", the first" if len(report.roots) > 1 else ""
        words.append(f"{count_text(len(report.roots), 'root')}{more}: {worst}")
    for name, rows in (
        ("deadlock", [d for d in report.deadlocks if d.confidence == "exact"]),
        ("possible deadlock", [d for d in report.deadlocks if d.confidence != "exact"]),
        ("herd", report.herds),
        ("priority inversion", report.inversions),
    ):
        if rows:
            words.append(count_text(len(rows), name))
    return "; ".join(words)


def _zombies(report: ZombiesReport) -> str:
    if not report.zombies:
        return "no zombies"
    parents = len({group.ppid for group in report.groups})
    first = report.groups[0]
    return (
        f"{count_text(len(report.zombies), 'zombie')} of "
        f"{count_text(parents, 'parent')}; the most, {first.count:,}: "
        f"{pid_text(first.ppid, first.parent_comm)} ({first.verdict})"
    )


def _cpus(report: CpusReport) -> str:
    online = [cpu for cpu in report.cpus if cpu.online]
    spent = {
        label: sum(getattr(cpu, name) or 0 for cpu in online)
        for label, name in {
            "user": "usr_ns",
            "system": "sys_ns",
            "interrupts": "irq_ns",
            "waiting for I/O": "wt_ns",
            "stolen": "st_ns",
            "idle": "idl_ns",
        }.items()
    }
    total = sum(spent.values())
    shares = [
        f"{100 * ns / total:.0f} % {label}"
        for label, ns in spent.items()
        if ns and total
    ]
    busy = sum((queue.running or 0) > 0 for queue in report.run_queues)
    words = [f"{count_text(len(online), 'CPU')} online, {busy:,} with runnable tasks"]
    if shares:
        words.append(f"since boot {', '.join(shares)}")
    return "; ".join(words)


_SUMMARIES: Mapping[str, Callable[[Any, ReportParts], str]] = {
    "memstat": lambda report, _: _memstat(report),
    "prstat": lambda report, parts: _prstat(report, parts.load),
    "locks": lambda report, _: _locks(report),
    "zombies": lambda report, _: _zombies(report),
    "cpus": lambda report, _: _cpus(report),
}


# --- Next command lines: from verdicts, then from hints. Pure.


MOST, LEAST = 5, 3

_SELECTING = frozenset({"--state", "-p", "--parent"})
"""Options that leave out rows."""

Hint = tuple[str, tuple[str, ...], str]
"""A command's name, its arguments after the target, and what it shows."""

_USUAL = (
    ("memstat", ("--by", "process"), "if memory is short: where it is, and whose"),
    (
        "prstat",
        ("-m",),
        "if it is slow: what each process does, and where its time went",
    ),
    ("locks", (), "if it hangs: who waits for whom"),
    ("cpus", ("-v",), "if a CPU is busy: what it does, and who waits for it"),
)
"""Commands by symptom, to suggest if verdicts and hints are too few."""

_MUCH = 0.10
"""Minimum share of managed memory for which a view of that kind is suggested."""

_SOME = 0.05
"""The same for memory without a mapping in a process, such as sockets and vmalloc."""

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
    "io-stuck": "each hung task's way to the device or server",
    "frozen-filesystem": "who waits for the frozen file system",
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
    "stopped-owner": "who waits for the stopped tasks, and for which lock",
    "blocked-tasks": "each task's way to what it waits for in the end",
    "kernel-memory": "whose the kernel's memory is",
    "memory-unattributed": "the pages without an owner, and what they point to",
    "counter-unexplained": "all counters beside what the scan found",
    "cpu-throttled": "who is throttled, by which group",
    "cpu-storm": "what each CPU does",
    "rcu-backlog": "the state of RCU, and what stands still",
    "irq-disabled": "interrupts, and which are disabled",
    "kernel-warnings": "the report with all notes",
}


_WHY_OF_VIEWS = {
    "--io": "the I/O in flight of each disk, and since when",
    "--workqueues": "pools of workers: what is pending, and who is busy",
}
"""What views of msa-locks show, for a verdict of any code."""

_RUN_QUEUES = "each CPU's run queue: who runs, and who waits"


def next_steps(
    parts: ReportParts, verdicts: Sequence[TriageVerdict]
) -> tuple[NextStep, ...]:
    """Return the command lines of verdicts, then of hints, the most useful first.

    At most :data:`MOST` are returned; with fewer than :data:`LEAST`, usual ones follow.
    """
    if parts.target.kind == "log":
        return tuple(_steps_of_log(parts))
    steps: dict[str, str] = {}
    for verdict in verdicts:
        # Of verdicts with the same command, the first is the worst.
        steps.setdefault(verdict.see, _why(verdict))
    tools = {command.split(" ", 1)[0] for command in steps}
    for name, arguments, why in _hints(parts):
        # Views of msa-memstat add to each other; one of another command is enough.
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


def _steps_of_log(parts: ReportParts) -> Iterator[NextStep]:
    """Yield the next steps for a log, which only msa-report reads."""
    target, crash = parts.target, parts.crash
    lines = [event.line for event in parts.events[-1:]]
    line = crash.line if crash is not None and crash.line else next(iter(lines), None)
    if line is not None and target.path != STDIN:
        command = shlex.join(("less", "-R", f"+{line}", "--", target.path))
        yield NextStep(command=command, why="the log from there on")
    yield NextStep(
        command=command_line(target, "report"),
        why="the whole stack, all notes, and what the names mean",
    )


def _why(verdict: TriageVerdict) -> str:
    """Return what the command of a verdict shows."""
    for words, why in _WHY_OF_VIEWS.items():
        if verdict.see.endswith(f" {words}"):
            return why
    if verdict.code == "cpu-starved" and "--stalls" not in verdict.see:
        return _RUN_QUEUES
    return _WHY.get(verdict.code, verdict.code)


def _covers(one: str, other: str) -> bool:
    """Return whether a command shows all that another one does, and more."""
    (tool, words), (other_tool, others) = _words(one), _words(other)
    is_narrower = any(word in _SELECTING for word in words ^ others)
    return tool == other_tool and words > others and not is_narrower


def _words(command: str) -> tuple[str, set[str]]:
    """Return the tool, and the set of other words, split at commas."""
    tool, *words = command.replace(",", " ").split(" ")
    return tool, {*words}


def _hints(parts: ReportParts) -> Iterator[Hint]:
    """Yield hints on facts that summaries show and no verdict judges."""
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
    for name in _HELD:
        what, view = KERNEL_KINDS[name]
        yield from hint(pages[name], _SOME, f"{what}: whose", *view)
    vmalloc = pages["kernel.vmalloc"]
    yield from hint(vmalloc, _SOME, "vmalloc: whose", "--by", "vmalloc")
    tables = pages["kernel.page_tables"]
    yield from hint(tables, _SOME / 2, "page tables: whose", "--by", "process")
    if parts.memory is not None and (groups := parts.memory.removed_groups or 0) > 1:
        what = f"{groups:,} removed control groups still exist: what keeps them"
        yield "memstat", ("--by", "cgroup"), what
    user = sum(n for name, n in pages.items() if name.startswith("user."))
    yield from hint(user, _MOSTLY, "of processes: whose", "--by", "process")
