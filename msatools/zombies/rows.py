# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make rows of dead tasks, groups by parent and verdict, and dead first threads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.tasks.identity import TaskCgroups, Users, comm_text
from msatools.tasks.sampler import AgeBound
from msatools.tasks.states import WAKEKILL, loads
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows
from msatools.zombies.model import Heir, ParentThread, Zombie, ZombieGroup, ending
from msatools.zombies.parents import GROUP_EXIT, NONE, UNKNOWN, Dead, Parents
from msatools.zombies.verdicts import BRIEF_NS, VERDICTS, advice, evidence


class Found(Struct, frozen=True):
    """The data of dead tasks, in the order of ``dead``; but ``tasks`` has all tasks."""

    tasks: TaskTable
    dead: Dead
    parents: Parents
    verdicts: npt.NDArray[np.uint8]
    users: Users
    cgroups: TaskCgroups

    def parent(self, place: int) -> int:
        """Return the PID of the parent of a dead task; 0 if unknown."""
        parent_index = int(self.parents.index[place])
        return 0 if parent_index == NONE else self.parents.facts[parent_index].pid


class ZombieRows(Sequence[Zombie]):
    """Rows of dead tasks, built on access: there may be very many."""

    def __init__(self, found: Found, places: Rows) -> None:
        self._found = found
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Zombie]:
        return map(self._row, self._places.tolist())

    @overload
    def __getitem__(self, index: int) -> Zombie: ...

    @overload
    def __getitem__(self, index: slice) -> "ZombieRows": ...

    def __getitem__(self, index: int | slice) -> "Zombie | ZombieRows":
        """Return a row, or the rows of a part."""
        if isinstance(index, slice):
            return ZombieRows(self._found, self._places[index])
        return self._row(int(self._places[index]))

    def _row(self, place: int) -> Zombie:
        found, dead = self._found, self._found.dead
        row = int(dead.row[place])
        parent_index = int(found.parents.index[place])
        facts = None if parent_index == NONE else found.parents.facts[parent_index]
        tracer = int(found.parents.tracer[place])
        return Zombie(
            pid=int(found.tasks["pid"][row]),
            comm=comm_text(found.tasks["comm"][row]),
            ppid=0 if facts is None else facts.pid,
            parent_comm=None if facts is None else facts.comm,
            uid=_known(found.users.uid[place]),
            cgroup=found.cgroups.path(place),
            exit_code=int(dead.exit_code[place]),
            age_ns=int(dead.age_ns[place]),
            age_bound=AgeBound(int(dead.age_bound[place])).name.lower(),
            verdict=VERDICTS[found.verdicts[place]],
            namespace=_known(dead.namespace[place]),
            ns_pid=int(dead.ns_pid[place]) or None,
            threads=max(int(dead.threads[place]), 0),
            tracer=tracer if tracer > 0 else None,
        )


def groups(
    found: Found,
    places: Rows,
    doing: Sequence[tuple[ParentThread, ...]],
    heirs: Mapping[int, Heir],
) -> tuple[ZombieGroup, ...]:
    """
    Group some dead tasks by parent and verdict, the largest group first.

    :param places: Indices of the dead tasks.
    :param doing: Activities of each parent's threads, by the index of the parent.
    :param heirs: Heirs by the PID of the parent.
    """
    keys = found.parents.index[places] * len(VERDICTS) + found.verdicts[places]
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=keys[order][:1] - 1))
    made = [
        _group(found, places[part], doing, heirs)
        for part in np.split(order, starts[1:])
        if len(part)
    ]
    return tuple(sorted(made, key=lambda group: (-group.count, group.ppid)))


def _group(
    found: Found,
    places: Rows,
    doing: Sequence[tuple[ParentThread, ...]],
    heirs: Mapping[int, Heir],
) -> ZombieGroup:
    dead, first = found.dead, int(places[0])
    rows = dead.row[places]
    parent_index = int(found.parents.index[first])
    facts = None if parent_index == NONE else found.parents.facts[parent_index]
    verdict = VERDICTS[found.verdicts[first]]
    tracers = found.parents.tracer[places]
    traced: list[int] = tracers[tracers > 0].tolist()
    ended: Counter[str] = Counter()
    for code, count in Counter(dead.exit_code[places].tolist()).items():
        ended[ending(code)] += count
    index = {*found.cgroups.index[places].tolist()}
    paths = {found.cgroups.paths[each] for each in index if each >= 0}
    uids = {*found.users.uid[places].tolist()}
    spaces = {*dead.namespace[places].tolist()}
    ppid = 0 if facts is None else facts.pid
    oldest_ns = int(dead.age_ns[places].max())
    return ZombieGroup(
        ppid=ppid,
        parent_comm=None if facts is None else facts.comm,
        count=len(places),
        verdict=verdict,
        evidence=evidence(
            verdict, facts, () if facts is None else doing[parent_index], traced
        ),
        advice=advice(
            verdict, facts, tracers=traced, heir=heirs.get(ppid), age_ns=oldest_ns
        ),
        parent_state=None if facts is None else facts.state,
        parent_age_ns=None if facts is None else facts.age_ns,
        min_age_ns=int(dead.age_ns[places].min()),
        max_age_ns=oldest_ns,
        exit_codes=dict(sorted(ended.items(), key=lambda item: (-item[1], item[0]))),
        uids=tuple(sorted(uids - {UNKNOWN})),
        cgroups=tuple(sorted(paths)),
        namespaces=tuple(sorted(spaces - {UNKNOWN})),
        pids=found.tasks["pid"][rows].tolist(),
        heir=heirs[ppid].heir if ppid in heirs else None,
    )


def _known(value: "np.int64") -> int | None:
    return None if value == UNKNOWN else int(value)


# --- Dead first threads of processes: what keeps the other threads alive.


class Survivors(Struct, frozen=True):
    """The living threads of processes whose first thread has ended."""

    stuck: tuple[int, ...]
    """IDs of threads in unkillable sleep for :data:`BRIEF_NS` or longer, the longest
    first."""

    ending: bool
    """Whether all the processes are ending: they exit, or were killed."""


def read_survivors(
    reader: Reader,
    tasks: TaskTable,
    age_ns: Nanoseconds,
    group: ZombieGroup,
    losses: LossLog,
) -> Survivors:
    """Return the living threads of a group's processes that keep these from ending.

    :param age_ns: Time of each task in its state.
    """
    of_group = np.isin(tasks["tgid"], np.array([*group.pids], np.int64))
    rows = np.flatnonzero(of_group & (tasks["exit_state"] == 0))
    part = tasks.only(rows)
    stuck = loads(part) & ((part["state"] & WAKEKILL) == 0)
    stuck &= age_ns[rows] >= BRIEF_NS
    signals = distinct(part["signal"].astype(np.uint64))
    read = read_structs(
        reader, "struct signal_struct", {"flags": ("flags",)}, signals, losses
    )
    ending = len(signals) > 0 and bool(
        (read.readable & ((read["flags"] & GROUP_EXIT) != 0)).all()
    )
    order = np.argsort(-age_ns[rows][stuck], kind="stable")
    return Survivors(tuple(part["pid"][stuck][order].tolist()), ending)


def with_survivors(group: ZombieGroup, survivors: Survivors) -> ZombieGroup:
    """Add evidence and advice on the other threads to a group of dead leaders."""
    if not survivors.stuck and not survivors.ending:
        return group
    if not survivors.stuck:
        return replace(
            group,
            evidence=replace(
                group.evidence, text="its first thread has ended, and the others exit"
            ),
            advice="look again: its other threads exit; if they stay, see what they "
            "wait for: msa-prstat -L",
        )
    first, more = survivors.stuck[0], len(survivors.stuck) - 1
    who = f"thread {first}" + (f" and {more} more" if more else "")
    are = "are" if more else "is"
    killed = ", though the process is to end" if survivors.ending else ""
    text = (
        f"its first thread has ended, and {who} {are} in uninterruptible sleep{killed}"
    )
    advice = (
        f"end what thread {first} waits for (see msa-locks -p {first}): until then "
        "kill -9 does nothing to it"
    )
    return replace(group, evidence=replace(group.evidence, text=text), advice=advice)
