# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processor sets: cpusets, and what the command line keeps CPUs for.

Linux has no processor sets as such. A partition, which is a cpuset of cgroup v2, comes
nearest: it keeps its CPUs from all others. Other cpusets only limit their tasks.
``isolcpus=`` and ``nohz_full=`` name CPUs that somebody has plans for.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import drgn
from drgn.helpers.linux.nodemask import for_each_online_node

from msatools.cpus.cpusets import Cpuset, Cpusets, Nodes, read_cpusets
from msatools.cpus.domains import RootDomains
from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import CpuSet, SetKind
from msatools.kernel.cpumask import Cpus
from msatools.kernel.losses import Loss
from msatools.kernel.ranges import ranges
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog

DEFAULT = "default"
"""The name of the set of all CPUs that no other has."""

PARTITIONS: tuple[SetKind, ...] = ("root", "isolated")
"""Sets that keep their CPUs from all others."""

BOOT: tuple[SetKind, ...] = ("isolcpus", "nohz_full")
"""Sets of the command line, the one that is told first."""


def read_sets(
    reader: Reader, domains: RootDomains, masks: CpuMasks, losses: LossLog
) -> tuple[CpuSet, ...]:
    """Find all sets, without their tasks and interrupts.

    First the default one, then partitions and those that are not in force, each after
    the one that it lies in; then those of the command line, then cpusets that limit
    their tasks. CPUs are those that are online. A cpuset that asks for nothing is no
    set; nor is one of cgroup v1, which always asks, that is like its parent.
    """
    cpusets = read_cpusets(reader, losses)
    online = set(masks.online)
    nodes = _all_nodes(reader, cpusets, losses)
    made = [_of_cpuset(one) for one in _asking(cpusets)]
    partitions = [one for one in made if one.kind != "limit"]
    boot = list(_of_command_line(masks, nodes))
    limits = [one for one in made if one.kind == "limit"]
    taken = {
        cpu
        for one in (*partitions, *boot)
        if one.kind in PARTITIONS + BOOT
        for cpu in one.cpus
    }
    default = _Made(
        name=DEFAULT,
        kind="root",
        cpus=tuple(sorted(online - taken)),
        source="all other CPUs" if cpusets.root is None else "/",
        nodes=nodes,
    )
    return tuple(
        one.as_set(domains, online) for one in (default, *partitions, *boot, *limits)
    )


def with_reason(one: CpuSet, online: Collection[int]) -> CpuSet:
    """Add why a partition is not in force where the kernel has no word for it."""
    asked = {*(one.asked or ())}
    if one.kind != "invalid" or one.reason or not asked or asked & {*online}:
        return one
    return replace(
        one, reason=f"no CPU of it is online (cpuset.cpus is {ranges(asked)})"
    )


def set_of_cpus(sets: Sequence[CpuSet], cpus: Iterable[int]) -> dict[int, str]:
    """Name the set that each CPU is in.

    The deepest partition in force that has it; else ``isolcpus``, else ``nohz_full``,
    else ``default``. A CPU that is offline is in the partition that would get it.
    """
    names = dict.fromkeys(cpus, DEFAULT)
    used = {cpu for one in sets for cpu in one.cpus}
    for one in _by_rank(sets):
        theirs = set(one.cpus)
        theirs |= set(one.exclusive or one.asked or ()) - used
        names |= {cpu: one.name for cpu in theirs if cpu in names}
    return names


def _by_rank(sets: Sequence[CpuSet]) -> Iterator[CpuSet]:
    """Yield the sets that CPUs are named by, those that yield to others first."""
    for kind in reversed(BOOT):
        yield from (one for one in sets if one.kind == kind)
    for one in sets:
        if one.kind in PARTITIONS and one.name != DEFAULT:
            yield one


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A set, and what makes it."""

    name: str
    kind: SetKind
    cpus: Cpus
    source: str
    nodes: Nodes
    asked: Cpus | None = None
    exclusive: Cpus | None = None
    reason: str | None = None

    def as_set(self, domains: RootDomains, online: set[int]) -> CpuSet:
        cpus = tuple(cpu for cpu in self.cpus if cpu in online)
        return CpuSet(
            name=self.name,
            kind=self.kind,
            cpus=cpus,
            source=self.source,
            asked=self.asked,
            exclusive=self.exclusive,
            nodes=self.nodes,
            reason=self.reason,
            root_domain=domains.of(cpus),
            balanced=domains.balanced(cpus),
            irqs_routed=(),
            irqs_allowed=(),
            irqs_managed=0,
        )


# --- cpusets


def _asking(cpusets: Cpusets) -> Iterator[Cpuset]:
    """Yield the cpusets that are sets of their own; the root is the default set."""
    by_address = {one.address: one for one in cpusets.all}
    for one in cpusets.all:
        if not one.parent:
            continue
        if cpusets.unified:
            asks = bool(one.asked or one.asked_nodes or one.exclusive)
            if asks or one.partition != "member":
                yield one
        elif one.asked and _differs(one, by_address.get(one.parent)):
            yield one


def _differs(one: Cpuset, parent: Cpuset | None) -> bool:
    return parent is None or any(
        getattr(one, field) != getattr(parent, field)
        for field in ("effective", "nodes", "exclusive_flag", "balance_flag")
    )


def _of_cpuset(one: Cpuset) -> _Made:
    kind: SetKind = "limit"
    source = "cpuset"
    if one.partition != "member":
        kind = one.partition if one.valid else "invalid"
        source = "cpuset partition"
    if kind == "invalid":
        source += f" ({one.partition})"
    keeps = kind in PARTITIONS and one.effective_exclusive is not None
    return _Made(
        name=one.path or f"cpuset {one.address:#x}",
        kind=kind,
        cpus=one.effective,
        source=source,
        nodes=one.nodes,
        asked=one.asked or None,
        exclusive=one.effective_exclusive if keeps else None,
        reason=one.reason,
    )


# --- the command line


def _of_command_line(masks: CpuMasks, nodes: Nodes) -> Iterator[_Made]:
    found: Mapping[SetKind, Cpus | None] = {
        "isolcpus": masks.isolcpus,
        "nohz_full": masks.nohz_full,
    }
    for kind in BOOT:
        cpus = found[kind]
        if cpus:
            yield _Made(
                name=kind,
                kind=kind,
                cpus=cpus,
                source=masks.words.get(kind, "boot"),
                nodes=nodes,
                asked=cpus,
            )


def _all_nodes(reader: Reader, cpusets: Cpusets, losses: LossLog) -> Nodes:
    """List the memory nodes of the root cpuset, or all if there is none."""
    if cpusets.root is not None:
        return cpusets.root.nodes
    try:
        return tuple(for_each_online_node(reader.prog))
    except (LookupError, drgn.FaultError) as error:
        losses.lose(Loss.NODES, f"the list of memory nodes is lost: {error}")
        return ()
