# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders device interrupts, architecture interrupts and softirqs, by CPU."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.model import CpusReport, Irq, Vector
from msatools.render import plain
from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    advice,
    free_text,
)
from msatools.render.blocks import text as line
from msatools.render.cells import NOT_KEPT, plural
from msatools.render.cpus.words import amount, numbers_text, percent

_CPUS = 16
"""Maximum number of CPUs with a column each."""

_WIDTH = 120
"""Maximum width of a table with a column for each CPU."""

_NAME_WIDTH = 32
_WHY_NO_TIME = "time per interrupt: Linux keeps none"


def irq_tables(
    report: CpusReport, *, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the tables of device interrupts, architecture interrupts and softirqs.

    :param rows: Maximum number of device interrupts; all if not given.
    :param verbose: Whether to list interrupts without any count, too.
    """
    yield from _devices(report, rows, verbose)
    for header, vectors in (
        ("VECTOR", report.vectors),
        ("SOFTIRQ", report.softirqs),
    ):
        shown = [row for row in vectors or () if verbose or row.total != 0]
        if shown:
            yield line()
            yield _vectors(header, shown, report)
    if verbose:
        yield line(Span(_WHY_NO_TIME, "dim"))


def _devices(report: CpusReport, rows: int | None, verbose: bool) -> Iterator[Block]:
    if report.irqs is None:
        yield line("Interrupts of devices were not read.")
        return
    ranked = sorted(report.irqs, key=lambda irq: (-(irq.total or 0), irq.irq))
    wanted = [irq for irq in ranked if verbose or irq.total != 0]
    if not wanted:
        yield line("No device has interrupted.")
    else:
        shown = wanted[:rows]
        left = len(wanted) - len(shown)
        more = More("interrupt", left, is_chosen=rows is not None)
        yield replace(_device_table(shown, report, verbose), more=more)
    if still := len(ranked) - len(wanted):
        it = "it" if still == 1 else "them"
        words = Span(f"… {plural(still, 'interrupt')} did not come", "dim")
        yield line(words, advice(f"-v shows {it}"))


def _device_table(irqs: Sequence[Irq], report: CpusReport, verbose: bool) -> Table:
    columns = [Column("IRQ", "right"), free_text("NAME", least=12)]
    if verbose:
        columns.append(free_text("CHIP", worth=0, least=8))
        columns.append(free_text("HANDLER", worth=1, least=8))
    columns += [
        free_text("AFFINITY", worth=3, least=12),
        free_text("GOES-TO", worth=4, least=7),
        Column("COUNT", "right"),
        Column("SHARE", "right"),
    ]
    rows = [
        _CpuRow(_device(irq, report.interval_ns, verbose), irq.counts, irq.total)
        for irq in irqs
    ]
    return _by_cpu(columns, rows, report)


def _device(irq: Irq, interval_ns: int | None, verbose: bool) -> Sequence[Cell]:
    affinity = numbers_text(irq.affinity, verbose)
    return (
        str(irq.irq),
        _name(irq, verbose),
        *((irq.chip or NOT_KEPT, _handlers(irq)) if verbose else ()),
        affinity + _remarks(irq),
        numbers_text(irq.effective, verbose),
        amount(irq.total, interval_ns),
        percent(irq.share),
    )


def _handlers(irq: Irq) -> str:
    """Return the functions of an interrupt's handlers, each once."""
    return ", ".join(dict.fromkeys(irq.functions)) or NOT_KEPT


def _remarks(irq: Irq) -> str:
    words = ["managed"] * irq.managed + ["disabled"] * irq.disabled
    return f" ({', '.join(words)})" if words else ""


def _name(irq: Irq, verbose: bool) -> str:
    if len(irq.name) > _NAME_WIDTH and not verbose:
        return f"{irq.name[: _NAME_WIDTH - 1]}…"
    return irq.name or NOT_KEPT


def _vectors(header: str, vectors: Sequence[Vector], report: CpusReport) -> Table:
    columns = (Column(header), Column("COUNT", "right"))
    rows = [
        _CpuRow(
            (vector.name, amount(vector.total, report.interval_ns)),
            vector.counts,
            vector.total,
            (vector.text,),
        )
        for vector in vectors
    ]
    return _by_cpu(columns, rows, report, free_text("WHAT", worth=1))


# --- by CPU


class _CpuRow(Struct, frozen=True):
    """A row of a table with counts by CPU: the cells before and after them."""

    cells: Sequence[Cell]
    counts: Mapping[int, int]
    total: int | None
    last: Sequence[Cell] = ()


def _by_cpu(
    columns: Sequence[Column],
    rows: Sequence[_CpuRow],
    report: CpusReport,
    *last: Column,
) -> Table:
    """Return a table with a column for each CPU, or one with the busiest CPU."""
    numbers = [cpu.cpu for cpu in report.cpus]
    cpus = [cpu for cpu in numbers if any(cpu in row.counts for row in rows)]
    cells = [(*row.cells, _most(row), *row.last) for row in rows]
    summed_up = Table((*columns, Column("MOST ON"), *last), cells)
    if len(cpus) <= _CPUS:
        by_cpu = [Column(f"cpu{cpu}", "right") for cpu in cpus]
        cells = [
            (*row.cells, *_counts(row, cpus, report.interval_ns), *row.last)
            for row in rows
        ]
        table = Table((*columns, *by_cpu, *last), cells, narrower=summed_up)
        if _width(table) <= _WIDTH:
            return table
    return summed_up


def _counts(
    row: _CpuRow, cpus: Sequence[int], interval_ns: int | None
) -> Sequence[Cell]:
    if row.total != 0 and not row.counts:
        # There is no count by CPU, or it could not be read.
        return [NOT_KEPT] * len(cpus)
    return [amount(row.counts.get(cpu, 0), interval_ns) for cpu in cpus]


def _most(row: _CpuRow) -> str:
    if not row.counts or not row.total:
        return NOT_KEPT
    cpu, count = max(row.counts.items(), key=lambda item: (item[1], -item[0]))
    share = 100 * count // row.total
    return f"cpu{cpu} {share or '<1'} %"


def _width(table: Table) -> int:
    return max(sum(len(span.text) for span in spans) for spans in plain.lines(table))
