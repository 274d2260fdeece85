# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks that are hot, as lockstat has them: how many wait, how long, who has them."""

from collections.abc import Iterator, Sequence

from msatools.locks.report import Contended, LocksReport, OwnerSeen
from msatools.render.blocks import Block, Column, Table
from msatools.render.locks.words import more
from msatools.render.prstat.columns import NOT_KEPT
from msatools.render.units import duration

ROWS = 10
"""How many locks are shown if nobody asks for more or fewer."""

_FEW_OWNERS = 2
_COLUMNS = (
    *(Column(name, "right") for name in ("WAITED", "MEAN", "MAX", "WAIT/S")),
    *(Column(name) for name in ("LOCK", "OWNERS SEEN")),
)


def contention(
    report: LocksReport, locks: Sequence[Contended], rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the table of locks for which tasks waited within an interval.

    :param rows: How many, if others than usual.
    """
    shown = locks[: rows or (None if verbose else ROWS)]
    seconds = (report.interval_ns or 0) / 1e9
    cells = [
        (
            f"{100 * lock.share:.0f} %",
            f"{lock.mean_queue:.1f}",
            f"{lock.max_queue:,}",
            _wait(lock, seconds),
            lock.lock if lock.name is None else f"{lock.lock} ({lock.name})",
            _owners(lock.owners, verbose),
        )
        for lock in shown
    ]
    yield Table(_COLUMNS, cells)
    yield from more(len(locks) - len(shown), "lock")


def _wait(lock: Contended, seconds: float) -> str:
    if not seconds:
        return NOT_KEPT
    wait, error = (
        duration(round(ns / seconds)) for ns in (lock.wait_ns, lock.error_ns)
    )
    return f"~{wait}+-{error}"


def _owners(owners: Sequence[OwnerSeen], verbose: bool) -> str:
    few = owners if verbose else owners[:_FEW_OWNERS]
    words = [f"{each.pid} {each.comm}: {each.where} x{each.looks:,}" for each in few]
    left = len(owners) - len(few)
    return ", ".join(words) + (f" +{left:,}" if left else "") or NOT_KEPT
