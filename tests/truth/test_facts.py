# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every fact of every command holds on every dump that recorded it."""

from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures, judge
from tests.truth.tables import TABLES, verdicts


def cases() -> Iterator[object]:
    """Yield each command and dump, marked ``kernels`` if the code differs by kernel."""
    for command, table in TABLES.items():
        marks = [pytest.mark.kernels] if table.branches else []
        for dump in table.dumps:
            yield pytest.param(command, dump, marks=marks)
        for dump in table.others:
            yield pytest.param(command, dump)


@pytest.mark.parametrize(("command", "dump"), [*cases()])
def test_facts(command: str, dump: str) -> None:
    found = verdicts(command, dump).values()
    assert [line for verdict in found for line in verdict.failed] == []
    # At least one figure was compared.
    assert sum(verdict.exact for verdict in found) > 0


@pytest.mark.parametrize("command", TABLES)
def test_each_fact_has_a_name_of_its_own(command: str) -> None:
    names = [fact.name for fact in TABLES[command].facts]
    assert sorted({*names}) == sorted(names)


@pytest.mark.parametrize("command", TABLES)
def test_each_fact_is_recorded_by_some_dump(command: str) -> None:
    table = TABLES[command]
    dumps = [dump for dump in table.dumps if dump.endswith("-6.12")]
    for fact in table.facts:
        found = [verdicts(command, dump)[fact.name] for dump in dumps]
        assert any(verdict.exact or verdict.within for verdict in found), fact


def as_reported(report: Any) -> Figures:
    return {"cpu0": report}


def test_a_fact_that_does_not_hold_fails() -> None:
    run: Any = None
    exact = Fact("load", as_reported, lambda run: {"cpu0": 7})
    loose = Fact("load", as_reported, lambda run: {"cpu0": 7}, lambda run: 2, "a tick")
    assert judge(exact, 7, run).exact == 1
    assert judge(exact, 8, run).failed == ["load of cpu0: 8, recorded 7"]
    assert judge(loose, 9, run).within == 1
    assert judge(loose, 10, run).failed
    assert judge(loose, None, run).failed


def test_what_was_not_recorded_is_no_success() -> None:
    def recorded(run: Run) -> Figures:
        raise KeyError("proc/vmstat")

    run: Any = None
    verdict = judge(Fact("load", as_reported, recorded), 7, run)
    assert verdict.why_not
    assert (verdict.exact, verdict.failed) == (0, [])


def test_a_tolerance_has_a_cause() -> None:
    with pytest.raises(ValueError, match="cause"):
        Fact("load", as_reported, lambda run: {}, lambda run: 1)
