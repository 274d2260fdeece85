# SPDX-License-Identifier: LGPL-2.1-or-later

"""Changes of /proc/kcore's segments are noticed, on files of the same format."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from drgn import Architecture, FaultError, Platform, Program

from msatools.program import live
from msatools.program.live import Segments, kcore_steady, open_again
from msatools.program.model import MovedError

PAGE = 4096
BASE = 0xFFFF_8880_0000_0000
NOWHERE = (1 << 64) - 1

Memory = dict[int, tuple[int, bytes]]
"""Address -> physical address and contents."""


def fill(first: int, pages: int) -> bytes:
    """Return pages in which each word is the page's pfn."""
    return b"".join(struct.pack("<Q", first + n) * 512 for n in range(pages))


RAM = {BASE: (0, fill(0, 4)), BASE + 16 * PAGE: (16 * PAGE, fill(16, 4))}
ADDED = {BASE + 8 * PAGE: (8 * PAGE, fill(8, 2))}


def write(path: Path, memory: Memory, moved: int = 0) -> None:
    """Write a file like /proc/kcore, where an address determines the file offset.

    :param moved: Pages to add to all file offsets.
    """
    count = 1 + len(memory)
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 4, 62, 1, 0, 64, 0, 0, 64, 56, count, 0, 0, 0
    )
    note = struct.pack("<IIQQQQQQ", 4, 0, 64 + 56 * count, 0, 0, 20, 0, 0)
    start = PAGE * (1 + moved)
    loads = [
        struct.pack(
            *("<IIQQQQQQ", 1, 7, start + address - BASE, address),
            *(physical, len(data), len(data), PAGE),
        )
        for address, (physical, data) in memory.items()
    ]
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(0)
        file.write(header + note + b"".join(loads))
        for address, (_, data) in memory.items():
            file.seek(start + address - BASE)
            file.write(data)


def opened(path: Path) -> tuple[Program, Segments]:
    """Open a file as drgn does, which uses the segments at the time of opening."""
    prog = Program(Platform(Architecture.X86_64))
    segments = Segments(str(path))
    table = segments.look()
    segments.know(table)

    def reader(start: int) -> Callable[[int, int, int, bool], bytes]:
        def read(address: int, count: int, offset: int, physical: bool) -> bytes:
            with path.open("rb") as file:
                file.seek(start + offset)
                return file.read(count)

        return read

    for segment in table:
        read = reader(segment.offset)
        prog.add_memory_segment(segment.address, segment.size, read)
        if segment.physical != NOWHERE:
            prog.add_memory_segment(segment.physical, segment.size, read, True)
    return prog, segments


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kcore"
    write(path, RAM)
    return path


def refreshed(path: Path, memory: Memory) -> Program:
    """Open a file, move its memory, and refresh the segments."""
    prog, segments = opened(path)
    write(path, memory, moved=1)
    assert segments.refresh(prog)
    return prog


def page_at(prog: Program, address: int, physical: bool = False) -> int:
    return int(prog.read_u64(address, physical))


@pytest.mark.parametrize("memory", [RAM | ADDED, RAM])
def test_change_is_noticed(path: Path, memory: Memory) -> None:
    """Added or moved memory counts as a change until the segments are refreshed."""
    prog, segments = opened(path)
    for _ in range(2):
        assert segments.is_unchanged()
    write(path, memory, moved=1)
    for _ in range(2):
        assert not segments.is_unchanged()
    assert segments.refresh(prog)
    for _ in range(2):
        assert segments.is_unchanged()


@pytest.mark.parametrize("moved", [0, 1])
def test_memory_is_added(path: Path, moved: int) -> None:
    prog, segments = opened(path)
    with pytest.raises(FaultError):
        page_at(prog, BASE + 8 * PAGE)
    write(path, RAM | ADDED, moved)
    assert segments.is_moved() == bool(moved)
    assert segments.refresh(prog)
    assert not segments.refresh(prog)
    assert not segments.is_moved()
    for number in (0, 3, 8, 9, 16, 19):
        assert page_at(prog, BASE + number * PAGE) == number
        assert page_at(prog, number * PAGE, physical=True) == number


@pytest.mark.parametrize("moved", [0, 1])
def test_memory_is_removed(path: Path, moved: int) -> None:
    write(path, RAM | ADDED)
    prog, segments = opened(path)
    assert page_at(prog, BASE + 9 * PAGE) == 9
    write(path, RAM, moved)
    assert segments.refresh(prog)
    for physical, base in ((False, BASE), (True, 0)):
        with pytest.raises(FaultError, match="gone"):
            page_at(prog, base + 9 * PAGE, physical)
        assert page_at(prog, base + 3 * PAGE, physical) == 3
        assert page_at(prog, base + 16 * PAGE, physical) == 16


def test_read_past_the_end_of_the_file(path: Path) -> None:
    prog = refreshed(path, RAM)
    with path.open("r+b") as file:
        file.truncate(PAGE * 3)
    with pytest.raises(FaultError, match="could not be read"):
        page_at(prog, BASE + 17 * PAGE)


def test_reads_that_fail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prog = refreshed(path, RAM)

    def fail(fd: int, size: int, offset: int) -> bytes:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("os.pread", fail)
    with pytest.raises(FaultError, match="Cannot allocate memory"):
        page_at(prog, BASE)


def test_open_file_is_used_if_it_cannot_be_opened_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prog, segments = opened(path)
    write(path, RAM | ADDED, moved=1)

    def deny(*args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.open", deny)
    assert segments.refresh(prog)
    assert page_at(prog, BASE + 8 * PAGE) == 8


@pytest.fixture
def known(path: Path) -> Program:
    """A program whose segments are known to :func:`kcore_steady`."""
    prog, segments = opened(path)
    prog.cache[live._KCORE_NAME] = segments
    return prog


def move(path: Path, error: BaseException | None) -> None:
    write(path, RAM | ADDED, moved=1)
    if error:
        raise error


def test_steady(known: Program, path: Path) -> None:
    write(path, RAM | ADDED, moved=1)
    with kcore_steady(known):
        assert page_at(known, BASE + 8 * PAGE) == 8
    with pytest.raises(ValueError, match="anything"), kcore_steady(known):
        raise ValueError("anything")


@pytest.mark.parametrize("error", [None, FaultError("no wonder", 0), KeyError("x")])
def test_memory_that_moves_during_a_report(
    known: Program, path: Path, error: Exception | None
) -> None:
    with pytest.raises(MovedError) as raised, kcore_steady(known):
        move(path, error)
    assert raised.value.__cause__ is error
    assert str(raised.value) == (
        "/proc/kcore: memory was added or removed while it was read; run it again"
    )
    with kcore_steady(known):
        assert page_at(known, BASE + 17 * PAGE) == 17


# Forked workers, each with an open file of its own.


@pytest.fixture
def path_of_kcore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of /proc/kcore, for all programs."""
    path = tmp_path / "kcore of no other test"
    path.write_bytes(b"kcore")
    monkeypatch.setattr(live, "KCORE", str(path))
    monkeypatch.setattr(live, "_is_kcore", lambda _: True)
    return path


def test_open_files_are_opened_again(path_of_kcore: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    with path_of_kcore.open("rb") as file, (tmp_path / "other").open("rb") as other:
        # The file offset belongs to the open file description.
        for opened_file in (file, other):
            os.lseek(opened_file.fileno(), 2, os.SEEK_SET)
        before = len(os.listdir("/proc/self/fd"))
        open_again(Program())
        assert len(os.listdir("/proc/self/fd")) == before
        assert not os.get_inheritable(file.fileno())
        assert (file.read(), other.read()) == (b"kcore", b"her")
