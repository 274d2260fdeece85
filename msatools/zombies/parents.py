# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dead tasks that are not reaped, and the processes that have to wait for them.

Facts that explain why a process does not wait, such as signal handlers, are read here.
"""

from collections.abc import Sequence
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.clocks import Clocks, Nanoseconds
from msatools.kernel.pids import innermost_numbers
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    NOT_FOUND,
    Booleans,
    Numbers,
    find_rows,
    lose_many,
    read_bits,
    read_structs,
)
from msatools.model import values
from msatools.selfdesc.find import find_type, member_of, offset_of
from msatools.tasks.identity import comm_text
from msatools.tasks.sampler import ages
from msatools.tasks.states import (
    STOPPED,
    TRACED,
    WAKEKILL,
    asleep,
    letters,
    loads,
    read_frozen,
)
from msatools.tasks.syscalls import WaitOpts, WaitOptsReader
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows
from msatools.tasks.waits import TaskClass
from msatools.zombies.model import Disposition, Reaper

# --- Find dead tasks that are not reaped, and read the data that the kernel still has.
#
# kernel/exit.c. A leader stays until its parent reaps it. Another thread is released at
# once, unless it is traced: then it stays until its tracer reaps it.


UNKNOWN = -1


# Bits of task_struct.exit_state (include/linux/sched.h); both while a tracer reaps it.
_DEAD = 0x10
_ZOMBIE = 0x20

GROUP_EXIT = 0x4
"""``SIGNAL_GROUP_EXIT`` of ``signal_struct.flags``: exit_group(), or a fatal signal."""

_ZOMBIE_PROCESS = {
    "live": ("live.counter",),
    "nr_threads": ("nr_threads",),
    "flags": ("flags",),
    "exit_code": ("group_exit_code",),
}
_SPACE = {"inode": ("ns.inum",)}


class Aged(Struct, frozen=True):
    """Time that each task of a table has been in its state."""

    age_ns: Nanoseconds
    age_bound: npt.NDArray[np.uint8]
    """Members of :class:`msatools.tasks.sampler.AgeBound`."""


def read_ages(tasks: TaskTable, clocks: Clocks) -> Aged:
    """Return the time that each task has been dead, asleep, running or runnable."""
    classes = np.where(asleep(tasks), TaskClass.OTH.value, TaskClass.LAT.value)
    classes[tasks["exit_state"] != 0] = TaskClass.ZMB.value
    return Aged(*ages(tasks, clocks, classes.astype(np.uint8)))


class Dead(Struct, frozen=True):
    """One value for each dead task that is not reaped, in the order of the table."""

    row: Rows
    """Row in the table of tasks."""

    leads: Booleans
    """Whether it is the leader of its process."""

    reaped: Booleans
    """Whether it is being reaped right now."""

    exit_code: Numbers
    """Status as of wait()."""

    exit_signal: Numbers
    """Signal sent to the parent; -1 for a thread that is not a leader."""

    ptraced: Booleans
    real_parent: Addresses
    """Address of the parent's ``struct task_struct``."""

    parent: Addresses
    """Address of the tracer's ``struct task_struct``; the parent's if not traced."""

    process: Addresses
    """Address of its ``struct signal_struct``."""

    thread_pid: Addresses
    """Address of its ``struct pid``; 0 if already detached."""

    threads: Numbers
    """Number of living threads of its process; :data:`UNKNOWN` if unreadable."""

    others: Numbers
    """Number of other threads of its process that are not reaped; :data:`UNKNOWN` if
    unreadable."""

    namespace: Numbers
    """Inode number of its PID namespace; :data:`UNKNOWN` if unreadable."""

    ns_pid: Numbers
    """Its PID there; 0 in the initial namespace."""

    age_ns: Nanoseconds
    age_bound: npt.NDArray[np.uint8]
    """Members of :class:`msatools.tasks.sampler.AgeBound`."""

    def __len__(self) -> int:
        return len(self.row)

    def only(self, wanted: Booleans | Rows) -> "Dead":
        """Return some of the dead tasks."""
        return Dead(*(column[wanted] for column in values(self).values()))


def zombie_rows(tasks: TaskTable) -> Rows:
    """Return the rows of dead tasks that are not reaped, or just being reaped."""
    exits = tasks["exit_state"]
    stays = (exits == _ZOMBIE) & (tasks["ptrace"] != 0)
    return np.flatnonzero((exits != 0) & (tasks.leaders | stays))


def read_dead(reader: Reader, tasks: TaskTable, aged: Aged, losses: LossLog) -> Dead:
    """Read the data of each dead task, with four bulk reads in total."""
    row = zombie_rows(tasks)
    part = tasks.only(row)
    process = part["signal"].astype(np.uint64)
    counts = read_structs(
        reader, "struct signal_struct", _ZOMBIE_PROCESS, process, losses
    )
    whole = counts.readable & ((counts["flags"] & GROUP_EXIT) != 0)
    thread_pid = part["thread_pid"].astype(np.uint64)
    namespace, ns_pid = read_numbers(reader, thread_pid, losses)
    known = counts.readable
    return Dead(
        row=row,
        leads=part.leaders,
        reaped=(part["exit_state"] & _DEAD) != 0,
        # wait_task_zombie()
        exit_code=np.where(whole, counts["exit_code"], part["exit_code"]).astype("i8"),
        exit_signal=part["exit_signal"].astype(np.int64),
        ptraced=part["ptrace"] != 0,
        real_parent=part["real_parent"].astype(np.uint64),
        parent=part["parent"].astype(np.uint64),
        process=process,
        thread_pid=thread_pid,
        threads=np.where(known, counts["live"], UNKNOWN).astype(np.int64),
        others=np.where(known, counts["nr_threads"] - 1, UNKNOWN).astype(np.int64),
        namespace=namespace,
        ns_pid=ns_pid,
        age_ns=aged.age_ns[row],
        age_bound=aged.age_bound[row],
    )


def read_numbers(
    reader: Reader, pids: Addresses, losses: LossLog
) -> tuple[Numbers, Numbers]:
    """Return the PID namespace of each ``struct pid``, and its PID there.

    :return: The inode numbers, :data:`UNKNOWN` if unreadable; and the PIDs, 0 in the
        initial namespace.
    """
    space, numbers = innermost_numbers(reader, pids, losses)
    inodes = read_structs(reader, "struct pid_namespace", _SPACE, space, losses)
    found = np.where(inodes.readable, inodes["inode"].astype(np.int64), UNKNOWN)
    return found, numbers


# --- Signal handlers of processes (struct sighand_struct).


_DEFAULT, _IGNORE = 0, 1
"""``SIG_DFL`` and ``SIG_IGN`` (include/uapi/asm-generic/signal-defs.h)."""


class Actions(Struct, frozen=True):
    """Signal handlers of one process."""

    handlers: tuple[int, ...]
    """``sa_handler`` by signal number less one."""

    ignored: int
    """Mask of ignored signals: ``SigIgn`` of /proc/PID/status."""

    caught: int
    """Mask of signals with a handler: ``SigCgt``."""

    def disposition(self, number: int) -> Disposition:
        """Return the disposition of a signal."""
        handler = self.handlers[number - 1]
        if handler == _DEFAULT:
            return "default"
        return "ignored" if handler == _IGNORE else "handler"

    def handler(self, number: int) -> int | None:
        """Return the address of a signal's handler; ``None`` if there is none."""
        handler = self.handlers[number - 1]
        return None if handler in (_DEFAULT, _IGNORE) else handler


def read_actions(
    reader: Reader, sighands: Addresses, losses: LossLog
) -> Sequence[Actions | None]:
    """Read the signal handlers of processes; ``None`` if unreadable.

    :param sighands: Addresses of ``struct sighand_struct``; 0 if already freed.
    """
    start, count, action = reader.once(Actions, lambda: _layout(reader.prog))
    length = count * action.itemsize
    records, readable = reader.read_records(sighands + np.uint64(start), length)
    lost = ~readable & (sighands != 0)
    lose_many(losses, "struct sighand_struct", int(np.count_nonzero(lost)))
    readable &= sighands != 0
    words = records.view(action)["handler"]
    bits = np.uint64(1) << np.arange(count, dtype=np.uint64)
    ignored = ((words == _IGNORE) * bits).sum(axis=1, dtype=np.uint64)
    caught = ((words > _IGNORE) * bits).sum(axis=1, dtype=np.uint64)
    columns = words.tolist(), ignored.tolist(), caught.tolist(), readable.tolist()
    return [
        Actions(tuple(handlers), *masks) if can_be_read else None
        for handlers, *masks, can_be_read in zip(*columns, strict=True)
    ]


def _layout(prog: drgn.Program) -> tuple[int, int, np.dtype[Any]]:
    """Return the offset of the first action, their number and their record."""
    type_ = find_type(prog, "struct sighand_struct")
    array = member_of(type_, "action").type
    action: np.dtype[Any] = np.dtype(
        {
            "names": ["handler"],
            "formats": ["<u8"],
            "offsets": [offset_of(array.type, "sa.sa_handler")],
            "itemsize": drgn.sizeof(array.type),
        }
    )
    return offset_of(type_, "action"), array.length or 0, action


# --- Read the facts that explain why a process does not wait for its children.


SIGCHLD = 17
"""The number on all architectures but Alpha, MIPS, PA-RISC and SPARC."""

_PARENT_PROCESS = {"pending": ("shared_pending.signal.sig[0]",)}
_THREAD = {
    "blocked": ("blocked.sig[0]",),
    "before": ("real_blocked.sig[0]",),
    "pending": ("pending.signal.sig[0]",),
    "sighand": ("sighand",),
}


class ParentFacts(Struct, frozen=True, kw_only=True):
    """A process that has dead children."""

    process: int
    """Address of its ``struct signal_struct``."""

    pid: int
    comm: str
    row: int
    """Row of its leader in the table; of another thread if the leader is not there."""

    living: tuple[int, ...]
    """Rows of its living threads."""

    state: str
    """State of ``row`` as in /proc; of the first living thread if that one is dead."""

    age_ns: int
    """Time in that state."""

    disposition: Disposition | None
    """Disposition of SIGCHLD; ``None`` if unreadable, like the next three."""

    handler: int | None
    """Address of the handler of SIGCHLD."""

    ignored: int | None
    caught: int | None
    """Masks of ignored signals, and of signals with a handler."""

    blocked: int | None
    """Mask of signals blocked by its first living thread; ``None`` if unreadable, like
    the next two."""

    blocks: bool | None
    """Whether all its living threads block SIGCHLD."""

    pending: bool | None
    """Whether SIGCHLD is pending."""

    blocking: frozenset[int]
    """Rows of its threads that block SIGCHLD."""

    sigwaits: bool
    """Whether a thread waits for SIGCHLD in sigtimedwait()."""

    reaper: Reaper | None
    waits: tuple[WaitOpts, ...] | None
    """Waits of its threads in wait(); ``None`` if unreadable."""

    stopped: frozenset[int]
    """Rows of its living threads that are stopped, traced or frozen."""

    frozen: frozenset[int]
    """Rows of its frozen threads."""

    stuck: frozenset[int]
    """Rows of its threads in uninterruptible sleep."""

    killable: bool
    """Whether SIGKILL ends the sleep of all *stuck* threads."""


def read_facts(
    reader: Reader,
    tasks: TaskTable,
    processes: Addresses,
    aged: Aged,
    losses: LossLog,
) -> tuple[tuple[ParentFacts, ...], Nanoseconds]:
    """Read the facts of some processes in bulk, and the waits of their threads.

    :param tasks: All tasks, or all threads of these processes.
    :param processes: Addresses of their ``struct signal_struct``, ascending; the table
        has a thread of each.
    :return: The facts in that order; and by row of the table the time that a thread of
        them has been in uninterruptible sleep, :data:`UNKNOWN` if it is not.
    """
    threads = _Threads(reader, tasks, processes, aged, losses)
    facts = tuple(threads.facts(index) for index in range(len(processes)))
    return facts, threads.stuck_ns


class _Threads:
    """The threads of some processes, read at once."""

    def __init__(
        self,
        reader: Reader,
        tasks: TaskTable,
        processes: Addresses,
        aged: Aged,
        losses: LossLog,
    ) -> None:
        self._reader = reader
        self._tasks = tasks
        self._losses = losses
        self._processes = processes
        self._shared = read_structs(
            reader, "struct signal_struct", _PARENT_PROCESS, processes, losses
        )
        self._subreaper = read_bits(
            reader, "struct signal_struct", "is_child_subreaper", processes
        )
        # Rows of all their threads, including dead leaders, grouped by process.
        rows, of = _members(tasks, processes)
        order = np.argsort(of, kind="stable")
        self._rows = rows[order]
        self._starts = np.searchsorted(of[order], np.arange(len(processes) + 1))
        part = tasks.only(self._rows)
        addresses = part["address"].astype(np.uint64)
        lives = part["exit_state"] == 0
        self._lives = lives
        self._own = read_structs(
            reader,
            "struct task_struct",
            _THREAD,
            np.where(lives, addresses, 0),
            losses,
        )
        self._letters = letters(part)
        self._frozen = lives & read_frozen(reader, part)
        self._stopped = lives & ((part["state"] & (STOPPED | TRACED)) != 0)
        self._stopped |= self._frozen
        self._stuck = loads(part) & lives & ~self._frozen
        self._killable = (part["state"] & WAKEKILL) != 0
        self._ages = aged.age_ns[self._rows]
        self.stuck_ns = np.full(len(tasks), UNKNOWN, np.int64)
        self.stuck_ns[self._rows[self._stuck]] = self._ages[self._stuck]
        self._first = self._firsts(part.leaders)
        self._init = self._are_init()
        self._actions = self._read_actions()
        self._waits = _reads_waits(reader, losses)

    def _firsts(self, leads: Booleans) -> list[int]:
        """Return the index of the leader, or another thread, of each process."""
        firsts = []
        for index in range(len(self._processes)):
            span = np.arange(self._starts[index], self._starts[index + 1])
            firsts.append(int(span[np.argmax(leads[span])]))
        return firsts

    def _are_init(self) -> Booleans:
        """Return which of the processes are init of a PID namespace.

        is_child_reaper() of include/linux/pid.h.
        """
        rows = self._rows[self._first]
        pids = self._tasks["thread_pid"][rows].astype(np.uint64)
        _, numbers = innermost_numbers(self._reader, pids, self._losses)
        first: Booleans = (numbers == 1) | (self._tasks["tgid"][rows] == 1)
        return first

    def _read_actions(self) -> Sequence[Actions | None]:
        """Read the signal handlers of each process, from any of its threads."""
        sighands = np.zeros(len(self._processes), np.uint64)
        for index in range(len(sighands)):
            span = slice(self._starts[index], self._starts[index + 1])
            sighands[index] = self._own["sighand"][span].max(initial=0)
        return read_actions(self._reader, sighands, self._losses)

    def facts(self, index: int) -> ParentFacts:
        """Return the facts of one process."""
        span = np.arange(self._starts[index], self._starts[index + 1])
        living = span[self._lives[span]]
        first = self._first[index]
        shown = first if self._lives[first] or not len(living) else int(living[0])
        row = int(self._rows[first])
        actions = self._actions[index]
        own = self._own.readable[living]
        readable = bool(len(living)) and bool(own.all())
        blocked = self._own["blocked"][living]
        blocks = _has(blocked)
        waits_for = _has(self._own["before"][living] & ~blocked)
        pending = readable and bool(_has(self._own["pending"][living]).any())
        pending |= bool(_has(self._shared["pending"][index : index + 1])[0])
        shared = bool(self._shared.readable[index])
        stuck = living[self._stuck[living]]
        reaper: Reaper | None = "subreaper" if self._subreaper[index] else None
        return ParentFacts(
            process=int(self._processes[index]),
            pid=int(self._tasks["tgid"][row]),
            comm=comm_text(self._tasks["comm"][row]),
            row=row,
            living=tuple(self._rows[living].tolist()),
            state=str(self._letters[shown]),
            age_ns=int(self._ages[shown]),
            disposition=actions.disposition(SIGCHLD) if actions else None,
            handler=actions.handler(SIGCHLD) if actions else None,
            ignored=actions.ignored if actions else None,
            caught=actions.caught if actions else None,
            blocked=int(blocked[0]) if readable else None,
            blocks=bool(blocks.all()) if readable else None,
            pending=pending if readable and shared else None,
            blocking=self._some(living[blocks]),
            sigwaits=bool(waits_for.any()),
            reaper="init" if self._init[index] else reaper,
            waits=self._read_waits(index) if shared else None,
            stopped=self._some(living[self._stopped[living]]),
            frozen=self._some(living[self._frozen[living]]),
            stuck=self._some(stuck),
            killable=bool(self._killable[stuck].all()),
        )

    def _some(self, indices: Rows) -> frozenset[int]:
        return frozenset(self._rows[indices].tolist())

    def _read_waits(self, index: int) -> tuple[WaitOpts, ...] | None:
        if self._waits is None:
            return None
        process = int(self._processes[index])
        found = LossLog()
        waits = tuple(self._waits.of_process(process, found))
        if not found.lost:
            return waits
        # A damaged queue may lack threads in wait(). The process may also have ended
        # meanwhile.
        self._losses.lose(Loss.WAITS)
        for note in found.notes.values():
            self._losses.lose(Loss.WAITS, note.text)
        return None


def _members(tasks: TaskTable, processes: Addresses) -> tuple[Rows, Rows]:
    """Return the rows of all threads of *processes*, and each one's index there."""
    if not len(processes):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    of = np.searchsorted(processes, tasks["signal"])
    of[of == len(processes)] = 0
    rows = np.flatnonzero(processes[of] == tasks["signal"])
    return rows, of[rows]


def _reads_waits(reader: Reader, losses: LossLog) -> WaitOptsReader | None:
    try:
        return reader.once(WaitOptsReader, lambda: WaitOptsReader(reader))
    except MissingError as error:
        losses.lose(
            Loss.WAITS, f"cannot determine what is waited for by wait(): {error}"
        )
        return None


def _has(masks: npt.NDArray[np.uint64]) -> Booleans:
    """Return which masks of signals include SIGCHLD."""
    found: Booleans = (masks >> np.uint64(SIGCHLD - 1) & np.uint64(1)) != 0
    return found


# --- The processes that have to wait for the dead, and why they do not.
#
# The parent of a task is the thread that created it (task_struct.real_parent); any
# thread of its process may wait for the task. A tracer (parent) has to wait first.


NONE = NOT_FOUND
"""Index that stands for no row, or for no parent."""

_GROUP = {"group": ("pids[2]",)}
"""``PIDTYPE_PGID``."""

_TRACER = {"process": ("signal",), "tgid": ("tgid",)}


class Parents(Struct, frozen=True):
    """``facts`` has each parent once; the other fields, a value for each dead task."""

    facts: tuple[ParentFacts, ...]

    index: Rows
    """Index of the parent in *facts*; :data:`NONE` if it is not in the table."""

    row: Rows
    """Row of the parent thread, or :data:`NONE`."""

    stuck_ns: Nanoseconds
    """Time that the parent thread, or the leader of its process, has been in
    uninterruptible sleep; :data:`UNKNOWN` if neither is."""

    group: Addresses
    """Address of the ``struct pid`` of the dead task's process group, if its parent
    waits for a group; else 0."""

    tracer: Numbers
    """PID of the tracer; 0 if there is none, :data:`UNKNOWN` if unreadable."""

    elsewhere: Booleans
    """Whether the tracer is another process than the parent."""


def read_parents(
    reader: Reader, tasks: TaskTable, dead: Dead, aged: Aged, losses: LossLog
) -> Parents:
    """Read the parents of the dead, in bulk, and the waits of their threads.

    A parent that is not in the table, or has ended meanwhile, is noted.

    :param tasks: All tasks, or the dead and all threads of their parents.
    """
    row = find_rows(tasks["address"], dead.real_parent)
    known = row != NONE
    if not known.all():
        losses.coverage["parents_unknown"] += int(np.count_nonzero(~known))
        losses.note("parent-unknown", "the parents of some dead tasks are not known")
    processes, place = np.unique(tasks["signal"][row[known]], return_inverse=True)
    index = np.full(len(dead), NONE, np.intp)
    index[known] = place
    facts, stuck_ns = read_facts(
        reader, tasks, processes.astype(np.uint64), aged, losses
    )
    tracer, elsewhere = _tracers(reader, dead, row, tasks, losses)
    return Parents(
        facts=facts,
        index=index,
        row=row,
        stuck_ns=_stuck(stuck_ns, facts, index, row),
        group=_groups(reader, dead, facts, index, losses),
        tracer=tracer,
        elsewhere=elsewhere,
    )


def _stuck(
    by_row: Nanoseconds, facts: Sequence[ParentFacts], index: Rows, row: Rows
) -> Nanoseconds:
    own = np.where(row == NONE, UNKNOWN, by_row[row])
    leaders = np.array([each.row for each in facts], np.intp)
    first = np.full(len(row), UNKNOWN, np.int64)
    known = index != NONE
    first[known] = by_row[leaders[index[known]]]
    stuck: Nanoseconds = np.maximum(own, first)
    return stuck


def _groups(
    reader: Reader,
    dead: Dead,
    facts: Sequence[ParentFacts],
    index: Rows,
    losses: LossLog,
) -> Addresses:
    """Read the process groups of tasks whose parent waits for a group."""
    asks = [any(wait.kind == "group" for wait in each.waits or ()) for each in facts]
    groups = np.zeros(len(dead), np.uint64)
    chosen = np.flatnonzero(np.array([*asks, False])[index])
    if len(chosen):
        read = read_structs(
            reader, "struct signal_struct", _GROUP, dead.process[chosen], losses
        )
        groups[chosen] = read["group"]
    return groups


def _tracers(
    reader: Reader, dead: Dead, row: Rows, tasks: TaskTable, losses: LossLog
) -> tuple[Numbers, Booleans]:
    """Return each task's tracer, and whether it is another process than the parent."""
    tracer = np.zeros(len(dead), np.int64)
    elsewhere = np.zeros(len(dead), np.bool_)
    traced = np.flatnonzero(dead.ptraced)
    if not len(traced):
        return tracer, elsewhere
    found = read_structs(
        reader, "struct task_struct", _TRACER, dead.parent[traced], losses
    )
    tracer[traced] = np.where(found.readable, found["tgid"], UNKNOWN)
    parents = np.where(row[traced] == NONE, 0, tasks["signal"][row[traced]])
    other = dead.parent[traced] != dead.real_parent[traced]
    elsewhere[traced] = other & (~found.readable | (found["process"] != parents))
    return tracer, elsewhere
