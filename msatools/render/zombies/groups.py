# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders zombies by parent, by another key, singly, and by heir."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec.structs import replace

from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    Text,
    Tree,
    free_text,
    text,
)
from msatools.render.blocks import text as line
from msatools.render.cells import NOT_KEPT, more, number_text, plural, state_cell, user
from msatools.render.zombies.limits import nearest
from msatools.render.zombies.words import (
    WHY,
    belongings_text,
    dead_for,
    dead_for_range,
    evidence_lines,
    evidence_text,
    few,
    process_text,
    why_text,
    zombies_text,
)
from msatools.reports.units import duration
from msatools.zombies.exit_status import ending
from msatools.zombies.model import (
    Heir,
    HeldNamespace,
    Zombie,
    ZombieGroup,
    ZombiesReport,
)

GROUPS = 10
"""Default number of groups."""

_EXPLAINED = 3
"""Default number of groups with their evidence."""

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
    """Yield the groups; the largest with evidence, owners and advice."""
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
    """Return what a PID namespace, or a container, waits for."""
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


# --- by something else

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
    """Return a PID namespace, and the PID there if it is different."""
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
    """Yield heirs, and below each the parents whose zombies it would inherit."""
    if not report.heirs:
        yield text("Who would inherit them is not known.")
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
