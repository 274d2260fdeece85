# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Stack traces of many tasks that do not run.

On x86-64 stacks are unwound by the kernel's ORC tables, on arm64 by frame records. Each
stack takes one read, and all are unwound together: a stack costs some microseconds, and
is exact with and without debug info. On other architectures, and for frames that ORC
does not support, drgn unwinds one stack after the other.
"""

from collections.abc import Iterator, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, MissingError, NotSupportedError
from msatools.kernel.code import stack_trace
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import read_structs
from msatools.program.arch import arch_of
from msatools.program.linear import KERNEL_HALF, code_start, page_address
from msatools.selfdesc.find import ask, find_type, find_variable
from msatools.tasks.table import TaskReader
from msatools.tasks.text import End, KernelText, Orc
from msatools.tasks.unwind import (
    FrameRecords,
    Frames,
    OneStack,
    OneState,
    StackMemory,
    Unwinder,
    read_stacks,
    stack_bytes,
    thread_start,
)

_AT_ONCE = 1024
"""Number of stacks in memory at a time: usually 100 KiB, 16 MiB if all are full."""

MAX_ASKED = 256
"""Maximum number of stacks that drgn unwinds where ORC cannot: each takes some ms."""


class Stack(Struct, frozen=True):
    """A stack trace; tasks with the same trace share it."""

    addresses: tuple[int, ...]
    """Code addresses of the kernel's frames, innermost (``__schedule``) first."""

    interrupted: tuple[int, ...] = ()
    """Indices of frames left by an exception; the others have return addresses."""

    end: End = End.ENTRY
    guessed: bool = False
    """Whether the code of a frame is in no ORC table, so that its caller is a guess."""

    def instructions(self) -> Iterator[int]:
        """
        Yield an address within the current instruction of each frame.

        A return address may be the start of the next function.
        """
        for frame, address in enumerate(self.addresses):
            yield address if frame in self.interrupted else address - 1


NO_STACK = Stack((), end=End.NONE)


class Stacks(Struct):
    """The stacks of some tasks, by row in the order of the request."""

    text: KernelText
    unique: list[Stack] = field(default_factory=lambda: [NO_STACK])
    """All different stacks; the first is :data:`NO_STACK`."""

    index: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Index in *unique* of each task's stack."""

    asked: int = 0
    """Number of stacks unwound by drgn."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Stack:
        return self.unique[int(self.index[row])]

    def names(self, stack: Stack) -> tuple[str, ...]:
        """Return the functions of a stack, innermost first; addresses if not found."""
        return tuple(
            self.text.name(address) or f"{address:#x}"
            for address in stack.instructions()
        )

    def module(self, stack: Stack, name: str | None) -> str | None:
        """Return the module of a function of a stack; ``None`` if it is the kernel's.

        :param name: The function, without suffixes of the compiler.
        """
        for address in stack.instructions() if name else ():
            if (self.text.name(address) or "").partition(".")[0] == name:
                return self.text.module_name(address)
        return None


class _KernelWords(Struct, frozen=True):
    """All kernel memory, read word by word (:class:`.ReadsWords`)."""

    reader: Reader

    def read(self, address: int) -> int | None:
        """Return a word; ``None`` if it cannot be read."""
        if address < KERNEL_HALF or address % 8:
            return None
        try:
            return int(self.reader.words_near(np.array([address], np.uint64))[0][0])
        except UNREADABLE:
            return None


class StackCollector:
    """Collects stacks of one kernel; caches symbols and ORC rules."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self.text = KernelText(reader, losses)
        self.stack_bytes = stack_bytes(reader.prog)
        self._reader = reader
        self._losses = losses
        self._unwinder = self._make_unwinder()

    @property
    def is_fast(self) -> bool:
        """Whether stacks are unwound in microseconds, not milliseconds."""
        return self._unwinder is not None

    def collect(
        self, tasks: Addresses, stacks: Addresses, saved: Addresses | None
    ) -> Stacks:
        """
        Unwind the stacks of some tasks, which do not run.

        The saved registers of a running task are stale: leave it out, or pass 0 as its
        stack. On a live kernel a stack that changes while it is read may be returned
        too short, or mixed of old and new; the caller has to check that.

        :param tasks: Addresses of ``struct task_struct``.
        :param stacks: ``task_struct.stack``; 0 if there is none, as for zombies.
        :param saved: The tasks' saved registers, by :func:`.saved_registers`; or just
            the stack pointers, on x86-64. ``None`` lets drgn unwind.
        """
        found = Stacks(self.text, index=np.zeros(len(tasks), np.int32))
        indices: dict[Stack, int] = {NO_STACK: 0}
        if self._unwinder is None or saved is None:
            self._ask(found, indices, tasks, np.flatnonzero(stacks), None)
        else:
            for start in range(0, len(tasks), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                memory = self.read(stacks[part], saved[part])
                frames = self._unwinder.unwind(memory)
                _intern(frames, found, indices, start)
                unsupported = np.flatnonzero(frames.ends == End.UNSUPPORTED)
                self._ask(found, indices, tasks, start + unsupported, MAX_ASKED)
        self._count(found)
        return found

    def read(self, stacks: Addresses, saved: Addresses) -> StackMemory:
        """Read the used part of some stacks; parameters as of :meth:`collect`."""
        return read_stacks(self._reader, stacks, saved, self.stack_bytes, self._losses)

    def unwind(self, task: int, words: Sequence[int], saved: tuple[int, ...]) -> Stack:
        """Unwind one stack, without the cost of arrays.

        :param task: address of the ``struct task_struct``, in case drgn has to unwind
        :param words: the words from the saved stack pointer to the end of the stack
        :param saved: its saved registers, the stack pointer first
        """
        if self._unwinder is None:
            return ask_drgn(self._reader.prog, task)
        one = self._unwinder.unwind_one(list(words), saved)
        if one.end is End.UNSUPPORTED:
            return ask_drgn(self._reader.prog, task)
        interrupted = tuple(np.flatnonzero(one.interrupted).tolist())
        return Stack(tuple(one.pcs), interrupted, one.end, one.guessed)

    def guesses(self, pc: int) -> bool:
        """Return whether no ORC table covers an instruction, so that its caller is a
        guess; false on kernels that are not unwound by ORC."""
        return isinstance(self._unwinder, Unwinder) and not self._unwinder.knows(pc)

    def callers(self, frame: OneState) -> OneStack | None:
        """Unwind from a frame of a running task, whose registers are known.

        Unlike drgn, ORC tables have rules for modules without debug info. Unwinding
        continues from a stack for interrupts to the stack that was interrupted.

        :return: The frame and its callers; ``None`` without ORC, as on arm64.
        """
        if not isinstance(self._unwinder, Unwinder):
            return None
        return self._unwinder.unwind_from(_KernelWords(self._reader), frame)

    def _make_unwinder(self) -> Unwinder | FrameRecords | None:
        prog = self._reader.prog
        try:
            if arch_of(prog).has_frame_records:
                return FrameRecords(prog)
            orc = Orc(self._reader, self.text, self._losses)
            return Unwinder(prog, orc, thread_start(prog))
        except UNREADABLE as error:
            self._losses.lose(
                Loss.UNWINDING, f"cannot determine how to unwind stacks fast: {error}"
            )
        except MissingError as error:
            if _drgn_unwinds(prog):
                text = f"stacks take milliseconds each: {error}"
                self._losses.note("stacks-slow", text)
            else:
                self._losses.note(
                    "stacks-unread",
                    "stacks of this architecture are not unwound: what tasks wait for "
                    "is not known",
                )
        return None

    def _ask(
        self,
        found: Stacks,
        indices: dict[Stack, int],
        tasks: Addresses,
        rows: npt.NDArray[np.intp],
        limit: int | None,
    ) -> None:
        """Have drgn unwind the stacks of *rows*, up to *limit* in total."""
        for row in rows.tolist():
            if limit is not None and found.asked >= limit:
                return
            found.asked += 1
            stack = ask_drgn(self._reader.prog, int(tasks[row]))
            found.index[row] = _index(found, indices, stack)

    def _count(self, found: Stacks) -> None:
        coverage = self._losses.coverage
        counts = np.bincount(found.index, minlength=len(found.unique)).tolist()
        for stack, count in zip(found.unique, counts, strict=True):
            coverage["stacks"] += count if stack.end is not End.NONE else 0
            if stack.end in (End.LOST, End.UNSUPPORTED):
                self._losses.lose(Loss.STACKS_CUT, count=count)
            if stack.guessed:
                coverage["stacks_guessed"] += count
        coverage["stacks_by_drgn"] += found.asked


def _intern(
    frames: Frames, found: Stacks, indices: dict[Stack, int], start: int
) -> None:
    """Set ``found.index`` of each stack from row *start* on, and add new stacks."""
    count = len(frames.ends)
    bits = np.packbits(frames.interrupted, axis=1)
    tail = np.stack([frames.ends, frames.guessed.astype(np.uint8)], 1)
    pcs = np.ascontiguousarray(frames.pcs).view(np.uint8).reshape(count, -1)
    table = np.concatenate([pcs, bits, tail], axis=1)
    width, data = table.shape[1], table.tobytes()
    known: dict[bytes, int] = {}
    for row in range(count):
        key = data[row * width : (row + 1) * width]
        index = known.get(key)
        if index is None:
            stack = _stack(frames, row)
            index = known[key] = _index(found, indices, stack)
        found.index[start + row] = index


def _stack(frames: Frames, row: int) -> Stack:
    end = End(int(frames.ends[row]))
    if end is End.NONE:
        return NO_STACK
    pcs = frames.pcs[row]
    return Stack(
        tuple(pcs[pcs != 0].tolist()),
        tuple(np.flatnonzero(frames.interrupted[row]).tolist()),
        end,
        bool(frames.guessed[row]),
    )


def _index(found: Stacks, indices: dict[Stack, int], stack: Stack) -> int:
    index = indices.setdefault(stack, len(found.unique))
    if index == len(found.unique):
        found.unique.append(stack)
    return index


def _drgn_unwinds(prog: drgn.Program) -> bool:
    """Return whether drgn unwinds stacks of this architecture."""
    try:
        ask(prog.stack_trace, find_variable(prog, "init_task").address_of_())
    except NotSupportedError:
        return False
    except LOST:
        # This task cannot be unwound, but others may be: it runs, or the dump is
        # damaged.
        pass
    return True


def ask_drgn(prog: drgn.Program, task: int) -> Stack:
    """Have drgn unwind the stack of one task, and drop its frames of user mode.

    :param task: Address of its ``struct task_struct``.
    """
    trace = stack_trace(prog, task)
    if trace is None:
        return Stack((), end=End.LOST)
    addresses: list[int] = []
    interrupted: list[int] = []
    end = End.START
    for frame in trace:
        if frame.is_inline:
            continue
        if frame.pc < KERNEL_HALF:
            end = End.ENTRY
            break
        if frame.interrupted:
            interrupted.append(len(addresses))
        addresses.append(frame.pc)
    return Stack(tuple(addresses), tuple(interrupted), end)


# --- The pages of stacks of a kernel without CONFIG_VMAP_STACK.
#
# Without CONFIG_VMAP_STACK stacks are pages of the direct map (kernel/fork.c,
# alloc_thread_stack_node()), with it vmalloc areas.


def charged_stack_pages(prog: drgn.Program) -> int:
    """Return how many pages of a stack are charged to a control group by the first.

    Pages that are allocated together, but are no compound page, are charged by the
    first of them (mm/memcontrol.c, __memcg_kmem_charge_page()). In vmalloc memory each
    page is charged itself: then it is 1.
    """
    if find_type(prog, "struct task_struct").has_member("stack_vm_area"):
        return 1
    return max(stack_bytes(prog) // int(find_variable(prog, "PAGE_SIZE").value_()), 1)


def direct_stacks(reader: Reader, losses: LossLog) -> npt.NDArray[np.uint64]:
    """
    Return the pfns of all stacks in the direct map, of threads and of idle tasks.

    The stack of the first idle task is not among them: it is in the kernel's image.
    """
    prog = reader.prog
    size = stack_bytes(prog)
    page = find_variable(prog, "PAGE_SIZE").value_()
    stacks = np.concatenate(
        (TaskReader(reader).read_all(losses)["stack"], _idle_stacks(reader, losses))
    )
    start = np.uint64(page_address(prog, 0))
    direct = (stacks >= start) & (stacks < np.uint64(code_start(prog)))
    offsets = distinct(stacks[direct]) - start
    pages = np.arange(size // page, dtype=np.uint64)
    return (offsets[:, None] // np.uint64(page) + pages).ravel()


def _idle_stacks(reader: Reader, losses: LossLog) -> Addresses:
    queues = read_percpu(reader, losses).addresses("runqueues")
    idle = read_structs(reader, "struct rq", {"idle": ("idle",)}, queues, losses)
    stack = {"stack": ("stack",)}
    tasks = read_structs(reader, "struct task_struct", stack, idle["idle"], losses)
    found: Addresses = tasks["stack"].astype(np.uint64)
    return found
