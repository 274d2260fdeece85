# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is asked for, of a report of all CPUs. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from msatools.cpus.diagnostics import Known, findings
from msatools.cpus.model import CpuSet, CpusReport
from msatools.cpus.options import CpusOptions
from msatools.cpus.sets import set_of_cpus
from msatools.kernel.ranges import ranges
from msatools.target.errors import TargetError


class NoSuchCpuError(TargetError):
    """A CPU or a set that was named is not there."""


def choose(report: CpusReport, options: CpusOptions) -> CpusReport:
    """
    Return what the options ask for of a report that has everything.

    :raises NoSuchCpuError: if the report lacks a CPU or a set that they name
    """
    report = report if options.tasks else _without_tasks(report)
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
    )
    return replace(
        report,
        cpus=tuple(row for row in report.cpus if row.cpu in wanted),
        sets=tuple(each for each in report.sets if is_all or wanted & {*each.cpus}),
        run_queues=tuple(
            queue if options.doing else replace(queue, doing=None)
            for queue in report.run_queues
            if queue.cpu in wanted
        ),
        findings=tuple(
            each for each in findings(known) if is_all or wanted & {*each.cpus}
        ),
        irqs=report.irqs if options.irqs else None,
        vectors=report.vectors if options.irqs else None,
        softirqs=report.softirqs if options.irqs else None,
    )


def has_tasks(report: CpusReport) -> bool:
    """Return whether tasks were looked at for a report."""
    return any(each.tasks is not None for each in report.sets)


def wanted_cpus(
    options: CpusOptions, sets: Sequence[CpuSet], numbers: Sequence[int]
) -> frozenset[int]:
    """
    Return the numbers of the CPUs that are asked for.

    :param numbers: Of all that there can be.
    :raises NoSuchCpuError: if a CPU or a set that is named is not there
    """
    names = set_of_cpus(sets, numbers)
    wanted = frozenset(numbers)
    if options.cpus is not None:
        missing = sorted(options.cpus - wanted)
        if missing:
            raise NoSuchCpuError(
                f"CPU {ranges(missing)}",
                "this kernel has none of that number",
                "list all without -P",
            )
        wanted = options.cpus
    if options.sets is not None:
        by_name = {each.name: {*each.cpus} for each in sets}
        unknown = [name for name in options.sets if name not in by_name]
        if unknown:
            raise NoSuchCpuError(
                f"set {', '.join(unknown)}",
                "there is none of that name",
                f"there are {', '.join(by_name)}",
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
        sets=tuple(replace(each, tasks=None) for each in report.sets),
    )
