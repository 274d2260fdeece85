# SPDX-License-Identifier: LGPL-2.1-or-later

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from fixtures import lab
from fixtures.lab.kernels import KERNELS
from fixtures.lab.machines import MACHINES
from msatools.selfcheck.model import SelfCheck
from msatools.selfcheck.model import Verdict as SelfVerdict
from tests.truth import matrix
from tests.truth.fact import Verdict
from tests.truth.matrix import Cell, Result
from tests.truth.tables import TABLES

PLAIN, OTHER = Cell("plain", "6.12"), Cell("nokaslr", "6.12")


def test_all_dumps_of_all_cells_can_be_built() -> None:
    cells = matrix.cells()
    dumps = {dump for cell in cells for table in TABLES for dump in cell.dumps(table)}
    assert dumps <= {*lab.scenarios()}
    assert {cell.kernel for cell in cells} == {*KERNELS}
    assert {cell.machine for cell in cells} == {row.name for row in MACHINES}


def test_a_fact_applies_if_one_dump_has_recorded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {
        "memory-6.12": {"a": Verdict(exact=3), "b": Verdict(why_not="none")},
        "owners-6.12": {"a": Verdict(why_not="none"), "b": Verdict(why_not="none")},
        "barepages-6.12": {"a": Verdict(within=2), "b": Verdict(why_not="none")},
    }
    monkeypatch.setattr(matrix, "verdicts", lambda table, dump: found[dump])
    result = matrix.judge(PLAIN, {"plain-6.12": "no QEMU"})["memstat"]
    assert (result.exact, result.explained, result.causes) == (3, 2, {"a": 2})
    assert result.why_not == {"b": "none"}
    assert result.failed == ["plain-6.12 cannot be built: no QEMU"]


def test_checks_that_do_not_hold_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SelfCheck(
        name="pages",
        left="walked",
        right="counted",
        left_value=1,
        right_value=2,
        difference=-1,
        allowed_least=0,
        allowed_most=0,
        reason=None,
        verdict="ok",
    )
    others: tuple[SelfVerdict, ...] = ("differs", "not-applicable", "unknown")
    checks = made, *(replace(made, verdict=verdict) for verdict in others)

    class Checks:
        def __init__(self, *_: object) -> None:
            pass

        def report(self, progress: object) -> SimpleNamespace:
            return SimpleNamespace(checks=checks)

    monkeypatch.setattr(matrix, "SelfChecks", Checks)
    monkeypatch.setattr(matrix, "open_dump", lambda *_: None)
    monkeypatch.setattr(matrix, "describe", lambda prog: None)
    result = Result()
    matrix.self_check("memstat", "nokaslr-6.12", result)
    assert result.checks == 1
    assert result.failed == [
        f"nokaslr-6.12: pages {verdict}: 1 of walked, 2 of counted"
        for verdict in ("differs", "unknown")
    ]
