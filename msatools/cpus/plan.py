# SPDX-License-Identifier: LGPL-2.1-or-later

"""Plans to set CPUs apart: the commands, and the work that stays on these CPUs anyway.

Nothing is run. kernel/cgroup/cpuset.c, kernel/irq/proc.c, kernel/workqueue.c,
Documentation/admin-guide/kernel-parameters.txt.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import drgn
import numpy as np

from msatools.cpus.model import (
    BoundTask,
    Cpu,
    CpuPlan,
    CpuSet,
    Irq,
    PlanRest,
    PlanStep,
)
from msatools.cpus.placement import PF_NO_SETAFFINITY, affinities
from msatools.cpus.sets import BOOT, DEFAULT, PARTITIONS, PartitionKind
from msatools.kernel.percpu import Cpus, NoSuchCpuError
from msatools.kernel.structs import Booleans
from msatools.program.model import TargetError
from msatools.reports.units import ranges
from msatools.tasks.identity import TaskCgroups, comm_text
from msatools.tasks.table import PF_KTHREAD, TaskTable

GROUP = "set-apart"
"""Name of the control group of the plan."""

_GROUPS = "/sys/fs/cgroup"
_WORKQUEUES = "/sys/devices/virtual/workqueue"
_MASK_BITS = 32
"""Bits of each part of a mask as the kernel parses it (lib/bitmap-str.c)."""


class PlanRefused(TargetError):
    """The CPUs cannot be set apart now: offline, in a set, or none would be left."""


def make_plan(
    wanted: Collection[int],
    cpus: Sequence[Cpu],
    sets: Sequence[CpuSet],
    irqs: Sequence[Irq],
    movable: Collection[int],
    tasks: Sequence[BoundTask],
    partitions: PartitionKind,
) -> CpuPlan:
    """
    Return the plan to set CPUs apart.

    :param wanted: Numbers of the CPUs to set apart.
    :param movable: Numbers of the interrupts whose affinity users may set.
    :param tasks: The tasks to list, see :func:`tasks_on`.
    :param partitions: The kind of partition that the kernel can make.
    :raises NoSuchCpuError: if one of the CPUs does not exist
    :raises PlanRefused: if one is offline or set apart already, or no other is left
    """
    chosen = tuple(sorted(wanted))
    rest = _others(chosen, cpus, sets)
    return CpuPlan(
        cpus=chosen,
        others=rest,
        steps=(
            _partition(chosen, partitions),
            *_steps(chosen, rest, cpus, [irq for irq in irqs if irq.irq in movable]),
        ),
        stays=tuple(_stays(chosen, sets, irqs, movable, tasks)),
    )


def _others(chosen: Cpus, cpus: Sequence[Cpu], sets: Sequence[CpuSet]) -> Cpus:
    """Return the online CPUs of the default set that are left, after all checks."""
    by_number = {cpu.cpu: cpu for cpu in cpus}
    missing = [cpu for cpu in chosen if cpu not in by_number]
    if missing:
        raise NoSuchCpuError(
            f"CPU {ranges(missing)}",
            "this kernel has none of that number",
            "list all without --plan",
        )
    offline = [cpu for cpu in chosen if not by_number[cpu].online]
    if offline:
        raise PlanRefused(
            f"CPU {ranges(offline)}",
            "offline",
            f"bring it online first: echo 1 > /sys/devices/system/cpu/cpu{offline[0]}"
            "/online",
        )
    for one in sets:
        taken = sorted({*chosen} & {*one.cpus})
        if not taken or one.name == DEFAULT:
            continue
        if one.kind in PARTITIONS:
            raise PlanRefused(
                f"CPU {ranges(taken)}",
                f"in partition {one.name} already",
                f"dissolve it first: echo member > {_GROUPS}{one.name}"
                "/cpuset.cpus.partition",
            )
        if one.kind in BOOT:
            raise PlanRefused(
                f"CPU {ranges(taken)}",
                f"set apart at boot already, by {one.source}",
                "leave it out, or boot without that word",
            )
    others = tuple(
        cpu.cpu
        for cpu in cpus
        if cpu.online and cpu.set == DEFAULT and cpu.cpu not in chosen
    )
    if not others:
        raise PlanRefused(
            f"CPU {ranges(chosen)}",
            "no CPU would be left for all else",
            "leave one out: it takes the interrupts, and the tasks without a set",
        )
    return others


# --- The commands of the plan.


def _steps(
    chosen: Cpus, rest: Cpus, cpus: Sequence[Cpu], irqs: Sequence[Irq]
) -> Iterator[PlanStep]:
    # The CPUs of other sets may keep their interrupts.
    online = {cpu.cpu for cpu in cpus if cpu.online} - {*chosen}
    yield _interrupts(chosen, rest, online, irqs)
    yield PlanStep(
        name="workqueues",
        text="work that is bound to no CPU",
        commands=(f"echo {mask(rest)} > {_WORKQUEUES}/cpumask",),
    )
    yield PlanStep(
        name="boot",
        text="for good, in place of all of these: words for the kernel's command line; "
        "nohz_full= and rcu_nocbs= also stop the tick and take RCU's callbacks away",
        commands=(
            f"isolcpus=domain,managed_irq,{ranges(chosen)} nohz_full={ranges(chosen)} "
            f"rcu_nocbs={ranges(chosen)} irqaffinity={ranges(rest)}",
        ),
    )


_NO_PARTITION: Mapping[PartitionKind, str] = {
    "version-1": "the cpuset controller is in a hierarchy of cgroup v1, which has none",
    "none": "this kernel has none",
}


def _partition(chosen: Cpus, kind: PartitionKind) -> PlanStep:
    if kind in _NO_PARTITION:
        text = f"{_NO_PARTITION[kind]}: keep tasks off with taskset, or boot with the "
        return PlanStep(
            name="partition", text=text + "words for the command line", commands=()
        )
    group = f"{_GROUPS}/{GROUP}"
    balance = "without load balancing"
    if kind == "root":
        balance = "with load balancing, as this kernel has no other"
    return PlanStep(
        name="partition",
        text=f"a partition {balance}; to run a task there: echo PID > {group}"
        "/cgroup.procs",
        commands=(
            f"echo +cpuset > {_GROUPS}/cgroup.subtree_control",
            f"mkdir {group}",
            f"echo {ranges(chosen)} > {group}/cpuset.cpus",
            f"echo {kind} > {group}/cpuset.cpus.partition",
            f"cat {group}/cpuset.cpus.partition",
        ),
    )


def _interrupts(
    chosen: Cpus, rest: Cpus, online: Collection[int], irqs: Sequence[Irq]
) -> PlanStep:
    commands = [f"echo {mask(online)} > /proc/irq/default_smp_affinity"]
    for irq in irqs:
        if not {*chosen} & {*irq.affinity}:
            continue
        left = {*irq.affinity} & {*online} or rest
        commands.append(f"echo {ranges(left)} > /proc/irq/{irq.irq}/smp_affinity_list")
    return PlanStep(
        name="interrupts",
        text="interrupts of devices, and of those that come later; irqbalance has to "
        "leave them there (IRQBALANCE_BANNED_CPULIST)",
        commands=tuple(commands),
    )


def mask(cpus: Iterable[int]) -> str:
    """
    Return CPUs as a hexadecimal mask in the format that the kernel parses.

    >>> mask([0, 1, 33])
    '2,00000003'
    """
    number = sum(1 << cpu for cpu in set(cpus))
    parts: list[str] = []
    while number or not parts:
        number, low = divmod(number, 1 << _MASK_BITS)
        parts.append(f"{low:08x}" if number else f"{low:x}")
    return ",".join(reversed(parts))


# --- What a new partition does not move: bound kernel threads and interrupts.


def _stays(
    chosen: Cpus,
    sets: Sequence[CpuSet],
    irqs: Sequence[Irq],
    movable: Collection[int],
    tasks: Sequence[BoundTask],
) -> Iterator[PlanRest]:
    may = [irq for irq in irqs if {*chosen} & {*irq.affinity}]
    managed = [irq for irq in may if irq.managed]
    if managed:
        yield PlanRest(
            name="managed-interrupts",
            text="interrupts that the kernel places itself: each comes on these CPUs "
            "only for requests that they make, or with isolcpus=managed_irq on none",
            irqs=tuple(irq.irq for irq in managed),
            pids=(),
        )
    fixed = [irq for irq in may if not irq.managed and irq.irq not in movable]
    if fixed:
        yield PlanRest(
            name="fixed-interrupts",
            text="interrupts that nobody can move, such as of timers",
            irqs=tuple(irq.irq for irq in fixed),
            pids=(),
        )
    bound = [task for task in tasks if task.kthread and {*task.cpus} <= {*chosen}]
    if bound:
        yield PlanRest(
            name="bound-threads",
            text="threads of the kernel that are of one CPU each, such as "
            + ", ".join(dict.fromkeys(task.comm.partition("/")[0] for task in bound)),
            irqs=(),
            pids=tuple(task.pid for task in bound),
        )
    own = [task for task in tasks if not task.kthread]
    if own:
        yield PlanRest(
            name="own-affinity",
            text="tasks with an affinity of their own that includes these CPUs: move "
            "them with taskset, or the partition does, where it may",
            irqs=(),
            pids=tuple(task.pid for task in own),
        )
    for one in sets:
        if one.kind in ("limit", "invalid") and {*(one.asked or ())} & {*chosen}:
            yield PlanRest(
                name="cpusets",
                text=f"control group {one.name}, which asks for "
                f"{ranges(one.asked or ())}: it keeps what is left of that, or gets "
                "what its parent has",
                irqs=(),
                pids=(),
            )
    yield PlanRest(
        name="unbound-work",
        text="work of a queue with a mask of its own "
        f"({_WORKQUEUES}/*/cpumask), and work that is queued for one of these CPUs",
        irqs=(),
        pids=(),
    )
    yield PlanRest(
        name="timers",
        text="the tick, and the search for work for idle CPUs that an idle one does "
        "for all, unless booted with nohz_full=; timers of tasks that run there; "
        "callbacks of RCU, unless with rcu_nocbs=; interrupts between CPUs",
        irqs=(),
        pids=(),
    )


def tasks_on(
    chosen: Collection[int],
    cpus: Sequence[Cpu],
    tasks: TaskTable,
    cgroups: TaskCgroups,
    prog: drgn.Program,
) -> tuple[BoundTask, ...]:
    """
    Return the tasks that may run on some CPUs, but not on all CPUs of the default set.

    :return: Empty if the kernel has no CPU masks of tasks.
    :raises drgn.FaultError: if the number of CPUs cannot be read
    """
    if not tasks.has("cpus_mask"):
        return ()
    found = affinities(tasks, prog)
    others = {cpu.cpu for cpu in cpus if cpu.online and cpu.set == DEFAULT}
    inside = found.masks & _mask_of(chosen, found.masks.shape[1])
    outside = ~found.masks & _mask_of(others, found.masks.shape[1])
    some = np.logical_and(inside.any(axis=1), outside.any(axis=1))
    by_thread: Booleans = some[found.index]
    alive: Booleans = tasks["exit_state"] == 0
    flags = tasks["flags"].astype(np.int64)
    fixed = PF_KTHREAD | PF_NO_SETAFFINITY
    return tuple(
        BoundTask(
            pid=int(tasks["pid"][row]),
            comm=comm_text(tasks["comm"][row]),
            cpus=found.cpus(row),
            cpu=int(tasks["cpu"][row]),
            cgroup=cgroups.path(row),
            why="",
            kthread=int(flags[row]) & fixed == fixed,
        )
        for row in np.flatnonzero(by_thread & alive).tolist()
    )


def _mask_of(cpus: Iterable[int], count: int) -> Booleans:
    mask = np.zeros(count, np.bool_)
    mask[[cpu for cpu in cpus if cpu < count]] = True
    return mask
