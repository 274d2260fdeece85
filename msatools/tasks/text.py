# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's functions by address, and its ORC tables: how to unwind each frame."""

import re
from enum import IntEnum
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import (
    OPTIMISED_PROBES,
    CodeModules,
    GeneratedCode,
    GeneratedSymbol,
    SortedSymbols,
    kernel_symbol,
    module_area,
)
from msatools.kernel.reader import MAX_ADDRESS, Reader, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.selfdesc.find import find_type, member_of, object_at
from msatools.selfdesc.load import (
    LoadedModule,
    finders_of,
    is_served_by_btf,
)

# --- Address ranges of the kernel's code, and its functions by address.


_MODULE_NAME_BYTES = 56
"""MODULE_NAME_LEN of 64-bit kernels."""

_GUARD_BYTES = 4096
"""Size of the unmapped page behind each vmalloc area on x86-64."""

_BOUNDS = (("_stext", "_etext"), ("_sinittext", "_einittext"))
_BORDER = re.compile(r"_s?text|_sinittext|__\w+_text_start")
"""The linker's symbols for starts of sections, where the first function starts, too."""


class KernelText:
    """Functions by address; those of modules are read when first needed."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._kernel = _bounds(reader.prog)
        self._modules = CodeModules(reader, losses)
        self._generated = GeneratedCode(reader, losses)
        self._functions: SortedSymbols | None = None
        self._found: dict[int, drgn.Symbol | None] = {}

    def in_kernel(self, address: int) -> bool:
        """Return whether an address is in the code of the kernel proper."""
        return any(start <= address < end for start, end in self._kernel)

    def module(self, address: int) -> LoadedModule | None:
        """Return the module at an address; ``None`` if not found."""
        return self._modules.find(address)

    def module_name(self, address: int) -> str | None:
        """Return the name of the module at an address; ``None`` if in none."""
        module = None if self.in_kernel(address) else self.module(address)
        return None if module is None else module.name

    def name(self, address: int) -> str | None:
        """Return the name of the function at an address; ``None`` if not found."""
        symbol = self.symbol(address)
        if symbol is not None:
            return str(symbol.name)
        if self.in_kernel(address) or self.module(address) is not None:
            return None
        found = self._generated.find(address)
        return None if found is None else found.name

    def generated(self, address: int) -> GeneratedSymbol | None:
        """Return the piece of generated code at an address; ``None`` if none."""
        return self._generated.find(address)

    def named(self, address: int) -> str:
        """Return a function with its module by address; if unknown, the address."""
        name, module = self.name(address), self.module_name(address)
        text = name or f"{address:#x}"
        return text if module is None else f"{text} [{module}]"

    def unloaded(self, address: int) -> str | None:
        """Return the module that was unloaded last if its code may have been at an
        address, as no module is there now; else ``None``.

        ``last_unloaded_module`` begins with its name (kernel/module/main.c). The guard
        page behind each loaded module was never part of any.
        """
        prog = self._reader.prog
        first, last = module_area(prog)
        if not first <= address <= last or self.name(address):
            return None
        if self.module(address) or self.module(address - _GUARD_BYTES):
            return None
        if not self._modules.is_complete:
            return None
        try:
            place = kernel_symbol(prog, "last_unloaded_module")
            return read_string(self._reader, place, _MODULE_NAME_BYTES) or None
        except LOST:
            return None

    def symbol(self, address: int) -> drgn.Symbol | None:
        """Return the symbol of the function at an address; ``None`` if not found."""
        if address not in self._found:
            self._found[address] = self._find(address)
        return self._found[address]

    def _find(self, address: int) -> drgn.Symbol | None:
        if self.in_kernel(address):
            return self._find_in_kernel(address)
        # drgn has no symbols of modules if only vmlinux has debug info; without any
        # debug info it would search every module.
        module = self.module(address)
        if module is None:
            return None
        symbols = self._modules.symbols(module)
        found = symbols(self._reader.prog, None, address, True)
        return found[0] if found else None

    def _find_in_kernel(self, address: int) -> drgn.Symbol | None:
        prog = self._reader.prog
        finder = finders_of(prog).symbols if is_served_by_btf(prog) else None
        if finder:
            found = finder(prog, None, address, True)
            if not found or not _BORDER.fullmatch(found[0].name):
                return found[0] if found else None
        if self._functions is None:
            symbols = finder(prog, None, None, False) if finder else prog.symbols()
            self._functions = SortedSymbols(symbols, self._kernel)
        # As kallsyms: the last symbol at or before the address.
        named, _ = self._functions.before(address)
        return max(named, key=_fitness) if named else None


def _fitness(symbol: drgn.Symbol) -> tuple[bool, bool, bool, int]:
    """Return a sort key of symbols at one address: the best is a global function's."""
    return (
        not _BORDER.fullmatch(symbol.name),
        symbol.kind == drgn.SymbolKind.FUNC,
        symbol.binding == drgn.SymbolBinding.GLOBAL,
        -len(symbol.name),
    )


def _bounds(prog: drgn.Program) -> list[tuple[int, int]]:
    bounds = []
    for first, last in _BOUNDS:
        try:
            bounds.append((kernel_symbol(prog, first), kernel_symbol(prog, last)))
        except MissingError:
            continue
    return bounds


# --- The kernel's ORC tables: how to unwind a frame, by the address of its code.
#
# arch/x86/include/asm/orc_types.h; x86-64 with CONFIG_UNWINDER_ORC only. The tables are
# in the memory of the kernel, so neither a dump nor a live kernel needs debug info.


_MAX_ENTRIES = 1 << 24
"""Maximum number of ORC entries of a kernel or module; a Debian 6.12 has 424,000."""

_ENTRY = np.dtype([("sp_offset", "<i2"), ("bp_offset", "<i2"), ("flags", "<u2")])

# Formats by the hash of the header that defines them, which the kernel keeps since
# Linux kernel commit b9f174c811e3 ("x86/unwind/orc: Add ELF section with ORC version
# identifier") (in v6.4).
_HASHES = {
    # ffb1b4a41016 ("x86/unwind/orc: Add 'signal' field to ORC metadata") (in v6.3)
    "db84aed4103b31dd51e017f8f79783ca985c2c51": "first",
    # fb799447ae29 ("x86,objtool: Split UNWIND_HINT_EMPTY in two") (in v6.4)
    "fe5d32bf581bd63b2ca9a5c65ba5a625eab3fe24": "first",
    # 1735858caa4b ("objtool/x86: Reorder ORC register numbering") (in v7.1)
    "137c36ad7627c4dd55932176bb0ecdbd5041fc82": "second",
}


class Base(IntEnum):
    """The base that an offset of a rule is added to."""

    NONE = 0
    SP = 1
    """The stack pointer."""
    BP = 2
    """The frame pointer."""
    SP_AT = 3
    """The word at the stack pointer, in code that changes stacks."""
    BP_AT = 4
    """The word at an offset from the frame pointer."""
    CFA = 5
    """The caller's stack pointer."""
    OTHER = 6
    """A register that is not preserved by a call."""


class OrcKind(IntEnum):
    """The data at the end of a frame, by which its caller is found."""

    UNKNOWN = 0
    """Not described: the entry only ends the range of the one before."""
    END = 1
    """Nothing: the outermost frame."""
    CALL = 2
    """A return address."""
    REGS = 3
    """A whole ``struct pt_regs``."""
    REGS_PARTIAL = 4
    """The last five words of a ``struct pt_regs``, which the CPU pushes."""


_NUMBERING = {
    # ORC_REG_*: undefined, prev_sp, dx, di, bp, sp, r10, r13, bp and sp indirect, ax.
    "first": {0: 0, 1: 5, 2: 6, 3: 6, 4: 2, 5: 1, 6: 6, 7: 6, 8: 4, 9: 3, 10: 6},
    # Undefined, ax, dx, sp, bp, di, r10, r13, prev_sp, sp and bp indirect.
    "second": {0: 0, 1: 6, 2: 6, 3: 1, 4: 2, 5: 6, 6: 6, 7: 6, 8: 5, 9: 3, 10: 4},
}


class Rule(Struct, frozen=True):
    """How to unwind one frame, as its ORC entry describes it."""

    kind: OrcKind
    cfa: Base
    """Base of the canonical frame address (CFA): the caller's stack pointer."""
    cfa_offset: int
    bp: Base
    """Base of the caller's saved frame pointer; ``NONE`` if it is unchanged."""
    bp_offset: int
    interrupted: bool
    """Whether the caller was left by an exception, not by a call."""


BY_FRAME_POINTER = Rule(OrcKind.CALL, Base.BP, 16, Base.CFA, -16, False)
"""
Rule for code without an entry: as if the function had set up a frame pointer.

Trampolines and compiled BPF programs do that, so the kernel has the same fallback.
"""


_BY_REGISTERS = Rule(OrcKind.REGS, Base.SP, 0, Base.NONE, 0, True)
"""Rule for code whose stack pointer points to a whole ``struct pt_regs``."""

_CALL = 0xE8
"""The ``call rel32`` of x86-64."""


class _OrcField(Struct, frozen=True):
    shift: int
    mask: int

    def of(self, flags: int) -> int:
        return flags >> self.shift & self.mask


class _Format:
    """Decodes ORC entries, by this kernel's members of ``struct orc_entry``."""

    def __init__(self, entry: drgn.Type, numbering: str) -> None:
        if drgn.sizeof(entry) != _ENTRY.itemsize:
            raise MissingError("its entries have an unknown size")
        self._sp_reg = _flag(entry, "sp_reg")
        self._bp_reg = _flag(entry, "bp_reg")
        self._type = _flag(entry, "type")
        # Since Linux kernel commit ffb1b4a41016 (in v6.3).
        self._signal = _flag(entry, "signal") if entry.has_member("signal") else None
        # Replaced by types ORC_TYPE_UNDEFINED and END_OF_STACK in fb799447ae29 (v6.4).
        self._end = _flag(entry, "end") if entry.has_member("end") else None
        self._bases = _NUMBERING[numbering]

    def kind(self, flags: int) -> int:
        kind = self._type.of(flags)
        if self._end is None:
            return kind
        if self._sp_reg.of(flags) == 0:
            return OrcKind.END if self._end.of(flags) else OrcKind.UNKNOWN
        return kind + OrcKind.CALL

    def rule(self, sp_offset: int, bp_offset: int, flags: int) -> Rule:
        try:
            kind = OrcKind(self.kind(flags))
            cfa = Base(self._bases[self._sp_reg.of(flags)])
            bp = Base(self._bases[self._bp_reg.of(flags)])
        except (KeyError, ValueError):
            return BY_FRAME_POINTER
        if kind is OrcKind.UNKNOWN:
            return BY_FRAME_POINTER
        if self._signal is None:
            interrupted = kind in (OrcKind.REGS, OrcKind.REGS_PARTIAL)
        else:
            interrupted = bool(self._signal.of(flags))
        return Rule(kind, cfa, sp_offset, bp, bp_offset, interrupted)


def _flag(entry: drgn.Type, name: str) -> _OrcField:
    member = member_of(entry, name)
    size = member.bit_field_size
    if size is None:
        raise MissingError(f"its {name} is no bit field")
    return _OrcField(member.bit_offset - 32, (1 << size) - 1)


class _OrcTable(Struct, frozen=True):
    """The entries of the kernel or a module; each applies up to the next."""

    pcs: npt.NDArray[np.uint64]
    entries: npt.NDArray[np.void]

    def find(self, pc: int) -> tuple[int, int, int] | None:
        row = int(np.searchsorted(self.pcs, np.uint64(pc), "right")) - 1
        if row < 0:
            return None
        sp_offset, bp_offset, flags = self.entries[row].item()
        return sp_offset, bp_offset, flags


_WINDOW_ENTRIES = 1024
"""Number of entries whose addresses are read at once: they fill a page."""


class _PagedOrcTable:
    """The entries of the kernel, of which only those that are looked up are read.

    Debian's kernels have 400,000 entries, 4 MB; all stacks together need some hundred.

    :raises drgn.FaultError: if its first entries cannot be read
    """

    def __init__(self, reader: Reader, pcs: int, entries: int, count: int) -> None:
        self._reader = reader
        self._pcs = pcs
        self._entries = entries
        self._count = count
        self._windows: dict[int, npt.NDArray[np.uint64]] = {}
        self._window(0)
        self._entry(0)

    def find(self, pc: int) -> tuple[int, int, int] | None:
        """Return the entry that applies at *pc*: stack pointer offset, frame pointer
        offset and flags; ``None`` if *pc* is below all entries.

        :raises _UnsortedError: if the addresses are not in order
        :raises drgn.FaultError: if they cannot be read
        """
        low, high = 0, -(-self._count // _WINDOW_ENTRIES)
        least, most = self._window(0)[0], np.uint64(MAX_ADDRESS)
        while high - low > 1:
            middle = (low + high) // 2
            first = self._window(middle)[0]
            if not least <= first <= most:
                raise _UnsortedError("addresses of ORC entries are not in order")
            if first <= pc:
                low, least = middle, first
            else:
                high, most = middle, first
        row = int(np.searchsorted(self._window(low), np.uint64(pc), "right")) - 1
        return None if row < 0 else self._entry(low * _WINDOW_ENTRIES + row)

    def _window(self, number: int) -> npt.NDArray[np.uint64]:
        """Return the addresses of the entries in a window."""
        window = self._windows.get(number)
        if window is None:
            first = number * _WINDOW_ENTRIES
            count = min(_WINDOW_ENTRIES, self._count - first)
            window = _orc_addresses(self._reader, self._pcs + 4 * first, count)
            if np.any(window[1:] < window[:-1]):
                raise _UnsortedError("addresses of ORC entries are not in order")
            self._windows[number] = window
        return window

    def _entry(self, row: int) -> tuple[int, int, int]:
        size = _ENTRY.itemsize
        data = self._reader.read_near(self._entries + size * row, size)
        sp_offset, bp_offset, flags = np.frombuffer(data, _ENTRY)[0].item()
        return sp_offset, bp_offset, flags


class _UnsortedError(Exception):
    """Entries are not sorted by address, as in kernels before v5.6."""


def _orc_addresses(reader: Reader, pcs: int, count: int) -> npt.NDArray[np.uint64]:
    """Read the addresses of entries.

    An element of .orc_unwind_ip is the distance from itself to the code.
    """
    distances = np.frombuffer(reader.read(pcs, 4 * count), "<i4")
    addresses = np.uint64(pcs) + 4 * np.arange(count, dtype=np.uint64)
    addresses += distances.astype(np.uint64)
    return addresses


class Orc:
    """
    The ORC tables of the kernel and, read on demand, of its modules.

    :raises MissingError: if the kernel has no table, or one in an unknown format
    :raises drgn.FaultError: if the kernel's table cannot be read
    """

    def __init__(self, reader: Reader, text: KernelText, losses: LossLog) -> None:
        prog = reader.prog
        platform = prog.platform
        if platform is None or platform.arch != drgn.Architecture.X86_64:
            raise MissingError("only x86-64 has ORC")
        self._reader = reader
        self._text = text
        self._losses = losses
        start = kernel_symbol(prog, "__start_orc_unwind_ip")
        size = kernel_symbol(prog, "__stop_orc_unwind_ip") - start
        entries = kernel_symbol(prog, "__start_orc_unwind")
        self._format = _Format(find_type(prog, "struct orc_entry"), _numbering(reader))
        self._place = start, entries, size // 4
        self._kernel: _OrcTable | _PagedOrcTable
        _check_count(size // 4)
        try:
            self._kernel = _PagedOrcTable(reader, *self._place)
        except _UnsortedError:
            self._kernel = self._read(*self._place)
        self._modules: dict[int, _OrcTable | None] = {}

    def rule(self, pc: int) -> Rule | None:
        """Return the rule of the instruction at *pc*; ``None`` if there is none."""
        table = self._table(pc)
        if table is None:
            return self._generated(pc)
        found = self._in_kernel(pc) if table is self._kernel else table.find(pc)
        return self._format.rule(*found) if found else None

    def _in_kernel(self, pc: int) -> tuple[int, int, int] | None:
        """Return the kernel's entry that applies at *pc*; ``None`` if none, or lost."""
        try:
            try:
                return self._kernel.find(pc)
            except _UnsortedError:
                self._kernel = self._read(*self._place)
                return self._kernel.find(pc)
        except UNREADABLE as error:
            text = f"cannot determine how to unwind some of the kernel's code: {error}"
            self._losses.lose(Loss.UNWINDING, text, about="kernel")
            return None

    def _generated(self, pc: int) -> Rule | None:
        """Return the rule of an instruction in generated code; ``None`` if unknown."""
        code = self._text.generated(pc)
        if code is None:
            return None
        if code.template:
            # The code is a copy of a template: orc_ftrace_find() of x86's unwind_orc.c.
            found = self._in_kernel(code.template + pc - code.start)
            return self._format.rule(*found) if found else None
        if code.name == OPTIMISED_PROBES and self._calls_probe(pc):
            return _BY_REGISTERS
        return None

    def _calls_probe(self, pc: int) -> bool:
        """Return whether the last byte of a call of a probe's handler is at *pc*.

        After that call the probed code's registers are at the top of the stack
        (arch/x86/kernel/kprobes/opt.c, optprobe_template_call).
        """
        try:
            target = kernel_symbol(self._reader.prog, "optimized_callback")
            code = self._reader.read(pc - 4, 5)
        except LOST:
            return False
        distance = int.from_bytes(code[1:], "little", signed=True)
        return code[0] == _CALL and (pc + 1 + distance) % (1 << 64) == target

    def _table(self, pc: int) -> "_OrcTable | _PagedOrcTable | None":
        if self._text.in_kernel(pc):
            return self._kernel
        module = self._text.module(pc)
        if module is None:
            return None
        if module.address not in self._modules:
            self._modules[module.address] = self._read_module(module)
        return self._modules[module.address]

    def _read_module(self, module: LoadedModule) -> _OrcTable | None:
        try:
            arch = object_at(
                self._reader.prog, "struct module", module.address
            ).arch.read_()
            return self._read(
                arch.orc_unwind_ip.value_(),
                arch.orc_unwind.value_(),
                arch.num_orcs.value_(),
            )
        except LOST as error:
            text = f"cannot determine how to unwind module {module.name}: {error}"
            self._losses.lose(Loss.UNWINDING, text, about=module.name)
            return None

    def _read(self, pcs: int, entries: int, count: int) -> _OrcTable:
        _check_count(count)
        addresses = _orc_addresses(self._reader, pcs, count)
        table = np.frombuffer(
            self._reader.read(entries, _ENTRY.itemsize * count), _ENTRY
        )
        # Sorted at build time for the kernel (since v5.6), on loading for a module.
        if np.any(addresses[1:] < addresses[:-1]):
            order = np.lexsort((self._are_entries(table), addresses))
            addresses, table = addresses[order], table[order]
        return _OrcTable(addresses, table)

    def _are_entries(self, table: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """
        Return which rows are entries, not terminators.

        The terminator of an object file may have the address of the first entry of the
        next file.
        """
        flags, inverse = np.unique(table["flags"], return_inverse=True)
        known = [
            self._format.kind(value) != OrcKind.UNKNOWN for value in flags.tolist()
        ]
        are_entries: npt.NDArray[np.bool_] = np.array(known, np.bool_)[inverse]
        return are_entries


def _check_count(count: int) -> None:
    if not 0 < count <= _MAX_ENTRIES:
        raise DamagedDataError(f"it has {count:,} ORC entries")


def _numbering(reader: Reader) -> str:
    try:
        start = kernel_symbol(reader.prog, "__start_orc_header")
        end = kernel_symbol(reader.prog, "__stop_orc_header")
    except MissingError:
        return "first"
    hash_ = reader.read(start, end - start).hex() if end - start == 20 else ""
    if hash_ not in _HASHES:
        raise MissingError("its ORC is in a format newer than this program")
    return _HASHES[hash_]


# --- How to unwind a frame of a stack, computed from the ORC rule of its code.


MAX_FRAMES = 512
"""Maximum number of frames of a stack: more than 16 KiB hold in practice."""

# Offsets in struct pt_regs, and in the part of it that the CPU pushes.
_REGS_BP, _REGS_IP, _REGS_SP = 32, 128, 152
_PARTIAL_IP, _PARTIAL_SP = 0, 24

_MODULUS = 1 << 64
"""Offsets may be negative, and are added modulo this number."""


class End(IntEnum):
    """How a stack ends."""

    NONE = 0
    """There is no stack, or it could not be read."""

    ENTRY = 1
    """At the entry from user mode."""

    START = 2
    """At the function that the thread started in."""

    LOST = 3
    """Before the outermost frame: the next one cannot be found."""

    UNSUPPORTED = 4
    """At a frame that needs a register that was not saved."""


class FrameRule(NamedTuple):
    """How to find the caller of a frame. The CFA (canonical frame address) is the
    caller's stack pointer, unless registers were saved there."""

    guess: bool
    """Whether no ORC table covers the code."""

    end: int
    """How the stack ends if the caller cannot be found (:class:`End`)."""

    goes_on: bool
    """Whether the caller can be searched for."""

    cfa_by_sp: bool
    """Whether the CFA is relative to the stack pointer, not the frame pointer."""

    cfa_at: bool
    """Whether the CFA is the word at the address that base and offset add up to."""

    cfa_offset: int
    regs: bool
    """Whether registers lie at the CFA, not just a return address below it."""

    ip_offset: int
    """Offset from the CFA of the caller's instruction pointer."""

    sp_offset: int
    """Offset from the CFA of the caller's stack pointer, if *regs*; else it is the
    CFA."""

    saves_bp: bool
    """Whether the caller's frame pointer was saved; if not, it is unchanged."""

    bp_by_bp: bool
    """Whether *bp_offset* is relative to the frame pointer, not to the CFA."""

    bp_offset: int
    interrupted: bool
    """Whether the caller was left by an exception, not by a call."""


RULES = np.dtype(
    [
        (name, "u1" if name == "end" else "?" if kind is bool else "u8")
        for name, kind in FrameRule.__annotations__.items()
    ]
)
"""Type of an array whose records are :class:`FrameRule`."""


def worked_out(rule: Rule | None) -> FrameRule:
    """Return how to unwind by an ORC rule; ``None`` stands for code in no table."""
    guess = rule is None or rule is BY_FRAME_POINTER
    rule = rule or BY_FRAME_POINTER
    whole = rule.kind is OrcKind.REGS
    regs = whole or rule.kind is OrcKind.REGS_PARTIAL
    end = End.LOST
    if rule.kind is OrcKind.END:
        end = End.START
    elif rule.cfa in (Base.OTHER, Base.SP_AT):
        end = End.UNSUPPORTED
    ip_offset = _PARTIAL_IP if regs else -8
    return FrameRule(
        guess=guess,
        end=end.value,
        goes_on=end is End.LOST and rule.cfa in (Base.SP, Base.BP, Base.BP_AT),
        cfa_by_sp=rule.cfa is Base.SP,
        cfa_at=rule.cfa is Base.BP_AT,
        cfa_offset=rule.cfa_offset % _MODULUS,
        regs=regs,
        ip_offset=(_REGS_IP if whole else ip_offset) % _MODULUS,
        sp_offset=_REGS_SP if whole else _PARTIAL_SP,
        saves_bp=whole or rule.bp is not Base.NONE,
        bp_by_bp=rule.bp is Base.BP and not whole,
        bp_offset=(_REGS_BP if whole else rule.bp_offset) % _MODULUS,
        interrupted=rule.interrupted,
    )
