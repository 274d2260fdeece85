# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Names of compiled BPF programs, their trampolines and dispatchers, as in /proc/kallsyms.

They are code outside the kernel and its modules. The kernel lists them with their
addresses (kernel/bpf/core.c, bpf_kallsyms; since "bpf: Add name to struct bpf_ksym" and
the commits around it, in v5.7).
"""

from bisect import bisect_right

from msatools.errors import MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string
from msatools.kernel.walks import list_records
from msatools.kernel.words import U64
from msatools.selfdesc.find import find_symbol, find_type, offset_of
from msatools.target.addresses import KERNEL_HALF

MAX_BYTES = 1 << 21
"""Maximum size of a program's code: several share a page of this size."""

_NAME_BYTES = 128
"""Bytes of a name that are read, as a program's has at most 16 beside its tag."""


class BpfSymbols:
    """Programs by address; the list is read when the first is asked for."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._found: list[tuple[int, int, str]] | None = None

    def find(self, address: int) -> tuple[int, str] | None:
        """Return where the program at an address begins, and its name."""
        if self._found is None:
            self._found = sorted(self._read())
        place = bisect_right(self._found, (address, 1 << 64, ""))
        if not place:
            return None
        start, end, name = self._found[place - 1]
        return (start, name) if start <= address < end else None

    def _read(self) -> list[tuple[int, int, str]]:
        prog = self._reader.prog
        try:
            head = int(find_symbol(prog, "bpf_kallsyms").address)
            kind = find_type(prog, "struct bpf_ksym")
            node, start, end, name = (
                offset_of(kind, member) for member in ("lnode", "start", "end", "name")
            )
        except MissingError:
            return []  # without BPF, or without its compiler
        size = max(node + 16, start + 8, end + 8, name + _NAME_BYTES)
        found = []
        for _, data in list_records(
            self._reader,
            head,
            node,
            size,
            self._losses,
            "the list of BPF programs",
            Loss.SYMBOLS,
        ):
            (first,), (last,) = U64.unpack_from(data, start), U64.unpack_from(data, end)
            if KERNEL_HALF <= first < last <= first + MAX_BYTES:
                text = data[name : name + _NAME_BYTES].partition(b"\0")[0]
                found.append((first, last, decode_string(text)))
        return found
