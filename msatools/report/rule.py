# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules: the condition for each verdict, and its words.

:class:`ReportParts` is the input of all rules.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from msgspec import Struct

from msatools.cpus.model import CpusReport, RunnableTask
from msatools.locks.report import LocksReport, Root, Wait
from msatools.memory.model import MemstatReport, SlabGroup
from msatools.program.description import LogRecord
from msatools.program.model import Target
from msatools.prstat.model import Load, PrstatReport, StackGroup
from msatools.report.log import Cause, Event
from msatools.report.memory import MemoryState, OutOfMemory
from msatools.report.model import (
    CrashDetails,
    Machine,
    NestedFault,
    Severity,
    TriageVerdict,
    VerdictConfidence,
    command_line,
)
from msatools.reports.units import duration, size
from msatools.tasks.identity import AddressSpace
from msatools.tasks.waits import VFORK
from msatools.zombies.model import Limit, ZombiesReport

# --- The input of rules: the reports of the other commands, and further data.


class ReportParts(Struct, frozen=True, kw_only=True):
    """The data read from a kernel. A part that failed is ``None``, and has an error.

    To add a source of findings, add a field here, and read it in
    :mod:`msatools.report.report`; the rules that need it name it in ``needs``.
    """

    target: Target
    machine: Machine
    taken_at_ns: int | None
    """CLOCK_MONOTONIC."""

    crash: CrashDetails | None
    log: tuple[LogRecord, ...]
    events: tuple[Event, ...]
    ooms: tuple[OutOfMemory, ...]
    coverage: Mapping[str, int]
    """Reads and losses of all parts."""

    memstat: MemstatReport | None = None
    memory: MemoryState | None = None
    reclaimable_caches: frozenset[int] = frozenset()
    """Addresses of the slab caches whose memory can be reclaimed."""

    spaces: tuple[AddressSpace, ...] | None = None
    """Address spaces of processes."""

    prstat: PrstatReport | None = None
    """Processes."""

    load: Load | None = None
    """The threads that make up the load."""

    stacks: tuple[StackGroup, ...] | None = None
    """Threads by their stacks, the most first; ``None`` if not asked for."""

    locks: LocksReport | None = None
    zombies: ZombiesReport | None = None
    limits: tuple[Limit, ...] | None = None
    """Limits of the number of tasks, also those that no zombie counts against; the
    zombies are in :attr:`zombies`."""

    cpus: CpusReport | None = None
    errors: Mapping[str, str]
    """Why a part failed, by the name of its field."""

    lacks_levels: bool = False
    """Whether the log is a text without the log level of each line."""

    is_boot_clock: bool = True
    """Whether times count from boot; those of a text may be times of day."""


# --- Words that several verdicts share. Pure.


CAUSES: dict[Cause, str] = {
    "null-dereference": "NULL dereference",
    "page-fault": "page fault at a bad address",
    "protection-fault": "general protection fault",
    "stack-overflow": "kernel stack overflow",
    "stack-corruption": "kernel stack corruption",
    "bug": "BUG",
    "divide-error": "divide error",
    "invalid-opcode": "invalid opcode",
    "oops": "oops",
    "memory-error": "memory error",
    "warning": "warning (panic_on_warn)",
    "soft-lockup": "soft lockup",
    "hard-lockup": "hard lockup",
    "rcu-stall": "RCU stall",
    "hung-task": "hung task",
    "workqueue-stall": "workqueue stall",
    "out-of-memory": "out of memory",
    "init-killed": "init ended",
    "no-root": "no root file system",
    "sysrq": "crash requested by sysrq",
    "nmi": "NMI",
    "machine-check": "machine check",
    "panic": "panic",
}
JUMPS: dict[Cause, str] = {
    "null-dereference": "jump to NULL",
    "page-fault": "jump to a bad address",
}

DOUBTS: dict[VerdictConfidence, str] = {
    "exact": "",
    "likely": "likely",
    "evidence": "circumstantial",
}
"""Word for each confidence; empty if the kernel records the fact."""


def cause_text(cause: Cause) -> str:
    """Return a cause in words."""
    return CAUSES[cause]


def fault_text(crash: CrashDetails) -> str:
    """Return the kind of a fault and the faulting function, in words."""
    cause = cause_text(crash.cause)
    if not crash.function:
        return cause
    if crash.is_jump and crash.cause in JUMPS:
        return f"{JUMPS[crash.cause]} by {function_text(crash)}"
    return f"{cause} in {function_text(crash)}"


def unloaded_text(crash: CrashDetails) -> str:
    """Return a sentence on a bad address that may have been a module's; else empty."""
    if crash.unloaded is None:
        return ""
    what = "code" if crash.is_jump else "data"
    where, last = crash.unloaded.address, crash.unloaded.last
    return (
        f"no module is at {where} now: it may be {what} of one that was unloaded "
        f"(the last: {last}), or that a loaded one had while it was initialized"
    )


def count_text(count: int, one: str, ending: str = "s") -> str:
    """Return a count and a noun."""
    return f"{count:,} {one if count == 1 else one + ending}"


def waited_text(count: int, age_ns: int) -> str:
    """Return how many tasks have waited for something, and for how long."""
    if count == 1:
        return f"1 task has waited for it for {duration(age_ns)}"
    return f"{count:,} tasks have waited for it, the longest {duration(age_ns)}"


def waits_for_text(count: int, what: str) -> str:
    """Return how many tasks wait for *what*; only *what* if none does."""
    if not count:
        return what
    return f"{count_text(count, 'task')} {'waits' if count == 1 else 'wait'} for {what}"


def pid_text(pid: int | None, comm: str | None) -> str:
    """Return a task's ID and name, so that the ID does not read as a count."""
    return f"pid {pid} {comm}" if comm else f"pid {pid}"


def tasks_text(tasks: Iterable[tuple[int | None, str | None]], most: int) -> str:
    """Return the IDs and names of the first tasks: ``pid 1 init, 7 sh, …``."""
    first, left = [*islice(tasks := iter(tasks), most)], any(True for _ in tasks)
    named = ", ".join(pid_text(*task).removeprefix("pid ") for task in first)
    return f"pid {named}{', …' if left else ''}"


def nested_text(fault: NestedFault) -> str:
    """Return a fault in panic() in a few words."""
    place = f" in {function_text(fault)}" if fault.function else ""
    return f"then, in panic(): {cause_text(fault.cause)}{place}: {fault.message}"


def function_text(crash: CrashDetails | NestedFault) -> str:
    """Return the faulting function, with its module."""
    name = crash.function or "-"
    return f"{name} [{crash.module}]" if crash.module else name


def who_text(crash: CrashDetails) -> str:
    """Return the CPU and the task at fault."""
    words = [] if crash.cpu is None else [f"CPU {crash.cpu}"]
    if crash.pid is not None:
        words.append(pid_text(crash.pid, crash.comm))
    return ", ".join(words) or "by an unknown task"


def ago(parts: "ReportParts", time_ns: int) -> str:
    """Return how long ago a time of the log was."""
    is_log = parts.target.kind == "log"
    if parts.taken_at_ns is None:
        return "at an unknown time" if is_log else f"at {time_ns / 1e9:.1f} s"
    before = duration(max(parts.taken_at_ns - time_ns, 0))
    return f"{before} before the log ends" if is_log else f"{before} ago"


def said(event: Event | CrashDetails) -> str:
    """Return the line of the log that reported something, and where it is in a text."""
    message = event.message or "-"
    return f"{message} (line {event.line})" if event.line else message


def root_text(root: Root) -> str:
    """Describe a root of waits: its task and reason, its cycle, or its reason alone."""
    if root.pid is not None and root.kind == "task":
        guess = "perhaps " if root.confidence == "evidence" else ""
        return f"{guess}{pid_text(root.pid, root.comm)}: {root.reason}"
    if root.kind == "cycle":
        return f"{tasks_text(((pid, None) for pid in root.waiters), 4)}: {root.reason}"
    # The kernel does not record who is to wake such a task.
    is_unknown = root.external is None and root.reason.startswith("asleep in ")
    return f"something unknown ({root.reason})" if is_unknown else root.reason


def is_vfork(wait: Wait) -> bool:
    """Return whether a task waits for its child of vfork() to call exec or to exit."""
    return wait.task_class == "WAI" and wait.caller in VFORK


def waits_text(parts: "ReportParts", pid: int) -> str:
    """Return what the threads of a process wait for."""
    if parts.locks is None:
        return "-"
    for wait in parts.locks.waits:
        if wait.tgid == pid:
            on = (
                f"child pid {wait.owners[0]}"
                if is_vfork(wait) and wait.owners
                else wait.lock
            )
            what = " for ".join(each for each in (wait.caller, on) if each)
            age = duration(wait.age_ns)
            return f"thread {wait.pid} {wait.state} {age} in {what or wait.task_class}"
    return "it is runnable"


# --- Waits that several rules judge: thresholds, and the verdict on each wait.
# Pure.
#
# A wait has one cause, and one verdict names it: a task behind a dead disk or a frozen
# file system is not reported again as a hung task.


LONG_NS = 10_000_000_000
"""Shortest wait with a verdict: hung tasks, stuck I/O, stopped owners. Disks and
servers answer within seconds, mostly within milliseconds."""

HUNG_NS = 120_000_000_000
"""Shortest wait that makes hung tasks critical: the kernel's own default
(CONFIG_DEFAULT_HUNG_TASK_TIMEOUT)."""

_RCU = "RCU grace period"
_SERVED = ("device", "swap", "fuse", "network")


def is_long(wait: Wait, limit_ns: int = LONG_NS) -> bool:
    """Return whether a wait has certainly lasted for *limit_ns* or longer."""
    return wait.age_ns >= limit_ns and wait.age_bound != "upper"


def stuck_roots(locks: LocksReport) -> Iterator[Root]:
    """Yield the devices and servers that tasks in state D have long waited for."""
    blocked = uninterruptible(locks)
    for root in locks.roots:
        is_old = root.external in _SERVED and served_age_ns(locks, root) >= LONG_NS
        if is_old and not blocked.isdisjoint(root.behind):
            yield root


def served_age_ns(locks: LocksReport, root: Root) -> int:
    """Return the longest wait for a device or server itself.

    Tasks behind the direct waiters may have waited longer, for other things.
    """
    direct = {root.pid} if root.kind == "task" else {*root.waiters}
    ages = (
        wait.age_ns
        for wait in locks.waits
        if wait.pid in direct and wait.age_bound != "upper"
    )
    return max(ages, default=0)


def frozen_roots(locks: LocksReport) -> Iterator[Root]:
    """Yield the frozen file systems that tasks wait for."""
    yield from (root for root in locks.roots if root.external == "frozen")


def stopped_roots(locks: LocksReport) -> Iterator[Root]:
    """Yield the stopped, traced or frozen tasks that others have long waited for."""
    for root in locks.roots:
        is_stopped = root.state in ("T", "t") or root.reason.startswith("frozen by")
        waiting = root.blocked_d + root.blocked_s
        is_task = root.kind == "task" and root.external is None
        if is_task and is_stopped and waiting and stopped_age_ns(root) >= LONG_NS:
            yield root


def stopped_age_ns(root: Root) -> int:
    """Return for how long others have waited for a task since it was stopped."""
    ages = (root.max_age_ns, root.age_ns)
    return min(age for age in ages if age is not None)


def explained(parts: ReportParts) -> set[int]:
    """Return the IDs of the tasks that need no verdict of their own.

    They are in a deadlock, or wait behind a task that another verdict is about. Empty
    without a report on locks.
    """
    locks = parts.locks
    if locks is None:
        return set()
    roots = [*stuck_roots(locks), *frozen_roots(locks), *stopped_roots(locks)]
    dead = [{*each.pids} for each in locks.deadlocks]
    roots += (
        root
        for root in locks.roots
        if root.kind == "cycle" and any(each <= {*root.waiters} for each in dead)
    )
    roots += _stalled_roots(parts, locks)
    roots += starved_roots(parts, lambda task: task.throttle is not None)
    return {pid for root in roots for pid in root.behind}.union(*dead)


def starved_roots(
    parts: ReportParts,
    is_starved: Callable[[RunnableTask], bool],
    cpus: Collection[int] | None = None,
) -> list[Root]:
    """Return the runnable tasks that get no CPU and that others wait for.

    :param cpus: The CPUs to look at; ``None`` for all.
    """
    if parts.cpus is None or parts.locks is None:
        return []
    starved = {
        task.pid
        for queue in parts.cpus.run_queues
        if cpus is None or queue.cpu in cpus
        for task in queue.waiting
        if is_starved(task)
    }
    return [
        root
        for root in parts.locks.roots
        if root.kind == "task" and root.pid in starved
        if root.blocked_d + root.blocked_s
    ]


def _stalled_roots(parts: ReportParts, locks: LocksReport) -> Iterator[Root]:
    """Yield the roots that a verdict on CPUs names.

    They hold up CPUs or RCU, or get no CPU because of that.
    """
    stalls = parts.cpus.stalls if parts.cpus is not None else None
    found = [each for each in stalls.found if each.over_limit] if stalls else []
    named = {each.culprit_pid for each in found if each.culprit_pid}
    is_rcu = any(each.code == "rcu-stalled" for each in found)
    if is_rcu and stalls is not None and stalls.rcu is not None:
        named |= {task.pid for task in stalls.rcu.tasks}
    for stall in found:
        yield from starved_roots(parts, lambda task: not task.throttled, stall.cpus)
    for diagnostic in parts.cpus.findings if parts.cpus is not None else ():
        if diagnostic.code == "no-turn":
            yield from starved_roots(parts, has_waited_long, diagnostic.cpus)
    for root in locks.roots:
        waits_for_rcu = root.kind == "external" and root.reason.startswith(_RCU)
        if root.pid in named or (is_rcu and waits_for_rcu):
            yield root


def throttled_tasks(parts: ReportParts) -> dict[str, list[RunnableTask]]:
    """Map each reason for throttling, in words, to the tasks throttled for it."""
    found: dict[str, list[RunnableTask]] = {}
    for queue in parts.cpus.run_queues if parts.cpus is not None else ():
        for task in queue.waiting:
            if task.throttle is not None:
                found.setdefault(task.throttle, []).append(task)
    return found


def has_waited_long(task: RunnableTask) -> bool:
    """Return whether a runnable task has long waited for its CPU."""
    return (task.wait_ns or 0) >= LONG_NS


def uninterruptible(locks: LocksReport) -> set[int]:
    """Return the IDs of the blocked tasks in state D."""
    return {wait.pid for wait in locks.waits if wait.state == "D"}


# --- Memory that reclaim cannot free, by kind, and its owners.


SHOWN = 4


class Kind(Struct, frozen=True):
    """Memory of one kind."""

    name: str
    pages: int
    is_kernel: bool
    """Whether the kernel uses it, rather than processes."""

    view: tuple[str, ...] = ()
    """Options of msa-memstat that show its owners."""


_MORE, _BARE = ("-v",), ("--unattributed",)
KERNEL_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kernel.page_tables": ("page tables", ("--by", "process")),
    "kernel.stacks": ("kernel stacks", _MORE),
    "kernel.vmalloc": ("vmalloc", ("--by", "vmalloc")),
    "kernel.vmap": ("pages mapped by vmap", ("--by", "vmalloc")),
    "kernel.rings": ("rings of perf, io_uring and packets", _MORE),
    "kernel.requests": ("requests of disks", _MORE),
    "kernel.dma": ("queues of devices", _MORE),
    "kernel.dmabuf": ("dma-bufs", ("--by", "dmabuf")),
    "kernel.mempools": ("memory pools", _MORE),
    "kernel.tracing": ("tracing", _MORE),
    "kernel.globals": ("hash tables", _MORE),
    "kernel.percpu": ("per-CPU memory", _MORE),
    "kernel.large_kmalloc": ("large kmalloc", _BARE),
    "kernel.unattributed": (
        "pages that no owner explains (a driver's, or a leak)",
        _BARE,
    ),
}
"""Unreclaimable classes of memory: the name of each in words, and the options of
msa-memstat that show its owners."""


def unreclaimable(parts: ReportParts) -> list[Kind]:
    """Return the kinds that reclaim cannot free, largest first; empty if unknown."""
    memory, memstat = parts.memory, parts.memstat
    if memory is None or memstat is None:
        return []
    classes = {each.name: each.pages for each in memstat.classes}
    has_swap = bool(memory.swap_free_pages)
    locked = memory.sum("NR_MLOCK") or 0
    kinds = [Kind("locked (mlock)", locked, False)]
    if not has_swap:
        # Locked pages are taken for anonymous ones, then shared: none counts twice.
        anon, shmem = classes.get("user.anon", 0), classes.get("cache.shmem", 0)
        shmem -= min(max(locked - anon, 0), shmem)
        anon -= min(locked, anon)
        kinds.append(Kind("anonymous, without swap", anon, False))
        kinds.append(Kind("tmpfs and shared memory, without swap", shmem, False))
    slab = memory.slab("NR_SLAB_UNRECLAIMABLE")
    name = f"unreclaimable slab{_largest_cache(parts)}"
    kinds.append(Kind(name, slab or 0, True, ("--by", "slab")))
    huge = classes.get("user.hugetlb", 0) + classes.get("free.hugetlb", 0)
    kinds.append(Kind("hugetlb pool", huge, False))
    kinds += (
        Kind(text, classes.get(name, 0), True, view)
        for name, (text, view) in KERNEL_KINDS.items()
    )
    return sorted((each for each in kinds if each.pages), key=lambda each: -each.pages)


def slab_groups(report: MemstatReport | None) -> dict[int, SlabGroup]:
    """Return the slab caches in a report, by the address of their ``kmem_cache``."""
    by = (report.by if report else None) or {}
    groups = (group for group in by.get("slab", ()) if isinstance(group, SlabGroup))
    return {group.kmem_cache: group for group in groups if group.kmem_cache is not None}


def _largest_cache(parts: ReportParts) -> str:
    caches = (
        group
        for address, group in slab_groups(parts.memstat).items()
        if address not in parts.reclaimable_caches
    )
    largest = max(caches, key=lambda group: group.pages, default=None)
    if largest is None:
        return ""
    amount = size(largest.pages * parts.target.page_size)
    return f" (of which {largest.name} {amount})"


def kinds_text(parts: ReportParts) -> Iterator[str]:
    """Yield a line on the largest unreclaimable kinds, and one on large processes."""
    kinds = unreclaimable(parts)
    if not kinds:
        return
    page = parts.target.page_size
    text = "; ".join(f"{size(k.pages * page)} {k.name}" for k in kinds[:SHOWN])
    yield f"reclaim cannot free: {text}"
    if parts.prstat is not None:
        tasks = parts.prstat.tasks
        largest = sorted(tasks, key=lambda task: -(task.rss_bytes or 0))
        named = (
            f"pid {task.pid} {task.comm} {size(task.rss_bytes or 0)}"
            for task in largest[:3]
            if task.rss_bytes
        )
        if text := ", ".join(named):
            yield f"largest processes: {text}"


# --- Rules: the condition for each verdict, and its words.
#
# A rule is data; msatools.report.rules has a file of rules for each topic.


S = TypeVar("S")

ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}


class VerdictRule(Struct, Generic[S], frozen=True, kw_only=True):
    """One rule, on subjects of one kind: a lock, a process, the whole machine."""

    code: str
    """The verdict's code, one of those in docs/commands/report.md."""

    needs: tuple[str, ...]
    """The fields of :class:`ReportParts` that it needs."""

    when: Callable[[ReportParts], Iterable[S]]
    """Returns the subjects for which the rule holds, the worst first."""

    severity: Severity | Callable[[S], Severity]
    confidence: VerdictConfidence | Callable[[S], VerdictConfidence]
    words: Callable[[S], str]
    """The verdict, as one sentence."""

    evidence: Callable[[S], Iterable[str]]
    """Facts that support the verdict."""

    see: Callable[[S], tuple[str, ...]]
    """The command that shows more: its name, and its arguments after the target."""


def verdicts(
    rules: Iterable[VerdictRule[Any]], parts: ReportParts
) -> list[TriageVerdict]:
    """Return the verdicts of all rules that hold, the worst first.

    Of equal severity, those of earlier rules come first.
    """
    return worst_first(verdict for rule in rules for verdict in judge(rule, parts))


def worst_first(found: Iterable[TriageVerdict]) -> list[TriageVerdict]:
    """Return verdicts by severity; of equal severity, in their order."""
    return sorted(found, key=lambda verdict: ORDER[verdict.severity])


def untested(rules: Iterable[VerdictRule[Any]], parts: ReportParts) -> tuple[str, ...]:
    """Return the codes of which no rule can be tested, as each lacks a part."""
    tested: dict[str, bool] = {}
    for rule in rules:
        is_whole = all(getattr(parts, name) is not None for name in rule.needs)
        tested[rule.code] = is_whole or tested.get(rule.code, False)
    return tuple(code for code, is_tested in tested.items() if not is_tested)


def judge(rule: VerdictRule[Any], parts: ReportParts) -> Iterator[TriageVerdict]:
    """Yield the verdicts of one rule."""
    if any(getattr(parts, name) is None for name in rule.needs):
        return
    for subject in rule.when(parts):
        severity, confidence = rule.severity, rule.confidence
        name, *arguments = rule.see(subject)
        yield TriageVerdict(
            code=rule.code,
            severity=severity(subject) if callable(severity) else severity,
            confidence=confidence(subject) if callable(confidence) else confidence,
            text=rule.words(subject),
            evidence=tuple(rule.evidence(subject)),
            see=command_line(parts.target, name, arguments),
        )
