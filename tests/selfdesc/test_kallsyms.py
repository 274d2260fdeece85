# SPDX-License-Identifier: LGPL-2.1-or-later

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from drgn import Object, Program, SymbolIndex

from fixtures import lab
from msatools.selfdesc.find import vmcoreinfo
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from tests.selfdesc.conftest import Pair
from tests.support import overlay

from .kallsyms_encode import TOKENS_START, Kernel, program

KERNELS = {
    "4.6": Kernel(alignment=256, marker_bytes=8, addresses="base"),
    "4.19": Kernel(marker_bytes=8),
    "5.10": Kernel(),
    "5.10 absolute": Kernel(addresses="absolute"),
    "5.10 relative": Kernel(addresses="base"),
    "6.1": Kernel(long=True, seqs=True),
    "6.4 absolute": Kernel(order="last", addresses="absolute", long=True),
    "6.12": Kernel(order="last", long=True),
    "6.15": Kernel(order="last", addresses="base", long=True),
    "7.0": Kernel(order="last", addresses="place", alignment=4, long=True),
}
NAMES = ("names", "num_syms", "token_table", "token_index")


def vmcoreinfo_of(kernel: Kernel, *, named: bool) -> str:
    lines = [f"SYMBOL(_stext)={kernel.text:x}"]
    if named:
        lines += [f"SYMBOL(kallsyms_{k})={v:x}" for k, v in kernel.place.items()]
    return "\n".join(lines) + "\n"


def made(
    kernel: Kernel,
    damage: Callable[[Kernel, bytearray], None] | None = None,
    *,
    named: bool = False,
) -> Program:
    """A program of this kernel, between some pages that hold other things."""
    start = kernel.text + TOKENS_START
    data = kernel.memory(start)
    noise = random.Random(1).randbytes(TOKENS_START)
    if damage:
        damage(kernel, data)
    memory = {kernel.text: noise + bytes(data) + noise + bytes(0x4000)}
    return program(kernel, memory, vmcoreinfo_of(kernel, named=named))


def unnamed(kernel: Kernel, memory: dict[int, bytes]) -> Program:
    """A program of some memory, where VMCOREINFO does not name the tables."""
    return program(kernel, memory, vmcoreinfo_of(kernel, named=False))


def entries(index: SymbolIndex, prog: Program) -> list[tuple[int, str]]:
    return sorted((s.address, s.name) for s in index(prog, None, None, False))


def names_of(kernel: Kernel) -> list[tuple[int, str]]:
    return sorted((address, name[1:]) for address, name in kernel.symbols)


def refused(prog: Program) -> str:
    with pytest.raises(NoSymbolsError) as error:
        load_symbols(prog)
    return str(error.value)


def opened(run: lab.Run, format: str = "elf", *, named: bool = True) -> Program:
    prog = Program()
    prog.set_core_dump(str(run.dump(format)))
    if not named:
        hide_names(prog)
    return prog


def hide_names(prog: Program) -> None:
    """Have VMCOREINFO as kernels before 6.0 do."""
    text = prog["VMCOREINFO"].string_().decode()
    lines = [line for line in text.splitlines(keepends=True) if "kallsyms" not in line]
    note = "".join(lines).encode() + b"\0"
    type = prog.array_type(prog.int_type("char", 1, True), len(note))
    found = Object(prog, type, note)

    def find(prog: Program, name: str, *_: object) -> Object | None:
        return found if name == "VMCOREINFO" else None

    prog.register_object_finder("hidden", find, enable_index=0)


def test_symbols_are_those_of_the_vmlinux(pair: Pair) -> None:
    prog = opened(pair.run)
    index = load_symbols(prog)
    found = entries(index, prog)
    assert len(found) > 80_000
    elf = {(symbol.address, symbol.name) for symbol in pair.dwarf.symbols()}
    # drgn takes this one, beyond the kernel's end, for one that does not move.
    assert {name for _, name in set(found) - elf} == {"__init_scratch_end"}
    for name in ("init_task", "node_data", "mem_section", "vm_node_stat", "jiffies"):
        address = pair.dwarf[name].address_
        assert index(prog, name, None, True)[0].address == address, name


@pytest.mark.parametrize("format", ["elf", "kdump-zlib"])
def test_found_by_shape(run: lab.Run, format: str) -> None:
    prog = opened(run, format)
    named = entries(load_symbols(prog), prog)
    hide_names(prog)
    assert "SYMBOL(kallsyms_names)" not in vmcoreinfo(prog)
    assert entries(load_symbols(prog), prog) == named


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_found_in_made_kernel(kernel: Kernel) -> None:
    # Those that VMCOREINFO names have never had a wide number of symbols.
    for named in {False, kernel.marker_bytes == 4}:
        prog = made(kernel, named=named)
        assert entries(load_symbols(prog), prog) == names_of(kernel)


def test_two_tables() -> None:
    kernel = KERNELS["5.10"]
    start = kernel.text + TOKENS_START
    data = bytes(kernel.memory(start))
    second = start + len(data) + 0x1000 & -8
    memory = {kernel.text: bytes(TOKENS_START) + data + bytes(0x100000)}
    prog = unnamed(kernel, memory)
    load_symbols(prog)
    overlay.put(prog, second, bytes(replace(kernel, place={}).memory(second)))
    assert "two tables" in refused(prog)


@pytest.mark.parametrize("byte", [b"\0", b"\xff", b"0\0"])
def test_no_tables(byte: bytes) -> None:
    kernel = Kernel()
    said = refused(unnamed(kernel, {kernel.text: byte * (1 << 23)}))
    assert "CONFIG_KALLSYMS)" in said or "missing" in said


def test_no_memory() -> None:
    assert "that part of its memory is missing" in refused(unnamed(Kernel(), {}))


@pytest.mark.parametrize("named", [True, False])
def test_functions_only(named: bool) -> None:
    kernel = Kernel(addresses="base")
    kernel.symbols = [entry for entry in kernel.symbols if entry[1][0] in "tT"]
    assert "CONFIG_KALLSYMS_ALL" in refused(made(kernel, named=named))


def test_no_note() -> None:
    kernel = Kernel()
    prog = program(kernel, {kernel.text: bytes(kernel.memory(kernel.text))}, "")
    assert "VMCOREINFO" in refused(prog)


@pytest.mark.parametrize("address", ["x", "1" + 16 * "f", "f" * 16, "1000", "-5"])
def test_note_that_makes_no_sense(address: str) -> None:
    kernel = Kernel()
    # Nothing is before the tables but _stext, so that they are not found either.
    start = kernel.text + (256 << 20)
    memory = {start: bytes(kernel.memory(start))}
    note = vmcoreinfo_of(kernel, named=True)
    load_symbols(program(kernel, memory, note))
    for name in ("_stext", *(f"kallsyms_{table}" for table in (*NAMES, "offsets"))):
        old = next(line for line in note.splitlines() if f"({name})" in line)
        new = f"SYMBOL({name})={address}"
        refused(program(kernel, memory, note.replace(old, new)))


def put(table: str, what: bytes, at: int, kernel: Kernel, data: bytearray) -> None:
    start = kernel.place[table] - kernel.text - TOKENS_START + at
    data[start : start + len(what)] = what


def cut(share: float, kernel: Kernel, data: bytearray) -> None:
    keep = int(len(data) * share)
    data[keep:] = bytes(len(data) - keep)


DAMAGE = {
    "num_syms absurd": partial(put, "num_syms", b"\xff" * 4, 0),
    "num_syms zero": partial(put, "num_syms", bytes(4), 0),
    "num_syms one more": partial(put, "num_syms", b"\x01", 0),
    "length of a name": partial(put, "names", b"\x05", 0),
    "no name": partial(put, "names", b"\x00", 0),
    "markers": partial(put, "markers", b"\x01", 4),
    "tokens": partial(put, "token_table", b"\0\0\0\0", 8),
    "control letters": partial(put, "token_table", b"\x07", 1),
    "letters of UTF-8": partial(put, "token_table", b"\xc3", 1),
    "index": partial(put, "token_index", b"\xff\xff", 0),
    "last of the index": partial(put, "token_index", b"\xff\xff", 510),
    "base": partial(put, "relative_base", b"\x10", 0),
    "order": partial(put, "offsets", b"\xff\xff\xff\x7f", 800),
    "half": partial(cut, 0.5),
    "most": partial(cut, 0.9),
    "all": partial(cut, 0),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("kind", ["5.10", "6.12"])
def test_damage(
    kind: str, damage: Callable[[Kernel, bytearray], None], named: bool
) -> None:
    refused(made(KERNELS[kind], damage, named=named))


def test_random_damage_is_refused_or_harmless() -> None:
    generator = random.Random(2)
    refusals = 0
    for _ in range(50):

        def damage(kernel: Kernel, data: bytearray) -> None:
            for _ in range(generator.choice((1, 20))):
                data[generator.randrange(len(data))] = generator.randrange(256)

        kernel = KERNELS[generator.choice(["5.10", "6.12", "7.0"])]
        prog = made(kernel, damage, named=generator.choice((True, False)))
        try:
            found = entries(load_symbols(prog), prog)
        except NoSymbolsError:
            refusals += 1
        else:
            assert len(found) == len(kernel.symbols)
    assert refusals > 25
