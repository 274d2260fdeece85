# SPDX-License-Identifier: LGPL-2.1-or-later

"""The C library in which a thread waits on a futex.

What lies at a futex is a lock of a C library only if that library waits on it. Other
runtimes (Go, Rust, Abseil, Java) have locks of their own, and their bytes may look like
those of another. So the code that made the system call decides:

- It is in the C library that the program has loaded, but not in its ``syscall()``, by
  which other libraries call the kernel.
- It is in a program without a dynamic linker, and the function is one of those in which
  a C library waits; or, without its name, the thread's control block is that of glibc.

If neither the function's name nor its code is known, that cannot be told.
"""

import struct
from collections.abc import Mapping
from typing import Literal

import drgn
import numpy as np

from msatools.kernel.report import LossLog
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.user.futexes import futex_queues
from msatools.locks.user.futexusers import FutexPlace, find_owner
from msatools.locks.user.userstacks import user_stacks
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.syscalls import read_syscalls

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
"""Its code in glibc, up to the instruction that enters the kernel
(sysdeps/unix/sysv/linux/x86_64/syscall.S, aarch64/syscall.S): its name need not be in
memory."""

_GLIBC = ("libc.so.6", "libc-2.", "libpthread.so.0", "libpthread-2.")
"""How names of its files begin: there is one file since 2.34, and a version in the name
before."""

_WAITS: dict[Library, tuple[str, ...]] = {
    "glibc": ("__lll_", "__futex_", "__pthread_", "pthread_", "__new_sem_"),
    "musl": ("__timedwait", "__wait", "__syscall_cp", "__cp_", "sccp"),
}
"""How names of the functions begin that call the kernel to wait."""

_BLOCK = struct.Struct("<I12xQq")
"""The part of glibc's control block around the list of robust mutexes, which glibc
registers with the kernel for each thread (nptl/descr.h): the thread ID; the list, which
begins with a pointer to the first mutex, or to itself; and the offset from a pointer of
the list to the lock of its mutex."""

_ROBUST_LIST = ("futex.robust_list", "robust_list")
"""Where a task has its address: in a structure of its own in 7.3, and before."""

_LIST, _TO_LOCK = 16, -32
"""Offset of that list from the thread ID; and that offset, which musl has otherwise."""

_PAIR = struct.Struct("<QQ")
_AUXV_BYTES = 320
"""Bytes of ``mm_struct.saved_auxv`` that any kernel has."""

_AT_BASE = 7
"""The entry with the address of the dynamic linker: 0 if the program has none."""


class _CLibraries:
    """The C libraries of the threads that wait on futexes; each place is asked once."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._stacks = user_stacks(context)
        self._places: dict[int, int | None] = {}
        """Maps a thread to the address in its code from which it called the kernel."""

        platform = context.reader.prog.platform
        arch = None if platform is None else platform.arch
        self._others_code = _CALLS_FOR_OTHERS_CODE.get(arch) if arch else None
        self._known: dict[tuple[int, int], Library | None] = {}
        """By address space and that address."""

    def of_wait(self, task: int, mm: int) -> Library | None:
        """Return the library that waits.

        :raises UNREADABLE: if a structure on the way to it is damaged
        """
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
        # Without symbols it may be that function.
        is_named = frame.function is not None or self._stacks.has_symbols(code)
        path = self._context.path_of_file(code.file) or ""
        name = path.rpartition("/")[2]
        if name.startswith(_GLIBC):
            return "glibc" if is_named or instructions else None
        # The file of musl is also its dynamic linker. Android's libc is not it.
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
        layout = self._context.layout
        if not layout.has("task_struct", *_ROBUST_LIST):
            return None
        robust = layout.member(task, "task_struct", *_ROBUST_LIST)
        start = robust - _LIST
        data = self._stacks.read(mm, start, _BLOCK.size) if start > 0 else None
        # Of musl's waits its syscall() could not be told, without names.
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
    :return: ``None`` if it waits in no known C library, or that cannot be told.
    :raises UNREADABLE: if a structure on the way to it is damaged
    """
    return _libraries(context).of_wait(task, mm)
