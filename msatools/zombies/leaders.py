# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dead first threads of processes: what keeps the other threads alive."""

from dataclasses import replace

import numpy as np

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.records import dataclass
from msatools.tasks.states import loads
from msatools.tasks.table import TaskTable
from msatools.zombies.model import ZombieGroup

_GROUP_EXIT = 0x4
"""``SIGNAL_GROUP_EXIT`` of ``signal_struct.flags``: exit_group(), or a fatal signal."""

_WAKEKILL = 0x100
"""``TASK_WAKEKILL`` of ``task_struct.__state``: a fatal signal ends the sleep."""


@dataclass(frozen=True)
class Survivors:
    """The living threads of processes whose first thread has ended."""

    stuck: tuple[int, ...]
    """IDs of those in a sleep that no signal ends, the oldest first."""

    ending: bool
    """Whether all of those processes are ending: they exit, or were killed."""


def read_survivors(
    reader: Reader, tasks: TaskTable, group: ZombieGroup, losses: LossLog
) -> Survivors:
    """Return what the living threads of a group's processes do."""
    of_group = np.isin(tasks["tgid"], np.array([*group.pids], np.int64))
    rows = np.flatnonzero(of_group & (tasks["exit_state"] == 0))
    part = TaskTable(tasks.records[rows], tasks.columns)
    stuck = loads(part) & ((part["state"] & _WAKEKILL) == 0)
    signals = np.unique(part["signal"].astype(np.uint64))
    read = read_structs(
        reader, "struct signal_struct", {"flags": ("flags",)}, signals, losses
    )
    ending = len(signals) > 0 and bool(
        (read.readable & ((read["flags"] & _GROUP_EXIT) != 0)).all()
    )
    order = np.argsort(part["exec_start_ns"][stuck], kind="stable")
    return Survivors(tuple(part["pid"][stuck][order].tolist()), ending)


def with_survivors(group: ZombieGroup, survivors: Survivors) -> ZombieGroup:
    """Return a group of dead leaders with what is true of their other threads."""
    if not survivors.stuck and not survivors.ending:
        return group
    if not survivors.stuck:
        return replace(
            group,
            evidence=replace(
                group.evidence, text="its first thread has ended, and the others exit"
            ),
            advice="look again: its other threads are exiting, and gone in a moment",
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
