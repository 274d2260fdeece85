# SPDX-License-Identifier: LGPL-2.1-or-later

"""Condition variables that many wait on: their two futexes are one thing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import CONDITION, WaitTarget
from msatools.locks.user.userlocks import condition_at
from msatools.target.model import Address

Ons = Sequence[WaitTarget | None]


def as_conditions(look: LockContext, ons: Ons, least: int) -> list[WaitTarget | None]:
    """
    Put condition variables in place of the futexes that tasks wait on.

    :param ons: What each task of the look waits on, or has waited on.
    :param least: On how few waiters memory is not read.
    """
    mms: list[int] = look.tasks["mm"].tolist()
    places = [_place(mm, on) for mm, on in zip(mms, ons, strict=True)]
    starts = {
        place: condition_at(look, *place)
        for place, count in Counter(places).items()
        if place is not None and count >= least
    }
    # Crowds that wait on one thing share what is told of it, as they are many.
    wholes: dict[tuple[int, int], WaitTarget] = {}
    found = list(ons)
    for row, (on, place) in enumerate(zip(ons, places, strict=True)):
        start = starts.get(place) if place else None
        if on is not None and start is not None:
            key = id(on), start
            if key not in wholes:
                wholes[key] = replace(on, address=Address(start), name=CONDITION)
            found[row] = wholes[key]
    return found


def _place(mm: int, on: WaitTarget | None) -> tuple[int, int] | None:
    """Give the address space, and the 8 bytes that a private futex is in."""
    if not mm or on is None or on.kind != "futex":
        return None
    if on.address is None or on.inode is not None:
        return None
    return mm, int(on.address) & ~7
