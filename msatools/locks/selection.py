# SPDX-License-Identifier: LGPL-2.1-or-later

"""Selects the waits of a snapshot that the options ask for."""

from collections.abc import Iterable
from functools import cached_property

from msatools.kernel.structs import Booleans
from msatools.locks.choose import with_chains
from msatools.locks.options import LocksOptions
from msatools.locks.wait_snapshot import WaitSnapshot
from msatools.tasks.membership import read_members


class WaitSelection:
    """The options, applied to the waits of one snapshot."""

    def __init__(self, snapshot: WaitSnapshot, options: LocksOptions) -> None:
        self._snapshot = snapshot
        self._options = options

    def with_chains(self) -> set[int]:
        """Return the tasks that fit, and those on the chains from them to the roots."""
        snapshot = self._snapshot
        owners = {
            row: [edge.owner for edge in snapshot.graph.edges_of(row)]
            for row in snapshot.blocked
        }
        return with_chains(owners, filter(self.fits, snapshot.blocked))

    def fits(self, row: int) -> bool:
        """Return whether the options ask for the wait of a blocked task."""
        options, snapshot = self._options, self._snapshot
        if options.pids is not None and snapshot.pids[row] not in options.pids:
            return False
        if options.states is not None and snapshot.letters[row] not in options.states:
            return False
        if not self._members[row]:
            return False
        types = {request.lock.type for request in snapshot.blocked[row].requests}
        if options.types is not None and types.isdisjoint(options.types):
            return False
        return snapshot.ages_ns[row] >= options.min_age_ns

    def fits_any(self, rows: Iterable[int]) -> bool:
        """Return whether the options ask for all waits, or for one of some tasks."""
        blocked = self._snapshot.blocked
        return self._options.asks_for_all or any(
            self.fits(row) for row in rows if row in blocked
        )

    @cached_property
    def _members(self) -> Booleans:
        """Whether each thread is in a control group or namespace that is asked for."""
        context, wanted = self._snapshot.context, self._options.membership
        return read_members(
            context.reader, self._snapshot.tasks, wanted, context.losses
        )
