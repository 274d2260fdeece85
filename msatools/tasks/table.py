# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the ``struct task_struct`` of every thread into a table, one read each.

kernel/sched and include/linux/sched.h. The table has no column for a member that this
kernel does not have: see :meth:`TaskTable.has`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingMemberError
from msatools.kernel.percpu import mask_bytes
from msatools.kernel.pids import PID_MAX_LIMIT, find_tasks, require_pids
from msatools.kernel.reader import LIST_HEAD, MAX_PLAUSIBLE, U64, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Decoder, column_type, find_member
from msatools.kernel.walks import changing_list
from msatools.selfdesc.find import find_type, find_variable, offset_of

Records = npt.NDArray[np.void]
"""A structured array, one record a thread."""

IDENTITY = ("address", "pid", "start_ns")
"""Columns that together identify a task."""

PF_EXITING = 0x4
"""A bit of ``flags``: the task is exiting."""

PF_KTHREAD = 0x00200000
"""A bit of ``flags``: a kernel thread."""

PF_WQ_WORKER = 0x20
"""A bit of ``flags``: a worker of workqueues."""

COUNTS = ("pcount", "nvcsw", "nivcsw", "migrations", "min_flt", "maj_flt")
"""Columns with counts of events."""

_COMM_BYTES = 16
"""``TASK_COMM_LEN`` (include/linux/sched.h)."""

_SHARED = "msatools.shared_tasks"
"""Key in ``Program.cache`` of the table of :func:`tasks_read_once`."""

_BATCH = 256
"""Number of tasks, of some 5 KiB each, that are read and reduced to columns at once."""

# Columns, their numpy types, and their members, of which the first that exists counts.
_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pid": ("i4", ("pid",)),
    "tgid": ("i4", ("tgid",)),
    "flags": ("u4", ("flags",)),
    # Linux kernel commit 2f064a59a11f ("sched: Change task_struct::state") (in v5.14)
    # made it an unsigned int instead of a long; the low half has all bits.
    "state": ("u4", ("__state", "state")),
    "exit_state": ("i4", ("exit_state",)),
    "exit_code": ("i4", ("exit_code",)),
    "exit_signal": ("i4", ("exit_signal",)),
    "jobctl": ("u8", ("jobctl",)),
    "ptrace": ("u4", ("ptrace",)),
    "prio": ("i4", ("prio",)),
    "static_prio": ("i4", ("static_prio",)),
    "rt_priority": ("u4", ("rt_priority",)),
    "policy": ("u4", ("policy",)),
    # Linux kernel commit bcf9033e5449 ("sched: move CPU field back into thread_info if
    # THREAD_INFO_IN_TASK=y") (in v5.16)
    "cpu": ("u4", ("thread_info.cpu", "cpu")),
    "on_cpu": ("i4", ("on_cpu",)),
    "on_rq": ("i4", ("on_rq",)),
    # Linux kernel commit 152e11f6df29 ("sched/fair: Implement delayed dequeue") (in
    # v6.12): set for a task that sleeps on the run queue.
    "sched_delayed": ("u1", ("se.sched_delayed",)),
    "utime_ns": ("u8", ("utime",)),
    "stime_ns": ("u8", ("stime",)),
    "gtime_ns": ("u8", ("gtime",)),
    "sum_exec_ns": ("u8", ("se.sum_exec_runtime",)),
    "exec_start_ns": ("u8", ("se.exec_start",)),
    "run_delay_ns": ("u8", ("sched_info.run_delay",)),
    "pcount": ("u8", ("sched_info.pcount",)),
    "last_arrival_ns": ("u8", ("sched_info.last_arrival",)),
    "last_queued_ns": ("u8", ("sched_info.last_queued",)),
    "nvcsw": ("u8", ("nvcsw",)),
    "nivcsw": ("u8", ("nivcsw",)),
    "migrations": ("u8", ("se.nr_migrations",)),
    "min_flt": ("u8", ("min_flt",)),
    "maj_flt": ("u8", ("maj_flt",)),
    "start_ns": ("u8", ("start_time",)),
    # Linux kernel commit ceeadb83aea2 ("sched: Make struct sched_statistics independent
    # of fair sched class") (in v5.16)
    "sum_sleep_ns": (
        "u8",
        ("stats.sum_sleep_runtime", "se.statistics.sum_sleep_runtime"),
    ),
    "sum_block_ns": (
        "u8",
        ("stats.sum_block_runtime", "se.statistics.sum_block_runtime"),
    ),
    "iowait_sum_ns": ("u8", ("stats.iowait_sum", "se.statistics.iowait_sum")),
    "sleep_start_ns": ("u8", ("stats.sleep_start", "se.statistics.sleep_start")),
    "block_start_ns": ("u8", ("stats.block_start", "se.statistics.block_start")),
    # "hung_task: Show the blocker task if the task is hung on mutex" (in v6.16)
    "blocker": ("u8", ("blocker",)),
    # A struct mutex since "locking/mutex: Rework task_struct::blocked_on" (in v6.17);
    # before, with CONFIG_DEBUG_MUTEXES, a struct mutex_waiter.
    "blocked_on": ("u8", ("blocked_on",)),
    "pi_blocked_on": ("u8", ("pi_blocked_on",)),
    # The task that this one woke last, and a count of changes: record_wakee().
    "last_wakee": ("u8", ("last_wakee",)),
    "wakee_flips": ("u4", ("wakee_flips",)),
    "mm": ("u8", ("mm",)),
    "signal": ("u8", ("signal",)),
    "stack": ("u8", ("stack",)),
    # fp and pc are of arm64: x86-64 saves these registers on the stack.
    "sp": ("u8", ("thread.sp", "thread.cpu_context.sp")),
    "fp": ("u8", ("thread.cpu_context.fp",)),
    "pc": ("u8", ("thread.cpu_context.pc",)),
    # The objective credentials, as in /proc, not those that the task acts with (cred).
    "cred": ("u8", ("real_cred",)),
    "real_parent": ("u8", ("real_parent",)),
    "parent": ("u8", ("parent",)),
    "group_leader": ("u8", ("group_leader",)),
    # Linux kernel commit 2c4704756cab ("pids: Move the pgrp and session pid pointers
    # from task_struct to signal_struct") (in v4.19)
    "thread_pid": ("u8", ("thread_pid", "pids[0].pid")),
    "cgroups": ("u8", ("cgroups",)),
    "delays": ("u8", ("delays",)),
    "files": ("u8", ("files",)),
    "nsproxy": ("u8", ("nsproxy",)),
    # The struct kthread of a kernel thread: "kthread: Generalize pf_io_worker so it can
    # point to struct kthread" (in v5.17).
    "kthread": ("u8", ("worker_private", "set_child_tid")),
    # The member has 16 bytes; full names of kernel threads need more (identity.py).
    "comm": ("S48", ("comm",)),
}


class TaskTable(Struct, frozen=True):
    """The members of each thread's ``struct task_struct``."""

    records: Records
    """One record a thread, with ``address`` and the columns; if whole processes were
    read, each leader and then its other threads."""

    columns: frozenset[str]
    """The columns that this kernel has."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """Return a column.

        :raises MissingMemberError: if the kernel does not have it
        """
        if column not in self.columns:
            raise MissingMemberError(f"no task has a {column}")
        return self.records[column]

    def has(self, column: str) -> bool:
        """Return whether this kernel has the member of a column."""
        return column in self.columns

    def only(self, wanted: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "TaskTable":
        """Return the table of some of the threads, selected by a mask or by rows."""
        rows = np.flatnonzero(wanted) if wanted.dtype == np.bool_ else wanted
        # An index copies records field by field, which takes twenty times as long.
        return TaskTable(self.records.take(rows), self.columns)

    @property
    def leaders(self) -> npt.NDArray[np.bool_]:
        """Whether each thread is the leader of its process."""
        leads: npt.NDArray[np.bool_] = self.records["pid"] == self.records["tgid"]
        return leads


class _WholeTable(Struct, frozen=True):
    """All threads of a dump, and the losses of reading them."""

    table: TaskTable
    losses: LossLog


@contextmanager
def tasks_read_once(prog: drgn.Program) -> Iterator[None]:
    """Read all threads of a dump once for several reports within the context.

    On a running kernel each report reads the threads itself, as they change.
    """
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        yield
        return
    prog.cache[_SHARED] = list[_WholeTable]()
    try:
        yield
    finally:
        del prog.cache[_SHARED]


class TaskReader:
    """Reads tasks of one kernel, by its layout of ``struct task_struct``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        prog = reader.prog
        task = find_type(prog, "struct task_struct")
        columns = _COLUMNS | _mask_column(prog)
        fields = {
            name: field
            for name, (format_, members) in columns.items()
            if (field := _field(task, members, np.dtype(format_))) is not None
        }
        self._offsets = {name: offset for name, (offset, _) in fields.items()}
        self.columns = frozenset(fields)
        """The columns that this kernel has."""
        self._tasks = offset_of(task, "tasks.next")
        self._thread_node = offset_of(task, "thread_node.next")
        signal = find_type(prog, "struct signal_struct")
        self._thread_head = offset_of(signal, "thread_head")
        self.size = max(
            self._tasks + LIST_HEAD.size,
            self._thread_node + LIST_HEAD.size,
            *(offset + format_.itemsize for offset, format_ in fields.values()),
        )
        """Number of bytes of each ``struct task_struct`` that are read."""
        self._raw = np.dtype(
            {
                "names": list(self._offsets),
                "formats": [format_ for _, format_ in fields.values()],
                "offsets": list(self._offsets.values()),
                "itemsize": self.size,
            }
        )
        integers = [name for name, (_, type_) in fields.items() if type_.kind in "iu"]
        self._decode = Decoder(self._raw, integers)
        self._compact = np.dtype(
            [("address", "u8"), *((name, columns[name][0]) for name in self._offsets)]
        )

    def read_all(self, losses: LossLog) -> TaskTable:
        """Read every thread except the idle tasks.

        A damaged list is counted as lost, and read up to the damage. Within
        :func:`tasks_read_once` the first of several readers reads for all.
        """
        known: list[_WholeTable] | None = self._reader.prog.cache.get(_SHARED)
        if known is None:
            return self._table(self._walk(losses), losses)
        if not known:
            own = LossLog()
            known.append(_WholeTable(self._table(self._walk(own), own), own))
        losses.add(known[0].losses)
        table = known[0].table
        # Callers write the full names of kernel threads into their tables.
        return TaskTable(table.records.copy(), table.columns)

    def require_all(self, losses: LossLog) -> TaskTable:
        """Read every thread except the idle tasks; there must be at least one.

        A dump without its tasks must not be reported as one where none waits.

        :raises DamagedDataError: if no task can be read
        """
        tasks = self.read_all(losses)
        if not len(tasks):
            init = find_variable(self._reader.prog, "init_task").address_
            raise DamagedDataError("no task can be read", init)
        return tasks

    def read_named(self, pids: Iterable[int] | None, losses: LossLog) -> TaskTable:
        """Read the threads with some PIDs without a walk of all; ``None`` reads all.

        :raises NoSuchPidError: if some do not exist
        :raises DamagedDataError: if no task can be read
        """
        if pids is None:
            return self.require_all(losses)
        found = find_tasks(self._reader, pids, losses)
        damaged = losses.coverage["pids_unreadable"] > 0
        require_pids(pids, found, damaged=damaged)
        return self.read(list(found.values()), losses)

    def read(self, addresses: Sequence[int], losses: LossLog) -> TaskTable:
        """Read the tasks at some addresses; leave out those that are unreadable, or (on
        a running kernel) have ended."""
        return self.table(self.read_each(addresses, losses), losses)

    def read_each(
        self, addresses: Iterable[int], losses: LossLog
    ) -> Iterator[tuple[int, bytes]]:
        """Yield address and memory of each task that can be read, for :meth:`table`,
        which decodes many at once."""
        for address in addresses:
            try:
                yield address, self._reader.read(address, self.size)
            except UNREADABLE as error:
                losses.lose(Loss.TASKS, f"a task cannot be read: {error}")

    def table(self, tasks: Iterable[tuple[int, bytes]], losses: LossLog) -> TaskTable:
        """Return the table of tasks that :meth:`read_each` has read."""
        return self._table(iter(tasks), losses, self._reader.is_live)

    def read_one(self, address: int) -> Mapping[str, Any]:
        """Read one task, without the cost of a table.

        :return: Python values by the columns that this kernel has. They are not
            checked: the memory may not be a task.
        :raises drgn.FaultError: if it cannot be read
        """
        return self._decoded(self._reader.read(address, self.size))

    def read_threads(
        self, address: int, losses: LossLog
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the address and the columns, as of :meth:`read_one`, of each thread of
        the process that has the thread at *address*; the leader comes first."""
        for thread, data in self._walk_processes([address], losses):
            yield thread, self._decoded(data)

    def read_processes(self, addresses: Sequence[int], losses: LossLog) -> TaskTable:
        """Read all threads of the processes of some threads, each process once."""
        return self._table(self._walk_processes(addresses, losses), losses)

    def read_with_others(
        self,
        addresses: Sequence[int],
        others: Callable[[Sequence[int], Records], Iterable[int]],
        losses: LossLog,
    ) -> TaskTable:
        """Read the tasks at some addresses, then all threads of some other processes.

        :param others: Called with the addresses and columns of the tasks read so far;
            returns addresses of threads whose processes are to be read.
        """
        named = dict(self.read_each(addresses, losses))
        columns = np.frombuffer(b"".join(named.values()), self._raw)
        walk = self._walk_processes(others([*named], columns), losses)
        more = (task for task in walk if task[0] not in named)
        return self._table(chain(named.items(), more), losses)

    def _decoded(self, data: bytes) -> dict[str, Any]:
        columns = self._decode(data)
        offset = self._offsets["comm"]
        columns["comm"] = data[offset : offset + _COMM_BYTES]
        return columns

    def _walk_processes(
        self, addresses: Iterable[int], losses: LossLog
    ) -> Iterator[tuple[int, bytes]]:
        seen: set[int] = set()
        for address, data in self.read_each(addresses, losses):
            if address in seen:
                continue
            (leader,) = U64.unpack_from(data, self._offsets["group_leader"])
            if leader in seen:
                continue
            if leader != address:
                first = next(self.read_each([leader], losses), None)
                if first is None:
                    continue
                _, data = first
            seen.add(leader)
            yield leader, data
            yield from self._other_threads(leader, data, seen, losses)

    def _walk(self, losses: LossLog) -> Iterator[tuple[int, bytes]]:
        """Yield address and memory of each leader, then of its process's threads."""
        prog = self._reader.prog
        init = find_variable(prog, "init_task").address_
        head = init + self._tasks
        what = "the list of processes"
        seen = {init}
        signal, node = self._offsets["signal"], self._thread_node
        for leader, data in changing_list(
            self._reader, head, self._tasks, self.size, seen, what, losses
        ):
            yield leader, data
            # Most processes have one thread, and need no walk.
            (threads,) = U64.unpack_from(data, signal)
            if U64.unpack_from(data, node)[0] != threads + self._thread_head:
                yield from self._other_threads(leader, data, seen, losses)

    def _other_threads(
        self, leader: int, data: bytes, seen: set[int], losses: LossLog
    ) -> Iterator[tuple[int, bytes]]:
        """Yield address and memory of a process's threads other than the leader."""
        (signal,) = U64.unpack_from(data, self._offsets["signal"])
        threads = signal + self._thread_head
        (following,) = U64.unpack_from(data, self._thread_node)
        if following == threads:
            return
        name = "the list of a process's threads"
        first = leader + self._thread_node
        for thread in changing_list(
            self._reader,
            threads,
            self._thread_node,
            self.size,
            seen,
            name,
            losses,
            following,
            first,
        ):
            if thread[0] != leader:
                yield thread

    def _table(
        self,
        tasks: Iterator[tuple[int, bytes]],
        losses: LossLog,
        may_be_gone: bool = False,
    ) -> TaskTable:
        # A bytearray grows in place: joining parts would need the memory twice.
        table = bytearray()
        while batch := list(islice(tasks, _BATCH)):
            records = self._compacted(batch)
            table += believable(records, losses, may_be_gone).tobytes()
        read = np.frombuffer(table, self._compact)
        return TaskTable(read, frozenset(("address", *self._offsets)))

    def _compacted(self, batch: list[tuple[int, bytes]]) -> Records:
        raw = np.frombuffer(b"".join([data for _, data in batch]), self._raw)
        records = np.empty(len(batch), self._compact)
        records["address"] = [address for address, _ in batch]
        for name in self._offsets:
            records[name] = raw[name]
        return records


def believable(records: Records, losses: LossLog, may_be_gone: bool = False) -> Records:
    """Drop records that are not tasks, and cap impossible times and counts.

    Both are counted as losses: they are signs of a damaged dump.

    :param may_be_gone: Whether records that are not tasks are taken for tasks that have
        ended, as on a running kernel.
    """
    pid, tgid = records["pid"], records["tgid"]
    are_tasks = (np.minimum(pid, tgid) > 0) & (np.maximum(pid, tgid) <= PID_MAX_LIMIT)
    lost = len(records) - int(np.count_nonzero(are_tasks))
    if lost and may_be_gone:
        losses.coverage["tasks_gone"] += lost
    elif lost:
        text = "what a list of tasks leads to is no task"
        losses.lose(Loss.TASKS, text, count=lost, about="records")
    if lost:
        records = records[are_tasks]
    counts = [
        name
        for name in records.dtype.names or ()
        if name in COUNTS or name.endswith("_ns")
    ]
    # Usually none is too large: check all at once.
    if np.max([records[name] for name in counts], initial=0) > MAX_PLAUSIBLE:
        for name in counts:
            if (records[name] > MAX_PLAUSIBLE).any():
                records[name] = cut(records[name], losses)
    return records


def cut(numbers: npt.NDArray[Any], losses: LossLog) -> npt.NDArray[np.int64]:
    """Cap times or counts at :data:`MAX_PLAUSIBLE`, and count those that were above."""
    wrong = int(np.count_nonzero(numbers > MAX_PLAUSIBLE))
    text = "some times or counts are impossible, and are capped"
    losses.lose(Loss.COUNTS, text, count=wrong)
    possible: npt.NDArray[np.int64] = np.minimum(numbers, MAX_PLAUSIBLE).astype(
        np.int64
    )
    return possible


def _mask_column(prog: drgn.Program) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the column of the CPU affinity mask; empty if the CPU count is unknown.

    /proc/PID/status shows this mask. While migration is disabled, ``cpus_ptr`` points
    to a narrower mask.
    """
    try:
        format_ = f"V{mask_bytes(prog)}"
    except UNREADABLE:
        return {}
    # Linux kernel commit 3bd3706251ee ("sched/core: Provide a pointer to the valid CPU
    # mask") (in v5.3)
    return {"cpus_mask": (format_, ("cpus_mask", "cpus_allowed"))}


def _field(
    task: drgn.Type, members: tuple[str, ...], column: np.dtype[Any]
) -> tuple[int, np.dtype[Any]] | None:
    """Return offset and format of the first of *members* that exists, else ``None``.

    An integer has the format of its type, which may be narrower than the column:
    ``on_cpu`` and ``on_rq`` are a byte each in v7.2. Other members are cut to the
    column's size.
    """
    member = find_member(task, members)
    if member is None:
        return None
    if column.kind in "iu":
        return member.address_, column_type(member)
    size = min(drgn.sizeof(member.type_), column.itemsize)
    return member.address_, np.dtype(f"{column.kind}{size}")
