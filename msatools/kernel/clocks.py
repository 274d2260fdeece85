# SPDX-License-Identifier: LGPL-2.1-or-later

"""What time it is, in each of the clocks that the scheduler stamps tasks with.

kernel/sched/clock.c and kernel/sched/core.c. All in nanoseconds:

- a run queue's clock (``rq->clock``) is the local clock of its CPU, which all CPUs
  share where it is stable; run queue stamps (``sched_info``) are taken with it;
- its task clock (``rq->clock_task``) leaves out time of interrupts and the hypervisor;
  ``sum_exec_runtime`` and ``exec_start`` are in it;
- CLOCK_MONOTONIC stamps the start of tasks.
"""

from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.percpu import per_cpu

from msatools.kernel.report import Findings

Nanoseconds = npt.NDArray[np.int64]

_MOST_NS = 1 << 60
"""36 years, more than any machine is up: a clock that says so is damaged."""


@dataclass(frozen=True)
class Clocks:
    """The clocks at one moment."""

    local_ns: int
    """The local clock: the latest of all run queues', as idle ones lag behind."""

    monotonic_offset_ns: int | None
    """What to add to CLOCK_MONOTONIC to have the local clock; ``None`` if unknown."""

    behind_ns: Nanoseconds
    """By CPU: how far its task clock is behind the local clock."""

    @property
    def monotonic_ns(self) -> int | None:
        """CLOCK_MONOTONIC."""
        if self.monotonic_offset_ns is None:
            return None
        return self.local_ns - self.monotonic_offset_ns

    def task_clock_ns(self, cpus: npt.NDArray[np.uint32]) -> Nanoseconds:
        """Tell the task clocks of some CPUs; the local clock where there is no CPU."""
        known = cpus < len(self.behind_ns)
        behind = np.zeros(len(cpus), np.int64)
        behind[known] = self.behind_ns[cpus[known]]
        return self.local_ns - behind


def read_clocks(prog: drgn.Program, findings: Findings) -> Clocks:
    """Read the clocks; a CPU whose run queue cannot be read costs a note.

    :raises LookupError: if no run queue can be found at all
    """
    clocks: dict[int, tuple[int, int]] = {}
    queues = prog["runqueues"]
    for cpu in for_each_online_cpu(prog):
        try:
            queue = per_cpu(queues, cpu)
            times = queue.clock.value_(), queue.clock_task.value_()
            if max(times) > _MOST_NS:
                raise drgn.FaultError("no such time", queue.address_)
            clocks[cpu] = times
        except drgn.FaultError as error:
            findings.coverage["run_queues_unreadable"] += 1
            findings.lose("run queues", f"CPU {cpu}'s run queue is lost: {error}")
    behind = np.zeros(max(clocks, default=-1) + 1, np.int64)
    for cpu, (clock, clock_task) in clocks.items():
        behind[cpu] = clock - clock_task
    return Clocks(
        local_ns=max((clock for clock, _ in clocks.values()), default=0),
        monotonic_offset_ns=_monotonic_offset(prog, findings),
        behind_ns=behind,
    )


def _monotonic_offset(prog: drgn.Program, findings: Findings) -> int | None:
    """Tell by how much the local clock is ahead of CLOCK_MONOTONIC.

    Where the local clock may be unstable (x86), the kernel keeps the difference of the
    two, from when it found the clock to be stable.
    """
    try:
        offset = prog["__gtod_offset"].value_()
    except (LookupError, drgn.FaultError):
        return None
    # An unsigned member for a difference with a sign.
    difference = int(np.uint64(offset).astype(np.int64))
    if abs(difference) > _MOST_NS:
        findings.lose("clocks", "how CLOCK_MONOTONIC differs from the others is lost")
        return None
    return difference
