# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules, on the reports of real dumps as they would be some time later, or damaged."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from fixtures import lab
from msatools.locks.report import LocksReport, Root, Wait
from msatools.report.memory import GroupAtLimit, MemoryState, ZoneState
from msatools.report.model import SECTIONS, TriageVerdict
from msatools.report.options import ReportOptions
from msatools.report.parts import ReportParts
from msatools.report.report import collect_report
from msatools.report.rule import VerdictRule, verdicts
from msatools.report.rules import RULES
from msatools.report.rules.hung_tasks import HUNG_NS, LONG_NS
from msatools.target import TargetSpec, open_target

MIB = 256
"""Pages of a MiB."""


@cache
def parts_of(dump: str) -> ReportParts:
    path = str(lab.build(dump).kept)
    opened = open_target(TargetSpec(path=path, types="btf"))
    options = ReportOptions(keep_parts=True)
    report = collect_report(opened.prog, target=opened.target, options=options)
    assert report.parts is not None
    return report.parts


def said(parts: ReportParts) -> dict[str, list[TriageVerdict]]:
    found: dict[str, list[TriageVerdict]] = {}
    for verdict in verdicts(RULES, parts):
        found.setdefault(verdict.code, []).append(verdict)
    return found


def aged(parts: ReportParts, age_ns: int) -> ReportParts:
    """Return the parts with all waits as long as *age_ns*."""
    locks = parts.locks
    assert locks is not None

    def wait(each: Wait) -> Wait:
        return replace(each, age_ns=age_ns, age_bound="exact")

    def root(each: Root) -> Root:
        return replace(each, max_age_ns=age_ns)

    changed: LocksReport = replace(
        locks, waits=tuple(map(wait, locks.waits)), roots=tuple(map(root, locks.roots))
    )
    return replace(parts, locks=changed)


def test_long_waits() -> None:
    parts = parts_of("locks-6.12")
    early = said(aged(parts, LONG_NS // 4))
    assert not {"io-stuck", "hung-tasks"} & {*early}
    late, hung = said(aged(parts, LONG_NS)), said(aged(parts, HUNG_NS))
    for found, severity in ((late, "warning"), (hung, "critical")):
        (tasks,) = found["hung-tasks"]
        stuck = found["io-stuck"]
        assert {each.severity for each in (tasks, *stuck)} == {severity}
        texts = " ".join(each.text for each in stuck)
        assert all(name in texts for name in ("FUSE server", "dm-0", "dm-1"))
        blocked = sum(wait.state == "D" for wait in parts.locks.waits)  # type: ignore[union-attr]
        assert tasks.text.startswith(f"{blocked} tasks")


def test_each_rule_is_true_to_its_form() -> None:
    # Stalls have two rules each: what stands still now, and what the log has.
    rules = [(rule.code, rule.needs) for rule in RULES]
    assert len({*rules}) == len(rules)
    fields = ReportParts.__dataclass_fields__
    assert all({*rule.needs} <= {*fields} for rule in RULES)
    parts = parts_of("locks-6.12")
    for verdict in verdicts(RULES, parts):
        assert verdict.text[0] not in " ."
        assert verdict.see.startswith("msa-")
        assert verdict.evidence


@pytest.mark.parametrize("name", [*SECTIONS, "memory"])
def test_without_a_part(name: str) -> None:
    """Only the rules that need the part are silent."""
    parts = parts_of("locks-6.12")
    less = replace(parts, **{name: None})  # type: ignore[arg-type]
    needing = {rule.code for rule in RULES if name in rule.needs}
    before, after = said(parts), said(less)
    assert {*before} - {*after} <= needing
    assert not needing & {*after}


# --- memory


def zone(free: int) -> ZoneState:
    return ZoneState(
        node=0,
        name="Normal",
        managed=1000 * MIB,
        free=free,
        low=200,
        min=100,
        reserve=0,
    )


def memory(
    free: int, cached: int = 0, groups: Iterator[GroupAtLimit] | tuple[()] = ()
) -> MemoryState:
    counters = {"NR_ACTIVE_FILE": cached, "NR_INACTIVE_FILE": 0}
    return MemoryState(
        zones=(zone(free),),
        counters={**counters, "NR_SLAB_RECLAIMABLE_B": 0},
        swap_pages=0,
        swap_free_pages=0,
        groups=tuple(groups),
    )


@pytest.mark.parametrize(
    ("free", "cached", "severity"),
    [
        (201, 0, None),
        (199, 500 * MIB, None),
        (199, 70 * MIB, "warning"),
        (199, 10 * MIB, "critical"),
        (50, 500 * MIB, None),
    ],
)
def test_low_memory(free: int, cached: int, severity: str | None) -> None:
    """Below a watermark, but with much to reclaim, is usual."""
    parts = replace(parts_of("memory-6.12"), memory=memory(free, cached))
    found = said(parts).get("memory-low", [])
    assert [each.severity for each in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("file_pages", "ooms", "is_said"), [(900, 0, False), (10, 0, True), (900, 3, True)]
)
def test_group_at_its_limit(file_pages: int, ooms: int, is_said: bool) -> None:
    """A group full of the page cache is as it should be."""
    group = GroupAtLimit(
        path="/a",
        pages=1000,
        max_pages=1000,
        file_pages=file_pages,
        anon_pages=1000 - file_pages,
        ooms=ooms,
        kills=ooms,
    )
    state = replace(memory(1000 * MIB), groups=(group,))
    found = said(replace(parts_of("memory-6.12"), memory=state))
    assert ("cgroup-at-limit" in found) == is_said


def test_nothing_is_said_of_a_quiet_machine() -> None:
    assert said(parts_of("memory-6.12")) == {}


def test_rules_are_sorted_by_severity() -> None:
    def rule(code: str, severity: str) -> "VerdictRule[int]":
        return VerdictRule(
            code=code,
            needs=(),
            when=lambda parts: (1,),
            severity=severity,  # type: ignore[arg-type]
            confidence="exact",
            words=lambda one: code,
            evidence=lambda one: (),
            see=lambda one: ("locks",),
        )

    rules = [rule("a", "info"), rule("b", "critical"), rule("c", "critical")]
    found = verdicts(rules, parts_of("memory-6.12"))
    assert [each.code for each in found] == ["b", "c", "a"]
