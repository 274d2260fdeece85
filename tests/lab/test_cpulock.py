# SPDX-License-Identifier: LGPL-2.1-or-later
"""The CPUs of the guest that its module holds on to do nothing else."""

import re

from fixtures.lab import cpulock
from fixtures.lab.guest import cpulock as guest

SPINS = {
    "cm-irqs-off": (guest.IRQS, "cm_irqs_off"),
    "cm-preempt-off": (guest.PREEMPT, "cm_preempt_off"),
    "cm-softirq-off": (guest.SOFTIRQS, "cm_softirq_off"),
}


def test_module_has_the_cpus_that_the_guest_names() -> None:
    source = (cpulock.SOURCE / "main.c").read_text()
    found = re.findall(r'\{ "(cm-\S+)", \.cpu = (\d), \.spin = (\w+) \}', source)
    assert {name: (int(cpu), function) for name, cpu, function in found} == SPINS
