# SPDX-License-Identifier: LGPL-2.1-or-later

"""The herds among the waiters of the locks of a snapshot."""

from collections.abc import Iterator

import numpy as np

from msatools.locks.base.model import CONDITION, Herd, WaitTarget
from msatools.locks.herds import MIN_WAITERS, Watched, crowd_of
from msatools.locks.lock_ids import LockIds
from msatools.locks.selection import WaitSelection
from msatools.locks.user.futexcontent import is_condition
from msatools.locks.user.userlocks import FUTEX
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted, futex_at
from msatools.locks.wait_targets.explain import awake_rows, leaving
from msatools.target.model import Address


class HerdRows:
    """Finds the herds of one snapshot."""

    def __init__(
        self,
        snapshot: WaitSnapshot,
        ids: LockIds,
        selection: WaitSelection,
        stack_size: int,
    ) -> None:
        """
        :param snapshot: With waits that changed while it was read: most tasks of a herd
            do.
        :param selection: Selects waits of the same snapshot.
        :param stack_size: Bytes of a kernel stack.
        """
        self._snapshot = snapshot
        self._ids = ids
        self._selection = selection
        self._stack_size = stack_size

    def find(self, watched: Watched) -> Iterator[Herd]:
        """Yield the crowds that the options ask for, the largest first."""
        snapshot = self._snapshot
        woken = self._woken()
        for want in self._crowds(woken):
            futex = snapshot.place(want)
            woke = woken.get(futex, []) if futex else []
            waiting = sorted(set(want.rows).difference(woke))
            if len(waiting) + len(woke) < MIN_WAITERS:
                continue
            if not self._selection.fits_any(want.rows):
                continue
            self._ids.add([want])
            yield crowd_of(
                self._ids[want.lock],
                self._target(want),
                snapshot.tasks,
                snapshot.now,
                np.array(waiting, np.intp),
                snapshot.clocks,
                woke,
                watched,
            )

    def _woken(self) -> dict[tuple[int, int], list[int]]:
        """Find the tasks that were just woken from each futex."""
        snapshot = self._snapshot
        woken: dict[tuple[int, int], list[int]] = {}
        if not snapshot.context.live:
            # Of a running kernel, queues were read at another time than stacks.
            woken = {futex: list(rows) for futex, rows in snapshot.unqueued.items()}
        awake = awake_rows(snapshot.tasks, snapshot.now)
        left = leaving(snapshot.context, snapshot.now, awake, self._stack_size)
        for row, on in zip(awake.tolist(), left, strict=True):
            if on is not None and on.address is not None:
                futex = snapshot.place_of(row, int(on.address))
                woken.setdefault(futex, []).append(row)
        return woken

    def _crowds(self, woken: dict[tuple[int, int], list[int]]) -> list[Wanted]:
        """Return the waiters of each lock, the most first, and woken ones alone."""
        crowds = list(self._snapshot.crowds)
        # If all waiters are woken together, none of them may be asleep.
        queued = {self._snapshot.place(want) for want in crowds}
        crowds += [
            Wanted(futex_at(futex), rows)
            for futex, rows in woken.items()
            if futex not in queued
        ]
        return sorted(crowds, key=lambda want: -len(want.rows))

    def _target(self, want: Wanted) -> WaitTarget:
        snapshot, lock = self._snapshot, want.lock
        exact = [own.row for own in want.owners if own.confidence == "exact"]
        mm = int(snapshot.tasks["mm"][want.rows[0]])
        return WaitTarget(
            kind="futex" if lock.type in FUTEX.names else "lock",
            address=None if lock.address is None else Address(lock.address),
            owner=snapshot.pids[exact[0]] if exact else None,
            name=CONDITION if is_condition(snapshot.context, lock, mm) else None,
        )
