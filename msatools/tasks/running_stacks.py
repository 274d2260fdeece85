# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of running tasks in a dump: unwound from their registers, over interrupts."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Literal

import drgn
import numpy as np
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.code import stack_trace
from msatools.kernel.reader import U64, Reader
from msatools.kernel.report import LossLog
from msatools.program.arch import arch_of
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type, object_at, offset_of
from msatools.selfdesc.load import is_served_by_btf
from msatools.tasks.sampler import INTERRUPTS
from msatools.tasks.stacks import StackCollector
from msatools.tasks.text import End, KernelText
from msatools.tasks.unwind import OneStack, OneState
from msatools.tasks.waits import is_thunk

_INTERRUPT_FLAG = 1 << 9
"""X86_EFLAGS_IF"""

_IRQ_MASK = 1 << 7
"""PSR_I_BIT of arm64's ``pstate``: set if interrupts are masked."""

NMI = ("asm_exc_nmi", "end_repeat_nmi", "first_nmi", "repeat_nmi")
ENTRIES = (*INTERRUPTS, *NMI, "el1h_64_irq", "el1h_64_fiq", "el1_irq")
"""Prefixes of the entry points of interrupts, of user and kernel mode."""

MAX_FRAMES = 48

_SEARCHED = 512
"""Bytes of a stack that are searched for a return address."""

_LEAST = 4
"""Minimum number of frames that a guessed return address must lead to: fewer may be
chance."""

_CALL = 0xE8
"""The ``call rel32`` of x86-64."""

USER_MODE = ""
"""Stands for user mode among the functions of a stack."""

LAST_SWITCH = "(registers are lost; from its last switch:)"
"""Stands before the functions of a running task's outdated stack."""

_SWITCHES = ("__schedule", "__switch_to")
"""The innermost functions of a task that was switched from, on x86-64 and on arm64."""


class CpuStack(Struct, frozen=True):
    """The stack and registers of a CPU in a dump."""

    names: tuple[str, ...]
    """Functions, the innermost first; user mode is ``""``."""

    pcs: tuple[int, ...] = ()
    """Program counters of the kernel's frames, innermost first."""

    flags: Mapping[int, Literal["on", "off"]] = field(default_factory=dict)
    """Whether interrupts are on, by index in *names* of frames with known registers."""


def frame_texts(stack: CpuStack, text: KernelText) -> tuple[str, ...]:
    """Return the functions of a stack as :func:`frame_text` writes them."""
    return tuple(map(frame_text, named_frames(stack, text)))


def named_frames(stack: CpuStack, text: KernelText) -> Iterator[tuple[str, str | None]]:
    """Yield the functions of a stack, each with its module or ``None``."""
    pcs = iter(stack.pcs)
    for name in stack.names:
        if name == USER_MODE:
            yield "(user mode)", None
        elif name == LAST_SWITCH:
            yield name, None
        else:
            yield name, text.module_name(next(pcs))


def frame_text(frame: tuple[str, str | None]) -> str:
    """Return a function as in the kernel's log: with its module in brackets."""
    name, module = frame
    return name if module is None else f"{name} [{module}]"


class StackReader:
    """Reads the stacks of running tasks in a dump."""

    def __init__(self, reader: Reader, text: KernelText, losses: LossLog) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._text = text
        self._losses = losses

    def read(self, task: int) -> CpuStack | None:
        """Return the stack of a running task; ``None`` on a live kernel, or if lost.

        drgn unwinds first, as it has the registers of frames. Where it stops, in
        modules without debug info or as it does not know the ORC format, this module
        goes on by ORC tables; then the registers of further frames are not known.

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
                stack.names.append(USER_MODE)
                break
            if not stack.names and self._caller_is_guessed(_place(frame)):
                self._go_on(stack, frame, registers, task)
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

    def at_last_switch(self, task: int) -> CpuStack | None:
        """Return the stack that a running task had when it was last switched from.

        For a dump without registers. The task has since overwritten a part of that
        stack or all of it, so it is marked with :data:`LAST_SWITCH`, and is no evidence
        of what the task holds or does.

        :param task: Address of its ``struct task_struct``.
        :return: ``None`` on a live kernel, or if too much is overwritten to unwind from
            ``__schedule()`` to the end of the stack.
        """
        if self._reader.is_live:
            return None
        prog = self._prog
        type_ = find_type(prog, "struct task_struct")
        names = ("stack", *arch_of(prog).saved_registers)
        try:
            words = [
                U64.unpack(self._reader.read(task + offset_of(type_, name), 8))[0]
                for name in names
            ]
        except LOST:
            return None
        own, saved = np.array(words[:1], np.uint64), np.array([words[1:]], np.uint64)
        memory = self._collector.read(own, saved)
        stack = self._collector.unwind(task, memory.stack(0).tolist(), tuple(words[1:]))
        pcs = list(stack.instructions())
        functions = [self._text.name(pc) or hex(pc) for pc in pcs]
        is_whole = stack.end in (End.ENTRY, End.START) and not stack.guessed
        if not is_whole or not functions or functions[0] not in _SWITCHES:
            return None
        return CpuStack((LAST_SWITCH, *functions), stack.addresses)

    def _go_on(
        self,
        stack: "_CpuStack",
        frame: drgn.StackFrame,
        registers: Mapping[str, int],
        task: int,
    ) -> None:
        """Add a frame to *stack*, and its callers by ORC tables."""
        sp, found = registers.get("rsp"), None
        collector = self._collector
        bp = registers.get("rbp", 0)
        if sp is not None:
            found = collector.callers(OneState(frame.pc, sp, bp, frame.interrupted))
        if sp is None or found is None:
            stack.add(frame.pc, is_exact=frame.interrupted)
            return
        if collector.guesses(_place(frame)):
            stack.add(frame.pc, is_exact=frame.interrupted)
            at = OneState(_place(frame), sp, bp, interrupted=True)
            known = self._first_caller(collector, at)
            found = known or _callers_of(found)
        stack.extend(found)
        if found.end is End.UNSUPPORTED:
            found = self._interrupted(collector, sp, task)
            if found is not None:
                stack.extend(found)

    def _interrupted(
        self, collector: StackCollector, sp: int, task: int
    ) -> OneStack | None:
        """Return the frames of the task from the entry point of an interrupt on.

        *sp* is on a stack for interrupts. That stack's last word is the task's stack
        pointer at the interrupt (``call_on_stack()`` of
        arch/x86/include/asm/irq_stack.h); the return address into the entry point is
        near.
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
            if (self._text.name(word - 1) or "").startswith(ENTRIES):
                at = saved + 8 * (number + 1)
                return collector.callers(OneState(word, at, 0, interrupted=False))
        return None

    def _words(self, address: int, size: int) -> list[int]:
        """Read words up to the first that cannot be read."""
        data, gaps = self._reader.read_around_gaps(address, size, 8)
        readable = min((gap.offset for gap in gaps), default=size) // 8
        words: list[int] = np.frombuffer(data, "<u8", readable).tolist()
        return words

    @property
    def _collector(self) -> StackCollector:
        return self._reader.once(
            StackCollector, lambda: StackCollector(self._reader, self._losses)
        )

    def _caller_is_guessed(self, pc: int) -> bool:
        """Return whether drgn can only guess the caller of a kernel function: no debug
        info is loaded, and ORC leaves the function out."""
        is_guess = is_served_by_btf(self._prog) and self._text.in_kernel(pc)
        return is_guess and self._collector.guesses(pc)

    def _first_caller(self, collector: StackCollector, at: OneState) -> OneStack | None:
        """Return the callers of a function that ORC does not describe; ``None`` if not
        found.

        Such as __crash_kexec(), in which a crashed CPU is: objtool leaves it out. The
        caller is at the first return address on the stack that follows a call of the
        function, and from which the stack can be unwound.
        """
        symbol = self._text.symbol(at.pc)
        for number, word in enumerate(self._words(at.sp, _SEARCHED)):
            if word < KERNEL_HALF or not self._text.in_kernel(word):
                continue
            if symbol is None or self._called(word) != symbol.address:
                continue
            sp = at.sp + 8 * (number + 1)
            state = OneState(word, sp, at.bp, interrupted=False)
            found = collector.callers(state)
            if found is not None and not found.guessed and len(found.pcs) >= _LEAST:
                return found
        return None

    def called(self, address: int) -> int | None:
        """Return the function that the call before a return address names.

        ``None`` if the call is by pointer, maybe by way of a thunk. For x86-64 only.
        """
        target = self._called(address)
        symbol = None if target is None else self._text.symbol(target)
        if symbol is None or symbol.address != target or is_thunk(symbol.name):
            return None
        return target

    def _called(self, address: int) -> int | None:
        """Return the target of the ``call rel32`` before a return address, if any."""
        try:
            code = self._reader.read(address - 5, 5)
        except UNREADABLE:
            return None
        distance = int.from_bytes(code[1:], "little", signed=True)
        return address + distance if code[0] == _CALL else None


class _CpuStack(Struct):
    """A :class:`CpuStack` that is being read."""

    text: KernelText
    names: list[str] = field(default_factory=list)
    pcs: list[int] = field(default_factory=list)
    flags: dict[int, Literal["on", "off"]] = field(default_factory=dict)

    def extend(self, found: OneStack) -> None:
        """Add frames of the kernel, and user mode if they end at the entry from it."""
        for pc, is_exact in zip(found.pcs, found.interrupted, strict=True):
            self.add(pc, is_exact=is_exact)
        if found.end is End.ENTRY:
            self.names.append(USER_MODE)

    def add(self, pc: int, *, is_exact: bool) -> None:
        """Add a frame of the kernel.

        :param is_exact: Whether *pc* is no return address.
        """
        self.pcs.append(pc)
        self.names.append(self.text.name(pc if is_exact else pc - 1) or hex(pc))


def _place(frame: drgn.StackFrame) -> int:
    """Return an address within a frame's current or calling instruction."""
    return int(frame.pc if frame.interrupted else frame.pc - 1)


def _callers_of(found: OneStack) -> OneStack:
    """Return a stack without its innermost frame."""
    pcs, interrupted = found.pcs[1:], found.interrupted[1:]
    return OneStack(pcs, interrupted, found.end, found.guessed)


def _interrupts(registers: Mapping[str, int]) -> Literal["on", "off"] | None:
    if "rflags" in registers:
        return "on" if registers["rflags"] & _INTERRUPT_FLAG else "off"
    if "pstate" in registers:
        return "off" if registers["pstate"] & _IRQ_MASK else "on"
    return None
