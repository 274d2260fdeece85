# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders stalled CPUs, RCU and cross calls, their culprits, and the evidence."""

from collections.abc import Iterator, Sequence

from msatools.cpus.model import (
    CrossCall,
    GracePeriod,
    GracePeriodTask,
    HeldCpu,
    OverdueTimer,
    Stall,
    StallLimits,
    Stalls,
    StopMachine,
)
from msatools.render.blocks import (
    NOT_KEPT,
    Block,
    Cell,
    Column,
    Span,
    Style,
    Table,
    advice,
    free_text,
    line,
    number_text,
    plural,
)
from msatools.render.cpus.columns import INDENT, numbers_text
from msatools.reports.units import duration
from msatools.tasks.waits import function_text

_ALIKE, _SHOWN = 4, 3
"""Maximum number of stalls of one kind and culprit that are all shown; the number
shown if there are more."""

_TASKS = 5
"""Maximum number of waiters for a grace period to list without -v."""


def stall_lines(stalls: Stalls, *, verbose: bool) -> Iterator[Block]:
    """Yield the findings, then the evidence.

    :param verbose: Whether to show stalls below their limits, too.
    """
    yield from _limits(stalls.limits)
    if stalls.halted_ns is not None:
        yield line(
            Span(
                f"the crash stopped the other CPUs {duration(stalls.halted_ns)} ago: "
                "that time is not counted",
                "dim",
            )
        )
    over = [stall for stall in stalls.found if stall.over_limit]
    below = [stall for stall in stalls.found if not stall.over_limit]
    if not over:
        yield line(Span("Nothing stands still for longer than its limit.", "good"))
    for alike in _alike(over):
        shown = alike if verbose or len(alike) <= _ALIKE else alike[:_SHOWN]
        for stall in shown:
            yield from _stall(stall, "bad")
        if rest := alike[len(shown) :]:
            cpus = sorted({stall.cpus[0] for stall in rest})
            words = f"! likewise {plural(len(cpus), 'CPU')}: {numbers_text(cpus)}"
            yield line(Span(words, "bad"))
    if verbose:
        for stall in below:
            yield from _stall(stall, None)
    elif below:
        left = Span(f"{plural(len(below), 'finding')} below the limits", "dim")
        yield line(left, advice("-v shows them"))
    if stalls.cpus and (over or verbose):
        yield _cpus(stalls.cpus, stalls.stolen)
    yield from _grace_period(stalls.rcu, verbose)
    if over or verbose:
        yield from _calls(stalls.calls)
        yield from _stop_machine(stalls.stop_machine)
        yield from _timers(stalls.timers, verbose)


def _alike(stalls: Sequence[Stall]) -> list[list[Stall]]:
    """Group the stalls of one kind that have the same culprit, in order."""
    groups: dict[tuple[str, int | None], list[Stall]] = {}
    for stall in stalls:
        # Stalls without a culprit, or of the culprit itself, form one group a kind.
        own = None if stall.culprit_cpu in stall.cpus else stall.culprit_cpu
        key = (stall.kind, own)
        groups.setdefault(key, []).append(stall)
    return list(groups.values())


def _limits(limits: StallLimits) -> Iterator[Block]:
    soft, hard = _ON[limits.soft_watchdog], _ON[limits.hard_watchdog]
    yield line(
        Span(
            f"limits: no tick {duration(limits.no_tick_ns)}, no switch "
            f"{duration(limits.no_switch_ns)} (watchdogs: soft {soft}, hard {hard}), "
            f"RCU {duration(limits.rcu_ns)}, cross calls {duration(limits.call_ns)}",
            "dim",
        )
    )


_ON = {True: "on", False: "off", None: "unknown"}


def _stall(stall: Stall, style: Style | None) -> Iterator[Block]:
    mark = "! " if style else ". "
    yield line(Span(mark + stall.text, style))
    # stall.text includes the first step.
    for step in stall.chain[1:]:
        yield line(INDENT, step)
    words = {
        "exact": "",
        "likely": "by records that may be out of date",
        "evidence": "by addresses on stacks; no record of the kernel says so",
    }[stall.confidence]
    if words:
        yield line(INDENT, Span(words, "dim"))


def _cpus(cpus: Sequence[HeldCpu], stolen: Sequence[int]) -> Table:
    columns = (
        Column("CPU", "right"),
        Column("TICK", "right"),
        Column("RAN", "right"),
        Column("WATCHDOG", "right", worth=2),
        Column("IRQS"),
        Column("PREEMPT", "right", worth=1),
        Column("SOFTIRQ", "right", worth=0),
        Column("WAIT", "right"),
        Column("PID", "right"),
        free_text("COMMAND", least=8),
        free_text("DOES", least=12),
    )
    return Table(columns, [_cpu(held, held.cpu in stolen) for held in cpus])


def _cpu(held: HeldCpu, is_stolen: bool) -> Sequence[Cell]:
    return (
        str(held.cpu),
        _late(held.tick_late_ns),
        _span(held.running_ns),
        _span(held.watchdog_ns),
        Span("off", "bad") if held.interrupts == "off" else held.interrupts or NOT_KEPT,
        number_text(held.preempt_count),
        number_text(held.softirq_count),
        str(held.waiting),
        number_text(held.pid),
        held.comm or NOT_KEPT,
        ", ".join(_does(held, is_stolen)),
    )


def _late(late_ns: int | None) -> Cell:
    if late_ns is None:
        return NOT_KEPT
    return duration(late_ns) if late_ns >= 10**9 else "ok"


def _does(held: HeldCpu, is_stolen: bool) -> Iterator[str]:
    if held.policy is not None:
        yield held.policy
    if held.why is not None:
        yield held.why.replace("-", " ")
    if held.wanted is not None:
        yield held.wanted.name or hex(held.wanted.address)
    if held.calls_cpus:
        yield f"of cpu{numbers_text(held.calls_cpus)}"
    if held.call is not None:
        yield f"{held.call}()"
    if held.function is not None:
        yield function_text(held.function, held.module) or ""
    if is_stolen:
        yield "preempted by the hypervisor"


def _span(span_ns: int | None) -> str:
    return NOT_KEPT if span_ns is None else duration(span_ns)


def _grace_period(rcu: GracePeriod | None, verbose: bool) -> Iterator[Block]:
    if rcu is None:
        yield line(Span("RCU: not known", "dim"))
        return
    parts = []
    if rcu.age_ns is None:
        parts.append("no grace period")
    elif rcu.active:
        parts.append(f"a grace period for {duration(rcu.age_ns)}")
    else:
        parts.append(f"a grace period was requested {duration(rcu.age_ns)} ago")
    if rcu.cpus:
        parts.append(f"cpu{numbers_text(rcu.cpus)} to pass")
    if rcu.expedited_cpus:
        parts.append(f"expedited: cpu{numbers_text(rcu.expedited_cpus)} to pass")
    if rcu.callbacks is not None:
        parts.append(plural(rcu.callbacks, "callback"))
    if rcu.thread is not None:
        quiet = rcu.thread.wait_ns
        ago = "" if quiet is None else f" last active {duration(quiet)} ago"
        parts.append(f"thread {rcu.thread.pid} {rcu.thread.comm}{ago}")
    yield line("RCU: " + ", ".join(parts))
    # A reader may block a normal and an expedited grace period.
    for reader in dict.fromkeys(map(_task, (*rcu.tasks, *rcu.expedited_tasks))):
        yield line(INDENT, f"reader {reader}")
    waiters = rcu.waiters or ()
    shown = waiters if verbose else waiters[:_TASKS]
    for task in shown:
        yield line(INDENT, f"waits: {_task(task)}")
    if len(waiters) > len(shown):
        left = f"… {len(waiters) - len(shown):,} more"
        yield line(INDENT, left, advice("-v shows them"))


def _task(task: GracePeriodTask) -> str:
    parts = [f"{task.pid} {task.comm}"]
    if task.state is not None:
        parts.append(task.state)
    if task.wait_ns is not None:
        parts.append(duration(task.wait_ns))
    if task.function is not None:
        parts.append(task.function)
    if task.cpu is not None:
        parts.append(f"cpu{task.cpu}")
    return "  ".join(parts)


def _calls(calls: Sequence[CrossCall]) -> Iterator[Block]:
    if not calls:
        return
    columns = (
        Column("CPU", "right"),
        Column("ASKED-BY", "right"),
        Column("KIND"),
        free_text("FUNCTION"),
    )
    yield line(Span("not run yet for other CPUs", "title"))
    rows = [
        (
            str(call.cpu),
            number_text(call.caller),
            call.kind,
            call.function or _woken(call) or NOT_KEPT,
        )
        for call in calls
    ]
    yield Table(columns, rows)


def _woken(call: CrossCall) -> str | None:
    return None if call.pid is None else f"of {call.pid} {call.comm}"


def _stop_machine(stop: StopMachine | None) -> Iterator[Block]:
    if stop is None:
        return
    step = f", step {stop.step}" if stop.step else ""
    yield line(
        f"stop_machine: {stop.function or 'a function'}{step}; "
        f"stopped: {numbers_text(stop.stopped)}; "
        f"missing: {numbers_text(stop.missing)}"
    )


def _timers(timers: Sequence[OverdueTimer], verbose: bool) -> Iterator[Block]:
    if not timers:
        return
    columns = (
        Column("CPU", "right"),
        Column("KIND"),
        Column("LATE", "right"),
        free_text("FUNCTION"),
    )
    yield line(Span("timers that are overdue", "title"))
    rows = [
        (
            str(timer.cpu),
            timer.kind,
            duration(timer.late_ns),
            timer.function or NOT_KEPT,
        )
        for timer in timers
    ]
    yield Table(columns, rows)
