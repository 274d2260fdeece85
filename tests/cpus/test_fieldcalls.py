# SPDX-License-Identifier: LGPL-2.1-or-later

"""Calls that CPUs make for others, and who waits for them, by what the guest did."""

from typing import Any

import pytest

from fixtures import lab
from msatools.cpus import storms
from msatools.cpus.cpus import CpusOptions, collect_cpus
from tests.cpus.test_fieldcpus import json_of, root_of, verdicts, workload
from tests.support.dumps import spinning
from tests.truth import tables


@pytest.fixture(params=["fieldcalls-6.1", "fieldcalls-6.12", "fieldcalls-7.x"])
def dump(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def lock_of(dump: str, waiter: int) -> dict[str, Any]:
    locks = json_of("locks", dump)["locks"]
    (lock,) = (each for each in locks if waiter in each["waiters"])
    return dict(lock)


# --- a CPU on its way offline


def test_cpu_that_a_task_cannot_leave(dump: str) -> None:
    """Who takes a CPU down waits for the task, and others for that."""
    known, gone = spinning(lab.build(dump)), workload(dump)["cpus"]["gone"]
    for waiter in ("takedown", "offliner", "reader"):
        root = root_of(dump, known[waiter])
        assert root.pid == known["pinned"]
    lock = lock_of(dump, known["takedown"])
    assert lock["type"] == "rcuwait"
    (owner,) = lock["owners"]
    assert (owner["pid"], owner["confidence"]) == (known["pinned"], "exact")
    text = f"CPU {gone} to be left by all tasks: 1 has migration disabled"
    assert lock["what"] == text


# --- RCU's callbacks


def test_barrier_waits_for_the_thread_that_makes_callbacks(dump: str) -> None:
    known, cpus = spinning(lab.build(dump)), workload(dump)["cpus"]
    lock = lock_of(dump, known["barrier"])
    assert lock["what"] == f"RCU callbacks of CPU {cpus['callbacks']}"
    (owner,) = lock["owners"]
    assert (owner["pid"], owner["confidence"]) == (known["callbacks"], "exact")


def test_barrier_ends_at_who_keeps_the_thread_from_running(dump: str) -> None:
    """The second one waits for the first one's mutex."""
    known, hogged = spinning(lab.build(dump)), workload(dump)["cpus"]["hogged"]
    for waiter in ("barrier", "second"):
        root = root_of(dump, known[waiter])
        assert root.pid == known["callbacks"]
        hog = f"which real-time task {known['hog']} hog has"
        assert root.reason == f"waits for CPU {hogged}, {hog}"
    hog = f"cpu{hogged} runs pid {known['hog']} hog (FIFO 50)"
    texts = [each["text"] for each in verdicts(dump, "cpu-starved")]
    (text,) = (text for text in texts if hog in text)
    assert str(known["callbacks"]) in text


def test_callbacks_that_wait_have_a_name(dump: str) -> None:
    storms = json_of("cpus", dump)["storms"]
    (found,) = (each for each in storms if each["kind"] == "callback")
    busy = spinning(lab.build(dump))["busy"]
    assert found["cpu"] == workload(dump)["cpus"]["callbacks"]
    assert found["function"] == "cm_freed [callmodule]"
    # Nobody made any of them; the kernel's own wait among them.
    assert busy["freed"] == 0
    assert busy["queued"] < found["waiting"] < busy["queued"] + 1_000
    said = [each["text"] for each in verdicts(dump, "rcu-backlog")]
    assert len([text for text in said if "cm_freed [callmodule]" in text]) == 1


# --- calls


def test_calls_of_other_cpus_have_a_name(
    dump: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CPUs call each other; how often is up to the host."""
    pair = {workload(dump)["cpus"][role] for role in ("calling", "called")}
    prog = tables.open_dump(dump, "btf")
    report = collect_cpus(prog)
    assert report.taken_at_ns is not None
    rates = {cpu.cpu: (cpu.xcal or 0) * 1e9 / report.taken_at_ns for cpu in report.cpus}
    least = min(rates[cpu] for cpu in pair)
    assert least > max(rate for cpu, rate in rates.items() if cpu not in pair)
    monkeypatch.setattr(storms, "CALLS_A_SECOND", least)
    found = [each for each in collect_cpus(prog).storms or () if each.kind == "call"]
    # There is always a call on its way.
    assert found
    for storm in found:
        assert storm.cpu in pair
        assert storm.per_second == pytest.approx(rates[storm.cpu])
    # The kernel can just have put a wake-up or a work before it.
    names = {storm.function for storm in found}
    own = [name for name in names if name.startswith("a wake-up") or "(irq" in name]
    assert names - {*own} == {"cm_called [callmodule]"}


def test_few_calls_are_no_storm(dump: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storms, "CALLS_A_SECOND", 1e9)
    found = collect_cpus(tables.open_dump(dump, "btf")).storms or ()
    assert "call" not in {each.kind for each in found}


def test_interrupts_have_their_handlers(
    dump: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a limit that the guest's disks reach."""
    monkeypatch.setattr(storms, "INTERRUPTS_A_SECOND", 0.1)
    prog = tables.open_dump(dump, "btf")
    report = collect_cpus(prog, options=CpusOptions(irqs=True))
    assert report.irqs is not None
    assert report.taken_at_ns is not None
    often = {
        (irq.irq, cpu): ", ".join(irq.functions)
        for irq in report.irqs
        for cpu, count in irq.counts.items()
        if count * 1e9 / report.taken_at_ns >= 0.1 and irq.functions
    }
    found = [each for each in report.storms or () if each.kind == "interrupt"]
    assert {(each.irq, each.cpu): each.function for each in found} == often
    assert "nvme_irq" in often.values()


# --- trampolines


def test_trampolines_have_their_names(dump: str) -> None:
    symbols = workload(dump)["symbols"]
    assert {each["module"] for each in symbols} == {
        "__builtin__ftrace",
        "__builtin__kprobes",
    }
    for symbol in symbols:
        (answer,) = json_of("whatis", dump, symbol["address"])["answers"]
        assert answer["symbol"]["name"] == symbol["name"]
        assert answer["symbol"]["module"] == symbol["module"]


@pytest.mark.parametrize(
    ("role", "inner", "trampoline", "outer"),
    [
        ("traced", "cm_tracer", "ftrace_trampoline", "cm_traced tracing"),
        ("probed", "cm_prober", "kprobe_optinsn_page", "cm_probed probing"),
    ],
)
def test_stacks_go_on_below_trampolines(
    dump: str, role: str, inner: str, trampoline: str, outer: str
) -> None:
    cpu = workload(dump)["cpus"][role]
    stacks = json_of("cpus", dump, "--stacks")["stacks"]
    frames = next(each["frames"] for each in stacks if each["cpu"] == cpu)
    assert frames[-1] in ("ret_from_fork", "ret_from_fork_asm")  # since v6.6
    start = frames.index("kthread")
    # The CPU may have been between two of them.
    if f"{inner} [callmodule]" in frames:
        place = frames.index(trampoline)
        modules = [f"{name} [callmodule]" for name in outer.split()]
        assert frames[place + 1 : start] == modules
