# SPDX-License-Identifier: LGPL-2.1-or-later

"""The columns of the table of CPUs, and words for CPUs, sets and findings."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from msatools.cpus.model import Cpu, CpuSet, CpusReport, Diagnostic, State
from msatools.render.blocks import (
    NOT_KEPT,
    Cell,
    Column,
    Span,
    Style,
    Text,
    line,
    share,
)
from msatools.reports.units import count, ranges

# --- Describes CPUs, sets and findings in a few words.


INDENT = "    "

_RANGES = 8
"""Maximum number of ranges in a list; a set of every other CPU has many."""

_LONG_RATE = 100_000
_BAD: Collection[str] = (
    *("not-ticked", "partition-invalid"),
    *("cpu-stalled", "cpu-starved", "rcu-stalled"),
)


def numbers_text(numbers: Collection[int], verbose: bool = True) -> str:
    """Return numbers as ranges; if not *verbose*, at most the first :data:`_RANGES`."""
    return ranges(numbers, None if verbose else _RANGES) or "none"


def amount(number: int | None, interval_ns: int | None) -> str:
    """
    Return a count since boot, or the rate per second of an interval.

    >>> amount(4125, None), amount(206_295, 5 * 10**9), amount(1, 5 * 10**9)
    ('4.1K', '41259', '<1')
    """
    if number is None:
        return NOT_KEPT
    if interval_ns is None:
        return count(number)
    if interval_ns <= 0:
        return NOT_KEPT
    rate = (number * 10**9 + interval_ns // 2) // interval_ns
    if number > 0 and not rate:
        # Not "0": it did happen.
        return "<1"
    return str(rate) if rate < _LONG_RATE else count(rate)


def percent(share: float | None) -> str:
    """
    Return a share in percent.

    >>> percent(0.7104), percent(1.0), percent(None)
    ('71.0', '100', '-')
    """
    if share is None:
        return NOT_KEPT
    return f"{100 * share:.1f}" if share < 0.9995 else "100"


def possible_cpus(report: CpusReport) -> int:
    """Return the number of possible CPUs, also those without a row."""
    return max(report.coverage.get("cpus", 0), len(report.cpus))


def is_part(report: CpusReport) -> bool:
    """Return whether only some CPUs were selected."""
    return len(report.cpus) < possible_cpus(report)


def kind_cell(one: CpuSet) -> Cell:
    """Return the cell for the kind of a set."""
    return Span(one.kind, "bad") if one.kind == "invalid" else one.kind


def findings_lines(findings: Sequence[Diagnostic]) -> Iterator[Text]:
    """Yield the findings, each with its advice below."""
    for finding in findings:
        style: Style = "bad" if finding.code in _BAD else "warn"
        yield line(Span(f"! {finding.text}", style))
        if finding.advice:
            yield line(INDENT, Span(f"do: {finding.advice}", "dim"))


# --- The columns of the table of CPUs: mpstat's columns, and their cells.


_SHOWN_STATES: Sequence[State] = (
    "stopped",
    "inactive",
    "isolated",
    "nohz_full",
    "rcu_nocb",
    "no-intr",
    "idle",
)
"""States to show, in this order."""

_SET_WIDTH = 20

_ALARMING: Collection[str] = ("stopped", "inactive")


class CpuContext(Struct, frozen=True):
    """Inputs of cells in addition to their row."""

    interval_ns: int | None
    panicked: Collection[int]
    """CPUs that panicked."""

    shows_idle: bool
    """Whether another column shows that a CPU is idle."""

    full: bool
    """Whether to show implied states, and long names in full."""


def context(report: CpusReport, names: Sequence[str], full: bool) -> CpuContext:
    """Return the context for the cells of a table with these columns."""
    return CpuContext(
        interval_ns=report.interval_ns,
        panicked={queue.cpu for queue in report.run_queues if queue.panicked},
        shows_idle="current" in names,
        full=full,
    )


Write = Callable[[Cpu, CpuContext], Cell]


def default_columns(cpus: Sequence[Cpu]) -> tuple[str, ...]:
    """Return the names of the default columns, without ``set`` or ``gst`` if unused."""
    leave_out = set(_ON_REQUEST)
    if all(cpu.set == "default" for cpu in cpus):
        leave_out.add("set")
    if not any(cpu.gst_ns for cpu in cpus):
        leave_out.add("gst")
    return tuple(name for name in COLUMNS if name not in leave_out)


def make_columns(names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns with these names; headers known from mpstat are lower case."""
    return tuple(
        Column(
            name.upper() if name in _UPPER else name,
            "left" if name in _LEFT else "right",
            worth=_WORTH.get(name),
            least=_LEAST.get(name),
            keeps="end" if name == "set" else "start",
        )
        for name in names
    )


def write(name: str, cpu: Cpu, about: CpuContext) -> Cell:
    """Return the cell of a CPU in the column *name*."""
    return _WRITERS[name](cpu, about)


def explanations(names: Sequence[str]) -> Iterator[Text]:
    """Yield explanations of requested columns that are empty or special."""
    for group, why in _WHY.items():
        if asked := [name for name in group if name in names]:
            yield line(Span(f"{', '.join(asked)}: {why}", "dim"))


def state_cell(cpu: Cpu, about: CpuContext) -> Cell:
    """Return a CPU's states, without those that other states or columns imply."""
    if not cpu.online:
        return Span("off", "dim")
    states: list[str] = [state for state in _SHOWN_STATES if state in cpu.state]
    if about.shows_idle and is_idle(cpu):
        states = [state for state in states if state != "idle"]
    if not about.full and "nohz_full" in states and "rcu_nocb" in states:
        # nohz_full implies it (rcu_init_nohz()).
        states.remove("rcu_nocb")
    text = ",".join(states) or "on"
    if cpu.cpu in about.panicked:
        return Span(f"panicked,{text}" if states else "panicked", "bad")
    return Span(text, "warn") if any(s in _ALARMING for s in states) else text


def is_idle(cpu: Cpu) -> bool:
    """Return whether a CPU is known to run its idle task."""
    return cpu.current is not None and cpu.current.sched_class == "idle"


def total_ns(cpu: Cpu) -> int | None:
    """Return the total time of a CPU; ``None`` if a part is unknown."""
    parts = (cpu.usr_ns, cpu.sys_ns, cpu.irq_ns, cpu.wt_ns, cpu.idl_ns)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    # Steal and guest times are unknown only without a hypervisor or guests, so 0.
    return sum(known) + (cpu.st_ns or 0) + (cpu.gst_ns or 0)


def _set(cpu: Cpu, about: CpuContext) -> str:
    if about.full or len(cpu.set) <= _SET_WIDTH:
        return cpu.set
    # The end of a path identifies it better.
    return f"…{cpu.set[1 - _SET_WIDTH :]}"


def _current(cpu: Cpu, _: CpuContext) -> Cell:
    if is_idle(cpu):
        return Span("idle", "dim")
    return NOT_KEPT if cpu.current is None else cpu.current.comm


def _runq(cpu: Cpu, _: CpuContext) -> str:
    # A current value, not a counter.
    return NOT_KEPT if cpu.runq is None else str(cpu.runq)


def _not_kept(cpu: Cpu, _: CpuContext) -> str:
    return NOT_KEPT


def _count(get: Callable[[Cpu], int | None]) -> Write:
    return lambda cpu, about: amount(get(cpu), about.interval_ns)


def _time(get: Callable[[Cpu], int | None]) -> Write:
    def write_time(cpu: Cpu, _: CpuContext) -> str:
        time, total = get(cpu), total_ns(cpu)
        return NOT_KEPT if time is None or total is None else share(time, total)

    return write_time


_WRITERS: Mapping[str, Write] = {
    "cpu": lambda cpu, about: str(cpu.cpu),
    "set": _set,
    "state": state_cell,
    "minf": _count(lambda cpu: cpu.minf),
    "mjf": _count(lambda cpu: cpu.mjf),
    "xcal": _count(lambda cpu: cpu.xcal),
    "tlb": _count(lambda cpu: cpu.tlb),
    "intr": _count(lambda cpu: cpu.intr),
    "soft": _count(lambda cpu: cpu.soft),
    "csw": _count(lambda cpu: cpu.csw),
    "icsw": _count(lambda cpu: cpu.icsw),
    "migr": _count(lambda cpu: cpu.migr),
    "smtx": _not_kept,
    "srw": _not_kept,
    "syscl": _not_kept,
    "runq": _runq,
    "usr": _time(lambda cpu: cpu.usr_ns),
    "nice": _time(lambda cpu: cpu.nice_ns),
    "sys": _time(lambda cpu: cpu.sys_ns),
    "irq": _time(lambda cpu: cpu.irq_ns),
    "softirq": _time(lambda cpu: cpu.softirq_ns),
    "wt": _time(lambda cpu: cpu.wt_ns),
    "st": _time(lambda cpu: cpu.st_ns),
    "gst": _time(lambda cpu: cpu.gst_ns),
    "idl": _time(lambda cpu: cpu.idl_ns),
    "current": _current,
}

COLUMNS = tuple(_WRITERS)
"""Names of all columns."""

_ON_REQUEST = ("icsw", "migr", "smtx", "srw", "syscl", "nice", "softirq")
_UPPER = frozenset(("cpu", "set", "state", "current"))
_LEFT = frozenset(("set", "state", "current"))

_LEAST_WORTH = (
    *("srw", "smtx", "syscl", "gst", "nice", "softirq", "tlb", "minf", "xcal", "mjf"),
    *("soft", "migr", "icsw", "intr", "wt", "csw", "st", "irq"),
)
"""Columns to leave out if a table is too wide, the first to go first."""

_WORTH = {name: worth for worth, name in enumerate(_LEAST_WORTH)}
_LEAST = {"set": 10, "current": 10, "state": 12}
"""Maps columns of long text to the minimum width that cells may be cut to."""

_WHY = {
    ("smtx", "srw", "syscl"): "Linux counts none by CPU",
    ("icsw", "migr"): "from the tasks that are here, or were here last",
}
