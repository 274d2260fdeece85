# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Readers of a lock that follow from where they are, though no word has its address.

A task that handles a page fault has the ``mmap_lock`` of that memory for reading, or
the lock of the mapping (mm/memory.c, handle_mm_fault()): so the kernel asserts. The
same holds for who reads or writes the memory of another process, such as ``ps``
(__access_remote_vm()). Their stacks have the mapping and the memory's descriptor.

The task that commits a transaction of btrfs wakes those that wait for the end of the
commit. Its stack has the transaction (fs/btrfs/transaction.c,
btrfs_commit_transaction()).

Who takes a CPU on- or offline has ``cpu_hotplug_lock`` for writing (kernel/cpu.c),
which does not record it.

Who reads under a ``srcu_struct`` that is a variable is in a function whose code names
it, and calls srcu_read_lock(): there is no word on its stack to find.
"""

from collections.abc import Iterator

import numpy as np

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.locks.base.blocked_tasks import BlockedTask, read_cases
from msatools.locks.base.lock_context import LockContext
from msatools.locks.handlers import takes_variable
from msatools.locks.names.names import find_place
from msatools.locks.places.places import LockPlace
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted

_FAULTS = frozenset(
    {
        *("handle_mm_fault", "__handle_mm_fault", "do_fault", "do_wp_page"),
        *("do_swap_page", "handle_userfault", "faultin_page"),
    }
)
_REMOTE = frozenset({"__access_remote_vm", "access_remote_vm", "get_user_pages_remote"})
_LOCKS = {
    "mmap_lock": "mm_struct",
    "mmap_sem": "mm_struct",
    "vm_lock": "vm_area_struct",
}
"""Maps locks that such tasks have to the structures that contain them."""


_COMMITS = frozenset({"btrfs_commit_transaction"})
_COMMIT_WAITS = _COMMITS | {
    *("wait_for_commit", "wait_current_trans", "btrfs_wait_for_commit"),
}
"""Functions of those that wait for the end of a commit."""

_HOTPLUG = frozenset({"_cpu_down", "_cpu_up"})
"""Functions that have ``cpu_hotplug_lock`` wherever they sleep."""


def readers(snapshot: WaitSnapshot, want: Wanted, stack_size: int) -> frozenset[int]:
    """Return the rows of tasks that have a lock where they are, mostly for reading.

    :param stack_size: Bytes of a kernel stack.
    """
    type_ = want.lock.type
    if type_ == "percpu_rwsem":
        return _hotplugging(snapshot, want)
    if type_ == "wait_queue":
        return _committing(snapshot, want, stack_size)
    if type_ != "vma" and not (type_ == "rwsem" and want.readers):
        return frozenset()
    rows = [row for row in _faulting(snapshot) if row not in want.rows]
    place = _place(snapshot, want, stack_size) if rows else None
    if place is None:
        return frozenset()
    cases = read_cases(
        snapshot.context, snapshot.now, np.array(rows, np.intp), stack_size
    )
    return frozenset(
        case.row for case in cases if _holds(snapshot.context, case, place)
    )


def _hotplugging(snapshot: WaitSnapshot, want: Wanted) -> frozenset[int]:
    """Return who takes a CPU on- or offline, if that is what a lock is for."""
    if want.lock.address != snapshot.context.layout.symbol("cpu_hotplug_lock"):
        return frozenset()
    rows = _within(snapshot, _HOTPLUG)
    return frozenset(row for row in rows if row not in want.rows)


def _committing(
    snapshot: WaitSnapshot, want: Wanted, stack_size: int
) -> frozenset[int]:
    """Return who commits the transaction of btrfs whose end is waited for."""
    layout = snapshot.context.layout
    stacks = snapshot.now.stacks
    names = {name.partition(".")[0] for name in stacks.names(stacks[want.rows[0]])}
    if names.isdisjoint(_COMMIT_WAITS) or not layout.has(
        "btrfs_transaction", "commit_wait"
    ):
        return frozenset()
    offset = layout.offset("btrfs_transaction", "commit_wait")
    transaction = (want.lock.address or 0) - offset
    rows = [row for row in _within(snapshot, _COMMITS) if row not in want.rows]
    cases = read_cases(
        snapshot.context, snapshot.now, np.array(rows, np.intp), stack_size
    )
    return frozenset(case.row for case in cases if transaction in case.stack.pointers)


def readers_by_code(snapshot: WaitSnapshot, want: Wanted) -> frozenset[int]:
    """Return the rows of tasks in a function that begins to read under SRCU.

    Each may have ended it again, so that is no more than a word on a stack is.
    """
    if want.lock.type != "srcu" or not want.readers:
        return frozenset()
    stacks, address = snapshot.now.stacks, want.lock.address or 0
    chosen = [
        index
        for index, stack in enumerate(stacks.unique)
        if takes_variable(snapshot.context, stack, "srcu", address)
    ]
    found = np.flatnonzero(np.isin(stacks.index, chosen)).tolist()
    return frozenset(row for row in found if row not in want.rows)


def _place(snapshot: WaitSnapshot, want: Wanted, stack_size: int) -> LockPlace | None:
    """Return the structure of a lock, if faults take it; otherwise ``None``."""
    if want.lock.type == "vma":
        return LockPlace("vm_refcnt", "vm_area_struct", want.lock.address or 0)
    context, first = snapshot.context, np.array(want.rows[:1], np.intp)
    cases = [*read_cases(context, snapshot.now, first, stack_size)]
    try:
        place = find_place(context, want.lock.type, want.lock.address or 0, cases)
    except LOST as error:
        context.losses.lose(
            Loss.LOCK_NAMES, f"cannot determine what a lock lies in: {error}"
        )
        return None
    known = place is not None and _LOCKS.get(place.name) == place.type_name
    return place if known else None


def _faulting(snapshot: WaitSnapshot) -> Iterator[int]:
    """Yield the rows of sleeping tasks that are in a fault, or in another's memory."""
    yield from _within(snapshot, _FAULTS | _REMOTE)


def _within(snapshot: WaitSnapshot, wanted: frozenset[str]) -> list[int]:
    """Return the rows of tasks with any of some functions on their stacks."""
    stacks = snapshot.now.stacks
    chosen = [
        index
        for index, stack in enumerate(stacks.unique)
        if not wanted.isdisjoint(name.partition(".")[0] for name in stacks.names(stack))
    ]
    rows: list[int] = np.flatnonzero(np.isin(stacks.index, chosen)).tolist()
    return rows


def _holds(context: LockContext, case: BlockedTask, place: LockPlace) -> bool:
    """Return whether a task has the lock of a mapping, or of the memory around it."""
    try:
        for remote in (False, True):
            found = case.stack.fault(case.mm, remote)
            if found is None:
                continue
            fault, members = found
            if place.type_name == "vm_area_struct":
                return fault.vma == place.address
            if members["vm_mm"] == place.address:
                return not fault.by_vma
        return place.type_name == "mm_struct" and _is_remote(case, place.address)
    except LOST as error:
        context.losses.lose(Loss.LOCKS, f"cannot determine who has a lock: {error}")
        return False


def _is_remote(case: BlockedTask, mm: int) -> bool:
    """Return whether a task works in the memory of another process.

    Before it has the lock it is in a function that takes one, and waits itself.
    """
    return case.is_in(*_REMOTE) and case.mm != mm and mm in case.stack.pointers
