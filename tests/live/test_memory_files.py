# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's memory as QEMU itself writes it, in each form, of a stopped guest.

The guest is a kernel alone, which has panicked for the lack of a root file system: QEMU
does not migrate the lab's disks.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import sparse
from fixtures.lab.qmp import Qmp
from fixtures.lab.vm import QEMU
from msatools.target import TargetSpec, open_target
from tests.target.raw import writers
from tests.target.raw.answers import answers

NAMED = "memstat", "zombies", "locks", "report"
MIB = 6144
SECONDS = 240.0
PANIC = b"end Kernel panic"


@contextmanager
def panicked(kernel: Path, folder: Path) -> Iterator[Qmp]:
    """Start a kernel with no root file system; give its control once it is stopped."""
    console = folder / "console"
    backend = f"memory-backend-file,id=ram,size={MIB}M,share=on,mem-path={folder}/ram"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [
            *(QEMU, "-accel", "tcg", "-machine", "q35,memory-backend=ram"),
            *("-m", f"{MIB}M", "-object", backend, "-cpu", "max", "-smp", "2"),
            *("-kernel", str(kernel), "-append", "console=ttyS0 panic=0"),
            *("-display", "none", "-nodefaults", "-no-reboot"),
            *("-serial", f"file:{console}"),
            *("-chardev", f"socket,id=control,fd={theirs.fileno()}"),
            *("-mon", "control,mode=control"),
        ]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            try:
                qmp = Qmp(ours)
                end_s = time.monotonic() + SECONDS
                while not console.exists() or PANIC not in console.read_bytes():
                    assert time.monotonic() < end_s, console.read_bytes()[-2000:]
                    time.sleep(0.5)
                qmp.execute("stop")
                yield qmp
            finally:
                process.kill()


def pmemsave(qmp: Qmp, folder: Path, ranges: list[writers.Ram]) -> Path:
    """Have QEMU save each range of RAM, at its address in the file."""
    path, part = folder / "pmemsave", folder / "part"
    with path.open("wb") as out:
        for ram in ranges:
            place = {"val": ram.start, "size": ram.size, "filename": str(part)}
            qmp.execute("pmemsave", timeout=SECONDS, **place)
            with part.open("rb") as file:
                for offset in range(0, ram.size, 1 << 20):
                    data = file.read(1 << 20)
                    if data.count(0) != len(data):
                        out.seek(ram.start + offset)
                        out.write(data)
            part.unlink()
        out.truncate(ranges[-1].start + ranges[-1].size)
    return path


def migrate(qmp: Qmp, folder: Path) -> Path:
    """Have QEMU write its stream of migration to a file."""
    path = folder / "migration"
    qmp.execute("migrate-set-parameters", max_bandwidth=1 << 40)
    qmp.execute("migrate", uri=f"exec:cat > {path}")
    end_s = time.monotonic() + SECONDS
    state: dict[str, Any] = {}
    while state.get("status") != "completed":
        assert state.get("status") != "failed", state
        assert time.monotonic() < end_s, state
        time.sleep(0.2)
        state = qmp.execute("query-migrate")
    return path


def dump(qmp: Qmp, folder: Path) -> Path:
    """Have QEMU dump the guest, of whose kernel it knows nothing."""
    whole, path = folder / "whole", folder / "elf"
    qmp.execute(
        "dump-guest-memory", timeout=SECONDS, paging=False, protocol=f"file:{whole}"
    )
    with whole.open("rb", buffering=0) as source, path.open("wb") as out:
        sparse.copy_stream(source, out)  # type: ignore[arg-type]
    whole.unlink()
    return path


@pytest.mark.live
def test_each_form(tmp_path: Path) -> None:
    kernel = lab.build("memory-6.12").vmlinux.with_name("vmlinuz")
    with panicked(kernel, tmp_path) as qmp:
        elf = dump(qmp, tmp_path)
        ranges = writers.ram_of(elf)
        assert [ram.start >> 30 for ram in ranges] == [0, 4]
        files = {
            pmemsave(qmp, tmp_path, ranges): "raw memory, 8.0 GiB, kernel found",
            migrate(qmp, tmp_path): "QEMU migration, 6.0 GiB, hole at 2 GiB, kernel",
            tmp_path / "ram": "raw memory, 6.0 GiB, hole at 2 GiB, kernel found",
        }
    opened = open_target(TargetSpec(path=str(elf), types="btf")).target
    assert opened.format.startswith("ELF without a note, 6.0 GiB, kernel found")
    assert opened.crash is not None
    assert "Unable to mount root fs" in (opened.crash.message or "")
    plain = writers.without(elf, tmp_path / "plain", b"CORE", b"QEMU")
    expected = answers(plain, *NAMED)
    for path, words in files.items():
        target = open_target(TargetSpec(path=str(path), types="btf")).target
        assert target.format.startswith(words)
        assert target.crash == opened.crash
        assert answers(path, *NAMED) == expected, path.name
        os.unlink(path)
    os.unlink(elf)
    os.unlink(plain)
