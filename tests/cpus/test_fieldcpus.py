# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs and their time as people reported them, by what the guest did."""

import io
import json
import re
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drgn import Object, Program, offsetof
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.rbtree import rbtree_inorder_for_each
from drgn.helpers.linux.sched import cpu_curr

from fixtures import lab
from fixtures.lab import sparse
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.cpus.cpus import CpusOptions, collect_cpus
from msatools.cpus.storms import UNKNOWN, WorkSources
from msatools.kernel.code import kernel_symbol
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.report import Root
from msatools.program import TargetSpec, open_target
from msatools.tasks.running_stacks import CpuStack
from msatools.tasks.text import KernelText
from tests.cpus.damaged import borrowed, put_word
from tests.cpus.guests import is_throttled
from tests.locks.reports import logged_report
from tests.support.dumps import spinning
from tests.support.elf import (
    RIP_OFFSET,
    RSP_OFFSET,
    cpu_registers,
    file_offset,
    load_segments,
)
from tests.truth import tables


@cache
def workload(name: str) -> dict[str, Any]:
    return lab.build(name).workload


@cache
def json_of(command: str, dump: str, *words: str) -> dict[str, Any]:
    """Return the JSON that a command prints for a dump."""
    out = io.StringIO()
    with redirect_stdout(out):
        prog = tables.open_dump(dump, "btf")
        run_in_drgn(tables.TABLES[command].command, prog, ("--json", *words))
    return dict(json.loads(out.getvalue()))


@pytest.fixture(params=["fieldcpus-6.1", "fieldcpus-6.12", "fieldcpus-7.x"])
def dump(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pid(dump: str, name: str) -> int:
    return int(workload(dump)["tasks"][name]["pid"])


def verdicts(dump: str, code: str) -> list[dict[str, Any]]:
    found = json_of("report", dump)["verdicts"]
    return [each for each in found if each["code"] == code]


def root_of(dump: str, waiter: int) -> Root:
    roots = logged_report(dump).report.roots
    (root,) = (each for each in roots if waiter in each.behind)
    return root


# --- who may not run


def throttles_in_kernel(dump: str) -> bool:
    """Since v6.18 only who goes back to user mode is throttled."""
    return not dump.endswith("7.x")


def throttled(dump: str, kind: str) -> set[int]:
    """Return those of a kind that are just then: a quota begins anew each period."""
    prog = tables.open_dump(dump, "btf")
    tasks = workload(dump)["tasks"].values()
    pids = [task["pid"] for task in tasks if task["is"] == kind]
    return {pid for pid in pids if is_throttled(prog, pid)}


def test_owner_of_a_mutex_is_throttled(dump: str) -> None:
    owner = pid(dump, "limited-owner")
    root = root_of(dump, pid(dump, "limited-waiter"))
    assert root.pid == owner
    is_said = "throttled by the quota of /limited (1ms each 1.0s)" in root.reason
    assert is_said == (owner in throttled(dump, "throttled"))
    assert throttles_in_kernel(dump) or not is_said


def test_throttled_tasks_are_a_verdict(dump: str) -> None:
    found = verdicts(dump, "cpu-throttled")
    if not throttled(dump, "throttled"):
        assert found == []
        return
    (found,) = found
    assert "throttled by the quota of /limited (1ms each 1.0s)" in found["text"]
    if throttles_in_kernel(dump):
        assert found["severity"] == "warning"
        assert f"{pid(dump, 'limited-owner')} limited-owner" in found["text"]


def test_load_is_what_the_kernel_counts(dump: str) -> None:
    """Without those that are throttled."""
    load = json_of("prstat", dump, "--load")["load"]
    runs = {
        each
        for group in load["groups"]
        if group["state"] == "R"
        for each in group["pids"]
    }
    assert not runs & throttled(dump, "throttled")
    assert not runs & throttled(dump, "deadline")
    assert {pid(dump, "starving-hog"), pid(dump, "starved-idle")} <= runs


def test_owner_with_few_turns(dump: str) -> None:
    root = root_of(dump, pid(dump, "slow-waiter"))
    assert root.pid == pid(dump, "slow-owner")
    # It runs now and then.
    assert re.match(r"waits for CPU 5 \(SCHED_IDLE\)|runs on CPU 5", root.reason)
    named = [each["text"] for each in verdicts(dump, "priority-inversion")]
    assert not [text for text in named if "slow-owner" in text]


def test_task_that_cannot_leave_its_cpu(dump: str) -> None:
    setter, pinned = workload(dump)["setter"], pid(dump, "pinned")
    locks = json_of("locks", dump)["locks"]
    (lock,) = (each for each in locks if setter in each["waiters"])
    assert [own["pid"] for own in lock["owners"]] == [pinned]
    assert lock["what"].endswith(", which has migration disabled")


def test_tasks_without_a_turn(dump: str) -> None:
    (found,) = (
        each for each in verdicts(dump, "cpu-starved") if "cpu2: " in each["text"]
    )
    # One of them may have had one while the dump began.
    waits = ("starved-idle (SCHED_IDLE)", "starved-nice (nice 19)")
    named = (f"{pid(dump, name.split()[0])} {name}" for name in waits)
    assert any(name in found["text"] for name in named)
    assert f"{pid(dump, 'starving-hog')} starving-hog (nice -20) runs" in found["text"]


# --- a CPU on its way offline


def test_hotplug_is_one_chain(dump: str) -> None:
    waits = spinning(lab.build(dump))
    for waiter in ("offliner", "reader"):
        root = root_of(dump, waits[waiter])
        assert root.pid == waits["keeper"]


# --- owners that died


def test_lock_of_who_died(dump: str) -> None:
    waiter = pid(dump, "dead-waiter")
    locks = json_of("locks", dump)["locks"]
    (lock,) = (each for each in locks if waiter in each["waiters"])
    assert lock["owners"] == []
    (found,) = verdicts(dump, "oops")
    assert found["severity"] == "critical"
    assert f"{workload(dump)['dead']} dying" in found["evidence"][0]
    assert found["text"].endswith("1 task waits for a lock left locked")
    assert f"waiting: pid {waiter}" in found["evidence"][1]


def test_warnings_are_counted_by_place(dump: str) -> None:
    (found,) = verdicts(dump, "kernel-warnings")
    assert "warned 20 times in bm_warn [busymodule]" in found["text"]


# --- who makes work


TICK_NS = 4_000_000
"""Of Debian's kernels."""


def runs_a_work(dump: str, cpu: int) -> bool:
    """Return whether a CPU was not just stopped between two of its work items."""
    prog = tables.open_dump(dump, "btf")
    workers = per_cpu(prog["cpu_worker_pools"], cpu)[0].workers.address_of_()
    return any(
        worker.task == cpu_curr(prog, cpu) and worker.current_func
        for worker in list_for_each_entry("struct worker", workers, "node")
    )


AGAIN = "bm_timer_again [busymodule]"


def timers_of(prog: Program, cpu: int, *, first_alone: bool = False) -> set[int]:
    """Return the timers of a CPU, of each clock, and those that run."""
    offset = offsetof(prog.type("struct hrtimer"), "node.node")
    found = set()
    for base in per_cpu(prog["hrtimer_bases"], cpu).clock_base:
        nodes = rbtree_inorder_for_each(base.active.rb_root.rb_root.address_of_())
        places = [node.value_() - offset for node in nodes]
        found |= {*places[: 1 if first_alone else None]}
        found |= {base.running.value_()} - {0}
    return found


def function_of(prog: Program, timer: int) -> str | None:
    function = Object(prog, "struct hrtimer", address=timer).function.value_()
    return KernelText(Reader(prog), LossLog()).named(function)


@pytest.mark.parametrize(
    ("kind", "role", "function"),
    [
        ("tasklet", "tasklets", "bm_tasklet_again [busymodule]"),
        ("timer", "free", AGAIN),
        ("work", "works", "bm_work_again [busymodule]"),
    ],
)
def test_storms(dump: str, kind: str, role: str, function: str) -> None:
    storms = json_of("cpus", dump)["storms"]
    kinds = [each["kind"] for each in storms]
    if kind == "work" and not runs_a_work(dump, workload(dump)["cpus"][role]):
        assert kind not in kinds
        return
    if kind == "timer" and kind not in kinds:
        prog, cpu = tables.open_dump(dump, "btf"), workload(dump)["cpus"][role]
        first = timers_of(prog, cpu, first_alone=True)
        if AGAIN not in {function_of(prog, timer) for timer in first}:
            return  # the tick was due before it
        # A busy host ran the guest so little that its ticks are as many.
        known = workload(dump)
        up_ns = known["times"]["monotonic_ns"]
        assert known["busy"]["timers"] * TICK_NS < 1.2 * up_ns
        return
    found = storms[kinds.index(kind)]
    assert kinds.count(kind) == 1
    assert found["cpu"] == workload(dump)["cpus"][role]
    # A CPU may have been stopped between two tasklets.
    assert found["function"] in (function, *([UNKNOWN] if kind == "tasklet" else []))
    function = found["function"]
    said = [each["text"] for each in verdicts(dump, "cpu-storm")]
    assert len([text for text in said if function in text]) == 1


def test_timer_that_runs() -> None:
    """It is in no queue meanwhile."""
    with borrowed("fieldcpus-6.12") as prog:
        sources, _ = without_work(prog)
        cpu = workload("fieldcpus-6.12")["cpus"]["free"]
        bases = per_cpu(prog["hrtimer_bases"], cpu).clock_base
        (timer,) = (at for at in timers_of(prog, cpu) if function_of(prog, at) == AGAIN)
        for base in bases:
            put_word(base.active.rb_root.rb_leftmost, 0)
            put_word(base.running, 0)
        assert sources.timer(cpu) is None
        put_word(bases[0].running, timer)
        found = sources.timer(cpu)
        assert found == Object(prog, "struct hrtimer", address=timer).function.value_()


FUNCTION = 0xFFFFFFFFC0401234
"""An address of code, of which the names alone count."""

POINTER = "a pointer"


def without_work(prog: Program) -> tuple[WorkSources, int]:
    """Return what finds sources, and a CPU for which nothing is queued."""
    queues = ("call_single_queue", "raised_list", "lazy_list")
    cpu = next(
        cpu
        for cpu in for_each_online_cpu(prog)
        if not any(per_cpu(prog[name], cpu).first for name in queues)
        if not any(per_cpu(prog[f"tasklet_{x}vec"], cpu).head for x in ("", "hi_"))
    )
    reader, losses = Reader(prog), LossLog()
    text = KernelText(reader, losses)
    return WorkSources(reader, read_percpu(reader, losses), text, losses), cpu


def test_caller_within_a_caller() -> None:
    """Newer kernels have csd_do_func(), which is none of those that are asked for."""
    prog = tables.open_dump("fieldcpus-6.12", "btf")
    sources, cpu = without_work(prog)
    names = ("f", "csd_do_func", "__flush_smp_call_function_queue", "sysvec_call")
    function = kernel_symbol(prog, "wake_up_var")
    sources._read[cpu] = CpuStack(names, (function, 0, 0, 0))
    assert sources.call(cpu) == "wake_up_var"
    sources._read[cpu] = CpuStack(("its_return_thunk", *names[1:]), (1, 0, 0, 0))
    assert sources.call(cpu) is None


def test_tasklet_that_ends_by_queueing_itself() -> None:
    """Its tail call to __tasklet_schedule() leaves no frame of the tasklet."""
    prog = tables.open_dump("fieldcpus-6.12", "btf")
    sources, cpu = without_work(prog)
    caller = "tasklet_action_common.isra.0"
    function = kernel_symbol(prog, "__tasklet_schedule")
    sources._read[cpu] = CpuStack(("__tasklet_schedule", caller), (function, 0))
    assert sources.tasklet(cpu) is None
    function = kernel_symbol(prog, "wake_up_var")
    sources._read[cpu] = CpuStack(("wake_up_var", caller), (function, 0))
    assert sources.tasklet(cpu) == function


@cache
def calls_in(dump: str, function: str) -> dict[str, int]:
    """The functions that one calls, with a return address of each call."""
    prog = tables.open_dump(dump, "dwarf")
    symbol = prog.symbol(function)
    code = prog.read(symbol.address, symbol.size)
    found = {}
    for at in range(len(code) - 5):
        if code[at] != 0xE8:  # call rel32
            continue
        after = symbol.address + at + 5
        distance = int.from_bytes(code[at + 1 : at + 5], "little", signed=True)
        with suppress(LookupError):
            target = prog.symbol((after + distance) % (1 << 64))
            if target.name.startswith("__x86_indirect_thunk"):
                found[POINTER] = after
            elif target.address == (after + distance) % (1 << 64):
                found[target.name] = after
    return found


@pytest.mark.parametrize(
    ("called", "by", "is_known"),
    [
        ("bm_tasklet_again", POINTER, True),
        # It returns, or it was not called yet.
        ("its_return_thunk", POINTER, False),
        ("__x86_indirect_thunk_rdx", POINTER, False),
        # The caller's own doing, and what interrupted it.
        ("wake_up_var", "wake_up_var", False),
        ("asm_sysvec_apic_timer_interrupt", POINTER, False),
    ],
)
def test_what_a_caller_calls(called: str, by: str, is_known: bool) -> None:
    """By a stack as a CPU may have that is stopped at any instruction."""
    dump = "fieldcpus-6.12"
    sources, cpu = without_work(tables.open_dump(dump, "btf"))
    names = (called, "tasklet_action_common", "handle_softirqs")
    after = calls_in(dump, "tasklet_action_common")[by]
    sources._read[cpu] = CpuStack(names, (FUNCTION, after, after))
    assert sources.tasklet(cpu) == (FUNCTION if is_known else None)


def test_cpu_that_returns_by_a_thunk(tmp_path: Path) -> None:
    """A CPU was stopped so once: whose return it is is unknown, its caller is not."""
    dump, name = "fieldcpus-6.12", "tasklet_action_common"
    prog, cpu = tables.open_dump(dump, "dwarf"), workload(dump)["cpus"]["tasklets"]
    trace = prog.stack_trace(cpu_curr(prog, cpu))
    callers = [each for each in trace if each.name == name and not each.is_inline]
    if not callers:
        pytest.skip("the CPU was stopped between two softirqs, by chance")
    (caller,) = callers
    words = {
        RSP_OFFSET: caller.sp - 8,
        RIP_OFFSET: prog.symbol("its_return_thunk").address,
    }
    copy = tmp_path / "vmcore"
    sparse.copy_file(lab.build(dump).elf, copy)
    segments = load_segments(copy)
    stack = file_offset(prog, segments, caller.sp - 8)
    # It can have queued itself by then, which would name it.
    head = per_cpu(prog["tasklet_vec"], cpu).head.address_
    assert head is not None
    with copy.open("r+b") as file:
        for place, word in (
            (stack, calls_in(dump, name)[POINTER]),
            (file_offset(prog, segments, head), 0),
            *((cpu_registers(copy)[cpu] + at, word) for at, word in words.items()),
        ):
            file.seek(place)
            file.write(word.to_bytes(8, "little"))
    found = open_target(TargetSpec(path=str(copy), types="btf")).prog
    report = collect_cpus(found, options=CpusOptions(doing=True))
    (storm,) = (each for each in report.storms or () if each.kind == "tasklet")
    assert (storm.cpu, storm.function) == (cpu, UNKNOWN)
    (queue,) = (each for each in report.run_queues if each.cpu == cpu)
    assert queue.doing == f"kernel {name}"


def test_disabled_interrupt(dump: str) -> None:
    masked = workload(dump)["masked"]
    irqs = json_of("cpus", dump, "-i")["irqs"]
    assert [each["irq"] for each in irqs if each["disabled"]] == [masked["irq"]]
    (found,) = verdicts(dump, "irq-disabled")
    assert f"irq {masked['irq']} {masked['name']} is disabled" in found["text"]


# --- names and stacks


def test_bpf_program_has_its_name(dump: str) -> None:
    bpf = workload(dump)["bpf"]
    (answer,) = json_of("whatis", dump, bpf["address"])["answers"]
    assert answer["symbol"]["name"] == bpf["name"]
    assert answer["symbol"]["module"] == "bpf"


def test_stack_of_a_task_that_runs(dump: str) -> None:
    hog = pid(dump, "starving-hog")
    stacks = json_of("prstat", dump, "--stacks", "-p", str(hog))["stacks"]
    (found,) = stacks
    assert found["pids"] == [hog]
    assert found["frames"][-1] == "(user mode)"
