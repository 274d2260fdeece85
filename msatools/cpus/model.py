# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-cpus: processor sets, and the work of each CPU.

Plain data, to be rendered as text or JSON. Counts and times are since boot, or within
an interval; states are those at its end.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Struct, field

from msatools.cpus.plan_model import CpuPlan
from msatools.cpus.stalls.model import Stalls
from msatools.kernel.report import ADDED, Report
from msatools.target.model import UNLISTED, Address

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
"""States of a CPU, several at a time.

``on`` or ``off``: online or not. ``no-intr``: no interrupt of a device may go to it,
except those caused by its own requests. ``isolated``: excluded from load balancing.
``nohz_full``: no tick while one task runs. ``rcu_nocb``: threads run its RCU callbacks.
``inactive``: online, but not available to the scheduler, as when it goes offline.
``stopped``: it runs its stopper thread, as in stop_machine(). ``idle``: it runs its
idle task.
"""

SetKind = Literal["root", "isolated", "invalid", "limit", "isolcpus", "nohz_full"]
"""Kinds of sets: the root cpuset or a partition (``root``), an isolated partition, an
invalid one, a cpuset that only limits its tasks; or a word of the command line."""


# --- each CPU


class Running(Struct, frozen=True, kw_only=True):
    """The task that a CPU runs."""

    pid: int
    comm: str
    sched_class: SchedClass = field(name="class")


class Cpu(Struct, frozen=True, kw_only=True):
    """One CPU: psrinfo's and mpstat's row. ``None`` if the kernel does not keep a
    value, or it could not be read."""

    cpu: int
    online: bool
    set: str
    """Its partition or isolation set, else ``default``."""

    state: tuple[State, ...]
    minf: int | None
    """Minor page faults, without I/O."""

    mjf: int | None
    """Major page faults, with I/O."""

    xcal: int | None
    """Function calls requested by other CPUs."""

    tlb: int | None
    """TLB flushes requested by other CPUs."""

    intr: int | None
    """Interrupts of devices and of the architecture."""

    soft: int | None
    """Softirqs."""

    csw: int | None
    """Context switches."""

    icsw: int | None = None
    """Involuntary context switches of tasks that were last on it; on request."""

    migr: int | None = None
    """Migrations of tasks that are on it now; on request."""

    smtx: None = None
    srw: None = None
    syscl: None = None
    """Spins on mutexes and rwlocks, system calls: Linux does not count them by CPU."""

    runq: int | None
    """Current number of runnable tasks."""

    usr_ns: int | None
    """User time, with niced tasks, without guests."""

    nice_ns: int | None
    """The part of ``usr_ns`` of niced tasks."""

    sys_ns: int | None
    irq_ns: int | None
    """Time in interrupts and softirqs."""

    softirq_ns: int | None
    """The part of ``irq_ns`` in softirqs."""

    wt_ns: int | None
    """Idle time in which a task that was last on it waited for I/O."""

    st_ns: int | None
    """Time stolen by the hypervisor."""

    gst_ns: int | None
    """Time running guests."""

    idl_ns: int | None
    current: Running | None
    processor: "Processor"


class Processor(Struct, frozen=True, kw_only=True):
    """Description of a CPU: psrinfo -v."""

    active: bool | None
    """Whether the scheduler may put tasks on it."""

    hotplug: str | None
    """Its state of CPU hotplug, such as ``online`` (kernel/cpu.c)."""

    hotplug_target: str | None
    """The target state, if not reached."""

    package: int | None
    die: int | None
    core: int | None
    thread: int | None
    """Its index among the CPUs of its core, from 0."""

    siblings: tuple[int, ...]
    """All CPUs of its core."""

    node: int | None
    capacity: int | None
    """Capacity for tasks, of 1024 (SCHED_CAPACITY_SCALE)."""

    idle_state: str | None
    """Name of its current idle state; ``None`` without cpuidle, as in most guests."""

    idle_depth: int | None
    """Number of that idle state, from 0."""

    tick_stopped: bool | None


# --- run queues


class RunnableTask(Struct, frozen=True, kw_only=True):
    """A task on a run queue."""

    pid: int
    comm: str
    sched_class: SchedClass = field(name="class")
    policy: str
    """The policy without ``SCHED_``, as chrt shows it: ``OTHER``, ``FIFO``."""

    priority: int
    """The priority as in /proc/PID/stat: 20 + nice, or below -1 for realtime."""

    rt_priority: int | None
    """1 to 99 for realtime tasks."""

    nice: int | None
    deadline_ns: int | None
    """Time left to the deadline of a deadline task; may be negative."""

    wait_ns: int | None
    """Time that it has waited for the CPU; for the current task, that it has run."""

    wait_bound: Literal["exact", "upper", "estimate"]
    cgroup: str | None
    throttled: bool
    """Whether its group (or class) has used up its quota."""

    throttle: Annotated[str | None, ADDED] = None
    """Why it is throttled, as in ``throttled by the quota of /batch (1ms each 1s)``."""


class RunQueue(Struct, frozen=True, kw_only=True):
    """The run queue of one CPU."""

    cpu: int
    running: int
    """The kernel's count of runnable tasks (``nr_running``)."""

    current: RunnableTask | None
    waiting: tuple[RunnableTask, ...]
    """Tasks in the order in which the scheduler would run them, if known: stop,
    deadline, realtime, fair; within a class the next first."""

    clock_ns: int
    lag_ns: int | None
    """Lag of its clock behind the latest of all."""

    ticked_ns: int | None
    """Time since its last tick."""

    switched_ns: int | None
    """Time that it has run the same task."""

    lag_why: str | None
    """Why its clock lags: ``idle``, ``tick stopped``, ``interrupts off``, ``not run by
    its host`` or ``offline``; ``None`` if it does not."""

    panicked: bool
    """Whether the kernel panicked on this CPU."""

    doing: Annotated[str | None, ADDED] = None
    """In a dump: ``user mode``, or ``kernel`` or ``interrupt`` and the function."""


class StackOfCpu(Struct, frozen=True, kw_only=True):
    """The stack of a CPU in a dump, down to user mode."""

    cpu: int
    pid: int | None
    """ID of its task; 0 for the idle task."""

    comm: str | None
    frames: tuple[str, ...] | None
    """Functions, the innermost first, with their modules; ``(user mode)`` at the end if
    it was there. ``None`` if it was offline, or its stack is lost."""


# --- sets


class BoundTask(Struct, frozen=True, kw_only=True):
    """A task and the CPUs that it may run on."""

    pid: int
    comm: str
    cpus: tuple[int, ...]
    cpu: int
    """The CPU that it is or was last on."""

    cgroup: str | None
    why: str
    """Why it counts as straying; empty for others."""

    kthread: bool
    """Whether it is a kernel thread."""


class SetTasks(Struct, frozen=True, kw_only=True):
    """The tasks of a set."""

    members: int
    """Number of threads in its cpuset or below, or that may run on its CPUs only."""

    pinned: tuple[BoundTask, ...]
    """Members bound to a part of its CPUs, without per-CPU kernel threads."""

    straying: tuple[BoundTask, ...]
    """Threads of other sets that may run on its CPUs, and members that may run on other
    CPUs."""

    percpu_threads: int
    """Number of per-CPU kernel threads of its CPUs."""


class CpuSet(Struct, frozen=True, kw_only=True):
    """A set of CPUs, in force or only requested."""

    name: str
    """Path of the cgroup, or word of the command line; ``default`` for CPUs in no other
    set."""

    kind: SetKind
    cpus: tuple[int, ...]
    """The effective CPUs."""

    source: str
    """Its origin: ``cpuset partition``, ``isolcpus=domain,managed_irq`` ..."""

    asked: tuple[int, ...] | None
    """The requested CPUs (``cpuset.cpus``), if any."""

    exclusive: tuple[int, ...] | None
    """Its exclusive CPUs (``cpuset.cpus.exclusive``, v6.7 and later)."""

    nodes: tuple[int, ...]
    """Memory nodes that its tasks may allocate from."""

    reason: str | None
    """Why a partition is invalid, in the kernel's words."""

    root_domain: Address | None
    """The scheduler's root domain; ``None`` if several or none."""

    balanced: bool | None
    """Whether the scheduler balances tasks among its CPUs."""

    irqs_routed: tuple[int, ...]
    """Interrupts of devices that go to one of its CPUs now (effective affinity)."""

    irqs_allowed: tuple[int, ...]
    """Interrupts of devices that may go there (affinity)."""

    irqs_managed: int
    """Number of the latter whose affinity only the kernel sets."""

    tasks: Annotated[SetTasks | None, ADDED] = None


# --- interrupts


class Irq(Struct, frozen=True, kw_only=True):
    """An interrupt of a device."""

    irq: int
    name: str
    """Names of its handlers, as in /proc/interrupts."""

    chip: str | None
    affinity: tuple[int, ...]
    effective: tuple[int, ...]
    managed: bool
    """Whether only the kernel sets its affinity."""

    counts: Mapping[int, int]
    """Counts by CPU, without zeros."""

    total: int | None
    """Sum over all CPUs; ``None`` if a part is unreadable."""

    share: float | None
    """Share of all interrupts of devices; ``None`` if there were none, or if the total
    is unknown."""

    time_ns: None = None
    """Time in handlers, which Linux does not keep."""

    disabled: Annotated[bool, ADDED] = False
    """Whether it was disabled after it had been started, and cannot come."""

    functions: Annotated[tuple[str, ...], ADDED] = ()
    """Functions of its handlers, in the order of their names, with their modules:
    ``nvme_irq [nvme]``. Of one that only wakes its thread it is the thread's."""


class Vector(Struct, frozen=True, kw_only=True):
    """Interrupts of the architecture of one kind, or softirqs."""

    name: str
    """Name as in /proc/interrupts and /proc/softirqs: ``LOC``, ``NET_RX``."""

    text: str
    counts: Mapping[int, int]
    total: int | None
    """Sum over all CPUs; ``None`` if a part is unreadable."""


class Storm(Struct, frozen=True, kw_only=True):
    """Much work for a CPU, and the function that makes it."""

    kind: str
    """``tasklet``, ``timer``, ``work``, ``interrupt`` (of a device), ``softirq`` (one
    that polls network cards), ``drop`` (packets that a backlog had no room for),
    ``call`` (by other CPUs) or ``callback`` (of RCU)."""

    cpu: int
    function: str
    """With its module: ``poll_again [driver]``. Of calls also ``a wake-up of 1 init``,
    and of works in an interrupt ``rcu_iw_handler (irq_work)``."""

    per_second: float | None = None
    """Tasklets, interrupts, softirqs or calls of that CPU, of all functions."""

    share: float | None = None
    """Of a work item: the share of its life that its worker has run. Of callbacks: the
    share of those looked at that are of this function. Of packets: the dropped share.
    """

    waiting: Annotated[int | None, ADDED] = None
    """Number of callbacks of RCU that wait on that CPU, of all functions, or of packets
    that were dropped there."""

    irq: Annotated[int | None, ADDED] = None
    """Number of the interrupt, if it is one."""

    device: Annotated[str | None, ADDED] = None
    """Name of the network device that is polled."""


# --- the report


class Diagnostic(Struct, frozen=True, kw_only=True):
    """A finding about the partitioning of CPUs, in one line."""

    code: str
    """``isolated-takes-interrupts``, ``idle-while-waiting``, ``not-ticked``,
    ``not-switched``, ``starving-tasks``, ``no-turn``, ``most-interrupts``,
    ``partition-invalid``, ``straying-tasks``, ``irq-disabled``, ``storm``; and, over
    the limits of the kernel's own detectors, ``cpu-stalled``, ``cpu-starved``,
    ``rcu-stalled``."""

    text: str
    cpus: tuple[int, ...]
    advice: str | None
    """The command that fixes it, if there is one."""

    evidence: Annotated[tuple[str, ...], UNLISTED] = ()
    """Facts that it stands on."""


class CpusReport(Report, frozen=True, kw_only=True):
    """Processor sets and per-CPU work."""

    schema: ClassVar[str] = "msatools.cpus/1"

    load: tuple[float, ...] | None
    """Averages over 1, 5 and 15 minutes."""

    cpus: tuple[Cpu, ...]
    sets: tuple[CpuSet, ...]
    run_queues: tuple[RunQueue, ...]
    findings: tuple[Diagnostic, ...]
    irqs: Annotated[tuple[Irq, ...] | None, ADDED] = None
    vectors: Annotated[tuple[Vector, ...] | None, ADDED] = None
    softirqs: Annotated[tuple[Vector, ...] | None, ADDED] = None
    nodes: Sequence[int] = ()
    """Online NUMA nodes."""

    stalls: Annotated[Stalls | None, ADDED] = None
    """What stands still, and the evidence; on request (``--stalls``)."""

    storms: Annotated[tuple[Storm, ...] | None, ADDED] = None
    """Work of which some CPUs have far more than others need, if there is such."""

    stacks: Annotated[tuple[StackOfCpu, ...] | None, ADDED] = None
    """The stack of each CPU; on request (``--stacks``), and only of a dump: those of a
    running kernel move."""

    plan: Annotated[CpuPlan | None, ADDED] = None
    """The plan to set some CPUs apart, if asked for."""
