# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where types come from, and what is said if they come from nowhere."""

from typing import Any

import pytest
from drgn import ModuleFileStatus, Program, SymbolIndex
from drgn.commands import run_command

from fixtures import lab
from msatools.program import TargetError, TargetSpec, describe, open_target
from msatools.program.model import NoTypesError
from msatools.selfdesc import (
    NotSelfDescribedError,
    is_served_by_btf,
    load,
    load_btf,
    main_module,
)
from msatools.selfdesc.kallsyms import load_symbols
from msatools.standby import NAME
from tests.selfdesc.undescribed import Symbols
from tests.support.overlay import put


@pytest.fixture
def prog(run_612: lab.Run, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A dump as drgn opens it, with no types."""
    monkeypatch.setenv("MSATOOLS_TYPES", "never")
    prog = Program()
    prog.set_core_dump(run_612.elf)
    return prog


@pytest.mark.parametrize("types", ["auto", "btf"])
def test_open_without_debug_info(run: lab.Run, types: Any) -> None:
    opened = open_target(TargetSpec(path=str(run.elf), types=types))
    assert opened.target.types == "btf"
    assert opened.target.release == run.release
    assert opened.prog["init_task"].comm.string_() == b"swapper/0"
    # Nothing that is loaded later makes a second source.
    assert not opened.prog.main_module().wants_debug_file()


def test_debug_info_that_is_named_is_taken(run_612: lab.Run) -> None:
    spec = TargetSpec(path=str(run_612.elf), vmlinux=str(run_612.vmlinux))
    opened = open_target(spec)
    assert opened.target.types == "dwarf"
    assert NAME not in opened.prog.cache


def test_one_call_for_any_program(prog: Program) -> None:
    with pytest.raises(LookupError):
        prog.type("struct page")
    load_btf(prog)
    load_btf(prog)
    assert is_served_by_btf(prog)
    assert prog.type("struct page").size == 64
    assert prog["init_task"].pid == 0
    assert prog.symbol("schedule").name == "schedule"
    assert describe(prog).types == "btf"


def test_debug_info_takes_the_place_of_btf(prog: Program, run_612: lab.Run) -> None:
    load_btf(prog)
    assert describe(prog).types == "btf"
    main_module(prog).try_file(run_612.vmlinux)
    assert main_module(prog).debug_file_status == ModuleFileStatus.HAVE
    assert not is_served_by_btf(prog)
    assert describe(prog).types == "dwarf"
    # What BTF refuses for want of a type, and what it names differently.
    assert prog["loops_per_jiffy"].type_.type_name() == "unsigned long"
    assert prog.symbol("schedule").size > 0
    assert prog.type("struct irq_info").tag == "irq_info"


def test_command_at_the_prompt_needs_nothing(
    prog: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_command(prog, "memstat")
    assert report.target.types == "btf"
    assert " types: btf " in capsys.readouterr().out.splitlines()[0]


def test_kernel_without_btf(
    prog: Program, run_612: lab.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        load, "load_symbols", lambda prog: Symbols(load_symbols(prog), "__st.*_BTF")
    )
    with pytest.raises(NotSelfDescribedError, match="CONFIG_DEBUG_INFO_BTF"):
        load_btf(prog)
    with pytest.raises(NoTypesError, match=r"no types .*CONFIG_DEBUG_INFO_BTF.* -s"):
        describe(prog)
    spec = TargetSpec(path=str(run_612.elf))
    with pytest.raises(NoTypesError) as caught:
        open_target(spec)
    words = str(caught.value)
    assert f"no debug info found for {run_612.release}, and the kernel has no" in words
    assert f"linux-image-{run_612.release}-dbg" in words
    assert words.endswith("or name its vmlinux with -s")
    with pytest.raises(NoTypesError, match=r": the kernel has no BTF.* -s"):
        open_target(TargetSpec(path=str(run_612.elf), types="btf"))


def test_damaged_btf(prog: Program) -> None:
    start = load_symbols(prog)(prog, "__start_BTF", None, True)[0].address
    put(prog, start, b"\0" * 24)
    with pytest.raises(
        NotSelfDescribedError, match="BTF cannot be used: it does not start"
    ):
        load_btf(prog)
    # A failure leaves nothing behind.
    assert NAME not in prog.cache


def test_btf_with_a_name_that_leads_nowhere(
    run_612: lab.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out when the first type is asked for by name."""
    read = load._read_btf

    def damaged(prog: Program, symbols: SymbolIndex) -> bytes:
        data = bytearray(read(prog, symbols))
        data[24:28] = b"\xff\xff\xff\x7f"
        return bytes(data)

    monkeypatch.setattr(load, "_read_btf", damaged)
    with pytest.raises(NoTypesError, match=r"types .* are damaged: there is no string"):
        open_target(TargetSpec(path=str(run_612.elf), types="btf"))
    prog = Program()
    prog.set_core_dump(run_612.elf)
    with pytest.raises(NoTypesError, match=r"types .* are damaged: there is no string"):
        run_command(prog, "memstat")


def test_btf_damaged_within(prog: Program) -> None:
    """Types are looked at when they are asked for, so that is when it is found out."""
    start = load_symbols(prog)(prog, "__start_BTF", None, True)[0].address
    header = prog.read(start, 24)
    strings = int.from_bytes(header[16:20], "little")
    size = int.from_bytes(header[20:24], "little")
    put(prog, start + 24 + strings, b"\0" * size)
    load_btf(prog)
    with pytest.raises(TargetError, match="could not find 'struct page'"):
        run_command(prog, "memstat")
