# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of kernel addresses are the same with and without debug info."""

import drgn
import pytest
from drgn import Program, SymbolKind

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory import content_hints
from msatools.memory.content_hints import SymbolNames
from msatools.program import TargetSpec, open_target
from msatools.selfdesc.kallsyms import NoSymbolsError


@pytest.fixture(scope="module")
def with_btf(run: lab.Run) -> SymbolNames:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    return SymbolNames(Reader(prog), LossLog())


@pytest.fixture(scope="module")
def with_dwarf(prog: Program) -> SymbolNames:
    return SymbolNames(Reader(prog), LossLog())


@pytest.fixture(scope="module")
def variables(prog: Program) -> list[drgn.Symbol]:
    """Variables of the kernel image with a size, by address."""
    first, end = (prog.symbol(name).address for name in ("_stext", "_end"))
    found = (
        symbol
        for symbol in prog.symbols()
        if symbol.kind == SymbolKind.OBJECT
        and symbol.size
        and first <= symbol.address < end
    )
    return sorted(found, key=lambda symbol: symbol.address)


def name(names: SymbolNames, address: int) -> str | None:
    found = names.name(address)
    return None if found is None else found.name


def test_names_are_the_same(
    variables: list[drgn.Symbol], with_btf: SymbolNames, with_dwarf: SymbolNames
) -> None:
    """Names agree at the start, in the middle and at the end of variables."""
    assert len(variables) > 10_000
    named = 0
    for symbol in variables[::20]:
        for offset in {0, symbol.size // 2, symbol.size - 1}:
            found = name(with_btf, symbol.address + offset)
            assert found == name(with_dwarf, symbol.address + offset)
            named += found is not None
    assert named > 1_000


def test_string_constants_have_no_name(
    prog: Program, with_btf: SymbolNames, with_dwarf: SymbolNames
) -> None:
    """String constants have no symbols and are not named after earlier variables."""
    for address in (0, 8, prog.symbol("_stext").address - 1, (1 << 64) - 1):
        assert with_btf.name(address) is None
    text = prog["linux_proc_banner"].address_of_()
    strings = prog["migratetype_names"][0].value_()
    assert name(with_btf, text.value_()) == "linux_proc_banner"
    assert name(with_btf, strings) is None
    assert name(with_dwarf, strings) is None


def test_end_of_section_symbols_name_no_later_address(
    prog: Program, with_btf: SymbolNames, with_dwarf: SymbolNames
) -> None:
    end = prog.symbol("__stop___kcrctab_gpl").address
    for names in (with_btf, with_dwarf):
        assert name(names, end) == "__stop___kcrctab_gpl"
        assert name(names, end + 8) is None
        # The end of the text can be at the same address.
        start = prog.symbol("__start_rodata").address
        assert name(names, start) == "__start_rodata"


def test_kernel_without_kallsyms(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symbols of the debug info are used instead."""

    def load(_: Program) -> None:
        raise NoSymbolsError("lost in this test")

    monkeypatch.setattr(content_hints, "load_symbols", load)
    names = SymbolNames(Reader(prog), LossLog())
    symbol = prog.symbol("rcu_state")
    assert name(names, symbol.address + 8) == "rcu_state+0x8"
    section = prog.symbol("__start_rodata").address
    assert name(names, section) == "__start_rodata"
