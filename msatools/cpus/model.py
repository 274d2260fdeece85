# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-cpus reports: processor sets, and the work of each CPU.

Plain data: a renderer prints it, JSON serialises it. Counts and times are since boot,
or within an interval; states are those at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from msatools.kernel.report import ADDED, Report
from msatools.target.model import Address

SchedClass = Literal["stop", "deadline", "realtime", "fair", "ext", "idle"]
"""The scheduler's classes (kernel/sched/sched.h)."""

State = Literal[
    "on",
    "off",
    "no-intr",
    "isolated",
    "nohz_full",
    "rcu_nocb",
    "inactive",
    "stopped",
    "idle",
]
"""What a CPU can be, several at a time.

``on`` or ``off``: it is online or not. ``no-intr``: no interrupt of a device may go to
it, but answers to what it asks of a device itself. ``isolated``: the scheduler spreads
no tasks to it. ``nohz_full``: it has no tick while one task runs. ``rcu_nocb``: others
run its RCU callbacks. ``inactive``: online, but no tasks come to it, as when it goes
offline. ``stopped``: it runs what nothing preempts, as in stop_machine(). ``idle``: it
runs its idle task.
"""

SetKind = Literal["root", "isolated", "invalid", "limit", "isolcpus", "nohz_full"]
"""What makes a set: a cpuset that is the root or a partition (``root``), an isolated
partition, one that is not in force, a cpuset that only limits its tasks; or words of
the kernel's command line."""


# --- each CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """The task that a CPU runs."""

    pid: int
    comm: str
    sched_class: SchedClass = field(metadata={"key": "class"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """One CPU: psrinfo's and mpstat's row. ``None`` is what the kernel does not keep,
    or what could not be read."""

    cpu: int
    online: bool
    set: str
    """The partition or isolation set that it is in, else ``default``."""

    state: tuple[State, ...]
    minf: int | None
    """Page faults that took no I/O."""

    mjf: int | None
    """Page faults that did."""

    xcal: int | None
    """Calls of functions by other CPUs, taken here."""

    tlb: int | None
    """Flushes of the TLB for other CPUs, taken here."""

    intr: int | None
    """Interrupts: devices', and those of the architecture."""

    soft: int | None
    """Softirqs."""

    csw: int | None
    """Context switches."""

    icsw: int | None = field(default=None)
    """Involuntary ones, of tasks that were last here; on request."""

    migr: int | None = field(default=None)
    """Moves to other CPUs, of tasks that are here now; on request."""

    smtx: None = None
    srw: None = None
    syscl: None = None
    """Spins for mutexes and rwlocks and system calls: Linux counts none by CPU."""

    runq: int | None
    """Tasks that run or could, now."""

    usr_ns: int | None
    """In user mode, niced tasks too, guests' time not."""

    nice_ns: int | None
    """That part of ``usr_ns`` that niced tasks used."""

    sys_ns: int | None
    irq_ns: int | None
    """In interrupts and softirqs."""

    softirq_ns: int | None
    """That part of ``irq_ns`` that softirqs took."""

    wt_ns: int | None
    """Idle, with I/O of tasks that were last here under way."""

    st_ns: int | None
    """Stolen by the hypervisor."""

    gst_ns: int | None
    """Running guests."""

    idl_ns: int | None
    current: Running | None
    processor: "Processor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """What a CPU is: psrinfo -v."""

    active: bool | None
    """Whether tasks may be put on it."""

    hotplug: str | None
    """The step of bringing it up or down that it has come to, such as ``online``
    (kernel/cpu.c)."""

    hotplug_target: str | None
    """Where it is on the way to, if not there."""

    package: int | None
    die: int | None
    core: int | None
    thread: int | None
    """Its place among the CPUs of its core, from 0."""

    siblings: tuple[int, ...]
    """All CPUs of its core."""

    node: int | None
    capacity: int | None
    """Of 1024, what tasks can have of it (SCHED_CAPACITY_SCALE)."""

    idle_state: str | None
    """Which of the hardware's idle states it is in; ``None`` where cpuidle knows of
    none, as in most guests."""

    idle_depth: int | None
    """Its number, from 0."""

    tick_stopped: bool | None


# --- run queues


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnableTask:
    """A task on a run queue."""

    pid: int
    comm: str
    sched_class: SchedClass = field(metadata={"key": "class"})
    policy: str
    """``SCHED_NORMAL``, ``SCHED_FIFO`` and so on, without ``SCHED_``: as chrt says."""

    priority: int
    """As /proc/PID/stat has it: 20 + nice, or below -1 for realtime."""

    rt_priority: int | None
    """1 to 99, of realtime tasks."""

    nice: int | None
    deadline_ns: int | None
    """By when it has to have run, from now on, of deadline tasks; may be past."""

    wait_ns: int | None
    """For how long it has been waiting for the CPU; of the current task, running."""

    wait_bound: Literal["exact", "upper", "estimate"]
    cgroup: str | None
    throttled: bool
    """Whether its group (or class) has used up what it may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunQueue:
    """The run queue of one CPU."""

    cpu: int
    running: int
    """As the kernel counts it (``nr_running``)."""

    current: RunnableTask | None
    waiting: tuple[RunnableTask, ...]
    """In the order in which the scheduler would choose them, as far as that is known:
    stop, deadline, realtime, fair; in a class the next first."""

    clock_ns: int
    lag_ns: int | None
    """How far its clock is behind the latest of all."""

    ticked_ns: int | None
    """For how long it has had no tick."""

    switched_ns: int | None
    """For how long it has run the same task."""

    lag_why: str | None
    """``idle``, ``tick stopped``, ``interrupts off`` or ``offline``: why its clock
    stands; ``None`` if it does not."""

    panicked: bool
    """Whether the kernel died here."""

    doing: str | None = field(default=None, metadata=ADDED)
    """Of a dump: ``user mode``, or ``kernel`` or ``interrupt`` and the function."""


# --- sets


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundTask:
    """A task and the CPUs that it may run on."""

    pid: int
    comm: str
    cpus: tuple[int, ...]
    cpu: int
    """Where it is, or was last."""

    cgroup: str | None
    why: str
    """Of one that strays: in what way."""

    kthread: bool
    """Whether it is a thread of the kernel itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTasks:
    """The tasks of a set."""

    members: int
    """Threads in its cpuset or below, or that may run on its CPUs alone."""

    pinned: tuple[BoundTask, ...]
    """Those bound to less than all of its CPUs; threads that the kernel made for one
    CPU do not count."""

    straying: tuple[BoundTask, ...]
    """Those of others that may run on its CPUs, and those of its own that may run
    elsewhere."""

    percpu_threads: int
    """Threads of the kernel that belong to one of its CPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuSet:
    """A set of CPUs that is in force, or that is meant to be."""

    name: str
    """The cgroup's path, or the word of the command line; ``default`` for what is in no
    other."""

    kind: SetKind
    cpus: tuple[int, ...]
    """That are in force."""

    source: str
    """Where it comes from: ``cpuset partition``, ``isolcpus=domain,managed_irq`` ..."""

    asked: tuple[int, ...] | None
    """CPUs that were asked for (``cpuset.cpus``), if somebody did."""

    exclusive: tuple[int, ...] | None
    """CPUs that it keeps from others (``cpuset.cpus.exclusive``, v6.7 and later)."""

    nodes: tuple[int, ...]
    """Memory nodes that its tasks may take from."""

    reason: str | None
    """Why a partition is invalid, as the kernel says."""

    root_domain: Address | None
    """What the scheduler balances in; ``None`` if several or none."""

    balanced: bool | None
    """Whether the scheduler spreads tasks over its CPUs."""

    irqs_routed: tuple[int, ...]
    """Interrupts of devices that go to one of its CPUs now (effective affinity)."""

    irqs_allowed: tuple[int, ...]
    """Those that may (affinity)."""

    irqs_managed: int
    """How many of those allowed the kernel alone places."""

    tasks: SetTasks | None = field(default=None, metadata=ADDED)


# --- interrupts


@dataclass(frozen=True, kw_only=True, slots=True)
class Irq:
    """An interrupt of a device."""

    irq: int
    name: str
    """Who handles it, as /proc/interrupts says: several after one another."""

    chip: str | None
    affinity: tuple[int, ...]
    effective: tuple[int, ...]
    managed: bool
    """Whether the kernel alone places it."""

    counts: Mapping[int, int]
    """By CPU, those that are not 0."""

    total: int | None
    """``None`` if a part of it is lost."""

    share: float | None
    """Of all interrupts of devices; ``None`` if there were none, or it is lost."""

    time_ns: None = None
    """Linux does not keep how long handlers take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vector:
    """Interrupts of the architecture of one kind, or softirqs."""

    name: str
    """As in /proc/interrupts and /proc/softirqs: ``LOC``, ``NET_RX``."""

    text: str
    counts: Mapping[int, int]
    total: int | None
    """``None`` if a part of it is lost."""


# --- the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """Something that whoever partitions CPUs wants to know, in one line."""

    code: str
    """``isolated-takes-interrupts``, ``idle-while-waiting``, ``not-ticked``,
    ``not-switched``, ``starving-tasks``, ``most-interrupts``, ``partition-invalid``,
    ``straying-tasks``."""

    text: str
    cpus: tuple[int, ...]
    advice: str | None
    """The command that mends it, if one does."""


@dataclass(frozen=True, kw_only=True)
class CpusReport(Report):
    """Processor sets and per-CPU work."""

    schema: ClassVar[str] = "msatools.cpus/1"

    load: tuple[float, ...] | None
    """Averages over 1, 5 and 15 minutes."""

    cpus: tuple[Cpu, ...]
    sets: tuple[CpuSet, ...]
    run_queues: tuple[RunQueue, ...]
    findings: tuple[Diagnostic, ...]
    irqs: tuple[Irq, ...] | None = field(default=None, metadata=ADDED)
    vectors: tuple[Vector, ...] | None = field(default=None, metadata=ADDED)
    softirqs: tuple[Vector, ...] | None = field(default=None, metadata=ADDED)
    nodes: Sequence[int] = ()
    """NUMA nodes that are online."""
