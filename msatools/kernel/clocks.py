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
from drgn.helpers.linux.cpumask import cpu_online_mask

from msatools.kernel.cpumasks import masks_at
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu, read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.structs import read_structs

Nanoseconds = npt.NDArray[np.int64]

_QUEUE = {"clock": ("u8", ("clock",)), "clock_task": ("u8", ("clock_task",))}

_MOST_NS = 1 << 60
"""36 years, more than any machine is up: a clock that says so is damaged."""

_DIFFERENCE = "how CLOCK_MONOTONIC differs from the others"


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


def read_clocks(reader: Reader, findings: Findings) -> Clocks:
    """Read the clocks; a CPU whose run queue cannot be read costs a note.

    :raises LookupError: if no run queue can be found at all
    """
    percpu = reader.once(PerCpu, lambda: read_percpu(reader.prog, findings))
    places = reader.once(read_clocks, lambda: percpu.addresses("runqueues"))
    online = _online(reader, findings)
    chosen = online[percpu.cpus]
    cpus = percpu.cpus[chosen]
    aside = Findings()
    queues = read_structs(reader, "struct rq", _QUEUE, places[chosen], aside)
    known = queues.readable
    known &= (queues["clock"] <= _MOST_NS) & (queues["clock_task"] <= _MOST_NS)
    if np.count_nonzero(known) != np.count_nonzero(online):
        online[cpus[known]] = False
        for cpu in np.flatnonzero(online).tolist():
            findings.lose(Loss.RUN_QUEUES, f"CPU {cpu}'s run queue cannot be read")
    clock = queues["clock"][known].astype(np.int64)
    behind = np.zeros(int(cpus[-1:].max(initial=-1)) + 1, np.int64)
    behind[cpus[known]] = clock - queues["clock_task"][known].astype(np.int64)
    return Clocks(
        local_ns=int(clock.max(initial=0)),
        monotonic_offset_ns=monotonic_offset(reader, findings),
        behind_ns=behind,
    )


def _online(reader: Reader, findings: Findings) -> npt.NDArray[np.bool_]:
    mask = reader.once("online", lambda: cpu_online_mask(reader.prog).value_())
    masks, readable = masks_at(reader, np.array([mask], np.uint64))
    if not readable[0]:
        findings.lose(Loss.CPUS, "which CPUs are online is lost")
    found: npt.NDArray[np.bool_] = masks[0]
    return found


def monotonic_offset(reader: Reader, findings: Findings) -> int | None:
    """Tell by how much the local clock is ahead of CLOCK_MONOTONIC.

    Where the local clock may be unstable (x86), the kernel keeps the difference of the
    two, from when it found the clock to be stable.
    """
    try:
        offset = reader.once(monotonic_offset, lambda: reader.prog["__gtod_offset"])
        # An unsigned variable for a difference with a sign.
        difference = int(np.uint64(offset.value_()).astype(np.int64))
    except LookupError:
        return None
    except drgn.FaultError as error:
        findings.lose(Loss.CLOCKS, f"{_DIFFERENCE} is lost: {error}")
        return None
    if abs(difference) > _MOST_NS:
        findings.lose(Loss.CLOCKS, f"{_DIFFERENCE} cannot be {difference}")
        return None
    return difference
