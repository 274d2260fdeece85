# SPDX-License-Identifier: LGPL-2.1-or-later

"""Flattened kdumps without their end, as a stream that broke off leaves them."""

import os
import struct
from pathlib import Path

import pytest

from fixtures import lab
from fixtures.demo.catalog import DEMOS
from fixtures.lab import sparse
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program import TargetSpec, formats, open_target
from msatools.program.model import DamagedDumpError
from tests.program.test_flattened import flatten
from tests.support.dumps import kernel_at

DUMP = "memory-6.12"
DEMO = DEMOS["6.12"].core
END = 5 << 30
"""Where the guest's memory ends."""

MARK = 16
"""Size of the mark of the end, in bytes."""

_MAKEDUMPFILE, _QEMU = "flattened", "qemu-kdump-zlib"


def cut(out: Path, format: str, missing: int) -> Path:
    whole = lab.build(DUMP).dump(format)
    sparse.copy_file(whole, out)
    os.truncate(out, whole.stat().st_size - missing)
    return out


def report_of(path: Path) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(path), types="btf"))
    return collect_memstat(opened.prog, target=opened.target)


@pytest.fixture(scope="module", params=[_MAKEDUMPFILE, _QEMU])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(format: str) -> MemstatReport:
    return report_of(lab.build(DUMP).dump(format))


@pytest.mark.parametrize("missing", [1, MARK])
def test_without_the_mark_nothing_is_missing(
    tmp_path: Path, format: str, whole: MemstatReport, missing: int
) -> None:
    found = report_of(cut(tmp_path / "vmcore", format, missing))
    assert (found.classes, found.checks) == (whole.classes, whole.checks)
    assert not found.target.truncated
    assert not found.target.bad_descriptors


def test_within_a_piece_it_is_cut_off(
    tmp_path: Path, format: str, whole: MemstatReport
) -> None:
    found = report_of(cut(tmp_path / "vmcore", format, MARK + 1))
    assert found.target.truncated
    # One page is lost, which may have struct pages: up to 64, and a part of one.
    assert found.pages == whole.pages
    assert found.coverage["unreadable_pages"] <= 65


def test_what_is_left_is_counted(tmp_path: Path, whole: MemstatReport) -> None:
    if kernel_at(lab.build(DUMP).dump("elf")) > END - (128 << 20):
        pytest.skip("KASLR has put the kernel into the part that is cut off")
    size = lab.build(DUMP).dump(_MAKEDUMPFILE).stat().st_size
    found = report_of(cut(tmp_path / "vmcore", _MAKEDUMPFILE, size // 100))
    assert found.target.truncated
    assert found.target.bad_descriptors
    assert whole.pages // 2 < found.pages <= whole.pages
    # What is missing explains each difference.
    assert not [x for x in found.checks if x.difference and x.explained_by is None]


def test_headers_that_are_cut_off(tmp_path: Path) -> None:
    """Also beforehand, where nobody is told."""
    path = tmp_path / "vmcore"
    sparse.copy_file(lab.build(DUMP).dump(_MAKEDUMPFILE), path)
    os.truncate(path, 5000)
    formats.copy(str(path))
    with pytest.raises(DamagedDumpError, match="cut off"):
        open_target(TargetSpec(path=str(path)))


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "vmcore")
    formats.copy(str(tmp_path / "vmcore"))


def test_headers_of_a_hostile_file_are_not_copied(tmp_path: Path) -> None:
    """A bitmap far off is not there; a piece is as long as the file has it."""
    data = bytearray(flatten([(0, DEMO.read_bytes()[: 1 << 16])], end=False))
    at = 4096 + 16
    sub_header_blocks = at + 424 + 8
    data[sub_header_blocks : sub_header_blocks + 4] = (2**31 - 2).to_bytes(4, "little")
    data[4096:at] = struct.pack(">qq", 0, 1 << 50)
    path = tmp_path / "vmcore"
    path.write_bytes(data)
    with pytest.raises(EOFError):
        formats.take(str(path))
