# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processor sets: cpusets, and isolated CPUs of the command line.

Linux has no processor sets as such. The nearest is a partition, a cpuset of cgroup v2
with exclusive CPUs. Other cpusets only limit their tasks. ``isolcpus=`` and
``nohz_full=`` reserve CPUs at boot.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from drgn.helpers.linux.nodemask import for_each_online_node
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.cpusets import Cpuset, Cpusets, Nodes, read_cpusets
from msatools.cpus.domains import RootDomains
from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import CpuSet, SetKind
from msatools.errors import LOST
from msatools.kernel.cpumask import Cpus
from msatools.kernel.losses import Loss
from msatools.kernel.ranges import ranges
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import ask_each

DEFAULT = "default"
"""Name of the set of all CPUs in no other set."""

PARTITIONS: tuple[SetKind, ...] = ("root", "isolated")
"""Kinds of sets with exclusive CPUs."""

BOOT: tuple[SetKind, ...] = ("isolcpus", "nohz_full")
"""Kinds of sets of the command line, by precedence."""


def read_sets(
    reader: Reader, domains: RootDomains, masks: CpuMasks, losses: LossLog
) -> tuple[CpuSet, ...]:
    """Find all sets, without their tasks and interrupts.

    The default set comes first; then partitions and invalid ones, each after its
    parent; then sets of the command line; then cpusets that limit their tasks. Only
    online CPUs are included. A cpuset that requests nothing is not a set; in cgroup v1,
    where all do, neither is one that equals its parent.
    """
    cpusets = read_cpusets(reader, losses)
    online = set(masks.online)
    nodes = _all_nodes(reader, cpusets, losses)
    of_cpusets = [_of_cpuset(one) for one in _asking(cpusets)]
    partitions = [one for one in of_cpusets if one.kind != "limit"]
    boot = list(_of_command_line(masks, nodes))
    limits = [one for one in of_cpusets if one.kind == "limit"]
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
    """Add the reason of an invalid partition if the kernel has none."""
    asked = {*(one.asked or ())}
    if one.kind != "invalid" or one.reason or not asked or asked & {*online}:
        return one
    return replace(
        one, reason=f"no CPU of it is online (cpuset.cpus is {ranges(asked)})"
    )


def set_of_cpus(sets: Sequence[CpuSet], cpus: Iterable[int]) -> dict[int, str]:
    """Return the name of the set of each CPU.

    It is the deepest valid partition with the CPU; else ``isolcpus``, else
    ``nohz_full``, else ``default``. An offline CPU is in the partition that would get
    it.
    """
    names = dict.fromkeys(cpus, DEFAULT)
    used = {cpu for one in sets for cpu in one.cpus}
    for one in _by_rank(sets):
        theirs = set(one.cpus)
        theirs |= set(one.exclusive or one.asked or ()) - used
        names |= {cpu: one.name for cpu in theirs if cpu in names}
    return names


def _by_rank(sets: Sequence[CpuSet]) -> Iterator[CpuSet]:
    """Yield the sets that CPUs can be in, by ascending precedence."""
    for kind in reversed(BOOT):
        yield from (one for one in sets if one.kind == kind)
    for one in sets:
        if one.kind in PARTITIONS and one.name != DEFAULT:
            yield one


class _Made(Struct, frozen=True, kw_only=True):
    """A set before its root domain is known."""

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
    """Yield the cpusets that are sets of their own, without the root."""
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
    is_exclusive = kind in PARTITIONS and one.effective_exclusive is not None
    return _Made(
        name=one.path or f"cpuset {one.address:#x}",
        kind=kind,
        cpus=one.effective,
        source=source,
        nodes=one.nodes,
        asked=one.asked or None,
        exclusive=one.effective_exclusive if is_exclusive else None,
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
    """Return the memory nodes of the root cpuset, or all if there is none."""
    if cpusets.root is not None:
        return cpusets.root.nodes
    try:
        return tuple(ask_each(for_each_online_node, reader.prog))
    except LOST as error:
        losses.lose(Loss.NODES, f"cannot read the list of memory nodes: {error}")
        return ()
