# SPDX-License-Identifier: LGPL-2.1-or-later

"""Costs of a report are at most linear in the number of possible CPUs."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import pytest

from fixtures.lab.possiblecpus import ONLINE, POSSIBLE
from msatools.cpus.cpus import Cpus, CpusOptions
from msatools.cpus.model import CpusReport
from msatools.kernel.report import quietly
from msatools.program.description import describe
from tests.support.cost import calls
from tests.support.dumps import open_dump

pytestmark = pytest.mark.long

OPTIONS = {"plain": CpusOptions(), "all": CpusOptions(irqs=True, tasks=True)}
READS = 24
"""Maximum reads for a CPU that is not online: one for each of about 20 per-CPU
variables. If another one is read, this may have to be raised."""
ELSEWHERE = 32
"""Difference in reads by the addresses of about 130 tasks, which vary by boot: adjacent
tasks take one read."""
CALLS = 1.05
"""Maximum ratio of calls for an additional CPU with many CPUs, to those with few. There
are about 400, and the number of tasks varies slightly."""


@dataclass(frozen=True)
class Cost:
    """The costs of a report."""

    report: CpusReport
    reads: int
    calls: int
    """Calls of functions, in Python or C."""


@cache
def cost(kernel: str, possible: int, options: str) -> Cost:
    """Return the costs of a report, without what is read only once per kernel."""
    prog = open_dump(f"possiblecpus{possible}-{kernel}", "btf")
    session = Cpus(prog, describe(prog), OPTIONS[options])
    session.report(quietly)
    reports: list[CpusReport] = []
    called = calls(lambda: reports.append(session.report(quietly)))
    return Cost(reports[0], session._reader.reads, called)


@pytest.fixture(params=product(("6.1", "6.12"), OPTIONS), ids="-".join)
def costs(request: pytest.FixtureRequest) -> dict[int, Cost]:
    """Number of possible CPUs -> costs of a report."""
    kernel, options = request.param
    return {possible: cost(kernel, possible, options) for possible in POSSIBLE}


def test_dumps_differ_only_in_cpus(costs: dict[int, Cost]) -> None:
    for possible, took in costs.items():
        cpus = [cpu.online for cpu in took.report.cpus]
        assert cpus == [True] * ONLINE + [False] * (possible - ONLINE)
        assert not took.report.notes
    assert len({took.report.coverage["irqs"] for took in costs.values()}) == 1


def test_reads_are_linear(costs: dict[int, Cost]) -> None:
    few, many = POSSIBLE[0], POSSIBLE[-1]
    more = (costs[many].reads - costs[few].reads) / (many - few)
    for possible, took in costs.items():
        most = costs[ONLINE].reads + READS * (possible - ONLINE)
        assert took.reads <= most + ELSEWHERE
        assert abs(took.reads - costs[few].reads - more * (possible - few)) <= ELSEWHERE


def test_calls_are_linear(costs: dict[int, Cost]) -> None:
    more = [
        (costs[many].calls - costs[few].calls) / (many - few)
        for few, many in pairwise(costs)
    ]
    assert max(more) <= CALLS * more[0]
