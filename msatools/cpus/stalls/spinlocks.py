# SPDX-License-Identifier: LGPL-2.1-or-later

"""The spinlocks that CPUs spin for, and who has them."""

from msatools.cpus.stalls.cpureader import CpuReader
from msatools.cpus.stalls.model import SpinlockOwner, WantedLock
from msatools.target.model import Address
from msatools.tasks.identity import comm_text
from msatools.tasks.stackmemory import stack_bytes


class WantedLocks:
    """Finds the spinlocks that CPUs spin for."""

    def __init__(self, cpus: CpuReader) -> None:
        self._cpus = cpus

    def locks(self) -> dict[int, WantedLock]:
        """Return the spinlock that each CPU spins for, and who has it."""
        # CPUs rarely spin for long, and it takes a tenth of a second to import.
        from msatools.locks.base.lock_context import LockContext
        from msatools.locks.base.struct_reader import Layout
        from msatools.locks.names.names import LockNames
        from msatools.locks.sleeping.spinlocks import Spin, spins

        running = self._cpus.running
        context = LockContext(
            Layout(self._cpus.reader),
            running.table,
            self._cpus.losses,
            self._cpus.clocks,
            alone=False,
        )
        found = spins(context, stack_bytes(self._cpus.reader.prog))
        names = LockNames(context)
        cpus = {row: cpu for cpu, row in running.rows.items()}
        addresses: list[int] = running.table["address"].tolist()
        by_task = {address: row for row, address in enumerate(addresses)}

        def owners(spin: Spin) -> tuple[SpinlockOwner, ...]:
            rows = [by_task.get(holder.task) for holder in spin.holders]
            return tuple(
                SpinlockOwner(
                    pid=int(running.table["pid"][row]),
                    comm=comm_text(running.table["comm"][row]),
                    cpu=cpus.get(row),
                    confidence="evidence",
                )
                for row in rows
                if row is not None
            )

        return {
            cpus[spin.row]: WantedLock(
                address=Address(spin.request.lock.address or 0),
                name=names.name(spin.request.lock, ()).name,
                owners=owners(spin),
            )
            for spin in found
            if spin.row in cpus
        }
