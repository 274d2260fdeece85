# SPDX-License-Identifier: LGPL-2.1-or-later

"""Words are found in each page, whatever lies between, and progress is shown."""

import io
import sys
from pathlib import Path

import pytest

from msatools.program import raw_memory
from msatools.program.raw_memory import (
    FileMemory,
    MemoryRange,
    PhysicalMemory,
    Words,
    find_words,
)

WANTED = Words(8, b"a kernel")
PLACES = (0, 4096, (1 << 20) - 4096, 1 << 20, (3 << 20) + 8192)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    with made.open("wb") as file:
        for place in PLACES:
            file.seek(place + WANTED.offset)
            file.write(WANTED.text)
        file.seek(2 << 20)
        file.write(b"a kernel at no such place")
        file.truncate(4 << 20)
    return made


def test_each_page(path: Path) -> None:
    memory = FileMemory("raw memory", str(path))
    assert tuple(page for page, _ in find_words(memory, [WANTED])) == PLACES


def test_ranges_that_begin_within_a_page(path: Path) -> None:
    """Pages are those of the guest, not of the file."""
    ranges = [MemoryRange(1 << 30, (2 << 20) - 96, 4096), MemoryRange(1 << 40, 64, 0)]
    memory = FileMemory("made", str(path), ranges)
    found = [page - (1 << 30) + 4096 for page, _ in find_words(memory, [WANTED])]
    assert found == [4096, (1 << 20) - 4096, 1 << 20]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_slow", [True, False])
def test_progress(path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    """It is shown if it takes long, and wiped out at the end."""
    if is_slow:
        monkeypatch.setattr(raw_memory, "_TELL_AFTER_S", 0.0)
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    assert list(find_words(FileMemory("raw memory", str(path)), [WANTED]))
    said = out.getvalue()
    assert ("searching memory for a kernel: 0.0 of 0.0 GiB" in said) == is_slow
    assert said.endswith("\r\x1b[K") == is_slow


def test_reads_across_pieces(path: Path) -> None:
    physical = PhysicalMemory(FileMemory("raw memory", str(path), is_packed=True))
    physical.place([MemoryRange(0, 4096, 0), MemoryRange(4096, 8192, 1 << 20)])
    data = path.read_bytes()
    assert physical.read(4000, 200) == data[4000:4096] + data[1 << 20 :][:104]
    with pytest.raises(Exception, match="not in the file"):
        physical.read(12280, 16)
