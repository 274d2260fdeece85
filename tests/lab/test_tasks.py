# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import os
import re
import signal
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lab import tasks
from fixtures.lab.errors import LabError
from fixtures.lab.guest import cases, kinds, mapper, sockets, stuck, taskstats, waits
from fixtures.lab.image import GUEST
from fixtures.lab.kernels import KERNELS

GROUPS = (
    stuck.EARLY,
    waits.GROUP,
    sockets.GROUP,
    kinds.GROUP,
    stuck.GROUP,
    stuck.FREEZING,
    kinds.HOGS,
)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for group in GROUPS for case in group]
    assert len(set(names)) == len(names) > 60
    assert "futex-wait" in names


def test_every_class_that_is_named_can_be_checked() -> None:
    named = set()
    for part in tasks.MODULES:
        text = (GUEST / f"{part}.py").read_text()
        named |= set(re.findall(r'waits\([^)]*?"([A-Z]{3})"', text))
    assert {"LCK", "KLK", "FLT", "SWP", "RCL", "DSK", "ZMB"} <= named
    assert named <= set(cases.LOOKS)


def test_variants_differ_in_their_command_lines() -> None:
    lines = {tasks.machine(name)(KERNELS["6.1"]).options for name in tasks.VARIANTS}
    assert len(lines) == len(tasks.VARIANTS) == len(tasks.SCENARIOS)


@pytest.mark.parametrize(
    ("name", "waits", "is_good"),
    [("tasks-on", 1, False), ("tasks-on", 2, True), ("tasks", 0, True)],
)
def test_a_disk_that_was_never_waited_for(name: str, waits: int, is_good: bool) -> None:
    facts: dict[str, Any] = {"tasks": {"has-read": {"tid": 7}}}
    facts["taskstats"] = {"7": {"blkio_count": waits}}
    run: Any = SimpleNamespace(name=f"{name}-6.12", workload=facts)
    if is_good:
        tasks.check(run)
        return
    with pytest.raises(LabError, match="has-read has waited for its disk 1 times"):
        tasks.check(run)


def test_structs_of_the_kernel_have_its_sizes() -> None:
    assert mapper.HEADER.size == 312
    assert mapper.TARGET.size == 40
    assert taskstats.HEADER.size == 20


def test_delays_of_an_old_kernel_end_early() -> None:
    stats = struct.pack("<H14x6Q", 8, 1, 2, 3, 4, 5, 6)
    assert taskstats.delays(stats) == {
        "version": 8,
        "cpu_count": 1,
        "cpu_ns": 2,
        "blkio_count": 3,
        "blkio_ns": 4,
        "swapin_count": 5,
        "swapin_ns": 6,
    }


def test_attributes_are_padded_to_four_bytes() -> None:
    data = struct.pack("<HH1s3xHHI", 5, 1, b"a", 8, 0x8000 | 2, 7)
    assert taskstats._attributes(data) == {1: b"a", 2: struct.pack("<I", 7)}


def test_what_a_task_says_comes_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SAID", list(os.pipe()))
    cases.say({"name": "x", "on": None}, timed=True)
    cases.say({"case": "y"})
    lines = os.read(cases.SAID[0], 4096).splitlines()
    first, second = map(json.loads, lines)
    assert first.pop("start_ns") > 0
    assert (first, second) == ({"name": "x", "on": None}, {"case": "y"})
    with pytest.raises(ValueError, match="too much"):
        cases.say({"name": "x" * 5000})


def test_task_that_is_elsewhere_is_found_out() -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        task = {"pid": pid, "tid": pid, "class": "STP", "stack": None}
        assert cases.wrong_with(task) is None
        assert cases.wrong_with(task | {"class": "ZMB"}) == "its state is T"
        assert cases.switches(task) > 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_name_with_a_bracket_does_not_hide_the_state() -> None:
    pid = os.fork()
    if pid == 0:
        cases.set_raw_name(b"a) R 1 (x")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        assert cases.state_of(pid, pid) == "T"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
