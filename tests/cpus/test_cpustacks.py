# SPDX-License-Identifier: LGPL-2.1-or-later

"""The stacks of CPUs, held against drgn's, which has debug info, frame by frame."""

from collections.abc import Iterator
from typing import Any

import drgn
import pytest
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.percpu import per_cpu
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools.errors import MissingError
from msatools.program import open_target
from msatools.program.linear import KERNEL_HALF
from tests.support.calls import call
from tests.truth import tables

USER_MODE = "(user mode)"
LABELS = {
    "common_startup_64": "secondary_startup_64",
    "secondary_startup_64_no_verify": "secondary_startup_64",
    "entry_SYSCALL_64_after_hwframe": "entry_SYSCALL_64",
    "end_repeat_nmi": "asm_exc_nmi",
}
"""Symbols within functions of assembly, which debug info has not."""

DUMPS = (
    *("stalls-rcu-6.12", "cpulock-6.12", "fieldcpus-6.12", "crash-6.12"),
    *("crashes-null-6.12", "crashes-nested-6.12", "fieldcalls-6.12"),
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("nmi-6.12", "cpulock-6.1", "fieldcpus-6.1", "stalls-locks-6.12")
    ),
)


def stacks(dump: str) -> list[dict[str, Any]]:
    words = (str(lab.build(dump).kept), "--types", "btf", "--stacks", "--json")
    report = call(COMMAND, *words, opening=open_target).json
    found: list[dict[str, Any]] = report["stacks"]
    return found


def by_drgn(prog: drgn.Program, cpu: int) -> Iterator[str]:
    """Yield the functions of a CPU, up to a module of the lab: drgn ends there."""
    task = per_cpu(prog["runqueues"], cpu).curr
    for frame in prog.stack_trace(task):
        if frame.pc < KERNEL_HALF:
            yield USER_MODE
        elif not frame.is_inline:
            try:
                yield frame.symbol().name
            except LookupError:
                return


@pytest.mark.parametrize("dump", DUMPS)
def test_are_those_of_drgn(dump: str) -> None:
    prog = tables.open_dump(dump, "dwarf")
    found = stacks(dump)
    # A panic takes those out of the mask that it stops.
    online = {*for_each_online_cpu(prog)}
    assert online <= {stack["cpu"] for stack in found}
    whole = 0
    for stack in found:
        if stack["frames"] is None:  # it is offline
            assert stack["cpu"] not in online
            continue
        names = [LABELS.get(frame, frame) for frame in stack["frames"]]
        expected = [*by_drgn(prog, stack["cpu"])]
        assert names[: len(expected)] == expected, stack["cpu"]
        whole += len(names) == len(expected)
        assert stack["frames"][-1] in ENDS, stack
    assert whole


def test_without_orc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then drgn alone unwinds, as on arm64."""

    def lost(*_: object) -> None:
        raise MissingError("no tables")

    monkeypatch.setattr("msatools.tasks.stacks.Orc", lost)
    idle = [stack for stack in stacks("fieldcpus-6.12") if stack["pid"] == 0]
    # One of them may just be in an interrupt, beyond which it does not get.
    assert any(stack["frames"][-1] in ENDS for stack in idle), idle


ENDS = (
    *(USER_MODE, "common_startup_64", "secondary_startup_64_no_verify"),
    *("ret_from_fork_asm", "ret_from_fork"),
)
"""Where stacks begin: none of them is cut."""
