# SPDX-License-Identifier: LGPL-2.1-or-later

"""Guests that hang, or panic and halt: made so from outside, where they stand."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fixtures import lab

PATIENCE_SECONDS = 60.0
_HALT = bytes.fromhex("fa f4 eb fd")
"""x86: cli; hlt; jmp to the hlt."""


def control(guest: lab.Live, command: str, **arguments: object) -> Any:
    """Ask QEMU something on the lab's own socket."""
    return guest.guest._control.execute(command, **arguments)


def monitor(guest: lab.Live, line: str) -> str:
    """What QEMU's monitor prints."""
    said = control(guest, "human-monitor-command", command_line=line)
    assert isinstance(said, str)
    return said


@contextmanager
def memory(guest: lab.Live) -> Iterator["Memory"]:
    """QEMU's server for debuggers, which writes anywhere; the guest stands still."""
    path = guest.directory / "gdb"
    said = monitor(guest, f"gdbserver unix:{path},server=on,wait=off")
    assert "Waiting" in said, said
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(path))
        stub = Memory(connection)
        try:
            yield stub
        finally:
            stub.ask("D")
    monitor(guest, "gdbserver none")


class Memory:
    """A guest's virtual memory, by GDB's remote protocol."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""

    def write(self, address: int, data: bytes) -> None:
        said = self.ask(f"M{address:x},{len(data):x}:{data.hex()}")
        assert said == "OK", (hex(address), said)

    def ask(self, request: str) -> str:
        self._connection.sendall(
            f"${request}#{sum(request.encode()) % 256:02x}".encode()
        )
        # That the guest has stopped is told as well, whenever that is.
        while (said := self._receive()).startswith("T"):
            pass
        return said

    def _receive(self) -> str:
        while not (found := re.search(rb"\$([^#]*)#..", self._pending, re.S)):
            data = self._connection.recv(4096)
            assert data, "QEMU has closed the connection"
            self._pending += data
        self._pending = self._pending[found.end() :]
        self._connection.sendall(b"+")
        return found[1].decode()


def hang(guest: lab.Live, symbols: dict[str, int]) -> None:
    """Halt every CPU for ever with interrupts off, at its next tick.

    :param symbols: addresses of the kernel
    """
    where = symbols["asm_sysvec_apic_timer_interrupt"]
    with memory(guest) as stub:
        stub.write(where, _HALT)
    halted = re.compile(rf"RIP={where + 2:016x} .* HLT=1")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        registers = monitor(guest, "info registers -a")
        if len(halted.findall(registers)) == guest.guest.machine.cpus:
            return
        assert time.monotonic() < deadline, registers
        time.sleep(0.1)


def panic(guest: lab.Live, symbols: dict[str, int]) -> None:
    """Have the kernel panic at an NMI, and stay as it is then."""
    with memory(guest) as stub:
        stub.write(symbols["unknown_nmi_panic"], b"\1\0\0\0")
        stub.write(symbols["panic_timeout"], b"\0\0\0\0")
    control(guest, "inject-nmi")
    guest.guest.wait("end Kernel panic", PATIENCE_SECONDS)
