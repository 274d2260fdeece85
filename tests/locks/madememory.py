# SPDX-License-Identifier: LGPL-2.1-or-later

"""A kernel made of types, variables and memory that a test writes."""

import struct
from collections.abc import Callable

from drgn import (
    Architecture,
    Object,
    Platform,
    Program,
    Type,
    TypeKind,
    TypeKindSet,
    TypeMember,
)

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.struct_reader import Layout

BASE = 0xFFFF_8880_0000_0000
SIZE = 0x10000


class MadeMemory:
    """A drgn program with types and variables of the test, and writable memory."""

    def __init__(self) -> None:
        self.memory = bytearray(SIZE)
        self.types: dict[str, Type] = {}
        self.variables: dict[str, Callable[[], Object]] = {}
        self.losses = LossLog()
        self.prog = Program(Platform(Architecture.X86_64))
        self.prog.add_memory_segment(BASE, SIZE, self._read)
        self.prog.register_type_finder("made", self._type, enable_index=0)
        self.prog.register_object_finder("made", self._object, enable_index=0)
        self.u64 = self.prog.int_type("unsigned long", 8, False)
        self.u32 = self.prog.int_type("unsigned int", 4, False)
        self.pointer = self.prog.pointer_type(self.prog.void_type())
        self.heads = self.struct(
            "list_head", 16, next=(self.pointer, 0), prev=(self.pointer, 8)
        )

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        return bytes(self.memory[offset : offset + count])

    def _type(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        return self.types.get(name) if TypeKind.STRUCT in kinds else None

    def _object(
        self, prog: Program, name: str, flags: object, filename: str | None
    ) -> Object | None:
        made = self.variables.get(name)
        return made() if made else None

    def struct(self, name: str, size: int, /, **members: tuple[Type, int]) -> Type:
        """Make a structure type.

        :param members: name -> (type, offset in bytes)
        """
        made = self.prog.struct_type(
            name,
            size,
            [
                TypeMember(type_, key, 8 * offset)
                for key, (type_, offset) in members.items()
            ],
        )
        self.types[name] = made
        return made

    def write(self, address: int, *words: int) -> None:
        self._write(address, struct.pack(f"<{len(words)}Q", *words))

    def text(self, address: int, text: bytes) -> None:
        self._write(address, text)

    def variable(self, name: str, type_: Type, address: int) -> None:
        self.variables[name] = lambda: Object(self.prog, type_, address=address)

    def write_u32(self, address: int, *halves: int) -> None:
        self._write(address, struct.pack(f"<{len(halves)}I", *halves))

    def _write(self, address: int, data: bytes) -> None:
        self.memory[address - BASE : address - BASE + len(data)] = data

    def link(self, *nodes: int) -> None:
        """Make a circular list of list nodes."""
        for index, node in enumerate(nodes):
            self.write(node, nodes[(index + 1) % len(nodes)], nodes[index - 1])

    @property
    def layout(self) -> Layout:
        return Layout(Reader(self.prog))
