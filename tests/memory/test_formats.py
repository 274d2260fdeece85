# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every dump format gives the same report, also when damaged."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
from drgn import Program

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program import TargetSpec, open_target
from tests.support.elf import file_offset, load_segments

from .sums import check_of, pages_of

SMALL = "barepages-6.12"
"""A small dump: only its format matters."""

WHOLE = (
    *((SMALL, f"kdump-{codec}") for codec in ("zlib", "lzo", "snappy", "zstd", "raw")),
    (SMALL, "flattened"),
    ("memory-6.12", "qemu-kdump-zlib"),
    # QEMU has no name for arm64.
    ("memory-6.12arm64", "qemu-kdump-zlib"),
)


def collect(path: Path | None) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(path), types="btf"))
    return collect_memstat(opened.prog, target=opened.target)


@cache
def of_elf(name: str) -> MemstatReport:
    """Return the report of the ELF dump that the others are converted from."""
    return collect(lab.build(name).elf)


@pytest.mark.parametrize(("name", "format"), WHOLE)
def test_every_format_gives_the_same_report(name: str, format: str) -> None:
    found, report = collect(lab.build(name).dump(format)), of_elf(name)
    assert found.classes == report.classes
    assert found.checks == report.checks
    assert found.coverage["memmap_reads"] == report.coverage["memmap_reads"]


@pytest.mark.parametrize("format", ["elf-filtered", "kdump-filtered"])
@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_filtered_pages_are_not_a_loss(kernel: str, format: str) -> None:
    """makedumpfile drops the contents of user pages, not their struct pages."""
    name = f"barepages-{kernel}"
    found, report = collect(lab.build(name).dump(format)), of_elf(name)
    if kernel == "6.12":
        # makedumpfile 1.7.2 mistakes slab pages of this kernel for user pages. They
        # contain the owners of other pages, so the report must have a note.
        assert unowned(found) == unowned(report)
        assert found.classes == report.classes or found.notes
        return
    assert found.classes == report.classes
    assert found.coverage["excluded_pages"] == 0


def unowned(report: MemstatReport) -> dict[str, int]:
    """Return the classes that depend on struct pages only."""
    owned = ("file", "exec", "blockdev", "kernel.")
    return {
        name: pages
        for name, pages in pages_of(report).items()
        if not any(word in name for word in owned)
    }


@pytest.mark.parametrize("part", [0.7, 0.99])
def test_truncated_dump_is_reported_as_such(
    run: lab.Run, prog: Program, report: MemstatReport, tmp_path: Path, part: float
) -> None:
    assert run.elf is not None
    # Keep the kernel image, wherever it is, and cut off the section table, which is at
    # the very end.
    last = prog.symbol("_end").address - 4096
    segments = load_segments(run.elf)
    kernel = file_offset(prog, segments, last)
    size = run.elf.stat().st_size
    keep = min(max(int(size * part), kernel + (1 << 20)), size - (1 << 19))
    if file_offset(prog, segments, prog["mem_section"].value_()) < keep:
        pytest.skip("KASLR has put the kernel behind the section table")
    cut = tmp_path / "vmcore"
    subprocess.run(["cp", "--sparse=always", run.elf, cut], check=True)
    os.truncate(cut, keep)
    found = collect(cut)
    assert found.target.truncated
    # Node 1 is lost: its struct pages are in its own memory.
    assert found.pages - found.coverage["unreadable_pages"] < report.pages
    assert found.coverage["section_table_lost"] == 1
    assert any("table of memory sections" in note.text for note in found.notes)
    have, whole_has = pages_of(found), pages_of(report)
    assert sum(have.values()) == found.pages
    lost = ("unreadable", "kernel.unattributed", "cache.file", "kernel.large_kmalloc")
    assert all(have[name] <= whole_has[name] for name in have if name not in lost)
    assert have["free.buddy"] > 0
    # The number of missing pages is unknown, but that there are some is not.
    managed = check_of(found, "managed")
    assert managed.difference is not None
    assert managed.difference < 0
    assert managed.explained_by == "not all sections of memory are left"
