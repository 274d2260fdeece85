# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables of symbols with lost pages: what is left, and nothing else."""

from dataclasses import replace

import pytest

from msatools.selfdesc.kallsyms import PAGE, NoSymbolsError, load_symbols
from msatools.selfdesc.tables import lost_symbols
from tests.selfdesc.test_kallsyms import KERNELS, entries, made, names_of
from tests.support.overlay import lose, lose_page

from .kallsyms_encode import Kernel

LARGE = Kernel(order="last", long=True)
LARGE.symbols = sorted(
    [
        *LARGE.symbols,
        *((LARGE.text + 0x700000 + 16 * at, f"d{'x' * 40}_{at}") for at in range(9000)),
    ]
)


def table_pages(kernel: Kernel) -> range:
    start = min(kernel.place.values()) & -PAGE
    return range(start, max(kernel.place.values()) + PAGE, PAGE)


def middle_of(kernel: Kernel, table: str) -> int:
    """Return a page amid a table of LARGE."""
    after = {"names": 30, "offsets": 5}[table]
    return (kernel.place[table] & -PAGE) + after * PAGE


# Those whose markers have 8 bytes do not name their tables in VMCOREINFO.
NAMED = {name: kernel for name, kernel in KERNELS.items() if kernel.marker_bytes == 4}


@pytest.mark.parametrize("kernel", NAMED.values(), ids=NAMED)
def test_a_lost_page_takes_only_what_lay_on_it(kernel: Kernel) -> None:
    kernel = replace(kernel)
    made(kernel)
    expected = set(names_of(kernel))
    left = []
    for page in table_pages(kernel):
        prog = made(kernel, named=True)
        lose(prog, page, PAGE)
        try:
            index = load_symbols(prog)
        except NoSymbolsError:
            continue
        found = entries(index, prog)
        assert set(found) <= expected
        assert len(found) + lost_symbols(index) == len(kernel.symbols)
        left.append(len(found))
    assert any(0 < count < len(kernel.symbols) for count in left)


def clear(kernel: Kernel, data: bytearray) -> None:
    """Make a page amid the names zeros."""
    page = middle_of(LARGE, "names") - min(LARGE.place.values())
    data[page : page + PAGE] = bytes(PAGE)


@pytest.mark.parametrize("what", ["names", "offsets", "zeros"])
def test_most_symbols_are_left(what: str) -> None:
    made(LARGE)
    prog = made(LARGE, clear if what == "zeros" else None, named=True)
    if what != "zeros":
        lose(prog, middle_of(LARGE, what), PAGE)
    index = load_symbols(prog)
    # A page has 1,024 offsets, or some 90 names, and the rest of 256 behind them.
    most = 1024 if what == "offsets" else PAGE // 40 + 256
    assert 0 < lost_symbols(index) <= most
    assert set(entries(index, prog)) < set(names_of(LARGE))


def test_no_address_is_said_to_be_in_a_symbol_before_a_lost_one() -> None:
    made(LARGE)
    whole = made(LARGE, named=True)
    sound = load_symbols(whole)
    for table in ("names", "offsets"):
        prog = made(LARGE, named=True)
        lose(prog, middle_of(LARGE, table), PAGE)
        index = load_symbols(prog)
        named = 0
        for address, _ in LARGE.symbols:
            inside = address + 4
            found = [symbol.name for symbol in index(prog, None, inside, False)]
            real = [symbol.name for symbol in sound(whole, None, inside, False)]
            assert found in ([], real)
            named += bool(found)
        assert named > len(LARGE.symbols) // 2


def test_lost_markers_are_made_anew() -> None:
    made(LARGE)

    def forget(kernel: Kernel, data: bytearray) -> None:
        start = LARGE.place["markers"] - min(LARGE.place.values())
        data[start + 8 : start + 16] = bytes(8)

    prog = made(LARGE, forget, named=True)
    index = load_symbols(prog)
    assert lost_symbols(index) == 0
    assert entries(index, prog) == names_of(LARGE)


def test_lost_markers_and_names() -> None:
    made(LARGE)
    prog = made(LARGE, named=True)
    lose(prog, LARGE.place["names"] & -PAGE, 2 * PAGE)
    lose(prog, LARGE.place["markers"] & -PAGE, PAGE)
    with pytest.raises(NoSymbolsError, match="lost"):
        load_symbols(prog)


def test_damaged_names_take_those_up_to_the_next_marker() -> None:
    made(LARGE)

    def damage(kernel: Kernel, data: bytearray) -> None:
        start = LARGE.place["names"] - min(LARGE.place.values())
        data[start + 20_000] ^= 0x10

    prog = made(LARGE, damage, named=True)
    index = load_symbols(prog)
    expected = set(names_of(LARGE))
    # A changed letter of a name is not seen; a changed length is.
    assert lost_symbols(index) in (0, 256)
    assert len(set(entries(index, prog)) - expected) <= 1


def test_lost_offsets_of_a_symbol_that_is_needed() -> None:
    made(LARGE)
    row = next(
        row for row, (_, name) in enumerate(LARGE.symbols) if "init_task" in name
    )
    prog = made(LARGE, named=True)
    lose_page(prog, LARGE.place["offsets"] + 4 * row)
    with pytest.raises(NoSymbolsError, match=r"symbols are lost, init_task among them"):
        load_symbols(prog)
