# SPDX-License-Identifier: LGPL-2.1-or-later

"""There was not enough memory, and the kernel killed processes or died of it."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.model import Severity
from msatools.report.oom import OutOfMemory, Victim, victims
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.unreclaimable import kinds_text
from msatools.report.words import ago, count_text, pid_text, tasks_text, waits_text
from msatools.reports.units import size

_HOLDERS = 3
_KINDS = 4
_LITTLE = 0.02
"""Share of memory below which a kind of it is not told."""

_DYING_NS = 3_000_000_000
"""A process that was killed, and is not stuck, frees its memory within so long."""


class _MemoryShortage(Struct, frozen=True):
    parts: ReportParts
    last: OutOfMemory
    victims: list[Victim]
    alive: list[Victim]
    """Victims that have not died."""

    @property
    def is_fatal(self) -> bool:
        crash = self.parts.crash
        return crash is not None and crash.cause == "out-of-memory"


def _when(parts: ReportParts) -> Iterator[_MemoryShortage]:
    if not parts.ooms:
        return
    killed = victims(parts.ooms)
    yield _MemoryShortage(parts, parts.ooms[-1], killed, _alive(parts, killed))


def _alive(parts: ReportParts, killed: list[Victim]) -> list[Victim]:
    """Return the victims whose process still has threads that are not dead."""
    now = parts.taken_at_ns
    if parts.prstat is None or now is None:
        return []
    since = {
        (task.pid, task.comm): now - task.lifetime_ns
        for task in parts.prstat.tasks
        if task.task_class != "ZMB"
    }
    return [
        each
        for each in killed
        # Not a later process with its number and name.
        if since.get((each.pid, each.comm), now) < each.time_ns
        and now - each.time_ns >= _DYING_NS
    ]


def _severity(subject: _MemoryShortage) -> Severity:
    return "critical" if subject.is_fatal or subject.alive else "warning"


def _words(subject: _MemoryShortage) -> str:
    last, parts = subject.last, subject.parts
    where = _where(last)
    if subject.is_fatal:
        return f"{where}, and {_why_fatal(parts)}"
    killed = f"the kernel killed {count_text(len(subject.victims), 'process', 'es')}"
    if subject.alive:
        stays = tasks_text(((each.pid, each.comm) for each in subject.alive), 3)
        verb = "does" if len(subject.alive) == 1 else "do"
        return f"{where}; {killed}, of which {stays} {verb} not exit"
    return f"{where} {ago(parts, last.time_ns)}; {killed}"


def _where(oom: OutOfMemory) -> str:
    if oom.order is not None and oom.order < 0:
        return "a user made the kernel kill a process (sysrq-f)"
    if oom.constraint == "cgroup":
        return f"control group {oom.cgroup or '-'} ran out of memory"
    limits = {"cpuset": " in a cpuset", "memory-policy": " under a memory policy"}
    return f"the machine ran out of memory{limits.get(oom.constraint, '')}"


def _why_fatal(parts: ReportParts) -> str:
    message = (parts.crash.message if parts.crash else None) or ""
    if "panic_on_oom" in message:
        return "the kernel panicked because of panic_on_oom"
    return "the kernel panicked: it had no process to kill"


def _evidence(subject: _MemoryShortage) -> Iterator[str]:
    last, parts = subject.last, subject.parts
    page = parts.target.page_size
    if last.order is not None and last.order >= 0:
        asked = f"asked for {size(page << last.order)} (order {last.order})"
        yield f"{last.comm} {asked}" + (f", {last.flags}" if last.flags else "")
    if last.filled:
        whole = sum(last.filled.values())
        kinds = [
            f"{size(amount)} {kind}"
            for kind, amount in last.filled.items()
            if amount >= _LITTLE * whole
        ]
        what = "the group" if last.constraint == "cgroup" else "memory"
        yield f"{what} was then {', '.join(kinds[:_KINDS])}"
    if last.holders:
        holders = (
            f"{pid_text(each.pid, each.comm)} {size(each.rss_pages * page)}"
            for each in last.holders[:_HOLDERS]
        )
        yield f"largest then: {', '.join(holders)}"
    for each in subject.victims[-_HOLDERS:]:
        amount = "" if each.anon_bytes is None else f" ({size(each.anon_bytes)} anon)"
        yield f"killed {pid_text(each.pid, each.comm)}{amount}"
    for each in subject.alive[:_HOLDERS]:
        yield f"{pid_text(each.pid, each.comm)} waits: {waits_text(parts, each.pid)}"
    if subject.is_fatal and last.constraint != "cgroup":
        yield from kinds_text(parts)


def _see(subject: _MemoryShortage) -> tuple[str, ...]:
    if subject.alive:
        # Until it dies nobody gets its memory.
        pids = ",".join(str(each.pid) for each in subject.alive[:_HOLDERS])
        return ("locks", "--chains", "-p", pids)
    by_cgroup = subject.last.constraint == "cgroup"
    return ("memstat", "--by", "cgroup,fs" if by_cgroup else "process,slab,fs")


RULE = VerdictRule(
    code="out-of-memory",
    needs=(),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=_see,
)
