# SPDX-License-Identifier: LGPL-2.1-or-later

"""The CPU that takes most interrupts of devices. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from msatools.cpus.model import Irq
from msatools.kernel.ranges import ranges

MOST = 0.5
"""Minimum share of all interrupts on one CPU that is reported."""

_UNEVEN = 4 / 3
"""Minimum ratio to an even share, as one of two CPUs always has half or more."""

MANY = 100
"""Minimum number of interrupts, in an interval, for a report of where they go."""

MANY_SINCE_BOOT = 2_000
"""The same since boot: to boot alone takes some hundred, of the disk on few CPUs."""

_TIMERS = ("timer", "arch_timer")
"""Interrupts of clocks: the PIT ticks for the whole machine in the first second of a
boot, which says nothing of devices."""


class BusiestCpu(Struct, frozen=True):
    """The CPU that takes most interrupts of devices."""

    cpu: int
    share: float
    """Share of all interrupts of devices."""

    irq: Irq
    """Its most frequent interrupt."""

    is_uneven: bool
    """Whether the share is much more than an even one."""

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
    """Return the CPU that takes most interrupts, without those of clocks; ``None`` if
    there are none.

    :param online: Number of online CPUs.
    :param least: Minimum number of interrupts to be called uneven.
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
