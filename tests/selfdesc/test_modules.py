# SPDX-License-Identifier: LGPL-2.1-or-later

"""What loaded modules say of themselves."""

import lzma
import subprocess
from pathlib import Path

import pytest
from drgn import Program

from fixtures import lab
from msatools.program import TargetSpec, open_target
from msatools.selfdesc.btf import BtfError
from msatools.selfdesc.load import Finders, Modules, finders_of
from tests.support.overlay import put

LOOP = "loop"


@pytest.fixture(scope="module")
def prog(run: lab.Run) -> Program:
    return open_target(TargetSpec(path=str(run.elf), types="btf")).prog


@pytest.fixture(scope="module")
def finders(prog: Program) -> Finders:
    return finders_of(prog)


def test_modules_are_those_that_the_guest_listed(
    finders: Finders, run: lab.Run
) -> None:
    """Names, sizes and addresses as in /proc/modules."""
    lines = run.truth("proc/modules").decode().splitlines()
    listed = {fields[0]: int(fields[5], 16) for fields in map(str.split, lines)}
    assert len(listed) > 2
    found = {module.name: module for module in finders.modules}
    assert set(found) == set(listed)
    for name, address in listed.items():
        assert found[name].contains(address)


def symbols_in_file(run: lab.Run, tmp_path: Path) -> list[tuple[str, int, str]]:
    """The functions in the module's file: section, place in it, and name."""
    (path,) = run.kernel.modules.rglob(f"{LOOP}.ko*")
    if path.suffix == ".xz":
        plain = tmp_path / path.stem
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        path = plain
    done = subprocess.run(
        ["readelf", "--symbols", "--wide", path],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return [
        (row[6], int(row[1], 16), row[7])
        for row in rows
        if len(row) == 8 and row[3] == "FUNC" and row[6].isdigit()
    ]


def test_symbols_are_those_of_the_file(
    prog: Program, finders: Finders, run: lab.Run, tmp_path: Path
) -> None:
    """Each section lies in one piece somewhere, so all in it are shifted alike."""
    (loop,) = (module for module in finders.modules if module.name == LOOP)
    in_file = symbols_in_file(run, tmp_path)
    names = [name for _, _, name in in_file]
    shifts: dict[str, set[int]] = {}
    missing = []
    for section, place, name in in_file:
        symbols = [s for s in prog.symbols(name) if loop.contains(s.address)]
        if names.count(name) > 1:
            continue
        if not symbols:
            missing.append(name)
            continue
        (symbol,) = symbols
        shifts.setdefault(section, set()).add(symbol.address - place)
        assert name in {here.name for here in prog.symbols(symbol.address)}
    assert len(names) >= 50
    # What served the start only is gone, and its symbols with it.
    assert len(missing) < 5
    assert all(len(shift) == 1 for shift in shifts.values()), shifts


def test_symbol_that_no_module_has(prog: Program) -> None:
    with pytest.raises(LookupError):
        prog.symbol("no_such_symbol")
    with pytest.raises(LookupError):
        prog.symbol(0xFFFF800000000000)


def test_types_of_a_module(prog: Program, finders: Finders) -> None:
    """A type of the module's own, which refers to types of the kernel."""
    device = prog.type("struct loop_device", LOOP)
    assert device.member("lo_number").type.type_name() == "int"
    kernel_type = prog.type("struct file")
    backing = device.member("lo_backing_file").type.type
    assert [m.name for m in backing.members] == [m.name for m in kernel_type.members]
    # Without its module's name it is not taken for one of the kernel's.
    for words in (("struct loop_device",), ("struct loop_device", "no_such_module")):
        with pytest.raises(LookupError, match="could not find"):
            prog.type(*words)


def test_btf_for_another_kernel(
    prog: Program, finders: Finders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finders.types.btf, "end_string", 1)
    with pytest.raises(BtfError, match="another kernel"):
        Modules(finders.types).types(LOOP)


def test_list_of_modules_that_is_a_circle(run: lab.Run) -> None:
    """The last one leads back to the first, and not to the head."""
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    head = prog["modules"].address_of_()
    first, last = head.next, head.prev
    put(prog, last.value_(), first.value_().to_bytes(8, "little"))
    names = [module.name for module in finders_of(prog).modules]
    assert len(names) == len(set(names)) > 2
    assert len(prog.symbols("loop_configure")) == 1
    with pytest.raises(LookupError):
        prog.symbol("no_such_symbol")


def test_list_of_modules_that_leads_nowhere(run: lab.Run) -> None:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    head = prog["modules"].address_
    put(prog, head, (head + 1024).to_bytes(8, "little") * 2)
    assert len(list(finders_of(prog).modules)) < 100
    assert prog.symbol("schedule").name == "schedule"
