# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of running tasks without registers: from their last switch, marked as such."""

from pathlib import Path

import numpy as np
import pytest
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.mm import follow_phys
from drgn.helpers.linux.sched import cpu_curr
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks.running_stacks import LAST_SWITCH, StackReader
from msatools.tasks.sampler import runs
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader
from msatools.tasks.unwind import saved_registers
from tests.program.raw import writers
from tests.support.calls import call


@pytest.mark.kernels
def test_of_tasks_that_sleep_it_is_their_stack(run_612: lab.Run) -> None:
    """It is found task by task, and of such tasks nothing was overwritten since."""
    prog = open_target(TargetSpec(path=str(run_612.dump("elf")), types="btf")).prog
    losses = LossLog()
    reader = Reader(prog)
    tasks = TaskReader(reader).read_all(losses)
    tasks = tasks.only(~runs(tasks) & (tasks["exit_state"] == 0))
    collector = StackCollector(reader, losses)
    known = collector.collect(
        tasks["address"], tasks["stack"].astype(np.uint64), saved_registers(tasks)
    )
    stacks = StackReader(reader, collector.text, losses)
    compared = 0
    for row, address in enumerate(tasks["address"].tolist()):
        found = stacks.at_last_switch(address)
        names = known.names(known[row])
        if found is None:
            # A thread that never ran does not begin in __schedule().
            assert names[0] != "__schedule"
            continue
        assert found.names == (LAST_SWITCH, *names)
        assert found.pcs == known[row].addresses
        compared += 1
    assert compared > len(tasks) // 2


def test_what_was_overwritten_is_not_shown(tmp_path: Path) -> None:
    """The frames of the last switch of both tasks that run are gone.

    Whether they are by themselves depends on what has interrupted the tasks since.
    """
    run = lab.build("tasks-on-6.12")
    memory = writers.packed(run.dump("elf"), tmp_path / "memory")
    prog = open_target(TargetSpec(path=str(memory), types="btf")).prog
    tasks = TaskReader(Reader(prog)).read_all(LossLog())
    # One that a CPU has just switched from is still said to be on it.
    current = [cpu_curr(prog, cpu).value_() for cpu in for_each_online_cpu(prog)]
    tasks = tasks.only(np.isin(tasks["address"], current))
    assert len(tasks) == 2
    with memory.open("r+b") as file:
        for sp in tasks["sp"].tolist():
            # The whole guest lies below its hole: addresses are positions.
            file.seek(follow_phys(prog["init_mm"].address_of_(), sp).value_())
            file.write(bytes(64))
    ran = call(COMMAND, "--stacks", "-c", str(memory), opening=open_target)
    assert ran.status == 0
    assert ran.out.count("its stack is not known") == 2
    memory.unlink()
