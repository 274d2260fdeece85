# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders memstat's report as tables; has the labels of the classes of memory."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from msatools.memory.model import Check, MemstatReport, Section, VmallocCaller
from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    free_text,
    line,
)
from msatools.render.header import header, notes
from msatools.render.memstat import breakdowns
from msatools.render.memstat.breakdowns import groups_table, pins_table
from msatools.reports.units import duration, size

# --- The rows of memstat's tables: labels and order of the classes.


class ClassRow(Struct, frozen=True):
    """A line of the table for one class."""

    name: str
    label: str
    counter: str = ""
    """Label of the kernel counter to check against; empty for the counter's name."""

    always: bool = True
    """Whether the line is shown even without pages."""


GROUPS: tuple[tuple[str, tuple[ClassRow, ...]], ...] = (
    (
        "Free",
        (
            ClassRow("free.buddy", "buddy"),
            ClassRow("free.pcp", "per-CPU lists", "sum of pcp->count"),
            ClassRow("free.hugetlb", "hugetlb pool", always=False),
            ClassRow("free.unaccepted", "unaccepted", always=False),
        ),
    ),
    (
        "User",
        (
            ClassRow("user.anon", "anon"),
            ClassRow("user.ksm", "KSM", always=False),
            ClassRow(
                "user.hugetlb", "hugetlb", "nr_huge_pages, with free", always=False
            ),
        ),
    ),
    (
        "Cache",
        (
            ClassRow("cache.file", "file"),
            ClassRow("cache.exec", "exec and libs"),
            ClassRow("cache.shmem", "shmem"),
            ClassRow("cache.blockdev", "block devices", "Buffers"),
        ),
    ),
    (
        "Kernel",
        (
            ClassRow("kernel.slab", "slab", "NR_SLAB_*, with large kmalloc"),
            ClassRow("kernel.large_kmalloc", "large kmalloc"),
            ClassRow("kernel.page_tables", "page tables"),
            ClassRow("kernel.page_tables_own", "kernel's tables"),
            ClassRow("kernel.stacks", "stacks"),
            ClassRow("kernel.vmalloc", "vmalloc", "nr_vmalloc_pages, with stacks"),
            ClassRow("kernel.vmap", "mapped pages (vmap)", always=False),
            ClassRow("kernel.percpu", "percpu", "pcpu_nr_populated"),
            ClassRow("kernel.pipes", "pipe buffers", always=False),
            ClassRow("kernel.sockets", "socket buffers", always=False),
            ClassRow("kernel.rings", "rings (perf, io_uring, packets)", always=False),
            ClassRow("kernel.requests", "requests of disks", always=False),
            ClassRow("kernel.dma", "queues of devices", always=False),
            ClassRow("kernel.dmabuf", "dma-bufs", always=False),
            ClassRow("kernel.mempools", "memory pools", always=False),
            ClassRow("kernel.tracing", "tracing", always=False),
            ClassRow("kernel.globals", "hash tables", always=False),
            ClassRow("kernel.memmap", "memmap, hot-plugged", always=False),
            ClassRow("kernel.huge_zero", "huge zero page", always=False),
            ClassRow("kernel.zsmalloc", "zsmalloc", always=False),
            ClassRow("kernel.movable", "movable", always=False),
            ClassRow("kernel.unattributed", "unattributed"),
        ),
    ),
)

REST = (
    ClassRow("reserved", "Reserved"),
    ClassRow("offline", "Balloon"),
    ClassRow("hwpoison", "Hardware-poisoned", always=False),
    ClassRow("device", "Device memory", always=False),
    ClassRow("excluded", "Not in the dump", always=False),
    ClassRow("unreadable", "Unreadable", always=False),
)


# --- the tables


def memstat_blocks(report: MemstatReport, top: int | None = None) -> Iterator[Block]:
    """
    Yield the blocks of an ``msa-memstat`` report.

    :param top: Maximum rows of each table but that of the classes; ``None``: all.
    """
    # The callers of vmalloc are only collected with -v.
    verbose = report.vmalloc is not None
    yield from header(report.target, *_facts(report), verbose=verbose)
    views = [*_views(report, top, verbose)]
    if views:
        # The requested views come first: a screen has no room for the classes, too.
        yield from _summary(report, verbose)
        yield from views
        if verbose:
            yield line()
            yield _classes(report) if report.pages else _counters(report)
    else:
        yield _classes(report) if report.pages else _counters(report)
        yield from _summary(report, verbose)
    if report.vmalloc is not None:
        yield line()
        yield line(Span("vmalloc by caller", "title"))
        yield _vmalloc(report.vmalloc, report.target.page_size, top)


def _summary(report: MemstatReport, verbose: bool) -> Iterator[Block]:
    """Yield the results of the checks, the duration of the scan, and the notes."""
    if report.pages:
        yield line(*_verdict(report))
    if report.scan_ns is not None and (verbose or report.target.live):
        yield line(Span(_scanned(report, report.scan_ns), "dim"))
    yield from notes(report)


def _views(report: MemstatReport, top: int | None, verbose: bool) -> Iterator[Block]:
    """Yield the requested views other than the classes."""
    for name, groups in (report.by or {}).items():
        yield line()
        yield line(Span(f"Pages by {name}", "title"))
        yield groups_table(name, groups, report.target.page_size, top)
        yield from pins_table(groups, top, verbose=verbose)
    if report.unattributed is not None:
        page_size = report.target.page_size
        yield from breakdowns.unattributed_blocks(report.unattributed, page_size, top)
    if report.leaks is not None:
        yield from breakdowns.leak_blocks(report.leaks, top)
    if report.frag is not None:
        yield from breakdowns.frag_blocks(report.frag, report.target.page_size)
    if report.sections is not None:
        yield line()
        yield line(Span("Memory sections", "title"))
        yield _sections(report.sections, top)


def _scanned(report: MemstatReport, scan_ns: int) -> str:
    words, changes = f"scanned in {duration(scan_ns)}", report.changes
    if changes is None:
        return words
    if changes.allocated_pages is not None and changes.freed_pages is not None:
        allocated, freed = changes.allocated_pages, changes.freed_pages
        words += f", {allocated:,} pages allocated and {freed:,} freed meanwhile"
    if changes.changed_folios:
        words += f"; about {changes.about_folios:,} folios changed under it, "
        words += f"by {changes.changed_folios:,} in {changes.reread_pages:,} pages"
        words += " read again"
    elif changes.reread_pages:
        words += f"; no folio changed in {changes.reread_pages:,} pages read again"
    return words


def _facts(report: MemstatReport) -> tuple[str, ...]:
    coverage = report.coverage
    lost = coverage["excluded_pages"] + coverage["unreadable_pages"]
    covered = 100 * (report.pages - lost) / report.pages if report.pages else 0
    shown = "100%" if not lost else f"{min(covered, 99.99):.2f}%"
    if coverage["section_table_lost"]:
        shown = "not all"
    return (
        f"{report.pages:,} pages",
        f"{coverage['memmap_reads']:,} reads",
        f"{shown} covered",
    )


def _classes(report: MemstatReport) -> Table:
    lines = tuple(_Lines(report).lines())
    columns = tuple(_columns(report))
    # On a narrow terminal the reason of a difference is below its row.
    reasons = [_reason_of(line, len(columns)) for line in lines]
    short = tuple(
        line if reason is None else (*line[:-1], str(line[-1]).split()[0])
        for line, reason in zip(lines, reasons, strict=True)
    )
    notes = {
        row: (line(Span(f"    {reason}", "dim")),)
        for row, reason in enumerate(reasons)
        if reason is not None
    }
    narrower = Table(columns, short, notes=notes)
    return Table(columns, lines, narrower=narrower)


def _reason_of(line: Sequence[Cell], columns: int) -> str | None:
    """Return the difference in a row and its reason; ``None`` if there is no reason."""
    last = line[-1]
    if len(line) < columns or not isinstance(last, str) or "  " not in last:
        return None
    return last.replace("  ", ": ", 1)


def _counters(report: MemstatReport) -> Table:
    """Return the table of kernel counters, for dumps without any struct page."""
    page_size = report.target.page_size
    labels = {
        **{row.name: f"{title}: {row.label}" for title, rows in GROUPS for row in rows},
        **{row.name: row.label for row in REST},
        "cache": "Cache",
        "managed": "Managed",
        "swapcache": "(in the swap cache)",
    }
    lines = (
        (
            labels.get(check.name, check.name),
            check.counter,
            "-" if check.kernel_pages is None else f"{check.kernel_pages:,}",
            "" if check.kernel_pages is None else size(check.kernel_pages * page_size),
        )
        for check in report.checks
    )
    columns = (
        Column("CLASS"),
        free_text("KERNEL SAYS"),
        Column("PAGES", "right"),
        Column("SIZE", "right"),
    )
    return Table(columns, tuple(lines))


def _columns(report: MemstatReport) -> Iterator[Column]:
    yield Column("CLASS")
    yield Column("PAGES", "right")
    if report.interval_ns is not None:
        yield Column("CHANGE", "right")
    yield Column("SIZE", "right", worth=2)
    yield Column("%RAM", "right", worth=1)
    yield free_text("KERNEL SAYS", worth=0)
    yield Column("DIFF")


class _Lines:
    """Makes the lines of the table of classes."""

    def __init__(self, report: MemstatReport) -> None:
        self._report = report
        self._pages = {count.name: count.pages for count in report.classes}
        self._deltas = {count.name: count.delta_pages for count in report.classes}
        self._checks = {check.name: check for check in report.checks}
        rest = sum(self._pages[row.name] for row in REST)
        self._managed = report.pages - rest

    def lines(self) -> Iterator[Sequence[Cell]]:
        for title, rows in GROUPS:
            names = [row.name for row in rows]
            check = self._checks.get("cache") if title == "Cache" else None
            yield self._line(Span(title, "title"), names, check)
            for row in rows:
                if row.always or self._pages[row.name] or self._differs(row):
                    yield self._class_line(row, f"  {row.label}")
        managed = [row.name for _, rows in GROUPS for row in rows]
        label = Span("Managed", "title")
        yield self._line(label, managed, self._checks.get("managed"))
        for row in REST:
            if row.always or self._pages[row.name] or self._differs(row):
                gone = row.name == "excluded" and self._report.target.live
                yield self._class_line(row, "Gone meanwhile" if gone else row.label)
        total = [count.name for count in self._report.classes]
        yield self._line(Span("Total", "title"), total, None)
        physical = self._report.physical_pages
        if physical is None:
            yield (Span("Physical", "title"), "-")
        else:
            yield self._amount(Span("Physical", "title"), physical)
        offline = self._report.coverage["offline_pages"]
        if offline:
            yield self._amount("(offline sections, not read)", offline)
        swapped = self._checks.get("swapcache")
        if swapped is not None and (swapped.walk_pages or swapped.difference):
            line = self._amount("(in the swap cache)", swapped.walk_pages)
            torn = bool(self._report.target.torn)
            yield (*line, swapped.counter, _difference(swapped, torn=torn))
        swap, free = self._report.swap_pages, self._report.swap_free_pages
        if swap and free is not None:
            page_size = self._report.target.page_size
            used = size((swap - free) * page_size)
            change = () if self._report.interval_ns is None else ("",)
            whole = f"of {size(swap * page_size)}"
            yield ("(on swap)", f"{swap - free:,}", *change, used, "", whole)
            yield from self._compressed(change)

    def _compressed(self, change: tuple[str, ...]) -> Iterator[Sequence[Cell]]:
        """Yield lines for swapped pages that are compressed in memory (zswap, zram)."""
        use = self._report.swap
        if use is None:
            return
        page_size = self._report.target.page_size
        for name, behind in (("zswap", use.zswap), ("zram", use.zram)):
            if behind is None or not behind.stored_pages:
                continue
            pool = behind.pool_bytes
            whole = "" if pool is None else f"compressed to {size(pool)}"
            stored = behind.stored_pages
            amount = size(stored * page_size)
            # A zram disk also stores the swap header, and perhaps data other than swap.
            label = f"(in {name})" if name == "zram" else f"(of it in {name})"
            yield (label, f"{stored:,}", *change, amount, "", whole)

    def _differs(self, row: ClassRow) -> bool:
        check = self._checks.get(row.name)
        return check is not None and check.difference != 0

    def _class_line(self, row: ClassRow, label: str) -> Sequence[Cell]:
        cell: Cell = label
        if row.name == "kernel.unattributed" and self._pages[row.name]:
            cell = Span(label, "warn")
        return self._line(cell, [row.name], self._checks.get(row.name), row.counter)

    def _line(
        self, label: Cell, names: list[str], check: Check | None, counter: str = ""
    ) -> Sequence[Cell]:
        deltas = [self._deltas[name] for name in names]
        change = sum(delta for delta in deltas if delta is not None)
        line = self._amount(label, sum(self._pages[name] for name in names), change)
        if check is None:
            return line
        torn = bool(self._report.target.torn)
        return (*line, counter or check.counter, _difference(check, torn=torn))

    def _amount(self, label: Cell, pages: int, change: int = 0) -> tuple[Cell, ...]:
        share = ""
        if self._managed and pages <= self._managed:
            share = f"{100 * pages / self._managed:.1f}"
        amount = (size(pages * self._report.target.page_size), share)
        if self._report.interval_ns is None:
            return (label, f"{pages:,}", *amount)
        return (label, f"{pages:,}", f"{change:+,}" if change else "0", *amount)


def _difference(check: Check, *, torn: bool) -> Cell:
    if check.difference is None:
        return Span("- (lost)", "warn")
    if not check.difference:
        return Span("ok", "good")
    amount = f"{check.difference:+,}"
    if check.explained_by is not None:
        return f"{amount}  {check.explained_by}"
    if torn:
        return Span(f"{amount}  (torn)", "bad")
    return Span(f"{amount}  UNEXPLAINED", "bad")


def _verdict(report: MemstatReport) -> Iterator[Cell]:
    checks = report.checks
    exact = sum(check.difference == 0 for check in checks)
    lost = sum(check.difference is None for check in checks)
    unexplained = sum(
        bool(check.difference) and check.explained_by is None for check in checks
    )
    explained = len(checks) - exact - unexplained - lost
    yield f"{len(checks)} checks: {exact} exact"
    if explained:
        yield f", {explained} explained"
    if lost:
        yield Span(f", {lost} without the kernel's figure", "warn")
    if unexplained and report.target.torn:
        why = "the memory is torn: pages and counters are of different moments"
        yield Span(f", {unexplained} not, as {why}", "bad")
    elif unexplained:
        yield Span(f", {unexplained} UNEXPLAINED", "bad")


def _caller(caller: VmallocCaller) -> str:
    if caller.module is None:
        return caller.caller
    return f"{caller.caller} [{caller.module}]"


def _vmalloc(
    callers: Sequence[VmallocCaller], page_size: int, top: int | None
) -> Table:
    rows = [
        (_caller(c), f"{c.areas:,}", f"{c.pages:,}", size(c.pages * page_size))
        for c in callers[:top]
    ]
    rest = callers[len(rows) :]
    if rest:
        areas, pages = sum(c.areas for c in rest), sum(c.pages for c in rest)
        label = f"({len(rest)} more)"
        rows.append((label, f"{areas:,}", f"{pages:,}", size(pages * page_size)))
    headers = ("AREAS", "PAGES", "SIZE")
    return Table((free_text("CALLER"), *(Column(h, "right") for h in headers)), rows)


def _sections(sections: Sequence[Section], top: int | None) -> Table:
    shown = sections[:top]
    columns = (
        Column("NR", "right"),
        Column("STATE"),
        Column("PFNS"),
        Column("PAGES", "right", worth=3),
        Column("NODE", "right"),
        Column("ZONES", worth=2),
        Column("FIRST STRUCT PAGE", worth=1),
        Column("LAST STRUCT PAGE", worth=0),
    )
    return Table(
        columns,
        [
            (
                str(section.nr),
                f"{section.state}, {'early' if section.early else 'hotplug'}",
                f"{section.pfn:#x}-{section.pfn + section.pages - 1:#x}",
                f"{section.pages:,}",
                "-" if section.node is None else str(section.node),
                ",".join(section.zones) or "-",
                hex(section.memmap),
                hex(section.memmap_end),
            )
            for section in shown
        ],
        More("section", len(sections) - len(shown), is_chosen=True),
    )
