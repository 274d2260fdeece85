# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks of this machine's C library are decoded from their memory."""

import ctypes
import mmap
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from msatools.locks import c_library
from msatools.locks.c_library import (
    CONDITION_BYTES,
    MUTEX_BYTES,
    RWLOCK_BYTES,
    Mutex,
    Rwlock,
    rwlock_start,
)

FUTEX = 202
PAGE = 4096
WAIT_SECONDS = 30
NORMAL, RECURSIVE, ERRORCHECK, ADAPTIVE = range(4)
PREFER_WRITER_NONRECURSIVE = 2
NOBODY = 4_000_000
"""A possible thread ID that no thread has."""

libc = ctypes.CDLL(None)


@dataclass
class Waiter:
    thread: threading.Thread
    futex: int
    """Address of the futex that it waits on."""


class Memory:
    """A page of this process with a lock."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, PAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self.lock = ctypes.c_void_p(self._start + 1024)
        self.address = self._start + 1024
        """Address of the lock."""

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def fill(self, start: int, size: int, value: int) -> None:
        data = struct.pack("<I", value) * (size // 4)
        ctypes.memmove(self.address + start, data, size)

    def wait(self, call: Callable[[], object]) -> Waiter:
        """Start a thread that waits on a futex of this page."""
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            path = Path(f"/proc/self/task/{thread.native_id}/syscall")
            number, *arguments = path.read_text().split()
            if number == str(FUTEX):
                address = int(arguments[0], 16)
                if self._start <= address < self._start + PAGE:
                    return Waiter(thread, address)
            time.sleep(0.001)
        raise AssertionError("it does not wait")


@pytest.fixture
def memory() -> Memory:
    return Memory()


@dataclass(frozen=True)
class Kind:
    type: int = NORMAL
    shared: bool = False
    robust: bool = False


KINDS = {
    "normal": Kind(),
    "recursive": Kind(RECURSIVE),
    "error-check": Kind(ERRORCHECK),
    "adaptive": Kind(ADAPTIVE),
    "shared": Kind(shared=True),
    "shared-recursive": Kind(RECURSIVE, shared=True),
    "robust": Kind(robust=True),
    "robust-recursive": Kind(RECURSIVE, robust=True),
    "robust-shared": Kind(shared=True, robust=True),
}


def make_mutex(memory: Memory, kind: Kind) -> None:
    attributes = ctypes.create_string_buffer(64)
    assert not libc.pthread_mutexattr_init(attributes)
    assert not libc.pthread_mutexattr_settype(attributes, kind.type)
    assert not libc.pthread_mutexattr_setpshared(attributes, int(kind.shared))
    assert not libc.pthread_mutexattr_setrobust(attributes, int(kind.robust))
    assert not libc.pthread_mutex_init(memory.lock, attributes)


def held_mutex(memory: Memory, kind: Kind) -> bytes:
    """Return the contents of a mutex that this thread owns and another waits for."""

    def take() -> None:
        libc.pthread_mutex_lock(memory.lock)
        libc.pthread_mutex_unlock(memory.lock)

    make_mutex(memory, kind)
    assert not libc.pthread_mutex_lock(memory.lock)
    waiter = memory.wait(take)
    data = memory.read(waiter.futex, MUTEX_BYTES)
    assert waiter.futex == memory.address
    assert not libc.pthread_mutex_unlock(memory.lock)
    waiter.thread.join(WAIT_SECONDS)
    return data


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_mutexes(memory: Memory, kind: Kind) -> None:
    data = held_mutex(memory, kind)
    # The futex of a robust mutex is a shared one.
    shared = kind.shared or kind.robust
    blocks = kind.type in (NORMAL, ADAPTIVE)
    assert c_library.glibc_mutex(data, shared) == Mutex(
        threading.get_native_id(), blocks
    )
    assert c_library.glibc_mutex(data, not shared) is None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        pytest.param(0, 0, id="not locked"),
        pytest.param(0, 3, id="another number"),
        pytest.param(0, 1 << 31 | 2, id="as a robust one"),
        pytest.param(1, 1, id="counted, and not recursive"),
        pytest.param(2, 0, id="no owner"),
        pytest.param(2, 1 << 22, id="no thread's ID"),
        pytest.param(3, 0, id="no user"),
        pytest.param(4, RECURSIVE, id="recursive, and not counted"),
        pytest.param(4, 32, id="one that inherits priority"),
        pytest.param(4, 64, id="one that protects"),
        pytest.param(4, 128, id="shared"),
        pytest.param(4, 1 << 10, id="no kind"),
        pytest.param(4, NOBODY, id="another thread's ID"),
        pytest.param(6, 8, id="linked"),
        pytest.param(8, 8, id="linked to the next"),
    ],
)
def test_words_that_do_not_fit_a_mutex(memory: Memory, word: int, value: int) -> None:
    data = bytearray(held_mutex(memory, KINDS["normal"]))
    assert c_library.glibc_mutex(bytes(data), False)
    struct.pack_into("<I", data, 4 * word, value)
    assert c_library.glibc_mutex(bytes(data), False) is None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        pytest.param(0, NOBODY | 1 << 31, id="of two owners"),
        pytest.param(1, 0, id="not counted"),
        pytest.param(4, 0, id="not robust"),
    ],
)
def test_words_that_do_not_fit_a_robust_mutex(
    memory: Memory, word: int, value: int
) -> None:
    data = bytearray(held_mutex(memory, KINDS["robust"]))
    assert c_library.glibc_mutex(bytes(data), True)
    struct.pack_into("<I", data, 4 * word, value)
    assert c_library.glibc_mutex(bytes(data), True) is None


def test_robust_mutex_whose_owner_died(memory: Memory) -> None:
    data = bytearray(held_mutex(memory, KINDS["robust"]))
    (word,) = struct.unpack_from("<I", data)
    struct.pack_into("<I", data, 0, word | 1 << 30)
    assert c_library.glibc_mutex(bytes(data), True) is None
    struct.pack_into("<I", data, 0, word & ~(1 << 31))
    assert c_library.glibc_mutex(bytes(data), True) is None


# --- read-write locks


def make_rwlock(memory: Memory, shared: bool, prefers: int = 0) -> None:
    attributes = ctypes.create_string_buffer(64)
    assert not libc.pthread_rwlockattr_init(attributes)
    assert not libc.pthread_rwlockattr_setpshared(attributes, int(shared))
    assert not libc.pthread_rwlockattr_setkind_np(attributes, prefers)
    assert not libc.pthread_rwlock_init(memory.lock, attributes)


def taking(memory: Memory, how: str) -> Callable[[], None]:
    def take() -> None:
        getattr(libc, f"pthread_rwlock_{how}lock")(memory.lock)
        libc.pthread_rwlock_unlock(memory.lock)

    return take


def read_rwlock(memory: Memory, futex: int, shared: bool = False) -> Rwlock | None:
    data = memory.read(memory.address, RWLOCK_BYTES)
    return c_library.glibc_rwlock(data, futex - memory.address, shared)


def unlock(memory: Memory, *waiters: Waiter) -> None:
    assert not libc.pthread_rwlock_unlock(memory.lock)
    for waiter in waiters:
        waiter.thread.join(WAIT_SECONDS)
        assert not waiter.thread.is_alive()


@pytest.mark.parametrize("shared", [False, True])
def test_rwlock_with_a_writer(memory: Memory, shared: bool) -> None:
    make_rwlock(memory, shared)
    libc.pthread_rwlock_wrlock(memory.lock)
    reader = memory.wait(taking(memory, "rd"))
    writer = memory.wait(taking(memory, "wr"))
    own = threading.get_native_id()
    found = [read_rwlock(memory, waiter.futex, shared) for waiter in (reader, writer)]
    assert found == [Rwlock(own, 0, "read"), Rwlock(own, 0, "write")]
    for waiter in (reader, writer):
        assert rwlock_start(waiter.futex) == memory.address
        assert read_rwlock(memory, waiter.futex, not shared) is None
        data = memory.read(waiter.futex, MUTEX_BYTES)
        assert c_library.glibc_mutex(data, shared) is None
    unlock(memory, reader, writer)


def test_rwlock_with_readers(memory: Memory) -> None:
    make_rwlock(memory, False)
    libc.pthread_rwlock_rdlock(memory.lock)
    libc.pthread_rwlock_rdlock(memory.lock)
    first = memory.wait(taking(memory, "wr"))
    second = memory.wait(taking(memory, "wr"))
    assert first.futex != second.futex
    for waiter in (first, second):
        assert read_rwlock(memory, waiter.futex) == Rwlock(None, 2, "write")
    libc.pthread_rwlock_unlock(memory.lock)
    unlock(memory, first, second)


def test_reader_blocked_by_a_writer(memory: Memory) -> None:
    make_rwlock(memory, False, PREFER_WRITER_NONRECURSIVE)
    libc.pthread_rwlock_rdlock(memory.lock)
    # The second writer is queued after the first, and readers after both.
    writers = [memory.wait(taking(memory, "wr")) for _ in range(2)]
    reader = memory.wait(taking(memory, "rd"))
    assert reader.futex == memory.address
    assert read_rwlock(memory, reader.futex) == Rwlock(None, 1, "read")
    unlock(memory, *writers, reader)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        pytest.param(0, 0, id="not locked"),
        pytest.param(0, 1, id="no writer in a write phase"),
        pytest.param(0, 1 << 3 | 2, id="a read phase, and a writer"),
        pytest.param(2, 0, id="an invalid phase"),
        pytest.param(2, 4, id="no such value"),
        pytest.param(3, 0, id="no writer has been let in"),
        pytest.param(4, 1, id="padding"),
        pytest.param(6, 0, id="the writer has gone"),
        pytest.param(6, 1 << 22, id="no thread's ID"),
        pytest.param(7, 1, id="shared"),
        pytest.param(9, 1, id="more padding"),
        pytest.param(12, 3, id="no such preference"),
        pytest.param(13, 1, id="its end"),
    ],
)
def test_words_that_do_not_fit_a_rwlock(memory: Memory, word: int, value: int) -> None:
    make_rwlock(memory, False)
    libc.pthread_rwlock_wrlock(memory.lock)
    waiter = memory.wait(taking(memory, "rd"))
    data = bytearray(memory.read(memory.address, RWLOCK_BYTES))
    offset = waiter.futex - memory.address
    assert c_library.glibc_rwlock(bytes(data), offset, False)
    struct.pack_into("<I", data, 4 * word, value)
    assert c_library.glibc_rwlock(bytes(data), offset, False) is None
    unlock(memory, waiter)


# --- objects without an owner


def assert_no_lock(memory: Memory, futex: int) -> None:
    """Check that memory at a futex is not taken for a mutex or rwlock."""
    for shared in (False, True):
        assert c_library.glibc_mutex(memory.read(futex, MUTEX_BYTES), shared) is None
        for start in {rwlock_start(futex), futex}:
            data = memory.read(start, RWLOCK_BYTES)
            assert c_library.glibc_rwlock(data, futex - start, shared) is None


def test_condition_variables(memory: Memory) -> None:
    mutex = ctypes.create_string_buffer(MUTEX_BYTES)
    assert not libc.pthread_mutex_init(mutex, None)
    assert not libc.pthread_cond_init(memory.lock, None)

    def wait() -> None:
        libc.pthread_mutex_lock(mutex)
        libc.pthread_cond_wait(memory.lock, mutex)
        libc.pthread_mutex_unlock(mutex)

    waiter = memory.wait(wait)
    for value in (0, 1, 2, threading.get_native_id()):
        memory.fill(48, 256, value)
        assert_no_lock(memory, waiter.futex)
    assert not libc.pthread_cond_signal(memory.lock)
    waiter.thread.join(WAIT_SECONDS)
    assert not waiter.thread.is_alive()


# --- condition variables


class Crowd:
    """Threads that wait on a condition variable of this machine's C library."""

    def __init__(self, memory: Memory, shared: bool = False) -> None:
        self._memory = memory
        self._mutex = ctypes.create_string_buffer(MUTEX_BYTES)
        self._waiters: list[Waiter] = []
        attribute = ctypes.create_string_buffer(8)
        libc.pthread_condattr_init(attribute)
        libc.pthread_condattr_setpshared(attribute, int(shared))
        assert not libc.pthread_mutex_init(self._mutex, None)
        assert not libc.pthread_cond_init(memory.lock, attribute)

    def grow(self) -> int:
        """Start another waiter; return the futex that it waits on."""
        waiter = self._memory.wait(self._wait)
        self._waiters.append(waiter)
        return waiter.futex

    def _wait(self) -> None:
        libc.pthread_mutex_lock(self._mutex)
        libc.pthread_cond_wait(self._memory.lock, self._mutex)
        libc.pthread_mutex_unlock(self._mutex)

    def signal(self) -> None:
        """Wake one waiter, and wait until it has ended."""
        alive = len(self._living)
        libc.pthread_cond_signal(self._memory.lock)
        end = time.monotonic() + WAIT_SECONDS
        while len(self._living) >= alive and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self._living) == alive - 1

    @property
    def _living(self) -> list[Waiter]:
        return [waiter for waiter in self._waiters if waiter.thread.is_alive()]

    @property
    def queued(self) -> tuple[int, int]:
        """The numbers of waiters on both futexes."""
        first = self._memory.address + futexes_offset()
        futexes = [waiter.futex for waiter in self._living]
        return futexes.count(first), futexes.count(first + 4)

    def end(self) -> None:
        libc.pthread_cond_broadcast(self._memory.lock)
        for waiter in self._waiters:
            waiter.thread.join(WAIT_SECONDS)
            assert not waiter.thread.is_alive()


def is_new() -> bool:
    """Return whether this machine's C library is 2.41 or newer."""
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    version = libc.gnu_get_libc_version().decode().split(".")
    return tuple(map(int, version[:2])) >= (2, 41)


def futexes_offset() -> int:
    return 32 if is_new() else 40


def is_condition(
    memory: Memory, crowd: Crowd, more: int = 0, shared: bool = False
) -> bool:
    data = memory.read(memory.address, CONDITION_BYTES)
    first, second = crowd.queued
    return c_library.condition(data, is_new(), (first + more, second + more), shared)


@pytest.mark.parametrize("shared", [False, True])
def test_condition_of_this_machine(memory: Memory, shared: bool) -> None:
    """It is recognized with waiters on one futex or both, but not without waiters."""
    crowd = Crowd(memory, shared)
    assert not is_condition(memory, crowd, shared=shared)
    futexes = set()
    # A waiter after a signal is in the other group.
    for step in "wwwswwswsswwws":
        if step == "w":
            futexes.add(crowd.grow())
        else:
            crowd.signal()
        assert is_condition(memory, crowd, shared=shared)
        assert not is_condition(memory, crowd, shared=not shared)
        assert not is_condition(memory, crowd, more=20, shared=shared)
    start = futexes_offset()
    assert futexes == {memory.address + start, memory.address + start + 4}
    for futex in futexes:
        assert memory.address == c_library.condition_starts(futex)[is_new()]
    crowd.end()
    assert not is_condition(memory, crowd, shared=shared)


@dataclass(frozen=True)
class Condition:
    """A condition variable in memory, by default with 30 and 20 waiters."""

    sequence: int = 2 * 550
    start: int = 2 * 450
    references: tuple[int, ...] = (2 * 20, 2 * 30)
    sizes: tuple[int, int] = (0, 30)
    original: int = 80 << 2
    flags: int = 50 << 3
    rest: tuple[int, ...] = ()

    def is_one(self, queued: tuple[int, int] = (20, 30)) -> bool:
        newer = not self.references
        words = [*self.references, *self.sizes, self.original, self.flags, 0, 0]
        data = struct.pack("<2Q8I", self.sequence, self.start, *words, *self.rest)
        return c_library.condition(data, newer, queued, False)


OLD = Condition()
NEW = replace(OLD, start=450, references=(), rest=(0, 0))


@pytest.mark.parametrize("made", [OLD, NEW], ids=["2.40", "2.41"])
@pytest.mark.parametrize(
    ("change", "fits"),
    [
        pytest.param({}, True, id="at rest"),
        pytest.param({"sizes": (-5 & 0xFFFFFFFF, 30)}, True, id="some gave up"),
        pytest.param({"sizes": (5, 30)}, False, id="more left than counted"),
        pytest.param({"sizes": (0, 81)}, False, id="more left than there were"),
        pytest.param({"sizes": (5, 81), "original": 80 << 2 | 1}, True, id="changing"),
        pytest.param({"original": 80 << 2 | 3}, False, id="invalid internal lock"),
        pytest.param({"original": 120 << 2}, False, id="ends after the next turn"),
        pytest.param({"sequence": 2 * 440}, False, id="starts after the next turn"),
        pytest.param({"sequence": 0x7F0012345678}, False, id="far too many turns"),
        pytest.param({"flags": 49 << 3}, False, id="fewer wait than are queued"),
        pytest.param({"flags": 551 << 3}, False, id="more wait than ever did"),
        pytest.param({"flags": 50 << 3 | 1}, False, id="shared between processes"),
    ],
)
def test_words_of_a_condition(made: Condition, change: Any, fits: bool) -> None:
    assert replace(made, **change).is_one() is fits


@pytest.mark.parametrize(
    "wrong",
    [
        replace(OLD, references=(2 * 19, 2 * 31)),
        replace(OLD, references=(2 * 20, 2 * 31)),
        replace(OLD, start=2 * 450 + 1),
        replace(NEW, rest=(0, 1)),
        replace(NEW, rest=(1, 0)),
    ],
)
def test_words_of_one_layout_only(wrong: Condition) -> None:
    assert not wrong.is_one()


def test_semaphores(memory: Memory) -> None:
    assert not libc.sem_init(memory.lock, 0, 0)
    waiter = memory.wait(lambda: libc.sem_wait(memory.lock))
    for value in (0, 1, 2, threading.get_native_id()):
        memory.fill(32, 256, value)
        assert_no_lock(memory, waiter.futex)
    assert not libc.sem_post(memory.lock)
    waiter.thread.join(WAIT_SECONDS)
    assert not waiter.thread.is_alive()


def test_barriers(memory: Memory) -> None:
    assert not libc.pthread_barrier_init(memory.lock, None, 2)
    waiter = memory.wait(lambda: libc.pthread_barrier_wait(memory.lock))
    for value in (0, 1, 2, threading.get_native_id()):
        memory.fill(32, 256, value)
        assert_no_lock(memory, waiter.futex)
    libc.pthread_barrier_wait(memory.lock)
    waiter.thread.join(WAIT_SECONDS)
    assert not waiter.thread.is_alive()
