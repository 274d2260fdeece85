# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-zombies: parents that do not reap, causes and limits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec.structs import replace

from msatools.render.blocks import (
    NOT_KEPT,
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    Text,
    Tree,
    advice,
    free_text,
    line,
    more,
    number_text,
    plural,
    state_cell,
    user,
)
from msatools.render.header import among_read, header, losses, notes, times
from msatools.render.zombies.words import (
    INITIAL_NAMESPACE,
    WHY,
    belongings_text,
    dead_for,
    dead_for_range,
    endings_text,
    evidence_lines,
    evidence_text,
    few,
    limits_table,
    nearest,
    process_text,
    why_text,
    zombies_text,
)
from msatools.reports.units import duration, size
from msatools.zombies.model import (
    Heir,
    HeldMemory,
    HeldNamespace,
    Leak,
    TaskAsked,
    Zombie,
    ZombieGroup,
    ZombiesReport,
    ending,
)

# --- Renders zombies by parent, by another key, singly, and by heir.


GROUPS = 10
"""Default number of groups."""

_EXPLAINED = 3
"""Default number of groups to show with their evidence."""

KEYS = 20
"""Default number of users, control groups or other keys."""

_VERDICTS = 3
_HELD = 2
_INDENT = "    "

Key = Literal["verdict", "cgroup", "user", "ns"]


def has_names(report: ZombiesReport) -> bool:
    """Return whether user names can be looked up: only on the machine itself."""
    return report.target.kind == "kcore"


def by_parent(
    report: ZombiesReport, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the table of groups; the first ones with evidence, owners and advice."""
    groups = report.groups
    shown = groups[:rows] if rows or verbose else groups[:GROUPS]
    explained = len(shown) if rows or verbose else _EXPLAINED
    notes: dict[int, Sequence[Text]] = {}
    for index, group in enumerate(shown[:explained]):
        belongings = belongings_text(group, has_names(report), verbose)
        notes[index] = tuple(explanation(group, verbose, belongings))
    left = len(groups) - len(shown)
    more = More("group", left, is_chosen=rows is not None)
    yield replace(_table(shown, report, verbose), notes=notes, more=more)
    if len(shown) < len(groups):
        yield _verdicts(groups)


def _table(
    groups: Sequence[ZombieGroup], report: ZombiesReport, verbose: bool
) -> Table:
    columns = [
        *(Column("COUNT", "right"), free_text("PARENT", least=12), Column("ST")),
        *(Column("AGE"), free_text("WHY", least=24), free_text("LIMITS", worth=0)),
    ]
    changes = report.interval_ns is not None
    if changes:
        columns.insert(1, Column("+/-", "right"))
    rows = []
    for group in groups:
        cells: list[Cell] = [
            f"{group.count:,}",
            process_text(group.ppid, group.parent_comm),
            state_cell(group.parent_state),
            dead_for_range(group.min_age_ns, group.max_age_ns),
            why_text(group, verbose),
            nearest(group, report.limits or ()),
        ]
        if changes:
            cells.insert(1, NOT_KEPT if group.delta is None else f"{group.delta:+,}")
        rows.append(cells)
    return Table(tuple(columns), rows)


def explanation(
    group: ZombieGroup, verbose: bool, belongings: str = ""
) -> Iterator[Text]:
    """Yield the evidence, exit statuses and owners of a group, and the advice."""
    if words := evidence_text(group):
        yield line(_INDENT, words)
    if verbose:
        yield from evidence_lines(group.evidence, _INDENT)
    for held in group.holds[: None if verbose else _HELD]:
        yield line(_INDENT, held_text(held))
    if belongings:
        yield line(_INDENT, Span(belongings, "dim"))
    if group.advice:
        yield line(_INDENT, Span("do: ", "title"), group.advice)


def held_text(held: HeldNamespace) -> str:
    """Return the line on a PID namespace whose init waits for zombies to be reaped."""
    init = process_text(held.pid, held.comm)
    return (
        f"keeps PID namespace {held.namespace} from ending: its init, {init}, has "
        f"waited for {duration(held.age_ns)} until they are reaped"
    )


def _verdicts(groups: Sequence[ZombieGroup]) -> Text:
    """Return the counts of verdicts over all groups."""
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.verdict] += group.count
    words = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    return line(Span("Why: ", "title"), words)


# --- by verdict, cgroup, user or PID namespace

_HEADERS = {
    "verdict": "VERDICT",
    "cgroup": "CGROUP",
    "user": "USER",
    "ns": "PID NAMESPACE",
}


def tally(
    key: Key, report: ZombiesReport, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the number of zombies and parents for each value of a key."""
    value_of = _key(key, has_names(report))
    by_value: dict[str, list[Zombie]] = {}
    for zombie in report.zombies:
        by_value.setdefault(value_of(zombie), []).append(zombie)
    ranked = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
    shown = ranked[:rows] if rows or verbose else ranked[:KEYS]
    columns = (
        Column("COUNT", "right"),
        free_text(_HEADERS[key], keeps="end"),
        free_text("PARENTS"),
        Column("AGE", worth=0),
        free_text("WHY"),
    )
    most = None if verbose else _VERDICTS
    yield Table(
        columns,
        [_tallied(key, name, group, most) for name, group in shown],
        More("row", len(ranked) - len(shown), is_chosen=rows is not None),
    )


def _key(key: Key, names: bool) -> Callable[[Zombie], str]:
    if key == "verdict":
        return lambda zombie: zombie.verdict
    if key == "cgroup":
        return lambda zombie: zombie.cgroup or NOT_KEPT
    if key == "user":
        return lambda zombie: user(zombie.uid, names)
    return lambda zombie: number_text(zombie.namespace)


def _tallied(
    key: Key, name: str, zombies: Sequence[Zombie], most: int | None
) -> Sequence[Cell]:
    parents = Counter((zombie.ppid, zombie.parent_comm) for zombie in zombies)
    ((largest, count),) = parents.most_common(1)
    words = process_text(*largest)
    if len(parents) > 1:
        words += f" ({count:,}), {plural(len(parents) - 1, 'other')}"
    ages = [zombie.age_ns for zombie in zombies]
    verdicts = Counter(zombie.verdict for zombie in zombies).most_common()
    why = few([f"{number:,} {verdict}" for verdict, number in verdicts], most)
    return (
        f"{len(zombies):,}",
        name,
        words,
        dead_for_range(min(ages), max(ages)),
        WHY[zombies[0].verdict] if key == "verdict" else why,
    )


# --- one by one


def each_zombie(report: ZombiesReport, rows: int | None) -> Iterator[Block]:
    """Yield a table with a row for each zombie."""
    names = has_names(report)
    columns = (
        Column("PID", "right"),
        Column("AGE", "right"),
        free_text("PARENT", least=12),
        Column("VERDICT"),
        Column("ENDED"),
        Column("USER", worth=2),
        Column("THREADS", "right", worth=1),
        Column("TRACER", "right", worth=3),
        Column("PID NAMESPACE", worth=0),
        free_text("CGROUP", worth=4, keeps="end"),
        free_text("COMMAND", least=12),
    )
    shown = report.zombies[:rows] if rows else report.zombies
    left = len(report.zombies) - len(shown)
    yield Table(
        columns,
        [_row(zombie, names) for zombie in shown],
        More("zombie", left, is_chosen=rows is not None),
    )


def _row(zombie: Zombie, names: bool) -> Sequence[Cell]:
    return (
        str(zombie.pid),
        dead_for(zombie.age_ns, zombie.age_bound),
        process_text(zombie.ppid, zombie.parent_comm),
        zombie.verdict,
        ending(zombie.exit_code),
        user(zombie.uid, names),
        str(zombie.threads),
        number_text(zombie.tracer),
        namespace_text(zombie),
        zombie.cgroup or NOT_KEPT,
        zombie.comm,
    )


def namespace_text(zombie: Zombie) -> str:
    """Return a zombie's PID namespace, and its PID there if that is different."""
    within = "" if zombie.ns_pid is None else f" (PID {zombie.ns_pid})"
    return number_text(zombie.namespace) + within


def parent_text(pid: int, comm: str | None, group: ZombieGroup | None) -> str:
    """Return a parent, its state, and the time since it entered the state."""
    words = process_text(pid, comm)
    if group is None or group.parent_state is None:
        return words
    age = group.parent_age_ns
    since = "" if age is None else f" for {duration(age)}"
    return f"{words} ({group.parent_state}{since})"


_PARENTS = 25
_REAPS = {
    True: "reaps its dead",
    False: "does not reap its dead",
    None: "whether it reaps its dead is not known",
}


def heirs_tree(
    report: ZombiesReport, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield a tree for each heir, with the parents whose zombies it would inherit."""
    if not report.heirs:
        yield line("Who would inherit them is not known.")
        return
    counts: Counter[int] = Counter()
    for group in report.groups:
        counts[group.ppid] += group.count
    ranked = sorted(report.heirs, key=lambda heir: -counts[heir.ppid])
    shown = ranked[:rows] if rows or verbose else ranked[:_PARENTS]
    names = {group.ppid: group.parent_comm for group in report.groups}
    below: dict[int | None, list[Heir]] = {}
    for heir in shown:
        below.setdefault(heir.heir, []).append(heir)
    for pid, heirs in below.items():
        label = "no heir"
        if pid is not None:
            label = f"{process_text(pid, heirs[0].heir_comm)}  {_REAPS[heirs[0].reaps]}"
        children = []
        for heir in heirs:
            parent = process_text(heir.ppid, names.get(heir.ppid))
            why = heir.why if pid is None else f"its heir: {heir.why}"
            children.append(Tree(f"{parent}  {zombies_text(counts[heir.ppid])}  {why}"))
        yield Tree(Span(label, "title"), tuple(children))
    yield from more(len(ranked) - len(shown), "parent")


# --- the report


View = Literal["parent", "verdict", "cgroup", "user", "ns", "tree", "leaks"]

_LEAKS = 20


def zombies_blocks(
    report: ZombiesReport,
    *,
    view: View = "parent",
    rows: int | None = None,
    verbose: bool = False,
    some: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of an ``msa-zombies`` report.

    :param rows: Number of groups, rows or parents, if not the default.
    :param some: Whether only some zombies were requested.
    """
    yield from header(report.target, *_facts(report), verbose=verbose)
    if report.asked is not None:
        for task in report.asked:
            yield from _task(task, report, verbose)
    elif view == "leaks":
        yield from _leaks(report.leaks, rows, verbose)
    elif not report.zombies:
        asked = " matches the selection" if some else ""
        yield line(f"No zombie{asked}{among_read(report)}.")
    else:
        yield from _zombies(report, view, rows, verbose)
    yield from _changes(report)
    yield from _foot(report, verbose)


def _facts(report: ZombiesReport) -> Iterator[str]:
    yield from times(report)
    if report.asked is not None:
        return
    if "tasks" in report.coverage:
        yield plural(report.coverage["tasks"], "task")
    parents = {group.ppid for group in report.groups}
    of = f" of {plural(len(parents), 'parent')}" if parents else ""
    yield zombies_text(len(report.zombies)) + of


def _zombies(
    report: ZombiesReport, view: View, rows: int | None, verbose: bool
) -> Iterator[Block]:
    if view == "parent":
        yield from by_parent(report, rows, verbose)
    elif view == "tree":
        yield from heirs_tree(report, rows, verbose)
        return
    elif view != "leaks":
        yield from tally(view, report, rows, verbose)
    if verbose:
        yield from each_zombie(report, rows)
    yield from limits_table(
        report.limits or (), interval=report.interval_ns is not None, verbose=verbose
    )
    if report.held is not None and report.held.bytes:
        yield line(_held(report.held))


def _held(held: HeldMemory) -> str:
    words = f"memory: zombies hold {size(held.bytes)}"
    each = ", ".join(f"{name} {count:,}" for name, count in held.each_bytes.items())
    total = sum(held.each_bytes.values())
    return f"{words}, {total:,} bytes each: {each}" if each else words


def _changes(report: ZombiesReport) -> Iterator[Text]:
    if report.changes is None:
        return
    begun, reaped = report.changes.begun, report.changes.reaped
    verb = "was" if reaped == 1 else "were"
    words = f"{begun:,} began, {reaped:,} {verb} reaped"
    yield line(Span("Changes: ", "title"), words)


def _foot(report: ZombiesReport, verbose: bool) -> Iterator[Text]:
    lost = losses(report)
    # The coverage of a single task needs no line.
    if report.asked is None or lost or verbose:
        coverage = report.coverage
        scanned = coverage.get("tasks_scanned", coverage.get("tasks", 0))
        words = f"coverage: {plural(scanned, 'task')} scanned, "
        words += f"{coverage.get('tasks_unreadable', 0):,} unreadable"
        yield line("; ".join([words, *lost]))
    if report.reads is not None:
        yield line(_cost(report, report.reads))
    yield from notes(report)


def _cost(report: ZombiesReport, reads: int) -> str:
    words = f"cost: {plural(reads, 'read')} of the kernel's memory"
    if report.read_bytes is not None:
        words += f", {report.read_bytes:,} bytes"
    if report.elapsed_ns is not None:
        words += f", {duration(report.elapsed_ns)}"
    return words


# --- one task


def _task(task: TaskAsked, report: ZombiesReport, verbose: bool) -> Iterator[Text]:
    group = next((group for group in report.groups if task.pid in group.pids), None)
    parent = parent_text(task.ppid, task.parent_comm, group)
    name = f"{task.pid} {task.comm}"
    if task.verdict is None:
        words = f"  {task.state} for {duration(task.age_ns)}, no zombie; parent "
        yield line(Span(name, "title"), words, parent)
        yield line(advice(f"--parent {task.pid} lists its dead children", "    "))
        return
    zombie = next((row for row in report.zombies if row.pid == task.pid), None)
    age = dead_for(task.age_ns, zombie.age_bound if zombie else "estimate")
    words = f"  a zombie for {age}: {WHY[task.verdict]} ({task.verdict}); parent "
    yield line(Span(name, "title"), words, parent)
    if zombie is not None:
        yield line("    ", _about(zombie, has_names(report)))
    if group is not None:
        yield from explanation(group, verbose)


def _about(zombie: Zombie, names: bool) -> str:
    """Return a zombie's exit status, user, cgroup, namespace, threads and tracer."""
    parts = [
        f"ended with {endings_text({ending(zombie.exit_code): 1})}",
        f"user {user(zombie.uid, names)}",
    ]
    if zombie.cgroup is not None:
        parts.append(f"cgroup {zombie.cgroup}")
    if zombie.namespace not in (None, INITIAL_NAMESPACE):
        parts.append(f"PID namespace {namespace_text(zombie)}")
    if zombie.threads:
        verb = "lives" if zombie.threads == 1 else "live"
        parts.append(f"{plural(zombie.threads, 'thread')} of it {verb} on")
    if zombie.tracer is not None:
        parts.append(f"tracer {zombie.tracer}")
    return "; ".join(parts)


# --- struct pids that leak


def _leaks(
    leaks: Sequence[Leak] | None, rows: int | None, verbose: bool
) -> Iterator[Block]:
    if leaks is None:
        yield line("Whether struct pids leak is unknown.")
        return
    if not leaks:
        yield line("No struct pid has more references than holders that can be named.")
        return
    shown = leaks[:rows] if rows or verbose else leaks[:_LEAKS]
    columns = (
        Column("PID", "right"),
        Column("STRUCT PID"),
        Column("REFERENCES", "right"),
        Column("UNNAMED", "right"),
        free_text("ITS TASK", least=12),
        free_text("HOLDERS THAT CAN BE NAMED"),
    )
    yield Table(
        columns,
        [
            (
                str(leak.pid),
                f"{leak.address:#x}",
                f"{leak.references:,}",
                f"{leak.references - sum(leak.named.values()):,}",
                leak.task or "none any more",
                ", ".join(f"{n:,} {name}" for name, n in leak.named.items())
                or NOT_KEPT,
            )
            for leak in shown
        ],
        More("struct pid", len(leaks) - len(shown), is_chosen=rows is not None),
    )
