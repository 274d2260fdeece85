# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every owner that is called exact, of all dumps with locks, held against the rules.

They are read anew by drgn: the lock's own word, and whether the task can have it. See
docs/how-it-works.md, "Who has a lock".
"""

import re
from collections import Counter

import pytest
from drgn import Object, Program
from drgn.helpers.linux.pid import find_task

from msatools.kernel.clocks import read_accounting
from msatools.kernel.report import LossLog
from msatools.locks.report import LockRow
from msatools.tasks.accounting import bound_of
from tests.locks.reports import LoggedReport, logged_report
from tests.support import kernellocks
from tests.support.dumps import open_dump

DUMPS = [
    f"{name}-{kernel}"
    for name in ("field", "lockmodule", "locks", "tasks", "workqueues", "zombies")
    for kernel in ("6.1", "6.12")
] + ["field-7.x", "fieldio-6.1", "fieldio-6.12"]

BY_WORD = frozenset({"mutex", "ww_mutex", "rwsem", "rt_mutex"})
"""Types whose own word names the owner."""

RESTS = re.compile(
    r"do_nanosleep|do_sys_poll|do_select|ep_poll|sigsuspend|do_sigtimedwait|"
    r"\w*sys_pause|do_signal_stop|ptrace_stop"
)
"""Functions in which no task has a lock of the kernel."""

STOPPED = 4 | 8
"""``__TASK_STOPPED`` and ``__TASK_TRACED``."""

SLACK_NS = 100_000_000
"""How much clocks of starts and of sleeps may differ, besides those of CPUs."""


@pytest.fixture(params=DUMPS)
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


def recorded(prog: Program, lock: LockRow, pid: int) -> bool:
    """Return whether the kernel's own memory names the owner of a lock."""
    if lock.address is None:
        return True  # a futex in a file
    if lock.type in BY_WORD:
        named = {"type": lock.type, "address": hex(lock.address)}
        # Of a reader it is the last one, which may have left.
        return kernellocks.owner(prog, named) == (pid, 0)
    if lock.type == "posix_lock":
        conflicting = Object(prog, "struct file_lock", address=lock.address)
        core = conflicting.c if hasattr(conflicting, "c") else conflicting
        owner = core.flc_pid if hasattr(core, "flc_pid") else core.fl_pid
        return bool(int(owner) == int(find_task(prog, pid).tgid))
    if lock.type == "futex":
        return bool(int(find_task(prog, pid).clear_child_tid) == lock.address)
    return True


def against(prog: Program, dump: LoggedReport, lock: LockRow, pid: int) -> list[str]:
    """Return the reasons why a task cannot have a lock of the kernel."""
    task = find_task(prog, pid)
    found = []
    if int(task.exit_state):
        found.append("it has exited")
    if lock.type in BY_WORD:
        taken_at_ns = dump.report.taken_at_ns
        assert taken_at_ns is not None
        slack_ns = SLACK_NS + bound_of(read_accounting(prog, LossLog()))
        if int(task.start_time) > taken_at_ns - lock.max_age_ns + slack_ns:
            found.append("it began after the first waiter had fallen asleep")
        if int(task.member_("__state")) & STOPPED:
            found.append("it is stopped")
        if not int(task.on_cpu):
            names = {frame.name for frame in prog.stack_trace(task)}
            found += [f"it is in {name}" for name in names if RESTS.fullmatch(name)]
    return found


def test_exact_owners(dump: LoggedReport) -> None:
    prog = open_dump(dump.run.name, "btf")
    wrong, compared = {}, Counter[str]()
    for lock in dump.report.locks:
        for owner in lock.owners:
            if owner.confidence != "exact":
                continue
            compared[lock.type] += 1
            assert find_task(prog, owner.pid), lock
            reasons = against(prog, dump, lock, owner.pid)
            # A thread that one waits for may be dead, and wait to be reaped itself.
            if lock.type in ("threads", "child", "completion"):
                reasons = []
            if not recorded(prog, lock, owner.pid):
                reasons.append("the lock does not name it")
            if reasons:
                wrong[lock.id, owner.pid] = reasons
    assert wrong == {}
    assert compared.total() > 0


def test_exact_deadlocks(dump: LoggedReport) -> None:
    """Each task in one waits for a lock that the next one has, for certain."""
    for deadlock in dump.report.deadlocks:
        if deadlock.confidence != "exact":
            continue
        pids = deadlock.pids
        for number, lock in enumerate(deadlock.locks):
            owners = {
                own.pid for own in dump.locks[lock].owners if own.confidence == "exact"
            }
            assert pids[(number + 1) % len(pids)] in owners
            assert pids[number] in dump.locks[lock].waiters


def test_refuted_owners(dump: LoggedReport) -> None:
    """What is said against an owner is so, and nobody is behind it."""
    prog = open_dump(dump.run.name, "btf")
    for lock in dump.report.locks:
        for owner in lock.refuted:
            assert recorded(prog, lock, owner.pid)
            assert against(prog, dump, lock, owner.pid)
            assert owner.evidence
            assert owner.pid not in {own.pid for own in lock.owners}
