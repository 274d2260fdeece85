# SPDX-License-Identifier: LGPL-2.1-or-later

import numpy as np

from msatools.cpus.processors import CpuPlace, _arm64_places
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.locks.madememory import BASE, MadeMemory

STEP = 32


def test_places_of_arm64() -> None:
    """Two threads of one core, and a CPU without topology."""
    made = MadeMemory()
    number = made.prog.int_type("int", 4, True)
    mask = made.struct("cpumask", 8, bits=(made.u64, 0))
    entry = made.struct(
        "cpu_topology",
        STEP,
        core_id=(number, 4),
        package_id=(number, 12),
        thread_sibling=(mask, 16),
    )
    made.variable("cpu_topology", made.prog.array_type(entry, 3), BASE)
    made.variable("nr_cpu_ids", made.u32, BASE + 0x100)
    made.write_u32(BASE + 0x100, 3)
    for cpu, package in enumerate((1, 1, -1)):
        made.write_u32(BASE + STEP * cpu, cpu, 7, 0, package & 0xFFFF_FFFF, 0b011)
    cpus = np.arange(3)
    percpu = PerCpu(made.prog, cpus, np.zeros(3, np.uint64))
    findings = LossLog()
    found = _arm64_places(Reader(made.prog), percpu, findings)
    known = CpuPlace(package=1, die=None, core=7, siblings=(0, 1))
    assert found == [known, known, CpuPlace()]
    assert not findings.lost
