# SPDX-License-Identifier: LGPL-2.1-or-later

"""Findings about the partitioning of CPUs, in one line each. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from msatools.cpus.model import (
    Cpu,
    CpuSet,
    Diagnostic,
    Irq,
    RunnableTask,
    RunQueue,
    Stall,
    Storm,
)
from msatools.cpus.sets import DEFAULT, PARTITIONS
from msatools.reports.units import duration, ranges

# --- The CPU that takes most interrupts of devices. Pure.


MOST = 0.5
"""Minimum share of all device interrupts on one CPU that is uneven."""

_UNEVEN = 4 / 3
"""Minimum ratio of the share to an even one: one of two CPUs always has half or more.
"""

MANY = 100
"""Minimum number of device interrupts in an interval for a share to be uneven."""

MANY_SINCE_BOOT = 2_000
"""Minimum number since boot: the boot causes some hundred, of the disk on few CPUs."""

_TIMERS = ("timer", "arch_timer")
"""Interrupts of clocks, which do not count as devices': the PIT ticks for the whole
machine in the first second of a boot."""


class BusiestCpu(Struct, frozen=True):
    """The CPU that takes more interrupts of devices than any other."""

    cpu: int
    share: float
    """Share of all interrupts of devices."""

    irq: Irq
    """The interrupt that came most often on that CPU."""

    is_uneven: bool
    """Whether the share is much larger than an even share."""

    @property
    def text(self) -> str:
        """The finding, as one sentence."""
        irq = self.irq
        return (
            f"cpu{self.cpu} takes {100 * self.share:.0f} % of device interrupts (most "
            f"of irq {irq.irq} {irq.name}, affinity {ranges(irq.affinity)})"
        )


def busiest_cpu(
    irqs: Sequence[Irq], online: int, least: int = MANY_SINCE_BOOT
) -> BusiestCpu | None:
    """Return the CPU that takes most device interrupts, without those of clocks;
    ``None`` if there are none, or only one CPU is online.

    :param online: Number of online CPUs.
    :param least: Minimum number of interrupts of all CPUs to be called uneven.
    """
    by_cpu: dict[int, int] = {}
    of_devices = [irq for irq in irqs if irq.name not in _TIMERS]
    for irq in of_devices:
        for cpu, count in irq.counts.items():
            by_cpu[cpu] = by_cpu.get(cpu, 0) + count
    total = sum(by_cpu.values())
    if not total or online < 2:
        return None
    cpu = max(by_cpu, key=lambda each: by_cpu[each])
    share = by_cpu[cpu] / total
    most = max(of_devices, key=lambda each: each.counts.get(cpu, 0))
    return BusiestCpu(
        cpu=cpu,
        share=share,
        irq=most,
        is_uneven=share >= max(MOST, _UNEVEN / online) and total >= least,
    )


# --- findings


LONG_WAIT_NS = 1_000_000_000
"""Minimum wait for a CPU that is reported: longer than any turn of other tasks."""

WAITS_NS = 100_000_000
"""Minimum wait that is reported while other CPUs idle: the scheduler looks for work for
an idle CPU several times a tick."""

_OF_ONE_CPU = ("no-tick", "no-switch", "starved")
"""Kinds of stalls of single CPUs."""

_FIRST = ("stop", "deadline", "realtime")
"""Classes whose tasks may keep the CPU from others as long as they run."""

_NO_TURN_NS = 5_000_000_000
"""Minimum wait of a fair task that is reported while others of its class have turns."""

_NAMED = 3
_LINES = 5
"""Maximum number of findings of one kind; the last only lists the other CPUs."""


class Known(Struct, frozen=True, kw_only=True):
    """The data that findings are made of."""

    cpus: Sequence[Cpu]
    sets: Sequence[CpuSet]
    queues: Sequence[RunQueue]
    irqs: Sequence[Irq]
    """All interrupts of devices, in the interval or since boot."""

    in_interval: bool
    asks_irqs: bool = False
    """Whether interrupts were requested: then the busiest CPU is always reported."""

    stalls: Sequence[Stall] = ()
    """Stalls; only those over their limits are reported."""

    storms: Sequence[Storm] = ()
    """CPUs with far too much work of a kind."""

    def is_stalled(self, cpu: int) -> bool:
        """Return whether a stall over its limit is reported of a CPU itself."""
        return any(
            stall.over_limit and stall.kind in _OF_ONE_CPU and cpu in stall.cpus
            for stall in self.stalls
        )


def findings(known: Known) -> tuple[Diagnostic, ...]:
    """Return all findings, the worst first."""
    return (
        *_few(_stalls(known)),
        *_few(_dead_clocks(known)),
        *_few(_held_up(known)),
        *_few(_starving(known)),
        *_few(_without_turn(known)),
        *_few(_disabled(known)),
        *_few(_storms(known)),
        *_invalid(known),
        *_few(_disturbed(known)),
        *_idle(known),
        *_straying(known),
        *_most_interrupts(known),
    )


def _few(found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield findings of one kind; if there are many, merge the last ones into one."""
    alike = list(found)
    if len(alike) <= _LINES:
        yield from alike
        return
    first, rest = alike[: _LINES - 1], alike[_LINES - 1 :]
    cpus = sorted({cpu for each in rest for cpu in each.cpus})
    yield from first
    yield Diagnostic(
        code=rest[0].code,
        text=f"likewise {len(cpus):,} other CPUs: {ranges(cpus)}",
        cpus=tuple(cpus),
        advice=rest[0].advice and "the same, for each",
    )


# --- CPUs that do not tick or switch


def _stalls(known: Known) -> Iterator[Diagnostic]:
    for stall in known.stalls:
        if stall.over_limit:
            yield Diagnostic(
                code=stall.code, text=stall.text, cpus=stall.cpus, advice=None
            )


_NO_TICK = {
    "interrupts off": "they are off, or a hypervisor does not run it",
    "not run by its host": "they are on, so its host does not run it",
}


def _dead_clocks(known: Known) -> Iterator[Diagnostic]:
    for queue in known.queues:
        why = _NO_TICK.get(queue.lag_why or "")
        if why is not None and not known.is_stalled(queue.cpu):
            runs = f"; runs {_task(queue.current)}" if queue.current else ""
            yield Diagnostic(
                code="not-ticked",
                text=f"cpu{queue.cpu} takes no interrupts, and has had no tick for "
                f"{_seconds(queue.ticked_ns)}: {why}{runs}",
                cpus=(queue.cpu,),
                advice=None,
            )


def _held_up(known: Known) -> Iterator[Diagnostic]:
    for queue in known.queues:
        current, waits = queue.current, _runnable(queue)
        if known.is_stalled(queue.cpu):
            continue
        if current is not None and _is_held_up(queue):
            since = _seconds(queue.switched_ns)
            yield Diagnostic(
                code="not-switched",
                text=f"cpu{queue.cpu} has run {_task(current)} for {since}, and "
                f"{_who_waits(waits)}",
                cpus=(queue.cpu,),
                advice=None,
            )


def _starving(known: Known) -> Iterator[Diagnostic]:
    """Find tasks that get no CPU time because of tasks of a higher class.

    Their CPU may have switched just now, between deadline tasks, or to the stopper
    thread and back. Many fair tasks on a CPU wait long, too, but each gets its turn.
    """
    for queue in known.queues:
        current = queue.current
        if current is None or current.sched_class not in _FIRST or _is_held_up(queue):
            continue
        if known.is_stalled(queue.cpu):
            continue
        late = [
            task for task in _runnable(queue) if (task.wait_ns or 0) >= LONG_WAIT_NS
        ]
        if late:
            yield Diagnostic(
                code="starving-tasks",
                text=f"cpu{queue.cpu} runs {_task(current)}, which is "
                f"{current.sched_class}, and {_who_waits(late)}",
                cpus=(queue.cpu,),
                advice=None,
            )


def _without_turn(known: Known) -> Iterator[Diagnostic]:
    """Find fair tasks that get no turn, as others of their class have more weight."""
    for queue in known.queues:
        current = queue.current
        if current is None or current.sched_class != "fair":
            continue
        # A task that does not leave the CPU at all is another finding.
        if (queue.switched_ns or 0) >= _NO_TURN_NS:
            continue
        if known.is_stalled(queue.cpu):
            continue
        late = [
            task
            for task in _runnable(queue)
            if task.wait_bound == "exact" and (task.wait_ns or 0) >= _NO_TURN_NS
        ]
        if not late:
            continue
        named = ", ".join(f"{_task(each)}{_weight(each)}" for each in late[:_NAMED])
        more = f", and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
        had = "has" if len(late) == 1 else "have"
        idle = _idle_cpus(known)
        beside = f"; cpu{ranges(idle)} idle" if idle else ""
        yield Diagnostic(
            code="no-turn",
            text=f"cpu{queue.cpu}: {named}{more} {had} not run for "
            f"{_longest(late)}; {_task(current)}{_weight(current)} runs{beside}",
            cpus=(queue.cpu,),
            advice=None,
            # For a single task the text has the wait already.
            evidence=tuple(
                f"{_task(each)} has waited for {_seconds(each.wait_ns)}"
                for each in (late[:_NAMED] if len(late) > 1 else ())
            )
            or (f"cpu{queue.cpu} switched tasks {_seconds(queue.switched_ns)} ago",),
        )


def _idle_cpus(known: Known) -> list[int]:
    return [cpu.cpu for cpu in known.cpus if cpu.online and "idle" in cpu.state]


def _weight(task: RunnableTask) -> str:
    """Return the policy or nice value of a fair task as text; empty if default."""
    if task.policy == "IDLE":
        return " (SCHED_IDLE)"
    return f" (nice {task.nice})" if task.nice else ""


def _is_held_up(queue: RunQueue) -> bool:
    """Return whether a CPU has run one task for long while another waited."""
    current, since = queue.current, queue.switched_ns
    if current is None or current.sched_class == "idle" or (since or 0) < LONG_WAIT_NS:
        return False
    return any((task.wait_ns or 0) >= LONG_WAIT_NS for task in _runnable(queue))


def _who_waits(tasks: Sequence[RunnableTask]) -> str:
    verb = "waits" if len(tasks) == 1 else "wait"
    number = _count(len(tasks), "task")
    return f"{number} {verb}, the longest for {_longest(tasks)}"


def _longest(tasks: Iterable[RunnableTask]) -> str:
    """Return the longest wait as text; some kernels keep only an upper bound."""
    longest = max(tasks, key=lambda each: each.wait_ns or 0)
    bound = "at most " if longest.wait_bound == "upper" else ""
    return bound + _seconds(longest.wait_ns or 0)


def _runnable(queue: RunQueue) -> list[RunnableTask]:
    """Return the waiting tasks that are not throttled."""
    return [each for each in queue.waiting if not each.throttled]


_SOURCES = {
    "tasklet": "runs {rate} tasklets a second: {function} is queued or runs now",
    "timer": "has {rate} timer interrupts a second: {function} is the next timer",
    "work": "runs work items {share} of the time: {function} runs now",
    "interrupt": "takes {rate} interrupts a second of irq {irq}: {function} handles it",
    "softirq": "takes {rate} NET_RX softirqs a second: {function} polls{device}",
    "drop": "has dropped {waiting} packets ({share} of those that came), as its "
    "backlog was full",
    "call": "is called by other CPUs {rate} times a second: {function} is queued or "
    "runs now",
    "callback": "has a backlog of {waiting} RCU callbacks; {share} of those read are "
    "{function}",
}
_OF_NOW = ("work", "callback")
"""Kinds that are about the present, not counted since boot or in an interval."""


def _storms(known: Known) -> Iterator[Diagnostic]:
    for storm in known.storms:
        words = _SOURCES[storm.kind].format(
            rate=f"{storm.per_second or 0:,.0f}",
            share=_percent(storm.share or 0),
            function=storm.function,
            device=_device(storm),
            waiting=f"{storm.waiting or 0:,}",
            irq=storm.irq,
        )
        since = "" if known.in_interval or storm.kind in _OF_NOW else " (since boot)"
        yield Diagnostic(
            code="storm",
            text=f"cpu{storm.cpu} {words}{since}{_now(storm)}",
            cpus=(storm.cpu,),
            advice=None,
            evidence=(_storm_evidence(storm),),
        )


def _device(storm: Storm) -> str:
    return f" {storm.device or 'a device of unknown name'}"


def _now(storm: Storm) -> str:
    """Return a text for the device whose packets wait now on a CPU that dropped some:
    the kernel does not record whose packets it dropped."""
    if storm.kind != "drop" or storm.device is None:
        return ""
    return f"; waiting there now: packets of {storm.device}"


def _storm_evidence(storm: Storm) -> str:
    is_known = storm.kind == "softirq" and storm.device is not None
    of = f" of {storm.device}" if is_known else ""
    return f"{storm.kind}: {storm.function}{of}"


# --- sets


def _invalid(known: Known) -> Iterator[Diagnostic]:
    for each in known.sets:
        if each.kind == "invalid":
            yield Diagnostic(
                code="partition-invalid",
                text=f"partition {each.name} is not in force: "
                f"{each.reason or 'the kernel does not say why'}",
                cpus=each.asked or (),
                advice=None,
            )


def _disturbed(known: Known) -> Iterator[Diagnostic]:
    """Find isolated CPUs that take interrupts of devices."""
    online = {cpu.cpu for cpu in known.cpus if cpu.online}
    isolated = [
        cpu
        for cpu in known.cpus
        # A CPU that goes offline is in no root domain, so it seems isolated, too.
        if cpu.online
        and {"isolated", "nohz_full"} & {*cpu.state}
        and "inactive" not in cpu.state
    ]
    others = {cpu.cpu for cpu in known.cpus if cpu.online and cpu.set == DEFAULT} - {
        cpu.cpu for cpu in isolated
    }
    for each in isolated:
        if "no-intr" in each.state:
            continue
        cpu = each.cpu
        what = "isolated" if "isolated" in each.state else "nohz_full"
        if known.in_interval:
            goes = [irq for irq in known.irqs if irq.counts.get(cpu)]
        else:
            goes = [irq for irq in known.irqs if _may_get(irq, cpu, online)]
        if not goes:
            continue
        goes.sort(key=lambda irq: -irq.counts.get(cpu, 0))
        verb = "takes" if known.in_interval else "may get"
        number = _count(len(goes), "interrupt")
        named = ", ".join(f"{irq.irq} {irq.name}" for irq in goes[:_NAMED])
        more = ", ..." if len(goes) > _NAMED else ""
        yield Diagnostic(
            code="isolated-takes-interrupts",
            text=f"cpu{cpu} is {what}, and {verb} {number} of devices ({named}{more})",
            cpus=(cpu,),
            advice=_elsewhere(goes, others),
        )


def _may_get(irq: Irq, cpu: int, online: set[int]) -> bool:
    """Return whether an interrupt goes to a CPU, and is not caused by that CPU alone.

    A managed interrupt for one CPU only occurs after requests of that CPU. While no CPU
    of its affinity is online it is shut down, and keeps its effective affinity. After a
    change of the affinity an interrupt comes once more on its old CPU.
    """
    if cpu not in irq.effective or cpu not in irq.affinity:
        return False
    return not irq.managed or not online & {*irq.affinity} <= {cpu}


def _elsewhere(irqs: Sequence[Irq], others: set[int]) -> str | None:
    """Return advice to move interrupts to *others*, CPUs that are not isolated."""
    movable = [irq for irq in irqs if not irq.managed]
    if not movable:
        return "the kernel places these itself: boot with isolcpus=managed_irq,LIST"
    if not others:
        return None
    paths = f"/proc/irq/{movable[0].irq}/smp_affinity_list"
    rest = " and the others'" if len(movable) > 1 else ""
    return f"echo {ranges(others)} > {paths}{rest}"


def _idle(known: Known) -> Iterator[Diagnostic]:
    """Find sets whose CPUs are all idle while tasks of another set wait."""
    by_cpu = {cpu.cpu: cpu.set for cpu in known.cpus}
    waits: dict[str, list[tuple[RunnableTask, int]]] = {}
    for queue in known.queues:
        late = [task for task in _runnable(queue) if (task.wait_ns or 0) >= WAITS_NS]
        name = by_cpu.get(queue.cpu)
        if name is not None and late:
            waits.setdefault(name, []).extend((task, queue.cpu) for task in late)
    idle = _idle_sets(known)
    for name, cpus in idle.items():
        others = {key: value for key, value in waits.items() if key != name}
        if not others:
            continue
        most = max(others, key=lambda key: len(others[key]))
        tasks = others[most]
        where = ranges({cpu for _, cpu in tasks})
        verb = "waits" if len(tasks) == 1 else "wait"
        yield Diagnostic(
            code="idle-while-waiting",
            text=f"set {name} idles (cpu{ranges(cpus)}), and in set {most} "
            f"{_count(len(tasks), 'task')} {verb} for cpu{where}, the longest for "
            f"{_longest(task for task, _ in tasks)}",
            cpus=tuple(cpus),
            advice=None,
        )


def _idle_sets(known: Known) -> dict[str, list[int]]:
    """Return the sets whose online CPUs are all idle, with these CPUs."""
    idle: dict[str, list[int]] = {}
    busy = {cpu.set for cpu in known.cpus if cpu.online and "idle" not in cpu.state}
    for cpu in known.cpus:
        if cpu.online and cpu.set not in busy:
            idle.setdefault(cpu.set, []).append(cpu.cpu)
    return idle


def _straying(known: Known) -> Iterator[Diagnostic]:
    for each in known.sets:
        if each.tasks is None or each.name == DEFAULT:
            continue
        # Kernel threads come and go, and few of them can be moved.
        strays = [task for task in each.tasks.straying if not task.kthread]
        if not strays:
            continue
        named = ", ".join(f"{task.pid} {task.comm}: {task.why}" for task in strays[:1])
        more = f", and {len(strays) - 1} more" if len(strays) > 1 else ""
        kind = "partition" if each.kind in PARTITIONS else "set"
        yield Diagnostic(
            code="straying-tasks",
            text=f"{kind} {each.name} has tasks that stray: {named}{more}",
            cpus=each.cpus,
            advice="msa-cpus --sets lists them",
        )


# --- interrupts


def _disabled(known: Known) -> Iterator[Diagnostic]:
    """Find interrupts that came before, but are disabled now."""
    for irq in known.irqs:
        if irq.disabled and irq.total:
            yield Diagnostic(
                code="irq-disabled",
                text=f"irq {irq.irq} {irq.name} is disabled, after "
                f"{_count(irq.total, 'interrupt')}: tasks that need its device wait "
                "until it is enabled",
                cpus=irq.effective,
                advice=None,
                evidence=(f"its affinity is cpu{ranges(irq.affinity)}",),
            )


def _most_interrupts(known: Known) -> Iterator[Diagnostic]:
    online = sum(cpu.online for cpu in known.cpus)
    least = MANY if known.in_interval else MANY_SINCE_BOOT
    busiest = busiest_cpu(known.irqs, online, least)
    if busiest is not None and (busiest.is_uneven or known.asks_irqs):
        yield Diagnostic(
            code="most-interrupts",
            text=busiest.text,
            cpus=(busiest.cpu,),
            advice=None,
        )


# --- Texts of the findings.


def _task(task: RunnableTask | None) -> str:
    return "nothing" if task is None else f"pid {task.pid} {task.comm}"


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _seconds(span_ns: int | None) -> str:
    return "an unknown time" if span_ns is None else duration(span_ns)
