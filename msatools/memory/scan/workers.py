# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Work shared out to forked processes, and brought back in its order.

Threads would not do: drgn holds the interpreter's lock while it reads. A forked worker
reads by its copy of the program that its parent has opened. The file under both is one,
and so is its position; but drgn and libkdumpfile read by ``pread()`` and ``mmap()``,
which leave that alone. Where more than the position is shared, as by who reads the same
open /proc/kcore, a worker begins by opening it for itself.
"""

import gc
import os
import pickle
import selectors
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn, TypeVar

T = TypeVar("T")

MAX_PIECES = 2048
"""Their numbers, of two bytes each, are put into a pipe, which may hold one page."""

_NUMBER = struct.Struct("<H")
_HEAD = struct.Struct("<HQ")
"""Before each result: the number of its piece, and how many bytes follow."""

_AT_ONCE = 1 << 20
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals that may raise an exception here, between any two steps."""


def do_in_order(
    work: Callable[[int], T],
    pieces: int,
    workers: int,
    take: Callable[[T], None],
    done: Callable[[int], None],
    begin: Callable[[], None] | None = None,
) -> int:
    """
    Do pieces of work in forked processes, and take the results in their order.

    A worker takes the next piece when it has done one, so that all end together. What
    a worker leaves undone, as it was killed or failed, is done here in the end: so an
    exception that the work raises is raised here, and none has to travel.

    However this is left, no worker is.

    :param work: What is done for each piece, by its number. Its result must be
        picklable; what else it changes is lost with the worker.
    :param take: Called with each result here, in the order of the pieces.
    :param done: Called with the number of each piece that is done, in any order.
    :param begin: Called in each worker before its first piece; if it fails, that worker
        does none.
    :return: How many pieces had to be done here.
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
    return undone


class _Crew:
    """The workers, and the pipes by which they get numbers and give results."""

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
        self._pids: list[int] = []
        self._fds: list[int] = []
        """Where to read each worker's results."""

    def __enter__(self) -> "_Crew":
        todo, writing = os.pipe()
        try:
            numbers = map(_NUMBER.pack, range(self._pieces))
            os.write(writing, b"".join(numbers))
            # Without a writer, the pipe's end tells that all is handed out.
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
        """Fork one worker; where the system has no room for more, those do it all."""
        reading, writing = os.pipe()
        self._fds.append(reading)
        # A signal must come when it is known whom to end, and in whose process.
        with _no_signals():
            try:
                pid = _fork()
                if not pid:
                    self._serve(todo, writing)
                self._pids.append(pid)
            except OSError:
                # What nobody does is done by the parent.
                return
            finally:
                os.close(writing)

    def _serve(self, todo: int, out: int) -> NoReturn:
        """Work in the worker's process, which ends here."""
        try:
            # The parent ends its workers, and a signal to all of its group is for it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            # Should the parent be gone, nobody must seem to read the results.
            for fd in self._fds:
                os.close(fd)
            # Collecting what the parent left would copy most of its memory.
            gc.disable()
            if self._begin is not None:
                self._begin()
            while number := os.read(todo, _NUMBER.size):
                data = pickle.dumps(self._work(*_NUMBER.unpack(number)))
                # With one write the parent wakes once.
                _write(out, _HEAD.pack(*_NUMBER.unpack(number), len(data)) + data)
            os._exit(0)
        finally:
            os._exit(1)

    def results(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and result of each piece as they come, until none can."""
        came = {fd: bytearray() for fd in self._fds}
        with selectors.DefaultSelector() as selector:
            for fd in came:
                selector.register(fd, selectors.EVENT_READ)
            while came:
                for key, _ in selector.select():
                    data = os.read(key.fd, _AT_ONCE)
                    if not data:
                        selector.unregister(key.fd)
                        del came[key.fd]
                        continue
                    came[key.fd] += data
                    yield from _whole_results(came[key.fd])

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
    """Let signals wait that would raise an exception in the midst of this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of a fork beside threads: those of drgn's (OpenMP) are idle by
        # now, and a worker only reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _whole_results(came: bytearray) -> Iterator[tuple[int, bytes]]:
    """Take from what came all results that are whole."""
    while len(came) >= _HEAD.size:
        number, size = _HEAD.unpack_from(came)
        end = _HEAD.size + size
        if len(came) < end:
            return
        yield number, bytes(came[_HEAD.size : end])
        del came[:end]
