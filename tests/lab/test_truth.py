# SPDX-License-Identifier: LGPL-2.1-or-later
import io
import struct
import tarfile
from pathlib import Path

from fixtures.lab import truth

FILES = {"proc/vmstat": b"nr_free_pages 7\n", "proc/kpageflags": bytes(4096)}


def recorded(files: dict[str, bytes], left_over: bytes = bytes(8192)) -> io.BytesIO:
    """The guest's buffer: a tar archive, and what was in memory behind its end."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    buffer.write(left_over)
    buffer.seek(0)
    return buffer


def test_files_come_back_by_name(tmp_path: Path) -> None:
    truth.store(recorded(FILES), tmp_path / "truth.zip")
    stored = truth.Truth(tmp_path / "truth.zip")
    assert stored.names() == list(FILES)
    for name, content in FILES.items():
        assert stored(name) == content


def test_what_an_earlier_round_left_is_not_read(tmp_path: Path) -> None:
    earlier = recorded({"proc/old": b"old"}).getvalue()
    truth.store(recorded(FILES, earlier), tmp_path / "truth.zip")
    assert truth.Truth(tmp_path / "truth.zip").names() == list(FILES)


def test_frames_end_at_the_first_zero(tmp_path: Path) -> None:
    disk = tmp_path / "out"
    disk.write_bytes(struct.pack("<3Q", 7, 8, 3) + bytes(4072))
    assert truth.frames(disk) == [7, 8, 3]
    disk.write_bytes(struct.pack("<2Q", 7, 8))
    assert truth.frames(disk) == [7, 8]


def test_extents_join_neighbours_in_order() -> None:
    assert truth.extents([7, 8, 9, 3, 4, 10, 9]) == [(7, 3), (3, 2), (10, 1), (9, 1)]
    assert truth.extents([]) == []


def test_pfns_of_pagemap() -> None:
    present, swapped = 1 << 63, 1 << 62
    soft_dirty = 1 << 55
    entries = struct.pack(
        "<4Q", present | soft_dirty | 0x1234, swapped | 99, 0, present
    )
    assert truth.pfns(entries) == [0x1234, None, None, 0]
