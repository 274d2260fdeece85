# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make rows by hand: by default each thread started ten seconds ago and sleeps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.prstat.interval import Ended
from msatools.prstat.rows import (
    Spent,
    TaskRows,
    Threads,
    keep,
    process_rows,
    thread_rows,
)
from msatools.prstat.states import Breakdown, Sleeps, SplitColumn
from msatools.tasks.accounting import Microstates, Processes, ProcessSums, TaskMemory
from msatools.tasks.identity import Identities, TaskCgroups
from msatools.tasks.sampler import AgeBound, TaskState
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass

SECOND = 10**9
MIB = 1 << 20
LIFE = 10 * SECOND

Thread = Mapping[str, Any]
"""Values of the columns below; ``dead`` and ``reaped`` map sums' names to values."""

_TABLE = {
    **dict.fromkeys(("pid", "tgid", "state", "exit_state", "prio"), "i8"),
    **dict.fromkeys(("static_prio", "cpu", "flags", "start_ns"), "i8"),
    **dict.fromkeys(("nvcsw", "nivcsw", "min_flt", "maj_flt"), "i8"),
    "comm": "S16",
}
_DEFAULTS: dict[str, Any] = {
    "state": 1,
    "prio": 120,
    "static_prio": 120,
    "comm": b"task",
    "threads": 1,
    "lifetime_ns": LIFE,
    "class": TaskClass.OTH,
    "has_mm": True,
    "cgroup": 0,
    "size_bytes": 8 * MIB,
    "rss_bytes": 4 * MIB,
    "known": True,
    "mm_known": True,
    "dead": {},
    "reaped": {},
    "age_bound": AgeBound.EXACT,
    "covered": 1.0,
}
_SUMS = ("utime_ns", "stime_ns", "gtime_ns", "nvcsw", "nivcsw", "min_flt", "maj_flt")


class MadeThreads:
    """Some threads, in order of their processes, with all their values."""

    def __init__(
        self,
        *given: Thread,
        paths: Sequence[str] = ("/", "/a", "/b"),
        latency_is_bound: bool = False,
        split: bool = False,
        reaped: bool = False,
        delays: Sequence[str] = ("blkio",),
    ) -> None:
        self._delays = delays
        self._given = [{"tgid": thread["pid"], **thread} for thread in given]
        records = np.zeros(len(given), list(_TABLE.items()))
        for name in _TABLE:
            records[name] = self._values(name)
        self.tasks = TaskTable(records, frozenset(_TABLE))
        self.lives = self._lives(latency_is_bound)
        self.threads = Threads(
            tasks=self.tasks,
            now=self._now(),
            on_code=self._column("on_code", np.bool_),
            identities=Identities(
                uid=self._column("uid"),
                euid=self._column("uid"),
                ppid=self._column("ppid"),
            ),
            processes=self._processes(),
            memory=TaskMemory(
                has_mm=self._column("has_mm", np.bool_),
                known=self._column("mm_known", np.bool_),
                rss_known=self._column("mm_known", np.bool_),
                size_bytes=self._column("size_bytes"),
                rss_bytes=self._column("rss_bytes"),
                rss_counted_bytes=self._column("rss_bytes"),
            ),
            cgroups=TaskCgroups(tuple(paths), self._column("cgroup", np.int32)),
            breakdown=self._breakdown() if split else None,
            reaped=self._sums("reaped") if reaped else None,
        )
        dead = self._sums("dead")
        self.spent = Spent(
            lives=self.lives,
            nvcsw=self._column("nvcsw"),
            nivcsw=self._column("nivcsw"),
            min_flt=self._column("min_flt"),
            maj_flt=self._column("maj_flt"),
            dead=Ended(
                dead.utime_ns,
                dead.stime_ns,
                *(dead.nvcsw, dead.nivcsw, dead.min_flt, dead.maj_flt),
            ),
        )

    def by_thread(self) -> TaskRows:
        return thread_rows(keep(self.threads, self.spent))

    def by_process(self) -> TaskRows:
        return process_rows(keep(self.threads, self.spent))

    def _values(self, name: str) -> list[Any]:
        return [thread.get(name, _DEFAULTS.get(name, 0)) for thread in self._given]

    def _column(self, name: str, kind: Any = np.int64) -> npt.NDArray[Any]:
        return np.array(self._values(name), kind)

    def _lives(self, latency_is_bound: bool) -> Microstates:
        parts = [
            self._column(name)
            for name in ("user_ns", "system_ns", "latency_ns", "zombie_ns")
        ]
        lifetime = self._column("lifetime_ns")
        user, system, latency, zombie = parts
        none = np.zeros(len(lifetime), np.int64)
        return Microstates(
            user_ns=user,
            system_ns=system,
            latency_ns=latency,
            off_cpu_ns=lifetime - sum(parts),
            zombie_ns=zombie,
            lifetime_ns=lifetime,
            latency_is_bound=latency_is_bound,
            impossible=none.astype(np.bool_),
            missed_ns=none,
        )

    def _now(self) -> TaskState:
        stacks: Any = None
        return TaskState(
            classes=self._column("class", np.uint8),
            age_ns=self._column("age_ns"),
            age_bound=self._column("age_bound", np.uint8),
            stacks=stacks,
            waits=(),
        )

    def _sums(self, which: str) -> ProcessSums:
        given = self._values(which)
        return ProcessSums(
            *(np.array([sums.get(name, 0) for sums in given]) for name in _SUMS)
        )

    def _processes(self) -> Processes:
        dead = self._sums("dead")
        return Processes(
            known=self._column("known", np.bool_),
            nr_threads=self._column("threads"),
            group_exit_code=self._column("exit_code"),
            dead=dead,
            dead_sum_exec_ns=dead.utime_ns + dead.stime_ns,
        )

    def _breakdown(self) -> Breakdown:
        """Return a breakdown in which only the covered time is sleep."""
        shares = np.array(self._values("covered"), np.float64)
        known = ~np.isnan(shares)
        slept = np.where(known, np.nan_to_num(shares) * self.lives.off_cpu_ns, 0)
        none = np.zeros(len(shares), np.int64)

        def split(name: str) -> SplitColumn:
            known = np.array([name in thread for thread in self._given], np.bool_)
            return SplitColumn(self._column(name), known)

        def of_sleep(name: str) -> SplitColumn:
            return SplitColumn(self._column(name), known)

        delays = {kind: split(kind) for kind in self._delays}
        return Breakdown(
            sleeps=Sleeps(
                SplitColumn(slept.astype(np.int64), known),
                of_sleep("blocked_ns"),
                of_sleep("iowait_ns"),
            ),
            stopped=split("stopped_ns"),
            interrupted=split("interrupted_ns"),
            delays=delays,
            unexplained_ns=none,
            coverage=shares,
            known=known,
            impossible=np.zeros(len(shares), np.bool_),
        )
