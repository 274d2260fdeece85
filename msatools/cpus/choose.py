# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select the requested part of a report of all CPUs. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from msatools.cpus.diagnostics import Known, findings
from msatools.cpus.model import CpuSet, CpusReport, StackOfCpu
from msatools.cpus.options import CpusOptions
from msatools.cpus.sets import set_of_cpus
from msatools.cpus.stalls.model import Stalls
from msatools.kernel.cpumask import require_cpus
from msatools.target.errors import TargetError


class NoSuchSetError(TargetError):
    """A requested set does not exist."""


def choose(report: CpusReport, options: CpusOptions) -> CpusReport:
    """
    Return the part of a complete report that the options ask for.

    :raises NoSuchCpuError: if a requested CPU is not in the report
    :raises NoSuchSetError: if a requested set is not in the report
    """
    if not options.tasks and has_tasks(report):
        report = _without_tasks(report)
    numbers = [row.cpu for row in report.cpus]
    wanted = wanted_cpus(options, report.sets, numbers)
    is_all = wanted >= {*numbers}
    known = Known(
        cpus=report.cpus,
        sets=report.sets,
        queues=report.run_queues,
        irqs=report.irqs or (),
        in_interval=report.interval_ns is not None,
        asks_irqs=options.irqs,
        stalls=() if report.stalls is None else report.stalls.found,
        storms=report.storms or (),
    )
    return replace(
        report,
        cpus=tuple(row for row in report.cpus if row.cpu in wanted),
        sets=tuple(one for one in report.sets if is_all or wanted & {*one.cpus}),
        run_queues=tuple(
            queue
            if options.doing or queue.doing is None
            else replace(queue, doing=None)
            for queue in report.run_queues
            if queue.cpu in wanted
        ),
        findings=tuple(
            finding for finding in findings(known) if is_all or wanted & {*finding.cpus}
        ),
        irqs=report.irqs if options.irqs else None,
        vectors=report.vectors if options.irqs else None,
        softirqs=report.softirqs if options.irqs else None,
        stalls=_stalls_of(report.stalls, wanted, is_all) if options.stalls else None,
        stacks=_stacks_of(report.stacks, wanted) if options.stacks else None,
    )


def _stalls_of(
    stalls: Stalls | None, wanted: frozenset[int], is_all: bool
) -> Stalls | None:
    """Return what stands still on the requested CPUs, or because of them."""
    if stalls is None or is_all:
        return stalls
    return replace(
        stalls,
        found=tuple(
            stall for stall in stalls.found if wanted & {*stall.cpus, stall.culprit_cpu}
        ),
        cpus=tuple(held for held in stalls.cpus if held.cpu in wanted),
        calls=tuple(call for call in stalls.calls if wanted & {call.cpu, call.caller}),
        timers=tuple(timer for timer in stalls.timers if timer.cpu in wanted),
    )


def _stacks_of(
    stacks: Sequence[StackOfCpu] | None, wanted: frozenset[int]
) -> tuple[StackOfCpu, ...] | None:
    if stacks is None:
        return None
    return tuple(stack for stack in stacks if stack.cpu in wanted)


def has_tasks(report: CpusReport) -> bool:
    """Return whether a report includes tasks."""
    return any(one.tasks is not None for one in report.sets)


def wanted_cpus(
    options: CpusOptions, sets: Sequence[CpuSet], numbers: Sequence[int]
) -> frozenset[int]:
    """
    Return the numbers of the requested CPUs.

    :param numbers: Numbers of all possible CPUs.
    :raises NoSuchCpuError: if a requested CPU does not exist
    :raises NoSuchSetError: if a requested set does not exist
    """
    names = set_of_cpus(sets, numbers)
    wanted = frozenset(numbers)
    if options.cpus is not None:
        require_cpus(options.cpus, wanted)
        wanted = options.cpus
    if options.sets is not None:
        by_name = {one.name: {*one.cpus} for one in sets}
        unknown = [name for name in options.sets if name not in by_name]
        if unknown:
            raise NoSuchSetError(
                f"set {', '.join(unknown)}",
                "there is none of that name",
                f"choose from {', '.join(by_name)}",
            )
        chosen = {cpu for cpu, name in names.items() if name in options.sets}
        for name in options.sets:
            chosen |= by_name[name]
        wanted &= chosen
    return wanted


def _without_tasks(report: CpusReport) -> CpusReport:
    return replace(
        report,
        cpus=tuple(replace(row, icsw=None, migr=None) for row in report.cpus),
        sets=tuple(replace(one, tasks=None) for one in report.sets),
    )
