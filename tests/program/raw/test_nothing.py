# SPDX-License-Identifier: LGPL-2.1-or-later

"""A file without a kernel costs one line, and little time."""

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.conftest import Msa

MIB = 1 << 20
SECONDS = 30
"""CPU time, which does not depend on what else the machine does."""


def noise(path: Path) -> None:
    path.write_bytes(Random(1).randbytes(64 * MIB))


def zeros(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(256 << 30)


def words(path: Path) -> None:
    """Memory of something else: neither random nor zeros."""
    path.write_bytes(b"NTOSKRNL.EXE\0\0\0\0" * (4 * MIB))


def names(path: Path) -> None:
    """Every page begins as VMCOREINFO does, each of another kernel."""
    with path.open("wb") as file:
        for number in range(65536):
            lines = (
                f"\nOSRELEASE=6.12.{number}",
                f"NUMBER(phys_base)={number << 12}",
                "SYMBOL(init_uts_ns)=ffffffff82000000",
                "SYMBOL(swapper_pg_dir)=ffffffff82001000",
                "SYMBOL(_stext)=ffffffff81000000",
            )
            file.write("\n".join(lines)[number > 0 :].encode().ljust(4096, b"\0"))


def disk(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mke2fs", "-q", "-F", str(path)], check=True)


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "noise": (noise, "encrypted or compressed: every page of it is random"),
    "zeros": (zeros, "zeros where a header should be, and nothing else"),
    "words": (words, "no Linux kernel in what would be its memory"),
    "names": (names, "is not where its VMCOREINFO says"),
    "disk": (disk, "a file system (ext2, 3 or 4), not memory"),
}


@pytest.mark.parametrize("name", FILES)
def test_one_line(msa: Msa, tmp_path: Path, name: str) -> None:
    make, said = FILES[name]
    path = tmp_path / "file"
    make(path)
    check(msa, path, said)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_devices(msa: Msa, path: str) -> None:
    check(msa, Path(path), "not a regular file")


def cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(msa: Msa, path: Path, said: str) -> None:
    start = cpu_seconds()
    ran = msa(path)
    assert cpu_seconds() - start < SECONDS
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"msa-memstat: {path}: ")
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
