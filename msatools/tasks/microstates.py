# SPDX-License-Identifier: LGPL-2.1-or-later

"""Decompose each thread's lifetime: user, system, latency, off the CPU, zombie.

Pure: takes a table of tasks and the clocks. Every kernel keeps the fields needed here
at all times (kernel/sched/cputime.c, stats.h), so the states add up to the lifetime:
time neither on the CPU nor waiting for one is off the CPU.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.kernel.accounting import Accounting
from msatools.kernel.clocks import Clocks, Nanoseconds
from msatools.kernel.structs import Booleans
from msatools.tasks.table import PF_KTHREAD, TaskTable

EXIT_ZOMBIE = 0x20

BOUND_NS = 10_000_000
"""Maximum error of the sums: one tick, by which an idle CPU's clock may lag."""

UNSTABLE_BOUND_NS = 100_000_000
"""The same with unstable clocks: each CPU's clock stops one tick after its last tick
(sched_clock_local()). An emulated CPU may go without a tick for any time; this is a
few times the worst measured: 17 ms, in a guest with the HPET as clock source."""


class Microstates(Struct, frozen=True):
    """One value a thread, in nanoseconds; the first five make up the lifetime."""

    user_ns: Nanoseconds
    system_ns: Nanoseconds
    latency_ns: Nanoseconds
    off_cpu_ns: Nanoseconds
    zombie_ns: Nanoseconds
    lifetime_ns: Nanoseconds
    latency_is_bound: bool
    """Whether latency may include sleep: see :func:`microstates`."""

    impossible: Booleans
    """Whether the kernel's latency exceeded the lifetime by more than the bound of the
    clocks, and was cut."""

    missed_ns: Nanoseconds
    """By how much the counted times exceeded the lifetime before they were cut."""


def bound_of(accounting: Accounting) -> int:
    """Return the maximum difference of this kernel's clocks, in nanoseconds."""
    return BOUND_NS if accounting.stable_clock else UNSTABLE_BOUND_NS


def microstates(
    tasks: TaskTable, clocks: Clocks, bound_ns: int = BOUND_NS
) -> Microstates:
    """Decompose each thread's life up to now.

    Time on the CPU is exact, and split as the kernel does: by ticks, which sample user
    and system mode. Latency is exact up to Linux 6.11; since "sched/fair: Implement
    delayed dequeue" (in v6.12) a task may sleep on the run queue, which counts as
    latency when it wakes up: an upper bound.

    :param bound_ns: see :func:`bound_of`
    """
    now_task = clocks.task_clock_ns(tasks["cpu"])
    dead = tasks["exit_state"] != 0
    on_cpu = (tasks["on_cpu"] != 0) & ~dead
    cpu_ns = tasks["sum_exec_ns"].astype(np.int64)
    exec_start = tasks["exec_start_ns"].astype(np.int64)
    cpu_ns = cpu_ns + np.where(on_cpu, np.maximum(now_task - exec_start, 0), 0)
    started = tasks["start_ns"].astype(np.int64) + (clocks.monotonic_offset_ns or 0)
    lifetime = np.maximum(clocks.local_ns - started, 0)
    zombie = np.where(dead, np.clip(now_task - exec_start, 0, lifetime), 0)
    latency = tasks["run_delay_ns"].astype(np.int64) + _open_latency(
        tasks, clocks, dead
    )

    left = lifetime - cpu_ns - zombie
    missed = np.maximum(latency - left, 0)
    latency = np.clip(latency, 0, np.maximum(left, 0))
    # Time on the CPU is counted, time as a zombie is the difference of two CPUs'
    # clocks: the latter is cut.
    cpu_ns = np.minimum(cpu_ns, lifetime)
    zombie = np.minimum(zombie, lifetime - cpu_ns)
    user = user_time(cpu_ns, tasks["utime_ns"], tasks["stime_ns"], tasks["flags"])
    return Microstates(
        user_ns=user,
        system_ns=cpu_ns - user,
        latency_ns=latency,
        off_cpu_ns=lifetime - zombie - cpu_ns - latency,
        zombie_ns=zombie,
        lifetime_ns=lifetime,
        latency_is_bound=tasks.has("sched_delayed"),
        impossible=missed > bound_ns,
        missed_ns=missed,
    )


def without_sleep(lives: Microstates, slept_ns: Nanoseconds) -> Microstates:
    """Move known sleep from latency to off-CPU time, if latency is an upper bound.

    A delayed sleeper that was moved to another CPU has its next sleep counted twice:
    in ``sum_sleep_runtime``, where it belongs, and in ``run_delay`` (v6.12).

    :param slept_ns: Minimum time that each thread has slept.
    """
    if not lives.latency_is_bound:
        return lives
    twice = np.clip(slept_ns - lives.off_cpu_ns, 0, lives.latency_ns)
    return replace(
        lives,
        latency_ns=lives.latency_ns - twice,
        off_cpu_ns=lives.off_cpu_ns + twice,
    )


def _open_latency(tasks: TaskTable, clocks: Clocks, dead: Booleans) -> Nanoseconds:
    """Return how long each thread has been waiting for a CPU; 0 if it is not."""
    queued = tasks["last_queued_ns"].astype(np.int64)
    waits = waits_for_cpu(tasks) & ~dead & (queued != 0)
    return np.where(waits, np.maximum(clocks.local_ns - queued, 0), 0)


def waits_for_cpu(tasks: TaskTable) -> Booleans:
    """Return which threads are runnable but not on a CPU."""
    waits: Booleans = (
        (tasks["state"] == 0) & (tasks["on_rq"] != 0) & (tasks["on_cpu"] == 0)
    )
    if tasks.has("sched_delayed"):
        waits &= tasks["sched_delayed"] == 0
    return waits


def user_time(
    cpu_ns: Nanoseconds,
    utime_ns: npt.NDArray[Any],
    stime_ns: npt.NDArray[Any],
    flags: npt.NDArray[np.uint32],
    otherwise: npt.NDArray[np.float64] | float = 1.0,
) -> Nanoseconds:
    """Return the part of the CPU time in user mode, by ticks (cputime_adjust()).

    Kernel threads have no user mode.

    :param flags: ``task_struct.flags``.
    :param otherwise: Share of user mode of a thread without a tick; 1, as in the
        kernel.
    """
    utime = utime_ns.astype(np.float64)
    ticks = utime + stime_ns
    share = np.zeros(len(ticks)) + otherwise
    np.divide(utime, ticks, out=share, where=ticks > 0)
    share[(flags & PF_KTHREAD) != 0] = 0
    return np.minimum((cpu_ns * share).astype(np.int64), cpu_ns)
