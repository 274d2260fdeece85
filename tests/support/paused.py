# SPDX-License-Identifier: LGPL-2.1-or-later

"""A paused guest: a QMP server that answers as QEMU would, from a dump's memory.

Code paths for running kernels can be tested on it, and must give the dump's results.
"""

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.elf import PT_LOAD, PT_NOTE, segments
from tests.support.forked import forked

GREETING = {"QMP": {"version": {}, "capabilities": []}}
START_SECONDS = 60.0
_HEADERS_BYTES = 64 + 56


@contextmanager
def paused(dump: Path, directory: Path) -> Iterator[str]:
    """Serve an x86-64 ELF dump as a guest; yield the address for ``--qemu``.

    :param directory: Directory for the socket.
    """
    socket_path = directory / "qmp"
    process = forked(lambda: _listen(dump, socket_path))
    try:
        deadline = time.monotonic() + START_SECONDS
        while not socket_path.exists():
            assert process.poll() is None, "nobody listens"
            assert time.monotonic() < deadline, "nobody listens yet"
            time.sleep(0.01)
        yield str(socket_path)
    finally:
        process.kill()
        process.wait()


def _listen(dump: Path, path: Path) -> int:
    guest = _Guest(dump)
    early = path.with_suffix(".early")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(early))
        # The socket gets its name when it listens: drgn reads this process's memory.
        listener.listen()
        early.rename(path)
        while True:
            with listener.accept()[0] as connection:
                guest.serve(connection)


class _Guest:
    """Answers the QMP commands that drgn sends (libdrgn/qemu_machine_protocol.c)."""

    def __init__(self, dump: Path) -> None:
        with dump.open("rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = np.frombuffer(self._file, np.uint8).ctypes.data
        self._memory = segments(dump, PT_LOAD)
        ((_, size, offset),) = segments(dump, PT_NOTE)
        self._notes = self._file[offset : offset + size]
        self._descriptors: list[int] = []

    def serve(self, connection: socket.socket) -> None:
        """Answer until the client disconnects."""
        self._send(connection, GREETING)
        while True:
            line, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            if not line:
                return
            self._descriptors += descriptors
            request = json.loads(line)
            answer = self._answer(request["execute"], request.get("arguments", {}))
            self._send(connection, {"return": answer})

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\r\n")

    def _answer(self, command: str, arguments: dict[str, Any]) -> object:
        if command == "query-target":
            return {"arch": "x86_64"}
        if command == "dump-guest-memory":
            self._dump_notes(self._descriptors.pop())
        if command == "human-monitor-command":
            return self._monitor(arguments["command-line"])
        return {}

    def _monitor(self, words: str) -> str:
        if words.startswith("info mtree"):
            ranges = [
                f"  {start:016x}-{start + size - 1:016x} (prio 0, ram): ram"
                for start, size, _ in self._memory
            ]
            head = ["FlatView #0", ' AS "memory", root: system', " Root memory region:"]
            return "\n".join([*head, *ranges, ""])
        if match := re.fullmatch("gpa2hva 0x([0-9a-f]+)", words):
            address = self._host_address(int(match[1], 16))
            return f"Host virtual address for {match[1]} (ram) is {address:#x}\n"
        return f"{words.split()[-1]}: Cannot access memory\n"

    def _host_address(self, physical: int) -> int:
        ((start, offset),) = (
            (start, offset)
            for start, size, offset in self._memory
            if start <= physical < start + size
        )
        return self._start + offset + physical - start

    def _dump_notes(self, descriptor: int) -> None:
        """Write a core with notes only."""
        header = bytearray(self._file[:_HEADERS_BYTES])
        # One program header, for the notes, after the ELF header.
        header[32:40] = (64).to_bytes(8, "little")
        header[56:58] = (1).to_bytes(2, "little")
        sizes = len(self._notes).to_bytes(8, "little")
        header[64:] = (
            *PT_NOTE.to_bytes(4, "little"),
            *bytes(4),
            *_HEADERS_BYTES.to_bytes(8, "little"),
            *bytes(16),
            *sizes,
            *sizes,
            *bytes(8),
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(header + self._notes)
