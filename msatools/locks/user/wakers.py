# SPDX-License-Identifier: LGPL-2.1-or-later

"""User stacks of the threads that wake herds."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import Herd
from msatools.locks.user.userstacks import UserStacks, user_stacks

_MOST_STACKS = 16
"""Maximum number of wakers, those of the largest herds, whose stacks are read."""


def with_frames(herds: Sequence[Herd], context: LockContext) -> tuple[Herd, ...]:
    """
    Return herds whose wakers have the first frames of their user stacks.

    :param context: A context of all tasks, which include the wakers.
    """
    return tuple(_with_frames(herds, context, user_stacks(context)))


def _with_frames(
    herds: Sequence[Herd], context: LockContext, stacks: UserStacks
) -> Iterator[Herd]:
    for index, herd in enumerate(herds):
        waker = herd.waker
        if waker is None or herd.confidence == "none" or index >= _MOST_STACKS:
            yield herd
            continue
        for row in np.flatnonzero(context.tasks["pid"] == waker.pid)[:1].tolist():
            waker = replace(waker, frames=stacks.frames(row))
        yield replace(herd, waker=waker)
