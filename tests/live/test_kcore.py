# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-memstat inside of a guest, on the /proc/kcore of the kernel it runs on.

For how it begins and ends there, as all commands do, see tests/live/test_commands.py.
"""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.sharedkcore import READS
from fixtures.lab.inside import RESULTS
from tests.support.vmstat import (
    CACHED_STACKS,
    COUNTED,
    HUGE_PAGES,
    counted,
    counters,
    held_back,
)

PAGE_KB = 4

REREAD_PAGES = 32 * 512
"""Struct pages that are read twice."""


@dataclass
class Session:
    """What the commands in one guest did."""

    release: str
    text: str
    commands: dict[str, dict[str, Any]]
    all_readings: dict[str, list[dict[str, Any]]]
    """What the kernel said while each of the commands ran."""

    shared: dict[str, dict[str, int]]
    """What two workers read at the same time (guest/sharedkcore.py)."""

    @property
    def readings(self) -> list[dict[str, Any]]:
        return self.all_readings["json"]

    def reports(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.commands[name]["stdout"].splitlines()]

    @property
    def report(self) -> dict[str, Any]:
        """The report during which the readings were taken."""
        (report,) = self.reports("json")
        return report

    def around(self, name: str, number: int) -> list[dict[str, Any]]:
        """The readings from before a report was begun until after it was made.

        Without an interval, a report does not say how long it took: it was begun when
        the command had been started.
        """
        report, readings = self.reports(name)[number], self.all_readings[name]
        start, end = self.commands[name]["start_ns"], report["taken_at_ns"]
        if "cost" in report:
            start = end - report["cost"]["elapsed_ns"]
        before = [r for r in readings if r["at_ns"] < start] or readings[:1]
        during = [r for r in readings if start <= r["at_ns"] <= end]
        after = next(r for r in readings if r["at_ns"] > end)
        return [before[-1], *during, after]


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def session(request: pytest.FixtureRequest) -> Session:
    run = lab.build(f"kcore-{request.param}")
    results = json.loads((run.directory / RESULTS).read_text())
    text = results["manners"]["text"]["memstat"]["stdout"]
    parts = (results[name] for name in ("commands", "readings", "shared"))
    return Session(run.release, text, *parts)


def passing(readings: list[dict[str, Any]]) -> int:
    """How many pages a look may have met twice, or missed, and counters be off.

    What is used in between two readings and free again by the second was met, or was
    met elsewhere just before. So are pages that khugepaged has made a huge one of, some
    each ten seconds: they are copied, and freed. (On a busy machine that comes in the
    midst of a look, and made some of a thousand pages of difference.) The huge page
    that it is about to fill is of no use yet; it looks like one of the slab allocator.
    """
    first, last = said(readings[0]), said(readings[-1])
    freed = last["pgfree"] - first["pgfree"]
    collapsed = last["thp_collapse_alloc"] - first["thp_collapse_alloc"]
    return freed + HUGE_PAGES * collapsed + held_back(readings[0]["zoneinfo"])


def said(reading: dict[str, Any]) -> dict[str, int]:
    return counters(reading["vmstat"], reading["zoneinfo"])


def test_commands_that_succeed(session: Session) -> None:
    for name in ("json", "interval", "dwarf"):
        command = session.commands[name]
        assert (command["status"], command["stderr"]) == (0, "")


def test_managed_pages_are_what_the_kernel_says(session: Session) -> None:
    for reading in session.readings:
        total = re.search(r"^MemTotal: +(\d+) kB$", reading["meminfo"], re.MULTILINE)
        assert total
        assert session.report["managed_pages"] * PAGE_KB == int(total[1])
    for name in ("json", "interval", "dwarf"):
        for report in session.reports(name):
            (check,) = [c for c in report["checks"] if c["name"] == "managed"]
            assert check["difference"] == 0


def test_workers_get_what_they_ask_for(session: Session) -> None:
    """By their parent's open file some of their reads give each other's page."""
    print(session.shared)
    assert session.shared["own"] == {"reads": 2 * READS, "wrong": 0}


@pytest.mark.parametrize("name", COUNTED)
def test_class_lies_between_the_counters(session: Session, name: str) -> None:
    _, names = COUNTED[name]
    for number, report in enumerate(session.reports("interval")):
        readings = session.around("interval", number)
        found = [sum(said(reading)[n] for n in names) for reading in readings]
        slack = passing(readings)
        highest = max(found) + slack + CACHED_STACKS * (name == "stacks")
        assert min(found) - slack <= counted(report, name) <= highest


def test_checks(session: Session) -> None:
    for name in ("json", "interval", "dwarf"):
        for number, report in enumerate(session.reports(name)):
            slack = passing(session.around(name, number))
            for check in report["checks"]:
                explained = check["explained_by"] is not None
                assert explained or abs(check["difference"]) <= slack, check


def test_text(session: Session) -> None:
    text = session.text
    head = text.splitlines()[0]
    total = session.report["pages"]
    assert head.startswith(f"{session.release}  live  types: btf  {total:,} pages, ")
    assert head.endswith(" 100% covered")
    assert re.search(r"^Managed .* totalram_pages +ok$", text, re.MULTILINE)
    assert re.search(rf"^Total +{total:,} ", text, re.MULTILINE)
    scanned = r"^scanned in \S+s, [\d,]+ pages allocated and [\d,]+ freed meanwhile; "
    assert re.search(scanned, text, re.MULTILINE)


def test_interval(session: Session) -> None:
    reports, command = session.reports("interval"), session.commands["interval"]
    first, *_, last = reports
    assert len(reports) == 3
    for report in reports:
        assert report["interval_ns"] > 0
        assert all(type(c["delta_pages"]) is int for c in report["classes"])
        assert sum(c["delta_pages"] for c in report["classes"]) == 0
        assert report["pages"] == session.report["pages"]
    start = first["taken_at_ns"] - first["interval_ns"]
    assert command["start_ns"] < start < first["taken_at_ns"]
    assert last["taken_at_ns"] < command["end_ns"]
    for before, after in pairwise(reports):
        assert before["taken_at_ns"] + after["interval_ns"] == after["taken_at_ns"]
        for one, other in zip(before["classes"], after["classes"], strict=True):
            assert one["name"] == other["name"]
            assert one["pages"] + other["delta_pages"] == other["pages"]


def test_what_changed_during_the_scan(session: Session) -> None:
    """The kernel's own counts, of a part of the time between two readings."""
    for name in ("json", "interval", "dwarf"):
        for number, report in enumerate(session.reports(name)):
            first, *_, last = session.around(name, number)
            assert 0 < report["scan_ns"] < last["at_ns"] - first["at_ns"]
            changes = report["changes"]
            for key, counter in (("allocated", "pgalloc_"), ("freed", "pgfree")):
                then, now = (passed(reading, counter) for reading in (first, last))
                assert 0 <= changes[f"{key}_pages"] <= now - then
            assert changes["reread_pages"] == REREAD_PAGES
            folios, pages = changes["changed_folios"], changes["changed_pages"]
            assert 0 <= folios <= pages < REREAD_PAGES
            times = report["pages"] / REREAD_PAGES
            assert changes["about_folios"] == round(folios * times)


def passed(reading: dict[str, Any], counter: str) -> int:
    """What is counted by one counter, or in several of the same first part."""
    found = said(reading).items()
    return sum(count for name, count in found if name.startswith(counter))


def test_debug_info_says_the_same(session: Session) -> None:
    (report,) = session.reports("dwarf")
    assert report["target"]["types"] == "dwarf"
    for name in ("pages", "managed_pages"):
        assert report[name] == session.report[name]
    assert [c["name"] for c in report["checks"]] == [
        c["name"] for c in session.report["checks"]
    ]


def test_no_debug_info(session: Session) -> None:
    command = session.commands["no-debug-info"]
    assert (command["status"], command["stdout"]) == (1, "")
    error, end, rest = command["stderr"].partition("\n")
    assert (end, rest) == ("\n", "")
    assert error.startswith("msa-memstat: /proc/kcore: ")
    assert f"no debug info found for {session.release}" in error
    assert f"linux-image-{session.release}-dbg" in error
    assert "vmlinux with -s" in error
