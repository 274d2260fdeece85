# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on CPUs: stalls, starvation, throttling, interrupts, RCU and workqueues.

Each threshold is a constant beside its rule. Several rules share code in
:mod:`msatools.report.rule`; the findings of msa-cpus are made in
:mod:`msatools.cpus.diagnostics`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from msgspec import Struct

from msatools.cpus.diagnostics import LONG_WAIT_NS, BusiestCpu, busiest_cpu
from msatools.cpus.model import (
    Cpu,
    Diagnostic,
    RunnableTask,
    RunQueue,
    Stall,
    StallCode,
)
from msatools.locks.report import Inversion, LocksReport, Root
from msatools.report.log import Cause, Event, faulting
from msatools.report.model import Severity, VerdictConfidence
from msatools.report.rule import (
    DOUBTS,
    ReportParts,
    VerdictRule,
    ago,
    cause_text,
    count_text,
    pid_text,
    said,
    starved_roots,
    stuck_roots,
    tasks_text,
    throttled_tasks,
    waits_for_text,
)
from msatools.reports.units import duration, ranges

# --- Rules that report findings of msa-cpus.


def present_finding(
    finding: str,
    code: str,
    *see: str,
    severity: Severity = "warning",
    confidence: VerdictConfidence = "exact",
) -> VerdictRule[Diagnostic]:
    """Return the rule that reports one kind of findings.

    :param finding: Code of the findings in msa-cpus.
    :param code: The code of the verdict.
    :param see: Arguments of msa-cpus that show more.
    """
    return VerdictRule(
        code=code,
        needs=("cpus",),
        when=lambda parts: _found(parts, finding),
        severity=severity,
        confidence=confidence,
        words=lambda found: found.text,
        evidence=lambda found: found.evidence,
        see=lambda found: ("cpus", *see),
    )


def _found(parts: ReportParts, finding: str) -> Iterator[Diagnostic]:
    findings = parts.cpus.findings if parts.cpus is not None else ()
    yield from (each for each in findings if each.code == finding)


# --- Rules on stalls, of which there are two for most codes.
#
# One reports what is stalled now, by the kernel's structures; the other, what the
# kernel's own watchdogs have logged. The second yields nothing where the first finds a
# stall, as the first says more.


_MOST_LINES = 6
"""Lines of a chain that are evidence; ``msa-cpus --stalls`` has all."""

_ROOTS = 3

_RECENT_NS = 60_000_000_000
"""The kernel reports an ongoing stall again within this time."""

# --- CPUs, grace periods and workqueues without progress now.


class _PresentStall(Struct, frozen=True):
    stall: Stall
    parts: ReportParts
    behind: list[Stall]
    """Other stalls that the same CPU causes."""


def present_stalls(code: StallCode) -> VerdictRule[_PresentStall]:
    """Return the rule on present stalls that exceed the kernel's own limit."""
    return VerdictRule(
        code=code,
        needs=("cpus",),
        when=lambda parts: _joined_stalls(parts, code),
        severity="critical",
        confidence=lambda subject: subject.stall.confidence,
        words=lambda subject: subject.stall.text,
        evidence=_stall_evidence,
        see=lambda subject: ("cpus", "--stalls"),
    )


def _stalls_of(parts: ReportParts, code: str) -> Iterator[Stall]:
    """Yield the stalls of a code that exceed the kernel's limit, the worst first."""
    found = parts.cpus.stalls if parts.cpus is not None else None
    if found is not None:
        yield from (
            each for each in found.found if each.over_limit and each.code == code
        )


def _joined_stalls(parts: ReportParts, code: str) -> Iterator[_PresentStall]:
    """Yield the stalls, the worst first; those that one CPU causes are joined.

    Of joined ones the stall of that CPU itself comes first, if there is one.
    """
    found = [*_stalls_of(parts, code)]
    while found:
        culprit = found[0].culprit_cpu
        alike = [each for each in found if each.culprit_cpu == culprit]
        if culprit is None:
            alike = found[:1]
        # Sorting keeps the order of the others.
        first, *behind = sorted(alike, key=lambda each: each.cpus != (culprit,))
        yield _PresentStall(first, parts, behind)
        found = [each for each in found if each not in alike]


def _stall_evidence(subject: _PresentStall) -> Iterator[str]:
    stall, parts = subject.stall, subject.parts
    yield f"this is called a stall from {duration(stall.limit_ns)} on"
    chain = [each for each in stall.chain if each.partition(": ")[2] not in stall.text]
    yield from chain[:_MOST_LINES]
    for other in subject.behind[:_MOST_LINES]:
        doubt = DOUBTS[other.confidence]
        yield f"behind it{f' ({doubt})' if doubt else ''}: {other.text}"
    if left := len(subject.behind[_MOST_LINES:]):
        yield f"… {count_text(left, 'more stall')} behind it"
    cpus = {cpu for each in (stall, *subject.behind) for cpu in each.cpus}
    yield from behind_starved(parts, lambda task: not task.throttled, cpus)


def behind_starved(
    parts: ReportParts,
    is_starved: Callable[[RunnableTask], bool],
    cpus: Collection[int],
) -> Iterator[str]:
    """Yield a line on the waiters of each starved task: hung-tasks lacks them."""
    for root in starved_roots(parts, is_starved, cpus)[:_ROOTS]:
        waiting = root.blocked_d + root.blocked_s
        who = pid_text(root.pid, root.comm)
        yield f"{waits_for_text(waiting, who)}, the longest {duration(root.max_age_ns)}"


def pools_of(parts: ReportParts) -> Iterator[Root]:
    """Yield the roots that are worker pools, whose pending work no worker starts."""
    if parts.locks is not None:
        yield from (root for root in parts.locks.roots if root.pool is not None)


# --- Stalls that the kernel's watchdogs have logged.


class LoggedStalls(Struct, frozen=True):
    """Reports of one kind in the kernel's log, the latest last."""

    events: list[Event]
    is_fatal: bool
    """Whether the kernel crashed because of such a stall."""

    is_over: bool
    """Whether the stalls have certainly ended."""

    parts: ReportParts

    @property
    def goes_on(self) -> bool:
        """Whether a stall may go on: it has no known end, and was logged recently."""
        now = self.parts.taken_at_ns
        return not self.is_over and (
            now is None or now - self.events[-1].time_ns < _RECENT_NS
        )


def logged_stalls(code: str, causes: tuple[Cause, ...]) -> VerdictRule[LoggedStalls]:
    """Return the rule on stalls that the kernel's own watchdogs reported."""

    def when(parts: ReportParts) -> Iterator[LoggedStalls]:
        found = [
            event
            for event in parts.events
            if event.cause in causes and not event.is_panic
        ]
        if found and not _is_present(parts, code):
            is_fatal = parts.crash is not None and parts.crash.cause in causes
            yield LoggedStalls(found, is_fatal, _is_over(parts, code), parts)

    return VerdictRule(
        code=code,
        needs=(),
        when=when,
        severity=_stalls_severity,
        confidence="exact",
        words=_stalls_words,
        evidence=_stalls_evidence,
        see=lambda subject: ("cpus", "-v"),
    )


def _is_present(parts: ReportParts, code: str) -> bool:
    if code == "workqueue-stalled":
        return any(pools_of(parts))
    return any(_stalls_of(parts, code))


def _is_over(parts: ReportParts, code: str) -> bool:
    """Return whether present stalls were read, so that finding none shows the end."""
    if code == "workqueue-stalled":
        return parts.locks is not None
    return parts.cpus is not None and parts.cpus.stalls is not None


def _stalls_severity(subject: LoggedStalls) -> Severity:
    return "critical" if subject.is_fatal or subject.goes_on else "warning"


def _stalls_words(subject: LoggedStalls) -> str:
    last = subject.events[-1]
    times = count_text(len(subject.events), "time")
    when = ago(subject.parts, last.time_ns)
    at = f"CPU {last.cpu}: " if last.cpu is not None else ""
    frames = faulting(last.backtrace.frames, last.cause) if last.backtrace else []
    place = f" in {frames[0].text}" if frames else ""
    over = "" if subject.is_fatal or not subject.is_over else "; it is over"
    return f"{at}{cause_text(last.cause)}{place}, reported {times}, last {when}{over}"


def _stalls_evidence(subject: LoggedStalls) -> Iterator[str]:
    last = subject.events[-1]
    yield said(last)
    for trace in last.backtraces[:3]:
        if trace.frames:
            cpu = "-" if trace.cpu is None else trace.cpu
            frames = " < ".join(frame.text for frame in trace.frames[:4])
            yield f"CPU {cpu} {trace.comm or ''}: {frames}"


# --- A CPU takes no interrupts, or does not switch to tasks that wait for it.
#
# Below the limits of a stall the severity is info: without a verdict the report would
# read as an all-clear, although msa-cpus has a finding.


_A_WHILE_NS = 2_000_000_000
"""Shortest time to report: many turns of other tasks."""


class _HeldCpus(Struct, frozen=True):
    """CPUs that stand still for less than the limits of a stall."""

    found: list[Diagnostic]
    held_ns: dict[int, int]
    """For how long each CPU has stood still, by its number."""

    are_below: bool
    """Whether each is known to be below the limit of its kind."""


def _when_held(parts: ReportParts) -> Iterator[_HeldCpus]:
    assert parts.cpus is not None
    # cpu-starved reports tasks that get no turn. Stalls have verdicts, too, also one of
    # several CPUs, such as those that stopped and wait for another one (stop_machine).
    named = {cpu for each in _found(parts, "no-turn") for cpu in each.cpus}
    stalls = parts.cpus.stalls
    if stalls is not None:
        named |= {cpu for each in stalls.found if each.over_limit for cpu in each.cpus}
    queues = {
        queue.cpu: queue for queue in parts.cpus.run_queues if queue.cpu not in named
    }
    found, held_ns, are_below = [], dict[int, int](), stalls is not None
    for each in parts.cpus.findings:
        ages = {
            cpu: age_ns
            for cpu in each.cpus
            if cpu in queues and (age_ns := _held_for(each, queues[cpu])) >= _A_WHILE_NS
        }
        if ages:
            found.append(each)
            for cpu, age_ns in ages.items():
                held_ns[cpu] = max(age_ns, held_ns.get(cpu, 0))
            if stalls is not None:
                limits, is_tick = stalls.limits, each.code == "not-ticked"
                limit_ns = limits.no_tick_ns if is_tick else limits.no_switch_ns
                are_below &= max(ages.values()) < limit_ns
    if found:
        yield _HeldCpus(found, held_ns, are_below)


def _held_for(found: Diagnostic, queue: RunQueue) -> int:
    """Return for how long a CPU has stood still by a finding of msa-cpus, in ns; 0 if
    the finding is of another kind, or the time is unknown."""
    if found.code == "not-ticked":
        return queue.ticked_ns or 0
    if found.code == "not-switched":
        return queue.switched_ns or 0
    if found.code == "starving-tasks":
        waits = (
            task.wait_ns or 0
            for task in queue.waiting
            if not task.throttled and task.wait_bound == "exact"
        )
        return max(waits, default=0)
    return 0


def _held_cpus_words(subject: _HeldCpus) -> str:
    if len(subject.found) == 1:
        return subject.found[0].text
    longest = max(subject.held_ns.values())
    return (
        f"cpu{ranges(subject.held_ns)}: no interrupts, or no turn for tasks that wait, "
        f"for up to {duration(longest)}"
        + (", which is below the limits of a stall" if subject.are_below else "")
    )


def _held_cpus_evidence(subject: _HeldCpus) -> Iterator[str]:
    if len(subject.found) == 1:
        if subject.are_below:
            yield "this is below the limits of a stall"
        return
    yield from (each.text for each in subject.found[:_MOST_LINES])
    if left := len(subject.found[_MOST_LINES:]):
        yield f"… {left:,} more"


CPU_STALLED: tuple[VerdictRule[Any], ...] = (
    present_stalls("cpu-stalled"),
    logged_stalls("cpu-stalled", ("soft-lockup", "hard-lockup")),
    VerdictRule(
        code="cpu-stalled",
        needs=("cpus",),
        when=_when_held,
        severity="info",
        confidence="exact",
        words=_held_cpus_words,
        evidence=_held_cpus_evidence,
        see=lambda subject: ("cpus", "--stalls", "-v"),
    ),
)


# --- Tasks get no turn on a CPU, as others with a higher priority do not leave it.


CPU_STARVED = (
    present_stalls("cpu-starved"),
    present_finding("no-turn", "cpu-starved", "-v"),
)


# --- Runnable tasks may not run, as the quota of their control group is used up.


_MANY = 3
"""Minimum number of throttled tasks to report if nobody waits for them: a group with a
quota has some now and then."""

_NAMED = 3


class _Throttled(Struct, frozen=True):
    """The tasks that are throttled for one reason."""

    why: str
    tasks: list[RunnableTask]
    roots: list[Root]
    """Roots of waits among the throttled tasks: those that others wait for."""


def _cpu_throttled_when(parts: ReportParts) -> Iterator[_Throttled]:
    roots = parts.locks.roots if parts.locks is not None else ()
    for why, tasks in throttled_tasks(parts).items():
        pids = {task.pid for task in tasks}
        held_up = [root for root in roots if root.pid in pids]
        if held_up or len(tasks) >= _MANY:
            yield _Throttled(why, tasks, held_up)


def _cpu_throttled_severity(subject: _Throttled) -> Severity:
    return "warning" if subject.roots else "info"


def _cpu_throttled_words(subject: _Throttled) -> str:
    tasks = subject.tasks
    if not subject.roots:
        return f"{count_text(len(tasks), 'task')} are {subject.why}"
    names = {task.pid: task.comm for task in tasks}
    (first, *others) = [root.pid for root in subject.roots if root.pid is not None]
    who = pid_text(first, names.get(first))
    more = f" (and {len(others)} more)" if others else ""
    waiting = sum(root.blocked_d + root.blocked_s for root in subject.roots)
    wait = "waits" if waiting == 1 else "wait"
    return (
        f"{who}{more}, for which {count_text(waiting, 'task')} {wait}, is {subject.why}"
    )


def _cpu_throttled_evidence(subject: _Throttled) -> Iterator[str]:
    tasks = subject.tasks
    yield f"throttled: {tasks_text(((task.pid, task.comm) for task in tasks), _NAMED)}"


CPU_THROTTLED = VerdictRule(
    code="cpu-throttled",
    needs=("cpus",),
    when=_cpu_throttled_when,
    severity=_cpu_throttled_severity,
    confidence="exact",
    words=_cpu_throttled_words,
    evidence=_cpu_throttled_evidence,
    see=lambda subject: ("cpus", "-v"),
)


# --- A CPU is busy with what no task of that name does, or RCU callbacks pile up on it.


_BACKLOG = "callback: "
"""Start of the evidence in findings on RCU callbacks."""


class _Backlog(Struct, frozen=True):
    found: Diagnostic
    thread: RunnableTask | None
    """The thread that is to invoke the callbacks, if it waits for a CPU."""

    queue: RunQueue | None
    """The run queue that the thread is on."""


def _storms(parts: ReportParts) -> Iterator[Diagnostic]:
    assert parts.cpus is not None
    for found in parts.cpus.findings:
        if found.code == "storm" and not _is_backlog(found):
            yield found


def _is_backlog(found: Diagnostic) -> bool:
    return any(line.startswith(_BACKLOG) for line in found.evidence)


def _backlogs(parts: ReportParts) -> Iterator[_Backlog]:
    assert parts.cpus is not None
    for found in parts.cpus.findings:
        if found.code == "storm" and _is_backlog(found):
            yield _Backlog(found, *_thread(parts, found.cpus[0]))


def _thread(
    parts: ReportParts, cpu: int
) -> tuple[RunnableTask | None, RunQueue | None]:
    """Return the thread that invokes a CPU's RCU callbacks, and its run queue.

    ``rcuop/N`` invokes those of an offloaded CPU (kernel/rcu/tree_nocb.h), ``rcuc/N``
    those of a kernel booted with rcutree.use_softirq=0; without either it may be
    ``ksoftirqd/N``. Only kernel threads count: a user's task may have such a name.
    """
    assert parts.cpus is not None
    if parts.prstat is None:
        return None, None
    threads = {row.pid: row.comm for row in parts.prstat.tasks if row.kthread}
    names = {f"rcuop/{cpu}", f"rcuc/{cpu}"} & {*threads.values()}
    names = names or {f"ksoftirqd/{cpu}"}
    for queue in parts.cpus.run_queues:
        for task in queue.waiting:
            if threads.get(task.pid) in names:
                return task, queue
    return None, None


def _backlog_severity(subject: _Backlog) -> Severity:
    return "info" if subject.thread is None else "warning"


def _backlog_evidence(subject: _Backlog) -> Iterator[str]:
    thread, queue = subject.thread, subject.queue
    if thread is None or queue is None:
        return
    who = pid_text(thread.pid, thread.comm)
    if thread.throttled or thread.throttle:
        yield f"{who} is to call them, and is {thread.throttle or 'throttled'}"
        return
    waited = "" if thread.wait_ns is None else f" for {duration(thread.wait_ns)}"
    runs = ""
    if queue.current is not None:
        runs = f", which runs {pid_text(queue.current.pid, queue.current.comm)}"
    yield f"{who} is to call them, and has waited{waited} for cpu{queue.cpu}{runs}"


CPU_STORM: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="cpu-storm",
        needs=("cpus",),
        when=_storms,
        severity="info",
        confidence="evidence",
        words=lambda found: found.text,
        evidence=lambda found: (),
        see=lambda found: ("cpus", "-v"),
    ),
    VerdictRule(
        code="rcu-backlog",
        needs=("cpus",),
        when=_backlogs,
        severity=_backlog_severity,
        confidence="evidence",
        words=lambda subject: subject.found.text,
        evidence=_backlog_evidence,
        see=lambda subject: ("cpus", "--stalls"),
    ),
)


# --- An interrupt is disabled that has come before.
#
# Tasks that need it wait until it is enabled. Some drivers disable theirs for a moment,
# so that this alone has severity info; if tasks have long waited for a disk of the same
# controller, it may be the cause, as each CPU has a queue of its own.


_QUEUE = re.compile(r"irq \d+ (nvme\d+)q[1-9]\d* ")
"""Start of findings on the interrupt of an NVMe I/O queue; the controller's disks are
nvme0n1 and so on (drivers/nvme/host/pci.c), and q0 is its admin queue. The interrupts
of other controllers do not name disks."""


class _Disabled(Struct, frozen=True):
    found: Diagnostic
    roots: list[Root]
    """The disks of its controller that tasks have long waited for."""


def _irq_disabled_when(parts: ReportParts) -> Iterator[_Disabled]:
    assert parts.cpus is not None
    stuck = [*stuck_roots(parts.locks)] if parts.locks is not None else []
    for found in parts.cpus.findings:
        if found.code == "irq-disabled":
            of_queue = _QUEUE.match(found.text)
            disks = f"{of_queue[1]}n" if of_queue else None
            yield _Disabled(found, [r for r in stuck if disks and _is_of(r, disks)])


def _is_of(root: Root, disks: str) -> bool:
    return any(name.startswith(disks) for name in root.disks or ())


def _irq_disabled_severity(subject: _Disabled) -> Severity:
    return "warning" if subject.roots else "info"


def _irq_disabled_evidence(subject: _Disabled) -> Iterator[str]:
    for root in subject.roots:
        # Not certain: requests in other queues have other interrupts.
        yield f"perhaps the cause of the wait for {root.reason}"
    yield from subject.found.evidence


IRQ_DISABLED = VerdictRule(
    code="irq-disabled",
    needs=("cpus",),
    when=_irq_disabled_when,
    severity=_irq_disabled_severity,
    confidence="exact",
    words=lambda subject: subject.found.text,
    evidence=_irq_disabled_evidence,
    see=lambda subject: ("cpus", "-i"),
)


# --- One CPU takes most interrupts of devices, and it is busy with them.


_BUSY = 0.1
"""Minimum share of a CPU's time in interrupts and softirqs."""

_TIMES_OTHERS = 3
"""Minimum ratio to the share of the other CPUs: timers interrupt all CPUs."""


class _LoadedCpu(Struct, frozen=True):
    busiest: BusiestCpu
    share: float
    """Share of its time in interrupts and softirqs."""

    others: float
    """Share of the other online CPUs' time in interrupts and softirqs."""


def _irq_imbalance_when(parts: ReportParts) -> Iterator[_LoadedCpu]:
    assert parts.cpus is not None
    online = [cpu for cpu in parts.cpus.cpus if cpu.online]
    busiest = busiest_cpu(parts.cpus.irqs or (), len(online))
    if busiest is None or not busiest.is_uneven:
        return
    share = _share([cpu for cpu in online if cpu.cpu == busiest.cpu])
    others = _share([cpu for cpu in online if cpu.cpu != busiest.cpu])
    if share >= max(_BUSY, _TIMES_OTHERS * others):
        yield _LoadedCpu(busiest, share, others)


def _share(cpus: Sequence[Cpu]) -> float:
    total = sum(sum(_times(cpu)) for cpu in cpus)
    return sum(cpu.irq_ns or 0 for cpu in cpus) / total if total else 0.0


def _times(cpu: Cpu) -> Iterator[int]:
    """Yield the times of a CPU, in ns, that add up to all its time."""
    times = (cpu.usr_ns, cpu.sys_ns, cpu.irq_ns, cpu.wt_ns, cpu.st_ns)
    for each in (*times, cpu.gst_ns, cpu.idl_ns):
        yield each or 0


def _irq_imbalance_evidence(subject: _LoadedCpu) -> Iterator[str]:
    yield (
        f"{100 * subject.share:.0f} % of its time since boot was in interrupts and "
        f"softirqs, and {100 * subject.others:.0f} % of that of the other CPUs"
    )


IRQ_IMBALANCE = VerdictRule(
    code="irq-imbalance",
    needs=("cpus",),
    when=_irq_imbalance_when,
    severity="warning",
    confidence="evidence",
    words=lambda subject: subject.busiest.text,
    evidence=_irq_imbalance_evidence,
    see=lambda subject: ("cpus", "-i"),
)


# --- A grace period of RCU does not end, so that memory is not freed.


RCU_STALLED: tuple[VerdictRule[Any], ...] = (
    present_stalls("rcu-stalled"),
    logged_stalls("rcu-stalled", ("rcu-stall",)),
)


# --- Work is pending in a pool of workers, and none of it begins.


class _StalledPool(Struct, frozen=True):
    root: Root
    parts: ReportParts


def _workqueue_stalled_when(parts: ReportParts) -> Iterator[_StalledPool]:
    for root in pools_of(parts):
        yield _StalledPool(root, parts)


def _workqueue_stalled_evidence(pool: _StalledPool) -> Iterator[str]:
    pid = pool.root.pid
    if pid is None:
        yield "no single thread keeps it waiting"
        return
    cpus = pool.parts.cpus
    for queue in cpus.run_queues if cpus is not None else ():
        starved = [task for task in queue.waiting if task.pid == pid]
        if starved and queue.current is not None:
            hog = pid_text(queue.current.pid, queue.current.comm)
            waiter = pid_text(pid, starved[0].comm)
            yield f"its worker, {waiter}, waits for cpu{queue.cpu}, which runs {hog}"
            return
    yield f"pid {pid} keeps it waiting"


WORKQUEUE_STALLED: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="workqueue-stalled",
        needs=("locks",),
        when=_workqueue_stalled_when,
        severity="critical",
        confidence="exact",
        words=lambda pool: pool.root.reason,
        evidence=_workqueue_stalled_evidence,
        see=lambda pool: ("locks", "--workqueues"),
    ),
    logged_stalls("workqueue-stalled", ("workqueue-stall",)),
)


# --- A more urgent task waits for one that gets no CPU.


class _NamedInversion(Struct, frozen=True):
    inversion: Inversion
    names: dict[int, str]


def _names(locks: LocksReport) -> dict[int, str]:
    names = {wait.pid: wait.comm for wait in locks.waits}
    for lock in locks.locks:
        names |= {owner.pid: owner.comm for owner in lock.owners}
    return names


def _priority_inversion_when(parts: ReportParts) -> Iterator[_NamedInversion]:
    assert parts.locks is not None
    names = _names(parts.locks)
    for inversion in parts.locks.inversions:
        # An owner that runs now and then makes progress; msa-locks lists it as a root.
        if (inversion.owner_ready_ns or 0) >= LONG_WAIT_NS:
            yield _NamedInversion(inversion, names)


def _priority_inversion_words(subject: _NamedInversion) -> str:
    each, names = subject.inversion, subject.names
    return (
        f"{pid_text(each.waiter, names.get(each.waiter))} (priority {each.waiter_pri}) "
        f"waits for {pid_text(each.owner, names.get(each.owner))} (priority "
        f"{each.owner_pri}), which is runnable and has not run for "
        f"{duration(each.owner_ready_ns or 0)}"
    )


PRIORITY_INVERSION = VerdictRule(
    code="priority-inversion",
    needs=("locks",),
    when=_priority_inversion_when,
    severity="warning",
    confidence="exact",
    words=_priority_inversion_words,
    evidence=lambda subject: (f"lock {subject.inversion.lock}",),
    see=lambda subject: (
        *("locks", "--stacks", "-p"),
        f"{subject.inversion.waiter},{subject.inversion.owner}",
    ),
)
