# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find heirs of dead children if a parent ends; PID namespaces held by zombies."""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, DamagedDataError, MissingError
from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.pids import PidNamespace, innermost_numbers, read_pid_namespaces
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.selfdesc.find import object_at
from msatools.tasks.identity import comm_text
from msatools.tasks.table import PF_EXITING, TaskTable
from msatools.tasks.unwind import Rows
from msatools.zombies.model import Heir, HeldNamespace, ZombieGroup
from msatools.zombies.parents import SIGCHLD, Dead

# --- Find the process that would inherit the dead children of a parent that ends.
#
# kernel/exit.c, find_new_reaper(): the children of a thread go to another thread of its
# process; those of a process to the nearest ancestor in the same PID namespace that is
# a subreaper (PR_SET_CHILD_SUBREAPER), else to init of the namespace.


_IGNORE = 1
_NO_CHILD_WAIT = 2
"""``SA_NOCLDWAIT``."""

_MOST_ABOVE = 1 << 16
"""Maximum number of ancestors; more are taken for a loop."""


def find_heirs(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> tuple[Heir, ...]:
    """Return the process that would inherit the children of each parent of dead tasks.

    Parents that are not in the table are left out; note those that cannot be read.

    :param tasks: All tasks.
    :param zombies: Rows of the dead tasks in the table.
    """
    family = _Family(reader, tasks, zombies, losses)
    parents = distinct(tasks["real_parent"][zombies]).tolist()
    rows = sorted(row for p in parents if (row := family.row(p)) is not None)
    processes = {int(tasks["signal"][row]): row for row in rows}
    family.read_spaces([*processes.values()])
    heirs = []
    for row in processes.values():
        try:
            heirs.append(family.heir(row))
        except LOST as error:
            losses.lose(
                Loss.HEIRS,
                f"cannot determine who inherits the dead of a parent: {error}",
            )
    return tuple(sorted(heirs, key=lambda heir: heir.ppid))


class _Process(Struct, frozen=True):
    """Members of a ``struct signal_struct`` about children."""

    takes_orphans: bool
    may_be_above: bool
    """Whether an ancestor may be a subreaper (``has_child_subreaper``)."""

    has_waited: bool
    """Whether it has reaped a child that was ever switched."""


class _Family:
    """Processes and their parents."""

    def __init__(
        self, reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
    ) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._tasks = tasks
        self._zombies = zombies
        self._losses = losses
        self._process = lru_cache(maxsize=None)(self._read_process)
        self._space = lru_cache(maxsize=None)(self._find_space)
        self._reaps = lru_cache(maxsize=None)(self._find_reaps)
        self._lives = lru_cache(maxsize=None)(self._find_lives)

    def row(self, address: int) -> int | None:
        """Return the row of a task; ``None`` if not found."""
        return self._rows.get(address)

    @cached_property
    def _rows(self) -> dict[int, int]:
        addresses = self._tasks["address"].tolist()
        return dict(zip(addresses, range(len(addresses)), strict=True))

    def heir(self, row: int) -> Heir:
        """Return the heir of a task's process.

        :raises drgn.FaultError: if something cannot be read
        :raises MissingError: if the namespace or its init is not found
        """
        space = self._space(row)
        first = self.row(space.init)
        if first is None:
            raise MissingError(f"PID namespace {space.inode} has no first process")
        ppid = int(self._tasks["tgid"][row])
        if self._signal(first) == self._signal(row):
            why = f"PID namespace {space.inode} ends with it"
            if not space.level:
                why = "the kernel panics without it"
            return Heir(ppid=ppid, heir=None, heir_comm=None, why=why, reaps=None)
        above = self._subreaper(row, space)
        if above is not None:
            return self._heir(ppid, above, "subreaper")
        return self._heir(ppid, first, f"init of PID namespace {space.inode}")

    def _subreaper(self, row: int, space: PidNamespace) -> int | None:
        """Return the row of the nearest subreaper above; ``None`` if there is none."""
        if not self._process(self._signal(row)).may_be_above:
            return None
        for _ in range(_MOST_ABOVE):
            above = self.row(int(self._tasks["real_parent"][row]))
            # The idle task, the ancestor of all, is not in the table.
            if above is None or self._space(above).level != space.level:
                return None
            row = above
            if self._process(self._signal(row)).takes_orphans and self._lives(row):
                return row
        raise DamagedDataError("parents are in a loop")

    def _find_lives(self, row: int) -> bool:
        """Return whether a thread of a process is not exiting."""
        own = self._tasks["signal"] == self._tasks["signal"][row]
        return bool(np.any(self._tasks["flags"][own] & PF_EXITING == 0))

    def _heir(self, ppid: int, row: int, why: str) -> Heir:
        leader = self.row(int(self._tasks["group_leader"][row]))
        return Heir(
            ppid=ppid,
            heir=int(self._tasks["tgid"][row]),
            heir_comm=comm_text(self._tasks["comm"][row if leader is None else leader]),
            why=why,
            reaps=self._reaps(row),
        )

    def _find_reaps(self, row: int) -> bool | None:
        """Return whether a process reaps its children; ``None`` if unknown.

        True if the kernel reaps them for it. False if it has dead children that only it
        can reap. Otherwise true if it has ever reaped one.
        """
        if self._leaves_it_to_kernel(row):
            return True
        if self._has_dead(row):
            return False
        return self._process(self._signal(row)).has_waited or None

    def _leaves_it_to_kernel(self, row: int) -> bool:
        address = int(self._tasks["address"][row])
        task = object_at(self._prog, "struct task_struct", address)
        if not task.sighand:
            return False
        action = task.sighand.action[SIGCHLD - 1].sa
        ignores = action.sa_handler.value_() == _IGNORE
        return ignores or bool(action.sa_flags.value_() & _NO_CHILD_WAIT)

    def _has_dead(self, row: int) -> bool:
        """Return whether it has dead children without living threads or a tracer."""
        tasks, dead = self._tasks, self._zombies
        members = tasks["address"][tasks["signal"] == tasks["signal"][row]]
        own = dead[np.isin(tasks["real_parent"][dead], members)]
        own = own[(tasks["ptrace"][own] == 0) & tasks.leaders[own]]
        living = tasks["signal"][tasks["exit_state"] == 0]
        return not bool(np.all(np.isin(tasks["signal"][own], living)))

    def _signal(self, row: int) -> int:
        return int(self._tasks["signal"][row])

    def _read_process(self, signal: int) -> _Process:
        process = object_at(self._prog, "struct signal_struct", signal)
        # Bit fields: read_structs() does not read them.
        process = process.read_()
        switches = process.cnvcsw + process.cnivcsw
        return _Process(
            takes_orphans=bool(process.is_child_subreaper),
            may_be_above=bool(process.has_child_subreaper),
            has_waited=bool(switches),
        )

    def read_spaces(self, rows: Sequence[int]) -> None:
        """Read the PID namespaces of some tasks at once."""
        pids = self._tasks["thread_pid"][rows].astype(np.uint64)
        innermost, _ = innermost_numbers(self._reader, pids, self._losses)
        new = distinct(innermost)
        known = np.array([*self._spaces], np.uint64)
        new = new[~np.isin(new, known, assume_unique=True)]
        self._spaces |= read_pid_namespaces(self._reader, new, self._losses)
        self._innermost |= dict(zip(rows, innermost.tolist(), strict=True))

    def _find_space(self, row: int) -> PidNamespace:
        if row not in self._innermost:
            self.read_spaces([row])
        address = self._innermost[row]
        if address not in self._spaces:
            raise DamagedDataError("cannot read a task's PID namespace")
        return self._spaces[address]

    @cached_property
    def _spaces(self) -> dict[int, PidNamespace]:
        return {}

    @cached_property
    def _innermost(self) -> dict[int, int]:
        """Address of each task's PID namespace, by the task's row."""
        return {}


# --- PID namespaces, such as those of containers, that end only once zombies are
# reaped.
#
# When the first process of a PID namespace exits, it kills all others, and waits until
# none has a PID there (kernel/pid_namespace.c, zap_pid_ns_processes()). It can
# reap its own children, but not a task that is traced from outside, nor one whose
# parent is outside, as of a program that was started inside with nsenter.


def with_held_namespaces(
    reader: Reader,
    tasks: TaskTable,
    dead: Dead,
    age_ns: Nanoseconds,
    groups: Iterable[ZombieGroup],
    losses: LossLog,
) -> tuple[ZombieGroup, ...]:
    """Add to groups the PID namespaces that cannot end before their zombies are reaped.

    :param age_ns: Time of each task in its state.
    """
    held = _held(reader, tasks, dead, age_ns, losses)
    if not held:
        return tuple(groups)
    return tuple(
        replace(
            group,
            holds=tuple(
                namespace
                for namespace, pids in held.items()
                if not pids.isdisjoint(group.pids)
            ),
        )
        for group in groups
    )


def _held(
    reader: Reader,
    tasks: TaskTable,
    dead: Dead,
    age_ns: Nanoseconds,
    losses: LossLog,
) -> dict[HeldNamespace, set[int]]:
    """Map each namespace whose init has exited to the zombies that it waits for."""
    if not dead.ns_pid.any():
        return {}  # all are in the initial namespace
    spaces, _ = innermost_numbers(reader, dead.thread_pid, losses)
    namespaces = read_pid_namespaces(reader, spaces, losses)
    rows: list[int] = tasks["address"].tolist()
    row_of = {address: row for row, address in enumerate(rows)}
    pids: list[int] = tasks["pid"][dead.row].tolist()
    found: dict[HeldNamespace, set[int]] = {}
    for place, space in enumerate(spaces.tolist()):
        for each in _with_ancestors(namespaces, space):
            row = row_of.get(each.init)
            if row is None or not _waits_to_end(tasks, row):
                continue
            if tasks["signal"][row] == dead.process[place]:
                continue
            held = HeldNamespace(
                namespace=each.inode,
                pid=int(tasks["pid"][row]),
                comm=comm_text(tasks["comm"][row]),
                age_ns=int(age_ns[row]),
            )
            found.setdefault(held, set()).add(pids[place])
    return found


def _with_ancestors(
    namespaces: dict[int, PidNamespace], space: int
) -> Iterable[PidNamespace]:
    """Yield a namespace and those around it, without the initial one."""
    while (found := namespaces.get(space)) is not None and found.level > 0:
        yield found
        space = found.parent


def _waits_to_end(tasks: TaskTable, row: int) -> bool:
    """Return whether a task exits, but is not dead yet."""
    exits = int(tasks["flags"][row]) & PF_EXITING
    return bool(exits) and not int(tasks["exit_state"][row])
