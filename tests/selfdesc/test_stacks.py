# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks unwound by the kernel's own ORC, held against those by debug info."""

from drgn import Object, Program, SymbolKind
from drgn.helpers.linux.pid import for_each_task

from msatools.selfdesc import create_modules
from tests.selfdesc.conftest import Pair

USER_SPACE = 1 << 63


def program_counters(prog: Program, task: Object) -> list[int]:
    """Where each frame is in the kernel; inlined ones are in the place of their own."""
    counters: list[int] = []
    for frame in prog.stack_trace(task):
        if frame.pc < USER_SPACE:
            break
        if not counters or counters[-1] != frame.pc:
            counters.append(frame.pc)
    return counters


def stacks(prog: Program) -> dict[int, list[int]]:
    found = {}
    for task in for_each_task(prog):
        pid = task.pid.value_()
        found[pid] = program_counters(prog, task)
    return found


def test_all_tasks(pair: Pair) -> None:
    expected, found = stacks(pair.dwarf), stacks(pair.btf)
    assert found == expected
    assert sum(len(counters) > 3 for counters in found.values()) > 100


def test_crash(crash_pair: Pair) -> None:
    """The task that crashed stands in a function for which the kernel has no ORC.

    __crash_kexec is STACK_FRAME_NON_STANDARD, so its frame is left by the frame
    pointer, which is its caller's still: panic() is passed over.
    """
    expected, found = stacks(crash_pair.dwarf), stacks(crash_pair.btf)
    crashed = crash_pair.dwarf.crashed_thread().object.pid.value_()
    of_dwarf, of_btf = expected.pop(crashed), found.pop(crashed)
    assert found == expected
    names = [crash_pair.btf.symbol(pc).name for pc in of_dwarf]
    assert names[:2] == ["__crash_kexec", "panic"]
    assert of_btf == [of_dwarf[0], *of_dwarf[2:]]
    assert len(of_btf) > 5


def test_from_within_a_module(pair: Pair) -> None:
    """As if a task had just entered a module's function from where it sleeps."""
    for prog in (pair.dwarf, pair.btf):
        create_modules(prog)
        (task,) = (t for t in for_each_task(prog) if t.pid == 1)
        frames = [frame for frame in prog.stack_trace(task) if not frame.is_inline]
        (module,) = (m for m in prog.modules() if m.name == "qemu_fw_cfg")
        entry = min(
            symbol.address
            for symbol in pair.btf.symbols()
            if symbol.kind == SymbolKind.FUNC
            and any(
                start <= symbol.address < end for start, end in module.address_ranges
            )
        )
        registers = {"ip": entry, "sp": frames[1].sp - 8, "cs": 16}
        found = program_counters(prog, Object(prog, "struct pt_regs", registers))
        assert found == [entry, *program_counters(prog, task)[1:]]
        assert len(found) > 3
