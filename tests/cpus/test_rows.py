# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows of CPUs are put together from their parts, made by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.cpus.model import Cpu
from msatools.cpus.processors import Parts, cpu_rows
from msatools.cpus.times import Counts, counts
from tests.cpus.madecpus import processor, queue, queued
from tests.cpus.setdumps import masks_of

COLUMNS = (
    *("minf", "mjf", "xcal", "tlb", "intr", "soft", "csw", "runq"),
    *("usr_ns", "nice_ns", "sys_ns", "irq_ns", "softirq_ns", "wt_ns", "st_ns"),
    *("gst_ns", "idl_ns"),
)
NUMBERS = {name: number for number, name in enumerate(COLUMNS, 1)}
"""A different value for each counter."""


def numbers(*values: int) -> Counts:
    return counts(np.array(values), np.ones(len(values), np.bool_))


def parts(**others: Any) -> Parts:
    """Make two CPUs; the first is online and runs a task."""
    given: dict[str, Any] = {
        "cpus": (0, 1),
        "masks": masks_of((0, 1), (0,)),
        "no_intr": (),
        "sets": {0: "default", 1: "default"},
        "counters": {0: NUMBERS, 1: dict.fromkeys(NUMBERS)},
        "processors": (processor(0), processor(1, active=False)),
        "queues": {0: queue(0, current=queued(5)), 1: queue(1, current=None)},
        "icsw": None,
        "migr": None,
    }
    return Parts(**(given | others))


def first(**others: Any) -> Cpu:
    return cpu_rows(parts(**others))[0]


def second(**others: Any) -> Cpu:
    return cpu_rows(parts(**others))[1]


def test_numbers_need_not_begin_at_0() -> None:
    """On some machines CPUs are missing."""
    made = parts(
        cpus=(2, 7),
        masks=masks_of((2, 7), (2, 7)),
        sets={2: "default", 7: "/db"},
        counters={2: NUMBERS, 7: NUMBERS | {"csw": 70}},
        processors=(processor(2), processor(7)),
        queues={7: queue(7, current=queued(9))},
        icsw=numbers(20, 70),
        migr=numbers(21, 71),
    )
    one, other = cpu_rows(made)
    assert (one.cpu, one.set, one.csw, one.icsw, one.migr) == (2, "default", 7, 20, 21)
    assert one.current is None
    assert (other.cpu, other.set, other.csw) == (7, "/db", 70)
    assert (other.icsw, other.migr) == (70, 71)
    assert other.current is not None
    assert other.current.pid == 9
    assert other.processor == processor(7)


MASKS = masks_of((0, 1), (0,))
STOP = queued(17, sched_class="stop")


def masks(**others: Any) -> dict[str, Any]:
    return {"masks": replace(MASKS, **others)}


def runs(**others: Any) -> dict[str, Any]:
    return {"queues": {0: queue(0, **others)}}


STATES: Sequence[tuple[dict[str, Any], str]] = [
    ({}, "on"),
    ({"no_intr": {0}}, "on no-intr"),
    (masks(isolated=(0,)), "on isolated"),
    (masks(nohz_full=(0,)), "on nohz_full"),
    (masks(rcu_nocb=(0,)), "on rcu_nocb"),
    # CPUs of isolcpus= are in the mask of isolated CPUs.
    (masks(isolcpus=(0,), managed_irq=(0,)), "on"),
    ({"processors": (processor(0, active=False),) * 2}, "on inactive"),
    (runs(), "on idle"),
    (runs(current=STOP), "on stopped"),
    # A waiting thread of the stop class has no effect.
    (runs(current=queued(5), waiting=(STOP,)), "on"),
    (runs(current=None), "on"),
    ({"queues": {}}, "on"),
    (
        masks(isolated=(0,), nohz_full=(0,), rcu_nocb=(0, 1))
        | {"no_intr": {0}}
        | runs(),
        "on no-intr isolated nohz_full rcu_nocb idle",
    ),
    # Masks are unknown.
    (masks(isolated=None, nohz_full=None, rcu_nocb=None), "on"),
]
OFFLINE: Sequence[tuple[dict[str, Any], str]] = [
    ({}, "off"),
    # Offline CPUs are not ``no-intr`` or idle.
    ({"no_intr": {1}}, "off"),
    # States that apply once it is online.
    (
        masks(isolated=(1,), nohz_full=(1,), rcu_nocb=(1,)),
        "off isolated nohz_full rcu_nocb",
    ),
]


@pytest.mark.parametrize(("others", "state"), STATES)
def test_states(others: dict[str, Any], state: str) -> None:
    assert first(**others).state == tuple(state.split())


@pytest.mark.parametrize(("others", "state"), OFFLINE)
def test_states_of_an_offline_cpu(others: dict[str, Any], state: str) -> None:
    assert second(**others).state == tuple(state.split())
    assert not second(**others).online
