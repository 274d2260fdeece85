# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's code: functions, symbols, modules, generated code, stacks."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import drgn
import numpy as np

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.reader import PAGE, U64, Reader, decode_string, unsigned
from msatools.kernel.report import Loss, LossLog, logs_of
from msatools.kernel.walks import list_records
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_symbol,
    find_type,
    find_variable,
    offset_of,
    pointer_to,
)
from msatools.selfdesc.load import (
    LoadedModule,
    ModuleLayout,
    ModuleSymbols,
    finders_of,
    is_served_by_btf,
    main_module,
)

# --- The kernel's functions by name and by address, each looked up once per program.
#
# With a vmlinux, drgn searches all symbols at each lookup, which takes 0.5 ms.


def has_function(prog: drgn.Program, name: str) -> bool:
    """Return whether the kernel has a symbol, such as a function, of that name."""
    return _look_up(prog, name) is not None


def function_name(prog: drgn.Program, address: int) -> str:
    """Return the name of the symbol that contains an address, without a suffix such as
    ``.isra.0``; the address in hex if not found."""
    return _look_up(prog, address) or hex(address)


def _look_up(prog: drgn.Program, key: str | int) -> str | None:
    # Names only: a Symbol holds a reference to the program, whose cache this is.
    known: dict[str | int, str | None] = prog.cache.setdefault("msatools.functions", {})
    if key not in known:
        try:
            known[key] = find_symbol(prog, key).name.partition(".")[0]
        except MissingError:
            known[key] = None
    return known[key]


def kernel_symbol(prog: drgn.Program, name: str) -> int:
    """
    Find the address of a symbol of the kernel proper, which may not exist.

    drgn would search for a missing one in every module.

    :raises MissingError: if the kernel does not have it
    """
    if not is_served_by_btf(prog):
        return _relocated(prog, int(find_symbol(prog, name).address))
    found = finders_of(prog).symbols(prog, name, None, True)
    if not found:
        raise MissingError(f"the kernel has no {name}")
    return int(found[0].address)


def _relocated(prog: drgn.Program, address: int) -> int:
    """
    Return the run-time address of a symbol of debug info.

    drgn does not relocate symbols of the section .brk, such as _end, if debug info is
    in the kernel's own file (a vmlinux that was not stripped).
    """
    module = main_module(prog)
    ranges, bias = module.address_ranges or (), module.debug_file_bias or 0
    for place in (address, address + bias):
        if any(start <= place <= end for start, end in ranges):
            return place
    return address


# --- Symbols sorted by address.


class SortedSymbols:
    """
    The symbols of some ranges of memory, looked up by the nearest start address.

    With debug info, drgn searches all symbols for each address, which takes
    milliseconds; with kallsyms it finds no symbol larger than 64 KiB.
    """

    def __init__(
        self, symbols: Sequence[drgn.Symbol], bounds: Sequence[tuple[int, int]]
    ) -> None:
        """
        :param bounds: Start and end (exclusive) of each range.
        """
        addresses = np.array([symbol.address for symbol in symbols], np.uint64)
        inside = np.zeros(len(symbols), np.bool_)
        for start, end in bounds:
            inside |= (addresses >= np.uint64(start)) & (addresses < np.uint64(end))
        rows = np.flatnonzero(inside)
        order = rows[np.argsort(addresses[rows], kind="stable")]
        self._addresses = addresses[order]
        self._symbols = [symbols[row] for row in order.tolist()]

    def before(self, address: int) -> tuple[list[drgn.Symbol], int | None]:
        """
        Find the symbols with the highest start address up to *address*.

        :return: All symbols that start there, which may be none, and the start of the
            next symbol, ``None`` if there is no next.
        """
        addresses = self._addresses
        past = int(np.searchsorted(addresses, np.uint64(address), "right"))
        following = int(addresses[past]) if past < len(addresses) else None
        if not past:
            return [], following
        first = int(np.searchsorted(addresses, addresses[past - 1], "left"))
        return self._symbols[first:past], following


# --- Loaded modules by address, and their symbols by address, with few reads.
#
# kernel/module: each module needs many reads, and there may be hundreds of modules: so
# a module is read only when an address in it is looked up.


_MAX_DEPTH = 128
"""Maximum depth of the tree of modules: that of a red-black tree with 2^64 nodes."""


class CodeModules:
    """The modules of a kernel, each read when an address in it is first looked up."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._known: list[LoadedModule] = []
        self._symbols: dict[int, drgn.SymbolIndex] = {}
        self._layout: ModuleLayout | None = None
        self._tree: _Tree | None = None
        self._is_ready = False
        self.is_complete = True
        """Whether every :meth:`find` so far was certain to find an existing module."""

    def find(self, address: int) -> LoadedModule | None:
        """Find the module that contains an address; ``None`` if not found."""
        if not self._is_ready:
            self._prepare()
            self._is_ready = True
        for module in self._known:
            if module.contains(address):
                return module
        if self._tree is None or self._layout is None:
            return None
        try:
            start = self._tree.find(address)
            if start is None:
                return None
            record = self._reader.read(start, self._layout.size)
            module = self._layout.parse(start, record)
        except UNREADABLE as error:
            self._losses.lose(Loss.MODULES, f"cannot read a module: {error}")
            self.is_complete = False
            return None
        if not module.contains(address):
            return None
        self._known.append(module)
        return module

    def symbols(self, module: LoadedModule) -> drgn.SymbolIndex:
        """Return the symbols of a module; none, with a note, if they are lost."""
        if module.address not in self._symbols:
            try:
                symbols = ModuleSymbols(self._reader.prog, module, self._reader.read)
                index = symbols.index()
            except LOST as error:
                text = f"cannot read the symbols of module {module.name}: {error}"
                self._losses.lose(Loss.SYMBOLS, text, about=module.name)
                index = drgn.SymbolIndex([])
            self._symbols[module.address] = index
        return self._symbols[module.address]

    def _prepare(self) -> None:
        prog = self._reader.prog
        try:
            layout = self._layout = ModuleLayout(prog)
            head = find_variable(prog, "modules").address_
        except MissingError:  # a kernel without loadable modules
            self.is_complete = False
            return
        try:
            # With CONFIG_MODULES_TREE_LOOKUP, which perf and tracing need.
            self._tree = _Tree(self._reader)
        except MissingError:
            self.is_complete = False
            records = list_records(
                self._reader,
                head,
                layout.list,
                layout.size,
                self._losses,
                "the list of modules",
            )
            self._known = [layout.parse(address, data) for address, data in records]


class _Tree:
    """
    ``mod_tree``: the memory ranges of modules (kernel/module/tree_lookup.c).

    It is a latched tree (include/linux/rbtree_latch.h): of its two copies one is always
    consistent.

    :raises MissingError: if this kernel has no such tree
    """

    def __init__(self, reader: Reader) -> None:
        prog = reader.prog
        tree = find_variable(prog, "mod_tree")
        self._reader = reader
        self._sequence = tree.address_ + offset_of(tree.type_, "root.seq")
        self._roots = tree.address_ + offset_of(tree.type_, "root.tree")
        try:
            part = find_type(prog, "struct module_memory")  # ac3b43283923 (in v6.4)
        except MissingError:
            part = find_type(prog, "struct module_layout")
        self._base = offset_of(part, "base")
        self._length = offset_of(part, "size")
        self._module = offset_of(part, "mtn.mod")
        self._nodes = [offset_of(part, f"mtn.node.node[{copy}]") for copy in (0, 1)]
        node = find_type(prog, "struct rb_node")
        self._left = offset_of(node, "rb_left")
        self._right = offset_of(node, "rb_right")
        self._size = max(
            *(offset + drgn.sizeof(node) for offset in self._nodes),
            self._module + 8,
            self._base + 8,
            self._length + 4,
        )

    def find(self, address: int) -> int | None:
        """
        Find the module with a memory range that contains an address.

        :return: Address of its ``struct module``; ``None`` if not found.
        :raises UNREADABLE: if the tree cannot be read
        """
        copy = unsigned(self._reader.read(self._sequence, 4), 0, 4) & 1
        node = int(self._reader.words(self._roots + 8 * copy, 1)[0])
        for _ in range(_MAX_DEPTH):
            if not node:
                return None
            data = self._reader.read(node - self._nodes[copy], self._size)
            base, size = unsigned(data, self._base, 8), unsigned(data, self._length, 4)
            if base <= address < base + size:
                return unsigned(data, self._module, 8)
            child = self._left if address < base else self._right
            node = unsigned(data, self._nodes[copy] + child, 8)
        raise DamagedDataError("the tree of modules has no end", node)


def module_area(prog: drgn.Program) -> tuple[int, int]:
    """Return the lowest start and the highest end of modules' memory so far.

    ``mod_tree`` records both (kernel/module/main.c). They are 0 if unreadable.
    """
    try:
        with drgn_lookups:
            tree = find_variable(prog, "mod_tree")
            return tree.addr_min.value_(), tree.addr_max.value_()
    except LOST:
        return 0, 0


# --- Names of code that the kernel generates while it runs, as in /proc/kallsyms.
#
# This code is outside the kernel and its modules. The kernel keeps lists of it:
#
# - compiled BPF programs, their trampolines and dispatchers (kernel/bpf/core.c,
#   bpf_kallsyms; since "bpf: Add name to struct bpf_ksym" and the commits around it, in
#   v5.7);
# - trampolines of ftrace (kernel/trace/ftrace.c, ftrace_ops_trampoline_list; since
#   fc0ea795f53c ("ftrace: Add symbols for ftrace trampolines") in v5.9);
# - pages with the instructions that kprobes have replaced, and with the detours of
#   those that became a jump (kernel/kprobes.c; since d002b8bc6dbc ("kprobes: Add
#   symbols for kprobe insn pages") in v5.9).


MAX_BYTES = 1 << 21
"""Maximum size in bytes of a piece of code: BPF programs share pages of this size."""

_NAME_BYTES = 128
"""Bytes of a name to read; a longer one, of a program with BTF, is cut off."""

_SAVE_REGS = 1 << 2
"""FTRACE_OPS_FL_SAVE_REGS (include/linux/ftrace.h)."""

_TRAMPOLINE = "ftrace_trampoline", "__builtin__ftrace"
OPTIMISED_PROBES = "kprobe_optinsn_page"
_SLOTS = {
    "kprobe_insn_slots": ("kprobe_insn_page", "__builtin__kprobes"),
    "kprobe_optinsn_slots": (OPTIMISED_PROBES, "__builtin__kprobes"),
}
"""Lists of pages of kprobes, and what /proc/kallsyms calls such a page."""


class GeneratedSymbol(NamedTuple):
    """A piece of generated code."""

    start: int
    end: int
    name: str
    module: str
    """What /proc/kallsyms has in place of a module: ``bpf``, ``__builtin__ftrace``."""

    template: int = 0
    """Address of the code of which this one begins with a copy; 0 if it is no copy."""


class GeneratedCode:
    """Generated code by address; the first lookup reads the kernel's lists."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._found: list[GeneratedSymbol] | None = None

    def find(self, address: int) -> GeneratedSymbol | None:
        """Return the piece of code at an address; ``None`` if there is none."""
        if self._found is None:
            self._found = sorted(
                found
                for read in (self._programs, self._trampolines, self._probes)
                for found in read()
            )
        place = bisect_right(self._found, (address, 1 << 64))
        found = self._found[place - 1] if place else None
        return found if found is not None and address < found.end else None

    def _programs(self) -> Iterator[GeneratedSymbol]:
        prog = self._reader.prog
        try:
            kind = find_type(prog, "struct bpf_ksym")
            node, start, end, name = (
                offset_of(kind, member) for member in ("lnode", "start", "end", "name")
            )
        except MissingError:
            return  # without BPF, or without its compiler
        size = max(node + 16, start + 8, end + 8, name + _NAME_BYTES)
        for data in self._list("bpf_kallsyms", node, size, "the list of BPF programs"):
            (first,), (last,) = U64.unpack_from(data, start), U64.unpack_from(data, end)
            text = data[name : name + _NAME_BYTES].partition(b"\0")[0]
            yield from _sound(first, last, decode_string(text), "bpf")

    def _trampolines(self) -> Iterator[GeneratedSymbol]:
        prog = self._reader.prog
        try:
            kind = find_type(prog, "struct ftrace_ops")
            node, start, length, flags = (
                offset_of(kind, member)
                for member in ("list", "trampoline", "trampoline_size", "flags")
            )
        except MissingError:
            return  # without ftrace
        size = max(node + 16, start + 8, length + 8, flags + 8)
        for data in self._list(
            "ftrace_ops_trampoline_list", node, size, "the list of trampolines"
        ):
            (first,) = U64.unpack_from(data, start)
            (count,) = U64.unpack_from(data, length)
            (flag,) = U64.unpack_from(data, flags)
            # arch/x86/kernel/ftrace.c, create_trampoline()
            copied = "ftrace_regs_caller" if flag & _SAVE_REGS else "ftrace_caller"
            template = self._address(copied)
            yield from _sound(first, first + count, *_TRAMPOLINE, template)

    def _probes(self) -> Iterator[GeneratedSymbol]:
        prog = self._reader.prog
        try:
            pages = offset_of(find_type(prog, "struct kprobe_insn_cache"), "pages")
            # BTF may lack the type of a page, which is private to kernel/kprobes.c. Its
            # first members, list and insns, are the same since 4a2bb6fcc80e (v3.13).
            node, start = _page_members(self._reader)
        except MissingError:
            return  # without kprobes
        size = max(node + 16, start + 8)
        for variable, words in _SLOTS.items():
            for data in self._list(
                variable, node, size, "the list of pages of kprobes", pages
            ):
                (first,) = U64.unpack_from(data, start)
                yield from _sound(first, first + PAGE, *words)

    def _address(self, name: str) -> int:
        try:
            return int(find_symbol(self._reader.prog, name).address)
        except MissingError:
            return 0

    def _list(
        self, variable: str, node: int, size: int, name: str, offset: int = 0
    ) -> Iterator[bytes]:
        """Yield the records of a list whose head is in a variable."""
        try:
            head = int(find_symbol(self._reader.prog, variable).address) + offset
            # A list that nobody has used yet may be all zeros.
            if not self._reader.words(head, 1)[0]:
                return
        except MissingError:
            return
        except UNREADABLE as error:
            self._losses.lose(Loss.SYMBOLS, f"cannot read {name}: {error}")
            return
        for _, data in list_records(
            self._reader, head, node, size, self._losses, name, Loss.SYMBOLS
        ):
            yield data


def _page_members(reader: Reader) -> tuple[int, int]:
    """Return the offsets of ``list`` and ``insns`` in a page of kprobes."""
    try:
        kind = find_type(reader.prog, "struct kprobe_insn_page")
        return offset_of(kind, "list"), offset_of(kind, "insns")
    except MissingError:
        return 0, 16


def _sound(
    first: int, last: int, name: str, module: str, template: int = 0
) -> Iterator[GeneratedSymbol]:
    if KERNEL_HALF <= first < last <= first + MAX_BYTES:
        yield GeneratedSymbol(first, last, name, module, template)


# --- Stacks of single tasks, unwound by drgn.


def stack_trace(
    prog: drgn.Program, task: drgn.Object | int, losses: LossLog | None = None
) -> drgn.StackTrace | None:
    """Return the stack of a task; ``None`` if drgn cannot unwind it.

    Damaged unwind tables are a loss of every report under way. A running task of a live
    kernel has no registers to unwind from; that is no loss.

    :param task: ``struct task_struct *``, or its address
    :param losses: Where to count a stack that cannot be read; ``None`` if the caller
        counts it.
    """
    if isinstance(task, int):
        task = pointer_to(prog, "struct task_struct", task)
    try:
        return ask(prog.stack_trace, task)
    except DamagedDataError as error:
        # A running task of a live kernel is a ValueError of drgn's; others, such as for
        # registers that libkdumpfile lacks, have no types of their own.
        if not isinstance(error.__cause__, ValueError):
            for log in logs_of(prog):
                text = f"drgn cannot unwind stacks: {error.__cause__}"
                log.lose(Loss.UNWINDING, text)
        return None
    except drgn.FaultError as error:
        if losses is not None:
            losses.lose(Loss.STACKS, f"cannot read the stack of a task: {error}")
        return None
    except MissingError:
        return None
