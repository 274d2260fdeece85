# SPDX-License-Identifier: LGPL-2.1-or-later

"""Copies of dumps as if they were of other machines, and damaged ones."""

import struct
from pathlib import Path

_NODENAME, _TIMESTAMP = 12 + 65, 12 + 6 * 65 + 6
"""Offsets in ``struct disk_dump_header`` of a 64-bit machine."""

DAY = 86400
START = 1_795_000_000
"""A time in November 2026."""


def copy_dump(source: Path, to: Path, host: str, time_s: int = START) -> Path:
    """Copy a kdump, as if makedumpfile had written it on another host at a time."""
    data = bytearray(source.read_bytes())
    data[_NODENAME : _NODENAME + 65] = host.encode().ljust(65, b"\0")
    data[_TIMESTAMP : _TIMESTAMP + 16] = struct.pack("<qq", time_s, 0)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(data)
    return to


def cut_off(dump: Path, size: int) -> Path:
    """Cut a dump off."""
    with dump.open("r+b") as file:
        file.truncate(size)
    return dump


def overwrite(dump: Path, offset: int, data: bytes) -> Path:
    """Damage a dump."""
    with dump.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return dump
