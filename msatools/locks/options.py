# SPDX-License-Identifier: LGPL-2.1-or-later

"""What can be asked of msa-locks."""

from dataclasses import dataclass

from msatools.locks.base.lock import LockTypeName
from msatools.tasks.membership import ANY, Membership


@dataclass(frozen=True, kw_only=True)
class LocksOptions:
    """What a report is to have; ``None`` is all.

    Who waits for whom is found out of all tasks (with *pids* of these and what they
    wait for). Then those waits are kept that fit, with what is on their ways to the
    roots.
    """

    pids: tuple[int, ...] | None = None
    """These threads, looked up directly, and all that they wait for."""

    types: frozenset[LockTypeName] | None = None
    """Waits for such locks."""

    states: frozenset[str] | None = None
    """Letters, as in /proc."""

    min_wait_ns: int = 0
    """Waits that are at least as long."""

    membership: Membership = ANY
    """Waits of threads in these control groups, containers or namespaces."""

    share: float | None = None
    """Of one CPU, which looks within an interval may take; ``None`` for what is
    usual."""

    stack: bool = False
    """Whether to tell the stacks of tasks that wait, and of roots."""

    @property
    def asks_for_all(self) -> bool:
        """Whether no waits are left out."""
        chosen = (self.pids, self.types, self.states)
        any_wait = self.membership.is_any and not self.min_wait_ns
        return any_wait and all(each is None for each in chosen)
