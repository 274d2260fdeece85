# SPDX-License-Identifier: LGPL-2.1-or-later

"""
``--sandbox``: a dump is read in a child process that can do little besides.

A dump is data of someone else, and the libraries that read it are written in C. The
child may read files, use memory and write what it prints into a pipe: no new
privileges, no network, no files written, no programs or processes started. Its memory
and its time are bounded. The parent reads no part of the dump; it passes on what the
child prints, without control characters.

The list of system calls is enforced by libseccomp. Without its Python binding only the
limits hold, which the parent says.
"""

import codecs
import ctypes
import errno
import fcntl
import io
import os
import re
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import NoReturn, TextIO

from msatools.cli.output import is_terminal, output
from msatools.program import formats
from msatools.program.model import DamagedDumpError
from msatools.render.device import terminal_size

MEMORY_BYTES = 4 << 30
"""Private memory of the child."""

SECONDS = 600
"""Time until the child is killed, both of its CPU and of the clock."""

_POLL_S = 0.2
_CHUNK = 1 << 16
_MOST_KEPT = 1 << 24
"""Characters that are kept for a pager: the child must not fill our memory."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
"""<linux/prctl.h>."""

_READS = (
    *("read", "pread64", "readv", "preadv", "preadv2", "lseek", "close", "fadvise64"),
    *("stat", "fstat", "lstat", "newfstatat", "statx", "statfs", "fstatfs"),
    *("access", "faccessat", "faccessat2", "readlink", "readlinkat", "getcwd"),
    *("getdents64", "dup", "pipe2", "poll", "ppoll", "select", "pselect6"),
    *("epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait"),
)
_MEMORY = ("mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "mincore")
_ITSELF = (
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "setitimer"),
    *("futex", "sched_yield", "sched_getaffinity", "restart_syscall", "rseq"),
    *("getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid"),
    *("clock_gettime", "clock_getres", "gettimeofday", "clock_nanosleep", "nanosleep"),
    *("set_robust_list", "getrandom", "uname", "sysinfo", "times", "getrusage"),
    *("write", "writev", "exit", "exit_group"),
)
"""System calls that are allowed with any arguments."""

_TERMINAL = (0x5401, 0x5413, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONCLEX and FIOCLEX: what ioctl(2) may do."""

_OF_DESCRIPTORS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC),
    *(fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
)
"""What fcntl(2) may do: not choose a process that a pipe sends signals to."""

_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
"""Flags of open(2) that have to be clear; the last one is __O_TMPFILE."""

_CLONE_THREAD = 0x10000
"""<linux/sched.h>."""

_CONTROL = re.compile(
    "\x1b(?!\\[[0-9;]*[mK])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
    "|[\u202a-\u202e\u2066-\u2069]"
)
_PART_OF_A_CODE = re.compile("\x1b[\\[0-9;]{0,16}$")


_locked: list[int] = []
"""PID of this process once it is locked down, which is for good."""


def is_locked_down() -> bool:
    """Return whether this process is in the sandbox already."""
    return os.getpid() in _locked


class _Late(Exception):
    """The child takes too long."""


def binding() -> ModuleType | None:
    """Return libseccomp's Python binding: its own, or the same one by ctypes."""
    for name in ("seccomp", "pyseccomp"):
        # pyseccomp raises RuntimeError if it does not find the library.
        with suppress(ImportError, OSError, RuntimeError):
            return import_module(name)
    return None


def in_sandbox(
    name: str, path: str, work: Callable[[], int], *, is_paged: bool = False
) -> int:
    """
    Do *work* in a sandbox, and return its exit status.

    :param name: The command, for messages.
    :param path: The dump.
    :param work: Prints to the standard streams; returns the exit status.
    :param is_paged: Whether a pager may show what it prints on a terminal.
    :raises DamagedDumpError: if the child crashed, or took too much time or memory
    """
    seccomp = binding()
    if seccomp is None and sys.stderr is not None:
        print(
            f"{name}: --sandbox: seccomp is unavailable: only the limits of memory, "
            "CPU time and written files apply; install python3-seccomp or pyseccomp",
            file=sys.stderr,
        )
    ends = os.pipe(), os.pipe()
    terminals = is_terminal(sys.stdout), is_terminal(sys.stderr)
    pid = os.fork()
    if not pid:
        _child(name, path, ends, terminals, seccomp, work)
    for _, write_end in ends:
        os.close(write_end)
    try:
        end_s = time.monotonic() + SECONDS
        _pass_on(ends[0][0], ends[1][0], end_s, is_paged and _is_pageable(sys.stdout))
        _, status = os.waitpid(pid, 0)
    except _Late:
        _, status = _killed(pid)
    except BaseException:
        _killed(pid)
        raise
    return _result(path, os.waitstatus_to_exitcode(status))


def _killed(pid: int) -> tuple[int, int]:
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)


def _is_pageable(out: TextIO | None) -> bool:
    """Return whether a pager can show what is printed."""
    if out is None or not is_terminal(out):
        return False
    from msatools.cli.screen import is_usable

    return is_usable(out)


def _pass_on(out: int, err: int, end_s: float, is_paged: bool) -> None:
    """Print what the child prints, until it closes its pipes.

    :param is_paged: Whether to keep it until then, and show it by a pager.
    :raises _Late: if the child takes until *end_s* of the monotonic clock
    """
    decoders = {
        number: codecs.getincrementaldecoder("utf-8")("backslashreplace")
        for number in (out, err)
    }
    left = dict.fromkeys(decoders, "")
    with selectors.DefaultSelector() as selector, output() as stdout:
        kept = io.StringIO()
        streams: dict[int, TextIO] = {
            out: kept if is_paged else stdout,
            err: sys.stderr,
        }
        for number in decoders:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_POLL_S):
                data = os.read(key.fd, _CHUNK)
                text = left[key.fd] + decoders[key.fd].decode(data, not data)
                # The end of a code may come with the next bytes.
                cut = _PART_OF_A_CODE.search(text) if data else None
                end = cut.start() if cut else len(text)
                left[key.fd] = text[end:]
                if streams[key.fd] is not None:
                    streams[key.fd].write(_CONTROL.sub(_escaped, text[:end]))
                    streams[key.fd].flush()
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
            if time.monotonic() > end_s:
                raise _Late
            if kept.tell() > _MOST_KEPT:
                # No report is so long: it goes on as it comes.
                stdout.write(kept.getvalue())
                kept, streams[out] = io.StringIO(), stdout
        if kept.tell():
            from msatools.cli.screen import page

            page(kept.getvalue(), stdout)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _result(path: str, status: int) -> int:
    if status >= 0:
        return status
    number = signal.Signals(-status)
    if number in (signal.SIGKILL, signal.SIGXCPU):
        why = f"reading it took over {SECONDS} s, or too much memory"
    else:
        why = f"reading it ended by {number.name}, in the sandbox"
    raise DamagedDumpError(path, why, "the file may be damaged: copy it again")


# --- the child


def _child(
    name: str,
    path: str,
    ends: tuple[tuple[int, int], tuple[int, int]],
    terminals: tuple[bool, bool],
    seccomp: ModuleType | None,
    work: Callable[[], int],
) -> NoReturn:
    status = 1
    try:
        if terminals[0]:
            # The pipe to the parent has no size.
            columns, lines = terminal_size(sys.stdout)
            os.environ.update(COLUMNS=str(columns), LINES=str(lines))
        for number, (read_end, write_end) in enumerate(ends, 1):
            os.close(read_end)
            os.dup2(write_end, number)
            os.close(write_end)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        sys.stdout = _Pipe(1, terminals[0])
        sys.stderr = _Pipe(2, terminals[1])
        _close_files_to_write()
        formats.copy(path)
        try:
            lock_down(seccomp)
        except (OSError, ValueError) as error:
            why = f"--sandbox: it cannot be set up ({error}); leave it out"
            print(f"{name}: {why}", file=sys.stderr)
        else:
            status = work()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _close_files_to_write() -> None:
    """Close what the process that started the command has left open for it."""
    for number in map(int, os.listdir("/proc/self/fd")):
        # The listing itself is closed by now.
        with suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if number > 2 and flags & os.O_ACCMODE != os.O_RDONLY:
                os.close(number)


class _Pipe(io.TextIOWrapper):
    """A pipe that is written to as the parent's stream would be."""

    def __init__(self, number: int, is_terminal: bool) -> None:
        pipe = open(number, "wb", closefd=False)  # noqa: SIM115
        super().__init__(pipe, "utf-8", "backslashreplace")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def lock_down(
    seccomp: ModuleType | None,
    memory_bytes: int | None = None,
    seconds: int | None = None,
) -> None:
    """Drop what reading a dump does not need, for good.

    :param memory_bytes: Private memory of the process, besides what it has already:
        one that is forked from a large one has much. :data:`MEMORY_BYTES` if it is not
        given.
    :param seconds: Its CPU time; :data:`SECONDS` if it is not given.
    """
    limits = {
        resource.RLIMIT_DATA: _data_bytes()
        + (MEMORY_BYTES if memory_bytes is None else memory_bytes),
        resource.RLIMIT_CPU: SECONDS if seconds is None else seconds,
        resource.RLIMIT_CORE: 0,
        # Pipes are no files.
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # At its hard limit of CPU time a process gets SIGKILL, which does not say why.
        is_time = limit == resource.RLIMIT_CPU and most != hard
        resource.setrlimit(limit, (most, most + 1 if is_time else most))
    for option, value in (
        (_PR_SET_PDEATHSIG, signal.SIGKILL),
        (_PR_SET_DUMPABLE, 0),
        (_PR_SET_NO_NEW_PRIVS, 1),
    ):
        _prctl(option, value)
    if seccomp is not None:
        _filter(seccomp)
    _locked.append(os.getpid())


def _data_bytes() -> int:
    """Return the private memory of this process as RLIMIT_DATA counts it, or more."""
    with open("/proc/self/statm", "rb") as file:
        data_pages = int(file.read().split()[5])
    return data_pages * resource.getpagesize()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def _filter(seccomp: ModuleType) -> None:
    """Have all system calls fail but those that are listed."""
    allowed = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))

    def allow(name: str, *arguments: object) -> None:
        # Not every architecture has each call.
        with suppress(OSError, RuntimeError, ValueError):
            allowed.add_rule(seccomp.ALLOW, name, *arguments)

    for name in (*_READS, *_MEMORY, *_ITSELF):
        allow(name)
    for name, flags in (("open", 1), ("openat", 2)):
        allow(name, seccomp.Arg(flags, seccomp.MASKED_EQ, _WRITES, 0))
    for name, requests in (("ioctl", _TERMINAL), ("fcntl", _OF_DESCRIPTORS)):
        for request in requests:
            allow(name, seccomp.Arg(1, seccomp.EQ, request))
    # Limits can be read.
    allow("prlimit64", seccomp.Arg(2, seccomp.EQ, 0))
    thread = (_CLONE_THREAD, _CLONE_THREAD)
    allow("clone", seccomp.Arg(0, seccomp.MASKED_EQ, *thread))
    # The flags of the newer call are behind a pointer; libraries know both.
    allowed.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    allowed.load()
