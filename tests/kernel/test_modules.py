# SPDX-License-Identifier: LGPL-2.1-or-later

"""Modules found by address are those of drgn's walk of all modules."""

import drgn
import pytest
from drgn.helpers.linux.kallsyms import module_kallsyms
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.module import module_address_regions

from msatools.errors import MissingError
from msatools.kernel import code
from msatools.kernel.code import CodeModules
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.load import LoadedModule
from tests.support.dumps import IDLE, open_dump
from tests.support.overlay import put

NEWEST = "memory-6.12"


def by_drgn(prog: drgn.Program) -> dict[str, drgn.Object]:
    loaded = list_for_each_entry("struct module", prog["modules"].address_of_(), "list")
    return {module.name.string_().decode(): module for module in loaded}


@pytest.fixture(scope="module", params=IDLE)
def prog(request: pytest.FixtureRequest) -> drgn.Program:
    return open_dump(request.param, "btf")


@pytest.mark.parametrize("walk", ["tree", "list"])
def test_every_module_is_found(
    prog: drgn.Program, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are found by the kernel's tree of modules, or without one by its list."""

    def none(_: Reader) -> None:
        raise MissingError("there is none here")

    if walk == "list":
        monkeypatch.setattr(code, "_Tree", none)
    losses = LossLog()
    found = CodeModules(Reader(prog), losses)
    expected = by_drgn(prog)
    assert expected
    for name, module in expected.items():
        regions = [
            (start, start + size)
            for start, size in module_address_regions(module)
            if size
        ]
        for start, end in regions:
            for address in (start, end - 1):
                module_there = found.find(address)
                assert module_there == LoadedModule(
                    module.value_(), name, tuple(regions)
                )
            assert found.find(end + (1 << 30)) is None
    assert found.find(0) is None
    assert not losses.notes


def test_symbols_are_drgns(prog: drgn.Program) -> None:
    reader = Reader(prog)
    found = CodeModules(reader, LossLog())
    for name, module in by_drgn(prog).items():
        start, _ = module_address_regions(module)[0]
        ours = found.find(start)
        assert ours
        symbols = found.symbols(ours)
        expected = {
            s for s in map(facts, module_kallsyms(module)) if ours.contains(s[1])
        }
        assert set(map(facts, symbols(prog, None, None, False))) == expected, name
        assert expected


def facts(symbol: drgn.Symbol) -> tuple[object, ...]:
    return symbol.name, symbol.address, symbol.size, symbol.kind, symbol.binding


def test_walk_of_a_damaged_tree_ends() -> None:
    """The root node is its own child."""
    prog = open_dump(NEWEST, "btf")
    node = prog.type("struct rb_node")
    for which in (0, 1):
        root = prog["mod_tree"].root.tree[which].rb_node.value_()
        for member in ("rb_left", "rb_right"):
            put(prog, root + drgn.offsetof(node, member), root.to_bytes(8, "little"))
    losses = LossLog()
    assert CodeModules(Reader(prog), losses).find(1) is None
    assert losses.lost == {"modules_unreadable": 1}
