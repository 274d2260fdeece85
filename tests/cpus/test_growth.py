# SPDX-License-Identifier: LGPL-2.1-or-later

"""A report costs no more than linear in the CPUs that there can be."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import pytest

from fixtures.lab.possiblecpus import ONLINE, POSSIBLE
from msatools.cpus.cpus import Cpus
from msatools.cpus.model import CpusReport
from msatools.cpus.options import CpusOptions
from msatools.kernel.session import quietly
from msatools.target.describe import describe
from tests.support.cost import calls
from tests.support.dumps import open_dump

pytestmark = pytest.mark.long

OPTIONS = {"plain": CpusOptions(), "all": CpusOptions(irqs=True, tasks=True)}
READS = 24
"""That a CPU may take at most if it is not online: one for each of some 20 variables
that it has of its own. Whoever reads one more may have to raise this."""
ELSEWHERE = 32
"""Reads that may be more or less with the places of some 130 tasks, which differ in
each start of a kernel: neighbours come with one read."""
CALLS = 1.05
"""Calls that one more CPU may take where there are more, to where there are fewer:
there are some 400, and a few tasks more or less in each kernel."""


@dataclass(frozen=True)
class Cost:
    """What a report took."""

    report: CpusReport
    reads: int
    calls: int
    """Of functions, in Python or not."""


@cache
def cost(kernel: str, possible: int, options: str) -> Cost:
    """Take a report of a dump; what is learned of the kernel once is not counted."""
    prog = open_dump(f"possiblecpus{possible}-{kernel}", "btf")
    session = Cpus(prog, describe(prog), OPTIONS[options])
    session.report(quietly)
    reports: list[CpusReport] = []
    called = calls(lambda: reports.append(session.report(quietly)))
    return Cost(reports[0], session._reader.reads, called)


@pytest.fixture(params=product(("6.1", "6.12"), OPTIONS), ids="-".join)
def costs(request: pytest.FixtureRequest) -> dict[int, Cost]:
    """What reports took, by how many CPUs there can be."""
    kernel, options = request.param
    return {possible: cost(kernel, possible, options) for possible in POSSIBLE}


def test_dumps_differ_in_cpus_alone(costs: dict[int, Cost]) -> None:
    for possible, each in costs.items():
        cpus = [cpu.online for cpu in each.report.cpus]
        assert cpus == [True] * ONLINE + [False] * (possible - ONLINE)
        assert not each.report.notes
    assert len({each.report.coverage["irqs"] for each in costs.values()}) == 1


def test_reads_are_linear(costs: dict[int, Cost]) -> None:
    few, many = POSSIBLE[0], POSSIBLE[-1]
    more = (costs[many].reads - costs[few].reads) / (many - few)
    for possible, each in costs.items():
        most = costs[ONLINE].reads + READS * (possible - ONLINE)
        assert each.reads <= most + ELSEWHERE
        assert abs(each.reads - costs[few].reads - more * (possible - few)) <= ELSEWHERE


def test_calls_are_linear(costs: dict[int, Cost]) -> None:
    more = [
        (costs[many].calls - costs[few].calls) / (many - few)
        for few, many in pairwise(costs)
    ]
    assert max(more) <= CALLS * more[0]
