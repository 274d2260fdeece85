# SPDX-License-Identifier: LGPL-2.1-or-later

"""Enabled kinds of accounting are those in each guest's /proc."""

from types import SimpleNamespace

import pytest
from drgn import FaultError, Program

from fixtures import lab
from msatools.kernel.clocks import Accounting, read_accounting
from msatools.kernel.report import LossLog
from tests.prstat.dumps import OFF
from tests.support.dumps import TYPES, open_dump


def accounting(name: str, types: str) -> Accounting:
    losses = LossLog()
    found = read_accounting(open_dump(name, types), losses)
    assert not losses.notes
    return found


@pytest.mark.parametrize("name", OFF)
def test_stable_clock(name: str) -> None:
    """The clock is unstable if the kernel's clock source is not the TSC."""
    found = accounting(name, "btf")
    source = open_dump(name, "dwarf")["curr_clocksource"].name.string_()
    assert found.stable_clock == (source == b"tsc")


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", ["memory-5.10"])
def test_kernel_without_switch(name: str, types: str) -> None:
    """5.10 has no sysctl for delay accounting, which is on by default."""
    found, run = accounting(name, types), lab.build(name)
    assert found.schedstats is False
    assert found.delayacct is True
    assert b"nodelayacct" not in run.truth("proc/cmdline")


class Memory:
    """A kernel with switches only."""

    def __init__(self, **values: int | None) -> None:
        self.values = values

    def type(self, name: str, filename: str | None) -> "Memory":
        assert name == "struct rq"
        return self

    def has_member(self, name: str) -> bool:
        return name == "prev_irq_time" and "sched_clock_irqtime" in self.values

    def symbol(self, name: str) -> SimpleNamespace:
        if name not in self.values:
            raise LookupError(name)
        return SimpleNamespace(address=list(self.values).index(name))

    def read(self, address: int, size: int) -> bytes:
        value = list(self.values.values())[address]
        if value is None:
            raise FaultError("not there", address)
        return value.to_bytes(size, "little")


def of(**values: int | None) -> tuple[Accounting, LossLog]:
    losses = LossLog()
    prog: Program = Memory(**values)  # type: ignore[assignment]
    return read_accounting(prog, losses), losses


ALL_ON = {
    **dict.fromkeys(("sched_schedstats", "delayacct_on", "sched_clock_irqtime"), 1),
    "context_tracking_key": 3,
    "__sched_clock_stable": 1,
}
"""Values of switches; a static key is a counter."""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Accounting(None, None, False, False, True)),
        (ALL_ON, Accounting(True, True, True, True, True)),
        ({"sched_clock_irqtime": 1}, Accounting(None, None, True, False, True)),
        # An older name of the key.
        ({"context_tracking_enabled": 1}, Accounting(None, None, False, True, True)),
        (
            {"context_tracking_key": 0, "context_tracking_enabled": 1},
            Accounting(None, None, False, False, True),
        ),
    ],
)
def test_switches(values: dict[str, int], expected: Accounting) -> None:
    found, losses = of(**values)
    assert found == expected
    assert not losses.notes


def test_unreadable() -> None:
    found, losses = of(sched_schedstats=None, delayacct_on=0)
    assert (found.schedstats, found.delayacct) == (None, False)
    assert losses.lost == {"accounting_unreadable": 1}
