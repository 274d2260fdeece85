# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts jiffies, the kernel's count of ticks, to times."""

import drgn
from msgspec import Struct

from msatools.selfdesc.find import find_variable


class Jiffies(Struct, frozen=True):
    """The count of ticks at its last update."""

    tick_ns: int
    count: int
    updated_ns: int
    """CLOCK_MONOTONIC at the last update of the count."""

    def time_ns(self, count: int) -> int | None:
        """Return CLOCK_MONOTONIC when jiffies reached a count; ``None`` if impossible.

        :param count: Any value of an unsigned long with jiffies, past or future.
        """
        ahead = (count - self.count) & _U64_MAX
        if ahead > _U64_MAX >> 1:
            ahead -= _U64_MAX + 1
        moment = self.updated_ns + ahead * self.tick_ns
        return moment if moment > 0 else None

    def past_ns(self, count: int) -> int | None:
        """Return :meth:`time_ns` of a past count; ``None`` of another."""
        moment = self.time_ns(count)
        return moment if moment is not None and moment <= self.updated_ns else None


_U64_MAX = (1 << 64) - 1


def read_jiffies(prog: drgn.Program) -> Jiffies:
    """Read jiffies.

    :raises drgn.FaultError: if they cannot be read
    :raises MissingError: if the kernel has no such variables
    """
    # The jiffies clock source has the length of a tick (kernel/time/jiffies.c).
    clock = find_variable(prog, "clocksource_jiffies")
    return Jiffies(
        tick_ns=clock.mult.value_() >> clock.shift.value_(),
        count=find_variable(prog, "jiffies_64").value_(),
        updated_ns=find_variable(prog, "last_jiffies_update").value_(),
    )
