# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands' error for a kernel without BTF or without kallsyms.

No kernel of the lab is built so: the tests overwrite a dump's memory or hide symbols. A
running kernel takes the same path, except that its BTF is read from a file if possible.
"""

import importlib
from collections.abc import Callable

import pytest
from drgn import Program

from fixtures import lab
from fixtures.lab.guest.livecommands import NAMES
from msatools.cli.main import run_console
from msatools.program import open as opening
from msatools.selfdesc import load
from msatools.selfdesc.kallsyms import load_symbols
from tests.selfdesc.undescribed import Symbols
from tests.support.calls import with_operands
from tests.support.overlay import put


@pytest.fixture
def no_btf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the symbols that mark the start and end of BTF."""
    monkeypatch.setattr(
        load, "load_symbols", lambda prog: Symbols(load_symbols(prog), "__st.*_BTF")
    )


@pytest.fixture
def no_kallsyms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite .rodata, including the kallsyms tables, by zeros."""
    real: Callable[..., Program] = opening._open_dump

    def blank(*words: object) -> Program:
        prog = real(*words)
        symbols = load_symbols(prog)
        start, end = (
            symbols(prog, name, None, True)[0].address
            for name in ("__start_rodata", "__end_rodata")
        )
        put(prog, start, bytes(end - start))
        return prog

    # Types that drgn's session would have by then are not to serve.
    monkeypatch.setenv("MSATOOLS_TYPES", "never")
    monkeypatch.setattr(opening, "_open_dump", blank)


def error_of(name: str, run: lab.Run, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; return the end of its error message."""
    command = importlib.import_module(f"msatools.commands.{name}").COMMAND
    assert run_console(command, with_operands(command, str(run.elf))) == 1
    out, err = capsys.readouterr()
    assert out == ""
    line, end, rest = err.partition("\n")
    assert (end, rest) == ("\n", "")
    head = f"msa-{name}: {run.elf}: no debug info found for {run.release}, and the "
    assert line.startswith(head)
    assert f"linux-image-{run.release}-dbg" in line
    assert line.endswith("or name its vmlinux with -s")
    return line.removeprefix(head)


@pytest.mark.usefixtures("no_btf")
@pytest.mark.parametrize("name", NAMES)
def test_kernel_without_btf(
    run_612: lab.Run, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    why = "kernel has no BTF (it was built without CONFIG_DEBUG_INFO_BTF); "
    assert error_of(name, run_612, capsys).startswith(why)


@pytest.mark.usefixtures("no_kallsyms")
@pytest.mark.parametrize("name", NAMES)
def test_kernel_without_kallsyms(
    run_612: lab.Run, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "symbols" in error_of(name, run_612, capsys).partition(";")[0]
