# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-memstat inside of a guest, on the /proc/kcore of the kernel it runs on."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.kcore import RESULTS

PAGE_KB = 4

# Classes, and what the kernel calls their pages in /proc/vmstat. Pages move between
# buddy allocator and per-CPU lists by the hundred without being used in between.
COUNTED = {
    "free": (("free.buddy", "free.pcp"), ("nr_free_pages", "pcp")),
    "anon": (("user.anon", "user.ksm"), ("nr_anon_pages",)),
    "cache": (
        ("cache.file", "cache.exec", "cache.shmem", "cache.blockdev"),
        ("nr_file_pages",),
    ),
    "shmem": (("cache.shmem",), ("nr_shmem",)),
    "slab": (
        ("kernel.slab", "kernel.large_kmalloc"),
        ("nr_slab_reclaimable", "nr_slab_unreclaimable"),
    ),
    "page tables": (("kernel.page_tables",), ("nr_page_table_pages",)),
    "stacks": (("kernel.stacks",), ("nr_kernel_stack",)),
}
# Stacks kept for the next fork are in no counter: two of four pages for each CPU.
CACHED_STACKS = 2 * 2 * 4


@dataclass
class Session:
    """What the commands in one guest did."""

    release: str
    commands: dict[str, dict[str, Any]]
    readings: list[dict[str, Any]]

    def reports(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.commands[name]["stdout"].splitlines()]

    @property
    def report(self) -> dict[str, Any]:
        """The report during which the readings were taken."""
        (report,) = self.reports("json")
        return report

    @property
    def held_back(self) -> int:
        """How far a counter in /proc/vmstat may be off.

        A CPU passes its changes on only above a threshold, which depends on the
        zone (at most 125).
        """
        pattern = r"vm stats threshold: (\d+)"
        return sum(map(int, re.findall(pattern, self.readings[0]["zoneinfo"])))

    def readings_of_the_scan(self) -> list[dict[str, int]]:
        """The counters as they were while the report was made.

        These have what msa-memstat itself takes, unlike those before and after. The
        time between two reports in a row is at least what it takes to make one; the
        first may take twice that, as types are looked up for the first time.
        """
        end = self.report["taken_at_ns"]
        start = end - 2 * max(r["interval_ns"] for r in self.reports("interval"))
        during = [r for r in self.readings if start <= r["at_ns"] <= end]
        after = next(r for r in self.readings if r["at_ns"] > end)
        return [counters(reading) for reading in (*during, after)]


def load(name: str) -> Session:
    run = lab.build(name)
    results = json.loads((run.directory / RESULTS).read_text())
    return Session(run.release, results["commands"], results["readings"])


def counters(reading: dict[str, Any]) -> dict[str, int]:
    """The counters of /proc/vmstat in pages, and the pages on per-CPU lists."""
    pairs = (line.split() for line in reading["vmstat"].splitlines())
    values = {name: int(value) for name, value in pairs}
    values["nr_kernel_stack"] //= PAGE_KB
    lists = re.findall(r"^ +count: +(\d+)$", reading["zoneinfo"], re.MULTILINE)
    values["pcp"] = sum(map(int, lists))
    return values


def pages(report: dict[str, Any], *names: str) -> int:
    return sum(c["pages"] for c in report["classes"] if c["name"] in names)


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def session(request: pytest.FixtureRequest) -> Session:
    return load(f"kcore-{request.param}")


def error_of(command: dict[str, Any]) -> str:
    """The one line that a command that failed has printed."""
    assert command["status"] == 1
    assert command["stdout"] == ""
    line, end, rest = command["stderr"].partition("\n")
    assert (end, rest) == ("\n", "")
    assert line.startswith("msa-memstat: ")
    return str(line)


def test_commands_that_succeed(session: Session) -> None:
    for name in ("text", "json", "interval", "dwarf"):
        command = session.commands[name]
        assert (command["status"], command["stderr"]) == (0, "")


def test_report(session: Session) -> None:
    report, command = session.report, session.commands["json"]
    target = report["target"]
    assert (target["path"], target["kind"], target["live"]) == (
        "/proc/kcore",
        "kcore",
        True,
    )
    assert (target["release"], target["types"]) == (session.release, "btf")
    assert (target["dump_level"], target["crash"]) == (None, None)
    assert command["start_ns"] < report["taken_at_ns"] < command["end_ns"]
    assert report["interval_ns"] is None
    assert sum(c["pages"] for c in report["classes"]) == report["pages"]
    assert report["coverage"]["excluded_pages"] == 0
    assert report["coverage"]["unreadable_pages"] == 0


def test_managed_pages_are_what_the_kernel_says(session: Session) -> None:
    for reading in session.readings:
        total = re.search(r"^MemTotal: +(\d+) kB$", reading["meminfo"], re.MULTILINE)
        assert total
        assert session.report["managed_pages"] * PAGE_KB == int(total[1])
    check = next(c for c in session.report["checks"] if c["name"] == "managed")
    assert check["difference"] == 0


@pytest.mark.parametrize("name", COUNTED)
def test_class_lies_between_the_counters(session: Session, name: str) -> None:
    classes, names = COUNTED[name]
    report, readings = session.report, session.readings_of_the_scan()
    found = [sum(reading[n] for n in names) for reading in readings]
    lowest, highest = min(found) - session.held_back, max(found) + session.held_back
    if name == "stacks":
        highest += CACHED_STACKS
    if name == "anon":
        # What msa-memstat itself had in between two readings.
        peak = session.commands["json"]["peak_kib"] // PAGE_KB
        highest = max(highest, min(found) + peak + session.held_back)
    if name == "free" and report["coverage"].get("pcp_lists_broken"):
        # A list that changes while it is followed is lost from there on.
        lowest -= max(reading["pcp"] for reading in readings)
    assert lowest <= pages(report, *classes) <= highest


def test_checks(session: Session) -> None:
    reports = (session.report, *session.reports("interval"), *session.reports("dwarf"))
    for report in reports:
        for check in report["checks"]:
            explained = check["explained_by"] is not None
            assert explained or abs(check["difference"]) <= session.held_back, check


def test_text(session: Session) -> None:
    text = session.commands["text"]["stdout"]
    assert "\x1b" not in text
    head = text.splitlines()[0]
    total = session.report["pages"]
    assert head.startswith(f"{session.release}  live  types: btf  {total:,} pages, ")
    assert head.endswith(" 100% covered")
    assert re.search(r"^Managed .* totalram_pages +ok$", text, re.MULTILINE)
    assert re.search(rf"^Total +{total:,} ", text, re.MULTILINE)


def test_interval(session: Session) -> None:
    first, second = session.reports("interval")
    command = session.commands["interval"]
    for report in (first, second):
        assert report["interval_ns"] > 0
        assert all(type(c["delta_pages"]) is int for c in report["classes"])
        assert sum(c["delta_pages"] for c in report["classes"]) == 0
        assert report["pages"] == session.report["pages"]
    start = first["taken_at_ns"] - first["interval_ns"]
    assert command["start_ns"] < start < first["taken_at_ns"]
    assert first["taken_at_ns"] + second["interval_ns"] == second["taken_at_ns"]
    assert second["taken_at_ns"] < command["end_ns"]
    for before, after in zip(first["classes"], second["classes"], strict=True):
        assert before["name"] == after["name"]
        assert before["pages"] + after["delta_pages"] == after["pages"]


def test_not_root(session: Session) -> None:
    error = error_of(session.commands["nobody"])
    assert error.endswith(": /proc/kcore: permission denied; run as root")


def test_debug_info_says_the_same(session: Session) -> None:
    (report,) = session.reports("dwarf")
    assert report["target"]["types"] == "dwarf"
    for name in ("pages", "managed_pages"):
        assert report[name] == session.report[name]
    assert [c["name"] for c in report["checks"]] == [
        c["name"] for c in session.report["checks"]
    ]


def test_no_debug_info(session: Session) -> None:
    error = error_of(session.commands["no-debug-info"])
    assert f"no debug info found for {session.release}" in error
    assert f"linux-image-{session.release}-dbg" in error
    assert "vmlinux with -s" in error


def test_lockdown() -> None:
    error = error_of(load("lockdown-6.12").commands["locked"])
    assert "/proc/kcore: the kernel is locked down (confidentiality)" in error
