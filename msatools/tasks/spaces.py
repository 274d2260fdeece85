# SPDX-License-Identifier: LGPL-2.1-or-later

"""The address spaces of processes."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.tasks.identity import comm_text
from msatools.tasks.table import PF_KTHREAD, TaskReader, TaskTable

_MM: Members = {"pgd": ("pgd",), "tables": ("pgtables_bytes.counter",)}


class AddressSpace(Struct, frozen=True):
    """An address space, and one of its threads."""

    pid: int
    comm: str
    top: int
    """Address of its top-level page table."""

    table_bytes: int | None = None
    """Memory of its page tables: VmPTE of /proc/PID/status."""


def address_spaces(reader: Reader, losses: LossLog) -> list[AddressSpace]:
    """Return the address spaces of all threads, each with one of its threads."""
    tasks = TaskReader(reader).read_all(losses)
    tasks = tasks.only((tasks["mm"] != 0) & ((tasks["flags"] & PF_KTHREAD) == 0))
    chosen = _first_of_each(tasks)
    mms: Addresses = tasks["mm"][chosen].astype(np.uint64)
    structs = read_structs(reader, "struct mm_struct", _MM, mms, losses)
    comms = tasks["comm"][chosen].tolist()
    pids = tasks["pid"][chosen].tolist()
    return [
        AddressSpace(pid, comm_text(comm), top, tables)
        for pid, comm, top, tables, known in zip(
            pids,
            comms,
            structs["pgd"].tolist(),
            structs["tables"].tolist(),
            structs.readable.tolist(),
            strict=True,
        )
        if known
    ]


def _first_of_each(tasks: TaskTable) -> npt.NDArray[np.intp]:
    """
    Choose one thread for each address space, preferably a leader.

    If processes share an address space, as between vfork() and execve(), the lowest
    PID is chosen.
    """
    order = np.lexsort((tasks["pid"], ~tasks.leaders, tasks["mm"]))
    ascending = tasks["mm"][order]
    first = np.ones(len(order), np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    return order[first]
