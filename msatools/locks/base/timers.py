# SPDX-License-Identifier: LGPL-2.1-or-later

"""When waits end by themselves: timers on the stacks of those that wait."""

from typing import TypedDict

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext, per_context

_NEVER = (1 << 63) - 1
"""``KTIME_MAX``: a timer that is not to end."""


class Ends(TypedDict, total=False):
    """When a wait ends by itself: fields of :class:`WaitTarget`."""

    expires_ns: int
    left_ns: int


def timer_ends(context: LockContext, case: BlockedTask) -> Ends:
    """Return when a wait ends by itself, by the timer on its stack.

    :raises drgn.FaultError: if its clock cannot be read
    """
    timer = case.stack.timer()
    return Ends() if timer is None else ends_at(context, timer.expires_ns, timer.base)


def ends_at(context: LockContext, expires_ns: int, base: int) -> Ends:
    """Return when a timer ends.

    :param base: Its ``struct hrtimer_clock_base``.
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
    """From CLOCK_MONOTONIC to a timer's own, by its base; it may be negative."""
    return {}
