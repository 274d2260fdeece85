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
from tests.truth.matrix import COMMANDS, Cell, Result
from tests.truth.tables import TABLES

PLAIN, OTHER = Cell("plain", "6.12"), Cell("nokaslr", "6.12")


def test_all_dumps_of_all_cells_can_be_built() -> None:
    cells = matrix.cells()
    dumps = {dump for cell in cells for table in TABLES for dump in cell.dumps(table)}
    assert dumps <= {*lab.scenarios()}
    assert {cell.kernel for cell in cells} == {*KERNELS}
    assert {cell.machine for cell in cells} == {row.name for row in MACHINES}


def test_plain_cells_have_the_other_scenarios_too() -> None:
    assert {*PLAIN.dumps("memstat")} >= {"memory-6.12", "owners-6.12", "plain-6.12"}
    assert [*OTHER.dumps("memstat")] == ["nokaslr-6.12"]


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


def test_a_command_that_ends_with_an_error_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verdicts(table: str, dump: str) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(matrix, "verdicts", verdicts)
    monkeypatch.setattr(matrix, "self_check", lambda *_: None)
    for result in matrix.judge(OTHER, {}).values():
        assert {*result.failed} == {"nokaslr-6.12: OverflowError: too large"}


def test_page() -> None:
    """It has figures, what explains them, why facts do not apply, what is untried."""
    good = {name: Result(exact=1234) for name in COMMANDS}
    other = {name: Result(exact=1) for name in COMMANDS}
    other["memstat"] = Result(5, 2, ["x"], {"counters": 2}, {"process": "not recorded"})
    text = matrix.page({PLAIN: good, OTHER: other}, {"6.12": "6.12.117-cloud"})
    lines = text.splitlines()
    assert "- 6.12: 6.12.117-cloud" in lines
    (row,) = (line for line in lines if line.startswith("| nokaslr-6.12 |"))
    assert "| 5 exact, 2 explained, **1 failed** |" in row
    assert "| 1,234 exact |" in next(line for line in lines if "| plain-6.12 |" in line)
    assert any(line.startswith("- msa-memstat, counters (2): a CPU") for line in lines)
    assert "- msa-memstat, process: not recorded (nokaslr-6.12)." in lines
    assert "la57off-6.12" in lines[lines.index("## Not tried") + 2]
