# SPDX-License-Identifier: LGPL-2.1-or-later

"""Root domains: the CPUs among which the scheduler balances tasks.

kernel/sched/topology.c: each balanced domain has a ``struct root_domain``. CPUs outside
of them, such as isolated and offline ones, are in ``def_root_domain``.
"""

from types import MappingProxyType

from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.cpumask import Cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.selfdesc.find import find_variable
from msatools.target.model import Address

_RUN_QUEUE = {"domain": ("rd",)}


class RootDomains(Struct, frozen=True):
    """The root domain of each CPU."""

    by_cpu: MappingProxyType[int, int]
    """Addresses by CPU, without those that could not be read."""

    unbalanced: int | None
    """Address of ``def_root_domain``; ``None`` if not found, or if the kernel has not
    built others yet."""

    def alone(self, cpus: Cpus) -> Cpus:
        """Return those of some CPUs that the scheduler does not balance."""
        if self.unbalanced is None:
            return ()
        return tuple(c for c in cpus if self.by_cpu.get(c) == self.unbalanced)

    def of(self, cpus: Cpus) -> Address | None:
        """Return the root domain of some online CPUs; ``None`` if several or none."""
        domains = {self.by_cpu.get(cpu) for cpu in cpus}
        if len(domains) != 1:
            return None
        (domain,) = domains
        return None if domain in (None, self.unbalanced) else Address(domain or 0)

    def balanced(self, cpus: Cpus) -> bool | None:
        """Return whether the scheduler balances tasks among some online CPUs.

        ``None`` if only among a part of them, or if unknown.
        """
        if self.unbalanced is None or not cpus:
            return None
        domains = {self.by_cpu.get(cpu) for cpu in cpus}
        if domains == {self.unbalanced}:
            return False
        return None if len(domains) > 1 or None in domains else True


def read_root_domains(reader: Reader, percpu: PerCpu, losses: LossLog) -> RootDomains:
    """Read the root domain of each CPU, one read a CPU."""
    try:
        queues = percpu.addresses("runqueues")
        found = read_structs(reader, "struct rq", _RUN_QUEUE, queues, losses)
        if not found.has("domain"):
            # Without CONFIG_SMP.
            return RootDomains(MappingProxyType({}), None)
        unbalanced = _unbalanced(reader)
    except MissingError as error:
        losses.note("no-root-domains", f"root domains are unknown: {error}")
        return RootDomains(MappingProxyType({}), None)
    except UNREADABLE as error:
        losses.lose(Loss.DOMAINS, f"cannot read root domains: {error}")
        return RootDomains(MappingProxyType({}), None)
    known = found.readable & (found["domain"] != 0)
    pairs = zip(
        percpu.cpus[known].tolist(), found["domain"][known].tolist(), strict=True
    )
    return RootDomains(MappingProxyType(dict(pairs)), unbalanced)


def _unbalanced(reader: Reader) -> int | None:
    """Find ``def_root_domain``; ``None`` before the kernel has built other domains.

    :raises MissingError: if it is not found
    """
    address: int = find_variable(reader.prog, "def_root_domain").address_
    initialized = find_variable(reader.prog, "sched_smp_initialized")
    return address if reader.read(initialized.address_, 1) != b"\0" else None
