# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors of QMP sockets, and of guests that end or are reset during a report."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from drgn import FaultError, Program

from msatools.program import TargetError, TargetSpec, live, open_target


def test_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "qmp"
    with pytest.raises(TargetError, match="No such file"):
        open_target(TargetSpec(qemu=str(path)))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(TargetError, match="refused"):
        open_target(TargetSpec(qemu=str(path)))


GREETING = '{"QMP": {}}'
NEGOTIATED = '{"return": {}}'


REFUSAL = '{"error": {"class": "GenericError", "desc": "there is a dump"}}'


@pytest.mark.parametrize(
    ("answer", "ends", "why"),
    [
        # QEMU's QMP thread runs, but its main thread hangs.
        ((), False, r"has not answered for 0\.2 s; see what"),
        ((NEGOTIATED,), False, r"has not answered for 0\.2 s; see what"),
        ((NEGOTIATED,), True, "QEMU has ended"),
        ((REFUSAL,), False, "refuses: GenericError: there is a dump; try"),
    ],
)
def test_qemu_that_does_not_answer(
    answer: tuple[str, ...], ends: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends the greeting and some answers, then nothing more, or ends."""
    ours, theirs = socket.socketpair()

    def connected(_: str) -> socket.socket:
        live._limit(ours)
        return ours

    monkeypatch.setattr(live, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(live, "_connect", connected)
    with theirs:
        # All its messages are in the socket before anything is requested.
        theirs.sendall("".join(f"{line}\r\n" for line in (GREETING, *answer)).encode())
        if ends:
            theirs.close()
        with pytest.raises(TargetError, match=why):
            open_target(TargetSpec(qemu="guest"))


def test_socket_with_a_full_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_TIMEOUT_S", 0.2)
    path = str(tmp_path / "qmp")
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as others:
        server.bind(path)
        server.listen(0)
        others.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        with pytest.raises(TargetError, match=r"no answer in 0\.2 s"):
            open_target(TargetSpec(qemu=path))


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_another_protocol(tmp_path: Path, where: str) -> None:
    if where == "unix":
        server = socket.socket(socket.AF_UNIX)
        address = str(tmp_path / "qmp")
        server.bind(address)
    else:
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with server:
        server.listen()

        def greet() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"220 mail ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(TargetError, match="not a QMP socket"):
            open_target(TargetSpec(qemu=address))
        thread.join()


# --- changes of the guest during a report


class Watched(NamedTuple):
    prog: Program
    qemu: socket.socket
    """QEMU's end of the connection."""

    ours: socket.socket


@pytest.fixture
def watched() -> Iterator[Watched]:
    """A program of a guest with only a connection to QEMU."""
    prog = Program()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        prog.cache[live._QMP_NAME] = live._Guest("guest", ours.fileno())
        yield Watched(prog, theirs, ours)


def test_events_are_read(watched: Watched) -> None:
    watched.qemu.sendall(b'{"event": "STOP"}\r\n{"event": "RESUME"}\r\n{"ev')
    for _ in range(2):
        with live.qmp_steady(watched.prog):
            pass
    # The incomplete line stays in the socket.
    assert watched.ours.recv(100, socket.MSG_DONTWAIT) == b'{"ev'


def report(prog: Program, error: Exception | None) -> None:
    """Make a report, which can raise an error."""
    with live.qmp_steady(prog):
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, FaultError("?", 0), LookupError()])
def test_reset(watched: Watched, error: Exception | None) -> None:
    """A reset is reported whether or not the report failed."""
    watched.qemu.sendall(b'{"event": "RESET", "data": {"guest": true}}\r\n')
    with pytest.raises(TargetError, match="guest: the guest has been reset"):
        report(watched.prog, error)


@pytest.mark.parametrize("error", [None, ProcessLookupError(), Exception("closed")])
def test_end(watched: Watched, error: Exception | None) -> None:
    watched.qemu.close()
    with pytest.raises(TargetError, match="guest: QEMU has ended"):
        report(watched.prog, error)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EFAULT, "QEMU took memory from the guest"),
        (errno.EPERM, "QEMU's memory may not be read any more"),
        (errno.EIO, "QEMU has ended"),
        (errno.EAGAIN, "QEMU has not answered"),
    ],
)
def test_memory_that_cannot_be_read(watched: Watched, number: int, why: str) -> None:
    with pytest.raises(TargetError, match=f"^guest: {why}"):
        report(watched.prog, OSError(number, "?"))
    if number == errno.EAGAIN:
        # The connection is shut down: a late answer must not be taken for the next one.
        assert watched.ours.recv(1) == b""


def test_error_of_the_report_itself(watched: Watched) -> None:
    with pytest.raises(FaultError, match="mine"):
        report(watched.prog, FaultError("mine", 0))
