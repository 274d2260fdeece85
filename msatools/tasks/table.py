# SPDX-License-Identifier: LGPL-2.1-or-later

"""The ``struct task_struct`` of every thread, one read each, as a table.

kernel/sched and include/linux/sched.h. A member that this kernel does not have is a
column that :meth:`TaskTable.has` denies, not a column of zeros.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.cpumask import mask_bytes
from msatools.kernel.live_lists import changing_list
from msatools.kernel.losses import Loss
from msatools.kernel.pids import PID_MAX_LIMIT, find_tasks, require_pids
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Decoder, column_type, find_member
from msatools.selfdesc.variables import find_variable

Records = npt.NDArray[np.void]
"""A structured array, one record a thread."""

PF_KTHREAD = 0x00200000
"""Of ``flags``: a thread of the kernel itself."""

MOST = 1 << 60
"""More than any time or count that a kernel comes to: 36 years in nanoseconds."""

COUNTS = ("pcount", "nvcsw", "nivcsw", "migrations", "min_flt", "maj_flt")
"""Columns that are neither times nor names nor places."""

_COMM_BYTES = 16
"""``TASK_COMM_LEN`` (include/linux/sched.h)."""

_BATCH = 256
"""Tasks in memory as they are in the kernel: some 5 KiB each."""

_POINTER = struct.Struct("<Q")
_LINKS = struct.Struct("<QQ")
"""``struct list_head``: next, previous."""

# Columns, their numpy types, and the members that they are, the newest first.
_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pid": ("i4", ("pid",)),
    "tgid": ("i4", ("tgid",)),
    "flags": ("u4", ("flags",)),
    # Linux kernel commit 2f064a59a11f ("sched: Change task_struct::state") (in v5.14)
    # made an unsigned int of the long; the low half holds all bits there are.
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
    # v6.12): such a task is on a run queue, and sleeps.
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
    # A mutex since "locking/mutex: Rework task_struct::blocked_on" (in v6.17); before,
    # with CONFIG_DEBUG_MUTEXES, a waiter for one.
    "blocked_on": ("u8", ("blocked_on",)),
    "pi_blocked_on": ("u8", ("pi_blocked_on",)),
    # Whom it woke last, and how often that was another one: record_wakee().
    "last_wakee": ("u8", ("last_wakee",)),
    "wakee_flips": ("u4", ("wakee_flips",)),
    "mm": ("u8", ("mm",)),
    "signal": ("u8", ("signal",)),
    "stack": ("u8", ("stack",)),
    "sp": ("u8", ("thread.sp", "thread.cpu_context.sp")),
    # What /proc shows, also while a task acts with the rights of another.
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
    # "kthread: Generalize pf_io_worker so it can point to struct kthread" (in v5.17);
    # of the kernel's own threads alone.
    "kthread": ("u8", ("worker_private", "set_child_tid")),
    # 16 bytes; there is room for what a kernel thread is called beyond them.
    "comm": ("S48", ("comm",)),
}


@dataclass(frozen=True)
class TaskTable:
    """What each thread's ``struct task_struct`` says."""

    records: Records
    """Columns as above and ``address``; threads of a process follow its leader."""

    columns: frozenset[str]
    """The columns that this kernel has."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """Return a column.

        :raises KeyError: if the kernel does not keep it
        """
        if column not in self.columns:
            raise KeyError(column)
        return self.records[column]

    def has(self, column: str) -> bool:
        """Return whether the kernel keeps a column."""
        return column in self.columns

    def only(self, wanted: npt.NDArray[np.bool_]) -> "TaskTable":
        """Return the table of some of its threads."""
        return TaskTable(self.records[wanted], self.columns)

    @property
    def leaders(self) -> npt.NDArray[np.bool_]:
        """Whether each thread is the first of its process."""
        leads: npt.NDArray[np.bool_] = self.records["pid"] == self.records["tgid"]
        return leads


class TaskReader:
    """Reads tasks of one kernel, by what its ``struct task_struct`` looks like."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        prog = reader.prog
        task = prog.type("struct task_struct")
        columns = _COLUMNS | _mask_column(prog)
        found = {
            name: place
            for name, (format_, members) in columns.items()
            if (place := _place(task, members, np.dtype(format_))) is not None
        }
        self._offsets = {name: offset for name, (offset, _) in found.items()}
        self.columns = frozenset(found)
        """Those that this kernel has."""
        self._tasks = drgn.offsetof(task, "tasks.next")
        self._thread_node = drgn.offsetof(task, "thread_node.next")
        signal = prog.type("struct signal_struct")
        self._thread_head = drgn.offsetof(signal, "thread_head")
        self.size = max(
            self._tasks + _LINKS.size,
            self._thread_node + _LINKS.size,
            *(offset + format_.itemsize for offset, format_ in found.values()),
        )
        """Bytes of each task that are read."""
        self._raw = np.dtype(
            {
                "names": list(self._offsets),
                "formats": [format_ for _, format_ in found.values()],
                "offsets": list(self._offsets.values()),
                "itemsize": self.size,
            }
        )
        numbers = [name for name, (_, type_) in found.items() if type_.kind in "iu"]
        self._decode = Decoder(self._raw, numbers)
        self._compact = np.dtype(
            [("address", "u8"), *((name, columns[name][0]) for name in self._offsets)]
        )

    def read_all(self, losses: LossLog) -> TaskTable:
        """Read every thread but the idle ones.

        A list that breaks off costs a note and what comes after.
        """
        return self._table(self._walk(losses), losses)

    def read_named(self, pids: Iterable[int] | None, losses: LossLog) -> TaskTable:
        """Read the threads with some PIDs, looked up directly; of ``None`` all threads.

        :raises NoSuchPidError: if some are not there
        """
        if pids is None:
            return self.read_all(losses)
        found = find_tasks(self._reader, pids, losses)
        damaged = losses.coverage["pids_unreadable"] > 0
        require_pids(pids, found, damaged=damaged)
        return self.read(list(found.values()), losses)

    def read(self, addresses: Sequence[int], losses: LossLog) -> TaskTable:
        """Read the tasks at some addresses; those that cannot be read are left out.

        So are those of a running kernel that are gone since their addresses were read.
        """
        live = self._reader.is_live
        return self._table(self._read_each(addresses, losses), losses, live)

    def read_one(self, address: int) -> Mapping[str, Any]:
        """Read one task, without the cost of a table.

        :return: Python's own values by column, those that this kernel has. Nothing says
            that it is a task.
        :raises drgn.FaultError: if it cannot be read
        """
        return self._decoded(self._reader.read(address, self.size))

    def read_threads(
        self, address: int, losses: LossLog
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Read all threads of the process that the thread at an address is of.

        :return: Their addresses, the first thread's first, and what :meth:`read_one`
            gives.
        """
        for thread, data in self._walk_processes([address], losses):
            yield thread, self._decoded(data)

    def read_processes(self, addresses: Sequence[int], losses: LossLog) -> TaskTable:
        """Read all threads of the processes that the threads at some addresses are of.

        Each process comes once.
        """
        return self._table(self._walk_processes(addresses, losses), losses)

    def read_with_others(
        self,
        addresses: Sequence[int],
        others: Callable[[Sequence[int], Records], Iterable[int]],
        losses: LossLog,
    ) -> TaskTable:
        """Read the tasks at some addresses, and after them whole processes.

        :param others: Tells, by the addresses and columns of those that were read, of
            which tasks all threads of their processes are wanted, too. Each thread
            comes once.
        """
        named = dict(self._read_each(addresses, losses))
        columns = np.frombuffer(b"".join(named.values()), self._raw)
        walk = self._walk_processes(others([*named], columns), losses)
        more = (task for task in walk if task[0] not in named)
        return self._table(chain(named.items(), more), losses)

    def _decoded(self, data: bytes) -> dict[str, Any]:
        columns = self._decode(data)
        at = self._offsets["comm"]
        columns["comm"] = data[at : at + _COMM_BYTES]
        return columns

    def _walk_processes(
        self, addresses: Iterable[int], losses: LossLog
    ) -> Iterator[tuple[int, bytes]]:
        seen: set[int] = set()
        for address, data in self._read_each(addresses, losses):
            if address in seen:
                continue
            (leader,) = _POINTER.unpack_from(data, self._offsets["group_leader"])
            if leader in seen:
                continue
            if leader != address:
                first = next(self._read_each([leader], losses), None)
                if first is None:
                    continue
                _, data = first
            seen.add(leader)
            yield leader, data
            yield from self._other_threads(leader, data, seen, losses)

    def _read_each(
        self, addresses: Iterable[int], losses: LossLog
    ) -> Iterator[tuple[int, bytes]]:
        for address in addresses:
            try:
                yield address, self._reader.read(address, self.size)
            except drgn.FaultError as error:
                losses.lose(Loss.TASKS, f"a task cannot be read: {error}")

    def _walk(self, losses: LossLog) -> Iterator[tuple[int, bytes]]:
        """Read the first thread of each process, and after each its other threads."""
        prog = self._reader.prog
        init = find_variable(prog, "init_task").address_
        head = init + self._tasks
        what = "the list of processes"
        seen = {init}
        for leader, data in changing_list(
            self._reader, head, self._tasks, self.size, seen, what, losses
        ):
            yield leader, data
            yield from self._other_threads(leader, data, seen, losses)

    def _other_threads(
        self, leader: int, data: bytes, seen: set[int], losses: LossLog
    ) -> Iterator[tuple[int, bytes]]:
        """Read the threads that follow the first one of a process."""
        (signal,) = _POINTER.unpack_from(data, self._offsets["signal"])
        threads = signal + self._thread_head
        (following,) = _POINTER.unpack_from(data, self._thread_node)
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
        # It grows in place: parts that are put together take the memory twice.
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
    """Leave out what is no task at all, and cut what it cannot have counted.

    Both are counted: such records are of a damaged dump.

    :param may_be_gone: Whether what is no task may have been one a moment ago.
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
    # One look at all of them is enough, as a rule.
    if np.max([records[name] for name in counts], initial=0) > MOST:
        for name in counts:
            if (records[name] > MOST).any():
                records[name] = cut(records[name], losses)
    return records


def cut(numbers: npt.NDArray[Any], losses: LossLog) -> npt.NDArray[np.int64]:
    """Cut times or counts that are more than can be, which is counted."""
    wrong = int(np.count_nonzero(numbers > MOST))
    text = "some times or counts cannot be, and are cut"
    losses.lose(Loss.COUNTS, text, count=wrong)
    possible: npt.NDArray[np.int64] = np.minimum(numbers, MOST).astype(np.int64)
    return possible


def _mask_column(prog: drgn.Program) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the column of the CPUs that a task may run on: as many bytes as it takes.

    While a task must not migrate, ``cpus_ptr`` is narrower; /proc/PID/status shows this
    one. None if the number of CPUs is lost.
    """
    try:
        format_ = f"V{mask_bytes(prog)}"
    except drgn.FaultError:
        return {}
    # Linux kernel commit 3bd3706251ee ("sched/core: Provide a pointer to the valid CPU
    # mask") (in v5.3)
    return {"cpus_mask": (format_, ("cpus_mask", "cpus_allowed"))}


def _place(
    task: drgn.Type, members: tuple[str, ...], column: np.dtype[Any]
) -> tuple[int, np.dtype[Any]] | None:
    """Find a member, and return its format.

    A number's is that of its type, which may be smaller than the column: ``on_cpu`` and
    ``on_rq`` are a byte each in v7.2. Of all else it is as much as the column takes.
    """
    member = find_member(task, members)
    if member is None:
        return None
    if column.kind in "iu":
        return member.address_, column_type(member)
    size = min(drgn.sizeof(member.type_), column.itemsize)
    return member.address_, np.dtype(f"{column.kind}{size}")
