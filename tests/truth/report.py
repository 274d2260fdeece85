# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-report: what the guest's workload says of its own crash."""

from fixtures.lab import Run
from tests.report.expected import SCENARIOS
from tests.truth.fact import Fact, Figures

KIB = 1024


def case(run: Run) -> str:
    """Return the name of the fault that the guest was asked for."""
    if "case" not in run.workload:
        raise LookupError("it did not crash")
    scenario = run.name.rpartition("-")[0]
    family = scenario.partition("-")[0]
    return f"{family}-{run.workload['case']}"


def cause(run: Run) -> Figures:
    died = SCENARIOS[case(run)].died
    assert died is not None
    return {"cause": died.cause}


def function(run: Run) -> Figures:
    died = SCENARIOS[case(run)].died
    assert died is not None
    if died.function is None or died.or_function is not None:
        raise LookupError("the function is chance")
    return {"function": died.function, "module": died.module}


def memory(run: Run) -> Figures:
    lines = run.truth("proc/meminfo").decode().splitlines()
    values = dict(line.split(":") for line in lines)
    return {"ram_bytes": int(values["MemTotal"].split()[0]) * KIB}


def loaded(run: Run) -> Figures:
    """Return whether a module that is not the kernel's own was loaded."""
    return {"tainted": "(O" in run.truth("proc/modules").decode()}


FACTS = (
    Fact(
        name="cause of a crash",
        reported=lambda report: report["crash"] or {},
        recorded=cause,
    ),
    Fact(
        name="faulting function",
        reported=lambda report: report["crash"] or {},
        recorded=function,
    ),
    Fact(
        name="memory",
        reported=lambda report: report["machine"],
        recorded=memory,
    ),
    Fact(
        name="taint of a module",
        reported=lambda report: {"tainted": "O" in report["machine"]["taints"]},
        recorded=loaded,
    ),
)
