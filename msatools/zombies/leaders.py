# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dead first threads of processes: what keeps the other threads alive."""

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.tasks.states import WAKEKILL, loads
from msatools.tasks.table import TaskTable
from msatools.zombies.model import ZombieGroup
from msatools.zombies.verdicts import BRIEF_NS

_GROUP_EXIT = 0x4
"""``SIGNAL_GROUP_EXIT`` of ``signal_struct.flags``: exit_group(), or a fatal signal."""


class Survivors(Struct, frozen=True):
    """The living threads of processes whose first thread has ended."""

    stuck: tuple[int, ...]
    """IDs of those that have slept for a while, and no signal ends that, the longest
    first."""

    ending: bool
    """Whether all of those processes are ending: they exit, or were killed."""


def read_survivors(
    reader: Reader,
    tasks: TaskTable,
    age_ns: Nanoseconds,
    group: ZombieGroup,
    losses: LossLog,
) -> Survivors:
    """Return what the living threads of a group's processes do.

    :param age_ns: Time of each task in its state.
    """
    of_group = np.isin(tasks["tgid"], np.array([*group.pids], np.int64))
    rows = np.flatnonzero(of_group & (tasks["exit_state"] == 0))
    part = TaskTable(tasks.records[rows], tasks.columns)
    stuck = loads(part) & ((part["state"] & WAKEKILL) == 0)
    stuck &= age_ns[rows] >= BRIEF_NS
    signals = np.unique(part["signal"].astype(np.uint64))
    read = read_structs(
        reader, "struct signal_struct", {"flags": ("flags",)}, signals, losses
    )
    ending = len(signals) > 0 and bool(
        (read.readable & ((read["flags"] & _GROUP_EXIT) != 0)).all()
    )
    order = np.argsort(-age_ns[rows][stuck], kind="stable")
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
