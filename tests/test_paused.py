# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is told of a kernel that may change is what is told of its dump, if it does not.

A dump is looked at as a guest that is paused: all that is done because a kernel runs is
done, and comes to nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from msatools.cli.main import Command
from msatools.target import Opened, TargetSpec, open_target
from tests.contract.table import CPUS, LOCKS, MEMSTAT, PRSTAT, ZOMBIES, Row
from tests.support.calls import Ran, call
from tests.support.paused import paused

DIFFERS = (
    r"/target/(path|kind|live|format)|/scan_ns"
    r"|/coverage/(stacks|stacks_searched|reads|bytes_read)"
    r"|/changes|/locks/\d+/delta_waiters"
)
"""What is told of the target, and what it costs to see that nothing has changed."""

REGISTERS = (
    r"/totals/classes/(CPU|USR|SYS|INT)|/run_queues/\d+/doing"
    r"|/groups/\d+/evidence/threads/\d+/doing"
)
"""What only a dump has: in which mode a thread runs. Its class is CPU on a guest."""

CPU_COUNT = 2
"""CPUs of the guests that are asked for locks."""

ASKED = (
    (MEMSTAT, "memory-6.12", "-v --unattributed --frag --sections"),
    (MEMSTAT, "memory-6.12", "--by process,file,cgroup,slab,vmalloc,order,zone"),
    (PRSTAT, "tasks-6.12", "-L -a -Z --children"),
    (LOCKS, "locks-6.12", "-v --stack"),
    (ZOMBIES, "zombies-6.12", "-v --tree"),
    (CPUS, "cpus-6.12", "-v -i"),
)


def differences(guest: Any, dump: Any, place: str = "") -> Iterator[str]:
    """Name where two values of JSON are not the same."""
    if isinstance(guest, dict) and isinstance(dump, dict):
        for key in {**guest, **dump}:
            yield from differences(guest.get(key), dump.get(key), f"{place}/{key}")
    elif isinstance(guest, list) and isinstance(dump, list) and len(guest) == len(dump):
        for number, (ours, theirs) in enumerate(zip(guest, dump, strict=True)):
            yield from differences(ours, theirs, f"{place}/{number}")
    elif guest != dump and not re.fullmatch(f"{DIFFERS}|{REGISTERS}", place):
        is_class = place.endswith("/class") and guest == "CPU"
        if not (is_class and dump in ("USR", "SYS", "INT")):
            yield f"{place}: {guest!r}, not {dump!r}"


def assert_searched(guest: dict[str, Any], dump: dict[str, Any]) -> None:
    """Check that only stacks of running tasks were searched in the dump alone.

    Their stack pointers are in registers. A CPU that was in kernel mode, and not idle,
    when the guest was stopped makes a stack more.
    """
    if "stacks_searched" in dump["coverage"]:
        in_dump = dump["coverage"]["stacks_searched"]
        assert 0 <= in_dump - guest["coverage"]["stacks_searched"] <= CPU_COUNT


def ran(command: Command[Any], opened: Opened, *words: str) -> Ran:
    target = ("--qemu", "guest") if opened.target.live else ("dump",)
    return call(command, *target, "--json", *words, opening=lambda _: opened)


@pytest.mark.parametrize(("row", "name", "words"), ASKED)
def test_paused(row: Row, name: str, words: str, tmp_path: Path) -> None:
    dump = lab.build(name).dump("elf")
    of_dump = ran(
        row.command,
        open_target(TargetSpec(path=str(dump), types="btf")),
        *words.split(),
    )
    with paused(dump, tmp_path) as address:
        guest = open_target(TargetSpec(qemu=address, types="btf"))
        assert guest.target.live
        of_guest = ran(row.command, guest, *words.split())
        samples = ran(row.command, guest, *words.split(), "0.01", "1")
    assert (of_dump.status, of_guest.status, of_guest.err) == (0, 0, "")
    assert_searched(of_guest.json, of_dump.json)
    assert [*differences(of_guest.json, of_dump.json)] == []
    assert (samples.status, samples.err) == (0, "")
    at_rest(row.name, samples.json, of_dump.json)


NOW = {
    "memstat": ("pages", "checks", "managed_pages", "by", "unattributed", "sections"),
    "prstat": ("totals", "bound_ns", "accounting"),
    "locks": ("waits", "locks", "roots", "deadlocks", "inversions"),
    "zombies": ("zombies", "limits", "heirs", "held"),
    "cpus": ("load", "sets", "run_queues", "nodes"),
}
"""What a sample has of its end, which is what a report has."""

ZERO = {
    "memstat": r"/classes/\d+/delta_pages|/changes/(?!reread_pages)\w+",
    "prstat": r"/tasks/\d+/(user|system|latency|off_cpu|zombie|lifetime)_ns"
    r"|/tasks/\d+/(nv|niv)csw|/tasks/\d+/(min|maj)_flt",
    "locks": r"/locks/\d+/delta_waiters",
    "zombies": r"/changes/\w+|/groups/\d+/delta",
    "cpus": r"/cpus/\d+/(minf|mjf|xcal|tlb|intr|soft|csw|icsw|migr|\w+_ns)"
    r"|/(irqs|vectors|softirqs)/\d+/(total|counts/\d+)",
}
"""What an interval counts."""


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{place}/{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from numbers(item, f"{place}/{number}")
    elif isinstance(value, int):
        yield place, value


def at_rest(name: str, sample: dict[str, Any], dump: dict[str, Any]) -> None:
    """See that nothing has changed in an interval, and all is as in the dump."""
    assert sample["interval_ns"] == 0
    codes = {note["code"] for note in sample["notes"]}
    assert codes - {note["code"] for note in dump["notes"]} == {"clock-stands-still"}
    for key in NOW[name]:
        if key in dump:
            assert [*differences(sample[key], dump[key], f"/{key}")] == []
    counted = [n for place, n in numbers(sample) if re.fullmatch(ZERO[name], place)]
    assert len(counted) >= 1
    assert not any(counted)
