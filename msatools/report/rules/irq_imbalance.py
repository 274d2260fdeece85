# SPDX-License-Identifier: LGPL-2.1-or-later

"""One CPU takes most interrupts of devices, and it is busy with them."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from msatools.cpus.busiest import BusiestCpu, busiest_cpu
from msatools.cpus.model import Cpu
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule

_BUSY = 0.1
"""Share of a CPU's time in interrupts and softirqs, from which on it is much."""

_TIMES_OTHERS = 3
"""Ratio to the share of the other CPUs: the timer interrupts all of them."""


class _LoadedCpu(Struct, frozen=True):
    busiest: BusiestCpu
    share: float
    """Share of its time in interrupts and softirqs."""

    others: float
    """The same, of the other CPUs that are online."""


def _when(parts: ReportParts) -> Iterator[_LoadedCpu]:
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
    """Yield the times that make up all time of a CPU."""
    times = (cpu.usr_ns, cpu.sys_ns, cpu.irq_ns, cpu.wt_ns, cpu.st_ns)
    for each in (*times, cpu.gst_ns, cpu.idl_ns):
        yield each or 0


def _evidence(subject: _LoadedCpu) -> Iterator[str]:
    yield (
        f"{100 * subject.share:.0f} % of its time since boot was in interrupts and "
        f"softirqs, and {100 * subject.others:.0f} % of that of the other CPUs"
    )


RULE = VerdictRule(
    code="irq-imbalance",
    needs=("cpus",),
    when=_when,
    severity="warning",
    confidence="evidence",
    words=lambda subject: subject.busiest.text,
    evidence=_evidence,
    see=lambda subject: ("cpus", "-i"),
)
