# SPDX-License-Identifier: LGPL-2.1-or-later

"""The C library in which a thread waits, and its locks: 64-bit glibc and musl.

``user_locks`` uses both to find the owners of futexes.
"""

import struct
from collections.abc import Mapping
from typing import Literal

import drgn
import numpy as np
from msgspec import Struct

from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import U32, U64
from msatools.kernel.report import LossLog
from msatools.locks.context import LockContext, per_context
from msatools.locks.futexes import FutexPlace, find_owner, futex_queues
from msatools.locks.report import Mode
from msatools.locks.user_stacks import user_stacks
from msatools.tasks.syscalls import read_syscalls
from msatools.tasks.unwind import stack_bytes

# --- The C library in which a thread waits on a futex.
#
# The memory at a futex is a lock of a C library only if that library waits on it: other
# runtimes (Go, Rust, Abseil, Java) have locks of their own, whose bytes may look the
# same. So the code that made the system call decides. It has to be:
#
# - in the C library that the program has loaded, but not in its syscall(), through
#   which other libraries call the kernel; or
# - in a program without a dynamic linker, in a function whose name begins as in _WAITS.
#   If the function's name is unknown, the thread's control block has to be glibc's.
#
# If neither the function's name nor its code is known, the library is unknown.


Library = Literal["glibc", "musl"]

_CALLS_FOR_OTHERS = "syscall"
_CALLS_FOR_OTHERS_CODE: Mapping[drgn.Architecture, bytes] = {
    drgn.Architecture.X86_64: bytes.fromhex(
        "4889f84889f74889d64889ca4d89c24d89c84c8b4c24080f05"
    ),
    drgn.Architecture.AARCH64: bytes.fromhex(
        "e803002a e00301aa e10302aa e20303aa e30304aa e40305aa e50306aa e60307aa"
        "010000d4"
    ),
}
"""Code of glibc's syscall() up to and including the instruction that enters the kernel
(sysdeps/unix/sysv/linux/x86_64/syscall.S, aarch64/syscall.S), as its name may not be in
memory."""

_GLIBC = ("libc.so.6", "libc-2.", "libpthread.so.0", "libpthread-2.")
"""Prefixes of the names of glibc's files. Before 2.34, threads have a file of their own
(libpthread), and names have the version."""

_WAITS: dict[Library, tuple[str, ...]] = {
    "glibc": ("__lll_", "__futex_", "__pthread_", "pthread_", "__new_sem_"),
    "musl": ("__timedwait", "__wait", "__syscall_cp", "__cp_", "sccp"),
}
"""Prefixes of the names of each library's functions that call the kernel to wait."""

_BLOCK = struct.Struct("<I12xQq")
"""A part of glibc's control block of a thread (``struct pthread``, nptl/descr.h): the
thread ID; then the list of robust mutexes that glibc registers with the kernel, that is
a pointer to the first mutex or to the list itself, and the offset from such a pointer
to the mutex's lock."""

_ROBUST_LIST = ("futex.robust_list", "robust_list")
"""Names of the ``task_struct`` member that points at the list of robust mutexes: in
7.3, where it is in a structure of its own, and before."""

_LIST, _TO_LOCK = 16, -32
"""For glibc: bytes from the thread ID to the list of robust mutexes, and from a pointer
in that list to the mutex's lock. The second one differs in musl."""

_PAIR = struct.Struct("<QQ")
_AUXV_BYTES = 320
"""Number of bytes of ``mm_struct.saved_auxv`` to read, which any kernel has."""

_AT_BASE = 7
"""Type of the auxiliary vector's entry with the address of the dynamic linker, which is
0 if the program has none."""


class _CLibraries:
    """Finds the C libraries of the threads that wait on futexes; keeps the results."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._stacks = user_stacks(context)
        self._places: dict[int, int | None] = {}
        """Maps the address of a ``struct task_struct`` to the address in user code from
        which it called the kernel; ``None`` if unknown."""

        platform = context.reader.prog.platform
        arch = None if platform is None else platform.arch
        self._others_code = _CALLS_FOR_OTHERS_CODE.get(arch) if arch else None
        self._known: dict[tuple[int, int], Library | None] = {}
        """Maps a ``struct mm_struct`` and such a code address to the library."""

    def of_wait(self, task: int, mm: int) -> Library | None:
        """Return the C library in which a task waits: see :func:`library_of`."""
        place = self._place(task)
        if place is None:
            return None
        if (mm, place) not in self._known:
            self._known[mm, place] = self._library(task, mm, place)
        return self._known[mm, place]

    def _place(self, task: int) -> int | None:
        if task not in self._places:
            alone = self._context.alone or self._places
            others = () if alone else futex_queues(self._context).values()
            self._read_places({task, *(queue[0].task for queue in others if queue)})
        return self._places[task]

    def _read_places(self, tasks: set[int]) -> None:
        context = self._context
        addresses = context.tasks["address"].tolist()
        among = np.array([each in tasks for each in addresses], np.bool_)
        chosen = context.tasks.only(among)
        prog = context.reader.prog
        calls = read_syscalls(context.reader, chosen, stack_bytes(prog), LossLog())
        known = calls.known & ~calls.compat
        found = zip(
            chosen["address"][known].tolist(), calls.ip[known].tolist(), strict=True
        )
        self._places.update(dict.fromkeys(tasks))
        self._places.update(found)

    def _library(self, task: int, mm: int, place: int) -> Library | None:
        code = self._stacks.mapping(mm, place)
        if code is None or not code.executable or not code.file:
            return None
        frame = self._stacks.frame(mm, code, place, 0, guess=False)
        if frame.function == _CALLS_FOR_OTHERS:
            return None
        size = len(self._others_code or b"")
        instructions = self._stacks.read(mm, place - size, size) if size else None
        if instructions is not None and instructions == self._others_code:
            return None
        # If the file's symbols are unknown, a function without a name may be syscall().
        is_named = frame.function is not None or self._stacks.has_symbols(code)
        path = self._context.path_of_file(code.file) or ""
        name = path.rpartition("/")[2]
        if name.startswith(_GLIBC):
            return "glibc" if is_named or instructions else None
        # musl's file is also its dynamic linker. Android's libc.so is bionic, not musl.
        if name.startswith("ld-musl-") or (name == "libc.so" and "bionic" not in path):
            return "musl" if is_named else None
        if not self._is_static(mm):
            return None
        if frame.function:
            return _by_function(frame.function)
        return self._by_control_block(task, mm) if instructions else None

    def _is_static(self, mm: int) -> bool:
        """Return whether a program was started without a dynamic linker."""
        layout = self._context.layout
        start = mm + layout.offset("mm_struct", "saved_auxv")
        entries = dict(_PAIR.iter_unpack(layout.reader.read(start, _AUXV_BYTES)))
        return entries.get(_AT_BASE) == 0

    def _by_control_block(self, task: int, mm: int) -> Library | None:
        """Return glibc if a thread's control block is glibc's, otherwise ``None``.

        musl is not found this way: without names, its waits look like its syscall().
        """
        layout = self._context.layout
        if not layout.has("task_struct", *_ROBUST_LIST):
            return None
        robust = layout.member(task, "task_struct", *_ROBUST_LIST)
        start = robust - _LIST
        data = self._stacks.read(mm, start, _BLOCK.size) if start > 0 else None
        if data is None:
            return None
        tid, first, to_lock = _BLOCK.unpack(data)
        if to_lock != _TO_LOCK or not first:
            return None
        place = FutexPlace(task, mm, start, inode=0)
        return "glibc" if find_owner(self._context, place, tid) == task else None


def _by_function(name: str) -> Library | None:
    for library, starts in _WAITS.items():
        if name.startswith(starts):
            return library
    return None


@per_context
def _libraries(context: LockContext) -> _CLibraries:
    return _CLibraries(context)


def library_of(context: LockContext, task: int, mm: int) -> Library | None:
    """Return the C library in which a thread waits on a futex.

    :param task: Address of its ``struct task_struct``.
    :param mm: Address of its ``struct mm_struct``.
    :return: ``None`` if the thread waits in no known C library, or that is unknown.
    :raises UNREADABLE: if a structure that leads to the library is damaged
    """
    return _libraries(context).of_wait(task, mm)


# --- Decodes locks of 64-bit glibc from the memory of a process. Pure functions.
#
# pthread_mutex_t: lock, count, owner, users, kind, two members for spinning, and two
# pointers that link robust mutexes. Its futex is the lock: 0 free, 1 taken, 2 taken and
# perhaps waited for. The lock of a robust mutex is the thread ID of its owner with the
# kernel's FUTEX_WAITERS.
#
# pthread_rwlock_t (glibc 2.25 and newer): number of readers above three bits of state,
# writers, two futexes (wrphase, which readers and the next writer wait on; writers,
# which the other writers wait on), two members of padding, thread ID of the writer,
# shared flag; then 16 bytes of zeros, and the preference. Readers may also wait on the
# number of readers.
#
# pthread_cond_t (glibc 2.25 and newer): two 64-bit counters, of all waiters so far and
# of those before the first of two groups; then, up to 2.40, the number of users of the
# futex of each group; the number of remaining waiters of each group; the original size
# of the first group; the number of all current waiters; and the futex of each group.
# Each waiter waits on one of the two futexes. "nptl: Remove g_refs from condition
# variables" (in 2.41) removed the users, so the futexes are 8 bytes closer to the
# start, and 8 bytes of zeros are at the end.
#
# A program may use the memory at a futex for anything. So a lock is reported only if
# all of its members are consistent: otherwise any number would pass for its owner.


MUTEX_BYTES = 40
RWLOCK_BYTES = 56
CONDITION_BYTES = 48

_MUTEX = struct.Struct("<IIIIIIQQ")
_NPTL_RWLOCK = struct.Struct("<8I2QII")
_CONDITION = struct.Struct("<2Q8I")

# Bits of a mutex's kind (nptl/pthreadP.h).
_NPTL_TYPE = 0b11
_NPTL_RECURSIVE, _NPTL_ERRORCHECK = 1, 2
_NPTL_ROBUST, _NPTL_INHERITS, _PROTECTS, _NPTL_SHARED = 1 << 4, 1 << 5, 1 << 6, 1 << 7
_KINDS = (1 << 10) - 1
_TAKEN = (1, 2)

# Bits of the lock of a robust mutex (include/uapi/linux/futex.h).
_NPTL_WAITERS, _OWNER_DIED, _NPTL_TID = 1 << 31, 1 << 30, (1 << 30) - 1

# Bits of the readers of a rwlock (nptl/pthread_rwlock_common.c), and of its futexes.
_WRITE_PHASE, _NPTL_WRITER, _READERS_WAIT = 1, 2, 4
_READERS_SHIFT = 3
_SET, _USED = 1, 2
_PREFERENCES = 3
_PHASE_OFFSET, _WRITERS_OFFSET = 8, 12

# Bits of members of a condition variable (nptl/pthread_cond_common.c).
_LOCK = 0b11
_FLAGS_SHIFT, _PROCESS_SHARED = 3, 1
_MAX_GROUP = 1 << 29
_FUTEXES_OFFSET, _FUTEXES_OFFSET_241 = 40, 32
_U32_MASK = 0xFFFF_FFFF


class Mutex(Struct, frozen=True):
    """A ``pthread_mutex_t`` that has an owner."""

    owner: int
    """Thread ID of the owner in the PID namespace of the process."""

    blocks_owner: bool
    """Whether the owner deadlocks if it takes the mutex again."""


class Rwlock(Struct, frozen=True):
    """A ``pthread_rwlock_t`` that has a writer or readers."""

    writer: int | None
    """Thread ID of the writer in the PID namespace of the process; ``None`` if there is
    no writer."""

    readers: int
    """Number of readers."""

    mode: Mode
    """Mode of the waiters on the futex that was examined."""


def glibc_mutex(data: bytes, shared: bool) -> Mutex | None:
    """
    Decode a mutex; ``None`` if it is no mutex, or has no owner or a priority protocol.

    :param data: :data:`MUTEX_BYTES` from its futex on.
    :param shared: Whether the futex's key lets other processes use it.
    """
    lock, count, owner, users, kind, _, before, after = _MUTEX.unpack(data)
    # Waiters on robust mutexes have shared keys, as the kernel uses such keys when it
    # wakes them after the owner's death.
    if kind > _KINDS or shared != bool(kind & (_NPTL_SHARED | _NPTL_ROBUST)):
        return None
    # The futex of PTHREAD_PRIO_INHERIT is a PI futex, not handled here. The lock of
    # PTHREAD_PRIO_PROTECT includes its priority ceiling.
    if kind & (_NPTL_INHERITS | _PROTECTS):
        return None
    if not (0 < owner < PID_MAX_LIMIT and 0 < users < PID_MAX_LIMIT):
        return None
    type_ = kind & _NPTL_TYPE
    if kind & _NPTL_ROBUST:
        taken = (
            lock & _NPTL_TID == owner
            and lock & _NPTL_WAITERS
            and not lock & _OWNER_DIED
        )
        fits = count and before and after
    else:
        taken = lock in _TAKEN
        fits = bool(count) == (type_ == _NPTL_RECURSIVE) and not before | after
    if not (taken and fits):
        return None
    return Mutex(owner, blocks_owner=type_ not in (_NPTL_RECURSIVE, _NPTL_ERRORCHECK))


def rwlock_start(address: int) -> int:
    """Return the address that the rwlock of a futex, wrphase or writers, would have."""
    return address - (_WRITERS_OFFSET if address % 8 else _PHASE_OFFSET)


def glibc_rwlock(data: bytes, offset: int, shared: bool) -> Rwlock | None:
    """
    Decode a rwlock; ``None`` if it is no rwlock, or its owner is just changing.

    :param data: :data:`RWLOCK_BYTES` from its start on.
    :param offset: Offset in the rwlock of the futex that tasks wait on.
    :param shared: Whether the futex's key lets other processes use it.
    """
    values = _NPTL_RWLOCK.unpack(data)
    readers, _, phase, writers, pad1, pad2, writer, is_shared, *zeros, prefers, end = (
        values
    )
    if pad1 or pad2 or any(zeros) or end or prefers >= _PREFERENCES:
        return None
    if is_shared != shared or max(phase, writers) > _SET | _USED:
        return None
    if not readers & _NPTL_WRITER or not writers & _SET:
        return None
    mode = _mode(offset, readers, phase, writers)
    if mode is None:
        return None
    if readers & _WRITE_PHASE:
        if phase & _SET and 0 < writer < PID_MAX_LIMIT:
            return Rwlock(writer, 0, mode)
    elif not phase & _SET and not writer and readers >> _READERS_SHIFT:
        return Rwlock(None, readers >> _READERS_SHIFT, mode)
    return None


def condition_starts(address: int) -> tuple[int, int]:
    """Return the two addresses that the condition variable of a futex may have.

    :return: In the layout up to glibc 2.40, and in that since 2.41.
    """
    first = address & ~7
    return first - _FUTEXES_OFFSET, first - _FUTEXES_OFFSET_241


def condition(
    data: bytes, newer: bool, waiters: tuple[int, int], shared: bool | None
) -> bool:
    """
    Return whether *data* may be a condition variable that tasks wait on.

    It has no magic number, so all of its members have to be consistent:

    - The first group starts and ends before the sequence number of the next waiter. A
      group has at most 2 to the power of 29 sequence numbers: all waiters of a full
      group are woken.
    - The number of current waiters is at most that of all waiters so far, and at least
      that of queued tasks. Up to 2.40, each group has at least as many users as its
      futex has queued tasks, and both together at most as many as current waiters.
    - The first group has at most as many remaining waiters as its original size. The
      second group is not counted yet; its size is 0, less the waiters that gave up.
      While the internal lock is taken, sizes may be inconsistent.
    - The shared flag agrees with the keys of its futexes.
    - Up to 2.40: bit 0 of both counters is the same. Since 2.41: the last 8 bytes are
      zeros.

    :param data: :data:`CONDITION_BYTES` from its start on.
    :param newer: Whether to decode the layout since 2.41.
    :param waiters: Number of tasks that are queued on each of the two futexes, or 0.
    :param shared: Whether the futexes' keys let other processes use them; ``None`` if
        unknown.
    """
    values: tuple[int, ...] = _CONDITION.unpack(data)
    sequence, start, *words = values
    references, words = ([], words) if newer else (words[:2], words[2:])
    size_0, size_1, original, flags, _, _, *rest = words
    index, first = sequence & 1, start if newer else start >> 1
    if any(rest) or original & _LOCK == _LOCK:
        return False
    if shared is not None and flags & _PROCESS_SHARED != shared:
        return False
    ever, had, waiting = sequence >> 1, original >> 2, flags >> _FLAGS_SHIFT
    if not first + had <= ever <= first + 2 * _MAX_GROUP:
        return False
    if not max(sum(waiters), 1) <= waiting <= min(ever, PID_MAX_LIMIT):
        return False
    using = [count >> 1 for count in references] or [waiting] * 2
    if any(queued > used for queued, used in zip(waiters, using, strict=True)):
        return False
    if references and sum(using) > waiting:
        return False
    if original & _LOCK:
        return True
    if not newer and start & 1 != index:
        return False
    newest, oldest = (size_0, size_1) if index == 0 else (size_1, size_0)
    gave_up = -newest & _U32_MASK
    return oldest <= had and gave_up <= _MAX_GROUP


def _mode(offset: int, readers: int, phase: int, writers: int) -> Mode | None:
    """Return the mode of waiters on the futex at an offset; ``None`` if it has none."""
    if offset == _WRITERS_OFFSET:
        return "write" if writers & _USED else None
    if offset == _PHASE_OFFSET and phase & _USED:
        # While a writer owns the lock, readers wait for the end of its phase.
        return "read" if phase & _SET else "write"
    if offset == 0 and readers & _READERS_WAIT:
        return "read"
    return None


# --- Decodes locks of 64-bit musl from the memory of a process. Pure functions.
#
# pthread_mutex_t (src/internal/pthread_impl.h, _m_*): type, lock, number of waiters,
# two members unused, count, and two pointers that link the mutexes of their owner. Its
# futex is the lock: the thread ID of its owner, or only EBUSY for a mutex of the
# default type, in both cases with FUTEX_WAITERS.
#
# pthread_rwlock_t (_rw_*): lock, number of waiters, shared flag; then zeros. Its futex
# is the lock: the number of readers, or 0x7fffffff if a writer has it; the writer's ID
# is not recorded. The highest bit is set if tasks wait.
#
# Each waiter on a condition variable waits on a futex on its own stack. pthread_join()
# waits on detach_state of the other thread's struct pthread, which begins with the
# address of that structure itself.


MUTEX_FUTEX = 4
"""Offset of the futex in a mutex of musl."""

UNRECORDED = "a mutex of musl: of this type it does not record its owner"
_MUSL_RWLOCK = struct.Struct("<14I")

# Bits of a mutex's type.
_MUSL_TYPE, _MUSL_RECURSIVE, _MUSL_ERRORCHECK = 0b11, 1, 2
_MUSL_ROBUST, _MUSL_INHERITS, _MUSL_SHARED = 1 << 2, 1 << 3, 1 << 7
_TYPES = _MUSL_TYPE | _MUSL_ROBUST | _MUSL_INHERITS | _MUSL_SHARED
_EBUSY = 16
_MUSL_WAITERS, _MUSL_TID = 1 << 31, (1 << 30) - 1
_MUSL_WRITER = 0x7FFF_FFFF

_THREADS = ((56, 48), (64, 56), (40, 32))
"""Offsets of ``detach_state`` and ``tid`` in a ``struct pthread``: in musl 1.2.2 and
newer, in older ones, and on arm64, which has dtv and canary at the end instead."""

THREAD_BYTES = 64
"""Maximum number of bytes in a ``struct pthread`` before its futex."""

_JOINABLE = (1, 2)
"""Values of ``detach_state`` to wait on: ``DT_EXITING`` and ``DT_JOINABLE``."""


class ReadWriteLock(Struct, frozen=True):
    """A ``pthread_rwlock_t`` of musl that is taken."""

    readers: int
    """Number of readers; 0 if a writer has it."""

    mode: Mode | None
    """Mode of the waiters: ``write`` if readers have the lock, as only writers wait for
    them; ``None`` if a writer has it, as any may wait."""


def mutex(data: bytes, shared: bool) -> Mutex | None:
    """
    Decode a mutex of musl; ``None`` if it is no mutex, or records no owner.

    :param data: :data:`MUTEX_BYTES` from its start on.
    :param shared: Whether the futex's key lets other processes use it.
    """
    type_, lock, waiters, *_, before, after = _MUTEX.unpack(data)
    if not _is_mutex(type_, lock, waiters, shared) or not _records_owner(type_):
        return None
    owner = lock & _MUSL_TID
    if not 0 < owner < PID_MAX_LIMIT or not before or not after:
        return None
    return Mutex(
        owner,
        blocks_owner=type_ & _MUSL_TYPE not in (_MUSL_RECURSIVE, _MUSL_ERRORCHECK),
    )


def is_unrecorded(data: bytes, shared: bool) -> bool:
    """Return whether *data* is a mutex of musl that is taken and records no owner.

    The parameters are those of :func:`mutex`.
    """
    type_, lock, waiters, _, _, count, before, after = _MUTEX.unpack(data)
    if not _is_mutex(type_, lock, waiters, shared) or _records_owner(type_):
        return False
    return lock & ~_MUSL_WAITERS == _EBUSY and not (count or before or after)


def rwlock(data: bytes, shared: bool) -> ReadWriteLock | None:
    """
    Decode a rwlock of musl; ``None`` if it is no rwlock, or no task waits for it.

    :param data: :data:`RWLOCK_BYTES` from its start on.
    :param shared: Whether the futex's key lets other processes use it.
    """
    lock, waiters, is_shared, *zeros = _MUSL_RWLOCK.unpack(data)
    if any(zeros) or is_shared != (_MUSL_SHARED if shared else 0):
        return None
    if not lock & _MUSL_WAITERS or not 0 < waiters < PID_MAX_LIMIT:
        return None
    readers = lock & ~_MUSL_WAITERS
    if readers == _MUSL_WRITER:
        return ReadWriteLock(0, None)
    return ReadWriteLock(readers, "write") if 0 < readers < PID_MAX_LIMIT else None


def threads(before: bytes, address: int) -> list[int]:
    """
    Return the IDs of the threads that a pthread_join() of musl on a futex may wait for.

    :param before: Memory that ends with the futex: at most :data:`THREAD_BYTES` + 4.
    :param address: Address of the futex.
    :return: IDs in the process's PID namespace; at most one for each known layout.
    """
    if not before or U32.unpack_from(before, len(before) - 4)[0] not in _JOINABLE:
        return []
    found = []
    for state, tid in _THREADS:
        first = len(before) - 4 - state
        if first >= 0 and U64.unpack_from(before, first)[0] == address - state:
            found.append(U32.unpack_from(before, first + tid)[0])
    return [tid for tid in found if 0 < tid < PID_MAX_LIMIT]


def _is_mutex(type_: int, lock: int, waiters: int, shared: bool) -> bool:
    # The futex of a mutex that inherits priorities is a PI futex, not handled here.
    if type_ & (~_TYPES | _MUSL_INHERITS) or type_ & _MUSL_TYPE == _MUSL_TYPE:
        return False
    if bool(type_ & _MUSL_SHARED) != shared:
        return False
    return bool(lock & _MUSL_WAITERS) and 0 < waiters < PID_MAX_LIMIT


def _records_owner(type_: int) -> bool:
    return bool(type_ & (_MUSL_TYPE | _MUSL_ROBUST))
