# SPDX-License-Identifier: LGPL-2.1-or-later

"""BTF made by hand: every kind, both byte orders, and blobs that lie."""

import contextlib
import random
import struct
from collections.abc import Callable
from typing import TypeVar

import drgn
import pytest
from drgn import Architecture, Platform, PlatformFlags, Program, TypeKind, sizeof

from msatools.errors import AmbiguousError, MissingError
from msatools.selfdesc.btf import Btf, BtfError, BtfKind, agree, strip
from msatools.selfdesc.types import BtfTypes, Declaration
from tests.selfdesc.encode import VOID, Writer

SIGNED = 1
INT = 1
"""The first type of each writer."""
ALL = {
    TypeKind.INT,
    TypeKind.BOOL,
    TypeKind.FLOAT,
    TypeKind.STRUCT,
    TypeKind.UNION,
    TypeKind.ENUM,
    TypeKind.TYPEDEF,
}


Found = TypeVar("Found")


def program(order: str = "<") -> Program:
    flags = PlatformFlags.IS_64_BIT
    if order == "<":
        flags |= PlatformFlags.IS_LITTLE_ENDIAN
    return Program(Platform(Architecture.UNKNOWN, flags))


def types(writer: Writer) -> BtfTypes:
    return BtfTypes(program(writer.order), Btf(writer.blob()))


def values(enum: drgn.Type) -> list[tuple[str, int]]:
    return [(name, value) for name, value in enum.enumerators or ()]


@pytest.fixture(params=["<", ">"], ids=["little", "big"])
def writer(request: pytest.FixtureRequest) -> Writer:
    writer = Writer(request.param)
    assert writer.int("int", 4, SIGNED) == INT
    return writer


def found(it: Found | None) -> Found:
    """Return what was found, and fail if nothing was."""
    assert it is not None
    return it


@pytest.mark.parametrize(
    ("architecture", "is_signed"),
    [(Architecture.X86_64, True), (Architecture.AARCH64, False)],
)
def test_sign_of_char_that_is_not_told(
    architecture: Architecture, is_signed: bool
) -> None:
    old, new = Writer(), Writer()
    for writer, encoding in ((old, 0), (new, SIGNED)):
        writer.int("char", 1)
        writer.int("signed char", 1, encoding)
    for writer, expected in ((old, is_signed), (new, False)):
        made = BtfTypes(Program(Platform(architecture)), Btf(writer.blob()))
        assert made.type(1).is_signed == expected
        assert made.type(2).is_signed


@pytest.mark.parametrize("flag", [True, False], ids=["flagged", "by the type"])
def test_bit_fields(writer: Writer, flag: bool) -> None:
    """As struct { unsigned a : 3; unsigned b : 5; unsigned c; }, in both ways."""
    integer = writer.int("unsigned int", 4)
    if flag:
        fields = [("a", integer, 3 << 24), ("b", integer, 5 << 24 | 3)]
    else:
        three = writer.int("unsigned int", 4, bits=3)
        five = writer.int("unsigned int", 4, offset=3, bits=5)
        fields = [("a", three, 0), ("b", five, 0)]
    compound = writer.struct("s", 8, [*fields, ("c", integer, 32)], flag=flag)
    made = types(writer).type(compound)
    told = [(m.name, m.bit_offset, m.bit_field_size) for m in made.members]
    assert told == [("a", 0, 3), ("b", 3, 5), ("c", 32, None)]


@pytest.mark.parametrize(
    ("is_new", "expected"), [(True, 0xFFFFFFFF), (False, -1)], ids=["new", "old"]
)
def test_enum_without_flag(writer: Writer, is_new: bool, expected: int) -> None:
    """Only since they are flagged does none mean that a value has no sign."""
    enum = writer.enum("e", [("ONE", 1), ("ALL", 0xFFFFFFFF)])
    if is_new:
        writer.enum("other", [("MINUS", -1)], flag=True)
    made = types(writer).type(enum)
    assert values(made) == [("ONE", 1), ("ALL", expected)]
    assert made.type.is_signed == (not is_new)


def test_constant_whose_value_is_not_told(writer: Writer) -> None:
    writer.enum("e", [("ONE", 1), ("ALL", 0xFFFFFFFF)])
    writer.enum("cut", [("LOW", 1)], size=8)
    old = types(writer)
    assert found(old.find_constant("ONE")).value_() == 1
    for name in ("ALL", "LOW"):
        with pytest.raises(AmbiguousError, match=f"value of {name}"):
            old.find_constant(name)
    writer.enum("other", [("MINUS", -1)], flag=True)
    new = types(writer)
    assert found(new.find_constant("ALL")).value_() == 0xFFFFFFFF
    with pytest.raises(AmbiguousError, match="value of LOW"):
        new.find_constant("LOW")


def test_fwd_is_no_definition(writer: Writer) -> None:
    pointer = writer.ptr(writer.fwd("hidden"))
    union = writer.ptr(writer.fwd("secret", union=True))
    made = types(writer)
    assert made.find({TypeKind.STRUCT}, "hidden") is None
    assert made.type(pointer).type.kind == TypeKind.STRUCT
    assert made.type(union).type.kind == TypeKind.UNION
    assert not made.type(pointer).type.is_complete()


def test_types_of_one_name_that_agree(writer: Writer) -> None:
    integer = writer.int("unsigned char", 1)
    alias = writer.typedef("__u8", integer)
    writer.typedef("u8", alias)
    writer.typedef("u8", integer)
    inner = [writer.struct("", 1, [("x", kind, 0)]) for kind in (integer, alias)]
    for part in inner:
        writer.struct("same", 9, [("in", part, 0), ("next", writer.ptr(part), 8)])
    made = types(writer)
    assert made.find({TypeKind.TYPEDEF}, "u8") is not None
    assert made.find({TypeKind.STRUCT}, "same") is not None


def test_types_of_one_name_that_differ(writer: Writer) -> None:
    unsigned = writer.int("unsigned int", 4)
    pairs = {
        "member": [[("a", INT, 0)], [("b", INT, 0)]],
        "offset": [[("a", INT, 0)], [("a", INT, 32)]],
        "sign": [[("a", INT, 0)], [("a", unsigned, 0)]],
        "length": [[("a", writer.array(INT, length), 0)] for length in (1, 2)],
        "count": [[("a", INT, 0)], [("a", INT, 0), ("b", INT, 32)]],
        "pointee": [
            [("a", writer.ptr(writer.fwd(name)), 0)] for name in ("one", "other")
        ],
        "function": [
            [("a", writer.ptr(writer.proto(returns, [])), 0)]
            for returns in (INT, unsigned)
        ],
    }
    for name, definitions in pairs.items():
        for members in definitions:
            writer.struct(name, 8, members)
    writer.struct("size", 4, [])
    writer.struct("size", 8, [])
    for part in ("one", "other"):
        inner = writer.struct(part, 4, [("x", INT, 0)])
        writer.struct("part", 4, [("part", inner, 0)])
    writer.enum("enum", [("X", 1)])
    writer.enum("enum", [("X", 2)])
    made = types(writer)
    for name in (*pairs, "size", "part"):
        with pytest.raises(AmbiguousError, match=name):
            made.find({TypeKind.STRUCT}, name)
    with pytest.raises(AmbiguousError, match="constants X"):
        made.find_constant("X")


# What no compiler writes


def header(writer: Writer, **changes: int) -> bytes:
    blob = writer.blob()
    fields = ["magic", "version", "flags", "length", "types", "types_size"]
    fields += ["strings", "strings_size"]
    layout = f"{writer.order}HBBIIIII"
    values = dict(zip(fields, struct.unpack_from(layout, blob), strict=True))
    values.update(changes)
    return struct.pack(layout, *values.values()) + blob[24:]


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": 0x1234},
        {"version": 2},
        {"length": 4},
        {"length": 0xFFFFFFFF},
        {"types": 2},
        {"types": 0xFFFFFFF0},
        {"types_size": 0xFFFFFFFC},
        {"types_size": 12},
        {"strings": 0xFFFFFFFF},
        {"strings_size": 0xFFFFFFFF},
        {"strings_size": 3},
    ],
    ids=str,
)
def test_header_that_lies(writer: Writer, changes: dict[str, int]) -> None:
    with pytest.raises(BtfError):
        Btf(header(writer, **changes))


def test_every_cut(writer: Writer) -> None:
    writer.struct("s", 4, [("x", INT, 0)])
    blob = writer.blob()
    for size in range(len(blob)):
        with pytest.raises(BtfError):
            Btf(blob[:size])


@pytest.mark.parametrize("kind", [20, 33, 127])
def test_kind_not_known(writer: Writer, kind: int) -> None:
    writer.add(kind, "future", 4)
    with pytest.raises(BtfError, match=f"of kind {kind}, which is not known"):
        Btf(writer.blob())


def test_more_members_than_there_were_bits_for(writer: Writer) -> None:
    """The length has 24 bits since Linux 7.1; there were 16."""
    values = [(f"V{number}", number) for number in range(70_000)]
    enum = writer.enum("e", values)
    after = writer.int("long", 8, SIGNED)
    made = types(writer)
    assert len(made.type(enum).enumerators or ()) == 70_000
    assert made.find({TypeKind.INT}, "long") is made.type(after)


def test_declared_types_in_the_spelling_of_either_compiler() -> None:
    for unsigned_long, long in (
        ("long unsigned int", "long int"),
        ("unsigned long", "long"),
    ):
        writer = Writer()
        writer.int(unsigned_long, 8)
        writer.int(long, 8, SIGNED)
        made = types(writer)
        assert not made.parse("unsigned long").is_signed
        assert made.parse("long").is_signed
        assert made.parse("void *").type.kind == TypeKind.VOID


@pytest.mark.parametrize("text", ["no_such_t", "struct no", "int (*)(void)", "", "*"])
def test_declared_type_that_is_none(writer: Writer, text: str) -> None:
    with pytest.raises(MissingError):
        types(writer).parse(text)


def test_condition_on_what_is_ambiguous() -> None:
    """Neither "there" nor "not there" can be taken from that."""
    writer = Writer()
    writer.int("int", 4, SIGNED)
    writer.struct("two", 4, [])
    writer.struct("two", 8, [])
    for condition in ("struct two.x", "!struct two.x", "!struct two"):
        declaration = Declaration("name", "int", (), condition)
        with pytest.raises(AmbiguousError):
            declaration.resolve(types(writer))
    declaration = Declaration("name", "int", (), "!struct three")
    assert declaration.resolve(types(writer)).kind == TypeKind.INT


def circle(writer: Writer, kind: str) -> int:
    """A type that is made of itself."""
    here = writer.next_id
    match kind:
        case "array":
            return writer.array(here, 2)
        case "function":
            return writer.proto(here, [])
        case "typedef":
            return writer.typedef("t", here)
        case _:
            made: int = getattr(writer, kind)(here)
            return made


@pytest.mark.parametrize(
    "kind", ["ptr", "typedef", "const", "volatile", "restrict", "array", "function"]
)
def test_circle(writer: Writer, kind: str) -> None:
    looped = circle(writer, kind)
    made = types(writer)
    with pytest.raises(BtfError, match="has no end"):
        made.type(looped)


def test_circle_is_not_looked_through(writer: Writer) -> None:
    first = writer.typedef("a", writer.next_id + 1)
    writer.const(first)
    with pytest.raises(BtfError, match="has no end"):
        strip(Btf(writer.blob()), first)


def test_member_that_reaches_out(writer: Writer) -> None:
    writer.struct("s", 8, [("in", INT, 32), ("out", INT, 33)])
    made = found(types(writer).find({TypeKind.STRUCT}, "s"))
    assert repr(made.member("in").type)
    with pytest.raises(BtfError, match="reaches out"):
        _ = made.members[1].type


@pytest.mark.parametrize("name", ["named", ""])
def test_structure_within_itself(writer: Writer, name: str) -> None:
    direct = writer.struct("direct", 8, [(name, writer.next_id, 0)])
    first = writer.next_id
    array = writer.array(writer.typedef("t", first + 2), 1)
    assert writer.struct("indirect", 8, [(name, array, 0)], union=True) == first + 2
    made = types(writer)
    for type_id in (direct, first + 2):
        with pytest.raises(BtfError, match="contains itself"):
            made.type(type_id)


def test_comparison_that_would_never_end(writer: Writer) -> None:
    """Structures of pairs of structures of pairs...: all pairs are different types."""
    left, right = (writer.struct("", 4, [("x", INT, 0)]) for _ in range(2))
    for _ in range(60):
        left, right = (
            writer.struct("", 4, [("l", left, 0), ("r", right, 0), ("n", side, 0)])
            for side in (left, right)
        )
    with pytest.raises(BtfError, match="has no end"):
        agree(Btf(writer.blob()), [left, right])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: w.ptr(99), "no type 99"),
        (lambda w: w.array(99, 1), "no type 99"),
        (lambda w: w.int("i", 4, bits=33), "33 bits"),
        (lambda w: w.int("i", 0), "0 bytes"),
        (lambda w: w.int("i", 17), "17 bytes"),
        (lambda w: w.struct("s", 4, [("x", 1, 33)]), "outside"),
        (lambda w: w.enum("e", [("A", 1)], size=3), "3 bytes"),
        (lambda w: w.ptr(w.decl_tag("d", 1)), "DECL_TAG"),
        (lambda w: w.ptr(w.func("f", 1)), "FUNC"),
        (lambda w: w.typedef("t", w.datasec("d", [])), "DATASEC"),
    ],
)
def test_type_that_lies(writer: Writer, make: object, words: str) -> None:
    assert callable(make)
    lying = make(writer)
    made = types(writer)
    with pytest.raises(BtfError, match=words):
        made.type(lying)


def test_name_out_of_the_strings(writer: Writer) -> None:
    named = writer.next_id
    writer.types += writer.words(9999, 4 << 24, 8)
    made = types(writer)
    for look in (lambda: made.type(named), lambda: made.find({TypeKind.STRUCT}, "s")):
        with pytest.raises(BtfError, match="no string at 9999"):
            look()


def test_array_larger_than_memory(writer: Writer) -> None:
    array = writer.int("char", 1, SIGNED)
    for _ in range(4):
        array = writer.array(array, 0xFFFFFFFF)
    compound = writer.struct("s", 8, [("x", array, 0)])
    made = types(writer).type(compound)
    with pytest.raises((BtfError, OverflowError)):
        _ = made.members[0].type


def rich_blob(order: str) -> bytes:
    writer = Writer(order)
    integer = writer.int("int", 4, SIGNED)
    alias = writer.typedef("t", writer.const(integer))
    pointer = writer.ptr(writer.fwd("f"))
    union = writer.struct("u", 8, [("p", pointer, 0), ("i", alias, 0)], union=True)
    fields = [("b", integer, 5 << 24), ("u", union, 64)]
    compound = writer.struct(
        "s", 32, [*fields, ("a", writer.array(integer, 4), 128)], flag=True
    )
    writer.enum("e", [("A", 1), ("B", -2)], flag=True)
    writer.enum64("w", [("C", 1 << 33)])
    prototype = writer.proto(VOID, [("s", writer.ptr(compound)), ("", 0)])
    writer.func("call", prototype)
    writer.datasec(".data..percpu", [(writer.var("v", compound), 0, 32)])
    writer.float("double", 8)
    writer.ptr(writer.type_tag("rcu", compound))
    writer.decl_tag("d", compound, 0)
    return writer.blob()


def look_at_all(made: BtfTypes) -> None:
    """Make every type and look at every part of it, as a curious user would."""
    for name in ("s", "u", "t", "e", "w", "int", "double"):
        with contextlib.suppress(BtfError, LookupError):
            made.find(ALL, name)
    looks: list[Callable[[str], object]]
    looks = [made.find_constant, made.find_function, made.find_variable]
    for look in looks:
        for name in ("A", "B", "C", "call", "v"):
            with contextlib.suppress(BtfError, LookupError):
                look(name)
    for type_id in range(made.btf.end_id):
        try:
            kind = made.btf.kind(type_id)
            if kind in (BtfKind.FUNC, BtfKind.VAR, BtfKind.DATASEC, BtfKind.DECL_TAG):
                continue
            it = made.type(type_id)
            if it.kind in (TypeKind.STRUCT, TypeKind.UNION) and it.is_complete():
                for member in it.members:
                    end = member.bit_offset + (
                        member.bit_field_size
                        or (8 * sizeof(member.type) if member.type.is_complete() else 0)
                    )
                    assert end <= it.size * 8
            with contextlib.suppress(RecursionError):  # drgn's own limit
                repr(it)
        except (BtfError, OverflowError):
            pass


@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
def test_flipped_bits(order: str) -> None:
    """Whatever is flipped: an answer or an error, and soon."""
    blob = rich_blob(order)
    look_at_all(BtfTypes(program(order), Btf(blob)))
    chance = random.Random(20)
    for _ in range(3000):
        damaged = bytearray(blob)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(blob))] ^= 1 << chance.randrange(8)
        try:
            btf = Btf(bytes(damaged))
        except BtfError:
            continue
        look_at_all(BtfTypes(program(order), btf))
