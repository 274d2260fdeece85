# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes each column: its meaning, and the bound that it has on one kernel."""

from msatools.kernel.clocks import Accounting
from msatools.legends import find
from msatools.legends.prstat import COLUMNS, LEGEND
from msatools.prstat.model import Why

_FIELDS = {entry.name: entry for entry in COLUMNS.entries}
FIELDS = tuple(_FIELDS)
"""Names of all columns."""

_SLEEPS = frozenset(("IOW", "BLK", "INT", "STP", "COV"))
_COUNTED = frozenset(("IOW", "BLK", "INT"))
_DELAYS = frozenset(("BIO", "SWP", "RCL", "THR", "CMP", "COW", "IRQ"))


def why(name: str, accounting: Accounting, latency_is_bound: bool) -> Why:
    """
    Describe a column, with the bound that it has on one kernel.

    :raises KeyError: if there is no such column
    """
    field = _FIELDS[name]
    bound, text = field.bound, field.text
    if name == "LAT" and latency_is_bound:
        bound = "upper"
        text += (
            " This kernel lets tasks sleep on the run queue (delayed dequeue, v6.12), "
            "which counts as latency when they wake up."
        )
    elif name in ("OFF", "OFF/VCX") and latency_is_bound:
        bound = "lower"
        text += " As LAT is an upper bound here, this is a lower one."
    elif name in ("USR", "SYS") and accounting.precise_cputime:
        text += " On nohz_full CPUs of this kernel the split is exact."
    elif name in _SLEEPS and not accounting.schedstats:
        bound = "not kept"
        text += (
            " schedstats are off: sysctl kernel.sched_schedstats=1 has them kept from "
            "then on."
        )
    elif name in _COUNTED and latency_is_bound:
        bound = "lower"
        text += (
            " Sleep on the run queue (delayed dequeue, v6.12) is not in it: COV says "
            "how much is."
        )
    elif name in _DELAYS and not accounting.delayacct:
        bound = "not kept"
        text += (
            " Delay accounting is off: sysctl kernel.task_delayacct=1 has it kept for "
            "tasks that start from then on."
        )
    elif name == "IRQ" and not accounting.irq_time:
        bound = "not kept"
        text += " This kernel does not keep time of interrupts apart."
    return Why(name, bound, text)


def explain(name: str, accounting: Accounting, latency_is_bound: bool) -> list[Why]:
    """Describe all that a name in the output stands for, on one kernel."""
    found = find(LEGEND, name)
    return [
        why(entry.name, accounting, latency_is_bound)
        if group is COLUMNS
        else Why(entry.name, entry.bound, entry.text)
        for group, entry in found
    ]
