# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which CPUs each thread may run on, the set it is in, and the threads that stray."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt

from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import BoundTask, CpuSet, SetTasks
from msatools.cpus.sets import BOOT, PARTITIONS, set_of_cpus
from msatools.kernel.cpumask import Cpus, Masks, cpus_of, different_masks
from msatools.kernel.losses import Loss
from msatools.kernel.ranges import ranges
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.tasks.identity import comm_text
from msatools.tasks.table import PF_KTHREAD, TaskTable
from msatools.tasks.task_cgroups import UNKNOWN, TaskCgroups, read_cpuset_groups

PF_NO_SETAFFINITY = 0x04000000
"""Of ``flags``: nobody but the kernel may say where it runs."""

Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Affinities:
    """Which CPUs each thread may run on."""

    masks: Masks
    """Each different mask once: shape ``(masks, nr_cpu_ids)``."""

    index: npt.NDArray[np.intp]
    """By thread: which of the masks is its own."""

    def cpus(self, row: int) -> Cpus:
        """List the CPUs of a thread: ``Cpus_allowed_list`` of /proc/PID/status."""
        return cpus_of(self.masks[self.index[row]])


def affinities(tasks: TaskTable, prog: drgn.Program) -> Affinities:
    """Return where all threads may run.

    :raises KeyError: if the number of CPUs is lost
    """
    return Affinities(*different_masks(tasks["cpus_mask"], prog))


def place(
    reader: Reader,
    sets: Sequence[CpuSet],
    tasks: TaskTable,
    cgroups: TaskCgroups,
    masks: CpuMasks,
    losses: LossLog,
) -> tuple[CpuSet, ...]:
    """Return the tasks of each set, among the threads that have not ended.

    What counts of a thread's mask is the CPUs that are online.

    A thread is a *member* of the cpuset sets that its own cpuset is in, up to the
    partition in force, and of that one. Where there is none it is one of the default
    set; but if it may run on CPUs of ``isolcpus`` or ``nohz_full`` alone it is one of
    these, as somebody has bound it there. Per-CPU threads, which the kernel has bound
    to one CPU for good, are members of none and counted apart: they have to be where
    they are, and tuna and cset leave them alone too.

    *Pinned* are the members that may run on some CPUs of the set alone. They are told
    in the innermost set only. Threads that only the kernel may move are left out, such
    as unbound workers.

    *Straying* are, in the innermost set of a thread, those that may run outside of it,
    or on CPUs alone that are offline. In a partition, ``isolcpus`` or ``nohz_full`` it
    is also the threads of others that may run on its CPUs: those that ``tuna isolate``
    and ``cset shield`` move away. But most threads may run on all CPUs, isolated ones
    too, where the scheduler takes none of them. So a thread that may run on all CPUs
    of the default set, or that is the kernel's, strays only if it runs on such a CPU,
    or was last there, as there it will wake up again.

    Without the number of CPUs, or tasks' masks, no set has its tasks told.
    """
    if not tasks.has("cpus_mask"):
        losses.lose(Loss.AFFINITIES, "where tasks may run cannot be told")
        return tuple(sets)
    placement = Placement(
        sets=sets,
        tasks=tasks,
        affinities=affinities(tasks, reader.prog),
        cpusets=read_cpuset_groups(reader, tasks, losses),
        cgroups=cgroups,
        masks=masks,
    )
    return tuple(
        replace(one, tasks=placement.tasks_of(number))
        for number, one in enumerate(sets)
    )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The threads by set; see :func:`place` for what the words mean.

    Sets are numbered as they come: 0 is the default one. What is by mask has a row for
    each different mask, what is by thread an element a thread.
    """

    sets: Sequence[CpuSet]
    tasks: TaskTable
    affinities: Affinities
    cpusets: TaskCgroups
    """The group that each thread has its cpuset from."""

    cgroups: TaskCgroups
    """The group that each thread is in, as reports show it."""

    masks: CpuMasks

    def tasks_of(self, number: int) -> SetTasks:
        """Return the tasks of one set."""
        straying = {**self._leaving(number), **self._intruding(number)}
        # Those that somebody has started first: there are many of the kernel's.
        order = sorted(straying, key=lambda row: (self._kernel[row], row))
        return SetTasks(
            members=int(np.count_nonzero(self._members(number))),
            pinned=tuple(self._task(row, "") for row in _rows(self._pinned(number))),
            straying=tuple(self._task(row, straying[row]) for row in order),
            percpu_threads=int(np.count_nonzero(self._percpu_of(number))),
        )

    def _members(self, number: int) -> Booleans:
        if number == 0:
            return _both(self._placed, self._owner == 0)
        if number in self._boot:
            lies_in = _within(self._reach, self._cpus[number])
            return self._bound & self._by_thread(lies_in)
        has = np.array([number in chain for chain in self._chains] or [False], np.bool_)
        return _both(self._placed, has[self._cpuset])

    def _pinned(self, number: int) -> Booleans:
        cpus = self._cpus[number]
        less = _within(self._reach, cpus) & _some(self._reach != cpus)
        inside = _both(self._placed & ~self._fixed, self._inner == number)
        return inside & self._by_thread(less)

    def _leaving(self, number: int) -> dict[int, str]:
        """Find those whose innermost set it is, and who may run elsewhere or nowhere.

        :return: Why, by row.
        """
        inside = self._placed & (self._inner == number)
        nowhere = self._by_thread(~_some(self._reach))
        why = "all CPUs that it may run on are offline"
        found = dict.fromkeys(_rows(inside & nowhere), why)
        cpus = self._cpus[number]
        if number == 0 or number in self._boot or not cpus.any():
            return found
        outside = self._reach & ~cpus
        for row in _rows(inside & self._by_thread(_some(outside))):
            where = ranges(cpus_of(outside[self.affinities.index[row]]))
            found[row] = f"may run on {where}, which {self.sets[number].name} has not"
        return found

    def _intruding(self, number: int) -> dict[int, str]:
        """Find those of others on CPUs that are the set's own.

        :return: Why, by row.
        """
        if number == 0 or self.sets[number].kind not in PARTITIONS + BOOT:
            return {}
        theirs = self._reach & self._own[number]
        others = self._placed & ~self._bound & (self._owner != number)
        others &= self._by_thread(_some(theirs))
        anywhere = self._by_thread(~_some(self._cpus[0] & ~self._reach))
        # A number that no CPU has is of a damaged dump.
        cpu = np.minimum(self.tasks["cpu"], theirs.shape[1] - 1).astype(np.intp)
        there = _both(others, self.tasks["cpu"] == cpu)
        there &= theirs[self.affinities.index, cpu]
        found = {}
        for row in _rows(there | (others & ~anywhere & ~self._kernel)):
            where = (
                f"last on {cpu[row]}"
                if there[row]
                else f"may run on {ranges(cpus_of(theirs[self.affinities.index[row]]))}"
            )
            found[row] = f"{where}, and is of {self.sets[self._inner[row]].name}"
        return found

    def _percpu_of(self, number: int) -> Booleans:
        # Those of CPUs that are offline are parked.
        cpus = self._cpus[number] | self._own[number]
        return self._percpu & self._by_thread(_some(self.affinities.masks & cpus))

    def _task(self, row: int, why: str) -> BoundTask:
        return BoundTask(
            pid=int(self.tasks["pid"][row]),
            comm=comm_text(self.tasks["comm"][row]),
            cpus=self.affinities.cpus(row),
            cpu=int(self.tasks["cpu"][row]),
            cgroup=self.cgroups.path(row),
            why=why,
            kthread=bool(self._kernel[row]),
        )

    # --- sets

    @cached_property
    def _cpus(self) -> Masks:
        """The CPUs of each set."""
        return np.array([self._vector(one.cpus) for one in self.sets], np.bool_)

    @cached_property
    def _own(self) -> Masks:
        """The CPUs that are named by each set, offline ones too."""
        names = set_of_cpus(self.sets, self.masks.possible)
        return np.array(
            [
                self._vector(cpu for cpu, name in names.items() if name == one.name)
                for one in self.sets
            ],
            np.bool_,
        )

    @cached_property
    def _boot(self) -> tuple[int, ...]:
        """The sets of the command line."""
        return tuple(number for number, one in enumerate(self.sets) if one.kind in BOOT)

    @cached_property
    def _chains(self) -> list[list[int]]:
        """The sets that the threads of each cpuset are in, the innermost first.

        The last is the partition in force, or the default set.
        """
        numbers = {one.name: number for number, one in enumerate(self.sets)}
        return [self._chain(path, numbers) for path in self.cpusets.paths]

    def _chain(self, path: str, numbers: dict[str, int]) -> list[int]:
        chain: list[int] = []
        while path.strip("/"):
            number = numbers.get(path)
            path = path.rpartition("/")[0]
            if number is None:
                continue
            chain.append(number)
            if self.sets[number].kind in PARTITIONS:
                return chain
        return [*chain, 0]

    def _vector(self, cpus: Iterable[int]) -> npt.NDArray[np.bool_]:
        vector = np.zeros(self.affinities.masks.shape[1], np.bool_)
        vector[list(cpus)] = True
        return vector

    # --- masks

    @cached_property
    def _reach(self) -> Masks:
        """The CPUs of each mask that are online."""
        return _both(self.affinities.masks, self._vector(self.masks.online))

    @cached_property
    def _on_boot(self) -> Booleans:
        """Whether each mask has CPUs of the command line's sets alone."""
        cpus = np.zeros(self._reach.shape[1], np.bool_)
        for number in self._boot:
            cpus |= self._cpus[number]
        return _within(self._reach, cpus)

    @cached_property
    def _boot_set(self) -> Numbers:
        """The set of the command line that each mask lies in, or else reaches into."""
        found = np.zeros(len(self._reach), np.intp)
        # What comes later counts: lying in one, and the first of them.
        for number in reversed(self._boot):
            found[_some(self._reach & self._cpus[number])] = number
        for number in reversed(self._boot):
            found[_within(self._reach, self._cpus[number])] = number
        return found

    # --- threads

    def _by_thread(self, by_mask: Booleans) -> Booleans:
        found: Booleans = by_mask[self.affinities.index]
        return found

    @cached_property
    def _kernel(self) -> Booleans:
        return _is_set(self.tasks["flags"], PF_KTHREAD)

    @cached_property
    def _fixed(self) -> Booleans:
        """Whether only the kernel may move it."""
        return self._kernel & _is_set(self.tasks["flags"], PF_NO_SETAFFINITY)

    @cached_property
    def _percpu(self) -> Booleans:
        one = self._by_thread(np.count_nonzero(self.affinities.masks, axis=1) == 1)
        return self._alive & self._fixed & one

    @cached_property
    def _alive(self) -> Booleans:
        alive: Booleans = self.tasks["exit_state"] == 0
        return alive

    @cached_property
    def _placed(self) -> Booleans:
        """Whether it is known to be of a set."""
        found = self._alive & ~self._percpu
        if self.cpusets.paths:
            found &= self.cpusets.index != UNKNOWN
        return found

    @cached_property
    def _cpuset(self) -> Numbers:
        """Which path is that of its cpuset; the first if that is not known."""
        return np.maximum(self.cpusets.index, 0).astype(np.intp)

    @cached_property
    def _partition(self) -> Numbers:
        """The partition in force that it is in, or the default set."""
        last = np.array([chain[-1] for chain in self._chains] or [0], np.intp)
        return last[self._cpuset]

    @cached_property
    def _bound(self) -> Booleans:
        """Whether it is bound to CPUs of the command line's sets."""
        bound = self._placed & self._by_thread(self._on_boot)
        return _both(bound, self._partition == 0)

    @cached_property
    def _owner(self) -> Numbers:
        """The set that it has its CPUs from."""
        boot = self._boot_set[self.affinities.index]
        return np.where(self._bound, boot, self._partition)

    @cached_property
    def _inner(self) -> Numbers:
        """The innermost set that it is in."""
        first = np.array([chain[0] for chain in self._chains] or [0], np.intp)
        inner = first[self._cpuset]
        return np.where(inner == 0, self._owner, inner)


def _within(masks: Masks, cpus: npt.NDArray[np.bool_]) -> Booleans:
    """Return which masks have CPUs, and none but some of those."""
    return _some(masks) & ~_some(masks & ~cpus)


def _some(masks: Masks) -> Booleans:
    """Return which masks have any CPU."""
    found: Booleans = np.any(masks, axis=1)
    return found


def _both(one: Booleans, other: Booleans) -> Booleans:
    found: Booleans = one & other
    return found


def _is_set(flags: npt.NDArray[np.uint32], flag: int) -> Booleans:
    found: Booleans = (flags & np.uint32(flag)) != 0
    return found


def _rows(wanted: Booleans) -> list[int]:
    rows: list[int] = np.flatnonzero(wanted).tolist()
    return rows
