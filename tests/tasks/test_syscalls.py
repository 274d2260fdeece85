# SPDX-License-Identifier: LGPL-2.1-or-later

"""System calls and their arguments are those in /proc/PID/task/TID/syscall."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.model import values
from msatools.tasks.syscalls import (
    _X86_NAMES,
    NO_CALL,
    Syscalls,
    read_syscalls,
    syscalls_of,
)
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import read_stacks, stack_bytes
from tests.support.dumps import BUSY, open_dump

PF_KTHREAD = 0x00200000
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@dataclass
class Read:
    run: lab.Run
    table: TaskTable
    calls: Syscalls
    reads: int
    losses: LossLog

    def shown(self, row: int) -> list[str]:
        """Format a call as the kernel does (proc_pid_syscall())."""
        words = [self.calls.sp[row], self.calls.ip[row]]
        number = int(self.calls.number[row])
        if number != NO_CALL:
            words = [*self.calls.arguments[row], *words]
        return [str(number), *(hex(word) for word in words)]


def read(name: str, types: str) -> Read:
    reader, losses = Reader(open_dump(name, types)), LossLog()
    table = TaskReader(reader).read_all(losses)
    size = stack_bytes(reader.prog)
    before = reader.reads
    calls = read_syscalls(reader, table, size, losses)
    return Read(lab.build(name), table, calls, reader.reads - before, losses)


@pytest.fixture(scope="module", params=BUSY)
def dump(request: pytest.FixtureRequest) -> Read:
    return read(request.param, "btf")


def test_calls_are_those_in_proc(dump: Read) -> None:
    recorded = set(dump.run.truth_names())
    calls, exceptions = 0, 0
    pairs = zip(dump.table["pid"].tolist(), dump.table["tgid"].tolist(), strict=True)
    for row, (tid, pid) in enumerate(pairs):
        path = f"proc/{pid}/task/{tid}/syscall"
        if path not in recorded or not dump.calls.known[row]:
            continue
        truth = dump.run.truth(path).decode().split()
        if truth == ["running"]:
            continue
        assert dump.shown(row) == truth, tid
        calls += truth[0] != str(NO_CALL)
        exceptions += truth[0] == str(NO_CALL)
    assert calls > 150
    assert exceptions > 4


def test_kernel_threads_and_zombies_have_no_call(dump: Read) -> None:
    """All other tasks have entered from user mode."""
    kernel = (dump.table["flags"] & PF_KTHREAD) != 0
    dead = dump.table["exit_state"] != 0
    assert np.array_equal(dump.calls.known, ~kernel & ~dead)
    assert np.count_nonzero(kernel) > 40
    assert (dump.calls.number[kernel | dead] == NO_CALL).all()


def test_stacks_in_memory_give_the_same(dump: Read) -> None:
    reader, losses = Reader(open_dump(dump.run.name, "btf")), LossLog()
    asleep = dump.table.only((dump.table["state"] != 0) & (dump.table["on_cpu"] == 0))
    size = stack_bytes(reader.prog)
    stacks, pointers = (asleep[name].astype(np.uint64) for name in ("stack", "sp"))
    memory = read_stacks(reader, stacks, pointers, size, losses)
    before = reader.reads
    calls = syscalls_of(reader.prog, asleep, memory)
    assert reader.reads == before
    again = read_syscalls(reader, asleep, size, losses)
    assert np.count_nonzero(calls.known) > 2000
    assert_same(calls, again)


def assert_same(calls: Syscalls, others: Syscalls) -> None:
    for one, other in zip(values(calls).values(), values(others).values(), strict=True):
        assert np.array_equal(one, other)


def test_names_of_calls(dump: Read) -> None:
    """Calls whose functions are inlined are named as well."""
    tasks = dump.run.workload["tasks"]
    rows = {tid: row for row, tid in enumerate(dump.table["pid"].tolist())}
    for name, call in {
        "futex-wait": "futex",
        "futex-waitv": "futex_waitv",
        "msgrcv": "msgrcv",
        "disk-direct-read": "preadv2",
        "mq-send": "mq_timedsend",
        "pause": "pause",
        "file-fsync": "fsync",
        "ofd-lock": "fcntl",
        "uring-wait": "io_uring_enter",
        "directory-read": "getdents64",
    }.items():
        assert dump.calls.name(rows[tasks[name]["tid"]]) == call
    assert dump.calls.name(rows[tasks["fault-data"]["tid"]]) is None


@pytest.mark.skipif(not HEADER.exists(), reason="no headers of Linux for x86-64")
def test_numbers_of_calls() -> None:
    """Numbers are those in the C library's headers, and two newer ones."""
    listed = re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())
    names = {455: "futex_wait", 456: "futex_requeue"}
    names |= {int(number): name for name, number in listed}
    assert len(_X86_NAMES) > 60
    assert {number: names[number] for number in _X86_NAMES} == _X86_NAMES
