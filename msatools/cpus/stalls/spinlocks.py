# SPDX-License-Identifier: LGPL-2.1-or-later

"""The spinlocks that CPUs spin for, and who has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msatools.cpus.stalls.contexts import Context
from msatools.cpus.stalls.cpureader import CpuReader
from msatools.cpus.stalls.lock_code import refers_to
from msatools.cpus.stalls.model import SpinlockOwner, WantedLock
from msatools.target.model import Address
from msatools.tasks.identity import comm_text
from msatools.tasks.runningstacks import CpuStack
from msatools.tasks.stackmemory import stack_bytes

Contexts = Mapping[int, tuple[Context, CpuStack]]
"""What CPUs do, and their stacks."""


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

    def with_owners(
        self,
        locks: dict[int, WantedLock],
        contexts: Contexts,
        read: Callable[[Sequence[int]], Contexts],
    ) -> dict[int, WantedLock]:
        """Find who has a static lock whose address no other CPU has on its stack.

        It must have disabled preemption, and be in code that refers to the lock.

        :param read: Returns what other CPUs do, and their stacks.
        """
        if all(lock.owners for lock in locks.values()):
            return locks
        cpus = self._cpus
        others = [
            cpu for cpu in cpus.queues if cpu in cpus.online and not cpus.is_idle(cpu)
        ]
        unread = [cpu for cpu in others if cpu not in contexts]
        contexts = {**contexts, **read(unread)}
        counts = cpus.counts.by_cpu
        found = {}
        for spinning, lock in locks.items():
            owners = lock.owners or tuple(
                self._owner(cpu)
                for cpu, (context, stack) in contexts.items()
                if context.why != "spins-for-lock"
                and self._has_locked(context, stack, counts.get(cpu))
                and refers_to(cpus.reader, cpus.text, stack.pcs, lock.address)
            )
            owners = owners if len(owners) == 1 or lock.owners else ()
            found[spinning] = replace(lock, owners=owners)
        return found

    @staticmethod
    def _has_locked(context: Context, stack: CpuStack, count: int | None) -> bool:
        """Return whether a CPU may have a spinlock."""
        off = stack.flags.get(context.skipped) == "off"
        return context.mode != "user" and (off or bool(count))

    def _owner(self, cpu: int) -> SpinlockOwner:
        current = self._cpus.queues[cpu].current
        return SpinlockOwner(
            pid=0 if current is None else current.pid,
            comm="" if current is None else current.comm,
            cpu=cpu,
            confidence="evidence",
        )
