# SPDX-License-Identifier: LGPL-2.1-or-later

"""Time that a CPU has spent and not counted yet (kernel/sched/cputime.c).

A CPU of nohz_full has no tick to count with while one task runs. It notes when that
task entered the kernel or left it, and counts time as that happens
(CONFIG_VIRT_CPU_ACCOUNTING_GEN). What came since is added for whoever asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.cpus.counts import Counts, Numbers, counts
from msatools.kernel.clocks import Clocks
from msatools.kernel.enums import enumerators
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Members, Structs, read_structs
from msatools.selfdesc.variables import find_variable

_NICE_0 = 120
"""Static priority of a task of nice 0 (include/linux/sched/prio.h)."""

_ANY_CPU = (1 << 32) - 1
"""Of a task that has not run since it was made."""

_MOST_NS = 1 << 60

_TASK: Members = {
    "sequence": ("vtime.seqcount.sequence",),
    "state": ("vtime.state",),
    "cpu": ("vtime.cpu",),
    "start_ns": ("vtime.starttime",),
    "user_ns": ("vtime.utime",),
    "system_ns": ("vtime.stime",),
    "guest_ns": ("vtime.gtime",),
    "static_prio": ("static_prio",),
}


_QUEUE: Members = {"current": ("curr",)}


@dataclass(frozen=True)
class Vtime:
    """What the tasks that run have noted, one row for each CPU."""

    exact: Booleans
    """CPUs that count so."""

    known: Booleans
    """Those of which that can be told, and what their task has noted."""

    here: Booleans
    """Of a task elsewhere a switch is under way, and it is not the one to ask."""

    tasks: Structs

    def lasted_until(self, later: "Vtime") -> bool:
        """Return whether no CPU has counted anything meanwhile, nor is about to."""
        sequence = self.tasks["sequence"]
        # Odd while a task is noting something.
        still = (sequence & 1 == 0) & (later.tasks["sequence"] == sequence)
        still &= self.here & (later.tasks["start_ns"] == self.tasks["start_ns"])
        return bool((still | ~self.exact).all())


def read_vtime(reader: Reader, percpu: PerCpu, losses: LossLog) -> Vtime | None:
    """Read what the tasks that run have noted; ``None`` if no CPU counts so."""
    tracking = _read_tracking(reader, percpu, losses)
    if tracking is None:
        return None
    exact = tracking["active"] != 0
    if not exact.any() and tracking.readable.all():
        return None
    queues = read_structs(
        reader, "struct rq", _QUEUE, percpu.addresses("runqueues"), losses
    )
    current = np.where(exact, queues["current"], 0)
    tasks = read_structs(reader, "struct task_struct", _TASK, current, losses)
    here = (tasks["cpu"] == percpu.cpus) | (tasks["cpu"] == _ANY_CPU)
    known = tracking.readable & (~exact | tasks.readable)
    return Vtime(exact, known, here, tasks)


def uncounted_times(
    prog: drgn.Program, vtime: Vtime, clocks: Clocks, waits: Booleans | None
) -> Mapping[str, Counts]:
    """Return the nanoseconds that each CPU has yet to count, by ``CPUTIME_`` name.

    Like the kernel, it goes by how nice the task is now.

    :param waits: whether tasks that were last there wait for I/O, where idle time is
        counted so too: since v7.2; else ``None``
    """
    states = enumerators(prog, "enum vtime_state")
    tasks = vtime.tasks
    asked = vtime.exact & tasks.readable & vtime.here
    now = clocks.local_ns - _clock_offset(prog)
    start = np.minimum(tasks["start_ns"], _MOST_NS).astype(np.int64)
    since = np.maximum(now - start, 0)
    nice = tasks["static_prio"] > _NICE_0

    def part(state: str, column: str | None, which: Booleans | None = None) -> Numbers:
        chosen = asked & (tasks["state"] == states[f"VTIME_{state}"])
        if which is not None:
            chosen = chosen & which
        if column is None:
            return np.where(chosen, since, 0)
        pending = np.minimum(tasks[column], _MOST_NS).astype(np.int64)
        return np.where(chosen, since + pending, 0)

    guest, nice_guest = (part("GUEST", "guest_ns", which) for which in (~nice, nice))
    # Guests' time is user time, too.
    times: dict[str, Numbers] = {
        "SYSTEM": part("SYS", "system_ns"),
        "USER": part("USER", "user_ns", ~nice) + guest,
        "NICE": part("USER", "user_ns", nice) + nice_guest,
        "GUEST": guest,
        "GUEST_NICE": nice_guest,
    }
    if waits is not None:
        times["IDLE"] = part("IDLE", None, ~waits)
        times["IOWAIT"] = part("IDLE", None, waits)
    return {name: counts(numbers, vtime.known) for name, numbers in times.items()}


def _read_tracking(reader: Reader, percpu: PerCpu, losses: LossLog) -> Structs | None:
    """Read which CPUs count so; ``None`` if the kernel has no such accounting."""
    # A member tells: to look for a symbol that is not there takes long the first time.
    if not reader.prog.type("struct task_struct").has_member("vtime"):
        return None
    try:
        tracking = read_structs(
            reader,
            "struct context_tracking",
            {"active": ("active",)},
            percpu.addresses("context_tracking"),
            losses,
        )
    except LookupError:
        return None
    return tracking if tracking.has("active") else None


def _clock_offset(prog: drgn.Program) -> int:
    """Return by how much the local clock is ahead of ``sched_clock()``.

    There is no such where it cannot be unstable.
    """
    try:
        offset = find_variable(prog, "__sched_clock_offset").value_()
    except (LookupError, drgn.FaultError):
        return 0
    return int(np.uint64(offset).astype(np.int64))
