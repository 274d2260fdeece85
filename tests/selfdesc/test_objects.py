# SPDX-License-Identifier: LGPL-2.1-or-later

"""Variables found by BTF, symbols and declarations, held against DWARF."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drgn
import pytest
from drgn import FindObjectFlags, Program, Symbol, Type, TypeKind

import msatools
from msatools.errors import AmbiguousError, UntypedError
from msatools.selfdesc import tables as rooms
from msatools.selfdesc import types as declarations
from msatools.selfdesc.btf import BtfKind
from msatools.selfdesc.load import finders_of
from msatools.selfdesc.types import (
    Declaration,
    Declarations,
    Objects,
)
from tests.selfdesc.conftest import Pair

HELPERS = Path(drgn.__file__).parent
SOURCES = [
    *(HELPERS / "helpers" / "linux").glob("*.py"),
    *(HELPERS / "helpers" / "common").glob("*.py"),
    *(HELPERS / "commands").rglob("*.py"),
    *Path(msatools.__file__).parent.rglob("*.py"),
]


def agrees(declared: Type, actual: Type) -> bool:
    """Tell whether a type is what was declared, but for what makes no difference.

    That is "const", a length that is left open, or another name of the same.
    """
    while actual.kind == TypeKind.TYPEDEF and declared.kind != TypeKind.TYPEDEF:
        actual = actual.type
    if declared.kind != actual.kind:
        return False
    if declared.kind == TypeKind.ARRAY:
        return declared.length in (None, actual.length) and agrees(
            declared.type, actual.type
        )
    if declared.kind == TypeKind.POINTER:
        return agrees(declared.type, actual.type)
    if declared.kind in (TypeKind.STRUCT, TypeKind.UNION, TypeKind.ENUM):
        if not declared.tag:
            return [m.name for m in declared.members] == [
                m.name for m in actual.members
            ]
        return bool(declared.tag == actual.tag)
    if declared.kind == TypeKind.INT:
        return (declared.size, declared.is_signed) == (actual.size, actual.is_signed)
    if declared.kind == TypeKind.TYPEDEF:
        return bool(declared.name == actual.name)
    return True


@pytest.mark.parametrize("name", declarations.TABLE)
def test_declaration_equals_dwarf(pair: Pair, name: str) -> None:
    """The right place and type, or refused, or not of this kernel at all."""
    try:
        expected = pair.dwarf.variable(name)
    except LookupError:
        expected = None
    try:
        found = pair.btf.variable(name)
    except LookupError:
        found = None
    if found is None:
        is_known = expected is not None and expected.address_ is not None
        # DWARF returns one of several that have the name.
        assert not is_known or len(pair.btf.symbols(name)) > 1
        return
    assert expected is not None, "declared, but DWARF has no such variable"
    assert found.address_ == expected.address_
    assert agrees(found.type_, expected.type_), (found.type_, expected.type_)
    if found.type_.kind != TypeKind.ARRAY or found.type_.length is not None:
        assert drgn.sizeof(found) == drgn.sizeof(expected)


def test_most_declarations_are_of_use(pair: Pair) -> None:
    """Few lines are for other kernels."""
    assert sum(is_found(pair.btf, name) for name in declarations.TABLE) > 0.6 * len(
        declarations.TABLE
    )


def is_found(prog: Program, name: str) -> bool:
    try:
        prog.variable(name)
    except LookupError:
        return False
    return True


def test_per_cpu_variables(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from BTF where it has them, and from the table elsewhere."""
    types = finders_of(pair.btf).types
    has_them = any(types.btf.of_kind(BtfKind.DATASEC))
    assert has_them == (pair.run.name != "memory-5.10")
    for name in ("runqueues", "vm_event_states"):
        expected = pair.dwarf.variable(name)
        assert (types.find_variable(name) is not None) == has_them
        for table in (declarations.TABLE, {}) if has_them else (declarations.TABLE,):
            monkeypatch.setattr(declarations, "TABLE", table)
            found = find(pair, name)
            assert found is not None
            assert found.address_ == expected.address_
            assert drgn.sizeof(found) == drgn.sizeof(expected)


def asked_for(source: Path) -> Iterator[str]:
    """The names that a module asks a program for, as far as they are literal."""
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.Subscript(value=asked, slice=ast.Constant(value=str(name))):
                pass
            case ast.Call(
                func=ast.Attribute(value=asked, attr="variable" | "object"),
                args=[ast.Constant(value=str(name))],
            ):
                pass
            case _:
                continue
        match asked:
            case ast.Name(id="prog") | ast.Attribute(attr="prog" | "prog_" | "_prog"):
                yield name


def test_every_name_in_use_is_declared(pair: Pair) -> None:
    """A kernel has it and we know what it is, or it does not have it: nothing else."""
    names = {name for source in SOURCES for name in asked_for(source)}
    assert len(names) > 100
    assert {"init_task", "slab_caches", "PAGE_SIZE", "mem_section"} <= names
    refused = {}
    for name in names:
        try:
            pair.btf[name]
        except KeyError:
            continue  # the kernel has none
        except LookupError as error:
            refused[name] = str(error)
    assert set(refused) <= REFUSED, refused


# What changed its type in 5.12, which only BTF of per-CPU variables says; and what was
# an array up to 6.12 and is a pointer now, which nothing says.
REFUSED = {"hardirq_stack_ptr", "stack_pools"}


# What must not be guessed


def declare(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(declarations, "TABLE", Declarations(line))


def fresh(pair: Pair) -> Objects:
    finders = finders_of(pair.btf)
    return Objects(pair.btf, finders.types, finders.symbols)


def find(pair: Pair, name: str) -> drgn.Object | None:
    return fresh(pair).find(name, FindObjectFlags.ANY)


REFUSED_TYPES = {
    "": ("loops_per_jiffy", "nothing says the type of loops_per_jiffy"),
    "struct no_such | init_task": ("init_task", "no_such"),
    "struct task_struct | max_pfn": ("max_pfn", r"max_pfn has \d+ bytes, .* it \d"),
    "int [NO_SUCH] | max_pfn": ("max_pfn", "NO_SUCH"),
    "struct pglist_data *[struct kmem_cache.none] | node_data": (
        *("node_data", "no member 'none'"),
    ),
    "int [struct kmem_cache.size] | max_pfn": ("max_pfn", "no array of a known length"),
    "int | max_low_pfn | !schedule()": ("max_low_pfn", "not so that !schedule"),
}
"""Declaration -> a variable, and why it is refused."""


@pytest.mark.parametrize("line", REFUSED_TYPES)
def test_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    name, why = REFUSED_TYPES[line]
    if line:
        declare(monkeypatch, line)
    with pytest.raises(UntypedError, match=why):
        find(pair, name)


def test_place_where_the_type_cannot_be(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbol's place that was damaged, as the tables of symbols may be."""
    objects = fresh(pair)
    symbols = objects.symbols

    def shifted(*words: Any) -> list[Symbol]:
        return [
            Symbol(s.name, s.address + 1, s.size, s.binding, s.kind)
            for s in symbols(*words)
        ]

    monkeypatch.setattr(objects, "symbols", shifted)
    with pytest.raises(UntypedError, match="max_pfn lies at 0x"):
        objects.find("max_pfn", FindObjectFlags.VARIABLE)


def test_ambiguous_symbol(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = finders_of(pair.btf).symbols(pair.btf, None, None, False)
    names = [symbol.name for symbol in symbols if symbol.kind == drgn.SymbolKind.OBJECT]
    twice = next(name for name in names if names.count(name) > 1)
    with pytest.raises(AmbiguousError, match="symbols"):
        find(pair, twice)


FIRST = """
int | max_pfn | struct no_such
int | max_pfn | struct page.no_such
int | max_pfn | NO_SUCH
int | max_pfn | !struct page.flags
unsigned long | max_pfn | struct page.flags
char | max_pfn
"""
MADE_TYPES = {
    FIRST: ("max_pfn", "unsigned long"),
    "unsigned long [3] | avenrun": ("avenrun", "unsigned long [3]"),
    # Nothing but zeros leaves the array without a length.
    "unsigned long [*] | empty_zero_page": ("empty_zero_page", "unsigned long []"),
    "long | max_pfn | schedule()": ("max_pfn", "long"),
    "int | nr_threads | !no_such_function()": ("nr_threads", "int"),
}
"""Declarations, of which the first that holds is taken -> a variable, and its type."""


@pytest.mark.parametrize("lines", MADE_TYPES)
def test_types_of_lines(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    name, type_name = MADE_TYPES[lines]
    declare(monkeypatch, lines)
    found = find(pair, name)
    assert found is not None
    assert found.type_.type_name() == type_name


COUNTED = ("taint_flags", "node_data", "preferred_node_policy", "hstates")
COUNTED += ("cpu_bit_bitmap", "x86_cap_flags", "x86_bug_flags")
"""Arrays whose length is counted, or that of a member, or a multiple of one."""


@pytest.mark.parametrize("name", COUNTED)
def test_lengths(pair: Pair, name: str) -> None:
    """Features without a name are zeros, at the end of the tables, too."""
    assert find_length(pair, name) == len(pair.dwarf[name])


SWAP_ARRAYS = ("swap_info", "nr_swapper_spaces", "swap_cgroup_ctrl", "nr_zswap_trees")


def test_length_that_rooms_and_functions_say(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MAX_SWAPFILES depends on the configuration; no array is longer than its room."""
    there = [name for name in SWAP_ARRAYS if name in pair.dwarf]
    lengths = {len(pair.dwarf[name]) for name in there}
    assert len(there) >= 2
    assert {find_length(pair, name) for name in there} == lengths
    # With less to go by no length is made up.
    for name, less in (("lost_symbols", lambda _: 1), ("room_of", lambda *_: 0)):
        with monkeypatch.context() as patch:
            patch.setattr(rooms, name, less)
            assert find_length(pair, "swap_info") is None


def find_length(pair: Pair, name: str) -> int | None:
    found = find(pair, name)
    assert found is not None
    length: int | None = found.type_.length
    return length


def test_symbol_of_no_kernel(pair: Pair) -> None:
    assert find(pair, "no_such_variable") is None
    with pytest.raises(KeyError):
        pair.btf["no_such_variable"]


def test_small_numbers_are_no_addresses(pair: Pair) -> None:
    """Per-CPU variables have symbols from zero on, which no pointer means."""
    for number in (0, 8, 0x10000):
        with pytest.raises(LookupError):
            pair.btf.symbol(number)
    assert (
        pair.btf.symbol("runqueues").address == pair.dwarf.symbol("runqueues").address
    )


def test_declarations() -> None:
    declared = Declarations(
        "# words\n\nstruct x * const [4][N] | name | struct y.z\nint | name\n"
    )
    assert declared == {
        "name": (
            Declaration("name", "struct x * const", ("4", "N"), "struct y.z"),
            Declaration("name", "int"),
        )
    }


@pytest.mark.parametrize("line", ["int x", "| x", "int |", "int | x | y | z"])
def test_line_that_is_none(line: str) -> None:
    with pytest.raises(ValueError, match="not a declaration"):
        Declarations(line)
