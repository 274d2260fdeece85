# SPDX-License-Identifier: LGPL-2.1-or-later

"""The first frames of a thread's user stack, and the functions of programs in them."""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.code import stack_trace
from msatools.kernel.reader import PAGE, decode_string
from msatools.kernel.report import Loss, LossLog
from msatools.locks.context import LockContext, per_context
from msatools.locks.report import Herd, UserFrame
from msatools.locks.user_memory import FilePages, UserMapping, mapping_at, user_memory
from msatools.program.arch import arch_of
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.load import ELF64_SYM
from msatools.tasks.syscalls import read_syscalls
from msatools.tasks.unwind import stack_bytes

# --- Finds functions of a program or library in those pages of its file that are
# cached.
#
# The file is little-endian ELF64. The table of all symbols is found by section headers.
# These are usually at the end of the file, which a running program does not read, so
# they may be missing. The table of dynamic symbols is found by the dynamic segment,
# which the dynamic linker has read, and which is in the memory of each process.


_MAX_SYMBOL_BYTES = 16 << 20
"""Maximum size of a symbol table, 700,000 symbols; a larger one is not used."""

_MAX_NAME = 512
_MAX_HEADERS, _MAX_SECTIONS, _MAX_TAGS = 128, 4096, 256
_MAX_BUCKETS, _MAX_CHAIN = 1 << 20, 4096

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_TAG = struct.Struct("<QQ")
_HASH = struct.Struct("<IIII")
_MAGIC = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC = 1, 2
_SYMTAB = 2
_DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH = 5, 6, 10, 0x6FFF_FEF5
_FUNCTIONS = (2, 10)
"""``STT_FUNC`` and ``STT_GNU_IFUNC``."""

Read = Callable[[int, int], bytes]
"""Reads bytes of the file, by offset and size; raises FaultError if any is missing."""

ReadMemory = Callable[[int, int], bytes | None]
"""Reads memory of a process that has loaded the file, by address and size; returns
``None`` if any byte is missing."""


class Function(NamedTuple):
    """A function, and an offset in it."""

    name: str
    offset: int
    """Bytes from the start of the function."""


class _Segment(Struct, frozen=True):
    """A part of the file that is loaded."""

    offset: int
    address: int
    size: int


class _SymbolTable(Struct, frozen=True):
    """Symbols and their string table."""

    symbols: npt.NDArray[np.void]
    names: int
    """Offset of the string table in the file."""

    names_size: int


class ProgramFile:
    """The functions of one file."""

    def __init__(self, read: Read, read_around_gaps: Read) -> None:
        """
        :param read_around_gaps: Like *read*, with zeros in place of missing bytes.
        """
        self._read = read
        self._read_around_gaps = read_around_gaps
        self._tables: list[_SymbolTable] | None = None

    @property
    def has_symbols(self) -> bool:
        """Whether a table of symbols was found; it is sought by :meth:`function`."""
        return bool(self._tables)

    def function(
        self, offset: int, loaded_at: int, read_memory: ReadMemory
    ) -> Function | None:
        """Find the function at an offset in the file; ``None`` if unknown.

        :param offset: Offset in the file.
        :param loaded_at: Address of that offset in the memory of a process.
        """
        try:
            address = self._address(offset)
        except UNREADABLE:
            return None
        if address is None:
            return None
        if self._tables is None:
            self._tables = self._find_tables(loaded_at - address, read_memory)
        for table in self._tables:
            found = self._in_table(table, address)
            if found is not None:
                return found
        return None

    def _in_table(self, table: _SymbolTable, address: int) -> Function | None:
        symbols = table.symbols
        start, size = symbols["value"], symbols["size"]
        # For a start after the address, the unsigned difference is huge.
        inside = np.uint64(address) - start < size
        inside &= np.isin(symbols["info"] & 0xF, _FUNCTIONS) & (symbols["section"] != 0)
        functions = [
            Function(name, address - int(symbol["value"]))
            for symbol in symbols[inside][:_MAX_HEADERS]
            if (name := self._name(table, int(symbol["name"])))
        ]
        return min(functions, key=_preference, default=None)

    def _name(self, table: _SymbolTable, offset: int) -> str | None:
        """Read a name; ``None`` also if a part of it is missing."""
        if not 0 < offset < table.names_size:
            return None
        size = min(_MAX_NAME, table.names_size - offset)
        data = self._read_around_gaps(table.names + offset, size)
        name, end, _ = data.partition(b"\0")
        # The zero that ends the name may be part of a gap.
        try:
            self._read(table.names + offset, len(name) + 1)
        except UNREADABLE:
            return None
        return decode_string(name) if name and end else None

    # --- offsets and addresses

    @cached_property
    def _header(self) -> tuple[int, ...] | None:
        values = _HEADER.unpack(self._read(0, _HEADER.size))
        if not values[0].startswith(_MAGIC) or values[9] != _SEGMENT.size:
            return None
        return values[1:]

    @cached_property
    def _segments(self) -> list[tuple[int, ...]]:
        """The program headers.

        :raises drgn.FaultError: if they are not in the page cache
        """
        if self._header is None:
            return []
        offset, count = self._header[4], self._header[9]
        data = self._read(offset, min(count, _MAX_HEADERS) * _SEGMENT.size)
        return list(_SEGMENT.iter_unpack(data))

    @cached_property
    def _loaded(self) -> list[_Segment]:
        return [
            _Segment(offset, address, size)
            for kind, _, offset, address, _, size, _, _ in self._segments
            if kind == _LOAD
        ]

    def _address(self, offset: int) -> int | None:
        for segment in self._loaded:
            if 0 <= offset - segment.offset < segment.size:
                return offset - segment.offset + segment.address
        return None

    def _offset(self, address: int) -> int | None:
        for segment in self._loaded:
            if 0 <= address - segment.address < segment.size:
                return address - segment.address + segment.offset
        return None

    # --- symbol tables

    def _find_tables(self, bias: int, read_memory: ReadMemory) -> list[_SymbolTable]:
        """
        Find the symbol tables that can be read.

        :param bias: Difference between addresses in memory and in the file.
        """
        tables: list[_SymbolTable] = []
        with suppress(*UNREADABLE):
            tables.extend(self._all_symbols())
        with suppress(*UNREADABLE):
            tables.extend(self._dynamic_symbols(bias, read_memory))
        return tables

    def _table(
        self, offset: int, size: int, names: int, names_size: int
    ) -> _SymbolTable:
        data = self._read_around_gaps(
            offset, size // ELF64_SYM.itemsize * ELF64_SYM.itemsize
        )
        return _SymbolTable(np.frombuffer(data, ELF64_SYM), names, names_size)

    def _all_symbols(self) -> Iterator[_SymbolTable]:
        """Find the table of all symbols by section headers.

        :raises drgn.FaultError: if they are not in the page cache
        """
        if self._header is None:
            return
        offset, size, count = self._header[5], self._header[10], self._header[11]
        if not offset or size != _SECTION.size or not 0 < count <= _MAX_SECTIONS:
            return
        sections = list(_SECTION.iter_unpack(self._read(offset, count * size)))
        for _, kind, _, _, start, length, link, _, _, _ in sections:
            if kind == _SYMTAB and link < count and length <= _MAX_SYMBOL_BYTES:
                names = sections[link]
                yield self._table(start, length, names[4], names[5])

    def _dynamic_symbols(
        self, bias: int, read_memory: ReadMemory
    ) -> Iterator[_SymbolTable]:
        """Find the table of dynamic symbols by the dynamic segment in memory.

        :raises drgn.FaultError: if a part of the file is not in the page cache
        """
        for kind, _, _, address, _, size, _, _ in self._segments:
            if kind != _DYNAMIC:
                continue
            count = min(size // _TAG.size, _MAX_TAGS)
            data = read_memory(address + bias, count * _TAG.size)
            tags = dict(_TAG.iter_unpack(data or b""))
            # The dynamic linker usually adds the bias to addresses in the segment.
            symbols, names, hashes = (
                self._offset(tags.get(tag, 0) - bias) or self._offset(tags.get(tag, 0))
                for tag in (_DT_SYMTAB, _DT_STRTAB, _DT_GNU_HASH)
            )
            if symbols is None or names is None or hashes is None:
                continue
            size = self._count_hashed(hashes) * ELF64_SYM.itemsize
            if 0 < size <= _MAX_SYMBOL_BYTES:
                yield self._table(symbols, size, names, tags.get(_DT_STRSZ, 0))

    def _count_hashed(self, offset: int) -> int:
        """Count the dynamic symbols: the last chain of DT_GNU_HASH ends with the last.

        :raises drgn.FaultError: if the hash table is not in the page cache
        """
        header: tuple[int, ...] = _HASH.unpack(self._read(offset, _HASH.size))
        buckets, first, blooms, _ = header
        if not 0 < buckets <= _MAX_BUCKETS or blooms > _MAX_BUCKETS:
            return 0
        table = offset + _HASH.size + 8 * blooms
        last = max(np.frombuffer(self._read(table, 4 * buckets), "<u4").tolist())
        if last < first:
            return first
        chains = table + 4 * buckets
        for index in range(last, last + _MAX_CHAIN):
            entry = self._read(chains + 4 * (index - first), 4)
            if entry[0] & 1:
                return index + 1
        return 0


def _preference(function: Function) -> tuple[int, int, str]:
    """Return a sort key: the innermost first, then the fewest leading underscores."""
    name, offset = function
    return offset, len(name) - len(name.lstrip("_")), name


# --- Finds the first frames of a thread's user stack, if its pages can be read.
#
# The innermost frame is at the instruction pointer of user mode. A caller has a return
# address on the stack: a word that points after a call instruction in the code of a
# program or library. Return addresses that frame pointers lead to are certain. Without
# frame pointers every such word may be one, but it may also be left over from a call
# that has ended. Such a frame is marked as a guess.


MOST_FRAMES = 4
_STACK_BYTES = 2 * PAGE
"""Bytes of a stack that are searched."""

_MAX_LOOKUPS = 256
"""Maximum number of mappings to look up for one stack."""

_MAX_PROGRAMS = 16
"""Maximum number of programs whose symbols are kept, as they may be large."""

_Identity = tuple[object, ...]
"""Identity of a program: addresses of its ``struct file``, inode and mapping; path."""


class Registers(NamedTuple):
    """Registers of user mode."""

    ip: int
    sp: int
    fp: int


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

    def mapping(self, mm: int, address: int) -> UserMapping | None:
        """Return the mapping at an address; ``None`` if nothing is mapped there."""
        return mapping_at(self._context.layout, mm, address)

    def read(self, mm: int, address: int, size: int) -> bytes | None:
        """Read user memory; ``None`` if it cannot be read."""
        return user_memory(self._context).read(mm, address, size)

    def is_behind_call(self, mapping: UserMapping, address: int) -> bool:
        """Return whether an address follows a call instruction."""
        offset = address - mapping.start + mapping.offset
        arch = arch_of(self._context.reader.prog)
        size = min(arch.longest_call, offset, address - mapping.start)
        try:
            code = self._files.read(mapping.file, offset - size, size)
        except UNREADABLE:
            return False
        return arch.ends_with_call(code)

    def has_symbols(self, mapping: UserMapping) -> bool:
        """Return whether symbols of a file were found; :meth:`frame` looks for them."""
        path = self._context.path_of_file(mapping.file)
        return self._program(mapping.file, path).has_symbols

    def frame(
        self, mm: int, mapping: UserMapping, address: int, back: int, guess: bool
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
    """Return the finder of user-space frames of the threads of a context."""
    return UserStacks(context)


class _Memory(Protocol):
    """The memory of processes, as :class:`UserStacks` reads it."""

    def mapping(self, mm: int, address: int) -> UserMapping | None: ...
    def read(self, mm: int, address: int, size: int) -> bytes | None: ...
    def is_behind_call(self, mapping: UserMapping, address: int) -> bool: ...
    def frame(
        self, mm: int, mapping: UserMapping, address: int, back: int, guess: bool
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
        self._mappings: list[UserMapping] = []
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
            # Between the callers that frame pointers lead to, there are no others.
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

    def _code(self, address: int) -> UserMapping | None:
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


# --- User stacks of the threads that wake herds.


_MOST_STACKS = 16
"""Maximum number of wakers, those of the largest herds, whose stacks are read."""


def with_frames(herds: Sequence[Herd], context: LockContext) -> tuple[Herd, ...]:
    """
    Return herds, with the first frames of the user stacks of their wakers.

    :param context: A context of all tasks, which include the wakers.
    """
    return tuple(_with_frames(herds, context, user_stacks(context)))


def _with_frames(
    herds: Sequence[Herd], context: LockContext, stacks: UserStacks
) -> Iterator[Herd]:
    for index, herd in enumerate(herds):
        waker = herd.waker
        if waker is None or herd.confidence == "none" or index >= _MOST_STACKS:
            yield herd
            continue
        for row in np.flatnonzero(context.tasks["pid"] == waker.pid)[:1].tolist():
            waker = replace(waker, frames=stacks.frames(row))
        yield replace(herd, waker=waker)
