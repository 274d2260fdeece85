# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's CPU masks, isolated CPUs, and the scheduler's root domains."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import drgn
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import (
    Cpus,
    PerCpu,
    kept_mask,
    mask_at,
    place_of,
    try_mask,
    with_stopped,
)
from msatools.kernel.reader import Reader, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import constant, read_structs
from msatools.program.model import Address
from msatools.selfdesc.find import find_variable

# --- Root domains: the CPUs among which the scheduler balances tasks.
#
# kernel/sched/topology.c: each balanced domain has a struct root_domain. CPUs outside
# of them, such as isolated and offline ones, are in def_root_domain.


_RUN_QUEUE = {"domain": ("rd",)}


class RootDomains(Struct, frozen=True):
    """The root domain of each CPU."""

    by_cpu: MappingProxyType[int, int]
    """Address of the root domain by CPU, without CPUs that could not be read."""

    unbalanced: int | None
    """Address of ``def_root_domain``; ``None`` if not found, or if the kernel has not
    built other root domains yet."""

    def alone(self, cpus: Cpus) -> Cpus:
        """Return the CPUs of *cpus* that the scheduler does not balance."""
        if self.unbalanced is None:
            return ()
        return tuple(c for c in cpus if self.by_cpu.get(c) == self.unbalanced)

    def of(self, cpus: Cpus) -> Address | None:
        """Return the root domain of some online CPUs, if they all have the same one."""
        domains = {self.by_cpu.get(cpu) for cpu in cpus}
        if len(domains) != 1:
            return None
        (domain,) = domains
        return None if domain in (None, self.unbalanced) else Address(domain or 0)

    def balanced(self, cpus: Cpus) -> bool | None:
        """Return whether the scheduler balances tasks among *cpus*, which are online.

        ``None`` if they are in several root domains, or if unknown.
        """
        if self.unbalanced is None or not cpus:
            return None
        domains = {self.by_cpu.get(cpu) for cpu in cpus}
        if domains == {self.unbalanced}:
            return False
        return None if len(domains) > 1 or None in domains else True


def read_root_domains(reader: Reader, percpu: PerCpu, losses: LossLog) -> RootDomains:
    """Read the root domain of each CPU, with one read for each."""
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
    """Return the address of ``def_root_domain``; ``None`` if the kernel has not built
    other domains yet.

    :raises MissingError: if the variable is not found
    """
    address: int = find_variable(reader.prog, "def_root_domain").address_
    initialized = find_variable(reader.prog, "sched_smp_initialized")
    return address if reader.read(initialized.address_, 1) != b"\0" else None


# --- The kernel's CPU masks: possible, present, online, active, and isolated CPUs.
#
# kernel/cpu.c, kernel/sched/isolation.c, kernel/time/tick-sched.c,
# kernel/rcu/tree_nocb.h, kernel/cgroup/cpuset.c.


_MAX_COMMAND_LINE = 1 << 16
"""Maximum bytes of the command line that are read: COMMAND_LINE_SIZE (2 KiB) and a boot
configuration (32 KiB, init/main.c) fit."""

# Types of housekeeping, the newest name first; their numbers differ between kernels.
# Since Linux kernel commit 4fca0e550d50 ("sched/isolation: Save boot defined domain
# flags") (in v7.0) HK_TYPE_DOMAIN includes isolated partitions; DOMAIN_BOOT does not.
_DOMAIN = ("HK_TYPE_DOMAIN_BOOT", "HK_TYPE_DOMAIN")
_MANAGED_IRQ = ("HK_TYPE_MANAGED_IRQ",)


class CpuMasks(Struct, frozen=True):
    """The kernel's CPU masks; ``None`` for one that it lacks, or that is unreadable."""

    possible: Cpus
    """CPUs that can ever be online."""

    present: Cpus
    online: Cpus
    active: Cpus
    """CPUs that the scheduler may put tasks on."""

    isolcpus: Cpus | None
    """CPUs excluded from load balancing at boot:
    /sys/devices/system/cpu/isolated."""

    isolated: Cpus | None
    """CPUs excluded from load balancing: *isolcpus*, CPUs of isolated partitions, and
    online CPUs in no root domain, as cpusets of cgroup v1 can make them."""

    nohz_full: Cpus | None
    """CPUs without a tick while one task runs: /sys/devices/system/cpu/nohz_full."""

    rcu_nocb: Cpus | None
    """CPUs whose RCU callbacks are run by threads, maybe on other CPUs."""

    managed_irq: Cpus | None
    """CPUs that managed interrupts avoid if possible."""

    words: Mapping[str, str]
    """Words of the command line by the name of the field that they set."""


def read_masks(reader: Reader, domains: RootDomains, losses: LossLog) -> CpuMasks:
    """Read all masks; note those that cannot be read.

    :raises MissingError: if the types of the masks that all kernels have are missing
    """
    possible, present, online, active = (
        kept_mask(reader, name, losses) or ()
        for name in ("possible", "present", "online", "active")
    )
    online = with_stopped(online, active)
    housekeeping = _Housekeeping(reader, possible, losses)
    isolcpus = housekeeping.isolated_from(_DOMAIN)
    partitions = _variable(reader, "isolated_cpus", losses)
    return CpuMasks(
        possible=possible,
        present=present,
        online=online,
        active=active,
        isolcpus=isolcpus,
        isolated=_isolated(isolcpus, partitions, domains.alone(online)),
        nohz_full=_variable(reader, "tick_nohz_full_mask", losses),
        rcu_nocb=_variable(reader, "rcu_nocb_mask", losses),
        managed_irq=housekeeping.isolated_from(_MANAGED_IRQ),
        words=boot_words(_command_line(reader, losses)),
    )


def _isolated(*known: Cpus | None) -> Cpus | None:
    if known[0] is None and not any(known):
        return None
    return tuple(sorted({cpu for cpus in known for cpu in cpus or ()}))


def _variable(reader: Reader, name: str, losses: LossLog) -> Cpus | None:
    """Read a mask that not every kernel has; a mask that is not allocated is empty."""
    try:
        mask = find_variable(reader.prog, name)
    except MissingError:
        return None
    return try_mask(reader, lambda: place_of(mask), name, losses)


class _Housekeeping:
    """CPUs excluded from housekeeping by the command line."""

    def __init__(self, reader: Reader, possible: Cpus, losses: LossLog) -> None:
        self._reader = reader
        self._possible = possible
        self._losses = losses

    def isolated_from(self, names: tuple[str, ...]) -> Cpus | None:
        """Return the CPUs excluded from a type of housekeeping.

        :param names: names of the enumerator, the newest first
        :return: ``None`` if the kernel has no such type, or the mask is unreadable
        """
        try:
            address = self._mask_address(names)
            if not address:
                return ()
            allowed = mask_at(self._reader, address)
        except MissingError:
            return None
        except UNREADABLE as error:
            self._losses.lose(Loss.MASKS, f"cannot read isolated CPUs: {error}")
            return None
        return tuple(sorted(set(self._possible) - set(allowed)))

    def _mask_address(self, names: tuple[str, ...]) -> int:
        """Return the address of the mask of housekeeping CPUs; 0 if all CPUs are."""
        prog = self._reader.prog
        try:
            housekeeping = find_variable(prog, "housekeeping")
        except MissingError:
            return self._common_mask_address(names)
        type_ = _first_constant(prog, names)
        if not housekeeping.flags.value_() >> type_ & 1:
            return 0
        return place_of(housekeeping.cpumasks[type_])

    def _common_mask_address(self, names: tuple[str, ...]) -> int:
        """Return the address of the one mask that all types share; 0 if it is not used.

        Before Linux kernel commit ed3b362d54f0 ("sched/isolation: Split housekeeping
        cpumask per isolation features") (in v5.18).
        """
        prog = self._reader.prog
        flags = find_variable(prog, "housekeeping_flags").value_()
        old_names = tuple(name.replace("_TYPE_", "_FLAG_") for name in names)
        if not flags & _first_constant(prog, old_names):
            return 0
        return place_of(find_variable(prog, "housekeeping_mask"))


def _first_constant(prog: drgn.Program, names: tuple[str, ...]) -> int:
    for name in names:
        try:
            return constant(prog, name)
        except MissingError:
            continue
    raise MissingError(f"no {names[0]}")


# --- the command line


def _command_line(reader: Reader, losses: LossLog) -> str:
    try:
        address = find_variable(reader.prog, "saved_command_line").value_()
        return read_string(reader, address, _MAX_COMMAND_LINE)
    except LOST as error:
        losses.lose(
            Loss.COMMAND_LINE, f"cannot read the kernel's command line: {error}"
        )
        return ""


def boot_words(line: str) -> Mapping[str, str]:
    """Return the words that isolate CPUs, by the field of :class:`CpuMasks` they set.

    As in kernel/sched/isolation.c and kernel/rcu/tree_nocb.h: ``isolcpus=`` without a
    known flag means ``domain``, and ``nohz_full=`` also offloads RCU's callbacks.
    """
    found: dict[str, list[str]] = {}
    for word in _words(line):
        for field in _fields(word):
            found.setdefault(field, []).append(word)
    return MappingProxyType({field: " ".join(words) for field, words in found.items()})


def _fields(word: str) -> Iterator[str]:
    name, _, value = word.partition("=")
    # The kernel takes - and _ for the same (kernel/params.c, parameq()).
    name = name.replace("-", "_")
    if name == "isolcpus" and value:
        flags = {flag for flag in value.split(",") if flag[:1].isalpha()}
        known = flags & {"nohz", "domain", "managed_irq"}
        if not known or "domain" in known:
            yield "isolcpus"
        if "managed_irq" in known:
            yield "managed_irq"
        if "nohz" in known:
            yield "nohz_full"
    elif name == "nohz_full" and value:
        yield "nohz_full"
        yield "rcu_nocb"
    elif name == "rcu_nocbs":
        yield "rcu_nocb"


def _words(line: str) -> Iterator[str]:
    """Split at spaces outside of quotes, up to ``--``, where init's arguments begin."""
    word, quoted = "", False
    for letter in line + " ":
        if letter.isspace() and not quoted:
            if word == "--":
                return
            if word:
                yield word
            word = ""
        elif letter == '"':
            quoted = not quoted
        else:
            word += letter
