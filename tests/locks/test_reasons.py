# SPDX-License-Identifier: LGPL-2.1-or-later

"""The reason why a task blocks others."""

import re
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from msatools.locks.context import LockContext
from msatools.locks.externals import External
from msatools.locks.report import Holder, WaitTarget
from msatools.locks.wait_snapshot import external_reason, reason
from msatools.program.model import Address
from msatools.tasks.sampler import TaskState
from msatools.tasks.states import FROZEN, INTERRUPTIBLE
from msatools.tasks.waits import TaskClass
from tests.locks.seen import Seen, damaged
from tests.support.overlay import put

# Name of a task -> reason; braces are filled in from the guest's record.
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
    # It goes on every other second, for a moment.
    "over-high": "(waits for memory of control group /high|(runs on|waits for) CPU .+)",
    "stopped": "stopped by SIGSTOP",
    "traced": "traced by {pid}",
    "zombie": "dead, not reaped",
    "fault-user": "waits for a page of a userfaultfd",
    "directory-make": "(waits for rwsem i_rwsem /.+)",
    "hog-pinned-0": "(runs on|waits for) CPU {cpu}( in .*)?",
}


def reason_of(
    dump: Seen,
    of: str | int,
    *,
    context: LockContext | None = None,
    what: str | None = None,
) -> str:
    """Return the reason of a task, by name or row."""
    context = context or dump.context()
    row = dump.row(of) if isinstance(of, str) else of
    (case,) = dump.cases(context, [row])
    return reason(context, row, dump.now, case, dump.ons[row], what)


def in_class(dump: Seen, row: int, task_class: TaskClass) -> TaskState:
    classes = dump.now.classes.copy()
    classes[row] = task_class
    return replace(dump.now, classes=classes)


def test_reasons_of_named_tasks(tasks: Seen) -> None:
    context, wrong = tasks.context(), {}
    for name, text in REASONS.items():
        expected = text.format(**(tasks.named[name]["on"] or {}))
        found = reason_of(tasks, name, context=context)
        if not (re.fullmatch(expected, found) if "(" in text else found == expected):
            wrong[name] = found, expected
    assert wrong == {}


def test_return_address_after_the_end_of_a_function(tasks: Seen) -> None:
    """A call at the end of a function returns to the start of the next one."""
    context = tasks.context()
    start = context.layout.symbol("schedule")
    names = [
        context.function(SimpleNamespace(pc=start, interrupted=interrupted))  # type: ignore[arg-type]
        for interrupted in (True, False)
    ]
    assert names[0] == "schedule" != names[1]


@pytest.mark.parametrize(
    ("name", "what", "text"),
    [
        ("nanosleep", "work of events_unbound", "waits for work of events_unbound"),
        ("disk-read", "locked", "I/O on dm-0 254:0"),
        ("futex-wait", "parked: nobody wakes it", "parked: nobody wakes it"),
    ],
)
def test_purpose_of_a_lock(tasks: Seen, name: str, what: str, text: str) -> None:
    assert reason_of(tasks, name, what=what) == text


@pytest.mark.parametrize(
    ("state", "text"),
    [(FROZEN, "frozen by its control group"), (INTERRUPTIBLE, "stopped")],
)
def test_frozen_tasks(tasks: Seen, state: int, text: str) -> None:
    """No task in the dump is frozen, so its state is replaced.

    One that its control group has frozen is in test_field.py.
    """
    assert frozen(tasks, tasks.context(), state) == text


def test_all_tasks_are_frozen() -> None:
    """Before the machine sleeps."""
    dump = damaged("tasks-6.12")
    context = dump.context()
    address = context.layout.symbol("pm_freezing")
    assert address is not None
    put(dump.prog, address, b"\1")
    assert frozen(dump, context, FROZEN) == "frozen"


def frozen(tasks: Seen, context: LockContext, state: int) -> str:
    """Return what a task does, with another state."""
    row = tasks.row("pause")
    records = tasks.table.records.copy()
    records["state"][row] = state
    context.tasks = replace(tasks.table, records=records)
    now = in_class(tasks, row, TaskClass.STP)
    return reason(context, row, now, None, None, None)


def test_exiting_tasks(tasks: Seen) -> None:
    context, row = tasks.context(), tasks.row("disk-read")
    records = tasks.table.records.copy()
    records["flags"][row] |= 0x4  # PF_EXITING
    context.tasks = replace(tasks.table, records=records)
    before = reason_of(tasks, row)
    assert reason_of(tasks, row, context=context) == f"exiting, {before}"


def test_dead_tasks_that_are_being_reaped(tasks: Seen) -> None:
    context, row = tasks.context(), tasks.row("zombie")
    records = tasks.table.records.copy()
    records["exit_state"][row] = 0x10  # EXIT_DEAD
    context.tasks = replace(tasks.table, records=records)
    assert reason(context, row, tasks.now, None, None, None) == "dead, being reaped"


@pytest.mark.parametrize(
    ("task_class", "on", "text"),
    [
        ("DSK", WaitTarget(kind="disk", path="/mnt/x"), "I/O on /mnt/x"),
        (
            "FLT",
            WaitTarget(kind="page", address=Address(4096)),
            "waits for a page of memory",
        ),
        ("SWP", None, "waits for swap"),
        ("RCL", None, "waits for memory"),
        ("LCK", None, "waits for a futex"),
        ("FLK", None, "waits for a lock of a file"),
        ("KLK", WaitTarget(kind="lock", type="mutex"), "waits for mutex"),
        ("KTW", None, "asleep in pause"),
        ("TRC", None, "stopped by a tracer"),
        ("NET", WaitTarget(kind="socket", inode=7), "asleep in pause of socket:[7]"),
        ("WAI", None, "asleep in pause"),
    ],
)
def test_incomplete_wait_targets(
    tasks: Seen, task_class: str, on: WaitTarget | None, text: str
) -> None:
    row = tasks.row("pause")
    now = in_class(tasks, row, TaskClass[task_class])
    assert reason(tasks.context(), row, now, None, on, None) == text


def test_reason_of_a_fuse_server() -> None:
    text, doing = "FUSE server ~480 fuse-srv (/mnt/d)", "stopped by SIGSTOP"
    likely = External("fuse", ("fuse", 1), text, 480, (Holder(2, "likely"),))
    assert external_reason(likely, doing) == f"{text}, {doing}"
    assert external_reason(likely, None) == text
    exact = replace(likely, text="it reads", servers=(Holder(2, "exact"),))
    assert external_reason(exact, "asleep in read of /dev/fuse") == "it reads"
    device = External("device", ("device", "8:0"), "I/O on sda 8:0")
    assert external_reason(device, "runs on CPU 1") == "I/O on sda 8:0"
