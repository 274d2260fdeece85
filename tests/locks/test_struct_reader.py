# SPDX-License-Identifier: LGPL-2.1-or-later

"""Members of structures have the widths and signs of their types."""

import struct

import pytest
from drgn import FaultError, Program, Type, TypeEnumerator, TypeMember

from msatools.errors import MissingError
from msatools.kernel.reader import Reader
from msatools.locks.struct_reader import Layout
from tests.locks.madememory import BASE, SIZE, MadeMemory
from tests.support.dumps import open_dump

END = BASE + SIZE


@pytest.fixture
def made() -> MadeMemory:
    return MadeMemory()


def _types(made: MadeMemory) -> dict[str, tuple[Type, bytes, int]]:
    """Return types of a member, with example bytes and their value."""
    prog = made.prog
    short = prog.int_type("unsigned short", 2, False)
    number = prog.int_type("int", 4, True)
    signed = prog.int_type("long", 8, True)
    counter = prog.struct_type("atomic_t", 4, [TypeMember(number, "counter")])
    either = prog.union_type(None, 4, [TypeMember(counter, "value")])
    states = prog.enum_type("states", number, [TypeEnumerator("RUNS", 0)])
    return {
        "u16": (short, b"\xff\xff", 0xFFFF),
        "u32": (made.u32, b"\xff" * 4, 0xFFFF_FFFF),
        "u64": (made.u64, b"\xff" * 8, (1 << 64) - 1),
        "pointer": (made.pointer, b"\xff" * 8, (1 << 64) - 1),
        "int": (number, b"\xff" * 4, -1),
        "long": (signed, b"\xfe" + b"\xff" * 7, -2),
        "bool": (prog.bool_type("_Bool", 1), b"\1", 1),
        "typedef": (prog.typedef_type("umode_t", short), b"\1\2", 0x201),
        "struct": (counter, b"\xfd\xff\xff\xff", -3),
        "union": (either, b"\4\0\0\0", 4),
        "enum": (states, b"\5\0\0\0", 5),
        "array": (prog.array_type(short, 3), b"\6\0\7\0\7\0", 6),
    }


@pytest.mark.parametrize("name", list(_types(MadeMemory())))
def test_member_is_as_wide_as_its_type(made: MadeMemory, name: str) -> None:
    """No byte is read past the member, where memory ends."""
    type_, data, expected = _types(made)[name]
    made.struct("inode", 32, member=(type_, 32 - len(data)))
    made.text(END - len(data), data)
    layout = made.layout
    assert layout.member(END - 32, "inode", "newer", "member") == expected
    assert layout.members(END - 32, "inode", ("newer", "member")) == (expected,)


def test_members_take_one_read(made: MadeMemory) -> None:
    types = _types(made)
    made.struct(
        "inode",
        32,
        mode=(types["u16"][0], 2),
        owner=(types["pointer"][0], 16),
        count=(types["int"][0], 28),
    )
    made.text(END - 32, struct.pack("<HHIQQIi", 1, 2, 3, 4, BASE, 6, -7))
    layout = made.layout
    found = layout.members(END - 32, "inode", "count", ("uid", "mode"), "owner")
    assert found == (-7, 2, BASE)
    assert layout.reader.reads == 1
    assert layout.reader.bytes == 30


def test_non_integers_are_refused(made: MadeMemory) -> None:
    number = made.prog.int_type("int", 4, True)
    double = made.prog.float_type("double", 8)
    bits = made.prog.struct_type(
        "request",
        16,
        [
            TypeMember(made.prog.struct_type("empty", 0, []), "empty"),
            TypeMember(double, "load", 64),
            TypeMember(made.prog.struct_type("late", None, None), "late", 64),
        ],
    )
    made.types["request"] = bits
    made.struct("inode", 16, member=(number, 0))
    for member in ("empty", "load", "late"):
        with pytest.raises(MissingError, match="no integer"):
            made.layout.member(BASE, "request", member)
    with pytest.raises(MissingError, match="has no newer or older"):
        made.layout.member(BASE, "inode", "newer", "older")
    with pytest.raises(MissingError, match="has no member"):
        made.layout.members(BASE, "nothing", "member")
    with pytest.raises(FaultError):
        made.layout.member(END, "inode", "member")


def test_a_structure_of_a_module(made: MadeMemory) -> None:
    """On kernels where jbd2 is one, the kernel proper does not know journals."""
    journal = made.prog.struct_type("journal_s", 16, [TypeMember(made.u64, "j_dev")])

    def find(prog: Program, _: object, name: str, module: str | None) -> Type | None:
        return journal if (name, module) == ("journal_s", "jbd2") else None

    made.prog.register_type_finder("jbd2", find, enable_index=0)
    assert made.layout.size("journal_s") == 16
    assert made.layout.has("journal_s", "j_dev")
    assert not made.layout.has("fuse_conn", "waitq")


@pytest.mark.parametrize("name", ["tasks-6.12rt", "tasks-6.12generic"])
def test_journals_of_a_kernel_with_modules(name: str) -> None:
    layout = Layout(Reader(open_dump(name, "btf")))
    assert layout.has("journal_s", "j_task")
