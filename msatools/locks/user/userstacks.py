# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the first frames of a thread's user stack, if its pages can be read.

The innermost frame is at the instruction pointer of user mode. A caller has a return
address on the stack: a word that points after a call instruction in the code of a
program or library. Return addresses that frame pointers lead to are certain. Without
frame pointers every such word may be one, but it may also be left over from a call that
has ended. Such a frame is marked as a guess.
"""

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import drgn
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.traces import stack_trace
from msatools.kernel.words import PAGE
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.model import UserFrame
from msatools.locks.user.filepages import FilePages
from msatools.locks.user.mappings import find_mapping
from msatools.locks.user.programfile import ProgramFile
from msatools.locks.user.usermemory import user_memory
from msatools.target.addresses import KERNEL_HALF
from msatools.target.arch import arch_of
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.syscalls import read_syscalls

MOST_FRAMES = 4
_STACK_BYTES = 2 * PAGE
"""Bytes of a stack that are searched."""

_MAX_LOOKUPS = 256
"""Maximum number of mappings to look up for one stack."""

_MAX_PROGRAMS = 16
"""Maximum number of programs whose symbols are kept, as they may be large."""

_EXECUTABLE = 1 << 2
"""``VM_EXEC``."""

_Identity = tuple[object, ...]
"""Identity of a program: addresses of its ``struct file``, inode and mapping; path."""


class Registers(NamedTuple):
    """Registers of user mode."""

    ip: int
    sp: int
    fp: int


class CodeMapping(Struct, frozen=True):
    """A mapping that may be of code."""

    start: int
    end: int
    offset: int
    """Offset of its start in the file, in bytes."""

    file: int
    executable: bool


class UserStacks:
    """Finds frames of the threads of a context; reads each file once."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._stack_bytes = stack_bytes(context.reader.prog)
        self._files = FilePages(context.layout)
        programs: dict[_Identity, ProgramFile] = {}
        # Symbols of a program are kept from one report to the next.
        self._programs = context.reader.once(UserStacks, lambda: programs)

    def frames(self, row: int) -> tuple[UserFrame, ...] | None:
        """
        Find the first frames of a thread.

        :param row: Row in the table of tasks.
        :return: At most :data:`MOST_FRAMES`, the innermost first; ``None`` if its
            registers are unknown, or it ran while its stack was read.
        """
        registers = self._registers(row)
        mm = int(self._context.tasks["mm"][row])
        if registers is None or not mm:
            return None
        try:
            frames = tuple(islice(frames_of_stack(self, mm, registers), MOST_FRAMES))
        except LOST as error:
            self._context.losses.lose(
                Loss.USER_STACKS, f"cannot read a user stack: {error}"
            )
            return None
        if self._context.live and self._registers(row) != registers:
            return None
        return frames

    def _registers(self, row: int) -> Registers | None:
        context = self._context
        prog = context.reader.prog
        task = context.tasks.only(np.arange(len(context.tasks)) == row)
        arch = arch_of(prog)
        if not arch.user_registers:
            return None
        if task["on_cpu"][0]:
            if context.live:
                return None
            frame = _innermost_frame(prog, int(task["address"][0]))
            if frame is None:
                return None
            if frame.pc < KERNEL_HALF:
                values = frame.registers()
                sp, fp = (values.get(name, 0) for name in arch.user_registers)
                return Registers(frame.pc, sp, fp)
        calls = read_syscalls(context.reader, task, self._stack_bytes, LossLog())
        if not calls.known[0] or calls.compat[0]:
            return None
        return Registers(int(calls.ip[0]), int(calls.sp[0]), int(calls.fp[0]))

    def mapping(self, mm: int, address: int) -> CodeMapping | None:
        """Return the mapping at an address; ``None`` if nothing is mapped there."""
        layout = self._context.layout
        vma = find_mapping(layout, mm, address)
        if not vma:
            return None
        names = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
        start, end, page, file, flags = layout.members(vma, "vm_area_struct", *names)
        offset = page * layout.page_size
        return CodeMapping(start, end, offset, file, bool(flags & _EXECUTABLE))

    def read(self, mm: int, address: int, size: int) -> bytes | None:
        """Read user memory; ``None`` if it cannot be read."""
        return user_memory(self._context).read(mm, address, size)

    def is_behind_call(self, mapping: CodeMapping, address: int) -> bool:
        """Return whether an address follows a call instruction."""
        offset = address - mapping.start + mapping.offset
        arch = arch_of(self._context.reader.prog)
        size = min(arch.longest_call, offset, address - mapping.start)
        try:
            code = self._files.read(mapping.file, offset - size, size)
        except UNREADABLE:
            return False
        return arch.ends_with_call(code)

    def has_symbols(self, mapping: CodeMapping) -> bool:
        """Return whether a file, of which a frame was asked for, has symbols."""
        path = self._context.path_of_file(mapping.file)
        return self._program(mapping.file, path).has_symbols

    def frame(
        self, mm: int, mapping: CodeMapping, address: int, back: int, guess: bool
    ) -> UserFrame:
        """Return the frame of an address in the code of a program or library.

        :param back: Bytes to subtract from the address to look up the function: 1 for a
            return address, which is past the end of a function that ends with a call.
        """
        offset = address - mapping.start + mapping.offset
        path = self._context.path_of_file(mapping.file)
        program = self._program(mapping.file, path)
        function = program.function(
            offset - back,
            address - back,
            lambda start, size: self.read(mm, start, size),
        )
        return UserFrame(
            function=function.name if function else None,
            offset=function.offset + back if function else offset,
            module=path.rpartition("/")[2] if path else None,
            guess=guess,
        )

    def _program(self, file: int, path: str | None) -> ProgramFile:
        names = ("f_inode", "f_mapping")
        identity = (file, *self._context.layout.members(file, "file", *names), path)
        known = self._programs.get(identity)
        if known is not None:
            return known
        if len(self._programs) >= _MAX_PROGRAMS:
            self._programs.clear()
        pages = self._files
        made = self._programs[identity] = ProgramFile(
            lambda start, size: pages.read(file, start, size),
            lambda start, size: pages.read_around_gaps(file, start, size),
        )
        return made


@per_context
def user_stacks(context: LockContext) -> UserStacks:
    """Return what finds frames of the threads of a context."""
    return UserStacks(context)


class _Memory(Protocol):
    """The memory of processes, as :class:`UserStacks` reads it."""

    def mapping(self, mm: int, address: int) -> CodeMapping | None: ...
    def read(self, mm: int, address: int, size: int) -> bytes | None: ...
    def is_behind_call(self, mapping: CodeMapping, address: int) -> bool: ...
    def frame(
        self, mm: int, mapping: CodeMapping, address: int, back: int, guess: bool
    ) -> UserFrame: ...


def frames_of_stack(
    memory: _Memory, mm: int, registers: Registers
) -> Iterator[UserFrame]:
    """Yield the frames of a stack, the innermost first."""
    return _Stack(memory, mm, registers).frames()


class _Stack:
    """The user stack of one thread."""

    def __init__(self, memory: _Memory, mm: int, registers: Registers) -> None:
        self._memory = memory
        self._mm = mm
        self._registers = registers
        self._mappings: list[CodeMapping] = []
        self._lookups = 0

    def frames(self) -> Iterator[UserFrame]:
        """Yield the frames, the innermost first."""
        ip, sp, _ = self._registers
        code = self._code(ip)
        if code is None:
            return
        yield self._memory.frame(self._mm, code, ip, 0, guess=False)
        words = self._words(sp)
        chain, is_whole = self._chain(sp, words)
        first, last = min(chain, default=len(words)), max(chain, default=-1)
        for index, word in enumerate(words):
            is_certain = index in chain
            # There are no frames between certain callers.
            if first < index < last and not is_certain:
                continue
            if index > last >= 0 and is_whole:
                return
            mapping = self._code(word)
            if mapping and self._memory.is_behind_call(mapping, word):
                yield self._memory.frame(
                    self._mm, mapping, word, 1, guess=not is_certain
                )

    def _words(self, sp: int) -> tuple[int, ...]:
        """Read the stack up to the first page that cannot be read."""
        if sp % 8:
            return ()
        data = b""
        while len(data) < _STACK_BYTES:
            size = PAGE - (sp + len(data)) % PAGE
            page = self._memory.read(self._mm, sp + len(data), size)
            if page is None:
                break
            data += page
        return struct.unpack(f"<{len(data) // 8}Q", data)

    def _chain(self, sp: int, words: tuple[int, ...]) -> tuple[frozenset[int], bool]:
        """Follow frame pointers.

        :return: Indexes of the return addresses, and whether the last frame pointer is
            0, which marks the thread's outermost frame.
        """
        indexes: list[int] = []
        pointer = self._registers.fp
        while pointer % 8 == 0 and 0 <= (pointer - sp) // 8 < len(words) - 1:
            index = (pointer - sp) // 8
            following, word = words[index], words[index + 1]
            mapping = self._code(word)
            if mapping is None or not self._memory.is_behind_call(mapping, word):
                break
            if following and following <= pointer:
                break
            indexes.append(index + 1)
            pointer = following
        return frozenset(indexes), pointer == 0 and bool(indexes)

    def _code(self, address: int) -> CodeMapping | None:
        """Return the mapping of code of a file at an address; ``None`` if not found."""
        if not PAGE <= address < KERNEL_HALF:
            return None
        for known in self._mappings:
            if known.start <= address < known.end:
                return known if known.executable else None
        if self._lookups >= _MAX_LOOKUPS:
            return None
        self._lookups += 1
        mapping = self._memory.mapping(self._mm, address)
        if mapping is None:
            return None
        is_code = mapping.executable and mapping.file >= KERNEL_HALF
        self._mappings.append(replace(mapping, executable=is_code))
        return self._mappings[-1] if is_code else None


def _innermost_frame(prog: drgn.Program, task: int) -> drgn.StackFrame | None:
    """Return the innermost frame of a running thread, by the registers in a dump."""
    trace = stack_trace(prog, task)
    return trace[0] if trace is not None and len(trace) else None
