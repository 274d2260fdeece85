# SPDX-License-Identifier: LGPL-2.1-or-later

"""A dump that makedumpfile split is read from any of its parts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures import lab
from fixtures.lab import sparse
from fixtures.lab.formats import MAKEDUMPFILE_SECONDS, move_program_headers
from msatools.fleet.dumps import identify
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program import TargetSpec, open_target
from msatools.program.model import DamagedDumpError

DUMP = "memory-6.12"
NAMES = ("vmcore1", "vmcore2", "vmcore3")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the three parts of a dump."""
    out = tmp_path_factory.mktemp("split")
    elf = lab.build(DUMP).elf
    assert elf is not None
    sparse.copy_file(elf, out / "moved")
    with (out / "moved").open("r+b") as file:
        move_program_headers(file)
    command = ["makedumpfile", "--split", "-l", "-d", "1", "moved", *NAMES]
    subprocess.run(
        command, cwd=out, check=True, capture_output=True, timeout=MAKEDUMPFILE_SECONDS
    )
    (out / "moved").unlink()
    return out


def report_of(path: Path) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(path), types="btf"))
    return collect_memstat(opened.prog, target=opened.target)


@pytest.fixture(scope="module")
def whole() -> MemstatReport:
    return report_of(lab.build(DUMP).dump("kdump-lzo"))


@pytest.mark.parametrize("name", NAMES)
def test_from_any_part(split: Path, whole: MemstatReport, name: str) -> None:
    found = report_of(split / name)
    assert (found.classes, found.checks) == (whole.classes, whole.checks)
    assert found.target.format == "kdump lzo, split"
    assert not found.target.truncated
    # Many pages at once, as from one file.
    assert found.coverage["memmap_reads"] == whole.coverage["memmap_reads"]


def test_a_fleet_counts_it_once(split: Path) -> None:
    """By any part; another dump of the same kernel is another."""
    digests = {identify(str(split / name)).digest for name in NAMES}
    assert len(digests) == 1
    other = lab.build(DUMP).dump("kdump-lzo")
    assert identify(str(other)).digest not in digests


def test_other_dumps_in_the_directory_are_none_of_its_parts(
    split: Path, whole: MemstatReport, tmp_path: Path
) -> None:
    for name in NAMES:
        shutil.copy(split / name, tmp_path)
    shutil.copy(lab.build(DUMP).dump("kdump-lzo"), tmp_path / "other")
    (tmp_path / "notes").write_text("KDUMP   ")
    other = bytearray((split / NAMES[1]).read_bytes())
    # Its time, in the header: a dump of another moment.
    other[408] ^= 1
    (tmp_path / "vmcore4").write_bytes(other)
    assert report_of(tmp_path / NAMES[2]).classes == whole.classes


@pytest.mark.parametrize("left_out", NAMES[:2])
def test_what_is_there_is_read_without_a_part(
    split: Path, tmp_path: Path, left_out: str
) -> None:
    """The third has no pages: whole blocks of page frames are dealt out."""
    for name in NAMES:
        if name != left_out:
            shutil.copy(split / name, tmp_path)
    spec = TargetSpec(path=str(tmp_path / NAMES[2]), types="btf")
    try:
        target, error = open_target(spec).target, None
    except DamagedDumpError as found:
        target, error = None, found
    # The kernel's symbols are where KASLR put them.
    if target is not None:
        assert target.truncated
        assert target.lacks_parts
        assert target.format == "kdump lzo, 1 of several parts"
    else:
        assert "the part of the split dump with page frames" in error.why
        assert "debug info" not in error.why
        assert error.what_to_do == "put all parts into one directory"


def test_a_damaged_part(split: Path, tmp_path: Path) -> None:
    """What another part says counts as well."""
    for name in NAMES:
        shutil.copy(split / name, tmp_path)
    size = (tmp_path / NAMES[1]).stat().st_size
    with (tmp_path / NAMES[1]).open("r+b") as file:
        file.truncate(size - 10_000)
    found = open_target(TargetSpec(path=str(tmp_path / NAMES[0]), types="btf"))
    assert found.target.truncated
    assert found.target.bad_descriptors
