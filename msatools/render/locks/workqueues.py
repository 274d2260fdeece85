# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the pools of workers and the workqueues that hold back work."""

from collections.abc import Iterator, Sequence

from msatools.kernel.ranges import ranges
from msatools.locks.workqueues.model import (
    QueuedWork,
    WorkPool,
    Workqueue,
    Workqueues,
)
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
from msatools.render.cells import NOT_KEPT, plural, state_cell
from msatools.reports.units import duration

_FEW_WORKS = 3

_POOLS = (
    Column("POOL", "right"),
    Column("CPUS"),
    Column("NICE", "right", worth=0),
    Column("PENDING", "right"),
    Column("LAST BEGUN", "right"),
    Column("WORKERS", "right"),
    Column("IDLE", "right", worth=2),
    Column("RUN", "right", worth=2),
    free_text("FLAGS", worth=1, least=8),
    free_text("PENDING BECAUSE", least=24),
    free_text("WORK", worth=3, least=16),
)
_BUSY = (
    Column("POOL", "right"),
    Column("PID", "right"),
    Column("STATE"),
    Column("FOR", "right"),
    Column("WORK FOR", "right", worth=0),
    free_text("WORK", least=16),
    free_text("WORKQUEUE", least=12),
    free_text("COMMAND", worth=1, least=12),
)
_QUEUES = (
    free_text("WORKQUEUE", least=12),
    Column("MAX ACTIVE", "right"),
    Column("ACTIVE", "right"),
    Column("INACTIVE", "right"),
    Column("RESCUER", "right", worth=1),
    Column("MAYDAYS", "right", worth=1),
    free_text("FLAGS", worth=0, least=8),
    free_text("WORK", worth=2, least=16),
)


def workqueues(
    listed: Workqueues | None, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the tables of pools, busy workers and workqueues, and delayed work.

    :param listed: ``None`` if they are unknown: a note says why.
    :param rows: Number of pools, if not the default.
    """
    if listed is None:
        return
    pools = [pool for pool in listed.pools if verbose or _does_something(pool)]
    shown = pools if rows is None else pools[:rows]
    if shown:
        left = len(pools) - len(shown)
        more = More("pool", left, is_chosen=rows is not None)
        yield Table(_POOLS, [_pool(pool, verbose) for pool in shown], more)
    quiet = len(listed.pools) - len(pools)
    if quiet:
        words = f"{plural(quiet, 'pool')} with nothing to do"
        yield line(words, advice("-v shows them"))
    busy = [row for pool in shown for row in _busy(pool)]
    if busy:
        yield line("")
        yield Table(_BUSY, busy)
    if listed.queues:
        yield line("")
        yield Table(_QUEUES, [_queue(queue, verbose) for queue in listed.queues])
    for work in listed.offline:
        name = f"{work.function or NOT_KEPT} of {work.workqueue or NOT_KEPT}"
        words = f"delayed work {name} is for CPU {work.cpu}, which is offline"
        yield line(Span(f"! {words}: its timer never fires", "warn"))


def _does_something(pool: WorkPool) -> bool:
    return bool(pool.pending or pool.busy)


def _pool(pool: WorkPool, verbose: bool) -> Sequence[Cell]:
    age = pool.progress_age_ns
    begun = NOT_KEPT if age is None else duration(age)
    return (
        str(pool.id),
        _cpus(pool),
        NOT_KEPT if pool.nice is None else str(pool.nice),
        f"{pool.pending:,}",
        Span(begun, "bad") if pool.is_stalled else begun,
        f"{pool.workers:,}",
        f"{pool.idle:,}",
        f"{pool.running:,}",
        " ".join(pool.flags) or NOT_KEPT,
        pool.why or NOT_KEPT,
        _works(pool.works, pool.pending, verbose),
    )


def _cpus(pool: WorkPool) -> str:
    if pool.cpu is not None:
        return str(pool.cpu)
    return "unbound" if pool.cpus is None else f"unbound {ranges(pool.cpus)}"


def _works(works: Sequence[QueuedWork], count: int, verbose: bool) -> str:
    """Return the first of some work items; barriers are named after their waiters."""
    shown = works if verbose else works[:_FEW_WORKS]
    words = [
        (work.function or NOT_KEPT)
        if work.waiter is None
        else f"(flushed by {work.waiter})"
        for work in shown
    ]
    left = count - len(shown)
    return ", ".join(words) + (f" +{left:,}" if left else "") or NOT_KEPT


def _busy(pool: WorkPool) -> Iterator[Sequence[Cell]]:
    for worker in pool.busy:
        ages = worker.age_ns, worker.work_age_ns
        age, work_age = (NOT_KEPT if ns is None else duration(ns) for ns in ages)
        yield (
            str(pool.id),
            str(worker.pid),
            state_cell(worker.state),
            age,
            work_age,
            (worker.function or NOT_KEPT) + _mark(worker.intensive, worker.rescuer),
            worker.workqueue or NOT_KEPT,
            worker.comm,
        )


def _mark(intensive: bool, rescuer: bool) -> str:
    marks = [*(["intensive"] if intensive else []), *(["rescuer"] if rescuer else [])]
    return f" ({', '.join(marks)})" if marks else ""


def _queue(queue: Workqueue, verbose: bool) -> Sequence[Cell]:
    return (
        queue.name,
        NOT_KEPT if queue.max_active is None else f"{queue.max_active:,}",
        f"{queue.active:,}",
        f"{queue.inactive:,}",
        NOT_KEPT if queue.rescuer is None else str(queue.rescuer),
        f"{queue.maydays:,}",
        " ".join(queue.flags) or NOT_KEPT,
        _works(queue.works, queue.inactive, verbose),
    )
