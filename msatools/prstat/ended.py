# SPDX-License-Identifier: LGPL-2.1-or-later

"""The work of threads that ended within an interval. Pure."""

import numpy as np
from msgspec import Struct

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.rows import find_rows
from msatools.kernel.structs import Booleans
from msatools.tasks.microstates import user_time
from msatools.tasks.processes import Processes
from msatools.tasks.task_samples import (
    NOBODY,
    Counts,
    TaskSample,
    Values,
    cpu_of,
    match,
)


class Ended(Struct, frozen=True):
    """What ended threads add to their process within an interval.

    One value for each thread of the last sample, the same for all of a process.
    """

    user_ns: Nanoseconds
    system_ns: Nanoseconds
    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts


def ended(
    first: TaskSample,
    first_processes: Processes,
    last: TaskSample,
    last_processes: Processes,
) -> Ended:
    """Return the work within an interval of threads that ended in it.

    A process that has no thread left is not included: its work is in the sums of its
    parent's reaped children.
    """
    growth = _Growth(first, last, first_processes.known, last_processes.known)
    cpu = growth.of(
        first_processes.dead_sum_exec_ns, last_processes.dead_sum_exec_ns, cpu_of(first)
    )

    def grown(name: str) -> Counts:
        before: Counts = getattr(first_processes.dead, name)
        after: Counts = getattr(last_processes.dead, name)
        return growth.of(before, after, first.tasks[name])

    user = user_time(cpu, grown("utime_ns"), grown("stime_ns"), last.tasks["flags"])
    return Ended(
        user_ns=user,
        system_ns=cpu - user,
        nvcsw=grown("nvcsw"),
        nivcsw=grown("nivcsw"),
        min_flt=grown("min_flt"),
        maj_flt=grown("maj_flt"),
    )


class _Growth:
    """Growth of the sums over dead threads of each process."""

    def __init__(
        self,
        first: TaskSample,
        last: TaskSample,
        first_known: Booleans,
        last_known: Booleans,
    ) -> None:
        self._signals, self._process = np.unique(
            last.tasks["signal"], return_inverse=True
        )
        self._old = find_rows(self._signals, first.tasks["signal"])
        # The memory of an ended process may have been reused by a new one.
        tgids = np.zeros(len(self._signals), last.tasks["tgid"].dtype)
        tgids[self._process] = last.tasks["tgid"]
        same = self._old != NOBODY
        same[same] = tgids[self._old[same]] == first.tasks["tgid"][same]
        self._old = np.where(same, self._old, NOBODY)
        row = match(first.tasks, last.tasks)
        self._left = same.copy()
        self._left[row[row != NOBODY]] = False
        self._known = np.zeros(len(self._signals), np.bool_)
        self._known[self._process] = last_known
        self._known[self._old[same & ~first_known]] = False

    def of(self, before: Values, after: Values, own: Values) -> Counts:
        """
        Return the growth of each process, for each thread of the last sample.

        :param before: The sum of each thread's process at the first sample.
        :param after: The sum of each thread's process at the last sample.
        :param own: Each thread's own value at the first sample.
        """
        total = np.zeros(len(self._signals), np.int64)
        total[self._process] = after
        # All threads of a process have its value.
        start = np.zeros(len(self._signals), np.int64)
        there = self._old != NOBODY
        start[self._old[there]] = before[there]
        left = self._left
        np.add.at(start, self._old[left], own[left].astype(np.int64))
        grown = np.where(self._known, np.maximum(total - start, 0), 0)
        of_threads: Counts = grown[self._process]
        return of_threads
