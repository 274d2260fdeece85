# SPDX-License-Identifier: LGPL-2.1-or-later
import io
import os
from pathlib import Path

import pytest

from fixtures.lab import sparse

CONTENT = (
    b"start" + bytes(5 * sparse.BLOCK) + b"middle" + bytes(3 * sparse.BLOCK) + b"end"
)


class Trickle(io.RawIOBase):
    """A pipe that gives a little at a time."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self.data.readinto(buffer[:1000])


@pytest.mark.parametrize("zeros", [0, 1, sparse.BLOCK, 3 * sparse.BLOCK + 7])
def test_stream_is_copied_with_holes(tmp_path: Path, zeros: int) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        total = sparse.copy_stream(io.BytesIO(CONTENT + bytes(zeros)), file)
    assert total == len(CONTENT) + zeros
    assert out.read_bytes() == CONTENT + bytes(zeros)
    assert out.stat().st_blocks * 512 < len(CONTENT)


def test_stream_in_small_pieces(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        sparse.copy_stream(Trickle(CONTENT), file)
    assert (tmp_path / "out").read_bytes() == CONTENT


@pytest.mark.parametrize("trim", [False, True])
def test_file_is_copied_with_holes(tmp_path: Path, trim: bool) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    with source.open("wb") as file:
        sparse.copy_stream(io.BytesIO(CONTENT), file)
    os.truncate(source, 1 << 30)
    sparse.copy_file(source, out, trim)
    with out.open("rb") as file:
        assert file.read(len(CONTENT)) == CONTENT
    assert out.stat().st_blocks * 512 < len(CONTENT)
    if trim:
        assert len(CONTENT) <= out.stat().st_size < len(CONTENT) + sparse.BLOCK
    else:
        assert out.stat().st_size == 1 << 30
