# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes zombies, their parents, causes and limits."""

import re
from collections.abc import Iterator, Mapping, Sequence

from msatools.legends.zombies import VERDICTS
from msatools.render.blocks import (
    BOUND_MARKS,
    ESTIMATE,
    NOT_KEPT,
    Block,
    Cell,
    Column,
    Span,
    Style,
    Table,
    Text,
    advice,
    free_text,
    line,
    plural,
    state_cell,
    user,
)
from msatools.reports.units import duration, signal_name
from msatools.zombies.model import (
    Evidence,
    Limit,
    ParentThread,
    ZombieGroup,
)

WHY: Mapping[str, str] = {entry.name: entry.meaning for entry in VERDICTS.entries}
"""Maps verdicts to their descriptions."""

INITIAL_NAMESPACE = 4026531836
"""Inode number of the initial PID namespace (PROC_PID_INIT_INO, since v3.8)."""

_FEW = 3
_WHY_WIDTH = 40
_REAPERS = {"init": "init of its PID namespace", "subreaper": "a subreaper"}
_DISPOSITIONS = {
    "default": "default action",
    "ignored": "ignored",
    "handler": "handler",
}


def process_text(pid: int, comm: str | None) -> str:
    """Return the PID and name of a process; PID 0 stands for an unknown one."""
    if not pid:
        return NOT_KEPT
    return str(pid) if comm is None else f"{pid} {comm}"


def dead_for(age_ns: int, bound: str = "estimate") -> str:
    """Return the time since a task died, with the mark of its accuracy."""
    return BOUND_MARKS.get(bound, ESTIMATE) + duration(age_ns)


def dead_for_range(least_ns: int, most_ns: int) -> str:
    """Return the range of times since some tasks died."""
    least, most = dead_for(least_ns), dead_for(most_ns)
    return least if least == most else f"{least}..{most}"


def why_text(group: ZombieGroup, verbose: bool = False) -> str:
    """Return the verdict on a group, with the tracer or root; cut if not *verbose*."""
    words, evidence = WHY[group.verdict], group.evidence
    if group.verdict == "traced" and evidence.tracer is not None:
        return f"tracer {evidence.tracer} must wait first"
    if group.verdict == "parent-blocked" and evidence.root is not None:
        words += f": {evidence.root}"
    if len(words) > _WHY_WIDTH and not verbose:
        return f"{words[: _WHY_WIDTH - 1]}…"
    return words


def share_style(used: int, most: int) -> Style | None:
    """Return the style for the used part of a limit."""
    percent = percent_used(used, most)
    return "bad" if percent >= 90 else "warn" if percent >= 75 else None


def percent_used(used: int, most: int) -> int:
    """Return the used percentage of a limit; 100 only if nothing is left."""
    return 100 * used // most if most > 0 else 100


def endings_text(endings: Mapping[str, int], most: int | None = None) -> str:
    """Return exit statuses with their counts, the most frequent first."""
    ways = sorted(endings.items(), key=lambda item: -item[1])
    texts = [f"status {name}" if name.isdigit() else name for name, _ in ways]
    if len(ways) == 1:
        return texts[0]
    return few([f"{t} ({n:,})" for t, (_, n) in zip(texts, ways, strict=True)], most)


def few(texts: Sequence[str], most: int | None = _FEW) -> str:
    """Join the first *most* texts, or all if None."""
    shown = texts if most is None else texts[:most]
    left = len(texts) - len(shown)
    return ", ".join(shown) + (f" +{left:,}" if left else "")


def belongings_text(group: ZombieGroup, names: bool, verbose: bool) -> str:
    """Return the exit statuses and owners of a group's zombies.

    :param names: Whether to look up user names.
    """
    most = None if verbose else _FEW
    parts = (
        [f"ended with {endings_text(group.exit_codes, most)}"]
        if group.exit_codes
        else []
    )
    if group.uids:
        parts.append("user " + few([user(uid, names) for uid in group.uids], most))
    if group.cgroups:
        parts.append("cgroup " + few(group.cgroups, most))
    if verbose or any(number != INITIAL_NAMESPACE for number in group.namespaces):
        numbers = few(list(map(str, group.namespaces)), most)
        parts += [f"PID namespace {numbers}"] if numbers else []
    return "; ".join(parts)


def evidence_lines(evidence: Evidence, indent: str) -> Iterator[Text]:
    """Yield all the evidence of a verdict."""
    for words in (_sigchld(evidence), _masks(evidence), _relations(evidence)):
        if words:
            yield line(indent, words)
    for thread in evidence.threads:
        yield line(indent, *_thread(thread))
    left = evidence.thread_count - len(evidence.threads)
    if evidence.threads and left > 0:
        yield line(indent, Span(f"… {left:,} more of its threads", "dim"))


def _sigchld(evidence: Evidence) -> str:
    if evidence.sigchld is None:
        return ""
    parts = [f"SIGCHLD: {_DISPOSITIONS[evidence.sigchld]}"]
    if evidence.handler is not None and evidence.sigchld == "handler":
        parts[0] += f" {evidence.handler:#x}"
    if evidence.pending is not None:
        parts.append("pending" if evidence.pending else "not pending")
    if evidence.blocked is not None:
        by = " by all threads" if evidence.thread_count != 1 else ""
        parts.append(("blocked" if evidence.blocked else "not blocked") + by)
    return ", ".join(parts)


def _masks(evidence: Evidence) -> str:
    masks = {
        "blocks": evidence.blocked_signals,
        "ignores": evidence.ignored_signals,
        "catches": evidence.caught_signals,
    }
    parts = []
    for verb, numbers in masks.items():
        if numbers is not None:
            parts.append(f"{verb} {' '.join(map(signal_name, numbers)) or 'none'}")
    return "; ".join(parts)


def _relations(evidence: Evidence) -> str:
    parts = []
    if evidence.reaper is not None:
        parts.append(f"it is {_REAPERS[evidence.reaper]}")
    if evidence.tracer is not None:
        parts.append(f"tracer {evidence.tracer}")
    if evidence.root is not None:
        pid = f" (pid {evidence.root_pid})" if evidence.root_pid is not None else ""
        parts.append(f"at the root: {evidence.root}{pid}")
    return "; ".join(parts)


def evidence_text(group: ZombieGroup) -> str:
    """Return the evidence in one line, with the activity of the parent's first thread.

    The thread is left out for ``leader-exited``: a zombie's own threads keep it.
    """
    evidence = group.evidence
    if not evidence.threads or group.verdict == "leader-exited":
        return evidence.text
    first, *_ = evidence.threads
    since = f"{first.state} {duration(first.age_ns)}"
    left = evidence.thread_count - 1
    others = f" (+{left:,})" if left > 0 else ""
    if f"thread {first.pid} is {first.doing}" in evidence.text:
        return f"{evidence.text}, {since}{others}"
    doing = "" if first.doing in evidence.text else f" {first.doing}"
    words = f"thread {first.pid} {since}{doing}{others}"
    return "; ".join(part for part in (evidence.text, words) if part)


def _thread(thread: ParentThread) -> Sequence[Cell]:
    parts = [thread.doing or NOT_KEPT]
    if thread.waiting is not None:
        flags = {"__WCLONE": thread.waiting.clone, "__WALL": thread.waiting.all}
        parts += [name for name, is_set in flags.items() if is_set]
    if thread.blocks_sigchld:
        parts.append("blocks SIGCHLD")
    name = f"thread {process_text(thread.pid, thread.comm)}  "
    age = f" {duration(thread.age_ns)}  {thread.task_class}  "
    return (name, state_cell(thread.state), age, ", ".join(parts))


def zombies_text(count: int) -> str:
    """Return the number of zombies as text."""
    return plural(count, "zombie")


# --- Renders the limits that zombies count against, and their usage.


_LIMITS = 8
_BAR = 20
_MIN_PERCENT = 10
"""Minimum percentage used for a limit that is not the nearest of its kind."""

_MATTERS = 10
"""A group matters to a limit if it is at least a tenth of the usage."""

_LEGEND = "[# dead  = others  . left]"


def limits_table(
    limits: Sequence[Limit], *, interval: bool, verbose: bool
) -> Iterator[Block]:
    """Yield limits, the nearest first, and unlimited ones if *verbose*."""
    wanted = [limit for limit in limits if verbose or limit.max is not None]
    shown = wanted if verbose else _important(wanted)
    if not shown:
        return
    columns = [
        *(Column("LIMIT"), free_text("OF", least=10, keeps="end")),
        Column("USED", "right"),
        *(Column("MAX", "right"), Column("LEFT", "right", worth=1)),
        *(Column("DEAD", "right"), Column("%", "right")),
        Column(_LEGEND, worth=0, least=len(_LEGEND), called="a bar"),
    ]
    if interval:
        columns.insert(-1, Column("HIT IN", "right"))
    yield Table(tuple(columns), [_row(limit, interval) for limit in shown])
    if left := len(wanted) - len(shown):
        it = "it" if left == 1 else "them"
        words = Span(f"… {plural(left, 'more limit')}, less used", "dim")
        yield line(words, advice(f"-v shows {it}"))


def _important(limits: Sequence[Limit]) -> Sequence[Limit]:
    """Return the nearest limit of each kind, and some used by _MIN_PERCENT or more."""
    nearest_of_kind: dict[str, int] = {}
    for index, limit in enumerate(limits):
        nearest_of_kind.setdefault(limit.name, index)
    chosen = set(nearest_of_kind.values())
    for index, limit in enumerate(limits):
        if len(chosen) < _LIMITS and _share(limit) >= _MIN_PERCENT:
            chosen.add(index)
    return [limits[index] for index in sorted(chosen)]


def _share(limit: Limit) -> int:
    if limit.used is None or limit.max is None:
        return 0
    return percent_used(limit.used, limit.max)


def _row(limit: Limit, interval: bool) -> Sequence[Cell]:
    used, most = limit.used, limit.max
    cells: list[Cell] = [
        limit.name,
        limit.scope,
        NOT_KEPT if used is None else f"{used:,}",
        "none" if most is None else f"{most:,}",
        NOT_KEPT if limit.left is None else f"{limit.left:,}",
        f"{limit.zombies:,}",
    ]
    first = "  first to be hit" if limit.first else ""
    hit = NOT_KEPT if limit.left_ns is None else ESTIMATE + duration(limit.left_ns)
    cells += [_percent(limit), *([hit] if interval else []), bar(limit) + first]
    return cells


def _percent(limit: Limit) -> Cell:
    if limit.used is None or limit.max is None:
        return NOT_KEPT
    return Span(str(_share(limit)), share_style(limit.used, limit.max))


def bar(limit: Limit) -> str:
    """
    Draw the parts of a limit that zombies use, that others use, and that are left.

    The bar of an unlimited resource is empty. A used or left part that is not zero has
    at least one cell.
    """
    if limit.used is None or limit.max is None:
        return ""
    used = _cells(limit.used, limit.max)
    dead = min(_cells(limit.zombies, limit.max), used) if limit.zombies else 0
    return f"[{'#' * dead}{'=' * (used - dead)}{'.' * (_BAR - used)}]"


def _cells(number: int, most: int) -> int:
    if number >= most:
        return _BAR
    return min(max(round(_BAR * number / most), bool(number)), _BAR - 1)


def nearest(group: ZombieGroup, limits: Sequence[Limit]) -> Cell:
    """Return the cell for the nearest limit that a group matters to; empty if none."""
    closest: Limit | None = None
    share = -1.0
    for limit in limits:
        used, most = limit.used, limit.max
        if used is None or most is None or group.count * _MATTERS < used:
            continue
        if _share(limit) < _MIN_PERCENT:
            continue
        used_share = used / most if most else 1.0
        if used_share > share and _counts(group, limit):
            closest, share = limit, used_share
    if closest is None or closest.used is None or closest.max is None:
        return ""
    percent = percent_used(closest.used, closest.max)
    return Span(f"{closest.name} {percent} %", share_style(closest.used, closest.max))


def _counts(group: ZombieGroup, limit: Limit) -> bool:
    """Return whether a group counts towards a limit."""
    if limit.name == "pids.max":
        below = limit.scope.rstrip("/") + "/"
        return any(f"{path}/".startswith(below) for path in group.cgroups)
    # For example "uid 1000 of user_ns 4026531837".
    number = re.search(r"\d+", limit.scope)
    if number is None:
        return True
    if limit.name == "RLIMIT_NPROC":
        return int(number.group()) in group.uids
    # A process counts in its PID namespace and all its ancestors.
    return int(number.group()) in (INITIAL_NAMESPACE, *group.namespaces)
