# SPDX-License-Identifier: LGPL-2.1-or-later

"""PID namespaces, such as those of containers, that end only once zombies are reaped.

The first process of a PID namespace that exits kills all others of it, and waits until
none has a PID there (kernel/pid_namespace.c, zap_pid_ns_processes()). It can reap its
own children, but not a task that is traced from outside, nor one whose parent is
outside, as of a program that was started inside with nsenter.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.pidnamespaces import (
    PidNamespace,
    innermost_numbers,
    read_namespaces,
)
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.identity import comm_text
from msatools.tasks.table import PF_EXITING, TaskTable
from msatools.zombies.model import HeldNamespace, ZombieGroup
from msatools.zombies.zombie_tasks import Dead


def with_held_namespaces(
    reader: Reader,
    tasks: TaskTable,
    dead: Dead,
    age_ns: Nanoseconds,
    groups: Iterable[ZombieGroup],
    losses: LossLog,
) -> tuple[ZombieGroup, ...]:
    """Return groups with the PID namespaces whose end waits for one of their zombies.

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
    namespaces = read_namespaces(reader, spaces, losses)
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
