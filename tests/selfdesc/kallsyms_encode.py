# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables of symbols as kernels of several kinds and versions lay them out."""

import struct
from dataclasses import dataclass, field
from typing import Literal

from drgn import Architecture, Object, Platform, PlatformFlags, Program

from tests.support.overlay import put

TEXT = 0xFFFFFFFF81000000
PERCPU_END = 0x30000
TOKENS_START = 0x20000
"""Where in the kernel's memory the tables are put, in bytes from _stext."""

MADE_UP = {1: "sym_", 2: "_of_", 0xFE: "underscore"}


@dataclass
class Kernel:
    """What a kernel is like, as far as its tables depend on it."""

    alignment: int = 8
    marker_bytes: int = 4
    """And what num_syms takes."""

    order: Literal["first", "last"] = "first"
    """Where addresses come: before all others (up to v6.3) or after them."""

    addresses: Literal["base", "percpu", "absolute", "place"] = "percpu"
    seqs: bool = False
    long: bool = False
    symbols: list[tuple[int, str]] = field(default_factory=list)
    """Addresses, and names with nm's letter before them."""

    place: dict[str, int] = field(default_factory=dict)
    """Where each table is, once the kernel is made."""

    def __post_init__(self) -> None:
        self.text = TEXT
        self.symbols = self.symbols or symbols(self)

    def pack(self, code: str, *values: int) -> bytes:
        return struct.pack(f"<{len(values)}{code}", *values)

    def memory(self, start: int) -> bytearray:
        """Lay out the tables from an address on, and remember where each is."""
        above = (address for address, _ in self.symbols if address >= self.text)
        base = next(above, self.text)
        count = len(self.symbols)
        wide = "Q" if self.marker_bytes == 8 else "I"
        names, markers = self.names()
        tokens, index = self.tokens()
        before = [
            ("num_syms", self.pack(wide, count)),
            ("names", names),
            ("markers", self.pack(wide, *markers)),
            *([("seqs_of_names", bytes([1, 2, 3]) * count)] if self.seqs else []),
            ("token_table", tokens),
            ("token_index", self.pack("H", *index)),
        ]
        if self.addresses == "absolute":
            places = [("addresses", bytes(8 * count))]
        else:
            places = [("offsets", bytes(4 * count))]
            if self.addresses in ("base", "percpu"):
                places.append(("relative_base", self.pack("Q", base)))
        parts = places + before if self.order == "first" else before + places

        data = bytearray()
        for name, part in parts:
            data += bytes(-len(data) % self.alignment)
            self.place[name] = start + len(data)
            data += part
        self.put_addresses(data, start, base)
        return data

    def put_addresses(self, data: bytearray, start: int, base: int) -> None:
        for number, (address, _) in enumerate(self.symbols):
            if self.addresses == "absolute":
                place = self.place["addresses"] + 8 * number
                packed = self.pack("Q", address)
            else:
                place = self.place["offsets"] + 4 * number
                value = {
                    "base": address - base,
                    "percpu": base - 1 - address if address >= base else address,
                    "place": address - place,
                }[self.addresses]
                packed = self.pack("I", value & 0xFFFFFFFF)
            data[place - start : place - start + len(packed)] = packed

    def tokens(self) -> tuple[bytes, list[int]]:
        texts = [MADE_UP.get(i, "") for i in range(256)]
        for letter in set("".join(name for _, name in self.symbols)):
            texts[ord(letter)] = letter
        data, index = b"", []
        for text in texts:
            index.append(len(data))
            data += text.encode() + b"\0"
        return data, index

    def names(self) -> tuple[bytes, list[int]]:
        data, markers = bytearray(), []
        for number, (_, name) in enumerate(self.symbols):
            if number % 256 == 0:
                markers.append(len(data))
            name = name.replace("sym_", "\1").replace("_of_", "\2")
            if len(name) > 127 and self.long:
                data += bytes([len(name) & 127 | 128, len(name) >> 7])
            else:
                data.append(len(name))
            data += name.encode()
        return bytes(data), markers


def symbols(kernel: Kernel) -> list[tuple[int, str]]:
    """Some 3000 symbols, with those that are looked for by name."""
    made = []
    if kernel.addresses in ("percpu", "absolute"):
        made = [(at * 16, f"dsym_{at}_of_cpu") for at in range(PERCPU_END // 16 // 64)]
    text = kernel.text
    made += [(text, "T_stext"), (text, "Tstartup")]
    made += [(text + 32 * at, f"tsym_{at}_of_text") for at in range(1, 1200)]
    made += [(text + 0x300000, "R__end_rodata")]
    made += [(text + 0x400000 + 8 * at, f"Dsym_{at}") for at in range(1000)]
    # 140 letters take two bytes for the length, or one that looks like such two.
    made += [(text + 0x480000, "d" + "long" * 35)]
    return [*made, (text + 0x500000, "Dinit_task"), (text + 0x600000, "B_end")]


def program(kernel: Kernel, memory: dict[int, bytes], vmcoreinfo: str) -> Program:
    """Make a program of nothing but some memory and a VMCOREINFO."""
    flags = PlatformFlags.IS_64_BIT | PlatformFlags.IS_LITTLE_ENDIAN
    prog = Program(Platform(Architecture.UNKNOWN, flags))
    for start, data in memory.items():
        put(prog, start, bytes(data))
    note = Object(
        prog,
        prog.array_type(prog.int_type("char", 1, True), len(vmcoreinfo) + 1),
        vmcoreinfo.encode() + b"\0",
    )

    def find(prog: Program, name: str, *_: object) -> Object | None:
        return note if name == "VMCOREINFO" else None

    prog.register_object_finder("note", find, enable_index=0)
    return prog
