# SPDX-License-Identifier: LGPL-2.1-or-later

"""The types that kernels carry, held against their DWARF."""

from typing import Any

import pytest
from drgn import Program, Type, TypeKind

from msatools.errors import AmbiguousError
from msatools.selfdesc.btf import BtfKind
from msatools.selfdesc.load import finders_of
from tests.selfdesc.conftest import Pair

KINDS = {
    BtfKind.STRUCT: (TypeKind.STRUCT, "struct "),
    BtfKind.UNION: (TypeKind.UNION, "union "),
    BtfKind.ENUM: (TypeKind.ENUM, "enum "),
    BtfKind.ENUM64: (TypeKind.ENUM, "enum "),
    BtfKind.TYPEDEF: (TypeKind.TYPEDEF, ""),
}
# pahole writes array[a][b] as array[a * b]: no member of these may be indexed twice.
FEW_FLATTENED = 40
# Types of drivers and the like that have a name in common, nothing that we use.
FEW_AMBIGUOUS = 30
# Enumerations of 5.10 with a constant that is negative or has its highest bit set.
FEW_UNTOLD = 150
POINTERS = 3


def shape(it: Type, pointers: int = 0) -> Any:
    """A type in comparable form; by name where it has one, like a declaration."""
    match it.kind:
        case TypeKind.STRUCT | TypeKind.UNION:
            return it.kind, it.tag or layout(it)
        case TypeKind.ENUM:
            return it.kind, it.tag or enumerators(it)
        case TypeKind.TYPEDEF:
            return it.kind, it.name
        case TypeKind.INT:
            return it.kind, it.name, it.size, it.is_signed
        case TypeKind.BOOL | TypeKind.FLOAT:
            return it.kind, it.name, it.size
        case TypeKind.ARRAY:
            return it.kind, *dimensions(it)
        case TypeKind.POINTER if pointers < POINTERS:
            return it.kind, it.type.qualifiers, shape(it.type, pointers + 1)
        case TypeKind.FUNCTION if pointers < POINTERS:
            parameters = [shape(p.type, pointers + 1) for p in it.parameters]
            return it.kind, shape(it.type, pointers + 1), parameters, it.is_variadic
        case _:
            return it.kind


def dimensions(it: Type) -> tuple[int, Any]:
    """How many elements, of what: arrays of arrays as the one that pahole writes."""
    count = 1
    while it.kind == TypeKind.ARRAY:
        # Neither a "[0]" nor a "[]" holds anything, and BTF writes them the same.
        count *= it.length or 0
        it = it.type
    return count, shape(it)


def layout(it: Type) -> Any:
    if not it.is_complete():
        return None
    members = it.members or ()
    return it.size, [
        (m.name, m.bit_offset, m.bit_field_size, shape(m.type)) for m in members
    ]


def enumerators(it: Type) -> Any:
    return it.is_complete() and (it.type.size, it.type.is_signed, values(it))


def values(it: Type) -> list[tuple[str, int]]:
    return [(name, value) for name, value in it.enumerators or ()]


def nests(it: Type) -> bool:
    """Whether a type has an array of arrays in it."""
    if it.kind == TypeKind.ARRAY:
        return it.type.kind == TypeKind.ARRAY or nests(it.type)
    if it.kind == TypeKind.TYPEDEF and it.type.kind in (
        TypeKind.STRUCT,
        TypeKind.UNION,
    ):
        return not it.type.tag and nests(it.type)
    if it.kind in (TypeKind.STRUCT, TypeKind.UNION) and it.is_complete():
        return any(
            nests(m.type)
            for m in it.members
            if m.type.kind == TypeKind.ARRAY
            or (m.type.kind in (TypeKind.STRUCT, TypeKind.UNION) and not m.type.tag)
        )
    return False


def find(prog: Program, name: str) -> Type | None:
    try:
        found: Type = prog.type(name)
    except LookupError:
        return None
    return found


def test_named_types_equal_dwarf(pair: Pair) -> None:
    """All of them, member by member."""
    types = finders_of(pair.btf).types
    compared, ambiguous, flattened, untold = 0, set(), set(), set()
    for type_id in types.btf.of_kind(*KINDS):
        name = types.btf.name(type_id)
        kind, prefix = KINDS[types.btf.kind(type_id)]
        if not name or name == "(anon)":
            continue
        expected = find(pair.dwarf, prefix + name)
        try:
            found = types.find({kind}, name)
        except AmbiguousError:
            ambiguous.add(prefix + name)
            continue
        assert found is not None
        if expected is None:
            continue
        compared += 1
        if kind == TypeKind.TYPEDEF:
            assert shape(found.type) == shape(expected.type), name
        elif kind == TypeKind.ENUM:
            if all(types.btf.is_value_told(type_id, v) for _, v in values(found)):
                assert enumerators(found) == enumerators(expected), name
            else:
                assert pair.run.name == "memory-5.10"
                untold.add(name)
        else:
            assert layout(found) == layout(expected), name
        if nests(expected):
            flattened.add(prefix + name)
    assert compared > 9000
    assert 0 < len(flattened) <= FEW_FLATTENED
    assert 0 < len(ambiguous) <= FEW_AMBIGUOUS
    assert len(untold) <= FEW_UNTOLD
    assert "struct irq_info" in ambiguous
    assert "struct mem_cgroup_per_node" in flattened


def test_ambiguous_name_is_refused(pair: Pair) -> None:
    with pytest.raises(AmbiguousError, match="irq_info"):
        pair.btf.type("struct irq_info")


def test_name_that_is_not_there(pair: Pair) -> None:
    for name in (
        "struct no_such",
        "union page",
        "enum page",
        "no_such_t",
    ):
        with pytest.raises(LookupError, match="could not find"):
            pair.btf.type(name)


def test_constants_equal_dwarf(pair: Pair) -> None:
    types = finders_of(pair.btf).types
    compared = 0
    for type_id in types.btf.of_kind(BtfKind.ENUM, BtfKind.ENUM64):
        for name, _ in types.btf.enumerators(type_id):
            try:
                expected = pair.dwarf.constant(name).value_()
                found = pair.btf.constant(name).value_()
            except LookupError:
                continue
            compared += 1
            assert found == expected, name
    assert compared > 10_000


def test_functions_equal_dwarf(pair: Pair) -> None:
    compared = 0
    for name in (
        "vfs_read",
        "kernel_wait4",
        "schedule",
        "_printk",
        "printk",
        "vmemmap_populate",
    ):
        try:
            expected = pair.dwarf.function(name)
        except LookupError:
            continue
        found = pair.btf.function(name)
        compared += 1
        assert found.address_ == expected.address_
        if name != "vmemmap_populate":
            assert shape(found.type_) == shape(expected.type_)
    assert compared >= 4
