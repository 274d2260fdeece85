# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Distributes work to forked processes, and returns the results in order.

Threads would not help: drgn holds the GIL while it reads. A forked worker reads through
its copy of the program that its parent opened. Both share the open file and its
position, but drgn and libkdumpfile use ``pread()`` and ``mmap()``, which do not use the
position. If readers of the same open file share more than the position, as those of
/proc/kcore do, a worker opens the file again.
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
    :return: Number of pieces that the parent did.
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
            except OSError:
                # The parent does the pieces that no worker does.
                return
            finally:
                os.close(writing)

    def _serve(self, todo: int, out: int) -> NoReturn:
        """Work in the worker's process, which ends here."""
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
    """Block the signals whose handlers would raise an exception in between."""
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
