# SPDX-License-Identifier: LGPL-2.1-or-later

"""What loaded modules say of themselves."""

import pytest
from drgn import Program
from drgn.helpers.linux.kallsyms import module_kallsyms
from drgn.helpers.linux.module import find_module

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


def test_symbols_are_those_of_drgn(prog: Program, finders: Finders) -> None:
    (loop,) = (module for module in finders.modules if module.name == LOOP)
    there = find_module(prog, LOOP)
    known = [s for s in module_kallsyms(there) if s.size and loop.contains(s.address)]
    assert len(known) >= 50
    for symbol in known:
        places = {found.address for found in prog.symbols(symbol.name)}
        assert symbol.address in places
        assert symbol.name in {found.name for found in prog.symbols(symbol.address)}


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
