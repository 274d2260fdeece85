# SPDX-License-Identifier: LGPL-2.1-or-later

"""Examine CPUs that are late or hold others up: stack, registers, wanted spinlock."""

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from msatools.cpus.model import (
    CrossCall,
    HeldCpu,
    Mode,
    RunnableTask,
    SpinlockOwner,
    WantedLock,
    Why,
)
from msatools.cpus.stall_chains import STALL_NS
from msatools.cpus.stall_reading import CpuReader, Watchdogs
from msatools.program.model import Address
from msatools.tasks.identity import comm_text
from msatools.tasks.preemption import preemption_count, softirq_count
from msatools.tasks.running_stacks import (
    ENTRIES,
    NMI,
    CpuStack,
    StackReader,
    named_frames,
)
from msatools.tasks.table import PF_KTHREAD
from msatools.tasks.unwind import stack_bytes
from msatools.tasks.waits import classify, is_thunk

# --- What a CPU does, by the functions on its stack in a dump. Pure.


_CRASHES = frozenset(
    {
        *("panic", "vpanic", "nmi_panic", "crash_kexec", "__crash_kexec"),
        *("machine_kexec", "oops_end", "die", "sysrq_handle_crash"),
    }
)
"""Functions that report a crash of the kernel."""

_HALTS = frozenset(
    {
        *("stop_this_cpu", "local_cpu_stop", "cpu_park_loop", "panic_smp_self_stop"),
        *("crash_smp_send_stop", "ipi_cpu_crash_stop"),
    }
)
"""Functions in which CPUs stay for good once a crashing kernel has stopped them."""

_TICKS = frozenset(
    {
        *("tick_sched_timer", "tick_nohz_handler", "tick_nohz_highres_handler"),
        *("tick_sched_handle", "update_process_times", "watchdog_timer_fn"),
    }
)
"""Functions that run in the timer interrupt of any CPU."""

_TIMER = "asm_sysvec_apic_timer"
"""Prefix of the entry point of the timer interrupt; x86 only."""

_SOFTIRQS = frozenset({"__do_softirq", "handle_softirqs", "do_softirq"})
"""Functions that run softirqs."""

_SPINS = (
    *("native_queued_spin_lock_slowpath", "queued_spin_lock_slowpath"),
    *("__pv_queued_spin_lock_slowpath", "queued_read_lock_slowpath"),
    *("queued_write_lock_slowpath", "resilient_queued_spin_lock_slowpath"),
)
_CALLS = (
    *("smp_call_function", "__smp_call_function", "generic_exec_single"),
    *("csd_lock_wait", "__csd_lock_wait", "on_each_cpu"),
)
"""Prefixes of the functions that ask other CPUs to run a function, and wait for it."""

_STOPPED = ("multi_cpu_stop", "stop_machine_yield")

_LOCK_WORDS = re.compile(r"_*(raw_)?(spin|read|write)_(lock|trylock)\w*|do_raw_\w+")


class Context(Struct, frozen=True):
    """What a CPU does, by the functions on its stack."""

    mode: Mode
    function: str | None
    """The innermost function that is no thunk, nor part of a spinlock or cross call."""

    call: str | None
    """The system call that the task is in; ``None`` if it is in none."""

    why: Why | None
    """Why it does nothing else; ``None`` if the functions do not show it."""

    crashed: bool
    """Whether the kernel reported its crash on this CPU."""

    halted: bool
    """Whether the crashing kernel has stopped this CPU for good."""

    frames: tuple[str, ...]
    """Functions up to the next interrupted context, innermost first, without those of
    the crash, an NMI or a passing tick."""

    skipped: int = 0
    """Number of frames of the crash, NMI or tick that were skipped."""


def interpret(
    names: Sequence[str],
    *,
    kthread: bool,
    late: bool,
    softirq: bool | None = None,
    interrupt: bool = False,
) -> Context:
    """Return what a CPU does by the functions on its stack. Pure.

    NMIs, by which a crashing kernel stops other CPUs, and ticks are over soon: they are
    skipped, and the result is what they interrupted.

    :param names: Functions, the innermost first; user mode is ``""``.
    :param kthread: Whether the task is a kernel thread.
    :param late: Whether the CPU's timer interrupt is late: then a tick is not skipped.
    :param softirq: Whether the CPU serves a softirq, by its preempt count; ``None`` if
        unknown.
    :param interrupt: Whether the CPU is in an interrupt, by its preempt count: a stack
        may end before the entry point.
    """
    parts = list(_parts(names))
    crashed, skipped = False, 0
    halted = bool(parts) and bool(_HALTS.intersection(parts[0]))
    while len(parts) > 1 and (_is_nmi(parts[0]) or _is_passing(parts[0], late)):
        crashed |= bool(_CRASHES.intersection(parts[0]))
        skipped += len(parts.pop(0))
    frames = parts[0] if parts else []
    crashed |= bool(_CRASHES.intersection(frames))
    is_entered = bool(frames) and frames[-1].startswith(ENTRIES)
    # The preempt count includes an interrupt that was skipped above.
    is_entered |= interrupt and not skipped and len(parts) == 1 and frames[:1] != [""]
    in_softirq = bool(_SOFTIRQS.intersection(frames)) if softirq is None else softirq
    mode: Mode = "task"
    if frames and not frames[0]:
        mode = "user"
    elif frames and _is_nmi(frames):
        mode = "nmi"
    elif _SOFTIRQS.intersection(frames) and in_softirq:
        mode = "softirq"
    elif is_entered:
        mode = "interrupt"
    call = None
    if not kthread:
        of_task = [name for name in parts[-1] if name] if parts else []
        call = classify(tuple(of_task)).call if of_task else None
    return Context(
        mode=mode,
        function=_function(frames),
        call=call,
        why=_why(frames, mode, kthread=kthread, call=call),
        crashed=crashed,
        halted=halted,
        frames=tuple(name for name in frames if name),
        skipped=skipped,
    )


def _parts(names: Sequence[str]) -> Iterator[list[str]]:
    """Split a stack behind each entry point of an interrupt."""
    part: list[str] = []
    for name in names:
        part.append(_plain(name))
        if name.startswith(ENTRIES):
            yield part
            part = []
    if part:
        yield part


def _plain(name: str) -> str:
    """Return a function's name without suffixes of the compiler."""
    return name.partition(".")[0]


def _is_nmi(part: Sequence[str]) -> bool:
    return part[-1].startswith(NMI)


def _is_passing(part: Sequence[str], late: bool) -> bool:
    """Return whether a part is of a tick that would end soon, or of a crash."""
    if not part[-1].startswith(ENTRIES) or _SOFTIRQS.intersection(part):
        return False
    if (_CRASHES | _HALTS).intersection(part):
        return True
    if late:
        return False
    return part[-1].startswith(_TIMER) or bool(_TICKS.intersection(part))


def _function(frames: Sequence[str]) -> str | None:
    for name in frames:
        if not name or name in _SPINS or name.startswith(_CALLS):
            continue
        if not _LOCK_WORDS.fullmatch(name) and not is_thunk(name):
            return name
    return None


def _why(
    frames: Sequence[str], mode: Mode, *, kthread: bool, call: str | None
) -> Why | None:
    found = {*frames}
    if found.intersection(_SPINS):
        return "spins-for-lock"
    if any(name.startswith(_CALLS) for name in frames):
        return "waits-for-call"
    if found.intersection(_STOPPED):
        return "stopped"
    if found.intersection(_CRASHES | _HALTS):
        return "panic"
    if mode == "softirq":
        return "softirq"
    if mode == "interrupt":
        return "interrupt"
    if mode == "user":
        return "user-mode"
    if not frames:
        return None
    if kthread:
        return "kernel-thread"
    return "system-call" if call else None


# --- The spinlocks that CPUs spin for, and their owners.


class WantedLocks:
    """Finds the spinlocks that CPUs spin for, and their owners."""

    def __init__(self, cpus: CpuReader) -> None:
        self._cpus = cpus

    def locks(self) -> dict[int, WantedLock]:
        """Return by CPU the spinlock that it spins for, with the probable owners."""
        # CPUs rarely spin for long, and these modules take 0.1 s to import.
        from msatools.locks.context import LockContext
        from msatools.locks.names import LockNames
        from msatools.locks.spinlocks import Spin, spins
        from msatools.locks.struct_reader import Layout

        running = self._cpus.running
        context = LockContext(
            Layout(self._cpus.reader),
            running.table,
            self._cpus.losses,
            self._cpus.clocks,
            alone=False,
        )
        found = spins(context, stack_bytes(self._cpus.reader.prog))
        names = LockNames(context)
        cpus = {row: cpu for cpu, row in running.rows.items()}
        addresses: list[int] = running.table["address"].tolist()
        by_task = {address: row for row, address in enumerate(addresses)}

        def owners(spin: Spin) -> tuple[SpinlockOwner, ...]:
            rows = [by_task.get(holder.task) for holder in spin.holders]
            return tuple(
                SpinlockOwner(
                    pid=int(running.table["pid"][row]),
                    comm=comm_text(running.table["comm"][row]),
                    cpu=cpus.get(row),
                    confidence="evidence",
                )
                for row in rows
                if row is not None
            )

        return {
            cpus[spin.row]: WantedLock(
                address=Address(spin.request.lock.address or 0),
                name=names.name(spin.request.lock, ()).name,
                owners=owners(spin),
            )
            for spin in found
            if spin.row in cpus
        }


# --- CPUs that are late or hold others up: their stacks, spinlocks and run queues.


_MAX_STACKS = 64
"""Maximum number of CPUs whose stacks are unwound: each takes milliseconds."""

_THREADS = ("ksoftirqd/", "rcu_", "rcuc/", "rcuog/", "rcuop/", "rcuos/", "ktimers/")
"""Prefixes of the names of the kernel threads for softirqs and RCU."""


class HeldCpus:
    """Examines CPUs: what they run, and which lock or CPU they wait for."""

    def __init__(self, cpus: CpuReader) -> None:
        self._cpus = cpus
        self._locks = WantedLocks(cpus)
        self.halted: set[int] = set()
        """The examined CPUs that a crashing kernel has stopped."""

    def read(
        self,
        wanted: Sequence[int],
        dogs: Watchdogs,
        late: Mapping[int, int],
        calls: Sequence[CrossCall],
    ) -> dict[int, HeldCpu]:
        """Examine some CPUs, and the CPUs of the owners of locks that they spin for.

        :param late: Delay of the timer interrupt in ns, by CPU.
        :param calls: Functions that CPUs have not run yet for others.
        :return: The evidence by CPU.
        """
        if not wanted:
            return {}
        contexts = self._contexts(wanted)
        locks: dict[int, WantedLock] = {}
        if any(each.why == "spins-for-lock" for each, _ in contexts.values()):
            locks = self._locks.locks()
            owners = [
                owner.cpu
                for cpu in contexts
                if cpu in locks
                for owner in locks[cpu].owners
                if owner.cpu in self._cpus.queues
            ]
            wanted = list(dict.fromkeys((*wanted, *owners)))
            contexts |= self._contexts([cpu for cpu in owners if cpu not in contexts])
        counts = self._cpus.counts.by_cpu
        called: dict[int, set[int]] = {}
        for call in calls:
            if call.caller is not None:
                called.setdefault(call.caller, set()).add(call.cpu)
        return {
            cpu: self._held_cpu(
                cpu,
                contexts.get(cpu),
                dogs,
                late.get(cpu),
                counts.get(cpu),
                locks.get(cpu),
                tuple(sorted(called.get(cpu, ()))),
            )
            for cpu in wanted
        }

    def _contexts(self, cpus: Sequence[int]) -> dict[int, tuple[Context, CpuStack]]:
        running = self._cpus.running
        counts = self._cpus.counts.by_cpu
        stacks = StackReader(self._cpus.reader, self._cpus.text, self._cpus.losses)
        found = {}
        if len(cpus) > _MAX_STACKS:
            text = f"only {_MAX_STACKS} CPUs have their stacks read"
            self._cpus.losses.note("stacks-left-out", text)
        for cpu in cpus[:_MAX_STACKS]:
            task = int(running.addresses[self._cpus.rows[cpu]])
            stack = stacks.read(task) if task else None
            if stack is None:
                continue
            count = counts.get(cpu)
            serves = None if count is None else bool(softirq_count(count) & 1)
            context = interpret(
                stack.names,
                kthread=bool(running.of(cpu, "flags") & PF_KTHREAD),
                late=(self._cpus.delay(cpu) or 0) >= STALL_NS,
                softirq=serves,
                interrupt=self._cpus.counts.in_interrupt(count or 0),
            )
            found[cpu] = context, stack
            if context.halted:
                self.halted.add(cpu)
        return found

    def _held_cpu(
        self,
        cpu: int,
        found: tuple[Context, CpuStack] | None,
        dogs: Watchdogs,
        late: int | None,
        count: int | None,
        lock: WantedLock | None,
        calls_cpus: tuple[int, ...],
    ) -> HeldCpu:
        queue = self._cpus.queues[cpu]
        current = queue.current
        interrupts = why = None
        context: Context | None = None
        if found is not None:
            context, stack = found
            why = context.why
            interrupts = stack.flags.get(context.skipped)
            if (
                (late or 0) >= STALL_NS
                and interrupts == "on"
                and not context.halted
                and context.mode in ("user", "task")
            ):
                # If its host ran the CPU, it would have taken the timer interrupt.
                why = "host"
        return HeldCpu(
            cpu=cpu,
            pid=None if current is None else current.pid,
            comm=None if current is None else current.comm,
            policy=_policy(current),
            running_ns=queue.switched_ns,
            tick_late_ns=late,
            ticked_ns=queue.ticked_ns,
            watchdog_ns=dogs.ages_ns[self._cpus.rows[cpu]],
            interrupts=interrupts,
            preempt_count=None if count is None else preemption_count(count),
            softirq_count=None if count is None else softirq_count(count),
            mode=None if context is None else context.mode,
            function=None if context is None else context.function,
            call=None if context is None else context.call,
            why=why,
            wanted=lock,
            calls_cpus=calls_cpus,
            waiting=sum(not task.throttled for task in queue.waiting),
            starved=tuple(
                task.comm
                for task in queue.waiting
                if task.comm.startswith(_THREADS) and (task.wait_ns or 0) >= STALL_NS
            ),
            frames=() if context is None else context.frames,
            module=None if found is None else self._module(*found),
        )

    def _module(self, context: Context, stack: CpuStack) -> str | None:
        """Return the module of ``context.function``; ``None`` if the kernel has it."""
        for name, module in named_frames(stack, self._cpus.text):
            if name.partition(".")[0] == context.function:
                return module
        return None


def _policy(task: RunnableTask | None) -> str | None:
    """Return the policy of a realtime or deadline task, ``FIFO 50``; else ``None``."""
    if task is None or task.sched_class not in ("realtime", "deadline"):
        return None
    if task.rt_priority is None:
        return task.policy
    return f"{task.policy} {task.rt_priority}"
