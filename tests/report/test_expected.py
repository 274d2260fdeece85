# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is said of real dumps, and what is not."""

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout

import pytest
from drgn.helpers.linux.pid import for_each_task

from fixtures import lab
from fixtures.lab import store
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.registry import load
from msatools.report.crash import CrashLog, find_crash
from msatools.report.log import is_machinery, parse_events, read_log
from tests.report.expected import FEW, NOT_JUDGED, SCENARIOS
from tests.report.judged import judged, judged_dumps, report_of
from tests.support.tiers import KERNEL
from tests.truth import tables

_TASK = re.compile(r"(?<![\w.,/-])(\d{1,7}) ([^\s,;:()]+)")


def dumps(crashed: bool = False) -> Iterator[object]:
    """Yield the dumps of kernel 6.12; others with ``--all-kernels``.

    :param crashed: Whether only those of kernels that crashed.
    """
    for dump in judged_dumps():
        name, _, kernel = dump.rpartition("-")
        if crashed and not SCENARIOS[name].died:
            continue
        is_short = name in FEW and kernel == KERNEL
        yield pytest.param(dump, marks=[] if is_short else [pytest.mark.long])


@pytest.mark.parametrize("dump", [*dumps(crashed=True)])
def test_fingerprint_is_of_who_is_at_fault(dump: str) -> None:
    """And never of the functions alone that panic() and oopses go through."""
    crash = report_of(dump)["crash"]
    function = crash["function"]
    if crash["cause"] == "nmi":
        assert function is None
        return
    assert function is not None
    assert not is_machinery(function)


@pytest.mark.parametrize("dump", [*dumps()])
def test_verdicts(dump: str) -> None:
    found = judged(dump)
    assert found.failed == ()
    assert found.missed == frozenset()
    assert found.said - found.right == frozenset()
    assert found.critical_missed == frozenset()
    assert found.critical_said - found.critical_right == frozenset()


@pytest.mark.parametrize("dump", [*dumps()])
def test_what_a_verdict_names_is_where_it_says(dump: str) -> None:
    """Its command shows each task that the verdict names."""
    prog = tables.open_dump(dump, "btf")
    tasks = {
        (task.pid.value_(), task.comm.string_().decode(errors="replace"))
        for task in for_each_task(prog)
    }
    directory = str(lab.build(dump).directory)
    for verdict in report_of(dump)["verdicts"]:
        named = {(int(pid), comm) for pid, comm in _TASK.findall(verdict["text"])}
        if not named & tasks:
            continue
        name, *words = shlex.split(verdict["see"])
        words = [word for word in words if not word.startswith(directory)]
        out = io.StringIO()
        with redirect_stdout(out):
            run_in_drgn(load(name.removeprefix("msa-")), prog, words)
        for pid, comm in named & tasks:
            assert re.search(rf"\b{pid}\b", out.getvalue()), (verdict, pid, comm)


def test_each_dump_has_expectations() -> None:
    names = {name for name in lab.scenarios() if not store.runs_inside(name)}
    scenarios = {name.rpartition("-")[0] for name in names}
    assert scenarios == {*SCENARIOS, *NOT_JUDGED}
    assert not {*SCENARIOS} & {*NOT_JUDGED}


ALIKE = tuple(
    name
    for name in (
        *("crashes-null", "crashes-bug", "crashes-stack", "crashes-gpf"),
        *("crashes-fault", "crashes-warn", "crashes-init", "crashes-oom"),
        *("crashes-oom-group", "crashes-oom-victim"),
        *("watchdogs-soft", "watchdogs-rcu", "watchdogs-hung"),
    )
    if f"{name}-6.1" in lab.scenarios()
)
"""Scenarios whose fault is the same on both kernels."""


@pytest.mark.long
@pytest.mark.parametrize("name", ALIKE)
def test_one_fault_has_one_fingerprint(name: str) -> None:
    prints = {
        report_of(f"{name}-{kernel}")["crash"]["fingerprint"]
        for kernel in ("6.1", "6.12")
    }
    assert len(prints) == 1


@pytest.mark.long
def test_other_faults_have_others() -> None:
    crashes = [f"{name}-6.12" for name in ALIKE]
    prints = [report_of(dump)["crash"]["fingerprint"] for dump in crashes]
    assert len({*prints}) == len(prints)


@pytest.mark.parametrize(
    ("dump", "faults"),
    [
        ("crashes-nested-6.12", 1),
        pytest.param("crashes-nested-hang-6.12", 2, marks=pytest.mark.long),
    ],
)
def test_faults_in_panic_are_told_after_its_reason(dump: str, faults: int) -> None:
    report = report_of(dump)
    nested = [
        (each["cause"], each["function"], each["module"])
        for each in report["crash"]["nested"]
    ]
    assert nested == [("page-fault", "cm_on_panic", "crashmodule")] * faults
    assert "oops" not in {verdict["code"] for verdict in report["verdicts"]}


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("nested", "cm_read_state"),
        pytest.param("nested-hang", "cm_panic", marks=pytest.mark.long),
    ],
)
def test_fault_in_panic_whose_reason_the_log_lost(case: str, function: str) -> None:
    """Who called panic() first is on the stack, below what panic() called."""
    path = str(lab.build(f"crashes-{case}-6.12").kept)
    found = open_target(TargetSpec(path=path, types="btf"))
    reader, losses = Reader(found.prog), LossLog()
    events = parse_events(read_log(reader, losses))
    first = next(index for index, event in enumerate(events) if event.is_panic)
    log = CrashLog(events=events[first + 1 :], oom=None, end_ns=events[-1].time_ns)
    crash = find_crash(reader, found.target, log, losses)
    assert crash is not None
    assert (crash.function, crash.module) == (function, "crashmodule")
