# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each thread was delayed by (``struct task_delay_info``, kernel/delayacct.c)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.structs import Booleans, read_structs
from msatools.tasks.table import TaskTable, cut

# In the order in which the kernel has come to have them; it keeps those of its time.
KINDS = ("blkio", "swapin", "freepages", "thrashing", "compact", "wpcopy", "irq")

_MEMBERS = {
    **{f"{kind}_ns": ("u8", (f"{kind}_delay",)) for kind in KINDS},
    **{f"{kind}_count": ("u4", (f"{kind}_count",)) for kind in KINDS},
}


@dataclass(frozen=True)
class Delays:
    """One value a thread, by the kinds of delay that this kernel keeps.

    ``thrashing`` overlaps ``blkio`` and ``swapin``. A delay that lasts is in none yet.
    """

    has: Booleans
    """Whether the kernel keeps delays of the thread: not if it was forked while they
    were off, nor if they cannot be read. All else is zero if not."""

    delay_ns: Mapping[str, Nanoseconds]
    count: Mapping[str, npt.NDArray[np.int64]]


def read_delays(reader: Reader, tasks: TaskTable, findings: Findings) -> Delays:
    """Read the delays of each thread."""
    if not tasks.has("delays"):
        return Delays(np.zeros(len(tasks), np.bool_), {}, {})
    infos = read_structs(
        reader,
        "struct task_delay_info",
        _MEMBERS,
        tasks["delays"].astype(np.uint64),
        findings,
    )
    kept = [kind for kind in KINDS if infos.has(f"{kind}_ns")]
    return Delays(
        has=infos.readable,
        delay_ns={kind: cut(infos[f"{kind}_ns"], findings) for kind in kept},
        count={kind: infos[f"{kind}_count"].astype(np.int64) for kind in kept},
    )
