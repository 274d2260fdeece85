# SPDX-License-Identifier: LGPL-2.1-or-later

"""Nothing is said of what happened while a machine booted.

In its first second, until CPUs have timers of their own, the PIT interrupts the first
one some hundred times.
"""

import pytest

from msatools.cpus.cpus import collect_cpus
from msatools.cpus.diagnostics import busiest_cpu
from tests.report.test_expected import dumps
from tests.truth import tables

_CLOCKS = ("timer", "arch_timer")


@pytest.mark.parametrize("dump", [*dumps()])
def test_clocks_are_no_devices(dump: str) -> None:
    """As they tick for the whole machine at first."""
    found = collect_cpus(tables.open_dump(dump, "btf"))
    irqs = found.irqs or ()
    online = sum(cpu.online for cpu in found.cpus)
    busiest = busiest_cpu(irqs, online)
    if busiest is None:
        return
    assert busiest.irq.name not in _CLOCKS
    devices = [irq for irq in irqs if irq.name not in _CLOCKS]
    of_cpu = sum(irq.counts.get(busiest.cpu, 0) for irq in devices)
    assert busiest.share == of_cpu / sum(sum(irq.counts.values()) for irq in devices)
