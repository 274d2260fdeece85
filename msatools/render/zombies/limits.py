# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the limits that zombies count against, and their usage."""

import re
from collections.abc import Iterator, Sequence

from msatools.render.blocks import Block, Cell, Column, Span, Table, advice, free_text
from msatools.render.blocks import text as line
from msatools.render.cells import ESTIMATE, NOT_KEPT, plural
from msatools.render.zombies.words import INITIAL_NAMESPACE, percent_used, share_style
from msatools.reports.units import duration
from msatools.zombies.model import Limit, ZombieGroup

_LIMITS = 8
_BAR = 20
_MIN_PERCENT = 10
"""Percentage used from which every limit is shown, not only the nearest of its kind."""

_MATTERS = 10
"""A group matters to a limit if it is at least 1/N of the usage."""

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
    """Return the nearest limit of each kind, and others that are partly used."""
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
    """Return the nearest of the limits that a group matters to."""
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
