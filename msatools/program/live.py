# SPDX-License-Identifier: LGPL-2.1-or-later

"""Running kernels: /proc/kcore of this machine, and QEMU guests by a QMP socket.

Both are checked to stay the same target while they are read.
"""

import errno
import json
import os
import select
import socket
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import drgn
from drgn import FaultError, Program, ProgramFlags

from msatools.errors import LOST, UNREADABLE, MissingMemberError
from msatools.program.model import KCORE, MovedError, NotPermittedError, TargetError
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_symbol,
    find_variable,
    object_at,
)

# --- The running kernel's /proc/kcore, whose table of segments may change while open.
#
# drgn reads the table (ELF program headers) once, when it opens the file. The kernel
# rebuilds it at the first open() after memory was added or removed (fs/proc/kcore.c).
# drgn then lacks the segments of added memory. And if the headers need more or fewer
# pages than before, the file offsets of all segments change, for every open file and
# without any error.


_OPEN_FILES = "/proc/self/fd"

_KCORE_NAME = "msatools.kcore"
"""Key in ``prog.cache`` of the program's :class:`Segments`."""

_IDENT = b"\x7fELF\2"
_HEADER_BYTES = 64
_COUNT_OFFSET = 56
_ENTRY_BYTES = 56
_PT_LOAD = 1
_NOWHERE = (1 << 64) - 1
"""``p_paddr`` of a segment that is not contiguous in physical memory."""

_ATTEMPTS = 8


class Segment(NamedTuple):
    """A range of memory in /proc/kcore."""

    address: int
    """Virtual address of its first byte."""

    size: int
    physical: int
    """Physical address of its first byte, or ``_NOWHERE``."""

    offset: int
    """Offset of its first byte in the file."""

    def contains(self, address: int, physical: bool) -> bool:
        """Return whether the segment contains an address."""
        start = self.physical if physical else self.address
        return start != _NOWHERE and start <= address < start + self.size


Table = tuple[Segment, ...]


class Segments:
    """The current segments of a /proc/kcore that drgn has open.

    drgn itself reads segments that are unchanged since it opened the file. This class
    reads segments that changed, also with one pread() per read.
    """

    def __init__(self, path: str = KCORE) -> None:
        """
        :raises OSError: if the file cannot be opened or read
        """
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._known: Table = ()
        """The table that drgn and this object use."""

        self._headers = b""
        """The ELF headers with that table; empty if not read yet."""

        self._ascending: list[Segment] = []
        self._starts: list[int] = []

    def look(self) -> Table:
        """Read the current table; open() makes the kernel rebuild it if needed."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # The kernel may have been locked down; open files can still be read.
            return _read_table(self._fd, len(self._known))
        try:
            return _read_table(fd, len(self._known))
        finally:
            os.close(fd)

    def know(self, table: Table) -> None:
        """Use *table* for reads from now on."""
        self._known = table
        self._headers = b""
        self._ascending = sorted(table)
        self._starts = [segment.address for segment in self._ascending]

    def refresh(self, prog: Program) -> bool:
        """Let drgn use the current table; return whether the table had changed."""
        known, current = self._known, self.look()
        if current == known:
            return False
        self.know(current)
        for segment in {*known} ^ {*current}:
            prog.add_memory_segment(segment.address, segment.size, self._read)
            if segment.physical != _NOWHERE:
                prog.add_memory_segment(
                    segment.physical, segment.size, self._read, True
                )
        return True

    def is_unchanged(self) -> bool:
        """Return, with one read, whether the table is still the one in use."""
        if self._headers:
            # The usual case without parsing: the headers are the same to the byte.
            headers = os.pread(self._fd, len(self._headers), 0)
            if headers == self._headers:
                return True
        table = _read_table(self._fd, len(self._known))
        if table != self._known:
            return False
        size = _HEADER_BYTES + (len(table) + 1) * _ENTRY_BYTES
        self._headers = os.pread(self._fd, size, 0)
        return True

    def is_moved(self) -> bool:
        """Return whether a segment of the table in use has another file offset now."""
        current = _read_table(self._fd, len(self._known))
        offsets = {segment.address: segment.offset for segment in current}
        return any(
            offsets.get(segment.address, segment.offset) != segment.offset
            for segment in self._known
        )

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        parts = []
        while count:
            segment = self._find(address, physical)
            start = segment.physical if physical else segment.address
            size = min(count, start + segment.size - address)
            try:
                data = os.pread(self._fd, size, segment.offset + address - start)
            except OSError as error:
                why = f"could not be read: {error.strerror}"
                raise FaultError(why, address) from error
            if not data:
                raise FaultError("could not be read", address)
            parts.append(data)
            address += len(data)
            count -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find(self, address: int, physical: bool) -> Segment:
        """Find the segment that contains an address; of several, the last in the table.

        Two segments contain the kernel's text by physical address, as it is in RAM.
        """
        if physical:
            for segment in reversed(self._known):
                if segment.contains(address, physical):
                    return segment
        elif index := bisect_right(self._starts, address):
            segment = self._ascending[index - 1]
            if segment.contains(address, physical):
                return segment
        raise FaultError("could not find memory: it is gone", address)


def open_kcore() -> Program:
    """Open the running kernel with drgn.

    :raises OSError: as drgn does, if it cannot be opened
    """
    segments = Segments()
    before = segments.look()
    prog = Program()
    ask(prog.set_kernel)
    if segments.look() == before:
        segments.know(before)
    # Else drgn may have read either table: then refresh() replaces all segments.
    prog.cache[_KCORE_NAME] = segments
    return prog


@contextmanager
def steady(prog: Program) -> Iterator[None]:
    """Run a report on a running kernel, and check that it stayed the same target.

    :raises MovedError: as :func:`kcore_steady`
    :raises TargetError: as :func:`qmp_steady`
    """
    with kcore_steady(prog), qmp_steady(prog):
        yield


@contextmanager
def kcore_steady(prog: Program) -> Iterator[None]:
    """Run a report on the current /proc/kcore, and check afterwards that it is valid.

    The report lacks memory that is added during it. Memory that is removed during it
    reads as zeros (fs/proc/kcore.c). Programs that do not read /proc/kcore need no
    check, and get none.

    :raises MovedError: if the data that were read may be wrong, even if the report
        failed otherwise
    """
    segments = _segments_of(prog)
    if segments is None:
        yield
        return
    segments.refresh(prog)
    try:
        yield
    except Exception as error:
        if segments.is_moved():
            raise MovedError from error
        raise
    if segments.is_moved():
        raise MovedError


def is_unchanged(prog: Program) -> bool:
    """
    Return whether all reads from /proc/kcore so far used the right offsets.

    This check costs less than :func:`kcore_steady`, for callers that read little and
    often. Once memory was added or removed, the result is False until
    :func:`kcore_steady` is called.
    """
    segments = _segments_of(prog)
    return segments is None or segments.is_unchanged()


def open_again(prog: Program) -> None:
    """
    Reopen /proc/kcore in a forked process, if that is what the program reads.

    It must be called before the process reads. The kernel copies data by way of a page
    of the open file (``private_data`` in fs/proc/kcore.c) without a lock: of two
    processes that read the same open file at the same time, one may get the data for
    the other.

    Like any open(), this may make the kernel rebuild the table of segments:
    :func:`kcore_steady` detects that.

    :raises OSError: if it cannot be opened again; then the process must not read
    """
    if not _is_kcore(prog):
        return
    fds = [int(name) for name in os.listdir(_OPEN_FILES)]
    shared = [fd for fd in fds if _is_named_kcore(fd)]
    if not shared:
        raise FileNotFoundError(errno.ENOENT, "no open file is of", KCORE)
    for fd in shared:
        own = os.open(f"{_OPEN_FILES}/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(own, fd, inheritable=False)
        os.close(own)


def _is_named_kcore(fd: int) -> bool:
    try:
        path = os.readlink(f"{_OPEN_FILES}/{fd}")
    except FileNotFoundError:
        # The descriptor that os.listdir() used is closed by now.
        return False
    # proc may be mounted elsewhere; reopening another file of that name is harmless.
    return os.path.basename(path) == os.path.basename(KCORE)


def _segments_of(prog: Program) -> Segments | None:
    """Return the segments of a program; ``None`` if it does not read /proc/kcore."""
    found: Segments | None = prog.cache.get(_KCORE_NAME)
    if found is None and _is_kcore(prog):
        try:
            found = Segments()
        except OSError:
            # The program was opened with other privileges.
            return None
        prog.cache[_KCORE_NAME] = found
    return found


# Computed once, so that queries are fast.
_RUNNING = ProgramFlags.IS_LIVE | ProgramFlags.IS_LOCAL | ProgramFlags.IS_LINUX_KERNEL


def _is_kcore(prog: Program) -> bool:
    return bool(prog.flags & _RUNNING == _RUNNING)


def _read_table(fd: int, count: int) -> Table:
    """Read the table of segments with one read, so that it is consistent.

    :param count: Expected number of segments; if it is wrong, the read is repeated.
    """
    entries = count + 1  # PT_NOTE
    for _ in range(_ATTEMPTS):
        data = os.pread(fd, _HEADER_BYTES + entries * _ENTRY_BYTES, 0)
        if not data.startswith(_IDENT) or len(data) < _HEADER_BYTES:
            # A 32-bit kernel: it has no memory hotplug.
            return ()
        order = "<" if data[len(_IDENT)] == 1 else ">"
        (actual,) = struct.unpack_from(f"{order}H", data, _COUNT_OFFSET)
        if actual == entries:
            return tuple(_segments(data, order))
        entries = actual
    raise OSError(errno.EAGAIN, "its table changes again and again")


def _segments(data: bytes, order: str) -> Iterator[Segment]:
    layout = struct.Struct(f"{order}IIQQQQQQ")
    end = len(data) - len(data[_HEADER_BYTES:]) % layout.size
    for fields in layout.iter_unpack(data[_HEADER_BYTES:end]):
        kind, _, offset, address, physical, _, size, _ = fields
        if kind == _PT_LOAD and size:
            yield Segment(address, size, physical, offset)


# --- QEMU guests: connect to a QMP socket, and check that the guest stays the same.
#
# drgn asks QEMU only for the addresses of the guest's memory within QEMU's own, and for
# the VMCOREINFO note, by a dump of one byte (QEMU stops the guest for that, less than a
# millisecond if no disk is slow to flush). drgn reads memory with process_vm_readv(),
# which affects neither QEMU nor the guest; if that is not permitted or not possible,
# QEMU's monitor prints memory for drgn, 1 KiB at a time.


_TIMEOUT_S = 5.0
"""Maximum time for any answer of QEMU."""

_QMP_NAME = "msatools.qmp"
"""Key in ``prog.cache`` of the program's :class:`_Guest`."""

_MAX_EVENTS_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""

Identity = tuple[int, ...]
"""Identifies one boot of a guest's kernel."""


def open_guest(address: str) -> Program:
    """Open a guest with drgn.

    :param address: Path of a Unix socket, or ``host:port``.
    :raises NotPermittedError: if this user may not connect
    :raises TargetError: if nothing listens there, if the socket is not QMP's or not
        free, if QEMU does not answer, or if the guest provides no VMCOREINFO
    """
    prog = Program()
    connection = connect(address)
    over_network = connection.family != socket.AF_UNIX
    # drgn owns the descriptor from here on, even if it fails.
    descriptor = connection.detach()
    try:
        prog.set_qemu_qmp(descriptor)
    except Exception as error:
        raise _refusal(address, error) from error
    if not prog.flags & drgn.ProgramFlags.IS_LINUX_KERNEL:
        if over_network:
            raise TargetError(
                address,
                "QEMU does not say over a network where the kernel is",
                "run this on the guest's host, and name a Unix socket of -qmp",
            )
        raise TargetError(
            address,
            "the guest does not say where its kernel is",
            "wait until it has booted; or run QEMU with -device vmcoreinfo and load "
            "qemu_fw_cfg in the guest",
        )
    prog.cache[_QMP_NAME] = _Guest(address, descriptor)
    return prog


def connect(address: str) -> socket.socket:
    """Connect, and wait for QMP's greeting, which is left in the socket for drgn.

    drgn would wait forever for the greeting if another client uses the socket, and for
    answers of a QEMU that hangs later: so the time to send and receive is limited, too.

    :param address: Path of a Unix socket, or ``host:port``.
    :raises NotPermittedError: if this user may not connect
    :raises TargetError: if nothing listens there, or QEMU does not answer
    """
    try:
        connection = _connect(address)
    except PermissionError as error:
        raise NotPermittedError(
            address, "permission denied", "run as the user who runs the guest, or root"
        ) from error
    except (BlockingIOError, TimeoutError) as error:
        # The backlog of the listening socket is full.
        raise _silent(address) from error
    except OSError as error:
        raise TargetError(
            address,
            error.strerror or str(error),
            "name the socket of a running QEMU's -qmp option",
        ) from error

    stopped = _stopped_peer(connection)
    if stopped is None and select.select([connection], [], [], _TIMEOUT_S)[0]:
        return connection
    connection.close()
    raise _silent(address, stopped)


def _connect(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and not host.startswith(("/", ".")):
        whom = (host or "localhost", int(port))
        connection = socket.create_connection(whom, _TIMEOUT_S)
        # drgn needs a blocking socket.
        connection.settimeout(None)
        _limit(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        _limit(connection)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: socket.socket) -> None:
    """Set the time limit of every read and write, drgn's too."""
    seconds = int(_TIMEOUT_S)
    limit = struct.pack("@ll", seconds, int((_TIMEOUT_S - seconds) * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _stopped_peer(connection: socket.socket) -> int | None:
    """Return the PID of the listener if a signal has stopped it, else ``None``."""
    if connection.family != socket.AF_UNIX:
        return None
    option = socket.SO_PEERCRED
    data = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The state follows the name, which may contain any characters.
            state = file.read().rpartition(") ")[2][:1]
    except OSError:
        return None
    return pid if state in ("T", "t") else None


def _silent(address: str, stopped: int | None = None) -> TargetError:
    if stopped is not None:
        return TargetError(
            address, f"process {stopped} is stopped", f"kill -CONT {stopped}"
        )
    return TargetError(
        address,
        f"no answer in {_TIMEOUT_S:g} s",
        "give QEMU a second -qmp socket if another program holds this one; "
        "else see what keeps QEMU",
    )


def _refusal(address: str, error: Exception) -> TargetError:
    """Return the error for a request of drgn that failed."""
    if isinstance(error, BlockingIOError):
        # SO_RCVTIMEO and SO_SNDTIMEO: EAGAIN.
        return _stuck(address)
    if isinstance(error, OSError):
        return _gone(address)
    text = str(error)
    if text.startswith("QMP error: "):
        return TargetError(
            address,
            f"QEMU refuses: {text.removeprefix('QMP error: ')}",
            "try again once the guest runs and no dump or migration is under way",
        )
    if "closed unexpectedly" in text:
        return _gone(address)
    return TargetError(
        address, f"not a QMP socket: {text}", "name the socket of QEMU's -qmp"
    )


def _stuck(address: str) -> TargetError:
    return TargetError(
        address,
        f"QEMU has not answered for {_TIMEOUT_S:g} s",
        "see what keeps it, such as a slow disk or a dump, and try again",
    )


def _gone(address: str) -> TargetError:
    return TargetError(
        address, "QEMU has ended or closed the connection", "start it again"
    )


class _Guest:
    """A guest that drgn has open, and the identity of its kernel."""

    def __init__(self, address: str, descriptor: int) -> None:
        """
        :param descriptor: The connection, which drgn owns.
        """
        self.address = address
        self._descriptor = descriptor
        self._identity: Identity | None = None

    def learn(self, prog: Program) -> None:
        """Identify the kernel, unless that was done, or its boot is too early."""
        if self._identity is None:
            try:
                self._identity = _identify(prog)
            except LOST:
                self._identity = None
            except OSError as error:
                raise self.explain(error) from error

    def check(self, prog: Program) -> None:
        """Check that QEMU still answers and that its guest runs the same kernel.

        :raises TargetError: if it does not
        """
        if "RESET" in self._events():
            raise self._restarted()
        if self._identity is None:
            return
        try:
            identity = _identify(prog)
        except UNREADABLE:
            identity = None
        except OSError as error:
            raise self.explain(error) from error
        if identity != self._identity:
            raise self._restarted()

    def explain(self, error: OSError) -> TargetError:
        """Return the error for memory that could not be read."""
        if isinstance(error, BlockingIOError):
            self._abandon()
            return _stuck(self.address)
        if error.errno == errno.EFAULT:
            # The address from gpa2hva is no longer valid.
            return TargetError(
                self.address, "QEMU took memory from the guest", "run it again"
            )
        if isinstance(error, PermissionError):
            return NotPermittedError(
                self.address,
                "QEMU's memory may not be read any more",
                "run as the user who runs the guest, or root",
            )
        return _gone(self.address)

    def _abandon(self) -> None:
        """End the connection, so that no late answer is taken for a later one."""
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(self._descriptor)) as connection,
        ):
            connection.shutdown(socket.SHUT_RDWR)

    def _restarted(self) -> TargetError:
        return TargetError(
            self.address, "the guest has been reset or started anew", "run it again"
        )

    def _events(self) -> set[str]:
        """Receive the events that QEMU has sent, and return their names.

        drgn ignores events, and reads the connection only for answers. Nothing else
        receives them, and QEMU has to queue them until then.

        :raises TargetError: if the connection has ended
        """
        names: set[str] = set()
        # Closing a duplicate does not close the connection.
        with socket.socket(fileno=os.dup(self._descriptor)) as connection:
            while True:
                try:
                    data = connection.recv(
                        _MAX_EVENTS_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT
                    )
                except BlockingIOError:
                    return names
                except OSError as error:
                    raise _gone(self.address) from error
                if not data:
                    raise _gone(self.address)
                size = data.rfind(b"\n") + 1
                events = [_event(line) for line in data[:size].splitlines()]
                names.update(name for name in events if name is not None)
                if not size or events[0] is None:
                    # Not a whole line yet; or drgn has received the beginning of it,
                    # and needs the rest.
                    return names
                connection.recv(size, socket.MSG_DONTWAIT)


def _event(line: bytes) -> str | None:
    """Return the name of an event; ``None`` if the line is not an event."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    name = message.get("event") if isinstance(message, dict) else None
    return name if isinstance(name, str) else None


def _identify(prog: Program) -> Identity | None:
    """Return the identity of this boot of the kernel.

    This is the address of the task kthreadd, which never exits, its start time in ns,
    and the random stack canary of the boot. A reset, kexec or another kernel changes
    it.

    :return: ``None`` before kthreadd exists.
    """
    pointer = find_symbol(prog, "kthreadd_task").address
    address = prog.read_u64(pointer)
    if not address:
        return None
    task = object_at(prog, "struct task_struct", address)
    try:
        with drgn_lookups:
            started = task.start_boottime
    except MissingMemberError:
        # Before Linux kernel commit cf25e24db61c ("time: Rename tsk->real_start_time
        # to ->start_boottime") (in v5.5).
        started = task.real_start_time
    identity = (pointer, address, started.value_())
    try:
        with drgn_lookups:
            return (*identity, find_variable(prog, "init_task").stack_canary.value_())
    except MissingMemberError:
        # CONFIG_STACKPROTECTOR=n
        return identity


@contextmanager
def qmp_steady(prog: Program) -> Iterator[None]:
    """Run a report on a guest, and check that its kernel is the one that was opened.

    The check costs one look at the socket's events and three reads of memory.

    :raises TargetError: if QEMU ended or does not answer, or if the guest has been
        restarted, even if the report failed otherwise
    """
    guest: _Guest | None = prog.cache.get(_QMP_NAME)
    if guest is None:
        yield
        return
    guest.learn(prog)
    try:
        yield
    except TargetError:
        raise
    except BlockingIOError as error:
        raise guest.explain(error) from error
    except OSError as error:
        guest.check(prog)
        raise guest.explain(error) from error
    except Exception:
        guest.check(prog)
        raise
    guest.check(prog)
