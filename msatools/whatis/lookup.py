# SPDX-License-Identifier: LGPL-2.1-or-later

"""The readers that all answers share; each is made when it is first needed."""

from functools import cached_property

import numpy as np

from msatools.errors import LOST, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.pagetables import PageTables
from msatools.kernel.paths import Paths
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.struct_reader import Layout
from msatools.locks.places.variables import Variables
from msatools.locks.reasons import standing
from msatools.memory.pages.layout import PageLayout, page_layout
from msatools.memory.pages.memmap import MemmapRange, memmap_ranges
from msatools.memory.unattributed.symbolnames import SymbolNames
from msatools.selfdesc.find import find_variable
from msatools.target.model import Address
from msatools.tasks.identity import comm_text
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.table import TaskReader, TaskTable
from msatools.whatis.model import Task

_TASK = "struct task_struct"


class Lookup:
    """What is looked up once for all addresses of a report."""

    def __init__(self, reader: Reader, clocks: Clocks, losses: LossLog) -> None:
        self.reader = reader
        self.prog = reader.prog
        self.losses = losses
        self._clocks = clocks

    @cached_property
    def structs(self) -> Layout:
        """Reads members of single structures."""
        return Layout(self.reader)

    @cached_property
    def page_size(self) -> int:
        """Bytes of a page."""
        return int(find_variable(self.prog, "PAGE_SIZE").value_())

    @cached_property
    def page(self) -> PageLayout:
        """Layout of ``struct page``."""
        return page_layout(self.prog)

    @cached_property
    def memmap(self) -> list[MemmapRange]:
        """Ranges of the memmap; none if it is lost."""
        try:
            return memmap_ranges(self.reader, self.page, self.losses)
        except LOST:
            return []

    @cached_property
    def tables(self) -> PageTables | None:
        """The kernel's page tables; ``None`` if their format is unknown."""
        try:
            return PageTables(self.reader, self.losses)
        except MissingError:
            return None

    @cached_property
    def symbols(self) -> SymbolNames:
        """Functions and variables of the kernel and of modules."""
        return SymbolNames(self.reader, self.losses)

    @cached_property
    def variables(self) -> Variables:
        """Variables of CPUs."""
        return Variables(self.structs, self.losses)

    @cached_property
    def tasks(self) -> TaskTable:
        """All threads but the idle tasks."""
        return TaskReader(self.reader).read_all(self.losses)

    @cached_property
    def stacks(self) -> dict[int, int]:
        """Maps the lowest address of each kernel stack to its ``task_struct``."""
        stacks = self.tasks["stack"].tolist(), self.tasks["address"].tolist()
        idle = read_structs(
            self.reader, _TASK, {"stack": ("stack",)}, self._idle, self.losses
        )
        own = idle["stack"].tolist(), self._idle.tolist()
        found = dict(zip(*own, strict=True)) | dict(zip(*stacks, strict=True))
        found.pop(0, None)
        return found

    @cached_property
    def paths(self) -> Paths:
        """Paths of files."""
        return Paths(self.reader, self.losses)

    @cached_property
    def stack_bytes(self) -> int:
        """Size of a kernel stack."""
        return stack_bytes(self.prog)

    @cached_property
    def _idle(self) -> Addresses:
        """Addresses of the idle tasks."""
        queues = read_percpu(self.reader, self.losses).addresses("runqueues")
        members = {"idle": ("idle",)}
        read = read_structs(self.reader, "struct rq", members, queues, self.losses)
        idle: Addresses = read["idle"].astype(np.uint64)
        found: Addresses = idle[idle != 0]
        return found

    @cached_property
    def locks(self) -> LockContext:
        """What reading locks and naming structures takes, without any waits."""
        return LockContext(
            self.structs, self.tasks, self.losses, self._clocks, alone=True
        )

    def task(self, address: int) -> Task:
        """Return the task of a ``struct task_struct``.

        :raises drgn.FaultError: if it cannot be read
        """
        pid = self.structs.member(address, "task_struct", "pid")
        comm = self.structs.text(address, "task_struct", "comm")
        rows = np.flatnonzero(self.tasks["address"] == np.uint64(address))
        return Task(
            pid=pid,
            comm=comm,
            address=Address(address),
            standing=standing(self.locks, int(rows[0])) if len(rows) else None,
        )

    def process_of(self, mm: int) -> Task | None:
        """Return a process with an address space, its leader if there is one.

        :param mm: Address of its ``struct mm_struct``.
        """
        tasks = self.tasks
        users = np.flatnonzero(tasks["mm"] == np.uint64(mm))
        if not mm or not len(users):
            return None
        leaders = users[tasks.leaders[users]]
        record = tasks.records[(leaders if len(leaders) else users)[0]]
        return Task(
            pid=int(record["pid"]),
            comm=comm_text(record["comm"]),
            address=Address(int(record["address"])),
        )
