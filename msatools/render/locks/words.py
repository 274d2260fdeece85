# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes locks, their owners and their waiters in a few words."""

from collections.abc import Sequence

from msatools.locks.report import LockRow, Owner, Wait
from msatools.render.cells import BOUND_MARKS, NOT_KEPT, plural
from msatools.render.locks.wait_graph import WaitGraph
from msatools.render.on import on_text
from msatools.reports.units import duration
from msatools.tasks.functions import function_text

MARKS = {"exact": "=", "likely": "~", "evidence": "?"}
"""Marks for the confidence in an owner."""

FEW_OWNERS = 3

_PIDS = 8
_OF_PROGRAMS = frozenset({"futex", "pi_futex"})


def lock_text(lock: LockRow, verbose: bool = False) -> str:
    """Return a lock's type and name, or its address; both if *verbose*.

    A lock in a program's memory has both, because its name is not unique.
    """
    if lock.name is None:
        return lock.id
    if lock.type in _OF_PROGRAMS:
        return f"{lock.id} ({lock.name})"
    # Some names include the type.
    name = lock.name
    if lock.type not in name.split():
        name = f"{lock.type} {name}"
    address = f" ({lock.id.removeprefix(lock.type).strip()})" if verbose else ""
    return f"{name}{address}"


def task_text(graph: WaitGraph, pid: int) -> str:
    """Return a task's PID and name."""
    comm = graph.comm(pid)
    return str(pid) if comm is None else f"{pid} {comm}"


def age_text(wait: Wait) -> str:
    """Return the duration of a wait, with the mark of its accuracy."""
    return BOUND_MARKS[wait.age_bound] + duration(wait.age_ns)


def place_text(wait: Wait) -> str:
    """Return where a task waits: the calling function and the system call."""
    call = f"{wait.call}()" if wait.call else None
    caller = function_text(wait.caller, wait.module)
    return ", ".join(part for part in (caller, call) if part)


def doing_text(wait: Wait) -> str:
    """Return where a task waits, and the object if that is not a lock."""
    parts = (
        place_text(wait),
        f"any of {len(wait.any_of)}" if wait.any_of else None,
        None if wait.on is None else on_text(wait.on),
        wait.why,
    )
    return ", ".join(part for part in parts if part) or NOT_KEPT


def pids_text(pids: Sequence[int], verbose: bool) -> str:
    """Return the PIDs of tasks; only the first ones if there are many."""
    shown = pids if verbose else pids[:_PIDS]
    left = len(pids) - len(shown)
    return " ".join(map(str, shown)) + (f" +{left:,}" if left else "")


def owners_text(owners: Sequence[Owner], verbose: bool) -> str:
    """Return owners with the marks of their confidence."""
    shown = owners if verbose else owners[:FEW_OWNERS]
    words = [
        f"{MARKS[owner.confidence]}{owner.pid} {owner.comm}"
        + (" (seen)" if owner.seen else "")
        for owner in shown
    ]
    left = len(owners) - len(shown)
    return (", ".join(words) + (f" +{left:,}" if left else "")) or NOT_KEPT


def lock_facts(lock: LockRow, verbose: bool) -> str:
    """Return the owners of a lock, what they are to do, and changes in an interval."""
    facts = [plural(lock.readers, "reader")] if lock.readers else []
    if len(lock.owners) == 1:
        (owner,) = lock.owners
        facts.append(f"owner {MARKS[owner.confidence]}{owner.pid}")
        facts += ["seen on its stack"] if owner.seen else []
    elif lock.owners:
        facts.append(f"owners {owners_text(lock.owners, verbose)}")
    else:
        facts.append(f"owner {NOT_KEPT}")
    if lock.what and lock.owners:
        facts.append(lock.what)
    if lock.delta_waiters:
        facts.append(f"{lock.delta_waiters:+,} waiters")
    return ", ".join(facts)
