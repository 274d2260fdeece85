# SPDX-License-Identifier: LGPL-2.1-or-later

"""The parts in C find the same as Python and drgn."""

import shutil
from typing import Any

import numpy as np
import pytest
from drgn import Program, Symbol

from fixtures.demo import DEMOS
from msatools import native
from msatools.selfdesc import btf
from msatools.selfdesc.kallsyms import load_symbols
from msatools.selfdesc.load import finders_of, load_btf
from msatools.selfdesc.tables import (
    NAME_LEN,
    NONE,
    NoNameError,
    index_names,
    library,
)


def fields(symbol: Symbol) -> tuple[Any, ...]:
    return symbol.name, symbol.address, symbol.size, symbol.binding, symbol.kind


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the parts in C off."""
    monkeypatch.setenv(native.SWITCH, "no")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_it_is_built() -> None:
    assert library() is not None


def test_it_can_be_turned_off(replaced: None) -> None:
    assert library() is None


@pytest.fixture(scope="module", params=DEMOS)
def prog(request: pytest.FixtureRequest) -> Program:
    prog = Program()
    prog.set_core_dump(DEMOS[request.param].core)
    load_btf(prog, modules=False)
    return prog


def test_symbols_are_those_of_drgn(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_symbols(prog)
    monkeypatch.setenv(native.SWITCH, "no")
    expected = load_symbols(prog)
    everything = [fields(it) for it in expected(prog, None, None, False)]
    ours = [fields(it) for it in found(prog, None, None, False)]
    assert [unsized(it) for it in ours] == [unsized(it) for it in everything]
    assert len(everything) > 100_000
    # drgn gives a size to the last symbol at an address alone.
    sizes = {address: size for _, address, size, *_ in everything}
    assert all(size == sizes[address] for _, address, size, *_ in ours)
    for name in {name for name, *_ in everything[::50]} | {"_stext", "no such", ""}:
        by_name = [unsized(fields(it)) for it in expected(prog, name, None, False)]
        assert sorted(
            unsized(fields(it)) for it in found(prog, name, None, False)
        ) == sorted(by_name)
    for _, address, size, *_ in everything[::50]:
        for place in (address, address + size // 2, address + size, address - 1):
            if not 0 <= place < 1 << 64:
                continue
            at_place = [fields(it) for it in found(prog, None, place, False)]
            last = [fields(it) for it in expected(prog, None, place, False)]
            assert {*last} <= {*at_place}, hex(place)
            assert bool(last) == bool(at_place)
            assert len({it[1] for it in at_place}) <= 1


def unsized(symbol: tuple[Any, ...]) -> tuple[Any, ...]:
    name, address, _, *rest = symbol
    return name, address, *rest


def test_function_before_a_name_of_the_linker(prog: Program) -> None:
    """A function has its own name, and not that of the section that it begins."""
    symbols = finders_of(prog).symbols
    several = 0
    for border in ("__sched_text_start", "__entry_text_start"):
        (symbol,) = symbols(prog, border, None, False)
        names = [it.name for it in symbols(prog, None, symbol.address, False)]
        (first,) = symbols(prog, None, symbol.address, True)
        assert first.name == names[0]
        assert border in names
        several += len(names) > 1
        assert len(names) == 1 or names[0] != border
    assert several


def test_types_are_those_of_python(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = finders_of(prog).types.btf._words
    found = btf._walk(words)
    monkeypatch.setenv(native.SWITCH, "no")
    expected = btf._walk(words)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_names_are_those_of_python(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = finders_of(prog).types.btf
    names = blob._types.names
    starts = np.where(names != 0, names, NONE).astype(np.uint32)
    found = index_names(blob._strings, starts)
    monkeypatch.setenv(native.SWITCH, "no")
    expected = index_names(blob._strings, starts)
    known = {blob.name(row + 1) for row in range(0, len(names), 7)}
    for name in known | {"", "no such type", "page\0", "\udc80"}:
        assert found(name) == expected(name)


@pytest.mark.parametrize("in_c", [True, False])
def test_many_rows_of_a_name(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "yes" if in_c else "no")
    find = index_names(b"a\0b\0", np.array([0, 2] * 1000, np.uint32))
    assert find("b") == [*range(1, 2000, 2)]
    assert find("a") == [*range(0, 2000, 2)]


@pytest.mark.parametrize("in_c", [True, False])
def test_name_beyond_the_text(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "yes" if in_c else "no")
    for start in (3, 4, NONE - 1):
        with pytest.raises(NoNameError) as raised:
            index_names(b"ab\0", np.array([0, NONE, start], np.uint32))
        assert raised.value.args == (2,)
    assert index_names(b"ab\0", np.array([0, NONE, 1], np.uint32))("b") == [2]
    assert index_names(b"", np.array([], np.uint32))("b") == []


@pytest.mark.parametrize("in_c", [True, False])
def test_names_that_are_too_long(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many may be parts of the same few MiB."""
    monkeypatch.setenv(native.SWITCH, "yes" if in_c else "no")
    longest = "a" * (NAME_LEN - 1)
    text = b"b\0" + b"a" * NAME_LEN + b"\0"
    find = index_names(text, np.array([0, 2, 3], np.uint32))
    assert (find("b"), find("a" + longest), find(longest)) == ([0], [], [2])
