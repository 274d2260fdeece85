# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of msa-cpus: masks of CPUs, sets, and the counters of each CPU."""

from collections.abc import Iterator
from itertools import pairwise

from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.kernel.cpumask import kept_mask
from msatools.kernel.words import unsigned
from msatools.selfcheck.comparison import Comparison
from msatools.selfcheck.report_set import ReportSet
from msatools.selfdesc.find import find_symbol

_MASKS = ("online", "present", "possible")
"""The kernel's masks of CPUs, each a part of the next."""


def masks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the kernel's masks of CPUs with each other and with its count."""
    found = [kept_mask(reports.reader, name, reports.losses) or () for name in _MASKS]
    for (inner, name), (outer, other) in pairwise(zip(found, _MASKS, strict=True)):
        yield Comparison(
            name=f"cpus.{name}",
            left=f"{name} CPUs",
            right=f"those among the {other} CPUs",
            left_value=len(inner),
            right_value=len({*inner} & {*outer}),
        )
    yield Comparison(
        name="cpus.rows",
        left="CPUs by msa-cpus",
        right="possible CPUs",
        left_value=len(reports.cpus.cpus),
        right_value=len(found[-1]),
    )
    base = Comparison(
        name="cpus.count",
        left="online CPUs",
        right="__num_online_cpus",
    )
    try:
        # Not as a variable: BTF has no type of it. It is an atomic_t.
        address = find_symbol(reports.prog, "__num_online_cpus").address
    except MissingError:
        yield replace(base, absent="this kernel keeps no such count")
        return
    count = unsigned(reports.reader.read(address, 4), 0, 4)
    # Those that a crash stopped are no longer counted.
    online = kept_mask(reports.reader, "online", reports.losses) or ()
    yield replace(base, left_value=len(online), right_value=count)


def sets(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the CPUs of the sets with those whose rows name them."""
    report = reports.cpus
    known = {each.name: {*each.cpus} for each in report.sets}
    online = [cpu for cpu in report.cpus if cpu.online]
    yield Comparison(
        name="cpus.sets",
        left="online CPUs",
        right="those among the CPUs of their set",
        left_value=len(online),
        right_value=sum(cpu.cpu in known.get(cpu.set, ()) for cpu in online),
    )


def queues(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the tasks found on run queues with the queues' counts (nr_running)."""
    report = reports.cpus
    yield Comparison(
        name="queues.nr-running",
        left="run queues whose count of tasks differs from those found",
        right="none",
        left_value=report.coverage.get("run_queues_differ", 0),
        right_value=0,
        absent="they change while they are read" if report.target.live else None,
    )


def counters(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the counters of CPUs with sums of interrupts and of tasks."""
    report = reports.cpus
    softirqs = [cpu.soft for cpu in report.cpus]
    by_name = [row.total for row in report.softirqs or ()]
    yield Comparison(
        name="cpus.softirqs",
        left="softirqs of all CPUs",
        right="softirqs of all kinds",
        left_value=_sum(softirqs),
        right_value=_sum(by_name),
        lost="a counter could not be read",
    )
    yield Comparison(
        name="cpus.interrupts",
        left="interrupts of all CPUs",
        right="interrupts of devices",
        left_value=_sum([cpu.intr for cpu in report.cpus]),
        right_value=_sum([irq.total for irq in report.irqs or ()]),
        most=None,
        reason="CPUs count those of the architecture and of former devices, too",
        lost="a counter could not be read",
    )
    yield Comparison(
        name="cpus.switches",
        left="context switches of all CPUs",
        right="context switches of all threads",
        left_value=_sum([cpu.csw for cpu in report.cpus]),
        right_value=sum(task.nvcsw + task.nivcsw for task in reports.prstat.tasks),
        most=None,
        reason="CPUs count those of idle tasks and of threads that have ended, too",
        lost="a counter could not be read",
    )


def _sum(values: list[int | None]) -> int | None:
    """Return the sum; ``None`` if a part is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


CHECKS = (masks, sets, queues, counters)
