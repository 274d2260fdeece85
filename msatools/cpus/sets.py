# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processor sets: cpusets, and isolated CPUs of the command line."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

import drgn
import numpy as np
from drgn.helpers.linux.nodemask import for_each_online_node
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.masks import CpuMasks, RootDomains
from msatools.cpus.model import CpuSet, SetKind
from msatools.errors import LOST, DamagedDataError, MissingError
from msatools.kernel.files import cgroup_paths
from msatools.kernel.percpu import Cpus, cpus_of, is_pointer, masks_at
from msatools.kernel.reader import Addresses, Reader, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Structs,
    WordArray,
    constant,
    find_offset,
    lose_many,
    read_structs,
)
from msatools.kernel.walks import list_records
from msatools.reports.units import ranges
from msatools.selfdesc.find import (
    ask_each,
    find_symbol,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Cpusets: which CPUs and memory nodes the tasks of control groups may use.
#
# kernel/cgroup/cpuset.c. A struct cpuset begins with its struct cgroup_subsys_state,
# which links it into a tree. In the default hierarchy (cgroup v2) a cpuset can be a
# partition, which has its CPUs exclusively; in a hierarchy of its own (v1) flags make
# CPUs exclusive.


MAX_CPUSETS = 1 << 18
"""Maximum number of cpusets, and of children of one; more are taken for a loop."""

Nodes = tuple[int, ...]
"""Numbers of memory nodes, ascending."""

Partition = Literal["member", "root", "isolated"]

# PRS_* macros, the same in all versions; negative for an invalid partition. "isolated"
# exists since Linux kernel commit f28e22441f35 ("cgroup/cpuset: Add a new isolated
# cpus.partition type") (in v6.1).
_PARTITIONS: dict[int, Partition] = {0: "member", 1: "root", 2: "isolated"}

_MAX_REASON = 256

_MASKS = {
    "asked": ("cpus_allowed",),
    "effective": ("effective_cpus",),
    # Linux kernel commits 0c7f293efc87 ("cgroup/cpuset: Add
    # cpuset.cpus.exclusive.effective for v2") and e2ffe502ba45 ("cgroup/cpuset: Add
    # cpuset.cpus.exclusive for v2") (in v6.7)
    "exclusive": ("exclusive_cpus",),
    "effective_exclusive": ("effective_xcpus",),
}


class Cpuset(Struct, frozen=True):
    """One cpuset; a mask that this kernel lacks, or that is lost, is ``None``."""

    address: int
    parent: int
    """Address of the parent; 0 for the root."""

    path: str | None
    """Path of its control group as in /proc/PID/cgroup; ``None`` if unreadable."""

    asked: Cpus
    """The requested CPUs: ``cpuset.cpus``; empty if none, or if lost."""

    effective: Cpus
    """The CPUs that its tasks may use: ``cpuset.cpus.effective``; empty if lost."""

    exclusive: Cpus | None
    """The requested exclusive CPUs: ``cpuset.cpus.exclusive``."""

    effective_exclusive: Cpus | None
    """The granted exclusive CPUs: ``cpuset.cpus.exclusive.effective``."""

    asked_nodes: Nodes
    """The requested memory nodes: ``cpuset.mems``."""

    nodes: Nodes
    """The memory nodes that its tasks may use: ``cpuset.mems.effective``."""

    partition: Partition
    """The requested kind: ``cpuset.cpus.partition``."""

    valid: bool
    """Whether the partition is valid."""

    reason: str | None
    """Why it is invalid, in the kernel's words (v6.1 and later)."""

    exclusive_flag: bool
    """Whether siblings may not have its CPUs: ``cpuset.cpu_exclusive`` of cgroup v1."""

    balance_flag: bool
    """Whether the scheduler is to balance load among its CPUs:
    ``cpuset.sched_load_balance`` of cgroup v1."""


class Cpusets(Struct, frozen=True):
    """The kernel's cpusets, and their cgroup version."""

    all: tuple[Cpuset, ...]
    """The root first, each cpuset after its parent; empty if the kernel has none."""

    unified: bool
    """Whether the controller is in the default hierarchy (cgroup v2)."""

    @property
    def root(self) -> Cpuset | None:
        """The root cpuset; ``None`` if not found."""
        return next((one for one in self.all if not one.parent), None)


def read_cpusets(reader: Reader, losses: LossLog) -> Cpusets:
    """Read all online cpusets; those that cannot be read are counted as lost."""
    try:
        root = find_variable(reader.prog, "top_cpuset").address_
        addresses = np.fromiter(_walk(reader, root, losses), np.uint64)
        return _read(reader, addresses, losses)
    except MissingError as error:
        losses.note("no-cpusets", f"there are no cpusets: {error}")
        return Cpusets((), unified=True)


def _walk(reader: Reader, root: int, losses: LossLog) -> Iterator[int]:
    """Yield the addresses of all cpusets, parents first, in the order of creation."""
    css = find_type(reader.prog, "struct cgroup_subsys_state")
    children = offset_of(css, "children")
    sibling = offset_of(css, "sibling")
    name = "the tree of cpusets"
    seen: set[int] = set()
    todo = [root]
    while todo:
        address = todo.pop()
        if address in seen or len(seen) >= MAX_CPUSETS:
            text = f"{name} is a loop; what follows cannot be read"
            losses.lose(Loss.QUEUED, text, about=name)
            return
        seen.add(address)
        yield address
        head = address + children
        found = list_records(
            reader, head, sibling, sibling + 16, losses, name, Loss.QUEUED
        )
        below = [child for child, _ in islice(found, MAX_CPUSETS)]
        todo += reversed(below)


def _read(reader: Reader, addresses: Addresses, losses: LossLog) -> Cpusets:
    prog = reader.prog
    cpuset = find_type(prog, "struct cpuset")
    # Without CONFIG_CPUMASK_OFFSTACK a cpumask_var_t is the mask itself.
    pointers = {
        name: members
        for name, members in _MASKS.items()
        if _is_mask_pointer(cpuset, members)
    }
    found = read_structs(
        reader,
        "struct cpuset",
        {
            **pointers,
            "group": ("css.cgroup",),
            "parent": ("css.parent",),
            "css_flags": ("css.flags",),
            "flags": ("flags",),
            "asked_nodes": WordArray(("mems_allowed",)),
            "nodes": WordArray(("effective_mems",)),
            "state": ("partition_root_state",),
            # Linux kernel commit 7476a636d310 ("cgroup/cpuset: Show invalid partition
            # reason string") (in v6.1)
            "error": ("prs_err",),
        },
        addresses,
        losses,
    )
    masks = {
        name: _masks(reader, cpuset, name, addresses, found, losses) for name in _MASKS
    }
    paths = cgroup_paths(reader, found["group"].astype(np.uint64), losses)
    rows = np.flatnonzero(found.readable & _online(prog, found, addresses)).tolist()
    flags = _Flags(prog)
    cpusets = tuple(
        Cpuset(
            address=int(addresses[row]),
            parent=int(found["parent"][row]),
            path=paths[row],
            asked=masks["asked"][row] or (),
            effective=masks["effective"][row] or (),
            exclusive=masks["exclusive"][row],
            effective_exclusive=masks["effective_exclusive"][row],
            asked_nodes=_nodes(found, "asked_nodes", row),
            nodes=_nodes(found, "nodes", row),
            partition=_partition(found, row, losses),
            valid=not found.has("state") or int(found["state"][row]) >= 0,
            reason=_reason(reader, found, row, losses),
            exclusive_flag=flags.exclusive(int(found["flags"][row])),
            balance_flag=flags.balance(int(found["flags"][row])),
        )
        for row in rows
    )
    return Cpusets(cpusets, _is_unified(prog))


def _is_mask_pointer(cpuset: drgn.Type, members: Sequence[str]) -> bool:
    return any(
        cpuset.has_member(name) and is_pointer(member_of(cpuset, name).type)
        for name in members
    )


def _masks(
    reader: Reader,
    cpuset: drgn.Type,
    name: str,
    addresses: Addresses,
    found: Structs,
    losses: LossLog,
) -> list[Cpus | None]:
    """Read one of ``_MASKS`` of each cpuset; ``None`` if this kernel lacks the mask, or
    it is unreadable."""
    if found.has(name):
        pointers = found[name].astype(np.uint64)
    else:
        offset = find_offset(cpuset, _MASKS[name])
        if offset is None:
            return [None] * len(addresses)
        pointers = np.where(found.readable, addresses + np.uint64(offset), 0)
    bits, readable = masks_at(reader, pointers.astype(np.uint64))
    lose_many(
        losses, "struct cpumask", int(np.count_nonzero(~readable & (pointers != 0)))
    )
    return [
        cpus_of(mask) if known else None
        for mask, known in zip(bits, readable.tolist(), strict=True)
    ]


def _online(prog: drgn.Program, found: Structs, addresses: Addresses) -> Booleans:
    """Return which cpusets are online and not being removed; the root always is."""
    online, dying = (constant(prog, name) for name in ("CSS_ONLINE", "CSS_DYING"))
    in_use: Booleans = (found["css_flags"] & (online | dying)) == online
    in_use |= addresses == addresses[0]
    return in_use


def _nodes(found: Structs, name: str, row: int) -> Nodes:
    bits = np.unpackbits(
        np.frombuffer(found[name][row].tobytes(), np.uint8), bitorder="little"
    )
    return tuple(bits.nonzero()[0].tolist())


def _partition(found: Structs, row: int, losses: LossLog) -> Partition:
    # Before v5.0 there are no partitions.
    if not found.has("state"):
        return "member"
    state = abs(int(found["state"][row]))
    if state not in _PARTITIONS:
        losses.lose(Loss.PARTITIONS, f"a cpuset is a partition of unknown kind {state}")
        return "member"
    return _PARTITIONS[state]


def _reason(reader: Reader, found: Structs, row: int, losses: LossLog) -> str | None:
    if not found.has("error") or found["state"][row] >= 0 or not found["error"][row]:
        return None
    number = int(found["error"][row])
    try:
        texts = find_variable(reader.prog, "perr_strings").address_
        count = find_symbol(reader.prog, "perr_strings").size // 8
        if not 0 < number < count:
            raise DamagedDataError("no such reason", texts)
        text = int(reader.words(texts + 8 * number, 1)[0])
        return read_string(reader, text, _MAX_REASON) if text else None
    except LOST as error:
        losses.lose(
            Loss.PARTITIONS, f"cannot determine why a partition is invalid: {error}"
        )
        return f"error {number}"


class _Flags:
    """Tests flags of cpusets, whose bits differ by version: v7.0 has no CS_ONLINE."""

    def __init__(self, prog: drgn.Program) -> None:
        self._exclusive = constant(prog, "CS_CPU_EXCLUSIVE")
        self._balance = constant(prog, "CS_SCHED_LOAD_BALANCE")

    def exclusive(self, flags: int) -> bool:
        return bool(flags >> self._exclusive & 1)

    def balance(self, flags: int) -> bool:
        return bool(flags >> self._balance & 1)


PartitionKind = Literal["isolated", "root", "version-1", "none"]
"""The strictest partition that a kernel can make: an isolated one; one whose CPUs
balance their load; none, as the controller is in a hierarchy of cgroup v1; none, as the
kernel has no partitions or no cpusets."""


def partition_kind(prog: drgn.Program) -> PartitionKind:
    """Return the strictest kind of partition that a kernel can make."""
    try:
        cpuset = find_type(prog, "struct cpuset")
        if not _is_unified(prog):
            return "version-1"
    except LOST:
        return "none"
    # "cgroup/cpuset: Add a new isolated cpus.partition type" (f28e22441f35) added no
    # member, but 7476a636d310 of the same series did (in v6.1).
    if cpuset.has_member("prs_err"):
        return "isolated"
    # "cpuset: Add new v2 cpuset.sched.partition flag" (in v5.0)
    return "root" if cpuset.has_member("partition_root_state") else "none"


def _is_unified(prog: drgn.Program) -> bool:
    """Return whether the cpuset controller is in the default hierarchy (cgroup v2)."""
    default: int = find_variable(prog, "cgrp_dfl_root").address_
    return int(find_variable(prog, "cpuset_cgrp_subsys").root.value_()) == default


# --- Processor sets: cpusets, and isolated CPUs of the command line.
#
# Linux has no processor sets as such. The nearest is a partition, a cpuset of cgroup v2
# with exclusive CPUs. Other cpusets only limit their tasks. isolcpus= and nohz_full=
# reserve CPUs at boot.


DEFAULT = "default"
"""Name of the set of all CPUs in no other set."""

PARTITIONS: tuple[SetKind, ...] = ("root", "isolated")
"""Kinds of sets with exclusive CPUs."""

BOOT: tuple[SetKind, ...] = ("isolcpus", "nohz_full")
"""Kinds of sets of the command line: a CPU of both is in the first."""


def read_sets(
    reader: Reader, domains: RootDomains, masks: CpuMasks, losses: LossLog
) -> tuple[CpuSet, ...]:
    """Return all sets, without their tasks and interrupts.

    The default set comes first; then partitions and invalid ones, each after its
    parent; then sets of the command line; then cpusets that limit their tasks. Only
    online CPUs are included. A cpuset that requests nothing is not a set. In cgroup v1,
    where each requests CPUs, one with the same CPUs, nodes and flags as its parent is
    not a set either.
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
    """Add a reason to an invalid partition that has none, if its CPUs are offline."""
    asked = {*(one.asked or ())}
    if one.kind != "invalid" or one.reason or not asked or asked & {*online}:
        return one
    return replace(
        one, reason=f"no CPU of it is online (cpuset.cpus is {ranges(asked)})"
    )


def set_of_cpus(sets: Sequence[CpuSet], cpus: Iterable[int]) -> dict[int, str]:
    """Return the name of the set of each CPU, by CPU.

    It is the deepest valid partition with the CPU; else ``isolcpus``, else
    ``nohz_full``, else ``default``. An offline CPU is in the partition that asks for
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
    """Yield the sets that a CPU can belong to; a later one has precedence."""
    for kind in reversed(BOOT):
        yield from (one for one in sets if one.kind == kind)
    for one in sets:
        if one.kind in PARTITIONS and one.name != DEFAULT:
            yield one


class _Made(Struct, frozen=True, kw_only=True):
    """A set before its root domain is known, with CPUs that may be offline."""

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
    """Yield the cpusets that count as sets, see :func:`read_sets`, without the root."""
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
