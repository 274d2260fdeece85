# SPDX-License-Identifier: LGPL-2.1-or-later

"""What keeps a process from waiting for its children, as far as the kernel has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.losses import Loss
from msatools.kernel.pidnamespaces import innermost_numbers
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, read_bits, read_structs
from msatools.tasks.identity import comm_text
from msatools.tasks.stackmemory import Rows
from msatools.tasks.states import STOPPED, TRACED, letters, loads, read_frozen
from msatools.tasks.table import TaskTable
from msatools.tasks.wait_options import WaitOpts, WaitOptsReader
from msatools.zombies.model import Disposition, Reaper
from msatools.zombies.sigactions import Actions, read_actions
from msatools.zombies.zombie_tasks import UNKNOWN, Aged

SIGCHLD = 17
"""On all architectures but Alpha, MIPS, PA-RISC and SPARC."""

_WAKEKILL = 0x100
"""``TASK_WAKEKILL`` of ``task_struct.__state``."""

_PROCESS = {"pending": ("shared_pending.signal.sig[0]",)}
_THREAD = {
    "blocked": ("blocked.sig[0]",),
    "before": ("real_blocked.sig[0]",),
    "pending": ("pending.signal.sig[0]",),
    "sighand": ("sighand",),
}


@dataclass(frozen=True, kw_only=True)
class ParentFacts:
    """A process that has dead children."""

    process: int
    """Its ``struct signal_struct``."""

    pid: int
    comm: str
    row: int
    """Of its first thread in the table; of another if that one is not there."""

    living: tuple[int, ...]
    """The rows of its threads that are not dead."""

    state: str
    """Of ``row``, as in /proc; of the first that lives if that one is dead."""

    age_ns: int
    """How long it has been in it."""

    disposition: Disposition | None
    """What it does on SIGCHLD; ``None`` if unreadable, as the next three."""

    handler: int | None
    """The function that it calls then."""

    ignored: int | None
    caught: int | None
    """Masks of signals that are ignored, and of those that have a handler."""

    blocked: int | None
    """The mask of signals that its first living thread blocks; ``None`` if unreadable,
    as the next two."""

    blocks: bool | None
    """Whether all its living threads block SIGCHLD."""

    pending: bool | None
    """Whether SIGCHLD is pending."""

    blocking: frozenset[int]
    """The rows of its threads that block SIGCHLD."""

    sigwaits: bool
    """Whether a thread waits for SIGCHLD in sigtimedwait()."""

    reaper: Reaper | None
    waits: tuple[WaitOpts, ...] | None
    """Of its threads that are in wait(); ``None`` if unreadable."""

    stopped: frozenset[int]
    """The rows of its living threads that are stopped, also by a tracer, or frozen."""

    frozen: frozenset[int]
    """Those that are frozen."""

    stuck: frozenset[int]
    """The rows of those in uninterruptible sleep."""

    killable: bool
    """Whether SIGKILL ends the sleep of all of these."""


def read_facts(
    reader: Reader,
    tasks: TaskTable,
    processes: Addresses,
    aged: Aged,
    losses: LossLog,
) -> tuple[tuple[ParentFacts, ...], Nanoseconds]:
    """Read what there is of some processes, in bulk, and the waits of their threads.

    What cannot be read is counted.

    :param tasks: All tasks, or all threads of these.
    :param processes: Their ``struct signal_struct``, ascending; of each a thread is in
        the table.
    :return: The facts in that order; and by row of the table how long a thread of them
        has been in uninterruptible sleep, :data:`UNKNOWN` if it is not.
    """
    threads = _Threads(reader, tasks, processes, aged, losses)
    facts = tuple(threads.facts(place) for place in range(len(processes)))
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
        # All their rows, the dead leaders too, those of one process together.
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
        self._killable = (part["state"] & _WAKEKILL) != 0
        self._ages = aged.age_ns[self._rows]
        self.stuck_ns = np.full(len(tasks), UNKNOWN, np.int64)
        self.stuck_ns[self._rows[self._stuck]] = self._ages[self._stuck]
        self._first = self._firsts(part.leaders)
        self._init = self._are_init()
        self._actions = self._read_actions()
        self._waits = _reads_waits(reader, losses)

    def _firsts(self, leads: Booleans) -> list[int]:
        """Return the place of the first thread of each process."""
        firsts = []
        for place in range(len(self._processes)):
            span = np.arange(self._starts[place], self._starts[place + 1])
            firsts.append(int(span[np.argmax(leads[span])]))
        return firsts

    def _are_init(self) -> Booleans:
        """Return which of the processes are the first of a PID namespace.

        is_child_reaper() of include/linux/pid.h.
        """
        rows = self._rows[self._first]
        pids = self._tasks["thread_pid"][rows].astype(np.uint64)
        _, numbers = innermost_numbers(self._reader, pids, self._losses)
        first: Booleans = (numbers == 1) | (self._tasks["tgid"][rows] == 1)
        return first

    def _read_actions(self) -> Sequence[Actions | None]:
        """Read what each process does on signals: any thread of it tells."""
        sighands = np.zeros(len(self._processes), np.uint64)
        for place in range(len(sighands)):
            span = slice(self._starts[place], self._starts[place + 1])
            sighands[place] = self._own["sighand"][span].max(initial=0)
        return read_actions(self._reader, sighands, self._losses)

    def facts(self, place: int) -> ParentFacts:
        """Return the facts of one process."""
        span = np.arange(self._starts[place], self._starts[place + 1])
        living = span[self._lives[span]]
        first = self._first[place]
        shown = first if self._lives[first] or not len(living) else int(living[0])
        row = int(self._rows[first])
        actions = self._actions[place]
        own = self._own.readable[living]
        readable = bool(len(living)) and bool(own.all())
        blocked = self._own["blocked"][living]
        blocks = _has(blocked)
        waits_for = _has(self._own["before"][living] & ~blocked)
        pending = readable and bool(_has(self._own["pending"][living]).any())
        pending |= bool(_has(self._shared["pending"][place : place + 1])[0])
        shared = bool(self._shared.readable[place])
        stuck = living[self._stuck[living]]
        reaper: Reaper | None = "subreaper" if self._subreaper[place] else None
        return ParentFacts(
            process=int(self._processes[place]),
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
            reaper="init" if self._init[place] else reaper,
            waits=self._read_waits(place) if shared else None,
            stopped=self._some(living[self._stopped[living]]),
            frozen=self._some(living[self._frozen[living]]),
            stuck=self._some(stuck),
            killable=bool(self._killable[stuck].all()),
        )

    def _some(self, places: Rows) -> frozenset[int]:
        return frozenset(self._rows[places].tolist())

    def _read_waits(self, place: int) -> tuple[WaitOpts, ...] | None:
        if self._waits is None:
            return None
        process = int(self._processes[place])
        found = LossLog()
        waits = tuple(self._waits.of_process(process, found))
        if not found.lost:
            return waits
        # Of a queue that breaks off nothing says who else is in wait(). The process
        # may have ended meanwhile.
        self._losses.lose(Loss.WAITS)
        for note in found.notes.values():
            self._losses.lose(Loss.WAITS, note.text)
        return None


def _members(tasks: TaskTable, processes: Addresses) -> tuple[Rows, Rows]:
    """Find the rows of the threads of some processes, and of which each is."""
    if not len(processes):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    of = np.searchsorted(processes, tasks["signal"])
    of[of == len(processes)] = 0
    rows = np.flatnonzero(processes[of] == tasks["signal"])
    return rows, of[rows]


def _reads_waits(reader: Reader, losses: LossLog) -> WaitOptsReader | None:
    try:
        return reader.once(WaitOptsReader, lambda: WaitOptsReader(reader))
    except LookupError as error:
        losses.lose(Loss.WAITS, f"what is waited for by wait() is lost: {error}")
        return None


def _has(masks: npt.NDArray[np.uint64]) -> Booleans:
    """Return which sets of signals SIGCHLD is in."""
    found: Booleans = (masks >> np.uint64(SIGCHLD - 1) & np.uint64(1)) != 0
    return found
