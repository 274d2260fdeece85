# SPDX-License-Identifier: LGPL-2.1-or-later

"""Floods of packets, and a thread of RCU without its turn, by what the guest did."""

import re
from typing import Any

import pytest
from drgn import Program

from fixtures import lab
from msatools.cpus import storms
from msatools.cpus.cpus import Cpus, CpusOptions, collect_cpus
from msatools.cpus.cross_calls import read_calls
from msatools.cpus.diagnostics import Known, findings
from msatools.cpus.model import CrossCall, Storm
from msatools.cpus.polls import PacketCounts, packets_delta
from msatools.cpus.storms import call_text
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog, quietly
from msatools.program import describe
from msatools.selfdesc.find import find_type, offset_of
from msatools.tasks.text import KernelText
from tests.cpus.guests import is_throttled
from tests.cpus.test_fieldcalls import lock_of
from tests.cpus.test_fieldcpus import json_of, root_of, verdicts, workload
from tests.support.dumps import open_dump, spinning
from tests.support.overlay import put
from tests.truth import tables

POLLED, STEERED = range(2)
"""The floods: by NAPI on the CPU that sends, and by the backlog of another."""


@pytest.fixture(params=["fieldpackets-6.1", "fieldpackets-6.12", "fieldpackets-7.x"])
def dump(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def storms_of(dump: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in json_of("cpus", dump)["storms"] if each["kind"] == kind]


# --- packets


def test_flood_names_its_device(dump: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By /proc/softirqs that the guest read a moment before.

    How often it polls is up to the host: a slow one does not reach the usual limit.
    """
    flood, known = workload(dump)["floods"][POLLED], spinning(lab.build(dump))
    usual, cpu = storms.POLLS_A_SECOND, flood["cpu"]
    said = known["softirqs"][cpu]
    rate = said * 1e9 / known["moment_ns"]
    # The flood goes on until the dump, a second or so later.
    monkeypatch.setattr(storms, "POLLS_A_SECOND", min(usual, 0.9 * rate))
    report = collect_cpus(tables.open_dump(dump, "btf"))
    # Other CPUs poll, too, and some of them nearly as often.
    (found,) = (
        each
        for each in report.storms or ()
        if (each.kind, each.cpu) == ("softirq", cpu)
    )
    assert found.function == "veth_poll [veth]"
    assert found.device == flood["receiver"]
    assert report.taken_at_ns is not None
    assert found.per_second is not None
    came = found.per_second * report.taken_at_ns / 1e9
    assert said <= came < 1.5 * said
    words = f"veth_poll [veth] polls {flood['receiver']}"
    (text,) = (
        each.text
        for each in report.findings
        if re.match(rf"cpu{cpu} takes .* NET_RX", each.text)
    )
    assert words in text
    if found.per_second < usual:
        assert cpu not in {each["cpu"] for each in storms_of(dump, "softirq")}
        return
    (verdict,) = (
        each
        for each in verdicts(dump, "cpu-storm")
        if re.match(rf"cpu{cpu} .* NET_RX", each["text"])
    )
    assert words in verdict["text"]


def test_backlog_that_is_full(dump: str) -> None:
    """By /proc/net/softnet_stat that the guest read a moment before."""
    flood, known = workload(dump)["floods"][STEERED], spinning(lab.build(dump))
    cpu = flood["cpu"]
    (found,) = storms_of(dump, "drop")
    assert found["cpu"] == cpu
    # Only if a packet waits at that moment.
    device = found.get("device")
    assert device in (flood["receiver"], None)
    assert found["function"] == "process_backlog"
    assert known["dropped"][cpu] <= found["waiting"] < 2 * known["dropped"][cpu]
    packets = found["waiting"] / found["share"] - found["waiting"]
    assert known["packets"][cpu] <= packets < 1.5 * known["packets"][cpu]
    (verdict,) = (
        each["text"]
        for each in verdicts(dump, "cpu-storm")
        if "dropped" in each["text"]
    )
    said, _, now = verdict.partition("; ")
    assert said.startswith(f"cpu{cpu} has dropped {found['waiting']:,} packets (")
    assert said.endswith("as its backlog was full (since boot)")
    assert now == (f"waiting there now: packets of {device}" if device else "")


@pytest.mark.parametrize(
    ("device", "in_interval", "end"),
    [
        (None, False, " (since boot)"),
        (None, True, ""),
        ("eth0", False, " (since boot); waiting there now: packets of eth0"),
        ("eth0", True, "; waiting there now: packets of eth0"),
    ],
)
def test_words_on_drops(device: str | None, in_interval: bool, end: str) -> None:
    storm = Storm(
        kind="drop",
        cpu=3,
        function="process_backlog",
        share=0.12,
        waiting=50_000,
        device=device,
    )
    nothing: dict[str, Any] = {"cpus": (), "sets": (), "queues": (), "irqs": ()}
    known = Known(**nothing, in_interval=in_interval, storms=(storm,))
    (found,) = findings(known)
    text = "cpu3 has dropped 50,000 packets (12 % of those that came), as its backlog "
    assert found.text == f"{text}was full{end}"
    assert found.evidence == ("drop: process_backlog",)


def test_packets_of_an_interval() -> None:
    """The kernel's counts wrap; some kernels have a sign."""
    before = {
        0: PacketCounts(10, 1),
        1: PacketCounts((1 << 32) - 1, (1 << 31) - 1),
        2: PacketCounts(7, 7),
    }
    after = {
        0: PacketCounts(30, 6),
        1: PacketCounts(4, -(1 << 31)),
        3: PacketCounts(9, 9),
    }
    assert packets_delta(before, after) == {
        0: PacketCounts(20, 5),
        1: PacketCounts(5, 1),
    }


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_drops_of_an_interval(kernel: str) -> None:
    """Those of before are not in each sample again."""
    dump = f"fieldpackets-{kernel}"
    prog = open_dump(dump, "btf")
    cpu = workload(dump)["floods"][STEERED]["cpu"]
    session = Cpus(prog, describe(prog), CpusOptions())
    session.begin(quietly)

    def dropped() -> list[tuple[int, int | None]]:
        storms = session.advance(quietly).storms or ()
        return [(each.cpu, each.waiting) for each in storms if each.kind == "drop"]

    assert dropped() == []
    percpu = read_percpu(Reader(prog), LossLog())
    row = percpu.cpus.tolist().index(cpu)
    kind = find_type(prog, "struct softnet_data")
    place = int(percpu.addresses("softnet_data")[row]) + offset_of(kind, "dropped")
    count = int.from_bytes(prog.read(place, 4), "little")
    put(prog, place, (count + 2_000).to_bytes(4, "little"))
    assert dropped() == [(cpu, 2_000)]
    assert dropped() == []


def test_other_cpus_have_no_flood(dump: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They poll, too: the rates of two are within a tenth of the flood's."""
    monkeypatch.setattr(storms, "POLLS_A_SECOND", 1e9)
    found = collect_cpus(tables.open_dump(dump, "btf")).storms or ()
    assert "softirq" not in {each.kind for each in found}


# --- calls


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("cm_called [callmodule]", "async", None), "cm_called [callmodule]"),
        (("rcu_iw_handler", "irq-work", None), "rcu_iw_handler (irq_work)"),
        ((None, "wake-up", 18), "a wake-up of 18 rcu_preempt"),
        ((None, "wake-up", None), "a wake-up"),
        ((None, "async", None), None),
    ],
)
def test_names_of_calls(call: tuple[Any, Any, int | None], text: str | None) -> None:
    function, kind, pid = call
    comm = None if pid is None else "rcu_preempt"
    queued = CrossCall(
        cpu=1, function=function, caller=None, kind=kind, pid=pid, comm=comm
    )
    assert call_text(queued) == text


def queued_on(prog: Program, cpu: int) -> list[CrossCall]:
    """Return what is queued for a CPU, its own works too."""
    reader, losses = Reader(prog), LossLog()
    text = KernelText(reader, losses)
    percpu = read_percpu(reader, losses)
    return [*read_calls(reader, percpu, (cpu,), {}, 0, text.name, losses)]


def calls_by_cpu(prog: Program) -> dict[int, str]:
    found = collect_cpus(prog).storms or ()
    return {each.cpu: each.function for each in found if each.kind == "call"}


def test_work_in_an_interrupt_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """RCU asks a CPU without interrupts for a sign of life, by irq_work.

    There can be wake-ups of tasks, too; what comes first is said.
    """
    monkeypatch.setattr(storms, "CALLS_A_SECOND", 0)
    prog = tables.open_dump("stalls-locks-6.12", "btf")
    texts = [call_text(each) for each in queued_on(prog, 1)]
    assert "rcu_iw_handler (irq_work)" in texts
    assert calls_by_cpu(prog)[1] in texts


@pytest.mark.parametrize(("dump", "cpu"), [("nmi-6.12", 0), ("watchdogs-soft-6.12", 1)])
def test_own_works_are_no_calls(
    dump: str, cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU has put off to its own interrupt, no other CPU asks it for."""
    monkeypatch.setattr(storms, "CALLS_A_SECOND", 0)
    prog = tables.open_dump(dump, "btf")
    own = "wake_up_klogd_work_func"
    assert own in {each.function for each in queued_on(prog, cpu)}
    assert calls_by_cpu(prog).get(cpu) != f"{own} (irq_work)"


# --- RCU


def test_barrier_ends_at_the_throttled_thread(dump: str) -> None:
    known = spinning(lab.build(dump))
    if not known["throttled"]:
        # Since v6.18 a kernel thread never is, as it never goes back to user mode.
        assert known["freed"] == known["queued"]
        assert not verdicts(dump, "cpu-throttled")
        return
    lock = lock_of(dump, known["barrier"])
    assert lock["what"] == f"RCU callbacks of CPU {workload(dump)['cpus']['callbacks']}"
    assert [owner["pid"] for owner in lock["owners"]] == [known["callbacks"]]
    root = root_of(dump, known["barrier"])
    assert root.pid == known["callbacks"]
    if not is_throttled(tables.open_dump(dump, "btf"), known["callbacks"]):
        pytest.skip("the quota had just begun anew, by chance")
    quota = "throttled by the quota of /limited (1ms each 1.0s)"
    assert root.reason == quota
    (verdict,) = verdicts(dump, "cpu-throttled")
    assert verdict["text"].startswith(f"pid {known['callbacks']} rcuo")
    assert verdict["text"].endswith(f"is {quota}")


def test_all_say_that_the_thread_is_throttled(dump: str) -> None:
    known = spinning(lab.build(dump))
    if not known["throttled"]:
        pytest.skip("this kernel throttles no kernel thread")
    pid = known["callbacks"]
    if not is_throttled(tables.open_dump(dump, "btf"), pid):
        pytest.skip("the quota had just begun anew, by chance")
    queues = json_of("cpus", dump, "-v")["run_queues"]
    ((waiting_cpu, waiting),) = (
        (each["cpu"], task)
        for each in queues
        for task in each["waiting"]
        if task["pid"] == pid
    )
    assert waiting["throttled"]
    (row,) = json_of("prstat", dump, "-p", str(pid))["tasks"]
    assert row["on"] == {"kind": "quota", "path": "/limited", "cpu": waiting_cpu}
