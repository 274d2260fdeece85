# SPDX-License-Identifier: LGPL-2.1-or-later

"""In reports of damaged dumps, losses are counted and noted; the rest is unchanged."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from drgn import Program, sizeof
from drgn.helpers.linux.percpu import per_cpu
from msatools.commands.cpus import COMMAND

from msatools.cpus.cpus import Cpus, CpusOptions, collect_cpus
from msatools.cpus.model import CpusReport
from msatools.cpus.sets import read_cpusets
from msatools.errors import LOST
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import describe
from msatools.reports.forms import dumps as as_json
from tests.cpus.damaged import borrowed, lose, put
from tests.cpus.guests import KERNELS
from tests.support.commandline import shown
from tests.support.dumps import open_dump

OPTIONS = CpusOptions(irqs=True, tasks=True, doing=True)
CPU = 1
"""A busy CPU."""
POSSIBLE = 8
"""Number of possible CPUs that are compared: on 6.1 further ones were never online."""
TOLD = (
    *("cpus", "sets", "run_queues", "findings", "irqs", "vectors", "softirqs"),
    *("load", "nodes", "taken_at_ns"),
)
"""Keys of a report that are not compared."""

PERCPU = (
    *("runqueues", "kstat", "irq_stat", "kernel_cpustat", "vm_event_states"),
    *("tick_cpu_sched", "hrtimer_bases", "cpu_info", "cpuhp_state"),
    *("cpu_sibling_map", "numa_node"),
)
VARIABLES = (
    *("__cpu_possible_mask", "__cpu_present_mask", "__cpu_online_mask"),
    *("__cpu_active_mask", "housekeeping", "rcu_nocb_mask", "tick_nohz_full_mask"),
    *("nr_cpu_ids", "top_cpuset", "init_task", "init_css_set", "cgrp_dfl_root"),
    *("jiffies_64", "last_jiffies_update", "clocksource_jiffies"),
    *("avenrun", "node_states", "saved_command_line"),
)
IRQS = {"6.1": "irq_desc_tree", "6.12": "sparse_irqs"}
MASKS = {"6.1": (), "6.12": ("isolated_cpus",)}

Report = dict[str, Any]


@cache
def whole(kernel: str) -> Report:
    return report(open_dump(f"cpus-{kernel}", "btf"))


def report(prog: Program) -> Report:
    """Return the JSON of a dump's report."""
    found: Report = json.loads(as_json(collected(prog)))
    return found


def collected(prog: Program) -> CpusReport:
    made = collect_cpus(prog, options=OPTIONS)
    # All views can be rendered.
    for view in ([], ["-v"], ["-i"], ["--sets"], ["--info"], ["-o", "all"]):
        assert shown(COMMAND, made, *view)
    return made


def differs(kernel: str, found: Report) -> set[str]:
    return {part for part in TOLD if found[part] != whole(kernel)[part]}


def is_incomplete(found: Report) -> bool:
    """Return whether --strict would fail."""
    lost = ("_unreadable", "_broken", "_lost", "_unknown", "_differ")
    return any(n and key.endswith(lost) for key, n in found["coverage"].items())


def values(found: Report, part: str, key: str) -> list[Any]:
    """Return a key of each row in a part of a report."""
    return [row[key] for row in found[part]]


def check(kernel: str, found: Report) -> None:
    """Check that a report that differs has notes and counted losses."""
    if differs(kernel, found):
        assert found["notes"]
        assert is_incomplete(found)


def lose_variable(prog: Program, name: str, cpus: range) -> None:
    for cpu in cpus:
        variable = per_cpu(prog[name], cpu)
        lose(prog, variable.address_, sizeof(variable))


def area(prog: Program, cpu: int) -> tuple[int, int]:
    """Return address and size of a CPU's static per-CPU area."""
    start, end = (prog.symbol(f"__per_cpu_{edge}").address for edge in ("start", "end"))
    offset = prog["__per_cpu_offset"][cpu].value_()
    return (start + offset) % (1 << 64), end - start


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def prog(kernel: str) -> Iterator[Program]:
    """A dump that the test can damage."""
    with borrowed(f"cpus-{kernel}") as prog:
        yield prog


COUNTERS = {
    "runqueues": {"csw", "runq", "current"},
    "kstat": {"intr", "soft"},
    "irq_stat": {"intr", "xcal", "tlb"},
    "vm_event_states": {"minf", "mjf"},
    "tick_cpu_sched": {"idl_ns", "wt_ns"},
}
"""Variable -> columns that are null, not 0, if it cannot be read."""


@pytest.mark.parametrize("name", PERCPU)
def test_variable_of_one_cpu(kernel: str, prog: Program, name: str) -> None:
    lose_variable(prog, name, range(CPU, CPU + 1))
    found = report(prog)
    assert found["notes"]
    assert is_incomplete(found)
    assert len(found["cpus"]) == len(whole(kernel)["cpus"])
    # Other CPUs are unchanged, except run times without ticks, which depend on the
    # latest clock of all, ``no-intr`` and siblings.
    for row, other in zip(found["cpus"], whole(kernel)["cpus"], strict=True):
        if row["cpu"] not in (CPU, 7):
            assert row == other
    row, was = found["cpus"][CPU], whole(kernel)["cpus"][CPU]
    never = {"icsw", "migr", "smtx", "srw", "syscl"}
    unknown = {key for key, value in row.items() if value is None} - never
    assert unknown >= COUNTERS.get(name, set())
    # All known values are unchanged.
    for key in row.keys() - unknown - {"state", "processor"} - never:
        assert row[key] == was[key], key


@pytest.mark.parametrize("name", PERCPU)
def test_variable_of_all_cpus(kernel: str, prog: Program, name: str) -> None:
    lose_variable(prog, name, range(POSSIBLE))
    found = report(prog)
    assert found["notes"]
    assert is_incomplete(found)
    assert values(found, "cpus", "cpu") == values(whole(kernel), "cpus", "cpu")
    # Unrelated parts are unchanged.
    assert found["irqs"] == whole(kernel)["irqs"]


def test_run_queues(kernel: str, prog: Program) -> None:
    """Without run queues there are no findings about them."""
    lose_variable(prog, "runqueues", range(POSSIBLE))
    found = report(prog)
    assert all(row["current"] is None for row in found["cpus"][:POSSIBLE])
    codes = {each["code"] for each in found["findings"]}
    assert not codes & {
        *("not-ticked", "not-switched", "starving-tasks", "idle-while-waiting")
    }
    assert found["coverage"]["rq_unreadable"] >= POSSIBLE


@pytest.mark.parametrize("cpu", [0, CPU, 4, 6])
def test_all_variables_of_one_cpu(kernel: str, prog: Program, cpu: int) -> None:
    lose(prog, *area(prog, cpu))
    found = report(prog)
    check(kernel, found)
    row = found["cpus"][cpu]
    known = {"cpu", "online", "set", "state", "processor", "icsw", "migr"}
    assert {key for key, value in row.items() if value is not None} <= known
    assert row["online"] is whole(kernel)["cpus"][cpu]["online"]
    assert row["set"] == whole(kernel)["cpus"][cpu]["set"]
    for other, was in zip(found["cpus"], whole(kernel)["cpus"], strict=True):
        if other["cpu"] not in (cpu, 7):
            for key in ("csw", "intr", "minf", "xcal", "current", "runq", "usr_ns"):
                assert other[key] == was[key], (other["cpu"], key)


def test_all_variables_of_all_cpus(kernel: str, prog: Program) -> None:
    for cpu in range(POSSIBLE):
        lose(prog, *area(prog, cpu))
    found = report(prog)
    check(kernel, found)
    for part, key in (("cpus", "online"), ("sets", "name")):
        assert values(found, part, key) == values(whole(kernel), part, key)


def test_per_cpu_offset(kernel: str, prog: Program) -> None:
    """The CPU is left out, and counted once per report."""
    lose(prog, prog["__per_cpu_offset"][CPU].address_, 8)
    session = Cpus(prog, describe(prog), OPTIONS)
    for _ in range(3):
        found = session.report(lambda done, total: None)
        assert CPU not in [row.cpu for row in found.cpus]
        assert len(found.cpus) == len(whole(kernel)["cpus"]) - 1
        assert found.coverage["cpus_unreadable"] == 1
        assert found.coverage["cpus"] == len(found.cpus)
        assert any(f"variables of CPU {CPU}" in note.text for note in found.notes)


@pytest.mark.parametrize("name", VARIABLES)
def test_variable_of_the_kernel(kernel: str, prog: Program, name: str) -> None:
    variable = prog[name]
    lose(prog, variable.address_, sizeof(variable))
    check(kernel, report(prog))


def test_interrupts(kernel: str, prog: Program) -> None:
    variable = prog[IRQS[kernel]]
    lose(prog, variable.address_, sizeof(variable))
    found = report(prog)
    check(kernel, found)
    assert found["irqs"] == []
    # Targets of interrupts are unknown.
    assert not any("no-intr" in row["state"] for row in found["cpus"])
    codes = {each["code"] for each in found["findings"]}
    assert not codes & {"most-interrupts", "isolated-takes-interrupts"}
    assert is_incomplete(found)


def test_cpusets(kernel: str, prog: Program) -> None:
    """The sets of the command line are still known."""
    top = prog["top_cpuset"]
    lose(prog, top.address_, sizeof(top))
    found = report(prog)
    check(kernel, found)
    names = {each["name"] for each in found["sets"]}
    assert names == {"default", "isolcpus", "nohz_full"}
    assert is_incomplete(found)


def test_one_cpuset(kernel: str, prog: Program) -> None:
    """The other sets are unchanged."""
    every = read_cpusets(Reader(prog), LossLog()).all
    (gone,) = [each for each in every if each.path == "/quiet"]
    lose(prog, gone.address, prog.type("struct cpuset").size)
    found = report(prog)
    check(kernel, found)
    assert is_incomplete(found)
    names = {each["name"] for each in found["sets"]}
    assert "/quiet" not in names
    assert {"default", "isolcpus"} <= names


def test_cpus_that_are_online(kernel: str, prog: Program) -> None:
    """The present CPUs are taken as online, not all as offline."""
    mask = prog["__cpu_online_mask"]
    lose(prog, mask.address_, sizeof(mask))
    found = report(prog)
    parts = (("cpus", "online"), ("sets", "cpus"), ("run_queues", "lag_why"))
    for part, key in parts:
        assert values(found, part, key) == values(whole(kernel), part, key)
    assert is_incomplete(found)
    active = prog["__cpu_active_mask"]
    lose(prog, active.address_, sizeof(active))
    again = report(prog)
    assert again["notes"]


@pytest.mark.parametrize("byte", [b"\x00", b"\xff", b"\x5a"])
@pytest.mark.parametrize("cpu", [CPU, 4])
def test_variables_with_garbage(
    kernel: str, prog: Program, cpu: int, byte: bytes
) -> None:
    """No impossible number is reported, as for a dump with swapped pages."""
    address, size = area(prog, cpu)
    put(prog, address, byte * size)
    found = report(prog)
    row = found["cpus"][cpu]
    most = 1 << 60
    for key, value in row.items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert 0 <= value <= most, key
    for queue in found["run_queues"]:
        for task in queue["waiting"]:
            assert task["wait_ns"] is None or 0 <= task["wait_ns"] <= most


@pytest.mark.parametrize("name", ["runqueues", "tick_cpu_sched", "cpu_info", "kstat"])
@pytest.mark.parametrize("byte", [b"\x00", b"\xff", b"\x5a"])
def test_variable_with_garbage(
    kernel: str, prog: Program, name: str, byte: bytes
) -> None:
    variable = per_cpu(prog[name], CPU)
    put(prog, variable.address_, byte * sizeof(variable))
    found = report(prog)
    assert len(found["cpus"]) == len(whole(kernel)["cpus"])
    for row, other in zip(found["cpus"], whole(kernel)["cpus"], strict=True):
        if row["cpu"] not in (CPU, 7):
            assert row["csw"] == other["csw"]
            assert row["intr"] == other["intr"]


def test_memory_that_a_report_requires(kernel: str, prog: Program) -> None:
    """The error is one that the command handles."""
    for cpu in range(POSSIBLE):
        lose(prog, *area(prog, cpu))
    for name in (*VARIABLES, IRQS[kernel], *MASKS[kernel], "__per_cpu_offset"):
        address = prog.symbol(name).address
        lose(prog, address, max(prog.symbol(name).size, 8))
    try:
        found = report(prog)
    except LOST:
        return
    assert found["cpus"] == []
    assert is_incomplete(found)


@pytest.mark.parametrize("count", [0, 8193, 1 << 16, (1 << 16) + 1, 1 << 20, 1 << 31])
def test_impossible_number_of_cpus(prog: Program, count: int) -> None:
    """The number exceeds the bits of a mask (NR_CPUS)."""
    number = prog["nr_cpu_ids"].address_
    assert number is not None
    put(prog, number, count.to_bytes(4, "little"))
    found = collected(prog)
    assert found.cpus == ()
    assert any("list of CPUs" in note.text for note in found.notes)


def test_empty_tree_of_interrupts(kernel: str, prog: Program) -> None:
    """Every kernel has interrupts: an empty tree is a loss, no CPU is ``no-intr``."""
    tree = prog[IRQS[kernel]]
    address = tree.address_
    assert address is not None
    put(prog, address, bytes(sizeof(tree)))
    found = collected(prog)
    assert found.coverage["irqs_unreadable"]
    assert not any("no-intr" in cpu.state for cpu in found.cpus)


def test_run_queue_of_zeros_is_not_idle(prog: Program) -> None:
    """Its current task is unknown."""
    queue = per_cpu(prog["runqueues"], CPU)
    address = queue.address_
    assert address is not None
    put(prog, address, bytes(sizeof(queue)))
    found = collected(prog)
    (row,) = (cpu for cpu in found.cpus if cpu.cpu == CPU)
    assert "idle" not in row.state
