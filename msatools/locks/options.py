# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of a report of msa-locks."""

from msgspec import Struct

from msatools.locks.base.lock import LockTypeName
from msatools.tasks.membership import ANY, Membership


class LocksOptions(Struct, frozen=True, kw_only=True):
    """The waits that a report includes; ``None`` for all.

    The graph of waits is made of all tasks, or, with *pids*, of these and all tasks
    they wait for. Then the matching waits are kept, with the chains from them to the
    roots.
    """

    pids: tuple[int, ...] | None = None
    """IDs of threads, which are looked up directly."""

    types: frozenset[LockTypeName] | None = None
    """Types of the locks."""

    states: frozenset[str] | None = None
    """Letters of task states, as in /proc."""

    min_age_ns: int = 0
    """Minimum duration of the waits."""

    membership: Membership = ANY
    """Control groups, containers or namespaces of the threads."""

    share: float | None = None
    """Maximum share of one CPU for samples within an interval; ``None`` for the
    default."""

    stacks: bool = False
    """Whether to include the stacks of waiters and of roots."""

    workqueues: bool = False
    """Whether to list the pools of workers and workqueues."""

    io: bool = False
    """Whether to list the I/O in flight of all disks, not just of roots."""

    @property
    def asks_for_all(self) -> bool:
        """Whether all waits are included."""
        chosen = (self.pids, self.types, self.states)
        any_wait = self.membership.is_any and not self.min_age_ns
        return any_wait and all(each is None for each in chosen)
