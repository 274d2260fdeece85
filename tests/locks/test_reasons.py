# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a task that others wait for is said to be doing."""

import re
from dataclasses import replace

import numpy as np
import pytest

from msatools.kernel.report import Findings
from msatools.locks.cases import read_cases
from msatools.locks.layout import Layout
from msatools.locks.lock import Holder
from msatools.locks.look import Case, Look
from msatools.locks.model import On
from msatools.locks.outside.externals import External
from msatools.locks.reasons import external_reason, reason
from msatools.target.model import Address
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import stack_bytes
from tests.locks.conftest import Seen, seen

DUMPS = ("tasks-6.1", "tasks-6.12")
MAX_LENGTH = 60

# By name; of a pattern in braces, what the guest says that the task waits on.
REASONS = {
    "pipe-read": "asleep in read of pipe:[{inode}]",
    "pipe-write": "asleep in write of pipe:[{inode}]",
    "fifo-open": "asleep in openat of /run/fifo",
    "eventfd-read": "asleep in read of eventfd",
    "nanosleep": "asleep in clock_nanosleep",
    "poll": "asleep in poll",
    "pause": "asleep in pause",
    "wait4": "waits for child {pid}",
    "wait-any": "waits for a child",
    "tty-read": "asleep in read of /dev/pts/0",
    "flock": "waits for flock /run/flock",
    "posix-lock": "waits for posix_lock /run/posix-lock",
    "futex-wait": "waits for futex {address:#x}",
    "futex-waitv": "waits for any of 3 futexes",
    "disk-read": "I/O on {name} {device}",
    "fault-data": "I/O on {name} {device}",
    "swap-in": "swap on {name} {device}",
    "file-fsync": "waits for a commit of dm-1 254:1 by {thread}",
    "over-high": "waits for memory of control group /high",
    "stopped": "stopped by SIGSTOP",
    "traced": "traced by {pid}",
    "zombie": "dead, not reaped",
    "fault-user": "waits for a page of a userfaultfd",
    "directory-make": "(waits for rwsem i_rwsem /.+)",
    "hog-pinned-0": "(runs on|waits for) CPU {cpu}( in .*)?",
}


@pytest.fixture(scope="module", params=DUMPS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(request.param)


def look_at(dump: Seen) -> Look:
    return Look(Layout(dump.reader), dump.table, Findings(), dump.clocks, alone=False)


def cases_of(dump: Seen, look: Look) -> list[Case]:
    rows = np.arange(len(dump.table))
    return list(read_cases(look, dump.now, rows, stack_bytes(dump.reader.prog)))


def test_reasons_of_named_tasks(dump: Seen) -> None:
    look = look_at(dump)
    cases = cases_of(dump, look)
    named, wrong = dump.named(), {}
    for name, text in REASONS.items():
        on = named[name]["on"] or {}
        row = dump.row(name)
        told = reason(look, row, dump.now, cases[row], dump.ons[row], None)
        literal = "(" not in text
        expected = text.format(**on)
        fits = told == expected if literal else re.fullmatch(expected, told)
        if not fits:
            wrong[name] = told, expected
    assert wrong == {}


def test_every_task_has_a_short_reason(dump: Seen) -> None:
    look = look_at(dump)
    for case in cases_of(dump, look):
        told = reason(look, case.row, dump.now, case, dump.ons[case.row], None)
        assert told
        on = dump.ons[case.row]
        path = len(on.path or "") if on else 0
        assert len(told) <= MAX_LENGTH + path, told
        assert not re.search(r"None|  ", told), told


def test_who_runs_in_the_kernel_is_told_with_its_function(dump: Seen) -> None:
    look = look_at(dump)
    compared = 0
    classes = {
        int(TaskClass.USR): r"runs on CPU \d+ in user mode",
        int(TaskClass.SYS): r"runs on CPU \d+ in \w+(\.\w+)*",
        int(TaskClass.INT): r"runs on CPU \d+ in an interrupt",
        int(TaskClass.LAT): r"waits for CPU \d+",
    }
    for row, task_class in enumerate(dump.now.classes.tolist()):
        if task_class in classes:
            told = reason(look, row, dump.now, None, None, None)
            assert re.fullmatch(classes[task_class], told), told
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("name", "what", "text"),
    [
        ("nanosleep", "work of events_unbound", "waits for work of events_unbound"),
        ("disk-read", "locked", "I/O on dm-0 254:0"),
        ("futex-wait", "parked: nobody wakes it", "parked: nobody wakes it"),
    ],
)
def test_what_a_lock_stands_for(dump: Seen, name: str, what: str, text: str) -> None:
    look = look_at(dump)
    row = dump.row(name)
    case = cases_of(dump, look)[row]
    assert reason(look, row, dump.now, case, dump.ons[row], what) == text


def test_frozen_tasks(dump: Seen) -> None:
    """As none is in the dump, by the functions that such a task is in."""
    look = look_at(dump)
    row = dump.row("pause")
    classes = dump.now.classes.copy()
    classes[row] = TaskClass.STP
    now = replace(dump.now, classes=classes)
    case = cases_of(dump, look)[row]
    names = {
        ("schedule", "do_freezer_trap"): "frozen by its control group",
        ("schedule", "__refrigerator.part.0"): "frozen",
        ("schedule", "do_signal_stop"): "stopped",
    }
    for functions, text in names.items():
        frozen = replace(case, names=functions)
        assert reason(look, row, now, frozen, None, None) == text


def test_kernel_threads_sleep_in_a_function(dump: Seen) -> None:
    """Who has a lock does not just wait for work."""
    look = look_at(dump)
    cases = cases_of(dump, look)
    (row,) = np.flatnonzero(dump.table["comm"] == b"kthreadd")
    told = reason(look, row, dump.now, cases[row], dump.ons[row], None)
    assert told == "asleep in kthreadd"


def test_who_exits_says_so(dump: Seen) -> None:
    look = look_at(dump)
    row = dump.row("disk-read")
    case = cases_of(dump, look)[row]
    before = reason(look, row, dump.now, case, dump.ons[row], None)
    records = dump.table.records.copy()
    records["flags"][row] |= 0x4  # PF_EXITING
    look.tasks = replace(dump.table, records=records)
    told = reason(look, row, dump.now, case, dump.ons[row], None)
    assert told == f"exiting, {before}"


def test_dead_tasks_that_are_being_reaped(dump: Seen) -> None:
    look = look_at(dump)
    row = dump.row("zombie")
    records = dump.table.records.copy()
    records["exit_state"][row] = 0x10  # EXIT_DEAD
    look.tasks = replace(dump.table, records=records)
    assert reason(look, row, dump.now, None, None, None) == "dead, being reaped"


@pytest.mark.parametrize(
    ("task_class", "on", "text"),
    [
        ("DSK", On(kind="disk", path="/mnt/x"), "I/O on /mnt/x"),
        ("FLT", On(kind="page", address=Address(4096)), "waits for a page of memory"),
        ("SWP", None, "waits for swap"),
        ("RCL", None, "waits for memory"),
        ("LCK", None, "waits for a futex"),
        ("FLK", None, "waits for a lock of a file"),
        ("KLK", On(kind="lock", type="mutex"), "waits for mutex"),
        ("KTW", None, "asleep in pause"),
        ("TRC", None, "stopped by a tracer"),
        ("NET", On(kind="socket", inode=7), "asleep in pause of socket:[7]"),
        ("WAI", None, "asleep in pause"),
    ],
)
def test_what_is_known_in_part(task_class: str, on: On | None, text: str) -> None:
    dump = seen(DUMPS[0])
    row = dump.row("pause")
    classes = dump.now.classes.copy()
    classes[row] = TaskClass[task_class]
    now = replace(dump.now, classes=classes)
    assert reason(look_at(dump), row, now, None, on, None) == text


def test_what_a_server_does_is_said_where_it_is_not_known_to_read() -> None:
    text, doing = "FUSE server ~480 fuse-srv (/mnt/d)", "stopped by SIGSTOP"
    likely = External("fuse", ("fuse", 1), text, 480, (Holder(2, "likely"),))
    assert external_reason(likely, doing) == f"{text}, {doing}"
    assert external_reason(likely, None) == text
    exact = replace(likely, text="it reads", servers=(Holder(2, "exact"),))
    assert external_reason(exact, "asleep in read of /dev/fuse") == "it reads"
    device = External("device", ("device", "8:0"), "I/O on sda 8:0")
    assert external_reason(device, "runs on CPU 1") == "I/O on sda 8:0"
