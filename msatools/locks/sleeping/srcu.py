# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for the readers of a ``struct srcu_struct`` (kernel/rcu/srcutree.c).

Who waits has a callback on its stack, in the list of a CPU's ``struct srcu_data``,
which points back at the ``srcu_struct``. That counts its readers, and does not record
them: stacks are searched, and :mod:`msatools.locks.positions` finds those of one that
is a variable, which the code names.
"""

from msatools.errors import UNREADABLE
from msatools.kernel.percpu import read_percpu
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.wait_queues import wait_queues
from msatools.target.addresses import KERNEL_HALF

_WAITS = ("__synchronize_srcu", "synchronize_srcu", "synchronize_srcu_expedited")

_COUNTS = ("srcu_locks", "srcu_unlocks"), ("srcu_lock_count", "srcu_unlock_count")
"""Counters of both indexes: since v6.15 in a ``struct srcu_ctr``, and before."""

_MAX_CALLBACKS = 4096
"""Maximum number of callbacks of one CPU to go through."""

_MAX_WORDS = 256
"""Maximum number of words of a stack to try."""

_MASK = (1 << 64) - 1


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``srcu_struct`` whose readers a task waits for.

    :raises MissingError: if the types are unknown
    """
    if not case.is_in(*_WAITS) or not context.layout.has("srcu_data", "ssp"):
        return None
    # It may lie in the kernel's image, or in that of a module.
    words = [
        word
        for word in dict.fromkeys(case.stack.words.tolist())
        if word >= KERNEL_HALF and not word % 8 and word not in case.stack
    ]
    known = [each for each in words[:_MAX_WORDS] if _is_srcu(context, each)]
    if len(known) > 1 or not context.live:
        # Others are left over from calls before.
        known = [address for address in known if _queues(context, case, address)]
    return Request(Lock("srcu", known[0]), "write") if len(known) == 1 else None


def readers(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers that are waited for; ``None`` if that is unknown.

    There are two indexes: new readers count at the one, and those of the other, who
    began before, have to end.

    :raises drgn.FaultError: if it cannot be read
    """
    layout, address = context.layout, lock.address or 0
    parts = _parts(context, address)
    if layout.has("srcu_data", "srcu_ctrs"):
        first = layout.member(address, "srcu_struct", "sda")
        first += layout.offset("srcu_data", "srcu_ctrs")
        now = layout.member(address, "srcu_struct", "srcu_ctrp") != first
        names = [f"srcu_ctrs[{int(not now)}].{name}" for name in _COUNTS[0]]
    else:
        now = bool(layout.member(address, "srcu_struct", "srcu_idx") & 1)
        names = [f"{name}[{int(not now)}]" for name in _COUNTS[1]]
    pairs = (layout.members(part, "srcu_data", *names) for part in parts)
    total = sum(begun - ended for begun, ended in pairs) & _MASK
    # A running kernel changes while its parts are added up.
    return total if total < 1 << 32 else None


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe a wait none of whose readers was found."""
    count = readers(context, request.lock)
    if count is None:
        return "SRCU grace period"
    if not count:
        return "SRCU grace period: no reader holds it up; its work has not run yet"
    return f"SRCU grace period: {count:,} reader{'s' if count > 1 else ''}, not found"


def _parts(context: LockContext, address: int) -> list[int]:
    """Return the ``struct srcu_data`` of all CPUs."""
    pointer = context.layout.member(address, "srcu_struct", "sda")
    parts: list[int] = read_percpu(context.reader, context.losses).at(pointer).tolist()
    return parts


def _is_srcu(context: LockContext, address: int) -> bool:
    """Return whether the data of the first CPU points back at a ``srcu_struct``."""
    try:
        parts = _parts(context, address)
        return (
            bool(parts)
            and parts[0] >= KERNEL_HALF
            and (context.layout.member(parts[0], "srcu_data", "ssp") == address)
        )
    except UNREADABLE:
        return False


def _queues(context: LockContext, case: BlockedTask, address: int) -> bool:
    """Return whether a task's callback is in the lists of a ``srcu_struct``."""
    layout, simple = context.layout, wait_queues(context).simple(case.stack)
    if simple is None:
        return False
    queue = layout.offset("completion", "wait.task_list")
    own = simple.head - queue - layout.offset("rcu_synchronize", "completion")
    try:
        for data in _parts(context, address):
            head = layout.member(data, "srcu_data", "srcu_cblist.head")
            for _ in range(_MAX_CALLBACKS):
                if head == own:
                    return True
                if head < KERNEL_HALF:
                    break
                head = layout.member(head, "callback_head", "next")
    except UNREADABLE:
        return False
    return False


SRCU = LockType(
    names=frozenset({"srcu"}),
    requests=at_most_one(request),
    readers=readers,
    what=what,
)
