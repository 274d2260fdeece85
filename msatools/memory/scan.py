# SPDX-License-Identifier: LGPL-2.1-or-later

"""Scans the memmap in parts, by one process or several; memstat calls it.

At the end of the scan, structures other than struct page refine the classes.
"""

import copy
import gc
import os
import pickle
import selectors
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import NoReturn, TypeVar

import drgn
from msgspec import Struct

import msatools.native as native
from msatools.errors import UNREADABLE
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog, Progress
from msatools.memory.checks import Watch
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.classify import (
    FarHead,
    FreeLinks,
    Observer,
    classify,
    free_links,
    no_far_head,
)
from msatools.memory.compiled import Compiled, compiled_classifier
from msatools.memory.memmap import BulkReader, MemmapRange, read_chunks
from msatools.memory.owners import OwnedPages, ScanContext
from msatools.memory.refine import (
    FinalClasses,
    PcpLists,
    listed_pages,
    pcp_lists,
    settle_cache,
    settle_pcp,
)
from msatools.memory.stream import FileScan, dump_file
from msatools.memory.sums import Finals, ScanResult, add_block, settle_swapcache

# --- Scans the memmap: classifies all struct pages of some ranges.


_MAX_FAR_HEADS = 1 << 16

_CLASSIFIER = "msatools.classifier"
"""Key in the program's cache."""


def scan(
    reader: Reader,
    layout: PageLayout,
    ranges: Sequence[MemmapRange],
    owned: OwnedPages,
    progress: Callable[[int, int], None] | None = None,
    observers: Sequence[Observer] = (),
    finals: Finals | None = None,
    result: ScanResult | None = None,
    read_all: bool = False,
) -> ScanResult:
    """
    Classify every struct page of the ranges.

    :param owned: Pages with known owners, and the classes to give them if their struct
        pages determine none.
    :param progress: Called with the number of pages done and of all pages.
    :param observers: Called with each block after it is classified.
    :param finals: Resolves the final classes before pages are counted and observed; the
        result then has no candidates and no mappings.
    :param result: Result of earlier ranges, to which these ranges are added.
    :param read_all: Whether to read the inside of free blocks, too: :mod:`.stream`.
    """
    total = sum(part.pages for part in ranges)
    done = 0

    def advance(pages: int) -> None:
        nonlocal done
        done += pages
        if progress is not None:
            progress(done, total)

    before = reader.reads - (finals.reads if finals is not None else 0)
    far_heads = FarHeadReader(reader, layout)
    result = ScanResult() if result is None else result
    compiled = _compiled(reader, layout)
    chunks = read_chunks(reader, layout, ranges)
    if compiled and finals is None and not observers:
        streamed = FileScan.of(reader, layout, ranges, compiled)
        if streamed is not None:
            chunks = streamed.rest(owned, result, advance, read_all)
    for chunk in chunks:
        block = (compiled.classify if compiled else classify)(
            chunk.data, chunk.pfn, chunk.address, layout, far_heads, chunk.gaps
        )
        add_block(result, block, owned, finals, compiled)
        for observer in observers:
            observer.observe(block)
        advance(len(block))
    result.heads_unreadable += far_heads.unreadable
    result.memmap_reads += reader.reads - before
    if finals is not None:
        result.memmap_reads -= finals.reads
        result.add_losses(finals.take_losses())
    return result


def prepare(reader: Reader, layout: PageLayout) -> None:
    """Fill the caches that all parts of a scan share, before workers are forked."""
    BulkReader.of(reader)
    _compiled(reader, layout)
    dump_file(reader)


def _compiled(reader: Reader, layout: PageLayout) -> Compiled | None:
    if not native.is_wanted():
        return None
    # Making a classifier takes as long as scanning some blocks. It is cached, as a scan
    # may have many parts, and a program many scans.
    cache = reader.prog.cache
    cached: tuple[PageLayout, Compiled | None] | None = cache.get(_CLASSIFIER)
    if cached is None or cached[0] is not layout:
        cached = cache[_CLASSIFIER] = layout, compiled_classifier(layout)
    return cached[1]


class FarHeadReader:
    """Reads heads of compound pages that begin in an earlier block."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        self._reader = reader
        self._layout = layout
        self._known: dict[int, FarHead] = {}
        self.unreadable = 0

    def __call__(self, address: int) -> FarHead:
        head = self._known.get(address)
        if head is None:
            # Real heads are few; a damaged dump may have one for each page.
            if len(self._known) >= _MAX_FAR_HEADS:
                self.unreadable += 1
                return FarHead(PageClass.UNATTRIBUTED, 0)
            head = self._known[address] = self._read(address)
        return head

    def _read(self, address: int) -> FarHead:
        try:
            data = self._reader.read(address, 2 * self._layout.size)
        except UNREADABLE:
            self.unreadable += 1
            return FarHead(PageClass.UNATTRIBUTED, 0)
        # If, in a damaged dump, this head is itself a tail, its head is not looked up.
        block = classify(data, 0, address, self._layout, no_far_head)
        return FarHead(int(block.codes[0]), int(block.mapping[0]))


# --- Distributes work to forked processes, and returns the results in order.
#
# Threads would not help: drgn holds the GIL while it reads. A forked worker reads
# through its copy of the program that its parent opened. Both share the open file and
# its position, but drgn and libkdumpfile use pread() and mmap(), which do not use the
# position. If readers of the same open file share more than the position, as those of
# /proc/kcore do, a worker opens the file again.


T = TypeVar("T")

MAX_PIECES = 2048
"""Maximum number of pieces: two bytes each must fit a pipe of one page."""

_NUMBER = struct.Struct("<H")
_HEAD = struct.Struct("<HQ")
"""Header of a result: the number of its piece, and the bytes that follow."""

_AT_ONCE = 1 << 20
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers may raise an exception at any point of this module."""


def do_in_order(
    work: Callable[[int], T],
    pieces: int,
    workers: int,
    take: Callable[[T], None],
    done: Callable[[int], None],
    begin: Callable[[], None] | None = None,
) -> int:
    """
    Do pieces of work in forked processes, and take the results in order.

    A worker takes the next piece when it has done one, so that all end together. The
    parent redoes the pieces of a worker that was killed or failed. So an exception of
    the work is raised in the parent, and none has to be pickled.

    No worker is left when this returns or raises.

    :param work: Does the piece of a given number. Its result must be picklable; its
        other effects are lost with the worker.
    :param take: Called with each result in the parent, in the order of the pieces.
    :param done: Called with the number of each piece that is done, in any order.
    :param begin: Called in each worker before its first piece; a worker in which it
        fails does no piece.
    :return: Number of pieces that the parent did because workers ended early; 0 if
        there were no workers, as in a sandbox that permits no fork.
    """
    assert pieces <= MAX_PIECES
    results: dict[int, bytes] = {}
    taken = 0
    with _Crew(work, pieces, workers, begin) as crew:
        for number, result in crew.results():
            results[number] = result
            done(number)
            while taken in results:
                take(pickle.loads(results.pop(taken)))
                taken += 1
    undone = 0
    for number in range(taken, pieces):
        if number in results:
            take(pickle.loads(results.pop(number)))
        else:
            undone += 1
            take(work(number))
            done(number)
    return undone if crew.has_worked else 0


class _Crew:
    """The workers, and the pipes for the numbers of pieces and for results."""

    def __init__(
        self,
        work: Callable[[int], object],
        pieces: int,
        workers: int,
        begin: Callable[[], None] | None,
    ) -> None:
        self._work = work
        self._pieces = pieces
        self._workers = workers
        self._begin = begin
        self.has_worked = False
        """Whether there was any worker."""

        self._pids: list[int] = []
        self._fds: list[int] = []
        """Read end of each worker's pipe of results."""

    def __enter__(self) -> "_Crew":
        try:
            todo, writing = os.pipe()
        except OSError:
            # Too many open files: the parent does all pieces.
            return self
        try:
            numbers = map(_NUMBER.pack, range(self._pieces))
            os.write(writing, b"".join(numbers))
            # Without a writer, workers read EOF after the last piece.
            os.close(writing)
            for _ in range(self._workers):
                self._start(todo)
        except BaseException:
            self._end()
            raise
        finally:
            os.close(todo)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self, todo: int) -> None:
        """Fork one worker; if pipe() or fork() fails, there is one worker less."""
        try:
            reading, writing = os.pipe()
        except OSError:
            return
        self._fds.append(reading)
        # No signal until the pid is stored, and the worker has its own handlers.
        with _no_signals():
            try:
                pid = _fork()
                if not pid:
                    self._serve(todo, writing)
                self._pids.append(pid)
                self.has_worked = True
            except OSError:
                # The parent does the pieces that no worker does.
                return
            finally:
                os.close(writing)

    def _serve(self, todo: int, out: int) -> NoReturn:
        """Do pieces in the worker's process, and exit from it."""
        try:
            # The parent handles signals to the process group, and ends its workers.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            # If the parent exits, writes must fail: close the read ends inherited here.
            for fd in self._fds:
                os.close(fd)
            # A garbage collection writes to most objects, and so would copy the memory
            # that is shared with the parent.
            gc.disable()
            if self._begin is not None:
                self._begin()
            while number := os.read(todo, _NUMBER.size):
                data = pickle.dumps(self._work(*_NUMBER.unpack(number)))
                # One write, so that a small result wakes the parent once.
                _write(out, _HEAD.pack(*_NUMBER.unpack(number), len(data)) + data)
            os._exit(0)
        finally:
            os._exit(1)

    def results(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and result of each piece, until all workers have ended."""
        received = {fd: bytearray() for fd in self._fds}
        with selectors.DefaultSelector() as selector:
            for fd in received:
                selector.register(fd, selectors.EVENT_READ)
            while received:
                for key, _ in selector.select():
                    data = os.read(key.fd, _AT_ONCE)
                    if not data:
                        selector.unregister(key.fd)
                        del received[key.fd]
                        continue
                    received[key.fd] += data
                    yield from _whole_results(received[key.fd])

    def _end(self) -> None:
        with _no_signals():
            while self._fds:
                os.close(self._fds.pop())
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            while self._pids:
                os.waitpid(self._pids.pop(), 0)


@contextmanager
def _no_signals() -> Iterator[None]:
    """Block the signals whose handlers may raise an exception, within the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns about fork() with threads: drgn's (OpenMP) are idle by now, and a
        # worker only reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _whole_results(received: bytearray) -> Iterator[tuple[int, bytes]]:
    """Remove and yield all complete results from the received data."""
    while len(received) >= _HEAD.size:
        number, size = _HEAD.unpack_from(received)
        end = _HEAD.size + size
        if len(received) < end:
            return
        yield number, bytes(received[_HEAD.size : end])
        del received[:end]


# --- Scans the memmap in parts, by one process or several.
#
# The parts do not depend on the number of workers, and are added up in pfn order. So
# the result does not depend on it either.


Part = list[MemmapRange]

_PART_PAGES = 1 << 17
"""Minimum pages of a part, except the last: few parts mean few results to send."""

_MAX_PARTS = 512
"""Approximate maximum number of parts: each takes the parent's time and cache."""

_PAGES_PER_WORKER = 1 << 19
"""Pages for each worker, so that it saves time (2 GiB): fork and exit take some 5 ms,
the scan of these pages 4 ms in an ELF dump and 20 to 40 ms in a kdump."""


class Scanned(Struct, frozen=True):
    """The result of a scan, and the number of parts that were redone."""

    result: ScanResult
    redone: int
    """Parts that the parent scanned because workers ended early."""


class _PartResult(Struct, frozen=True):
    """The result of one part, with the observers' sums and the reads."""

    result: ScanResult
    observers: list[Observer]
    reads: int
    bytes: int


def cores() -> int:
    """Count the CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def workers_by_default(prog: drgn.Program, ranges: Sequence[MemmapRange]) -> int:
    """Return the default number of workers: on a live kernel, one."""
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return 1
    pages = sum(item.pages for item in ranges)
    return max(1, min(pages // _PAGES_PER_WORKER, cores()))


def can_share(prog: drgn.Program) -> bool:
    """Return whether forked processes can share the program: not over QMP."""
    live, local = drgn.ProgramFlags.IS_LIVE, drgn.ProgramFlags.IS_LOCAL
    return not prog.flags & live or bool(prog.flags & local)


def cut(ranges: Sequence[MemmapRange]) -> list[Part]:
    """Cut the memmap into parts of about the same number of struct pages."""
    pages = sum(item.pages for item in ranges)
    part_pages = max(_PART_PAGES, -(-pages // _MAX_PARTS))
    parts: list[Part] = []
    held = part_pages
    for item in ranges:
        if held >= part_pages:
            parts.append([])
            held = 0
        parts[-1].append(item)
        held += item.pages
    return parts


def scan_parts(
    reader: Reader,
    layout: PageLayout,
    ranges: Sequence[MemmapRange],
    owned: OwnedPages,
    progress: Progress | None = None,
    observers: Sequence[Observer] = (),
    finals: Finals | None = None,
    workers: int = 1,
    *,
    read_all: bool = False,
) -> Scanned:
    """
    Classify every struct page of the ranges: see :func:`scan`.

    :param workers: Maximum number of processes. They are forked, and read through their
        copies of the program: see :func:`can_share`.
    """
    parts = cut(ranges)
    overall = _OverallProgress(parts, progress)

    def scan_one(
        number: int,
        part_observers: Sequence[Observer],
        within: Progress | None,
        result: ScanResult | None = None,
    ) -> ScanResult:
        part = parts[number]
        return scan(
            reader,
            layout,
            part,
            owned,
            within,
            part_observers,
            finals,
            result,
            read_all,
        )

    if workers > 1:
        prepare(reader, layout)
        return _share_out(scan_one, reader, observers, overall, workers)
    result = ScanResult()
    for number in range(len(parts)):
        scan_one(number, observers, overall.within, result)
        overall.add(number)
    return Scanned(result, 0)


def _share_out(
    scan_one: Callable[[int, Sequence[Observer], None], ScanResult],
    reader: Reader,
    observers: Sequence[Observer],
    overall: "_OverallProgress",
    workers: int,
) -> Scanned:
    fresh = copy.deepcopy(list(observers))
    result = ScanResult()

    def work(number: int) -> _PartResult:
        part_observers = copy.deepcopy(fresh)
        reads, size = reader.reads, reader.bytes
        scanned = scan_one(number, part_observers, None)
        scanned.join()
        part = _PartResult(
            scanned, part_observers, reader.reads - reads, reader.bytes - size
        )
        # take() adds the reads, even if the parent itself did the part.
        reader.reads, reader.bytes = reads, size
        return part

    def take(part: _PartResult) -> None:
        result.merge(part.result)
        for observer, later in zip(observers, part.observers, strict=True):
            observer.merge(later)
        reader.reads += part.reads
        reader.bytes += part.bytes

    count = len(overall.pages)
    redone = do_in_order(
        work,
        count,
        min(workers, count),
        take,
        overall.add,
        begin=partial(_open_again, reader.prog),
    )
    return Scanned(result, redone)


def _open_again(prog: drgn.Program) -> None:
    """Open /proc/kcore again in a forked process: readers of one open file share more
    than its position."""
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        from msatools.program.live import open_again

        open_again(prog)


class _OverallProgress:
    """Reports the progress of the scan over all parts."""

    def __init__(self, parts: list[Part], progress: Progress | None) -> None:
        self.pages = [sum(item.pages for item in part) for part in parts]
        """Pages of each part."""

        self.total = sum(self.pages)
        self.within = progress and self._within
        """Progress callback for the next part."""

        self._progress = progress
        self._done = 0

    def add(self, number: int) -> None:
        """Report that a part is done."""
        self._done += self.pages[number]
        if self._progress is not None:
            self._progress(self._done, self.total)

    def _within(self, done: int, total: int) -> None:
        assert self._progress is not None
        self._progress(self._done + done, self.total)


# --- Runs the scan, and refines the classes by other structures than struct page.


def scan_and_settle(
    context: ScanContext,
    pcp: PcpLists,
    observers: Sequence[Observer],
    workers: int,
    progress: Progress | None,
) -> tuple[ScanResult, PcpLists]:
    """Scan the memmap, then correct the sums by other structures.

    :return: The result, and the per-CPU lists: on a running kernel, read again.
    """
    reader, losses = context.reader, context.losses
    links = free_links(reader, context.layout, context.ranges)
    result = _scan(context, observers, None, workers, progress)
    if reader.is_live:
        pcp = pcp_lists(reader, list(context.zones.values()), losses)
    _, broken = settle_pcp(result, pcp, links)
    _count_broken(broken, links, losses)
    settle_cache(reader, result, losses)
    settle_swapcache(reader, result, losses)
    return result, pcp


def scan_finally(
    context: ScanContext,
    pcp: PcpLists,
    observers: Sequence[Observer],
    workers: int,
    progress: Progress | None,
) -> tuple[ScanResult, PcpLists]:
    """Scan the memmap so that observers get the final classes.

    :return: As for :func:`scan_and_settle`.
    """
    reader, losses = context.reader, context.losses
    listed = listed_pages(reader, context.layout, pcp)
    links = free_links(reader, context.layout, context.ranges)
    _count_broken(listed.broken, links, losses)
    finals = FinalClasses(reader, losses, listed, links)
    result = _scan(context, observers, finals, workers, progress)
    for inode_losses in result.losses.values():
        losses.add(inode_losses)
    if not finals.know_swap:
        settle_swapcache(reader, result, losses)
    if reader.is_live:
        pcp = pcp_lists(reader, list(context.zones.values()), losses)
    return result, pcp


def _count_broken(broken: int, links: FreeLinks | None, losses: LossLog) -> None:
    """Count broken lists; links still identify most of their pages on a live kernel."""
    if links is None:
        losses.lose(Loss.PCP_LISTS_CUT, count=broken)
    else:
        losses.coverage["pcp_lists_changed"] += broken


def _scan(
    context: ScanContext,
    observers: Sequence[Observer],
    finals: FinalClasses | None,
    workers: int,
    progress: Progress | None,
) -> ScanResult:
    """Scan the memmap; the result includes the time and the changes during the scan."""
    watch = None
    if context.reader.is_live:
        watch = Watch(context.reader, context.layout, context.ranges, context.losses)
        observers = (*observers, watch.sample)
    began_ns = time.monotonic_ns()
    scanned = scan_parts(
        context.reader,
        context.layout,
        context.ranges,
        context.owners.pages(),
        progress,
        observers,
        finals,
        workers,
        read_all=context.read_all,
    )
    scanned.result.scan_ns = time.monotonic_ns() - began_ns
    if watch is not None:
        scanned.result.changes = watch.end()
    context.losses.coverage["memmap_reads"] = scanned.result.memmap_reads
    if scanned.redone:
        text = f"workers ended early, and {scanned.redone} parts of the memmap were "
        context.losses.note("workers-ended", text + "scanned by one process alone")
    return scanned.result
