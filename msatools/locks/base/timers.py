# SPDX-License-Identifier: LGPL-2.1-or-later

"""The time at which a wait ends by itself, from the timer on the task's stack."""

from typing import TypedDict

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext, per_context

_NEVER = (1 << 63) - 1
"""``KTIME_MAX``: a timer that never expires."""


class Ends(TypedDict, total=False):
    """The end of a wait: fields of :class:`WaitTarget`."""

    expires_ns: int
    left_ns: int


def timer_ends(context: LockContext, case: BlockedTask) -> Ends:
    """Return when a wait ends by the timer on the task's stack; empty without timer.

    :raises drgn.FaultError: if the clock of the timer cannot be read
    """
    timer = case.stack.timer()
    return Ends() if timer is None else ends_at(context, timer.expires_ns, timer.base)


def ends_at(context: LockContext, expires_ns: int, base: int) -> Ends:
    """Return when a timer expires; empty if never.

    :param expires_ns: Time of the clock of the timer.
    :param base: Address of its ``struct hrtimer_clock_base``.
    :raises drgn.FaultError: if that cannot be read
    """
    if expires_ns >= _NEVER:
        return Ends()
    offsets = _clock_offsets(context)
    if base not in offsets:
        offsets[base] = context.layout.member(base, "hrtimer_clock_base", "offset")
    expires = expires_ns - offsets[base]
    if context.monotonic_ns is None:
        return Ends(expires_ns=expires)
    return Ends(expires_ns=expires, left_ns=expires - context.monotonic_ns)


@per_context
def _clock_offsets(context: LockContext) -> dict[int, int]:
    """Maps a ``struct hrtimer_clock_base`` to its offset from CLOCK_MONOTONIC in ns,
    which may be negative."""
    return {}
