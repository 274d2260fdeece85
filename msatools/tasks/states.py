# SPDX-License-Identifier: LGPL-2.1-or-later

"""States of threads, and how the scheduler treats them: policy, quota, I/O wait."""

from collections.abc import Iterator

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.files import cgroup_paths
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import MAX_PLAUSIBLE, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    lose_many,
    read_bits,
    read_structs,
)
from msatools.reports.units import duration
from msatools.selfdesc.find import find_type, member_of, object_at, offset_of
from msatools.tasks.table import TaskTable

# --- States of threads: the letter of /proc (fs/proc/array.c), asleep, frozen.


LETTERS = "RSDTtZXIP"

Letters = npt.NDArray[np.str_]

# Bits of task_struct.__state and exit_state (include/linux/sched.h).
INTERRUPTIBLE = 0x1
UNINTERRUPTIBLE = 0x2
STOPPED = 0x4
TRACED = 0x8
WAKEKILL = 0x100
"""``TASK_WAKEKILL``: a fatal signal ends the sleep."""
WAKING = 0x200
NOLOAD = 0x400
_RTLOCK_WAIT = 0x1000
FROZEN = 0x8000
"""``TASK_FROZEN``: the task was frozen in its sleep, without a wake-up (since v6.1)."""

STOP_SIGNAL, TRAP_FREEZE = 0xFFFF, 1 << 23
"""``JOBCTL_STOP_SIGMASK`` and ``JOBCTL_TRAP_FREEZE`` (include/linux/sched/jobctl.h)."""

_PF_FROZEN = 0x0001_0000
"""A bit of ``task_struct.flags``."""

_BY_BIT = "RSDTtXZP"
"""The letter of state 0, then of each bit from the lowest: the highest bit that is set
decides, as in __task_state_index()."""

_BY_STATE = np.array([_BY_BIT[state.bit_length()] for state in range(0x80)])
"""The letter by the low 7 bits of a state."""


def letters(tasks: TaskTable) -> Letters:
    """Return the state of each thread: one of :data:`LETTERS`.

    Frozen tasks and waiters for a sleeping spin lock (PREEMPT_RT) are ``D``, as in
    /proc since v6.6; before, /proc showed R, which was a bug.
    """
    state = tasks["state"].astype(np.uint32)
    state = state | tasks["exit_state"].astype(np.uint32)
    state = np.where(state & (_RTLOCK_WAIT | FROZEN), UNINTERRUPTIBLE, state)
    result: Letters = _BY_STATE[state & (len(_BY_STATE) - 1)]
    idle = UNINTERRUPTIBLE | NOLOAD
    result[(state & idle) == idle] = "I"
    return result


def asleep(tasks: TaskTable) -> Booleans:
    """Return which threads are not dead, not on a CPU, and do not wait for one.

    Stopped and traced threads count as asleep.
    """
    sleeps: Booleans = (tasks["state"] != 0) & (tasks["on_cpu"] == 0)
    sleeps &= tasks["exit_state"] == 0
    return sleeps


def loads(tasks: TaskTable) -> Booleans:
    """Return which threads sleep and count in the load average.

    task_contributes_to_load(): uninterruptible, except if frozen or idle (TASK_NOLOAD).
    """
    state = tasks["state"]
    counted: Booleans = (state & UNINTERRUPTIBLE) != 0
    counted &= (state & (NOLOAD | FROZEN)) == 0
    return counted


def read_frozen(reader: Reader, tasks: TaskTable) -> Booleans:
    """Return which threads are frozen, by a control group or by a system suspend."""
    addresses = tasks["address"].astype(np.uint64)
    # By cgroup v2: do_freezer_trap(). ``frozen`` alone is not enough: it is also set
    # while a task waits for its child of vfork(), or is stopped.
    frozen: Booleans = (tasks["jobctl"] & TRAP_FREEZE) != 0
    frozen &= (tasks["state"] & INTERRUPTIBLE) != 0
    if frozen.any():
        frozen &= read_bits(reader, "struct task_struct", "frozen", addresses)
    frozen |= (tasks["state"] & FROZEN) != 0
    # PF_FROZEN before Linux kernel commit f5d39b020809 ("freezer,sched: Rewrite core
    # freezer logic") (in v6.1), which added freezer_active.
    flagged = (tasks["flags"] & _PF_FROZEN) != 0
    if flagged.any():
        try:
            kernel_symbol(reader.prog, "freezer_active")
        except MissingError:
            frozen |= flagged
    return frozen


# --- The scheduling policy of a task, and whether it is throttled.
#
# A runnable task that is on no CPU either waits for one, or is throttled: its time is
# used up. The causes differ, so all commands use this code to distinguish the two.
#
# - Fair tasks are throttled by the quota of their control group, or of one above it
#   (kernel/sched/fair.c, throttle_cfs_rq(); cpu.max). Until v6.17 the group's queue is
#   dequeued with all its tasks; since "sched/fair: Switch to task based throttle model"
#   (in v6.18) each task is dequeued alone, as it returns to user mode.
# - Deadline tasks are by their own runtime (kernel/sched/deadline.c, dl_throttled).
# - Realtime tasks are by sched_rt_runtime_us (kernel/sched/rt.c, rt_throttled).


POLICIES = {
    0: "OTHER",
    1: "FIFO",
    2: "RR",
    3: "BATCH",
    5: "IDLE",
    6: "DEADLINE",
    7: "EXT",
}
"""Names of policies in chrt, by the values of SCHED_… (include/uapi/linux/sched.h); 0
is SCHED_NORMAL."""

IDLE, DEADLINE = 5, 6
REALTIME = (1, 2)

# include/linux/sched/prio.h
MAX_RT_PRIO = 100
NICE_0 = 120

_MAX_DEPTH = 64
"""Maximum number of nested control groups."""

UNLIMITED = (1 << 64) - 1
"""RUNTIME_INF: the value of ``quota`` in a group that has no quota."""

Rows = npt.NDArray[np.intp]


class Throttle(Struct, frozen=True, kw_only=True):
    """Why a runnable task may not run for now."""

    text: str
    """Why, as in ``throttled by the quota of /batch (1ms each 1s)``."""

    cgroup: str | None = None
    """Path of the control group whose quota is used up; ``None`` if unknown, or if the
    task is not throttled by a group."""

    for_ns: int | None = None
    """Time since the group was throttled on this CPU; ``None`` if unknown."""


class Throttles:
    """Which runnable tasks of a table are throttled, and why; read on first use."""

    def __init__(self, reader: Reader, tasks: TaskTable, losses: LossLog) -> None:
        self._reader = reader
        self._tasks = tasks
        self._losses = losses
        self._rows: Booleans | None = None
        self._queues: dict[int, int] = {}
        """Maps the row of a fair task to the address of its ``struct cfs_rq``."""

        self._by_queue: dict[int, Throttle] = {}

    @property
    def rows(self) -> Booleans:
        """Which tasks are runnable and throttled; for others :meth:`of` is ``None``."""
        if self._rows is None:
            self._rows = self._read()
        return self._rows

    def of(self, row: int, now_ns: int) -> Throttle | None:
        """Return why a task is throttled; ``None`` if it is not, or not runnable.

        :param now_ns: The local clock (:class:`.Clocks`), in ns.
        """
        if not self.rows[row]:
            return None
        policy = int(self._tasks["policy"][row])
        if policy in REALTIME:
            return Throttle(text="throttled by sched_rt_runtime_us")
        address = int(self._tasks["address"][row])
        queue = self._queues.get(row, 0)
        try:
            if policy == DEADLINE:
                task = object_at(self._reader.prog, "struct task_struct", address)
                return _by_deadline(task.dl)
            if queue not in self._by_queue:
                cpu = int(self._tasks["cpu"][row])
                found = _by_group(self._reader, queue, cpu, now_ns, self._losses)
                self._by_queue[queue] = found
            return self._by_queue[queue]
        except UNREADABLE as error:
            self._losses.lose(Loss.QUEUED, f"by what a task is throttled: {error}")
            return Throttle(text="throttled")

    def _read(self) -> Booleans:
        tasks = self._tasks
        found = np.zeros(len(tasks), np.bool_)
        waits = (tasks["state"] == 0) & (tasks["on_cpu"] == 0)
        waits &= tasks["exit_state"] == 0
        deadline = tasks["policy"] == DEADLINE
        realtime = np.isin(tasks["policy"], REALTIME)
        for wanted, read in (
            (deadline, self._deadline),
            (realtime, self._realtime),
            (~(deadline | realtime), self._fair),
        ):
            rows = np.flatnonzero(waits & wanted)
            if len(rows):
                found[rows] = read(rows)
        return found

    def _deadline(self, rows: Rows) -> Booleans:
        offset = offset_of(find_type(self._reader.prog, "struct task_struct"), "dl")
        entities = self._tasks["address"][rows].astype(np.uint64) + np.uint64(offset)
        kind = "struct sched_dl_entity"
        return read_bits(self._reader, kind, "dl_throttled", entities)

    def _realtime(self, rows: Rows) -> Booleans:
        percpu = read_percpu(self._reader, self._losses)
        wanted = np.isin(percpu.cpus, self._tasks["cpu"][rows])
        queues = read_structs(
            self._reader,
            "struct rq",
            {"throttled": ("rt.rt_throttled",)},
            percpu.addresses("runqueues")[wanted],
            self._losses,
        )
        if not queues.has("throttled"):
            return np.zeros(len(rows), np.bool_)
        out = queues.readable & (queues["throttled"] != 0)
        return np.isin(self._tasks["cpu"][rows], percpu.cpus[wanted][out])

    def _fair(self, rows: Rows) -> Booleans:
        reader, losses = self._reader, self._losses
        addresses = self._tasks["address"][rows].astype(np.uint64)
        members: Members = {"out": ("throttled",), "queue": ("se.cfs_rq",)}
        tasks = read_structs(reader, "struct task_struct", members, addresses, losses)
        if tasks.has("queue"):
            self._queues = dict(
                zip(rows.tolist(), tasks["queue"].tolist(), strict=True)
            )
        if tasks.has("out"):
            out: Booleans = (tasks["out"] != 0) & tasks.readable
            return out
        if not tasks.has("queue"):
            return np.zeros(len(rows), np.bool_)  # no groups of fair tasks
        counts: Members = {"count": ("throttle_count",)}
        queues = read_structs(reader, "struct cfs_rq", counts, tasks["queue"], losses)
        if not queues.has("count"):
            return np.zeros(len(rows), np.bool_)  # CONFIG_CFS_BANDWIDTH=n
        below: Booleans = (queues["count"] > 0) & queues.readable
        return below


def _by_deadline(entity: drgn.Object) -> Throttle:
    runtime, period = int(entity.dl_runtime), int(entity.dl_period)
    of = f"{duration(runtime)} each {duration(period)}"
    return Throttle(text=f"throttled by its own runtime ({of})")


def _by_group(
    reader: Reader, address: int, cpu: int, now_ns: int, losses: LossLog
) -> Throttle:
    """Return the throttle by the group of a queue, or by the next one above it that is.

    :param address: Address of the ``struct cfs_rq`` that the task is on.
    """
    own = object_at(reader.prog, "struct cfs_rq", address)
    for group, queue in _groups(own, cpu):
        if not queue.throttled:
            continue
        cgroup = np.array([int(group.css.cgroup)], np.uint64)
        (path,) = cgroup_paths(reader, cgroup, losses)
        limit = group.cfs_bandwidth
        quota, period = int(limit.quota), int(limit.period)
        of = "" if quota == UNLIMITED else f" ({_limit(quota, period)})"
        since = int(queue.throttled_clock)
        return Throttle(
            text=f"throttled by the quota of {path or 'its control group'}{of}",
            cgroup=path,
            for_ns=now_ns - since if 0 < since <= min(now_ns, MAX_PLAUSIBLE) else None,
        )
    return Throttle(text="throttled by the quota of its control group")


def _groups(queue: drgn.Object, cpu: int) -> Iterator[tuple[drgn.Object, drgn.Object]]:
    """Yield the group of a queue and its ancestors, each with its queue on *cpu*."""
    for _ in range(_MAX_DEPTH):
        group = queue.tg
        if not group:
            return
        yield group, queue
        group = group.parent
        if not group:
            return
        # ``cfs_rq``, an array by CPU, became a per-CPU variable (seen in 7.3).
        is_array = group.cfs_rq.type_.type.kind == drgn.TypeKind.POINTER
        queue = group.cfs_rq[cpu] if is_array else per_cpu_ptr(group.cfs_rq, cpu)


def _limit(quota_ns: int, period_ns: int) -> str:
    return f"{duration(quota_ns)} each {duration(period_ns)}"


def policy_text(policy: int, rt_priority: int, static_prio: int) -> str:
    """Return a policy with its priority: ``FIFO 50``, ``nice 19``, ``SCHED_IDLE``.

    :return: Empty for the default: SCHED_NORMAL with nice 0.
    """
    name = POLICIES.get(policy, str(policy))
    if policy == IDLE:
        # "IDLE" alone reads as a CPU that idles.
        return f"SCHED_{name}"
    if policy in REALTIME:
        return f"{name} {rt_priority}"
    nice = static_prio - NICE_0
    words = ["" if policy == 0 else name, f"nice {nice}" if nice else ""]
    return words[0] if policy == DEADLINE else " ".join(filter(None, words))


# --- Threads whose sleep the kernel counts as I/O wait.


def read_in_iowait(reader: Reader, tasks: TaskTable, losses: LossLog) -> Booleans:
    """Return which threads sleep uninterruptibly with ``in_iowait`` set.

    io_schedule_prepare() sets it. Other threads are not read. A thread that cannot be
    read is counted, and returned as false.
    """
    byte, bit = reader.once(_member, lambda: _member(reader))
    waits: Booleans = (tasks["state"] & UNINTERRUPTIBLE) != 0
    waits &= tasks["exit_state"] == 0
    addresses = tasks["address"][waits].astype(np.uint64) + np.uint64(byte)
    records, readable = reader.read_records(addresses, 1)
    lose_many(losses, "struct task_struct", int(np.count_nonzero(~readable)))
    waits[waits] = (records[:, 0] >> bit & 1) != 0
    return waits


def read_one_in_iowait(reader: Reader, task: int) -> bool:
    """Return whether ``in_iowait`` of one thread is set.

    :param task: address of its ``struct task_struct``
    :raises drgn.FaultError: if it cannot be read
    """
    byte, bit = reader.once(_member, lambda: _member(reader))
    return bool(reader.read(task + byte, 1)[0] >> bit & 1)


def _member(reader: Reader) -> tuple[int, int]:
    """Return the offset of the byte with ``in_iowait``, and its bit in that byte."""
    member = member_of(find_type(reader.prog, "struct task_struct"), "in_iowait")
    bit_offset: int = member.bit_offset
    return divmod(bit_offset, 8)
