# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each command says, in one line. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msatools.cpus.model import CpusReport
from msatools.kernel.report import LossLog, Report
from msatools.locks.report import LocksReport
from msatools.memory.model import MemstatReport
from msatools.prstat.model import Load, LoadGroup, PrstatReport
from msatools.report.model import ReportSection
from msatools.report.parts import ReportParts
from msatools.report.words import count_text, pid_text, root_text
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
"""Further parts of memory, where there are any. What is reserved was never managed."""

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
        share = f" ({100 * amount / whole:.0f} %)" if whole else ""
        words.append(f"{size(amount * report.target.page_size)} {label}{share}")
    wrong = [
        check.name
        for check in report.checks
        if check.difference and check.explained_by is None
    ]
    checks = f"; unexplained: {', '.join(wrong)}" if wrong else ""
    total = size(whole * report.target.page_size)
    balloon = " with the balloon" if "balloon" in amounts else ""
    return f"{total}{balloon}: {', '.join(words)}{checks}"


def kinds_of_pages(report: MemstatReport) -> dict[str, int]:
    """Return the pages of each kind of memory; what is reserved was never managed."""
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
