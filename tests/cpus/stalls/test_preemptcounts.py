# SPDX-License-Identifier: LGPL-2.1-or-later

"""Preempt counts of the CPUs of the demo cores."""

from typing import NoReturn

import drgn
import pytest

from fixtures.demo import DEMOS
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks.preemption import PreemptCounts, preemption_count, softirq_count
from tests.support.overlay import put

IN_SOFTIRQ = 0x8000_0102
"""As of x86: no switch is due, a softirq is served, preemption is disabled twice."""


def not_asked() -> NoReturn:
    raise AssertionError("on x86-64 the counts are not in the tasks")


@pytest.mark.parametrize("kernel", DEMOS)
def test_each_report_reads_them_anew(kernel: str) -> None:
    """A running kernel changes them; one reader serves all its reports."""
    prog = open_target(TargetSpec(path=str(DEMOS[kernel].core), types="btf")).prog
    reader, losses = Reader(prog), LossLog()
    percpu = read_percpu(reader, losses)
    before = PreemptCounts(reader, percpu, not_asked, losses).by_cpu
    try:
        offset = drgn.offsetof(prog.type("struct pcpu_hot"), "preempt_count")
        addresses = percpu.addresses("pcpu_hot") + offset
    except LookupError:
        addresses = percpu.addresses("__preempt_count")
    put(prog, int(addresses[1]), IN_SOFTIRQ.to_bytes(4, "little"))
    counts = PreemptCounts(reader, percpu, not_asked, losses)
    assert {*before} == {*counts.by_cpu} == {*percpu.cpus.tolist()}
    assert counts.by_cpu[0] == before[0]
    assert (preemption_count(counts.by_cpu[1]), softirq_count(counts.by_cpu[1])) == (
        2,
        1,
    )
    assert not counts.in_interrupt(counts.by_cpu[1])
    assert counts.in_interrupt(0x0001_0000)
    assert not losses.lost
