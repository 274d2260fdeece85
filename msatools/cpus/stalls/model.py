# SPDX-License-Identifier: LGPL-2.1-or-later

"""The part of the report of msa-cpus on stalls: evidence, and what follows from it."""

from typing import Annotated, Literal

from msgspec import Struct

from msatools.kernel.report import ADDED
from msatools.target.model import Address

Confidence = Literal["exact", "likely", "evidence"]
"""``exact``: by the kernel's own records and the registers of CPUs; ``likely``: by a
record that may be old; ``evidence``: by what lies on a stack."""

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
"""What a CPU runs: a task in user mode or in the kernel, or what interrupted it."""

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
    """From when on something is a stall: the limits of the kernel's own detectors."""

    no_tick_ns: int
    """Of a CPU without a tick: ``watchdog_thresh``, the limit of a hard lockup. The
    same holds for timers and for stop_machine(), for which the kernel has none."""

    no_switch_ns: int
    """Of a CPU that does not switch: twice ``watchdog_thresh``, that of a soft lockup.
    The same holds for tasks without a turn."""

    rcu_ns: int
    """Of a grace period: ``rcu_cpu_stall_timeout``."""

    call_ns: int
    """Of cross calls: ``csd_lock_timeout`` (kernel/smp.c)."""

    soft_watchdog: bool | None
    """Whether the kernel looks for soft lockups; ``None`` if unknown."""

    hard_watchdog: bool | None
    """Whether the kernel looks for hard lockups."""


class SpinlockOwner(Struct, frozen=True, kw_only=True):
    """A task that probably has the spinlock that a CPU spins for."""

    pid: int
    comm: str
    cpu: int | None
    """The CPU that it runs on; ``None`` if it does not."""

    confidence: Confidence


class WantedLock(Struct, frozen=True, kw_only=True):
    """A spinlock that a CPU spins for."""

    address: Address
    """Where it lies."""

    name: str | None
    owners: tuple[SpinlockOwner, ...]


class HeldCpu(Struct, frozen=True, kw_only=True):
    """A CPU that does not do what others wait for: evidence of what it does."""

    cpu: int
    pid: int | None
    """The task that it runs."""

    comm: str | None
    policy: str | None
    """``FIFO 50``, ``RR 1`` or ``DEADLINE``; ``None`` for a task that is not of these.
    """

    running_ns: int | None
    """Time that it has run that task."""

    tick_late_ns: int | None
    """Delay of its timer interrupt; ``None`` if unknown."""

    ticked_ns: int | None
    """Time since its last tick."""

    watchdog_ns: int | None
    """Time since the watchdog's thread last ran on it, in steps of 1.07 s; ``None``
    if there is no such watchdog."""

    interrupts: Literal["on", "off"] | None
    """By its registers in a dump; ``None`` without them."""

    preempt_count: int | None
    """Depth of what has disabled preemption, spinlocks included; ``None`` if
    unknown."""

    softirq_count: int | None
    """Depth of what has disabled softirqs; odd while one is served."""

    mode: Mode | None
    """``None`` without registers, as on a live kernel."""

    function: str | None
    """The function that says best what it does."""

    call: str | None
    """The system call that its task is in."""

    why: Why | None
    """Why it does nothing else; ``None`` if unknown."""

    wanted: WantedLock | None
    """The lock that it spins for."""

    calls_cpus: tuple[int, ...]
    """The CPUs whose functions it waits for."""

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
    """A task that has to do with a grace period."""

    pid: int
    comm: str
    wait_ns: int | None
    """Time for which it has waited, or has had its state."""

    cpu: int | None = None
    """The CPU that it runs on, or waits for."""

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
    """Time since it began, or since one that has not begun was requested."""

    sequence: int
    """``rcu_state.gp_seq``."""

    cpus: tuple[int, ...]
    """CPUs that have not passed a quiescent state yet (``qsmask``)."""

    tasks: tuple[GracePeriodTask, ...]
    """Tasks that were preempted or slept as readers, and hold it up."""

    expedited_cpus: tuple[int, ...]
    """Likewise, for an expedited grace period."""

    expedited_tasks: tuple[GracePeriodTask, ...]
    thread: GracePeriodTask | None
    """The thread that runs grace periods; ``wait_ns`` is the time since it did
    something."""

    callbacks: int | None
    """Number of callbacks that wait for a grace period, over all CPUs."""

    waiters: tuple[GracePeriodTask, ...] | None
    """Tasks that wait for a grace period, the longest first; ``None`` if they were not
    looked for, as a grace period that ends in time makes nobody wait."""


class CrossCall(Struct, frozen=True, kw_only=True):
    """A function that a CPU has to run for another one."""

    cpu: int
    """The CPU that is to run it."""

    function: str | None
    """Name of the function; ``None`` if unknown, or for the wake-up of a task."""

    caller: int | None
    """The CPU that waits for it; ``None`` if none does, or if unknown."""

    kind: Literal["call", "async", "irq-work", "wake-up"]
    """A call that someone waits for; one that nobody does; work in an interrupt; the
    wake-up of a task."""

    pid: Annotated[int | None, ADDED] = None
    """The task to wake up."""

    comm: Annotated[str | None, ADDED] = None


class StopMachine(Struct, frozen=True, kw_only=True):
    """CPUs that stop to run a function while nothing else runs."""

    function: str | None
    """What is to be run then."""

    step: str | None
    """``prepare``: until all CPUs are there; ``disable-irq``, ``run``, ``exit``."""

    stopped: tuple[int, ...]
    """CPUs that have stopped."""

    missing: tuple[int, ...]
    """CPUs that have not."""

    since_ns: int | None
    """Time that the first CPU has been waiting."""


class OverdueTimer(Struct, frozen=True, kw_only=True):
    """A timer that has expired and has not been run."""

    cpu: int
    kind: Literal["hrtimer", "timer"]
    """Whether it is one of high resolution, or of the timer wheel."""

    function: str | None
    """The function that it is to run; ``None`` if unknown."""

    late_ns: int
    """Time since it expired."""


class Stall(Struct, frozen=True, kw_only=True):
    """Something that stands still, and what follows from the evidence."""

    code: StallCode
    """What stands still, as in the verdicts of msa-report."""

    kind: StallKind
    """In which way."""

    text: str
    """One line."""

    chain: tuple[str, ...]
    """What holds it up, step by step to the cause: a line each; empty if the text says
    it all."""

    confidence: Confidence
    """That of the weakest step."""

    for_ns: int | None
    """Time that it has stood still."""

    limit_ns: int
    """From when on it is a stall."""

    over_limit: bool
    """Whether it has stood still for the limit or longer."""

    cpus: tuple[int, ...]
    """The CPUs that stand still, or hold up others."""

    culprit_cpu: int | None
    """The CPU at the end of the chain; ``None`` if the culprit is not known."""

    culprit_pid: int | None
    """The task there, or the one that holds up others without a CPU; 0 for the idle
    task."""

    waiting: int
    """Number of tasks that are known to wait for it."""


class Stalls(Struct, frozen=True, kw_only=True):
    """What stands still, and the evidence."""

    limits: StallLimits
    found: tuple[Stall, ...]
    """The worst first; those below their limit last."""

    cpus: tuple[HeldCpu, ...]
    """CPUs that have been late for a second or longer, and those that matter for what
    stands still."""

    rcu: GracePeriod | None
    """``None`` if it could not be read, or the kernel has no tree RCU."""

    calls: tuple[CrossCall, ...]
    """What CPUs that are late have not run yet."""

    stop_machine: StopMachine | None
    timers: tuple[OverdueTimer, ...]
    """Timers of each CPU that are late by a second or longer, the first of a kind."""

    halted_ns: int | None
    """Time since a crashing kernel stopped its other CPUs, if it did and went on: it is
    not counted."""

    stolen: tuple[int, ...]
    """CPUs that the hypervisor did not run at that moment, as it says (KVM only)."""
