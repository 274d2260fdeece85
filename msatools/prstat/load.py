# SPDX-License-Identifier: LGPL-2.1-or-later

"""Why the load is what it is: the threads that it counts, and what they do.

kernel/sched/loadavg.c: the averages are of the number of threads that run or could,
and of those in uninterruptible sleep.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from msatools.locks.base.model import WaitTarget
from msatools.prstat.model import Load, LoadGroup
from msatools.prstat.rows import Kept
from msatools.tasks.classes import RUNNABLE, TaskClass, are_any
from msatools.tasks.identity import comm_text


def collect_load(
    kept: Kept,
    ons: Sequence[WaitTarget | None],
    wanted: npt.NDArray[np.bool_],
) -> Load:
    """Group those wanted threads that make the load by what they do.

    :param kept: Of all threads, with their callers.
    :param ons: What each of them waits on.
    """
    columns = kept.columns
    classes, comms, ages = (columns[n] for n in ("class", "comm", "class_age_ns"))
    runs = are_any(classes, RUNNABLE) & wanted
    blocked = columns["loads"] & ~runs & ~columns["is_dead"] & wanted
    groups: dict[tuple[str, int, str, str | None, WaitTarget | None], list[int]] = (
        defaultdict(list)
    )
    for row in np.flatnonzero(runs | blocked).tolist():
        # Who runs is one load, on whichever CPU it is.
        on = None if runs[row] else ons[row]
        key = (
            "R" if runs[row] else "D",
            int(classes[row]),
            comm_text(comms[row]),
            None if runs[row] else kept.callers[row],
            on,
        )
        groups[key].append(row)
    found = [
        LoadGroup(
            state=state,
            task_class=TaskClass(task_class).name,
            comm=comm,
            on=on,
            function=function,
            pids=tuple(sorted(columns["pid"][rows].tolist())),
            max_age_ns=int(ages[rows].max()),
        )
        for (state, task_class, comm, function, on), rows in groups.items()
    ]
    found.sort(key=lambda group: (-len(group.pids), -group.max_age_ns))
    return Load(
        runnable=int(np.count_nonzero(runs)),
        uninterruptible=int(np.count_nonzero(blocked)),
        groups=tuple(found),
    )
