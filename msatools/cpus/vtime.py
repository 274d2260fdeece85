# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pending CPU time that is not counted yet (kernel/sched/cputime.c).

A nohz_full CPU has no tick while one task runs. It counts time when the task enters or
leaves the kernel (CONFIG_VIRT_CPU_ACCOUNTING_GEN). The time since then is added when
the counters are read.
"""

from collections.abc import Mapping

import drgn
import numpy as np
from msgspec import Struct

from msatools.cpus.counts import Counts, Numbers, counts
from msatools.errors import LOST, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.enums import enumerators
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Members, Structs, read_structs
from msatools.kernel.words import MAX_PLAUSIBLE
from msatools.selfdesc.find import find_type, find_variable

_NICE_0 = 120
"""Static priority of a task of nice 0 (include/linux/sched/prio.h)."""

_ANY_CPU = (1 << 32) - 1
"""``vtime.cpu`` of a task that has not run yet."""

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


class Vtime(Struct, frozen=True):
    """``struct vtime`` of the running task of each CPU."""

    exact: Booleans
    """Whether each CPU counts at entries and exits."""

    known: Booleans
    """Whether *exact* and, if it is set, the task could be read."""

    here: Booleans
    """Whether the task's vtime is of this CPU; if not, a switch is under way."""

    tasks: Structs

    def lasted_until(self, later: "Vtime") -> bool:
        """Return whether no CPU has counted anything meanwhile, nor is doing so."""
        sequence = self.tasks["sequence"]
        # Odd while the task is being updated.
        still = (sequence & 1 == 0) & (later.tasks["sequence"] == sequence)
        still &= self.here & (later.tasks["start_ns"] == self.tasks["start_ns"])
        return bool((still | ~self.exact).all())


def read_vtime(reader: Reader, percpu: PerCpu, losses: LossLog) -> Vtime | None:
    """Read the vtime of the running tasks; ``None`` if no CPU counts so."""
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
    """Return the pending nanoseconds of each CPU, by ``CPUTIME_`` name.

    Like the kernel, use the task's current nice value.

    :param waits: whether a task that was last on the CPU waits for I/O, if idle time is
        counted so, too (as of v7.2); else ``None``
    """
    states = enumerators(prog, "enum vtime_state")
    tasks = vtime.tasks
    asked = vtime.exact & tasks.readable & vtime.here
    now = clocks.local_ns - _clock_offset(prog)
    start = np.minimum(tasks["start_ns"], MAX_PLAUSIBLE).astype(np.int64)
    since = np.maximum(now - start, 0)
    nice = tasks["static_prio"] > _NICE_0

    def part(state: str, column: str | None, which: Booleans | None = None) -> Numbers:
        chosen = asked & (tasks["state"] == states[f"VTIME_{state}"])
        if which is not None:
            chosen = chosen & which
        if column is None:
            return np.where(chosen, since, 0)
        pending = np.minimum(tasks[column], MAX_PLAUSIBLE).astype(np.int64)
        return np.where(chosen, since + pending, 0)

    guest, nice_guest = (part("GUEST", "guest_ns", which) for which in (~nice, nice))
    # Guests' time is included in user time.
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
    # Check the member first: the first lookup of a missing symbol takes long.
    if not find_type(reader.prog, "struct task_struct").has_member("vtime"):
        return None
    try:
        tracking = read_structs(
            reader,
            "struct context_tracking",
            {"active": ("active",)},
            percpu.addresses("context_tracking"),
            losses,
        )
    except MissingError:
        return None
    return tracking if tracking.has("active") else None


def _clock_offset(prog: drgn.Program) -> int:
    """Return the offset of the local clock to ``sched_clock()``.

    0 on architectures whose clock is always stable.
    """
    try:
        offset = find_variable(prog, "__sched_clock_offset").value_()
    except LOST:
        return 0
    return int(np.uint64(offset).astype(np.int64))
