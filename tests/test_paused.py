# SPDX-License-Identifier: LGPL-2.1-or-later

"""Commands report the same for a paused guest as for its dump.

The guest is served from the dump, so the code for running kernels runs on memory that
does not change.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures import lab
from msatools.cli.arguments import Command
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.report import WaitTarget
from msatools.locks.wait_targets import Explainer
from msatools.program import Opened, TargetSpec, open_target
from msatools.tasks.sampler import Sampler
from msatools.tasks.waits import TaskClass
from tests.contract.table import CPUS, LOCKS, MEMSTAT, PRSTAT, ZOMBIES, Row
from tests.support.calls import Ran, call
from tests.support.paused import paused

DIFFERS = (
    r"/target/(path|kind|live|format)|/scan_ns"
    r"|/coverage/(stacks|stacks_searched|reads|bytes_read)"
    r"|/changes|/locks/\d+/delta_waiters"
)
"""Parts that differ: the target, and reads to check that nothing has changed."""

REGISTERS = (
    r"/totals/classes/(CPU|USR|SYS|INT)|/run_queues/\d+/doing"
    r"|/groups/\d+/evidence/threads/\d+/doing"
)
"""Parts that need registers, which only a dump has: whether a running thread is in user
or kernel mode. In a guest its class is CPU."""

CPU_COUNT = 2
"""CPUs of the guests with locks."""

ASKED = (
    (MEMSTAT, "memory-6.12", "-v --unattributed --frag --sections"),
    (MEMSTAT, "memory-6.12", "--by process,file,cgroup,slab,vmalloc,order,zone"),
    (PRSTAT, "tasks-6.12", "-L -a -Z --children"),
    (LOCKS, "locks-6.12", "-v --stacks"),
    (ZOMBIES, "zombies-6.12", "-v --tree"),
    (CPUS, "cpus-6.12", "-v -i"),
)


def differences(guest: Any, dump: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each difference between two JSON values."""
    if isinstance(guest, dict) and isinstance(dump, dict):
        for key in {**guest, **dump}:
            yield from differences(guest.get(key), dump.get(key), f"{path}/{key}")
    elif isinstance(guest, list) and isinstance(dump, list) and len(guest) == len(dump):
        for number, (ours, theirs) in enumerate(zip(guest, dump, strict=True)):
            yield from differences(ours, theirs, f"{path}/{number}")
    elif guest != dump and not re.fullmatch(f"{DIFFERS}|{REGISTERS}", path):
        is_class = path.endswith("/class") and guest == "CPU"
        if not (is_class and dump in ("USR", "SYS", "INT")):
            yield f"{path}: {guest!r}, not {dump!r}"


def assert_searched(guest: dict[str, Any], dump: dict[str, Any]) -> None:
    """Check the number of stacks that were searched only in the dump.

    These are stacks of running tasks, whose stack pointers are in registers: at most
    one per CPU that was in kernel mode, and not idle, when the guest was stopped.
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
    assert_at_rest(row.name, samples.json, of_dump.json)


NOW = {
    "memstat": ("pages", "checks", "managed_pages", "by", "unattributed", "sections"),
    "prstat": ("totals", "bound_ns", "accounting"),
    "locks": ("waits", "locks", "roots", "deadlocks", "inversions"),
    "zombies": ("zombies", "limits", "heirs", "held"),
    "cpus": ("load", "sets", "run_queues", "nodes"),
}
"""Keys whose values in a sample are those at its end, as in a report."""

ZERO = {
    "memstat": r"/classes/\d+/delta_pages|/changes/(?!reread_pages)\w+",
    "prstat": r"/tasks/\d+/(user|system|latency|off_cpu|zombie|lifetime)_ns"
    r"|/tasks/\d+/(nv|niv)csw|/tasks/\d+/(min|maj)_flt",
    "locks": r"/locks/\d+/delta_waiters",
    "zombies": r"/changes/\w+|/groups/\d+/delta",
    "cpus": r"/cpus/\d+/(minf|mjf|xcal|tlb|intr|soft|csw|icsw|migr|\w+_ns)"
    r"|/(irqs|vectors|softirqs)/\d+/(total|counts/\d+)",
}
"""Values that count events in an interval."""


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}/{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from numbers(item, f"{path}/{number}")
    elif isinstance(value, int):
        yield path, value


def assert_at_rest(name: str, sample: dict[str, Any], dump: dict[str, Any]) -> None:
    """Check that a sample counts no events and otherwise equals the dump's report."""
    assert sample["interval_ns"] == 0
    codes = {note["code"] for note in sample["notes"]}
    assert codes - {note["code"] for note in dump["notes"]} == {"clock-stands-still"}
    for key in NOW[name]:
        if key in dump:
            assert [*differences(sample[key], dump[key], f"/{key}")] == []
    counted = [n for path, n in numbers(sample) if re.fullmatch(ZERO[name], path)]
    assert len(counted) >= 1
    assert not any(counted)


def test_waits_that_stay_are_looked_for_once(tmp_path: Path) -> None:
    """Those of sleepers by their own timers; anew once a sleeper has run."""
    dump = lab.build("tasks-6.12").elf
    assert dump
    with paused(dump, tmp_path) as address:
        reader = Reader(open_target(TargetSpec(qemu=address, types="btf")).prog)
        sample = Sampler(reader, LossLog()).sample()
        tasks, now, clocks = sample.tasks, sample.now, sample.clocks
        rows = np.flatnonzero(now.classes == TaskClass.TMR)
        explainer = Explainer(reader)

        def explained() -> tuple[list[WaitTarget | None], int]:
            before = reader.reads
            found = explainer.explain(tasks, now, clocks, LossLog(), rows=rows)
            return found, reader.reads - before

        first, reads = explained()
        assert len(first) > 1
        assert reads >= len(rows)
        again, few = explained()
        assert again == first
        assert few < len(rows)
        tasks.records["nvcsw"][rows] += 1
        assert explained() == (first, reads)
