# SPDX-License-Identifier: LGPL-2.1-or-later

"""Types in drgn's own sessions: where there are none, and nowhere else."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drgn import FindObjectFlags, ModuleFileStatus, Program, Type, TypeKindSet
from drgn.helpers.linux.percpu import per_cpu

from fixtures import lab
from msatools import plugin, prompt
from msatools.errors import UncertainNameError
from msatools.selfdesc import is_served_by_btf, load, load_btf
from msatools.selfdesc.kallsyms import load_symbols
from msatools.selfdesc.load import finders_of
from msatools.selfdesc.types import BtfTypes
from msatools.standby import NAME
from tests.selfdesc.undescribed import Symbols
from tests.support.calls import CORE
from tests.support.paused import paused

DRGN = Path(sys.executable).with_name("drgn")
IMPORTED = (
    'import sys; print([m for m in ("msatools.selfdesc", "numpy") if m in sys.modules])'
)


def drgn(*words: str | Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command drgn, which ends as it should."""
    return subprocess.run(
        [DRGN, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **variables},
    )


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Let drgn's logger warn, which commands in this process have silenced."""
    caplog.set_level(logging.WARNING, "drgn")


@pytest.fixture
def prog() -> Program:
    """A dump as a program opens it, with no debug info."""
    prog = Program()
    prog.set_core_dump(CORE)
    return prog


def test_one_line_in_place_of_drgn_s_warnings() -> None:
    code = (
        'print(prog["init_task"].comm.string_(), sizeof(prog.type("struct page")))\n'
        "print(prog.symbol(prog.symbol('schedule').address).name)\n"
        "print(*sorted(module.name for module in prog.modules()))\n"
        "print(stack_trace(1)[1].name)"
    )
    done = drgn("-c", CORE, "-e", code)
    assert done.stdout.splitlines() == [
        "b'swapper/0' 64",
        "schedule",
        *(line for line in done.stdout.splitlines()[2:3] if "qemu_fw_cfg" in line),
        "schedule",
    ]
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: msatools: no debug info is loaded; types and")
    assert line.endswith("package) or name its vmlinux with -s")
    assert drgn("-q", "-c", CORE, "-e", code).stderr == ""


def test_never() -> None:
    code = 'print("page" in [prog.registered_type_finders()], prog.cache.keys())'
    done = drgn("-c", CORE, "-e", code, MSATOOLS_TYPES="never")
    assert "msatools" not in done.stdout + done.stderr
    assert "missing debugging symbols for kernel" in done.stderr


def test_debug_info_that_drgn_finds_costs_no_import(run_612: lab.Run) -> None:
    code = f'{IMPORTED}; print(prog["nothing"] if "nothing" in prog else "no")'
    words = ["-c", run_612.elf, "-s", run_612.vmlinux, "--main-symbols"]
    done = drgn(*words, "-e", code)
    assert done.stdout == "[]\nno\n"
    assert "msatools" not in done.stderr


def test_debug_info_is_searched_for_first(run_612: lab.Run) -> None:
    """drgn asks for ``struct module`` before it has searched."""

    def find(modules: list[Any]) -> None:
        for module in modules:
            if module.name == "kernel":
                module.try_file(run_612.vmlinux)

    prog = Program()
    prog.set_core_dump(run_612.elf)
    prog.register_debug_info_finder("test", find, enable_index=0)
    prog.load_debug_info(main=True)
    assert not is_served_by_btf(prog)
    assert NAME not in prog.cache
    assert len(list(prog.modules())) > 1


def test_debug_info_that_is_loaded_later_is_used(run_612: lab.Run) -> None:
    prog = Program()
    prog.set_core_dump(run_612.elf)
    prog.load_default_debug_info()
    assert prog.symbol("schedule").size > 0
    # Of no type in BTF.
    with pytest.raises(UncertainNameError):
        prog["loops_per_jiffy"]
    prog.load_debug_info([run_612.vmlinux])
    assert prog.main_module().debug_file_status == ModuleFileStatus.HAVE
    assert prog["loops_per_jiffy"].type_.type_name() == "unsigned long"


def test_modules_are_searched_for_nowhere(prog: Program) -> None:
    asked = []
    prog.register_debug_info_finder(
        "test", lambda modules: asked.extend(m.name for m in modules), enable_index=1
    )
    prog.load_default_debug_info()
    assert asked == ["kernel"]
    assert len(list(prog.modules())) > 1


def test_lookup_of_drgn_s_own_that_was_not_followed_by_a_search(prog: Program) -> None:
    """Someone who asks for what drgn asks for gets it the second time."""
    next(iter(prog.loaded_modules()))
    with pytest.raises(LookupError):
        prog.type("struct module")
    assert prog.type("struct module").has_member("list")


def test_beside_a_type_finder_of_drgn_s_own(prog: Program) -> None:
    """That which is proposed for drgn is named so; types are its, all else is ours."""
    load_btf(prog)
    theirs = BtfTypes(prog, finders_of(prog).types.btf)
    asked = []

    def find(
        prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        asked.append(name)
        return theirs.find(kinds, name) if filename is None else None

    prog.register_type_finder("btf", find, enable_index=0)
    assert prog["init_task"].comm.string_() == b"swapper/0"
    assert "task_struct" in asked
    assert prog.type("struct page").size == 64
    assert per_cpu(prog["runqueues"], 0).cpu == 0
    assert prog.stack_trace(1)[1].name == "schedule"
    assert len(list(prog.modules())) > 1


def test_guest_over_qmp(run_612: lab.Run, tmp_path: Path) -> None:
    with paused(run_612.elf, tmp_path) as address:
        done = drgn("--qemu", address, "-e", 'print(prog["init_task"].comm.string_())')
    assert done.stdout == "b'swapper/0'\n"
    assert len(done.stderr.splitlines()) == 1


def test_kernel_that_has_no_types(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, prog: Program
) -> None:
    monkeypatch.setattr(
        load, "load_symbols", lambda prog: Symbols(load_symbols(prog), "__st.*_BTF")
    )
    for _ in range(2):
        with pytest.raises(LookupError, match="could not find 'jiffies'"):
            prog["jiffies"]
    (message,) = caplog.messages
    assert "nor the kernel's own types: the kernel has no BTF" in message


def test_fault_of_ours_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, prog: Program
) -> None:
    monkeypatch.setattr(load, "load_symbols", lambda prog: {}["a fault"])
    with pytest.raises(LookupError, match="could not find 'jiffies'"):
        prog["jiffies"]
    monkeypatch.setattr(prompt, "add_help", lambda prog: {}["another"])
    plugin.drgn_prog_set(prog)
    first, second = caplog.messages
    assert first.endswith("types: 'a fault'")
    assert second == "msatools: not available: KeyError: 'another'"
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_types_of_another_finder_come_first(prog: Program) -> None:
    """As of one that drgn may have: the variables that it lacks are of its types."""

    def find(
        prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        return prog.struct_type(name, 8, ()) if name == "task_struct" else None

    prog.register_type_finder("btf", find, enable_index=1)
    assert prog.enabled_type_finders() == ["dwarf", "btf", NAME]
    assert prog["init_task"].type_.size == 8
    assert prog["modules"].type_.size == 16
    assert prog["jiffies"].type_.type_name() == "volatile unsigned long"
    flags = FindObjectFlags.VARIABLE
    assert finders_of(prog).find_object(prog, "runqueues", flags, None) is not None
