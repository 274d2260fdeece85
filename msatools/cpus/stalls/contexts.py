# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a CPU does, by its stack and registers in a dump. The analysis is pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import zip_longest
from typing import Literal

import drgn
import numpy as np

from msatools.cpus.stalls.model import Mode, Why
from msatools.errors import UNREADABLE
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.traces import stack_trace
from msatools.records import dataclass
from msatools.selfdesc.find import object_at
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.framerules import End
from msatools.tasks.stacks import StackCollector
from msatools.tasks.task_state import INTERRUPTS
from msatools.tasks.text import KernelText
from msatools.tasks.unwindone import OneStack, OneState
from msatools.tasks.waits import classify

_INTERRUPT_FLAG = 1 << 9
"""X86_EFLAGS_IF"""

_IRQ_MASK = 1 << 7
"""PSR_I_BIT of arm64's ``pstate``: set if interrupts are masked."""

_NMI = ("asm_exc_nmi", "end_repeat_nmi", "first_nmi", "repeat_nmi")
_ENTRIES = (*INTERRUPTS, *_NMI, "el1h_64_irq", "el1h_64_fiq", "el1_irq")
"""Prefixes of the entry points of interrupts, of user and kernel mode."""

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
"""Functions in which the CPUs stay that a crashing kernel stops."""

_TICKS = frozenset(
    {
        *("tick_sched_timer", "tick_nohz_handler", "tick_nohz_highres_handler"),
        *("tick_sched_handle", "update_process_times", "watchdog_timer_fn"),
    }
)
"""Functions that run in the timer interrupt of any CPU, now and then."""

_TIMER = "asm_sysvec_apic_timer"
"""Beginning of the name of the entry point of that interrupt; x86 only."""

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
"""Prefixes of the functions that let other CPUs run a function, and wait."""

_STOPPED = ("multi_cpu_stop", "stop_machine_yield")

_LOCK_WORDS = re.compile(r"_*(raw_)?(spin|read|write)_(lock|trylock)\w*|do_raw_\w+")

MAX_FRAMES = 48

_SEARCHED = 512
"""Bytes of a stack that are searched for a return address."""

_LEAST = 4
"""Minimum number of frames that are no chance."""

_USER = ""
"""Stands for user mode among the functions of a stack."""


@dataclass(frozen=True)
class Context:
    """What a CPU does."""

    mode: Mode
    function: str | None
    """The innermost function that is not part of a spinlock or a cross call."""

    call: str | None
    """The system call."""

    why: Why | None
    """``None`` if the names alone do not tell."""

    crashed: bool
    """Whether the kernel reported its crash on this CPU."""

    halted: bool
    """Whether the crashing kernel has stopped this CPU for good."""

    frames: tuple[str, ...]
    """Functions of what it does, without those of the crash or an NMI."""

    skipped: int = 0
    """Number of frames above these."""


@dataclass(frozen=True)
class CpuStack:
    """The stack and registers of a CPU in a dump."""

    names: tuple[str, ...]
    """Functions, the innermost first; user mode is ``""``."""

    pcs: tuple[int, ...] = ()
    """Addresses of code of the kernel's frames."""

    flags: Mapping[int, Literal["on", "off"]] = field(default_factory=dict)
    """Whether interrupts are on, by the number of each frame whose registers say so."""


class StackReader:
    """Reads the stacks of tasks that run, in a dump."""

    def __init__(self, reader: Reader, text: KernelText, losses: LossLog) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._text = text
        self._losses = losses

    def read(self, task: int) -> CpuStack | None:
        """Return the stack of a task that runs; ``None`` on a live kernel, or if lost.

        drgn begins, as it knows the registers of frames. Where it does not go on, in
        modules without debug info or by ORC tables that it does not know, those tables
        do; then the registers of further frames are not known.

        :param task: Address of its ``struct task_struct``.
        """
        if self._reader.is_live:
            return None
        trace = stack_trace(self._prog, task)
        if not trace:
            return None
        frames = [frame for frame in trace if not frame.is_inline]
        stack = _CpuStack(self._text)
        for frame, following in zip_longest(frames, frames[1:MAX_FRAMES]):
            registers = frame.registers()
            if (state := _interrupts(registers)) is not None:
                stack.flags[len(stack.names)] = state
            if frame.pc < KERNEL_HALF:
                stack.names.append(_USER)
                break
            has_more = following is not None and (
                following.pc >= KERNEL_HALF or following.interrupted
            )
            if has_more and self._text.in_kernel(frame.pc):
                stack.add(frame.pc, is_exact=frame.interrupted)
                continue
            self._go_on(stack, frame, registers, task)
            break
        return CpuStack(tuple(stack.names), tuple(stack.pcs), stack.flags)

    def _go_on(
        self,
        stack: "_CpuStack",
        frame: drgn.StackFrame,
        registers: Mapping[str, int],
        task: int,
    ) -> None:
        """Add a frame, and its callers by ORC tables."""
        sp, found = registers.get("rsp"), None
        collector = self._reader.once(
            StackCollector, lambda: StackCollector(self._reader, self._losses)
        )
        if sp is not None:
            bp = registers.get("rbp", 0)
            found = collector.callers(OneState(frame.pc, sp, bp, frame.interrupted))
        if sp is None or found is None:
            stack.add(frame.pc, is_exact=frame.interrupted)
            return
        if found.guessed and len(found.pcs) == 1:
            stack.add(frame.pc, is_exact=frame.interrupted)
            found = self._first_caller(collector, sp)
        if found is not None:
            stack.extend(found)
        if found is not None and found.end is End.UNSUPPORTED:
            found = self._interrupted(collector, sp, task)
            if found is not None:
                stack.extend(found)

    def _interrupted(
        self, collector: StackCollector, sp: int, task: int
    ) -> OneStack | None:
        """Find what was interrupted, from a stack for interrupts.

        Its last word is the stack pointer of the task then (``call_on_stack()`` of
        arch/x86/include/asm/irq_stack.h), which is near the return address into the
        entry point.
        """
        size = collector.stack_bytes
        own = object_at(self._prog, "struct task_struct", task)
        try:
            start = own.stack.value_()
            words = self._words(sp, size)
            saved = words[-1] if words else 0
            if start <= sp < start + size or not start <= saved < start + size:
                return None
            words = self._words(saved, min(_SEARCHED, start + size - saved))
        except UNREADABLE:
            return None
        for number, word in enumerate(words):
            if (self._text.name(word - 1) or "").startswith(_ENTRIES):
                at = saved + 8 * (number + 1)
                return collector.callers(OneState(word, at, 0, interrupted=False))
        return None

    def _words(self, address: int, size: int) -> list[int]:
        """Read words up to the first that cannot be read."""
        data, gaps = self._reader.read_around_gaps(address, size, 8)
        readable = min((gap.offset for gap in gaps), default=size) // 8
        words: list[int] = np.frombuffer(data, "<u8", readable).tolist()
        return words

    def _first_caller(self, collector: StackCollector, sp: int) -> OneStack | None:
        """Find the caller of a function that ORC does not describe.

        Such as __crash_kexec() of 7.3, in which the CPU is that crashed. It is at the
        first return address on the stack from which there is a way to its end.
        """
        for number, word in enumerate(self._words(sp, _SEARCHED)):
            if word < KERNEL_HALF or not self._text.in_kernel(word):
                continue
            state = OneState(word, sp + 8 * (number + 1), 0, interrupted=False)
            found = collector.callers(state)
            if found is not None and not found.guessed and len(found.pcs) >= _LEAST:
                return found
        return None


@dataclass
class _CpuStack:
    """A stack while it is read."""

    text: KernelText
    names: list[str] = field(default_factory=list)
    pcs: list[int] = field(default_factory=list)
    flags: dict[int, Literal["on", "off"]] = field(default_factory=dict)

    def extend(self, found: OneStack) -> None:
        """Add frames of the kernel, and user mode if they lead there."""
        for pc, is_exact in zip(found.pcs, found.interrupted, strict=True):
            self.add(pc, is_exact=is_exact)
        if found.end is End.ENTRY:
            self.names.append(_USER)

    def add(self, pc: int, *, is_exact: bool) -> None:
        """Add a frame of the kernel.

        :param is_exact: Whether *pc* is no return address.
        """
        self.pcs.append(pc)
        self.names.append(self.text.name(pc if is_exact else pc - 1) or hex(pc))


def _interrupts(registers: Mapping[str, int]) -> Literal["on", "off"] | None:
    if "rflags" in registers:
        return "on" if registers["rflags"] & _INTERRUPT_FLAG else "off"
    if "pstate" in registers:
        return "off" if registers["pstate"] & _IRQ_MASK else "on"
    return None


def interpret(
    names: Sequence[str],
    *,
    kthread: bool,
    late: bool,
    softirq: bool | None = None,
    interrupt: bool = False,
) -> Context:
    """Return what a CPU does by the functions on its stack. Pure.

    An NMI is how a crashing kernel stops other CPUs, and a tick comes now and then:
    what they have interrupted counts.

    :param names: Functions, the innermost first; user mode is ``""``.
    :param kthread: Whether the task is a kernel thread.
    :param late: Whether the CPU's timer interrupt is late: then a tick does not pass.
    :param softirq: Whether the CPU serves a softirq, by its count; ``None`` if unknown.
    :param interrupt: Whether the CPU is in an interrupt, by its count: a stack may end
        before the entry point.
    """
    parts = list(_parts(names))
    crashed, skipped = False, 0
    halted = bool(parts) and bool(_HALTS.intersection(parts[0]))
    while len(parts) > 1 and (_is_nmi(parts[0]) or _is_passing(parts[0], late)):
        crashed |= bool(_CRASHES.intersection(parts[0]))
        skipped += len(parts.pop(0))
    frames = parts[0] if parts else []
    crashed |= bool(_CRASHES.intersection(frames))
    is_entered = bool(frames) and frames[-1].startswith(_ENTRIES)
    # An interrupt that was skipped is in the count, too.
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
    """Split a stack where something was interrupted; each part ends with an entry."""
    part: list[str] = []
    for name in names:
        part.append(_plain(name))
        if name.startswith(_ENTRIES):
            yield part
            part = []
    if part:
        yield part


def _plain(name: str) -> str:
    """Return a function's name without suffixes of the compiler."""
    return name.partition(".")[0]


def _is_nmi(part: Sequence[str]) -> bool:
    return part[-1].startswith(_NMI)


def _is_passing(part: Sequence[str], late: bool) -> bool:
    """Return whether what interrupted a CPU would have been over soon, or a crash."""
    if not part[-1].startswith(_ENTRIES) or _SOFTIRQS.intersection(part):
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
        if not _LOCK_WORDS.fullmatch(name):
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
