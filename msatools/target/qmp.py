# SPDX-License-Identifier: LGPL-2.1-or-later

"""QEMU guests: connect to a QMP socket, and check that the guest stays the same.

drgn asks QEMU only for the addresses of the guest's memory within QEMU's own, and for
the VMCOREINFO note, by a dump of one byte (QEMU stops the guest for that, less than a
millisecond if no disk is slow to flush). It reads memory with process_vm_readv(), which
neither QEMU nor the guest notices; if that is not permitted or not possible, it has
QEMU's monitor print memory, 1 KiB at a time.
"""

import errno
import json
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import drgn
from drgn import Program

from msatools.errors import LOST, UNREADABLE, MissingMemberError
from msatools.selfdesc.find import drgn_lookups, find_symbol, find_variable, object_at
from msatools.target.errors import NotPermittedError, TargetError

_TIMEOUT_S = 5.0
"""Maximum time for any answer of QEMU."""

_NAME = "msatools.qmp"
"""Key of a program's :class:`_Guest` in its cache."""

_MAX_EVENTS_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""

Identity = tuple[int, ...]
"""Identifies one boot of a guest's kernel."""


def open_guest(address: str) -> Program:
    """Open a guest with drgn.

    :param address: Path of a Unix socket, or ``host:port``.
    :raises NotPermittedError: if this user may not connect
    :raises TargetError: if nothing listens there, if it is not a free QMP socket, if
        QEMU does not answer, or if the guest provides no VMCOREINFO
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
    prog.cache[_NAME] = _Guest(address, descriptor)
    return prog


def connect(address: str) -> socket.socket:
    """Connect, and wait for QMP's greeting.

    drgn would wait forever on a socket that another client uses: so wait for the
    greeting here, and leave it in the socket for drgn. drgn would also wait forever for
    answers of a QEMU that hangs after the greeting: so limit the time to send and
    receive.

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
        """Identify the kernel, unless that is done, or too early in its boot."""
        if self._identity is None:
            try:
                self._identity = _identify(prog)
            except LOST:
                self._identity = None
            except OSError as error:
                raise self.explain(error) from error

    def check(self, prog: Program) -> None:
        """Check that QEMU still answers and runs the same kernel.

        :raises TargetError: if not
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
        """End the connection: a late answer would be taken as that of a later read."""
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

    It consists of the address of the task kthreadd, which never ends, its start time in
    ns, and the random stack canary of the boot. It changes with a reset, kexec or
    another kernel alike.

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
def steady(prog: Program) -> Iterator[None]:
    """Run a report on a guest, and check that its kernel is the one that was opened.

    It costs one check of the socket and three reads of memory.

    :raises TargetError: if QEMU ended or does not answer, or if the guest has been
        restarted, even if the report failed otherwise
    """
    guest: _Guest | None = prog.cache.get(_NAME)
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
