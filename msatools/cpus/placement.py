# SPDX-License-Identifier: LGPL-2.1-or-later

"""Assign threads to sets, by cpuset and affinity; find pinned and straying threads."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import BoundTask, CpuSet, SetTasks
from msatools.cpus.sets import BOOT, PARTITIONS, set_of_cpus
from msatools.kernel.percpu import Cpus, Masks, cpus_of, different_masks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Booleans
from msatools.reports.units import ranges
from msatools.tasks.identity import UNKNOWN, TaskCgroups, comm_text, read_cpuset_groups
from msatools.tasks.table import PF_KTHREAD, TaskTable

PF_NO_SETAFFINITY = 0x04000000
"""A bit of ``flags``: user space may not change the affinity."""

Numbers = npt.NDArray[np.intp]


class Affinities(Struct, frozen=True):
    """The affinity mask of each thread."""

    masks: Masks
    """Each distinct mask once: shape ``(masks, nr_cpu_ids)``."""

    index: npt.NDArray[np.intp]
    """Row in *masks* of each thread's mask."""

    def cpus(self, row: int) -> Cpus:
        """Return the CPUs of a thread: ``Cpus_allowed_list`` of /proc/PID/status."""
        return cpus_of(self.masks[self.index[row]])


def affinities(tasks: TaskTable, prog: drgn.Program) -> Affinities:
    """Return the affinity of all threads.

    :raises MissingMemberError: if the number of CPUs was unknown, so that *tasks* has
        no masks
    :raises drgn.FaultError: if the number of CPUs cannot be read now
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
    """Add to each set its tasks, out of the threads that have not ended.

    Only online CPUs of a thread's mask count.

    A thread is a *member* of the sets of its cpuset and of the cpusets above it, up to
    and including the innermost valid partition. If there is no such partition, it is a
    member of the default set; but if it may only run on CPUs of ``isolcpus`` or
    ``nohz_full``, it was bound to them, and is a member of that set. Per-CPU kernel
    threads are not members of any set, and counted separately: they cannot be moved,
    and tuna and cset skip them, too.

    *Pinned* threads are members that may run on a part of the set's CPUs only. They are
    listed in their innermost set, without threads that only the kernel may move, such
    as unbound workers.

    *Straying* threads of a set are those that have it as their innermost set and may
    run outside of it, or only on offline CPUs. For a partition, ``isolcpus`` or
    ``nohz_full`` they are also threads of other sets that may run on its CPUs: those
    that ``tuna isolate`` and ``cset shield`` move away. But most threads may run on all
    CPUs, including isolated ones, to which the scheduler does not move them. So a
    kernel thread, or one that may run on all CPUs of the default set, strays only if it
    is or was last on such a CPU, where it will wake up again.

    If the number of CPUs or the masks of tasks are unknown, sets have no tasks.
    """
    if not tasks.has("cpus_mask"):
        losses.lose(Loss.AFFINITIES, "where tasks may run is unknown")
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


class Placement(Struct, frozen=True, kw_only=True, dict=True):
    """The threads by set; see :func:`place` for the terms.

    Sets are numbered by their position in *sets*; 0 is the default set. Arrays have one
    element for each distinct mask ("by mask") or for each thread ("by thread").
    """

    sets: Sequence[CpuSet]
    tasks: TaskTable
    affinities: Affinities
    cpusets: TaskCgroups
    """The control group of each thread's cpuset."""

    cgroups: TaskCgroups
    """The control group of each thread, as shown in reports."""

    masks: CpuMasks

    def tasks_of(self, number: int) -> SetTasks:
        """Return the tasks of one set."""
        straying = {**self._leaving(number), **self._intruding(number)}
        # Kernel threads last: there are many.
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
        """Find threads whose innermost set this is, but that may run on other CPUs, or
        on no online CPU.

        :return: The reasons, by row of the thread.
        """
        inside = self._placed & (self._inner == number)
        nowhere = self._by_thread(~_some(self._reach))
        why = "all CPUs that it may run on are offline"
        reasons = dict.fromkeys(_rows(inside & nowhere), why)
        cpus = self._cpus[number]
        if number == 0 or number in self._boot or not cpus.any():
            return reasons
        outside = self._reach & ~cpus
        for row in _rows(inside & self._by_thread(_some(outside))):
            where = ranges(cpus_of(outside[self.affinities.index[row]]))
            reasons[row] = f"may run on {where}, which {self.sets[number].name} has not"
        return reasons

    def _intruding(self, number: int) -> dict[int, str]:
        """Find threads of other sets that were last, or may run, on the set's own CPUs.

        :return: The reasons, by row of the thread.
        """
        if number == 0 or self.sets[number].kind not in PARTITIONS + BOOT:
            return {}
        theirs = self._reach & self._own[number]
        others = self._placed & ~self._bound & (self._owner != number)
        others &= self._by_thread(_some(theirs))
        anywhere = self._by_thread(~_some(self._cpus[0] & ~self._reach))
        # In a damaged dump a thread's CPU number may be too large.
        cpu = np.minimum(self.tasks["cpu"], theirs.shape[1] - 1).astype(np.intp)
        there = _both(others, self.tasks["cpu"] == cpu)
        there &= theirs[self.affinities.index, cpu]
        reasons = {}
        for row in _rows(there | (others & ~anywhere & ~self._kernel)):
            where = (
                f"last on {cpu[row]}"
                if there[row]
                else f"may run on {ranges(cpus_of(theirs[self.affinities.index[row]]))}"
            )
            reasons[row] = f"{where}, and is of {self.sets[self._inner[row]].name}"
        return reasons

    def _percpu_of(self, number: int) -> Booleans:
        # With CPUs that are offline, too: their per-CPU threads are parked there.
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
        """The CPUs that belong to each set by :func:`set_of_cpus`, offline ones too."""
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
        """Numbers of the sets of the command line."""
        return tuple(number for number, one in enumerate(self.sets) if one.kind in BOOT)

    @cached_property
    def _chains(self) -> list[list[int]]:
        """Numbers of the sets that threads of each cpuset belong to, innermost first.

        The last is the innermost valid partition, or the default set.
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
        """The online CPUs of each mask."""
        return _both(self.affinities.masks, self._vector(self.masks.online))

    @cached_property
    def _on_boot(self) -> Booleans:
        """Whether each mask has only CPUs of the command line's sets."""
        cpus = np.zeros(self._reach.shape[1], np.bool_)
        for number in self._boot:
            cpus |= self._cpus[number]
        return _within(self._reach, cpus)

    @cached_property
    def _boot_set(self) -> Numbers:
        """Number of the set of the command line that contains each mask, or else
        overlaps it; 0 if none does."""
        sets = np.zeros(len(self._reach), np.intp)
        # Later assignments win: so the first set that contains a mask does.
        for number in reversed(self._boot):
            sets[_some(self._reach & self._cpus[number])] = number
        for number in reversed(self._boot):
            sets[_within(self._reach, self._cpus[number])] = number
        return sets

    # --- threads

    def _by_thread(self, by_mask: Booleans) -> Booleans:
        found: Booleans = by_mask[self.affinities.index]
        return found

    @cached_property
    def _kernel(self) -> Booleans:
        return _is_set(self.tasks["flags"], PF_KTHREAD)

    @cached_property
    def _fixed(self) -> Booleans:
        """Whether only the kernel may move each thread."""
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
        """Whether each thread is assigned to sets: it is alive, its cpuset is known,
        and it is no per-CPU kernel thread."""
        placed = self._alive & ~self._percpu
        if self.cpusets.paths:
            placed &= self.cpusets.index != UNKNOWN
        return placed

    @cached_property
    def _cpuset(self) -> Numbers:
        """Index in ``cpusets.paths`` of each thread's cpuset; 0 if unknown."""
        return np.maximum(self.cpusets.index, 0).astype(np.intp)

    @cached_property
    def _partition(self) -> Numbers:
        """Number of each thread's innermost valid partition; 0 for the default set."""
        last = np.array([chain[-1] for chain in self._chains] or [0], np.intp)
        return last[self._cpuset]

    @cached_property
    def _bound(self) -> Booleans:
        """Whether each thread may only run on CPUs of the command line's sets, and is
        in no partition."""
        bound = self._placed & self._by_thread(self._on_boot)
        return _both(bound, self._partition == 0)

    @cached_property
    def _owner(self) -> Numbers:
        """Number of the set that provides each thread's CPUs: a partition, a set of the
        command line, or the default set."""
        boot = self._boot_set[self.affinities.index]
        return np.where(self._bound, boot, self._partition)

    @cached_property
    def _inner(self) -> Numbers:
        """Number of the innermost set of each thread."""
        first = np.array([chain[0] for chain in self._chains] or [0], np.intp)
        inner = first[self._cpuset]
        return np.where(inner == 0, self._owner, inner)


def _within(masks: Masks, cpus: npt.NDArray[np.bool_]) -> Booleans:
    """Return which masks are not empty and have no CPU outside of *cpus*."""
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
