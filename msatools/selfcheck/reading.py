# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of how memory is read and how stacks are unwound, against drgn."""

import contextlib
from collections.abc import Iterator

import numpy as np
from drgn.helpers.linux.mm import follow_phys
from msgspec.structs import replace

from msatools.errors import UNREADABLE, NotSupportedError
from msatools.kernel.reader import Addresses
from msatools.selfcheck.comparison import Comparison
from msatools.selfcheck.report_set import ReportSet
from msatools.selfdesc.find import ask, find_variable
from msatools.tasks.stackmemory import saved_registers
from msatools.tasks.stacks import StackCollector, ask_drgn
from msatools.tasks.table import TaskTable

_SAMPLE = 32
"""Tasks or addresses compared: drgn takes some milliseconds for each."""

_BYTES = 64
"""Bytes read at each address."""

_NO_TABLES = "drgn has no unwind tables without debug info"


def stacks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the stacks unwound to their end with all stacks."""
    coverage = reports.prstat.coverage
    total = coverage["stacks"]
    yield Comparison(
        name="stacks.complete",
        left="stacks unwound to their end",
        right="stacks of tasks off the CPU",
        left_value=total - coverage["stacks_incomplete"],
        right_value=total,
    )
    yield Comparison(
        name="stacks.guessed",
        left="stacks with a frame whose caller is a guess",
        right="none",
        left_value=coverage["stacks_guessed"],
        right_value=0,
    )


def unwinders(reports: ReportSet) -> Iterator[Comparison]:
    """Compare a sample of stacks with drgn's own."""
    base = Comparison(
        name="stacks.drgn",
        left="sampled stacks that drgn unwinds in the same way",
        right="sampled stacks",
    )
    collector = StackCollector(reports.reader, reports.losses)
    tasks = _sleeping(reports.tasks)
    if not collector.is_fast:
        yield replace(base, absent="drgn unwinds all stacks here")
    elif reports.target.types == "btf":
        yield replace(base, absent=_NO_TABLES)
    elif reports.target.live:
        yield replace(base, absent="stacks change while they are compared")
    else:
        saved = saved_registers(tasks)
        own = collector.collect(tasks["address"], tasks["stack"], saved)
        same = sum(
            own[row].addresses == ask_drgn(reports.prog, address).addresses
            for row, address in enumerate(tasks["address"].tolist())
        )
        yield replace(base, left_value=same, right_value=len(tasks))


def _sleeping(tasks: TaskTable) -> TaskTable:
    """Return a sample of the tasks that do not run, spread over the whole table."""
    asleep = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0) & (tasks["stack"] != 0)
    rows = np.flatnonzero(asleep)
    wanted = np.zeros(len(tasks), np.bool_)
    wanted[rows[:: max(1, len(rows) // _SAMPLE)][:_SAMPLE]] = True
    return tasks.only(wanted)


def addresses(reports: ReportSet) -> Iterator[Comparison]:
    """Compare memory as msatools reads it with a walk of the page tables by drgn."""
    tasks = _sleeping(reports.tasks)
    samples = {
        "tasks": tasks["address"].astype(np.uint64),
        # The stack in use is kept in every dump; its other end may be left out.
        "stacks": tasks["sp"].astype(np.uint64),
        "percpu": reports.percpu.addresses("runqueues")[:_SAMPLE],
    }
    for name, sample in samples.items():
        yield _compared(reports, name, sample)


def _compared(reports: ReportSet, name: str, sample: Addresses) -> Comparison:
    base = Comparison(
        name=f"reading.{name}",
        left=f"sampled addresses of {name} with the same contents by drgn's walk",
        right="sampled addresses",
    )
    if reports.target.live:
        return replace(base, absent="memory changes while it is compared")
    space = find_variable(reports.prog, "init_mm").address_of_()
    same = sampled = 0
    for address in sample.tolist():
        try:
            physical = ask(follow_phys, space, address).value_()
            expected = reports.prog.read(physical, _BYTES, True)
        except NotSupportedError:
            return replace(base, absent="drgn does not translate addresses here")
        except UNREADABLE:
            continue  # not in the dump
        sampled += 1
        with contextlib.suppress(*UNREADABLE):
            same += reports.reader.read(address, _BYTES) == expected
    if not sampled:
        return replace(base, absent="drgn can read none of them")
    return replace(base, left_value=same, right_value=sampled)


CHECKS = (addresses,)
STACKS = (stacks, unwinders)
