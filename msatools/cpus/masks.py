# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's sets of CPUs: which there are, are online, and are isolated from what.

kernel/cpu.c, kernel/sched/isolation.c, kernel/time/tick-sched.c,
kernel/rcu/tree_nocb.h, kernel/cgroup/cpuset.c.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import drgn

from msatools.cpus.domains import RootDomains
from msatools.kernel.cpumask import (
    Cpus,
    kept_mask,
    mask_at,
    online_cpus,
    place_of,
    try_mask,
)
from msatools.kernel.enums import constant
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.selfdesc.variables import find_variable

_MAX_COMMAND_LINE = 1 << 16
"""COMMAND_LINE_SIZE and what a boot configuration adds (init/main.c): 2 KiB and 32."""

# What housekeeping is for, the newest name first; numbers differ between kernels.
# Linux kernel commit 4fca0e550d50 ("sched/isolation: Save boot defined domain flags")
# (in v7.0): HK_TYPE_DOMAIN takes isolated partitions in, DOMAIN_BOOT does not.
_DOMAIN = ("HK_TYPE_DOMAIN_BOOT", "HK_TYPE_DOMAIN")
_MANAGED_IRQ = ("HK_TYPE_MANAGED_IRQ",)


@dataclass(frozen=True)
class CpuMasks:
    """Sets of CPUs; ``None`` is what this kernel has not, or what was not read."""

    possible: Cpus
    """That can ever be online."""

    present: Cpus
    online: Cpus
    active: Cpus
    """That tasks may be put on."""

    isolcpus: Cpus | None
    """Kept out of the scheduler's balancing since boot, as
    /sys/devices/system/cpu/isolated has them."""

    isolated: Cpus | None
    """That the scheduler spreads no tasks to: those above, those of isolated
    partitions, and online ones that are in no root domain, as cpusets of cgroup v1
    can have it."""

    nohz_full: Cpus | None
    """Without a tick while one task runs: /sys/devices/system/cpu/nohz_full."""

    rcu_nocb: Cpus | None
    """Whose RCU callbacks threads run, on other CPUs if need be."""

    managed_irq: Cpus | None
    """That managed interrupts keep from, where they can."""

    words: Mapping[str, str]
    """The words of the command line that asked for it, by the name of the field."""


def read_masks(reader: Reader, domains: RootDomains, losses: LossLog) -> CpuMasks:
    """Read all sets; one that cannot be read costs a note.

    :raises LookupError: if the types are unknown of the sets that all kernels have
    """
    possible, present, active = (
        kept_mask(reader, name, losses) or ()
        for name in ("possible", "present", "active")
    )
    online = online_cpus(reader, losses)
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
    """Read a mask that not every kernel has; one not allocated has no CPU."""
    try:
        mask = find_variable(reader.prog, name)
    except LookupError:
        return None
    return try_mask(reader, lambda: place_of(mask), name, losses)


class _Housekeeping:
    """What CPUs are isolated from by words of the command line."""

    def __init__(self, reader: Reader, possible: Cpus, losses: LossLog) -> None:
        self._reader = reader
        self._possible = possible
        self._losses = losses

    def isolated_from(self, names: tuple[str, ...]) -> Cpus | None:
        """List the CPUs that are not for a kind of housekeeping.

        :param names: of enumerators, the newest first
        :return: ``None`` if the kernel knows no such kind, or the mask is lost
        """
        try:
            place = self._place(names)
            if not place:
                return ()
            allowed = mask_at(self._reader, place)
        except LookupError:
            return None
        except drgn.FaultError as error:
            self._losses.lose(Loss.MASKS, f"isolated CPUs are lost: {error}")
            return None
        return tuple(sorted(set(self._possible) - set(allowed)))

    def _place(self, names: tuple[str, ...]) -> int:
        """Find the mask of the CPUs that are for it; 0 if all are."""
        prog = self._reader.prog
        try:
            housekeeping = find_variable(prog, "housekeeping")
        except LookupError:
            return self._only_place(names)
        number = _first_constant(prog, names)
        if not housekeeping.flags.value_() >> number & 1:
            return 0
        return place_of(housekeeping.cpumasks[number])

    def _only_place(self, names: tuple[str, ...]) -> int:
        """Find it where there is one mask for all kinds: before Linux kernel commit
        ed3b362d54f0 ("sched/isolation: Split housekeeping cpumask per isolation
        features") (in v5.18)."""
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
        except LookupError:
            continue
    raise LookupError(f"no {names[0]}")


# --- the command line


def _command_line(reader: Reader, losses: LossLog) -> str:
    try:
        address = find_variable(reader.prog, "saved_command_line").value_()
        return read_string(reader, address, _MAX_COMMAND_LINE)
    except (LookupError, drgn.FaultError) as error:
        losses.lose(Loss.COMMAND_LINE, f"the kernel's command line is lost: {error}")
        return ""


def boot_words(line: str) -> Mapping[str, str]:
    """Find the words that isolate CPUs, by the field of :class:`CpuMasks`.

    As kernel/sched/isolation.c and kernel/rcu/tree_nocb.h understand them:
    ``isolcpus=`` is for ``domain`` if it names nothing else that it knows, and
    ``nohz_full=`` offloads RCU's callbacks too.
    """
    found: dict[str, list[str]] = {}
    for word in _words(line):
        for field in _fields(word):
            found.setdefault(field, []).append(word)
    return MappingProxyType({field: " ".join(words) for field, words in found.items()})


def _fields(word: str) -> Iterator[str]:
    name, _, value = word.partition("=")
    # As the kernel compares names (kernel/params.c, parameq()).
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
    """Split at spaces that no quotes are around, up to what init is for."""
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
