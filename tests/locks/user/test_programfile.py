# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of functions in this machine's C library, from its file or parts of it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import drgn
import pytest

from msatools.locks.user_stacks import Function, ProgramFile

PAGE = 4096
NAMES = ("clock_nanosleep", "pthread_cond_broadcast", "qsort", "fopen")

libc = ctypes.CDLL("libc.so.6")


@dataclass(frozen=True)
class Loaded:
    """The file of the C library, and the mapping of its code in this process."""

    path: Path
    start: int
    offset: int
    """File offset of the mapping."""

    def offset_of(self, name: str) -> int:
        address = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
        assert address is not None
        return address - self.start + self.offset


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, offset, _, _, *path = line.split(maxsplit=5)
        if "x" in flags and path and "libc.so" in path[0]:
            start = int(addresses.partition("-")[0], 16)
            return Loaded(Path(path[0].strip()), start, int(offset, 16))
    pytest.skip("this machine's C library has another name")


def memory(address: int, size: int) -> bytes | None:
    """Read memory of this process."""
    with open("/proc/self/mem", "rb") as file:
        try:
            file.seek(address)
            return file.read(size)
        except OSError:
            return None


def nothing(address: int, size: int) -> bytes | None:
    return None


class Program:
    """A program file with some pages readable."""

    def __init__(self, data: bytes, is_readable: Callable[[int], bool]) -> None:
        self._data = data
        self._is_readable = is_readable
        self.file = ProgramFile(self._read, self._read_around_gaps)

    def _read(self, offset: int, size: int) -> bytes:
        pages = range(offset // PAGE, -(-(offset + size) // PAGE))
        if offset + size > len(self._data) or not all(map(self._is_readable, pages)):
            raise drgn.FaultError("lost", offset)
        return self._data[offset : offset + size]

    def _read_around_gaps(self, offset: int, size: int) -> bytes:
        readable = (
            self._is_readable(byte // PAGE) for byte in range(offset, offset + size)
        )
        data = self._data[offset : offset + size].ljust(size, b"\0")
        return bytes(
            byte * is_readable for byte, is_readable in zip(data, readable, strict=True)
        )


def function(program: Program, loaded: Loaded, name: str, past: int) -> Function | None:
    offset = loaded.offset_of(name) + past
    address = offset - loaded.offset + loaded.start
    return program.file.function(offset, address, memory)


@pytest.mark.parametrize("past", [0, 1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_dynamic_symbols(loaded: Loaded, name: str, past: int) -> None:
    """Names are found without the section headers at the end of the file."""
    data = loaded.path.read_bytes()
    last = len(data) // PAGE
    program = Program(data, lambda page: page < last)
    assert function(program, loaded, name, past) == (name, past)


def test_missing_pages(loaded: Loaded) -> None:
    data = loaded.path.read_bytes()
    for lost in (lambda page: False, lambda page: page > 0):
        program = Program(data, lost)
        assert function(program, loaded, "qsort", 0) is None
    # With pages of code only, there are no tables or names.
    first = loaded.offset // PAGE
    program = Program(data, lambda page: page == 0 or page >= first)
    assert function(program, loaded, "qsort", 0) is None
    # The dynamic section is read from memory.
    offset = loaded.offset_of("qsort")
    last = len(data) // PAGE
    program = Program(data, lambda page: page < last)
    assert program.file.function(offset, offset, nothing) is None


@pytest.mark.parametrize(
    "data", [b"", bytes(PAGE), b"\x7fELF\x02\x01" + b"\xff" * 2 * PAGE, b"#!/bin/sh\n"]
)
def test_files_that_are_not_programs(data: bytes) -> None:
    program = Program(data, lambda page: True)
    for offset in (0, 0x1000, 1 << 40):
        assert program.file.function(offset, offset, memory) is None
