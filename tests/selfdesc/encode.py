# SPDX-License-Identifier: LGPL-2.1-or-later

"""Write BTF for tests, after the kernel's Documentation/bpf/btf.rst."""

import struct
from collections.abc import Sequence

MAGIC = 0xEB9F
VOID = 0


class Writer:
    """A blob in the making; each method adds a type and gives its ID.

    :param order: ``<`` for little endian, ``>`` for big
    """

    def __init__(self, order: str = "<") -> None:
        self.order = order
        self.types = b""
        self.next_id = 1
        self.strings = b"\0"

    def string(self, text: str) -> int:
        if not text:
            return 0
        offset = len(self.strings)
        self.strings += text.encode() + b"\0"
        return offset

    def words(self, *words: int) -> bytes:
        return struct.pack(
            f"{self.order}{len(words)}I", *(w & 0xFFFFFFFF for w in words)
        )

    def add(
        self,
        kind: int,
        name: str,
        size: int,
        *tail: int,
        vlen: int = 0,
        flag: bool = False,
    ) -> int:
        info = kind << 24 | vlen | flag << 31
        self.types += self.words(self.string(name), info, size, *tail)
        self.next_id += 1
        return self.next_id - 1

    def int(
        self,
        name: str,
        size: int,
        encoding: int = 0,
        *,
        offset: int = 0,
        bits: int = -1,
    ) -> int:
        bits = size * 8 if bits < 0 else bits
        return self.add(1, name, size, encoding << 24 | offset << 16 | bits)

    def ptr(self, target: int) -> int:
        return self.add(2, "", target)

    def array(self, element: int, length: int, index: int = 1) -> int:
        return self.add(3, "", 0, element, index, length)

    def struct(
        self,
        name: str,
        size: int,
        members: Sequence[tuple[str, int, int]],
        *,
        union: bool = False,
        flag: bool = False,
    ) -> int:
        """Members are names, types and offset words."""
        tail = [
            w for member, kind, at in members for w in (self.string(member), kind, at)
        ]
        return self.add(
            5 if union else 4, name, size, *tail, vlen=len(members), flag=flag
        )

    def enum(
        self,
        name: str,
        values: Sequence[tuple[str, int]],
        *,
        size: int = 4,
        flag: bool = False,
    ) -> int:
        tail = [w for text, value in values for w in (self.string(text), value)]
        return self.add(6, name, size, *tail, vlen=len(values), flag=flag)

    def enum64(
        self, name: str, values: Sequence[tuple[str, int]], *, flag: bool = False
    ) -> int:
        tail = [
            w for text, value in values for w in (self.string(text), value, value >> 32)
        ]
        return self.add(19, name, 8, *tail, vlen=len(values), flag=flag)

    def fwd(self, name: str, *, union: bool = False) -> int:
        return self.add(7, name, 0, flag=union)

    def typedef(self, name: str, target: int) -> int:
        return self.add(8, name, target)

    def volatile(self, target: int) -> int:
        return self.add(9, "", target)

    def const(self, target: int) -> int:
        return self.add(10, "", target)

    def restrict(self, target: int) -> int:
        return self.add(11, "", target)

    def func(self, name: str, prototype: int) -> int:
        return self.add(12, name, prototype, vlen=1)

    def proto(self, returns: int, parameters: Sequence[tuple[str, int]]) -> int:
        tail = [w for name, kind in parameters for w in (self.string(name), kind)]
        return self.add(13, "", returns, *tail, vlen=len(parameters))

    def var(self, name: str, target: int) -> int:
        return self.add(14, name, target, 1)

    def datasec(self, name: str, variables: Sequence[tuple[int, int, int]]) -> int:
        """Variables are IDs, offsets and sizes."""
        tail = [word for variable in variables for word in variable]
        return self.add(15, name, 0, *tail, vlen=len(variables))

    def float(self, name: str, size: int) -> int:
        return self.add(16, name, size)

    def decl_tag(self, name: str, target: int, component: int = -1) -> int:
        return self.add(17, name, target, component)

    def type_tag(self, name: str, target: int) -> int:
        return self.add(18, name, target)

    def blob(self) -> bytes:
        header = struct.pack(
            f"{self.order}HBBIIIII",
            *(MAGIC, 1, 0, 24),
            *(0, len(self.types)),
            *(len(self.types), len(self.strings)),
        )
        return header + self.types + self.strings
