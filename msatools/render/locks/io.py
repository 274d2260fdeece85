# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the I/O in flight: of all disks, or in a few lines under a root."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msatools.locks.io.model import DiskIo, InFlight, Stage
from msatools.locks.report import LocksReport, Root
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
from msatools.render.cells import LOWER, NOT_KEPT, number_text, plural
from msatools.reports.units import duration, size

REQUESTS = 8
"""Default number of requests of one disk."""

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
