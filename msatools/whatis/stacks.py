# SPDX-License-Identifier: LGPL-2.1-or-later

"""Places in the kernel stacks of tasks: the frame that an address is in."""

from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import drgn
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.traces import stack_trace
from msatools.selfdesc.find import drgn_lookups, find_type
from msatools.target.model import Address
from msatools.tasks.text import KernelText
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import StackPlace, Task

Where = Literal["frame", "unused", "registers", "guard", "unknown"]


class _Frame(NamedTuple):
    """A frame of a stack."""

    start: int
    """Stack pointer in the frame, its lowest address; or an address within, where only
    the frame pointer is known."""

    is_exact: bool
    """Whether it is the stack pointer."""

    function: str | None


class _InStack(NamedTuple):
    """A place in a stack: see :class:`StackPlace`."""

    where: Where
    frame: int | None = None
    function: str | None = None
    next_function: str | None = None


class _Frames(Struct, frozen=True):
    """The frames of a stack, innermost first."""

    frames: tuple[_Frame, ...]
    end: int
    """Start of what is above the outermost frame: registers, or nothing."""


class StackPlaces:
    """Finds the stacks that contain addresses; unwinds each of them once."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._frames = lru_cache(maxsize=None)(self._unwind)

    def find(self, address: int) -> tuple[Task, StackPlace] | None:
        """Return the task and the place in its stack; ``None`` if it is in none."""
        # Stacks are aligned to their size (THREAD_ALIGN), at least to a page.
        return self._find(address & -self._lookup.stack_bytes, address)

    def find_guard(self, address: int) -> tuple[Task, StackPlace] | None:
        """Return the task whose stack has its guard page at an address.

        :param address: An address at which nothing is mapped.
        """
        start = (address & -self._lookup.page_size) + self._lookup.page_size
        return self._find(start, address)

    def _find(self, start: int, address: int) -> tuple[Task, StackPlace] | None:
        size = self._lookup.stack_bytes
        task = self._lookup.stacks.get(start)
        if task is None:
            return None
        try:
            of = self._lookup.task(task)
        except UNREADABLE as error:
            self._lookup.losses.lose(Loss.TASKS, f"a task cannot be read: {error}")
            return None
        in_guard = address < start
        place = _InStack("guard") if in_guard else self._place(task, address)
        return of, StackPlace(
            pid=of.pid,
            comm=of.comm,
            start=Address(start),
            bytes=size,
            offset=address - start,
            **place._asdict(),
        )

    def _place(self, task: int, address: int) -> _InStack:
        found = self._frames(task)
        frames = found.frames
        if not frames:
            return _InStack("unknown")
        if address < frames[0].start:
            return _InStack("unused")
        if address >= found.end:
            return _InStack("registers")
        number = sum(frame.start <= address for frame in frames) - 1
        following = None
        if number + 1 < len(frames) and not frames[number + 1].is_exact:
            following = frames[number + 1].function
        return _InStack("frame", number, frames[number].function, following)

    def _unwind(self, task: int) -> _Frames:
        """Unwind a stack with drgn; no frames if it cannot."""
        prog = self._lookup.prog
        trace = stack_trace(prog, task)
        if trace is None:
            return _Frames((), 0)
        stack = self._lookup.structs.member(task, "task_struct", "stack")
        size = self._lookup.stack_bytes
        end = stack + size - self._registers_bytes
        frames: list[_Frame] = []
        for frame in trace:
            start, is_exact = _start_of(frame)
            if start is None:
                break
            # The first frames may be on another stack, of an interrupt.
            if frame.is_inline or not stack <= start <= end:
                continue
            if frames and start < frames[-1].start:
                break
            address = frame.pc if frame.interrupted else frame.pc - 1
            frames.append(_Frame(start, is_exact, self._text.name(address)))
        return _Frames(tuple(frames), end)

    @cached_property
    def _registers_bytes(self) -> int:
        """Bytes of the registers of user mode at the end of a stack.

        task_pt_regs(): on x86-64 the stack may end before it by
        TOP_OF_KERNEL_STACK_PADDING.
        """
        try:
            return int(drgn.sizeof(find_type(self._lookup.prog, "struct pt_regs")))
        except MissingError:
            return 0

    @cached_property
    def _text(self) -> KernelText:
        return KernelText(self._lookup.reader, self._lookup.losses)


def _start_of(frame: drgn.StackFrame) -> tuple[int | None, bool]:
    """Return an address at the start of a frame, and whether it is the very start.

    On arm64 the stack pointer is known from debug info alone; the frame pointer, at a
    record of the frame, is known always. Locals may lie below the record.
    """
    try:
        with drgn_lookups:
            return int(frame.sp), True
    except MissingError:
        return frame.registers().get("x29"), False
