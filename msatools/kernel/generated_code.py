# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Names of code that the kernel generates while it runs, as in /proc/kallsyms.

It is outside the kernel and its modules, and the kernel lists it with its addresses:

- compiled BPF programs, their trampolines and dispatchers (kernel/bpf/core.c,
  ``bpf_kallsyms``; since "bpf: Add name to struct bpf_ksym" and the commits around it,
  in v5.7);
- trampolines of ftrace (kernel/trace/ftrace.c, ``ftrace_ops_trampoline_list``; since
  fc0ea795f53c ("ftrace: Add symbols for ftrace trampolines") in v5.9);
- pages with the instructions that kprobes have replaced, and with the detours of those
  that became a jump (kernel/kprobes.c; since d002b8bc6dbc ("kprobes: Add symbols for
  kprobe insn pages") in v5.9).
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string
from msatools.kernel.walks import list_records
from msatools.kernel.words import PAGE, U64
from msatools.selfdesc.find import find_symbol, find_type, offset_of
from msatools.target.addresses import KERNEL_HALF

MAX_BYTES = 1 << 21
"""Maximum size of a program's code: several share a page of this size."""

_NAME_BYTES = 128
"""Bytes of a name that are read, as a program's has at most 16 beside its tag."""

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
    """Address of the code that it is a copy of, at least at its start; 0 if of none."""


class GeneratedCode:
    """Generated code by address; the lists are read when the first is asked for."""

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
            # Its type is private to a file that BTF may not have; the members before
            # the slots have not changed since 4a2bb6fcc80e (v3.13): list, insns.
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
