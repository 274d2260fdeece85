# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the I/O in flight of disks, and pools of workers and their workqueues."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msatools.locks.report import (
    DiskIo,
    InFlight,
    LocksReport,
    QueuedWork,
    Root,
    Stage,
    WorkPool,
    Workqueue,
    Workqueues,
)
from msatools.render.blocks import (
    LOWER,
    NOT_KEPT,
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    advice,
    free_text,
    line,
    number_text,
    plural,
    state_cell,
)
from msatools.reports.units import duration, ranges, size

# --- Renders the I/O in flight: of all disks, or in a few lines under a root.


REQUESTS = 8
"""Default maximum of requests to list for one disk."""

_STAGES: Mapping[Stage, str] = {
    "driver": "in the driver",
    "completed": "completed, not reported",
    "dispatch": "to dispatch",
    "requeued": "requeued",
    "scheduler": "in the scheduler",
    "queued": "queued",
    "plugged": "plugged",
    "deferred": "held back until it is resumed",
    "delayed": "held back by dm-delay",
}
"""Words for the stages, from the hardware up."""

_DISKS = (
    free_text("DISK", least=8),
    Column("DEVICE", worth=0),
    Column("READS", "right"),
    Column("WRITES", "right"),
    Column("HELD", "right"),
    Column("OLDEST", "right"),
    Column("NO COMPLETION", "right"),
    Column("SCHEDULER", worth=1),
    Column("DEPTH", "right", worth=1),
    free_text("STATE", worth=2, least=8),
    free_text("BELOW", worth=3, least=8),
)
_REQUESTS = (
    free_text("DISK", least=8),
    Column("OPERATION"),
    Column("SECTOR", "right"),
    Column("SIZE", "right"),
    Column("AGE", "right"),
    Column("DRIVER", "right", worth=2),
    Column("STAGE"),
    Column("TAG", "right", worth=0),
    Column("PID", "right", worth=1),
)


def in_flight(
    disks: Sequence[DiskIo] | None, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the tables of disks and of requests.

    :param rows: Number of requests of a disk, if not the default.
    """
    known = disks or ()
    shown = [disk for disk in known if verbose or _is_busy(disk)]
    if shown:
        yield Table(_DISKS, [_disk(disk) for disk in shown])
    quiet = len(known) - len(shown)
    if quiet:
        words = f"{plural(quiet, 'disk')} with nothing in flight"
        yield line(words, advice("-v shows them"))
    limit = rows or (None if verbose else REQUESTS)
    listed = [(disk.name, each) for disk in shown for each in disk.requests[:limit]]
    if not listed:
        return
    yield line("")
    left = sum(len(disk.requests) for disk in shown) - len(listed)
    more = More("request", left, is_chosen=rows is not None)
    yield Table(_REQUESTS, [_request(*each) for each in listed], more)


def _is_busy(disk: DiskIo) -> bool:
    unknown = disk.reads is None
    held = disk.requests or disk.reads or disk.writes or unknown
    return bool(held or disk.is_suspended or disk.is_frozen or disk.is_quiesced)


def _disk(disk: DiskIo) -> Sequence[Cell]:
    numbers = disk.reads, disk.writes, disk.depth
    reads, writes, depth = (NOT_KEPT if n is None else f"{n:,}" for n in numbers)
    return (
        disk.name,
        disk.device,
        reads,
        writes,
        f"{len(disk.requests):,}",
        _age(_oldest(disk)),
        _no_completion(disk),
        disk.scheduler or NOT_KEPT,
        depth,
        Span(" ".join(_state(disk)), "warn") if _state(disk) else NOT_KEPT,
        " ".join(disk.below) or NOT_KEPT,
    )


def _oldest(disk: DiskIo) -> int | None:
    ages = [each.age_ns for each in disk.requests if each.age_ns is not None]
    return max(ages, default=None)


def _age(age_ns: int | None) -> str:
    return NOT_KEPT if age_ns is None else duration(age_ns)


def _no_completion(disk: DiskIo) -> str:
    least = disk.no_completion_ns if _is_busy(disk) else None
    return NOT_KEPT if least is None else f"{LOWER}{duration(least)}"


def _bytes(amount: int) -> str:
    return f"{amount} B" if amount % 1024 else size(amount)


def _state(disk: DiskIo) -> list[str]:
    states = {
        "suspended": disk.is_suspended,
        "frozen": disk.is_frozen,
        "quiesced": disk.is_quiesced,
    }
    return [name for name, is_so in states.items() if is_so]


def _request(name: str, request: InFlight) -> Sequence[Cell]:
    return (
        name,
        request.operation,
        number_text(request.sector),
        _bytes(request.bytes) if request.bytes else NOT_KEPT,
        _age(request.age_ns),
        _age(request.driver_age_ns),
        request.stage,
        number_text(request.tag),
        number_text(request.pid),
    )


def under_root(root: Root, report: LocksReport) -> Iterator[str]:
    """Yield a few lines on the disks that a root waits for."""
    disks = {disk.name: disk for disk in report.io or ()}
    way = [disks[name] for name in root.disks or () if name in disks]
    if not way:
        return
    if len(way) > 1:
        yield f"by way of {' > '.join(disk.name for disk in way)}"
    yield _summary(way[-1])


def _summary(disk: DiskIo) -> str:
    words = []
    if disk.requests:
        counts = Counter(each.stage for each in disk.requests)
        words += [
            f"{counts[stage]:,} {text}"
            for stage, text in _STAGES.items()
            if counts[stage]
        ]
        words[0] = f"{disk.name}: {words[0]}"
        words = [", ".join(words), _first(disk.requests[0])]
    else:
        counted = (disk.reads or 0) + (disk.writes or 0)
        words.append(f"{disk.name}: {counted:,} in flight")
    if disk.below:
        words.append(f"on {', '.join(disk.below)}")
    elif disk.no_completion_ns is not None and disk.requests:
        words.append(f"no completion for {LOWER}{duration(disk.no_completion_ns)}")
    return "; ".join(words)


def _first(request: InFlight) -> str:
    """Describe the oldest request."""
    where = "" if request.sector is None else f" at sector {request.sector}"
    age = "" if request.age_ns is None else f" for {duration(request.age_ns)}"
    size = f" of {_bytes(request.bytes)}" if request.bytes else ""
    return f"the oldest a {request.operation}{size}{where}{age}"


# --- Renders the pools of workers and the workqueues that hold back work.


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

    :param listed: ``None`` if the workqueues are unknown: a note says why.
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
    """Return the first of *count* work items; barriers are named after waiters."""
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
