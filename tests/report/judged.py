# SPDX-License-Identifier: LGPL-2.1-or-later

"""Compares the verdicts on a dump with what is expected of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fixtures import lab
from tests.report.expected import (
    ENVIRONMENT,
    LATE_CRITICAL,
    OBSERVED,
    SCENARIOS,
    Expected,
)
from tests.truth import tables

SAID_ALWAYS = frozenset({"panic"})
"""The code of a crash, which the table has by its cause."""


@dataclass(frozen=True)
class Judged:
    """Codes said and expected of one dump."""

    said: frozenset[str]
    right: frozenset[str]
    """Those of them that may be said."""

    missed: frozenset[str]
    critical_said: frozenset[str]
    critical_right: frozenset[str]
    critical_missed: frozenset[str]
    failed: tuple[str, ...]
    """What is wrong, in lines."""


def judged_dumps() -> list[str]:
    """Return the names of the dumps of all scenarios of which something is expected."""
    return [name for name in lab.scenarios() if name.rpartition("-")[0] in SCENARIOS]


def report_of(dump: str) -> Mapping[str, Any]:
    """Return the JSON of msa-report on a dump of the lab."""
    found: Mapping[str, Any] = tables.report("report", dump)
    return found


@cache
def judged(dump: str) -> Judged:
    """Judge the report on a dump, such as ``crashes-null-6.12``."""
    expected = SCENARIOS[dump.rpartition("-")[0]]
    report = report_of(dump)
    verdicts = report["verdicts"]
    said = frozenset(each["code"] for each in verdicts)
    critical = frozenset(v["code"] for v in verdicts if v["severity"] == "critical")
    died = SAID_ALWAYS if expected.died else frozenset[str]()
    is_quiet = expected == Expected()
    facts = frozenset[str]() if is_quiet else OBSERVED
    may = expected.must | expected.may | expected.critical | died | facts
    said_by_log = _said_by_log(verdicts)
    must_critical = expected.critical | died
    # What lasts long enough is critical.
    may_critical = must_critical | expected.critical_may | LATE_CRITICAL & may
    return Judged(
        said=said,
        right=said & (may | said_by_log),
        missed=(expected.must | must_critical) - said,
        critical_said=critical,
        critical_right=critical & may_critical,
        critical_missed=must_critical - critical,
        failed=tuple(_failed(dump, report)),
    )


def _said_by_log(verdicts: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return codes of what the guest's kernel reported, and what did not last."""
    found = [each for each in verdicts if each["code"] in ENVIRONMENT]
    return frozenset(
        each["code"]
        for each in found
        if each["severity"] == "warning" and each["text"].endswith("; it is over")
    )


def _failed(dump: str, report: Mapping[str, Any]) -> Iterator[str]:
    expected = SCENARIOS[dump.rpartition("-")[0]]
    crash = report["crash"]
    if expected.died is None:
        if crash is not None:
            yield f"it did not crash: {crash}"
    elif crash is None:
        yield "it crashed"
    else:
        died = expected.died
        if crash["cause"] != died.cause:
            yield f"cause {crash['cause']}, not {died.cause}"
        if died.function is not None:
            found = crash["function"], crash["module"]
            functions = died.function, died.or_function
            if crash["function"] not in functions or crash["module"] != died.module:
                yield f"in {found}, not {(died.function, died.module)}"
        if not crash["frames"]:
            yield "no stack"
    for codes, words in expected.words.items():
        said = [v for v in report["verdicts"] if v["code"] in codes.split("|")]
        texts = json.dumps(said)
        if words not in texts:
            yield f"{codes} does not say {words!r}: {texts}"
    for name, section in report["sections"].items():
        if "error" in section:
            yield f"{name}: {section['error']}"
