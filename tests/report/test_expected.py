# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is said of real dumps, and what is not."""

from collections.abc import Iterator

import pytest

from fixtures import lab
from fixtures.lab import store
from tests.report.expected import FEW, NOT_JUDGED, SCENARIOS
from tests.report.judged import judged, judged_dumps, report_of
from tests.support.tiers import KERNEL


def dumps() -> Iterator[object]:
    """Yield the dumps of kernel 6.12; others with ``--all-kernels``."""
    for dump in judged_dumps():
        name, _, kernel = dump.rpartition("-")
        is_short = name in FEW and kernel == KERNEL
        yield pytest.param(dump, marks=[] if is_short else [pytest.mark.long])


@pytest.mark.parametrize("dump", [*dumps()])
def test_verdicts(dump: str) -> None:
    found = judged(dump)
    assert found.failed == ()
    assert found.missed == frozenset()
    assert found.said - found.right == frozenset()
    assert found.critical_missed == frozenset()
    assert found.critical_said - found.critical_right == frozenset()


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
