# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where those that wake herds stand in user space."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import Herd
from msatools.locks.user.userstacks import UserStacks

_MOST_STACKS = 16
"""Of the wakers of the largest herds."""


def with_frames(
    herds: Sequence[Herd], context: LockContext, stack_bytes: int
) -> tuple[Herd, ...]:
    """
    Add the first frames of their user stacks to the wakers of herds.

    :param context: Of all tasks, the wakers among them.
    :param stack_bytes: Of a kernel stack.
    """
    return tuple(_with_frames(herds, context, UserStacks(context, stack_bytes)))


def _with_frames(
    herds: Sequence[Herd], context: LockContext, stacks: UserStacks
) -> Iterator[Herd]:
    for number, herd in enumerate(herds):
        waker = herd.waker
        if waker is None or herd.confidence == "none" or number >= _MOST_STACKS:
            yield herd
            continue
        for row in np.flatnonzero(context.tasks["pid"] == waker.pid)[:1].tolist():
            waker = replace(waker, frames=stacks.frames(row))
        yield replace(herd, waker=waker)
