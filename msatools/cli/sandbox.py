# SPDX-License-Identifier: LGPL-2.1-or-later

"""
``--sandbox``: a dump is read in a child process with few permissions.

A dump may be hostile data, and the libraries that read it are written in C. The child
may read files, use memory and write its output into a pipe: no new privileges, no
network, no files written, no programs or processes started. Its memory and its time are
bounded. The parent reads no part of the dump; it passes on the child's output, with
control characters escaped.

libseccomp enforces the list of system calls. Without its Python binding only the
resource limits hold, and the parent prints a warning.
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
"""Maximum private memory of the child."""

SECONDS = 600
"""Maximum CPU time, and maximum wall-clock time, of the child."""

_POLL_S = 0.2
_CHUNK = 1 << 16
_MOST_KEPT = 1 << 24
"""Maximum characters to keep for a pager: the child must not fill our memory."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
"""Options of prctl(2), from <linux/prctl.h>."""

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
"""System calls of the three lists are allowed with any arguments."""

_TERMINAL = (0x5401, 0x5413, 0x5450, 0x5451)
"""Allowed requests of ioctl(2): TCGETS, TIOCGWINSZ, FIONCLEX and FIOCLEX."""

_OF_DESCRIPTORS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC),
    *(fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
)
"""Allowed commands of fcntl(2): not F_SETOWN, by which a pipe sends signals."""

_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
"""Flags of open(2) that must be clear; the last one is __O_TMPFILE."""

_CLONE_THREAD = 0x10000
"""Flag of clone(2), from <linux/sched.h>."""

_CONTROL = re.compile(
    "\x1b(?!\\[[0-9;]*[mK])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
    "|[\u202a-\u202e\u2066-\u2069]"
)
_PART_OF_A_CODE = re.compile("\x1b[\\[0-9;]{0,16}$")


_locked: list[int] = []
"""PIDs of processes that were locked down, which cannot be undone."""


def is_locked_down() -> bool:
    """Return whether this process has been locked down."""
    return os.getpid() in _locked


class _Late(Exception):
    """The child takes too long."""


def binding() -> ModuleType | None:
    """Return a Python binding of libseccomp: its own, or pyseccomp; or ``None``."""
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

    :param name: Name of the command, for messages.
    :param path: Path of the dump.
    :param work: Prints to the standard streams; returns the exit status.
    :param is_paged: Whether a pager may show the output on a terminal.
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
    """Return whether a pager can show output on a stream."""
    if out is None or not is_terminal(out):
        return False
    from msatools.cli.screen import is_usable

    return is_usable(out)


def _pass_on(out: int, err: int, end_s: float, is_paged: bool) -> None:
    """Print what the child prints, until it closes its pipes.

    :param is_paged: Whether to keep the output until then, and show it by a pager.
    :raises _Late: if the child is not done at *end_s* of the monotonic clock
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
                # The end of an escape code may come with the next bytes.
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
                # No report is so long: print the rest as it comes, without a pager.
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


# --- The child process: it reads the dump with few system calls allowed.


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
    """Close inherited descriptors that can be written to, other than 0 to 2."""
    for number in map(int, os.listdir("/proc/self/fd")):
        # The listing itself is closed by now.
        with suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if number > 2 and flags & os.O_ACCMODE != os.O_RDONLY:
                os.close(number)


class _Pipe(io.TextIOWrapper):
    """A text stream on a pipe, whose isatty() is that of the parent's stream."""

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
    """Drop permissions that reading a dump does not need; this cannot be undone.

    :param memory_bytes: Maximum private memory in addition to the present amount, which
        is large after a fork of a large process; default :data:`MEMORY_BYTES`.
    :param seconds: Maximum CPU time of the process; default :data:`SECONDS`.
    """
    limits = {
        resource.RLIMIT_DATA: _data_bytes()
        + (MEMORY_BYTES if memory_bytes is None else memory_bytes),
        resource.RLIMIT_CPU: SECONDS if seconds is None else seconds,
        resource.RLIMIT_CORE: 0,
        # Pipes, where the output goes, are not subject to this limit.
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # At the soft limit of CPU time a process gets SIGXCPU, at the hard one SIGKILL,
        # which does not show the reason.
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
    """Make all system calls but the listed ones fail with EPERM."""
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
    # Limits can be read, but not set: the third argument, new_limit, is NULL.
    allow("prlimit64", seccomp.Arg(2, seccomp.EQ, 0))
    thread = (_CLONE_THREAD, _CLONE_THREAD)
    allow("clone", seccomp.Arg(0, seccomp.MASKED_EQ, *thread))
    # A filter cannot see clone3's flags, behind a pointer; glibc falls back to clone.
    allowed.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    allowed.load()
