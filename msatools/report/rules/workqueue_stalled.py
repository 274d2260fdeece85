# SPDX-License-Identifier: LGPL-2.1-or-later

"""Work is pending in a pool of workers, and none of it begins."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from msatools.locks.report import Root
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.stalls import logged_stalls, pools_of
from msatools.report.words import pid_text


class _StalledPool(Struct, frozen=True):
    root: Root
    parts: ReportParts


def _when(parts: ReportParts) -> Iterator[_StalledPool]:
    for root in pools_of(parts):
        yield _StalledPool(root, parts)


def _evidence(pool: _StalledPool) -> Iterator[str]:
    pid = pool.root.pid
    if pid is None:
        yield "no single thread keeps it waiting"
        return
    cpus = pool.parts.cpus
    for queue in cpus.run_queues if cpus is not None else ():
        starved = [task for task in queue.waiting if task.pid == pid]
        if starved and queue.current is not None:
            hog = pid_text(queue.current.pid, queue.current.comm)
            waiter = pid_text(pid, starved[0].comm)
            yield f"its worker, {waiter}, waits for cpu{queue.cpu}, which runs {hog}"
            return
    yield f"pid {pid} keeps it waiting"


RULES: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="workqueue-stalled",
        needs=("locks",),
        when=_when,
        severity="critical",
        confidence="exact",
        words=lambda pool: pool.root.reason,
        evidence=_evidence,
        see=lambda pool: ("locks", "--workqueues"),
    ),
    logged_stalls("workqueue-stalled", ("workqueue-stall",)),
)
