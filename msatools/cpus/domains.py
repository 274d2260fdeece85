# SPDX-License-Identifier: LGPL-2.1-or-later

"""Root domains: the CPUs among which the scheduler spreads tasks.

kernel/sched/topology.c: each domain that is balanced has a ``struct root_domain``. CPUs
of none, such as isolated and offline ones, are in ``def_root_domain``.
"""

from dataclasses import dataclass
from types import MappingProxyType

import drgn

from msatools.kernel.cpumask import Cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.selfdesc.variables import find_variable
from msatools.target.model import Address

_RUN_QUEUE = {"domain": ("rd",)}


@dataclass(frozen=True)
class RootDomains:
    """Which root domain each CPU is in."""

    by_cpu: MappingProxyType[int, int]
    """Addresses; CPUs whose could not be read are missing."""

    unbalanced: int | None
    """The one of those that are in none; ``None`` if the kernel has not yet made
    others, or nothing tells which it is."""

    def alone(self, cpus: Cpus) -> Cpus:
        """Return those of some CPUs that the scheduler spreads no tasks to."""
        if self.unbalanced is None:
            return ()
        return tuple(c for c in cpus if self.by_cpu.get(c) == self.unbalanced)

    def of(self, cpus: Cpus) -> Address | None:
        """Return the root domain of the online CPUs; ``None`` if several or none."""
        found = {self.by_cpu.get(cpu) for cpu in cpus}
        if len(found) != 1:
            return None
        (domain,) = found
        return None if domain in (None, self.unbalanced) else Address(domain or 0)

    def balanced(self, cpus: Cpus) -> bool | None:
        """Return whether the scheduler spreads tasks over CPUs that are online.

        ``None`` if over some of them only, or if that is not known.
        """
        if self.unbalanced is None or not cpus:
            return None
        found = {self.by_cpu.get(cpu) for cpu in cpus}
        if found == {self.unbalanced}:
            return False
        return None if len(found) > 1 or None in found else True


def read_root_domains(reader: Reader, percpu: PerCpu, losses: LossLog) -> RootDomains:
    """Read the root domain of each CPU, one read a CPU."""
    try:
        queues = percpu.addresses("runqueues")
        found = read_structs(reader, "struct rq", _RUN_QUEUE, queues, losses)
        if not found.has("domain"):
            # Without SMP there are no domains.
            return RootDomains(MappingProxyType({}), None)
        unbalanced = _unbalanced(reader)
    except LookupError as error:
        losses.note("no-root-domains", f"root domains cannot be told: {error}")
        return RootDomains(MappingProxyType({}), None)
    except drgn.FaultError as error:
        losses.lose(Loss.DOMAINS, f"root domains are lost: {error}")
        return RootDomains(MappingProxyType({}), None)
    known = found.readable & (found["domain"] != 0)
    pairs = zip(
        percpu.cpus[known].tolist(), found["domain"][known].tolist(), strict=True
    )
    return RootDomains(MappingProxyType(dict(pairs)), unbalanced)


def _unbalanced(reader: Reader) -> int | None:
    """Find ``def_root_domain``, where all CPUs are until the kernel has made others.

    :raises LookupError: if it is not found
    """
    address: int = find_variable(reader.prog, "def_root_domain").address_
    made = find_variable(reader.prog, "sched_smp_initialized")
    return address if reader.read(made.address_, 1) != b"\0" else None
