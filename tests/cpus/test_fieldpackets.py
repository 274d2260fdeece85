# SPDX-License-Identifier: LGPL-2.1-or-later

"""Floods of packets, and a thread of RCU without its turn, by what the guest did."""

from typing import Any

import pytest

from msatools.cpus import storms
from msatools.cpus.cpus import collect_cpus
from msatools.cpus.model import CrossCall
from msatools.cpus.storms import call_text
from tests.cpus.test_fieldcalls import lock_of, waits
from tests.cpus.test_fieldcpus import json_of, root_of, verdicts, workload
from tests.truth import tables

POLLED, STEERED = range(2)
"""The floods: by NAPI on the CPU that sends, and by the backlog of another."""


@pytest.fixture(params=["fieldpackets-6.1", "fieldpackets-6.12", "fieldpackets-7.x"])
def dump(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def storms_of(dump: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in json_of("cpus", dump)["storms"] if each["kind"] == kind]


# --- packets


def test_flood_names_its_device(dump: str) -> None:
    """By /proc/softirqs that the guest read a moment before."""
    flood, known = workload(dump)["floods"][POLLED], waits(dump)
    (found,) = storms_of(dump, "softirq")
    assert found["cpu"] == flood["cpu"]
    assert found["function"] == "veth_poll [veth]"
    assert found["device"] == flood["receiver"]
    said = known["softirqs"][flood["cpu"]]
    came = found["per_second"] * json_of("cpus", dump)["taken_at_ns"] / 1e9
    # The guest is dumped within a second or so.
    assert said <= came < 1.5 * said
    (verdict,) = (
        each for each in verdicts(dump, "cpu-storm") if "NET_RX" in each["text"]
    )
    assert f"veth_poll [veth] polls {flood['receiver']}" in verdict["text"]


def test_backlog_that_is_full(dump: str) -> None:
    """By /proc/net/softnet_stat that the guest read a moment before."""
    flood, known = workload(dump)["floods"][STEERED], waits(dump)
    cpu = flood["cpu"]
    (found,) = storms_of(dump, "drop")
    assert (found["cpu"], found["device"]) == (cpu, flood["receiver"])
    assert found["function"] == "process_backlog"
    assert known["dropped"][cpu] <= found["waiting"] < 2 * known["dropped"][cpu]
    packets = found["waiting"] / found["share"] - found["waiting"]
    assert known["packets"][cpu] <= packets < 1.5 * known["packets"][cpu]


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


def test_work_in_an_interrupt_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """RCU asks a CPU without interrupts for a sign of life, by irq_work."""
    monkeypatch.setattr(storms, "CALLS_A_SECOND", 0)
    dump = "stalls-locks-6.12"
    found = collect_cpus(tables.open_dump(dump, "btf")).storms or ()
    calls = {each.cpu: each.function for each in found if each.kind == "call"}
    assert calls[1] == "rcu_iw_handler (irq_work)"


# --- RCU


def test_barrier_ends_at_the_throttled_thread(dump: str) -> None:
    known = waits(dump)
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
    quota = "throttled by the quota of /limited (1ms each 1.0s)"
    assert root.reason == quota
    (verdict,) = verdicts(dump, "cpu-throttled")
    assert verdict["text"].startswith(f"pid {known['callbacks']} rcuo")
    assert verdict["text"].endswith(f"is {quota}")


def test_all_say_that_the_thread_is_throttled(dump: str) -> None:
    known = waits(dump)
    if not known["throttled"]:
        pytest.skip("this kernel throttles no kernel thread")
    pid = known["callbacks"]
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
