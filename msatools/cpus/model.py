# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-cpus: processor sets, the work of each CPU, stalls, and plans."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Struct, field

from msatools.kernel.report import ADDED, Report
from msatools.program.model import UNLISTED, Address

# --- The plan to set some CPUs apart: a part of the report of msa-cpus.


class PlanStep(Struct, frozen=True, kw_only=True):
    """One part of a plan to set CPUs apart."""

    name: Literal["partition", "interrupts", "workqueues", "boot"]
    """The kind of work that is kept off the CPUs; ``boot``: all, from the next boot on.
    """

    text: str
    """What the step does, in one line."""

    commands: tuple[str, ...]
    """Lines for a shell; for ``boot`` words for the kernel's command line."""


class PlanRest(Struct, frozen=True, kw_only=True):
    """Work that stays on the CPUs of a plan in spite of it."""

    name: Literal[
        "managed-interrupts",
        "fixed-interrupts",
        "bound-threads",
        "own-affinity",
        "cpusets",
        "unbound-work",
        "timers",
    ]
    """The kind of work."""

    text: str
    """What the work is, in one line."""

    irqs: tuple[int, ...]
    """Numbers of the interrupts that stay; empty for other kinds."""

    pids: tuple[int, ...]
    """IDs of the tasks that stay; empty for other kinds."""


class CpuPlan(Struct, frozen=True, kw_only=True):
    """A plan to set CPUs apart, which is printed and never run."""

    cpus: tuple[int, ...]
    """The CPUs to set apart."""

    others: tuple[int, ...]
    """The online CPUs that are left for all other work."""

    steps: tuple[PlanStep, ...]
    """The steps, in the order in which to take them."""

    stays: tuple[PlanRest, ...]
    """Work that stays on the CPUs in spite of the steps."""


# --- The part of the report of msa-cpus on stalls: evidence and findings.


Confidence = Literal["exact", "likely", "evidence"]
"""``exact``: by the kernel's own records and the registers of CPUs; ``likely``: by a
record that may be old; ``evidence``: by addresses found on a stack."""

StallCode = Literal["cpu-stalled", "cpu-starved", "rcu-stalled"]

StallKind = Literal[
    "no-tick",
    "no-switch",
    "starved",
    "grace-period",
    "cross-call",
    "stop-machine",
    "timers",
]
"""``no-tick``: a CPU takes no timer interrupts; ``no-switch``: a CPU does not leave one
task although others wait; ``starved``: tasks get no turn because of realtime tasks;
``grace-period``: an RCU grace period does not end; ``cross-call``: a CPU does not run
the functions that others asked it to run; ``stop-machine``: CPUs have stopped, and wait
for one that has not; ``timers``: expired timers are not run."""

Mode = Literal["user", "task", "softirq", "interrupt", "nmi"]
"""The context that a CPU runs in: a task in user mode (``user``) or in the kernel
(``task``), or a softirq, interrupt or NMI."""

Why = Literal[
    "spins-for-lock",
    "waits-for-call",
    "stopped",
    "interrupt",
    "softirq",
    "system-call",
    "kernel-thread",
    "user-mode",
    "host",
    "panic",
]
"""Why a CPU does nothing else: it spins for a spinlock; waits for a function that
another CPU is to run; has stopped for stop_machine(); is in an interrupt or softirq; in
a system call; in a kernel thread; in a program; its hypervisor does not run it; or the
kernel was reporting its own crash there."""


class StallLimits(Struct, frozen=True, kw_only=True):
    """Minimum times without progress of stalls: limits of the kernel's detectors."""

    no_tick_ns: int
    """Limit for a CPU whose tick is overdue: ``watchdog_thresh``, the kernel's limit
    for hard lockups. Also the limit for how long a timer may be overdue and
    stop_machine() may take, for which the kernel has none."""

    no_switch_ns: int
    """Limit for a CPU that does not switch: twice ``watchdog_thresh``, that of a soft
    lockup. Also for tasks without a turn."""

    rcu_ns: int
    """Limit for a grace period: ``rcu_cpu_stall_timeout``."""

    call_ns: int
    """Limit for cross calls: the default of ``csd_lock_timeout`` (kernel/smp.c)."""

    soft_watchdog: bool | None
    """Whether the kernel looks for soft lockups; ``None`` if unknown."""

    hard_watchdog: bool | None
    """Whether the kernel looks for hard lockups; ``None`` if unknown."""


class SpinlockOwner(Struct, frozen=True, kw_only=True):
    """A task that probably owns the spinlock that a CPU spins for."""

    pid: int
    comm: str
    cpu: int | None
    """The CPU that the owner runs on; ``None`` if it does not run."""

    confidence: Confidence


class WantedLock(Struct, frozen=True, kw_only=True):
    """A spinlock that a CPU spins for."""

    address: Address
    """Address of the spinlock."""

    name: str | None
    owners: tuple[SpinlockOwner, ...]


class HeldCpu(Struct, frozen=True, kw_only=True):
    """Evidence of what a CPU does that is late, or holds others up."""

    cpu: int
    pid: int | None
    """ID of the task that it runs."""

    comm: str | None
    policy: str | None
    """Policy of a realtime or deadline task, as ``FIFO 50``, ``RR 1`` or ``DEADLINE``;
    ``None`` for other tasks."""

    running_ns: int | None
    """Time for which it has run that task."""

    tick_late_ns: int | None
    """Delay of its timer interrupt; ``None`` if unknown."""

    ticked_ns: int | None
    """Time since its last tick."""

    watchdog_ns: int | None
    """Time since the watchdog's thread last ran on it, in steps of 1.07 s; ``None``
    if there is no such watchdog."""

    interrupts: Literal["on", "off"] | None
    """Whether interrupts are on, by its registers in a dump; ``None`` without them."""

    preempt_count: int | None
    """How often preemption was disabled, also by spinlocks; ``None`` if unknown."""

    softirq_count: int | None
    """2 for each time that softirqs were disabled, and 1 while one is served; ``None``
    if unknown."""

    mode: Mode | None
    """The context that it runs in; ``None`` without registers, as on a live kernel."""

    function: str | None
    """The innermost function that is no thunk, nor part of a spinlock or cross call."""

    call: str | None
    """The system call that its task is in; ``None`` if in none, or if unknown."""

    why: Why | None
    """Why it does nothing else; ``None`` if unknown."""

    wanted: WantedLock | None
    """The spinlock that it spins for."""

    calls_cpus: tuple[int, ...]
    """The CPUs that it waits for to run a function."""

    waiting: int
    """Number of tasks that wait for this CPU."""

    starved: tuple[str, ...]
    """Names of the kernel's threads for softirqs and RCU that have waited for this CPU
    for a second or longer."""

    frames: tuple[str, ...]
    """Functions on its stack, the innermost first."""

    module: Annotated[str | None, ADDED] = None
    """The module that has *function*; ``None`` if the kernel itself does."""


class GracePeriodTask(Struct, frozen=True, kw_only=True):
    """A task of a grace period: one that blocks it, RCU's own, or one that waits."""

    pid: int
    comm: str
    wait_ns: int | None
    """Time for which it has waited, or been in its state."""

    cpu: int | None = None
    """The CPU that it runs on, or waits for; ``None`` if it sleeps."""

    state: str | None = None
    """Letter of its state, as in /proc."""

    expedited: bool = False
    """Whether the grace period that it waits for is an expedited one."""

    function: str | None = None
    """The function in which it waits."""


class GracePeriod(Struct, frozen=True, kw_only=True):
    """The state of RCU."""

    active: bool
    """Whether a grace period is under way."""

    age_ns: int | None
    """Time since the grace period began, or was requested if it has not begun."""

    sequence: int
    """``rcu_state.gp_seq``."""

    cpus: tuple[int, ...]
    """CPUs that have not passed a quiescent state yet (``qsmask``)."""

    tasks: tuple[GracePeriodTask, ...]
    """Tasks that were preempted or slept as readers, and hold up the grace period."""

    expedited_cpus: tuple[int, ...]
    """CPUs that an expedited grace period waits for."""

    expedited_tasks: tuple[GracePeriodTask, ...]
    thread: GracePeriodTask | None
    """The thread that runs grace periods; its ``wait_ns`` is the time since it was last
    active."""

    callbacks: int | None
    """Number of callbacks that wait for a grace period, over all CPUs."""

    waiters: tuple[GracePeriodTask, ...] | None
    """Tasks that wait for a grace period, the longest wait first; ``None`` if not read,
    as the grace period may still end in time."""


class CrossCall(Struct, frozen=True, kw_only=True):
    """A function that a CPU has to run for another one."""

    cpu: int
    """The CPU that is to run it."""

    function: str | None
    """Name of the function; ``None`` if unknown, or for the wake-up of a task."""

    caller: int | None
    """The CPU that waits for the function; ``None`` if none does, or if unknown."""

    kind: Literal["call", "async", "irq-work", "wake-up"]
    """``call``: the caller waits; ``async``: it does not; ``irq-work``: work that runs
    in an interrupt; ``wake-up``: the wake-up of a task."""

    pid: Annotated[int | None, ADDED] = None
    """The task to wake up."""

    comm: Annotated[str | None, ADDED] = None


class StopMachine(Struct, frozen=True, kw_only=True):
    """CPUs that stop to run a function while nothing else runs."""

    function: str | None
    """The function that runs once all CPUs have stopped."""

    step: str | None
    """``prepare`` until all have stopped, then ``disable-irq``, ``run``, ``exit``."""

    stopped: tuple[int, ...]
    """CPUs that have stopped."""

    missing: tuple[int, ...]
    """CPUs that have not stopped yet."""

    since_ns: int | None
    """Time for which the first CPU has been stopped."""


class OverdueTimer(Struct, frozen=True, kw_only=True):
    """A timer that has expired and has not been run."""

    cpu: int
    kind: Literal["hrtimer", "timer"]
    """``hrtimer``: a high-resolution timer; ``timer``: one of the timer wheel."""

    function: str | None
    """The timer's function; ``None`` if unknown."""

    late_ns: int
    """Time since the timer expired."""


class Stall(Struct, frozen=True, kw_only=True):
    """A CPU, grace period or the like without progress, and the cause if found."""

    code: StallCode
    """The code of the finding, as in the verdicts of msa-report."""

    kind: StallKind
    """What makes no progress."""

    text: str
    """The finding in one line, as ``--stalls`` prints it."""

    chain: tuple[str, ...]
    """The waits from here to the cause, a line each; empty if the text has it all."""

    confidence: Confidence
    """Confidence of the weakest step."""

    for_ns: int | None
    """Time without progress."""

    limit_ns: int
    """Minimum time without progress that is a stall."""

    over_limit: bool
    """Whether it is a stall: by ``limit_ns``, or by the kernel's own detector."""

    cpus: tuple[int, ...]
    """The CPUs that make no progress, or hold up others."""

    culprit_cpu: int | None
    """The CPU at the end of the chain; ``None`` if the culprit is not known."""

    culprit_pid: int | None
    """ID of the task on that CPU, or of a task that holds up others without a CPU; 0
    for the idle task."""

    waiting: int
    """Number of tasks that are known to wait for progress."""


class Stalls(Struct, frozen=True, kw_only=True):
    """CPUs, grace periods and the like without progress, and the evidence."""

    limits: StallLimits
    found: tuple[Stall, ...]
    """The stalls, the worst first; those below their limit last."""

    cpus: tuple[HeldCpu, ...]
    """CPUs that are late by a second or longer, and those that stalls involve."""

    rcu: GracePeriod | None
    """The state of RCU; ``None`` if it could not be read, or without tree RCU."""

    calls: tuple[CrossCall, ...]
    """Functions that late CPUs have not run yet for others."""

    stop_machine: StopMachine | None
    timers: tuple[OverdueTimer, ...]
    """The first timer of each kind on each CPU, if late by a second or longer."""

    halted_ns: int | None
    """Time since a crashing kernel stopped its other CPUs, which stalls do not include;
    ``None`` if it did not stop them."""

    stolen: tuple[int, ...]
    """CPUs that the hypervisor was not running, as it has recorded (KVM only)."""


# --- The report of msa-cpus: processor sets, and the work of each CPU.
#
# Plain data, to be rendered as text or JSON. Counts and times are since boot, or within
# an interval; states are those at the end.


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
"""Kinds of sets: the root cpuset or a partition (``root``), an isolated or an invalid
partition, a cpuset that only limits its tasks, or CPUs of a word of the command line.
"""


# --- each CPU


class Running(Struct, frozen=True, kw_only=True):
    """The task that a CPU runs."""

    pid: int
    comm: str
    sched_class: SchedClass = field(name="class")


class Cpu(Struct, frozen=True, kw_only=True):
    """One CPU, as a row of psrinfo and mpstat. A value is ``None`` if the kernel does
    not keep it, or if it could not be read."""

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
    """Interrupts by which other CPUs request function calls."""

    tlb: int | None
    """Function calls that flushed the TLB for other CPUs."""

    intr: int | None
    """Interrupts of devices and of the architecture."""

    soft: int | None
    """Softirqs."""

    csw: int | None
    """Context switches."""

    icsw: int | None = None
    """Involuntary context switches of tasks that were last on the CPU; on request."""

    migr: int | None = None
    """Migrations of tasks that were last on the CPU; on request."""

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
    """Idle time in which a task that was last on the CPU waited for I/O."""

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
    """Whether the scheduler may put tasks on the CPU."""

    hotplug: str | None
    """Its hotplug state, such as ``online`` (kernel/cpu.c)."""

    hotplug_target: str | None
    """The target state of hotplug; ``None`` if it is reached, or unknown."""

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
    """Time for which it has waited for the CPU; for the current task, has run."""

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
    """Lag of its clock behind the latest clock of all run queues."""

    ticked_ns: int | None
    """Time since its last tick."""

    switched_ns: int | None
    """Time for which it has run the same task."""

    lag_why: str | None
    """Why its clock lags: ``idle``, ``tick stopped``, ``interrupts off``, ``not run by
    its host`` or ``offline``; ``None`` if it does not."""

    panicked: bool
    """Whether the kernel panicked on this CPU."""

    doing: Annotated[str | None, ADDED] = None
    """What the CPU did in a dump: ``user mode``, or ``kernel`` or ``interrupt`` and the
    function."""


class StackOfCpu(Struct, frozen=True, kw_only=True):
    """The stack of a CPU in a dump, down to user mode."""

    cpu: int
    pid: int | None
    """ID of its task; 0 for the idle task."""

    comm: str | None
    frames: tuple[str, ...] | None
    """Functions, the innermost first, with their modules; ``(user mode)`` at the end if
    the stack leads there. ``None`` if the CPU was offline, or its stack is lost."""


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
    """Why the task counts as straying; empty if it does not."""

    kthread: bool
    """Whether it is a kernel thread."""


class SetTasks(Struct, frozen=True, kw_only=True):
    """The tasks of a set."""

    members: int
    """Number of threads in the set's cpuset or below, or, for a set of the command
    line, that may run on its CPUs only."""

    pinned: tuple[BoundTask, ...]
    """Members bound to a part of the set's CPUs, without per-CPU kernel threads."""

    straying: tuple[BoundTask, ...]
    """Threads of other sets that may run on the set's CPUs, and members that may run on
    other CPUs."""

    percpu_threads: int
    """Number of per-CPU kernel threads of the set's CPUs."""


class CpuSet(Struct, frozen=True, kw_only=True):
    """A set of CPUs, in force or only requested."""

    name: str
    """Path of the cgroup, or word of the command line; ``default`` for the CPUs that
    are in no other set."""

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
    """Address of the scheduler's root domain; ``None`` if several or none."""

    balanced: bool | None
    """Whether the scheduler balances tasks among its CPUs."""

    irqs_routed: tuple[int, ...]
    """Interrupts of devices that go to one of its CPUs now (effective affinity)."""

    irqs_allowed: tuple[int, ...]
    """Interrupts of devices that may go to one of its CPUs (affinity)."""

    irqs_managed: int
    """Number of ``irqs_allowed`` whose affinity only the kernel sets."""

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
    """Share of all interrupts of devices, 0 to 1; ``None`` if there were none, or if
    the total is unknown."""

    time_ns: None = None
    """Time in handlers, which Linux does not keep."""

    disabled: Annotated[bool, ADDED] = False
    """Whether it was disabled after it had been started, and cannot come."""

    functions: Annotated[tuple[str, ...], ADDED] = ()
    """Functions of its handlers, in the order of ``name``, with their modules:
    ``nvme_irq [nvme]``. For a handler that only wakes its thread, the thread's."""


class Vector(Struct, frozen=True, kw_only=True):
    """One kind of the CPUs' own interrupts, or of softirqs."""

    name: str
    """Name as in /proc/interrupts and /proc/softirqs: ``LOC``, ``NET_RX``."""

    text: str
    counts: Mapping[int, int]
    total: int | None
    """Sum over all CPUs; ``None`` if a part is unreadable."""


class Storm(Struct, frozen=True, kw_only=True):
    """Far more work of a kind on a CPU than usual, and the function that makes it."""

    kind: str
    """``tasklet``, ``timer``, ``work``, ``interrupt`` (of a device), ``softirq`` (one
    that polls network cards), ``drop`` (packets that a backlog had no room for),
    ``call`` (by other CPUs) or ``callback`` (of RCU)."""

    cpu: int
    function: str
    """The function with its module: ``poll_again [driver]``. A call that wakes a task
    has no function: ``a wake-up of PID COMM``, such as ``a wake-up of 1 init``. A
    function of an irq_work has that behind it: ``rcu_iw_handler (irq_work)``."""

    per_second: float | None = None
    """Tasklets, interrupts, softirqs or calls a second there, of all functions."""

    share: float | None = None
    """For ``work``: the share of its life that the worker has run. For ``callback``:
    this function's share of the callbacks that were read. For ``drop``: the share of
    packets that were dropped."""

    waiting: Annotated[int | None, ADDED] = None
    """For ``callback``: the number of RCU callbacks that wait on that CPU, of all
    functions. For ``drop``: the number of dropped packets."""

    irq: Annotated[int | None, ADDED] = None
    """Number of the interrupt, for ``interrupt``."""

    device: Annotated[str | None, ADDED] = None
    """Name of the network device that is polled. For ``drop`` that of the first packet
    in the backlog now: the kernel does not record whose packets it dropped."""


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
    """Facts that the finding is based on."""


class CpusReport(Report, frozen=True, kw_only=True):
    """Processor sets and per-CPU work."""

    schema: ClassVar[str] = "msatools.cpus/1"

    load: tuple[float, ...] | None
    """Load averages over 1, 5 and 15 minutes."""

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
    """CPUs and the like without progress, and the evidence; only with ``--stalls``."""

    storms: Annotated[tuple[Storm, ...] | None, ADDED] = None
    """CPUs with far more work of a kind than others; ``None`` if there are none."""

    stacks: Annotated[tuple[StackOfCpu, ...] | None, ADDED] = None
    """The stack of each CPU; on request (``--stacks``), and only of a dump, as stacks
    of a running kernel change."""

    plan: Annotated[CpuPlan | None, ADDED] = None
    """The plan to set some CPUs apart, if asked for."""
