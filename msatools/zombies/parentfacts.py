# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the facts that explain why a process does not wait for its children."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.losses import Loss
from msatools.kernel.pidnamespaces import innermost_numbers
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, read_bits, read_structs
from msatools.tasks.identity import comm_text
from msatools.tasks.stackmemory import Rows
from msatools.tasks.states import (
    STOPPED,
    TRACED,
    WAKEKILL,
    letters,
    loads,
    read_frozen,
)
from msatools.tasks.table import TaskTable
from msatools.tasks.wait_options import WaitOpts, WaitOptsReader
from msatools.zombies.model import Disposition, Reaper
from msatools.zombies.sigactions import Actions, read_actions
from msatools.zombies.zombie_tasks import UNKNOWN, Aged

SIGCHLD = 17
"""The number on all architectures but Alpha, MIPS, PA-RISC and SPARC."""

_PROCESS = {"pending": ("shared_pending.signal.sig[0]",)}
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
            reader, "struct signal_struct", _PROCESS, processes, losses
        )
        self._subreaper = read_bits(
            reader, "struct signal_struct", "is_child_subreaper", processes
        )
        # Rows of all their threads, including dead leaders, grouped by process.
        rows, of = _members(tasks, processes)
        order = np.argsort(of, kind="stable")
        self._rows = rows[order]
        self._starts = np.searchsorted(of[order], np.arange(len(processes) + 1))
        part = TaskTable(tasks.records[self._rows], tasks.columns)
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
    """Return the rows of the threads of some processes, and each one's process."""
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
