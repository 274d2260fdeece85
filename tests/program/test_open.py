# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps of every format are opened and described; others raise errors."""

import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from drgn import FaultError, Platform, Program
from msgspec.structs import replace

from fixtures import lab
from fixtures.lab import sparse
from msatools.program import TargetError, TargetSpec, describe, open_target
from msatools.program.model import (
    DamagedDumpError,
    NotADumpError,
    NotPermittedError,
    Source,
)

FORMATS = {
    "elf": ("elf", "ELF", None),
    "elf-filtered": ("elf", "ELF", None),
    "kdump-zlib": ("kdump", "kdump zlib", 1),
    "kdump-lzo": ("kdump", "kdump lzo", 1),
    "kdump-snappy": ("kdump", "kdump snappy", 1),
    "kdump-zstd": ("kdump", "kdump zstd", 1),
    "kdump-raw": ("kdump", "kdump uncompressed", 1),
    "kdump-filtered": ("kdump", "kdump lzo", 31),
    "flattened": ("kdump", "kdump lzo, flattened", 1),
    "qemu-kdump-zlib": ("kdump", "kdump zlib, flattened", 1),
}


def spec(run: lab.Run, path: Path) -> TargetSpec:
    return TargetSpec(path=str(path), vmlinux=str(run.vmlinux))


def cut(path: Path, out: Path, size: int) -> Path:
    sparse.copy_file(path, out)
    os.truncate(out, size)
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_formats(run: lab.Run, format: str) -> None:
    path = run.dump(format)
    prog, target = open_target(spec(run, path))
    kind, words, level = FORMATS[format]
    assert target.path == str(path)
    assert (target.kind, target.format, target.dump_level) == (kind, words, level)
    assert not target.live
    assert not target.truncated
    assert target.crash is None
    assert target.release == run.release
    assert (target.arch, target.page_size, target.types) == ("x86_64", 4096, "dwarf")
    banner = prog["linux_banner"].string_().decode()
    assert banner.startswith(f"Linux version {run.release} ")


def test_only_the_kernel_itself_is_loaded(run_612: lab.Run) -> None:
    assert run_612.elf is not None
    prog, _ = open_target(spec(run_612, run_612.elf))
    assert [module.name for module in prog.modules()] == ["kernel"]


@pytest.mark.parametrize("format", ["elf", "kdump-lzo", "qemu-kdump-zlib"])
def test_description_of_a_program_that_drgn_opened(
    run_612: lab.Run, format: str
) -> None:
    ours = open_target(spec(run_612, run_612.dump(format)))
    prog = Program(Platform(ours.prog.platform.arch))  # type: ignore[union-attr]
    prog.set_core_dump(run_612.dump(format))
    (kernel,) = ours.target.sources
    assert (kernel.module, kernel.types) == ("kernel", "dwarf")
    assert kernel.path == str(run_612.vmlinux)
    carried = Source("kernel", "btf", None)
    assert describe(prog) == replace(ours.target, types="btf", sources=(carried,))
    assert prog.type("struct loop_device", "loop").tag == "loop_device"
    assert describe(prog).sources == (carried, Source("loop", "btf", None))
    assert not describe(prog).capabilities.frame_locals
    prog.load_debug_info([run_612.vmlinux])
    assert describe(prog) == ours.target
    assert ours.target.capabilities.frame_locals


def test_program_that_is_not_a_kernel() -> None:
    prog = Program()
    prog.set_pid(os.getpid())
    with pytest.raises(NotADumpError):
        describe(prog)


@pytest.mark.parametrize("format", ["elf", "kdump-zlib"])
def test_user_addresses_are_not_readable(run_612: lab.Run, format: str) -> None:
    """The same physical addresses are readable."""
    prog = open_target(spec(run_612, run_612.dump(format))).prog
    for address in (0, 0x1000, 0x400000):
        with pytest.raises(FaultError):
            prog.read(address, 8)
        assert len(prog.read(address, 8, physical=True)) == 8


@pytest.mark.parametrize(
    ("format", "kept"),
    [("elf", 0.9), ("kdump-zlib", 0.9), ("kdump-zlib", 0.5), ("flattened", 0.9)],
)
def test_truncated_dump_is_marked_as_such(
    run_612: lab.Run, tmp_path: Path, format: str, kept: float
) -> None:
    whole = run_612.dump(format)
    size = int(whole.stat().st_size * kept)
    dump = cut(whole, tmp_path / "vmcore", size)
    assert open_target(spec(run_612, dump)).target.truncated


@pytest.mark.parametrize(
    ("formats", "size", "why"),
    [
        # Within the bitmaps, where libkdumpfile crashes, or the descriptors.
        (["kdump-lzo"], 32 << 10, "before its pages"),
        (["kdump-lzo"], 200_000, "before its pages"),
        (["kdump-lzo"], 1_000_000, "before its pages"),
        (["flattened"], 200_000, "before its pages"),
        (["elf", "kdump-lzo", "flattened"], 20, "within its headers"),
        (["elf", "kdump-lzo", "flattened"], 300, "within its headers"),
    ],
)
def test_dump_cut_off_so_that_it_cannot_be_opened(
    run_612: lab.Run, tmp_path: Path, formats: list[str], size: int, why: str
) -> None:
    for format in formats:
        whole = run_612.dump(format)
        dump = cut(whole, tmp_path / format, size)
        with pytest.raises(DamagedDumpError, match=why):
            open_target(spec(run_612, dump))


@pytest.mark.parametrize("format", ["elf", "kdump-lzo", "flattened"])
def test_garbage_after_the_signature(
    run_612: lab.Run, tmp_path: Path, format: str
) -> None:
    dump = cut(run_612.dump(format), tmp_path / "vmcore", 16)
    with dump.open("ab") as file:
        file.write(b"\xa5" * 100_000)
    with pytest.raises(DamagedDumpError):
        open_target(spec(run_612, dump))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as it:
        it.bind(str(path))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Path.mkdir, "a directory"),
        (os.mkfifo, "not a regular file"),
        (make_socket, "a socket"),
        (lambda path: path.write_bytes(gzip.compress(b"KDUMP")), "with gzip"),
        (Path.touch, "empty"),
        (lambda path: path.write_text("hello, world\n"), "not a dump"),
        (lambda path: path.write_bytes(b"\x7fE"), "not a dump"),
    ],
)
def test_not_a_dump(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    path = tmp_path / "vmcore"
    make(path)
    with pytest.raises(NotADumpError, match=why):
        open_target(TargetSpec(path=str(path)))


def test_vmlinux_named_as_the_dump(run_612: lab.Run) -> None:
    with pytest.raises(NotADumpError, match="not a core"):
        open_target(TargetSpec(path=str(run_612.vmlinux)))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such file"):
        open_target(TargetSpec(path=str(tmp_path / "vmcore")))


def test_kcore_that_is_missing_or_not_permitted() -> None:
    try:
        with open("/proc/kcore", "rb"):
            pytest.skip("this kernel's /proc/kcore can be read")
    except FileNotFoundError:
        expected, why = TargetError, "no such file"
    except PermissionError:
        expected, why = NotPermittedError, "locked down|permission denied"
    for path in (None, "/proc/kcore"):
        with pytest.raises(expected, match=why):
            open_target(TargetSpec(path=path))
