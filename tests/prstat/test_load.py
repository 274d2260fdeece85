# SPDX-License-Identifier: LGPL-2.1-or-later

"""Threads in the load average, for threads made by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from msatools.locks.report import WaitTarget
from msatools.prstat.model import Load
from msatools.prstat.recorded import collect_load
from msatools.tasks.states import letters, loads
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass

SLEEPS, BLOCKED, NOLOAD, FROZEN = 1, 2, 0x402, 0x8002


def load_of(
    *threads: dict[str, Any],
    ons: dict[int, WaitTarget | None] | None = None,
    wanted: list[bool] | None = None,
) -> Load:
    """Return the load of threads that by default wait for a disk in D."""
    names = {"pid": "i4", "state": "u4", "exit_state": "i4", "comm": "S16"}
    records = np.zeros(len(threads), list(names.items()))
    defaults = {"state": BLOCKED, "comm": b"cat"}
    for name in names:
        records[name] = [thread.get(name, defaults.get(name, 0)) for thread in threads]
    classes = [thread.get("class", TaskClass.DSK) for thread in threads]
    ages = [thread.get("age_ns", 0) for thread in threads]
    callers = (None, "ext4_read", "ext4_write")
    kept: Any = SimpleNamespace(
        columns={
            "pid": records["pid"],
            "comm": records["comm"],
            "class": np.array(classes, np.uint8),
            "class_age_ns": np.array(ages, np.int64),
            "state": letters(TaskTable(records, frozenset(names))),
            "loads": loads(TaskTable(records, frozenset(names))),
            "is_dead": records["exit_state"] != 0,
        },
        callers=[callers[thread.get("stack", 1)] for thread in threads],
    )
    return collect_load(
        kept,
        [(ons or {}).get(row) for row in range(len(threads))],
        np.array([True] * len(threads) if wanted is None else wanted, np.bool_),
    )


def test_threads_that_count() -> None:
    """Sleeping, idle, frozen and dead threads do not count."""
    found = load_of(
        {"pid": 1},
        {"pid": 2, "state": SLEEPS},
        {"pid": 3, "state": NOLOAD},
        {"pid": 4, "state": FROZEN},
        {"pid": 5, "exit_state": 0x20, "class": TaskClass.ZMB},
        {"pid": 6, "state": 0, "class": TaskClass.LAT},
        {"pid": 7, "state": 0, "class": TaskClass.USR},
        # About to sleep, but still on the CPU.
        {"pid": 8, "class": TaskClass.SYS},
        # The dump has no registers of its CPU.
        {"pid": 9, "state": 0, "class": TaskClass.OTH},
    )
    assert (found.runnable, found.uninterruptible) == (4, 1)
    states = {pid: group.state for group in found.groups for pid in group.pids}
    assert states == {1: "D", 6: "R", 7: "R", 8: "R", 9: "R"}
