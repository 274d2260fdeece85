# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory without a note answers as the dump of the same guest does."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fixtures import lab
from msatools.program import TargetError, TargetSpec, describe, open_target
from msatools.program.model import DamagedDumpError, NotADumpError
from msatools.program.raw_layout import place_kernel, settle_hole, with_holes
from msatools.program.raw_memory import (
    FileMemory,
    MemoryRange,
    PhysicalMemory,
    find_kernels,
)
from msatools.program.raw_program import boot_time, kernel_facts
from msatools.report.model import command_line
from tests.program.raw import writers
from tests.program.raw.answers import answers
from tests.support.dumps import kernel_at, vmcoreinfo_of

GIB = 1 << 30


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def guest(request: pytest.FixtureRequest) -> Path:
    """A guest with RAM below and above its hole, half of it each."""
    return lab.build(f"memory-{request.param}").dump("elf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("memory")
    yield made
    # Some gigabytes.
    shutil.rmtree(made)


def test_memory_alone_answers_as_the_dump(guest: Path, folder: Path) -> None:
    """All commands say the same as on a dump whose registers are left out."""
    plain = writers.without(guest, folder / "elf", b"CORE", b"QEMU")
    expected = answers(plain)
    plain.unlink()
    memory = writers.packed(guest, folder / "packed")
    assert memory.stat().st_size == 2 * GIB
    assert answers(memory) == expected


@pytest.mark.kernels
@pytest.mark.parametrize("write", [writers.identical, writers.packed])
def test_what_was_opened_is_said(guest: Path, folder: Path, write: object) -> None:
    memory = write(guest, folder / "said")  # type: ignore[operator]
    prog, target = open_target(TargetSpec(path=str(memory), types="btf"))
    assert target.kind == "raw"
    assert not target.truncated
    size, hole = ("2.0", ", hole at 1 GiB") if write is writers.packed else ("5.0", "")
    assert re.fullmatch(
        rf"raw memory, {size} GiB{hole}, kernel found at 0x[0-9a-f]+, no registers",
        target.format,
    )
    assert describe(prog) == target
    # Nothing is made up between the ranges.
    if write is writers.packed:
        with pytest.raises(Exception, match="not in the file"):
            prog.read(3 * GIB, 8, True)


def test_in_the_sandbox_and_at_the_prompt(run_612: lab.Run, folder: Path) -> None:
    """msa-report reads it in its sandbox, as a fleet does, and drgn at its prompt."""
    (folder / "dumps").mkdir()
    memory = writers.packed(run_612.dump("elf"), folder / "dumps/guest-17")
    scripts = Path(sys.executable).parent

    def run(*words: str | Path, code: str = "") -> str:
        command = [scripts / words[0], *words[1:]]
        ran = subprocess.run(command, input=code, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    said = run("msa-report", memory)
    assert "memory (raw memory, 2.0 GiB, hole at 1 GiB, kernel found at " in said
    assert "without a sandbox" not in said
    code = "print(prog['init_uts_ns'].name.release.string_().decode())"
    assert run("msa", "drgn", memory, code=code) == f"{run_612.release}\n"
    run("msa-fleet", "run", folder / "dumps", "-o", folder / "results")
    assert "1 dump, 1 done" in run("msa-fleet", "show", folder / "results")
    memory.unlink()


def test_elf_without_the_note(guest: Path, folder: Path) -> None:
    """It has the registers, too."""
    named = "memstat", "prstat", "locks"
    memory = writers.without(guest, folder / "noteless", b"VMCOREINFO")
    assert answers(memory, *named) == answers(guest, *named)
    target = open_target(TargetSpec(path=str(memory), types="btf")).target
    assert target.kind == "elf"
    assert target.format.startswith("ELF without a note, 2.0 GiB, kernel found at ")


@pytest.mark.kernels
def test_half_of_it(guest: Path, folder: Path) -> None:
    """Nothing is read at addresses of which it is not certain what lies there."""
    memory = writers.packed(guest, folder / "half")
    os.truncate(memory, GIB + (16 << 20))
    with pytest.raises(TargetError):
        open_target(TargetSpec(path=str(memory), types="btf"))


def test_symbols_that_are_lost(run_612: lab.Run, folder: Path) -> None:
    """Without them it is not known where the hole is, but for small guests."""
    memory = writers.packed(run_612.dump("elf"), folder / "symbols")
    physical = PhysicalMemory(FileMemory("raw memory", str(memory), is_packed=True))
    (kernel,) = find_kernels(physical.memory)
    physical.place([MemoryRange(0, 2 * GIB, 0)])
    assert settle_hole(physical, kernel, None) is True
    os.truncate(memory, 3 * GIB)
    physical = PhysicalMemory(FileMemory("raw memory", str(memory), is_packed=True))
    assert settle_hole(physical, kernel, None) is None


MAPS = {
    # Of q35 without NUMA; firmware keeps some of the lower part.
    "q35": (6, 0, [(0, 2 * GIB - 65536), (4 * GIB, 8 * GIB)], [(0, 2), (4, 4)]),
    "Firecracker": (
        300,
        0,
        [(1, 3 * GIB), (4 * GIB, 256 * GIB), (512 * GIB, 557 * GIB)],
        [(0, 3), (4, 252), (512, 45)],
    ),
    "older Firecracker": (
        5,
        0,
        [(1, 3.25 * GIB), (4 * GIB, 5.75 * GIB)],
        [(0, 3.25), (4, 1.75)],
    ),
    "Cloud Hypervisor, arm64": (
        6,
        1,
        [(GIB, 4 * GIB - (64 << 20)), (4 * GIB, 7 * GIB + (64 << 20))],
        [(1, 2.9375), (4, 3.0625)],
    ),
    # memmap=1G!5G: the gap from 5 to 6 GiB is in the file.
    "taken by an option": (
        6,
        0,
        [(0, 3 * GIB), (4 * GIB, 5 * GIB), (6 * GIB, 7 * GIB)],
        [(0, 3), (4, 3)],
    ),
    "of another size": (7, 0, [(0, 3 * GIB), (4 * GIB, 7 * GIB)], None),
    "without a hole": (4, 0, [(0, 4 * GIB)], None),
}


@pytest.mark.parametrize("name", MAPS)
def test_holes_by_the_map_of_the_kernel(name: str) -> None:
    """The file's size says which gaps in the map are holes."""
    size, start, ram, expected = MAPS[name]
    ranges = [(int(first), int(last)) for first, last in ram]
    found = with_holes(size * GIB, start * GIB, ranges, ranges[-1][1])
    places = [[(each.start / GIB, each.size / GIB) for each in one] for one in found]
    assert places[:1] == ([] if expected is None else [expected])
    for one in with_holes(size * GIB, start * GIB, ranges, ranges[-1][1]):
        assert sum(each.size for each in one) == size * GIB
        assert [each.offset for each in one] == [
            sum(each.size for each in one[:index]) for index in range(len(one))
        ]


@pytest.mark.kernels
def test_a_map_alone(guest: Path, folder: Path) -> None:
    """Where nothing else is known of the hole, the kernel's map settles it."""
    memory = writers.packed(guest, folder / "map")
    physical = PhysicalMemory(FileMemory("raw memory", str(memory), is_packed=True))
    (kernel,) = find_kernels(physical.memory)
    assert place_kernel(physical, kernel, search=False)
    facts = kernel_facts(physical, kernel)
    assert facts is not None
    assert [end for _, end in facts.ram if end > GIB][-1] == 5 * GIB
    places = [*with_holes(2 * GIB, 0, facts.ram, 5 * GIB)]
    assert places == [[MemoryRange(0, GIB, 0), MemoryRange(4 * GIB, GIB, GIB)]]
    memory.unlink()


@pytest.mark.kernels
def test_cut_off(guest: Path, folder: Path) -> None:
    """What the file does not have is lost, and not read as zeros."""
    memory = writers.packed(guest, folder / "cut")
    # KASLR may have put the kernel there: then only its last, unused part is cut off.
    is_last = kernel_at(guest) > 5 * GIB - (192 << 20)
    os.truncate(memory, 2 * GIB - ((1 if is_last else 64) << 20))
    prog, target = open_target(TargetSpec(path=str(memory), types="btf"))
    assert target.truncated
    with pytest.raises(Exception, match="not in the file"):
        prog.read(5 * GIB - 8, 8, True)


def test_holes_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(1 << 30)
        file.write(b"x" * 4096)
        file.truncate(256 << 30)
    memory = FileMemory("raw memory", str(path))
    assert sum(end - start for start, end in memory.filled()) <= 1 << 20


@pytest.mark.parametrize("number", [1, 2])
def test_kernel_by_number(run_612: lab.Run, folder: Path, number: int) -> None:
    memory = writers.packed(run_612.dump("elf"), folder / "numbered")
    spec = TargetSpec(path=str(memory), types="btf", kernel=number)
    if number == 1:
        assert open_target(spec).target.release == run_612.release
        return
    with pytest.raises(
        TargetError, match=r"no kernel number 2 in it .*; name one from 1 to 1"
    ):
        open_target(spec)


def _is_high(run: lab.Run) -> bool:
    """Return whether the kernel lies above the hole."""
    return kernel_at(run.dump("elf")) > 1 << 31


def _with_copy(run: lab.Run, memory: Path, text: bytes) -> int:
    """Put a copy of VMCOREINFO into a page before the kernel; return the position."""
    # 16 MiB is the first place that the kernel may have.
    place = 16 << 20 if kernel_at(run.dump("elf")) > 16 << 20 else 15 << 20
    with memory.open("r+b") as file:
        file.seek(place)
        file.write(text.ljust(4096, b"\0"))
    return place


def _wipe_names(memory: Path, kept: int | None = None) -> None:
    """Make all that could be VMCOREINFO illegible, in pages of any use.

    A page that was freed and partly overwritten has a part of it, too.

    :param kept: Position of the page that is left alone.
    """
    word = b"OSRELEASE="
    data = FileMemory("raw memory", str(memory))
    with memory.open("r+b") as file:
        for start, end in data.filled():
            page = data.read(start, end - start)
            for found in re.finditer(word, page):
                position = start + found.start()
                if position & -4096 != kept:
                    file.seek(position)
                    file.write(bytes(len(word)))


def test_vmcoreinfo_of_a_file(run_612: lab.Run, folder: Path) -> None:
    """VMCOREINFO that was kept elsewhere serves, even if memory's own is lost."""
    memory = writers.packed(run_612.dump("elf"), folder / "named")
    note = folder / "note"
    note.write_bytes(vmcoreinfo_of(run_612.dump("elf")))
    _wipe_names(memory)
    with pytest.raises(NotADumpError, match="no Linux kernel"):
        open_target(TargetSpec(path=str(memory), types="btf"))
    spec = TargetSpec(path=str(memory), types="btf", vmcoreinfo=str(note))
    if _is_high(run_612):
        assert open_target(spec).target.release == run_612.release
    else:
        # What is wiped would have said where the hole is.
        with pytest.raises(DamagedDumpError, match="which memory lies where"):
            open_target(spec)
    note.write_text(note.read_text().replace("NUMBER(phys_base)=", "NUMBER(phys)="))
    with pytest.raises(TargetError, match="of an unknown machine"):
        open_target(spec)


def test_stale_copies_do_not_count(run_612: lab.Run, folder: Path) -> None:
    """The text of another boot is there, in a page that is found first."""
    memory = writers.packed(run_612.dump("elf"), folder / "stale")
    text = vmcoreinfo_of(run_612.dump("elf"))
    moved = re.sub(rb"(NUMBER\(phys_base\)=)-?\d+", rb"\g<1>4096", text)
    assert moved != text
    stale = _with_copy(run_612, memory, moved)
    assert_one_kernel(run_612, memory)
    _wipe_names(memory, kept=stale)
    with pytest.raises(DamagedDumpError, match="is not where its VMCOREINFO says"):
        open_target(TargetSpec(path=str(memory), types="btf"))


def assert_one_kernel(run: lab.Run, memory: Path) -> None:
    target = open_target(TargetSpec(path=str(memory), types="btf")).target
    assert target.release == run.release
    assert "with the most memory" not in target.format


def test_damaged_copies_are_no_kernels(run_612: lab.Run, folder: Path) -> None:
    """Each is left out for what it says or lacks, and no fault of ours."""
    memory = writers.packed(run_612.dump("elf"), folder / "damaged")
    text = vmcoreinfo_of(run_612.dump("elf"))
    # A page was freed, and what leads to the symbols is overwritten.
    copies = [re.sub(rb"SYMBOL\(kallsyms_\w+", lambda old: b"?" * len(old[0]), text)]
    for word in (rb"OFFSET\(uts_namespace.name\)", rb"SYMBOL\(node_data\)"):
        line = rb"\n(" + word + rb")=\w+"
        copies += [re.sub(line, rb"\n\1=" + value, text) for value in (b"x", b"-1")]
    for damaged in copies:
        assert damaged != text
        _with_copy(run_612, memory, damaged)
        assert_one_kernel(run_612, memory)


def test_several_kernels(run_612: lab.Run, folder: Path) -> None:
    """The lower part of a guest's memory is that of another one."""
    if not _is_high(run_612):
        pytest.skip("KASLR has put the kernel into the part that is overwritten")
    memory = writers.packed(run_612.dump("elf"), folder / "two")
    other = lab.build("crashes-nested-6.12").dump("elf")
    (ram,) = writers.ram_of(other)
    assert ram.size < GIB
    with memory.open("r+b") as file:
        file.write(bytes(ram.size))
        for offset, data in writers.blocks(other, ram):
            file.seek(offset)
            file.write(data)
    spec = TargetSpec(path=str(memory), types="btf")
    words = re.search(
        r"number (\d) with the most memory of 2 \((.*)\)$",
        open_target(spec).target.format,
    )
    assert words is not None
    assert "up to 5.0 GiB" in words[2]
    assert f"up to {ram.size / GIB:.1f} GiB" in words[2]
    assert re.search(r"5\.0 GiB booted (\S+ \S+) UTC", words[2])
    number = 3 - int(words[1])
    found = open_target(replace(spec, kernel=number))
    line = command_line(found.target, "locks")
    assert line == f"msa-locks {memory} --kernel {number}"
    whole = open_target(TargetSpec(path=str(other), types="btf"))
    assert found.target.crash is not None
    assert found.target.crash.message == whole.target.crash.message  # type: ignore[union-attr]
    assert "with the most memory" not in found.target.format


def test_boot_time(folder: Path) -> None:
    """It is what the guest itself says in /proc/stat."""
    run = lab.build("tasks-6.12")
    memory = writers.packed(run.dump("elf"), folder / "booted")
    physical = PhysicalMemory(FileMemory("raw memory", str(memory), is_packed=True))
    (kernel,) = find_kernels(physical.memory)
    assert place_kernel(physical, kernel, search=False)
    (said,) = re.findall(rb"btime (\d+)", run.truth("proc/stat"))
    found = boot_time(physical, kernel)
    # Both are rounded, of times read one after the other.
    assert found is not None
    assert abs(found - int(said)) <= 1
    memory.unlink()


def test_no_option_is_ignored(run_612: lab.Run) -> None:
    path = str(run_612.dump("elf"))
    for spec, option in (
        (TargetSpec(path=path, kernel=1), "--kernel"),
        (TargetSpec(path=path, vmcoreinfo="x"), "--vmcoreinfo"),
    ):
        with pytest.raises(TargetError, match=f"leave out {option}"):
            open_target(spec)
