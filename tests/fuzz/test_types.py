# SPDX-License-Identifier: LGPL-2.1-or-later

"""Types that no kernel has: each command ends in an answer or in one line."""

import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from msatools.registry import NAMES, load
from msatools.selfdesc.btf import Btf, BtfKind
from tests.fuzz.cases import Case
from tests.fuzz.change import Change
from tests.fuzz.dumps import dump, program
from tests.fuzz.judge import GOOD
from tests.fuzz.memory import put
from tests.fuzz.run import run_case
from tests.fuzz.tables import changed_pages
from tests.support.calls import with_operands

CORE = "6.12"
HEADER = struct.Struct("<HBBIIIII")
RECORD = 12
"""Bytes of a type's record, before its entries: name, kind and count, size or type."""


class Blob:
    """The kernel's BTF, and where its types are in memory."""

    def __init__(self) -> None:
        prog = program(CORE)
        start, end = (prog.symbol(f"__{at}_BTF").address for at in ("start", "stop"))
        data = prog.read(start, end - start)
        *_, length, types, _, strings, size = HEADER.unpack_from(data)
        self.btf = Btf(data)
        self._first = start + length + types
        # Without those at either end, which have to be zero.
        first = start + length + strings
        self.strings = first + 4, first + size - 4

    def record(self, type_id: int) -> int:
        return self._first + 4 * int(self.btf._types.starts[type_id - 1])

    def entries(self, type_id: int) -> range:
        """Return the addresses of the entries of a structure or an enumeration."""
        kind, count = self.btf.kind(type_id), len(self.btf._tail(type_id))
        width = 2 if kind == BtfKind.ENUM else 3
        start = self.record(type_id) + RECORD
        return range(start, start + 4 * count, 4 * width)


def large_enumerators(blob: Blob) -> Iterator[tuple[int, int]]:
    """Bits of flags were shifted so far that they took gigabytes."""
    for type_id in blob.btf.of_kind(BtfKind.ENUM):
        yield from ((entry + 4, (1 << 31) - 1) for entry in blob.entries(type_id))


def wide_integers(blob: Blob) -> Iterator[tuple[int, int]]:
    """drgn cannot do arithmetic with them."""
    for type_id in blob.btf.of_kind(BtfKind.INT):
        yield blob.record(type_id) + 8, 16


def overlapping_members(blob: Blob) -> Iterator[tuple[int, int]]:
    """Records of tasks have no such format."""
    (task,) = blob.btf.find("task_struct", BtfKind.STRUCT)
    (head,) = blob.btf.find("list_head", BtfKind.STRUCT)
    yield from ((entry + 4, head) for entry in blob.entries(task))


def types_of_themselves(blob: Blob) -> Iterator[tuple[int, int]]:
    for type_id in blob.btf.of_kind(BtfKind.TYPEDEF, BtfKind.PTR):
        yield blob.record(type_id) + 8, type_id


def unions_of_unions(blob: Blob) -> Iterator[tuple[int, int]]:
    """Each has the next one twice: no search among their members ended."""
    (task,) = blob.btf.find("task_struct", BtfKind.STRUCT)
    (head,) = blob.btf.find("list_head", BtfKind.STRUCT)
    unions = [
        type_id
        for type_id in blob.btf.of_kind(BtfKind.UNION)
        if len(blob.entries(type_id)) > 1
    ][-60:]
    yield from ((blob.entries(task)[0] + at, to) for at, to in ((0, 0), (4, unions[0])))
    for union, inner in zip(unions, [*unions[1:], head], strict=True):
        yield blob.record(union) + 8, blob.btf.size(task)
        for entry in blob.entries(union):
            yield from ((entry + at, word) for at, word in ((0, 0), (4, inner), (8, 0)))


def one_long_name(blob: Blob) -> Iterator[tuple[int, bytes]]:
    """All names are parts of it: to index them took a minute."""
    first, end = blob.strings
    yield first, b"a" * (end - first)


Kind = Callable[[Blob], Iterator[tuple[int, int | bytes]]]


@cache
def changes_by(kind: Kind) -> tuple[Change, ...]:
    """Return the changes of the core that are the same for all commands."""
    pages: dict[int, bytes] = {}
    for address, word in kind(Blob()):
        data = word if isinstance(word, bytes) else struct.pack("<I", word)
        put(CORE, pages, address, data)
    return tuple(changed_pages(dump(CORE, "elf"), pages))


@pytest.mark.parametrize("command", NAMES)
@pytest.mark.parametrize(
    "kind",
    [
        *(large_enumerators, wide_integers, overlapping_members, types_of_themselves),
        *(unions_of_unions, one_long_name),
    ],
    ids=lambda kind: kind.__name__,
)
def test_types(kind: Kind, command: str, tmp_path: Path) -> None:
    core, changes = dump(CORE, "elf"), changes_by(kind)
    assert changes
    words = with_operands(load(command))
    case = Case("made", "tables", core, command, words, changes, is_json=True)
    outcome, run = run_case(case, tmp_path)
    assert outcome in GOOD, run.err
