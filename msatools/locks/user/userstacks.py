# SPDX-License-Identifier: LGPL-2.1-or-later

"""The first frames of a thread's stack in user space, where its pages are there.

x86-64. Innermost is where user mode goes on, by its registers. Callers are known by
return addresses: words of the stack that point behind a call instruction of a program's
or library's code. Those that frame pointers lead to are callers; without them, any such
word may be one, or may be left from a call that has ended: a guess, and told as such.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol

import drgn
import numpy as np
from drgn.helpers.linux.mm import vma_find

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import UserFrame
from msatools.locks.user.filepages import PAGE, FilePages
from msatools.locks.user.programfile import ProgramFile
from msatools.locks.user.usermemory import user_memory
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.syscalls import read_syscalls

MOST_FRAMES = 4
_STACK_BYTES = 2 * PAGE
"""How much of a stack is searched."""

_MAX_LOOKUPS = 256
"""Mappings that are looked up for one stack."""

_MAX_PROGRAMS = 16
"""Of which symbols are kept; they may be many."""

_EXECUTABLE = 1 << 2
"""Of ``vm_flags``."""

_LONGEST_CALL = 7


_Identity = tuple[object, ...]
"""Of a program: where its ``struct file`` is and what it leads to, and its path."""


class Registers(NamedTuple):
    """Those of user mode."""

    ip: int
    sp: int
    fp: int


@dataclass(frozen=True)
class CodeMapping:
    """A part of an address space."""

    start: int
    end: int
    offset: int
    """Where in the file it starts, in bytes."""

    file: int
    executable: bool


class UserStacks:
    """Finds frames of the threads of a context; each file is read once."""

    def __init__(self, context: LockContext, stack_bytes: int) -> None:
        """
        :param stack_bytes: Of a kernel stack.
        """
        self._context = context
        self._stack_bytes = stack_bytes
        self._files = FilePages(context.layout)
        programs: dict[_Identity, ProgramFile] = {}
        # What is read of a program is kept from one report to the next.
        self._programs = context.reader.once(UserStacks, lambda: programs)

    def frames(self, row: int) -> tuple[UserFrame, ...] | None:
        """
        Find a thread's first frames.

        :param row: In the table of tasks.
        :return: The innermost first, at most :data:`MOST_FRAMES`; ``None`` if its
            registers are not known, or it has run meanwhile.
        """
        registers = self._registers(row)
        mm = int(self._context.tasks["mm"][row])
        if registers is None or not mm:
            return None
        try:
            found = tuple(islice(frames_of_stack(self, mm, registers), MOST_FRAMES))
        except (drgn.FaultError, LookupError) as error:
            self._context.losses.lose(
                Loss.USER_STACKS, f"a user stack is lost: {error}"
            )
            return None
        if self._context.live and self._registers(row) != registers:
            return None
        return found

    def _registers(self, row: int) -> Registers | None:
        context = self._context
        prog, task = (
            context.reader.prog,
            context.tasks.only(_just(len(context.tasks), row)),
        )
        platform = prog.platform
        if platform is None or platform.arch != drgn.Architecture.X86_64:
            return None
        if task["on_cpu"][0]:
            if context.live:
                return None
            frame = _running(prog, int(task["address"][0]))
            if frame is None:
                return None
            if frame.pc < KERNEL_HALF:
                values = frame.registers()
                return Registers(frame.pc, values.get("rsp", 0), values.get("rbp", 0))
        calls = read_syscalls(context.reader, task, self._stack_bytes, LossLog())
        if not calls.known[0] or calls.compat[0]:
            return None
        return Registers(int(calls.ip[0]), int(calls.sp[0]), int(calls.fp[0]))

    def mapping(self, mm: int, address: int) -> CodeMapping | None:
        """Find what is mapped at an address."""
        space = drgn.Object(self._context.reader.prog, "struct mm_struct *", value=mm)
        vma = vma_find(space, address)
        if not vma:
            return None
        names = ("vm_start", "vm_end", "vm_pgoff", "vm_file", "vm_flags")
        start, end, page, file, flags = self._context.layout.members(
            vma.value_(), "vm_area_struct", *names
        )
        return CodeMapping(start, end, page * PAGE, file, bool(flags & _EXECUTABLE))

    def read(self, mm: int, address: int, size: int) -> bytes | None:
        """Read user memory; ``None`` if it is not there."""
        return user_memory(self._context).read(mm, address, size)

    def is_behind_call(self, mapping: CodeMapping, address: int) -> bool:
        """Return whether an address follows a call instruction."""
        offset = address - mapping.start + mapping.offset
        size = min(_LONGEST_CALL, offset, address - mapping.start)
        try:
            return ends_with_call(self._files.read(mapping.file, offset - size, size))
        except drgn.FaultError:
            return False

    def frame(
        self, mm: int, mapping: CodeMapping, address: int, back: int, guess: bool
    ) -> UserFrame:
        """Name a place in a program's or library's code.

        :param back: 1 if it is a return address: the call may end its function.
        """
        offset = address - mapping.start + mapping.offset
        path = self._context.path_of_file(mapping.file)
        program = self._program(mapping.file, path)
        function = program.function(
            offset - back, address - back, lambda at, size: self.read(mm, at, size)
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
            lambda at, size: pages.read(file, at, size),
            lambda at, size: pages.read_around_gaps(file, at, size),
        )
        return made


class _Memory(Protocol):
    """What :class:`UserStacks` has of a process."""

    def mapping(self, mm: int, address: int) -> CodeMapping | None: ...
    def read(self, mm: int, address: int, size: int) -> bytes | None: ...
    def is_behind_call(self, mapping: CodeMapping, address: int) -> bool: ...
    def frame(
        self, mm: int, mapping: CodeMapping, address: int, back: int, guess: bool
    ) -> UserFrame: ...


def frames_of_stack(
    memory: _Memory, mm: int, registers: Registers
) -> Iterator[UserFrame]:
    """Find the frames of a stack, as far as they are needed; the innermost first."""
    return _Stack(memory, mm, registers).frames()


class _Stack:
    """One thread's stack."""

    def __init__(self, memory: _Memory, mm: int, registers: Registers) -> None:
        self._memory = memory
        self._mm = mm
        self._registers = registers
        self._mappings: list[CodeMapping] = []
        self._lookups = 0

    def frames(self) -> Iterator[UserFrame]:
        """Yield its frames, the innermost first."""
        ip, sp, _ = self._registers
        code = self._code(ip)
        if code is None:
            return
        yield self._memory.frame(self._mm, code, ip, 0, guess=False)
        words = self._words(sp)
        chain, is_whole = self._chain(sp, words)
        first, last = min(chain, default=len(words)), max(chain, default=-1)
        for place, word in enumerate(words):
            known = place in chain
            # What is between callers that are known is of no frame.
            if first < place < last and not known:
                continue
            if place > last >= 0 and is_whole:
                return
            mapping = self._code(word)
            if mapping and self._memory.is_behind_call(mapping, word):
                yield self._memory.frame(self._mm, mapping, word, 1, guess=not known)

    def _words(self, sp: int) -> tuple[int, ...]:
        """Read the stack as far as it is there."""
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

        :return: The places of the return addresses that they lead to, and whether they
            end with that of the thread's first frame, which is 0.
        """
        places: list[int] = []
        at = self._registers.fp
        while at % 8 == 0 and 0 <= (at - sp) // 8 < len(words) - 1:
            place = (at - sp) // 8
            following, word = words[place], words[place + 1]
            mapping = self._code(word)
            if mapping is None or not self._memory.is_behind_call(mapping, word):
                break
            if following and following <= at:
                break
            places.append(place + 1)
            at = following
        return frozenset(places), at == 0 and bool(places)

    def _code(self, address: int) -> CodeMapping | None:
        """Find the code of a file that is mapped at an address."""
        if not PAGE <= address < KERNEL_HALF:
            return None
        for known in self._mappings:
            if known.start <= address < known.end:
                return known if known.executable else None
        if self._lookups >= _MAX_LOOKUPS:
            return None
        self._lookups += 1
        found = self._memory.mapping(self._mm, address)
        if found is None:
            return None
        is_code = found.executable and found.file >= KERNEL_HALF
        self._mappings.append(replace(found, executable=is_code))
        return self._mappings[-1] if is_code else None


def ends_with_call(code: bytes) -> bool:
    """Return whether the last instruction of some code of x86-64 may be a call.

    By the bytes at its end: ``call`` with a distance of 32 bits, or by a register or
    memory (FF /2), which is as long as its addressing says.
    """
    if len(code) >= 5 and code[-5] == 0xE8:
        return True
    return any(
        len(code) >= length
        and code[-length] == 0xFF
        and code[1 - length] >> 3 & 0b111 == 2
        and _length(code[1 - length], code[2 - length] if length > 2 else 0) == length
        for length in (2, 3, 4, 6, 7)
    )


def _length(mod_rm: int, sib: int) -> int:
    """Return the length of an instruction with a one-byte opcode, without prefixes."""
    mode, memory = mod_rm >> 6, mod_rm & 0b111
    if mode == 0b11:
        return 2
    has_sib = memory == 0b100
    if mode == 0b00:
        far = memory == 0b101 or (has_sib and sib & 0b111 == 0b101)
        return 2 + has_sib + (4 if far else 0)
    return 2 + has_sib + (1 if mode == 0b01 else 4)


def _running(prog: drgn.Program, task: int) -> drgn.StackFrame | None:
    """Find the innermost frame of a thread that runs, by the registers in a dump."""
    try:
        trace = prog.stack_trace(drgn.Object(prog, "struct task_struct *", task))
    except (ValueError, LookupError, drgn.FaultError):
        return None
    return trace[0] if len(trace) else None


def _just(count: int, row: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    chosen = np.zeros(count, np.bool_)
    chosen[row] = True
    return chosen
