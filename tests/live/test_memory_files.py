# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's memory as QEMU itself writes it, in each form, of a stopped guest.

The guests are a kernel alone, which has panicked for the lack of a root file system, or
one with a process that never rests: QEMU does not migrate the lab's disks.
"""

import gzip
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fixtures import lab
from fixtures.lab import sparse
from fixtures.lab.image import GUEST, cpio_entry
from fixtures.lab.programs import compiled
from fixtures.lab.qmp import Qmp
from fixtures.lab.vm import QEMU
from msatools.program import Target, TargetSpec, open_target
from tests.conftest import Msa
from tests.program.raw import writers
from tests.program.raw.answers import answers

SECONDS = 240.0
PANIC = b"end Kernel panic"
BUSY = b"LAB-BUSY"
STOPS = 20
COPIES = 5
"""By chance one can be whole; 8 in a row had 2 to 17 contradictions each."""


class Machine(NamedTuple):
    """A machine, and where the memory below 4 GiB ends."""

    mib: int
    name: str
    hole: str
    size: str


MACHINES = {
    "1": Machine(1024, "q35", "", "1.0"),
    "4": Machine(4096, "pc", ", hole at 3 GiB", "4.0"),
    # Where no hypervisor ends it by itself.
    "5": Machine(5120, "pc,max-ram-below-4g=2600M", ", hole at 2.53906 GiB", "5.0"),
    "16": Machine(16384, "pc", ", hole at 3 GiB", "16.0"),
}


@contextmanager
def running(
    folder: Path,
    machine: Machine,
    marker: bytes,
    init: Path | None = None,
    *,
    archive: Path | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[Qmp]:
    """Start a kernel with no root file system; give its control once it says so.

    :param init: The guest's first and only program.
    :param archive: Its initramfs, without *init*.
    :param arguments: More of QEMU's.
    """
    kernel = lab.build("memory-6.12").vmlinux.with_name("vmlinuz")
    console = folder / "console"
    size = f"size={machine.mib}M"
    backend = f"memory-backend-file,id=ram,{size},share=on,mem-path={folder}/ram"
    ours, theirs = socket.socketpair()
    if init is not None:
        data = cpio_entry("dev", 0o40755)
        data += cpio_entry("init", 0o100755, init.read_bytes())
        data += cpio_entry("TRAILER!!!", 0)
        archive = folder / "initramfs"
        archive.write_bytes(gzip.compress(data))
    words = [] if archive is None else ["-initrd", str(archive)]
    with ours, theirs:
        command = [
            *(QEMU, "-accel", "tcg", "-machine", f"{machine.name},memory-backend=ram"),
            *("-m", f"{machine.mib}M", "-object", backend, "-cpu", "max", "-smp", "2"),
            *("-kernel", str(kernel), "-append", "console=ttyS0 panic=0", *words),
            *("-display", "none", "-nodefaults", "-no-reboot"),
            *("-serial", f"file:{console}"),
            *("-chardev", f"socket,id=control,fd={theirs.fileno()}"),
            *("-mon", "control,mode=control"),
            *arguments,
        ]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            try:
                qmp = Qmp(ours)
                wait_for(console, marker)
                yield qmp
            finally:
                process.kill()


def wait_for(console: Path, marker: bytes) -> None:
    """Return once a guest's console shows some words."""
    end_s = time.monotonic() + SECONDS
    while not console.exists() or marker not in console.read_bytes():
        assert time.monotonic() < end_s, console.read_bytes()[-2000:]
        time.sleep(0.5)


@contextmanager
def panicked(folder: Path, machine: Machine) -> Iterator[Qmp]:
    """Start a kernel with nothing else; give its control once it is stopped."""
    with running(folder, machine, PANIC) as qmp:
        qmp.execute("stop")
        yield qmp


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


def snapshot(qmp: Qmp, folder: Path) -> Path:
    """Have QEMU write a snapshot with its memory into a qcow2 file (``savevm``)."""
    path = folder / "disk.qcow2"
    for name, options in (
        ("file", {"driver": "file", "filename": str(path), "size": 0}),
        ("disk", {"driver": "qcow2", "file": "file", "size": 1 << 30}),
    ):
        job(qmp, "blockdev-create", options=options)
        del options["size"]
        qmp.execute("blockdev-add", node_name=name, **options)
    for tag in ("first", "second"):
        job(qmp, "snapshot-save", tag=tag, vmstate="disk", devices=["disk"])
    return path


def job(qmp: Qmp, command: str, **arguments: object) -> None:
    """Have QEMU do a job, to its end."""
    qmp.execute(command, job_id="job", **arguments)
    end_s = time.monotonic() + SECONDS
    (found,) = qmp.execute("query-jobs")
    while found["status"] != "concluded":
        assert time.monotonic() < end_s, found
        time.sleep(0.2)
        (found,) = qmp.execute("query-jobs")
    assert "error" not in found, found
    qmp.execute("job-dismiss", id="job")


def dump(qmp: Qmp, folder: Path) -> Path:
    """Have QEMU dump the guest, of whose kernel it knows nothing."""
    path = folder / "elf"
    source, sink = os.pipe()
    with (
        open(source, "rb", buffering=0) as pipe,
        path.open("wb") as out,
        ThreadPoolExecutor(1) as pool,
    ):
        copying = pool.submit(sparse.copy_stream, pipe, out)  # type: ignore[arg-type]
        qmp.execute("getfd", descriptor=sink, fdname="dump")
        os.close(sink)
        qmp.execute(
            "dump-guest-memory", timeout=SECONDS, paging=False, protocol="fd:dump"
        )
        copying.result()
    return path


def opened(path: Path) -> Target:
    """Return what a file is opened as."""
    return open_target(TargetSpec(path=str(path), types="btf")).target


@pytest.mark.live
def test_each_form(tmp_path: Path) -> None:
    named = "memstat", "zombies", "locks", "report"
    with panicked(tmp_path, Machine(6144, "q35", ", hole at 2 GiB", "6.0")) as qmp:
        elf = dump(qmp, tmp_path)
        ranges = writers.ram_of(elf)
        assert [ram.start >> 30 for ram in ranges] == [0, 4]
        hole = "6.0 GiB, hole at 2 GiB, kernel found"
        files = {
            pmemsave(qmp, tmp_path, ranges): "raw memory, 8.0 GiB, kernel found",
            migrate(qmp, tmp_path): f"QEMU migration, {hole}",
            snapshot(qmp, tmp_path): f"savevm 'second', the newest of 2, {hole}",
            tmp_path / "ram": f"raw memory, {hole}",
        }
    target = opened(elf)
    assert target.format.startswith("ELF without a note, 6.0 GiB, kernel found at ")
    assert target.crash is not None
    assert "Unable to mount root fs" in (target.crash.message or "")
    plain = writers.without(elf, tmp_path / "plain", b"CORE", b"QEMU")
    expected = answers(plain, *named)
    for path, words in files.items():
        found = opened(path)
        assert found.format.startswith(words)
        assert (found.crash, found.torn) == (target.crash, 0)
        assert answers(path, *named) == expected, path.name
        os.unlink(path)
    os.unlink(elf)
    os.unlink(plain)


@pytest.mark.live
@pytest.mark.parametrize("size", MACHINES)
def test_each_size(tmp_path: Path, size: str) -> None:
    """All commands say the same as on the ELF dump, wherever the hole is."""
    machine = MACHINES[size]
    with panicked(tmp_path, machine) as qmp:
        elf = dump(qmp, tmp_path)
    memory = tmp_path / "ram"
    words = f"raw memory, {machine.size} GiB{machine.hole}, kernel found at "
    assert opened(memory).format.startswith(words)
    plain = writers.without(elf, tmp_path / "plain", b"CORE", b"QEMU")
    os.unlink(elf)
    assert answers(memory) == answers(plain)
    os.unlink(memory)
    os.unlink(plain)


@pytest.mark.live
def test_a_copy_while_the_guest_ran(msa: Msa, tmp_path: Path) -> None:
    """Contradictions are counted, and a guest that is stopped has none, whenever."""
    init = compiled(GUEST / "busy.c", lab.build("memory-6.12").cache)
    chance = random.Random(1)
    memory, copy = tmp_path / "ram", tmp_path / "copy"
    with running(tmp_path, MACHINES["1"], BUSY, init) as qmp:
        for _ in range(COPIES):
            sparse.copy_file(memory, copy)
            if opened(copy).torn:
                break
        for _ in range(STOPS):
            qmp.execute("stop")
            assert opened(memory).torn == 0
            qmp.execute("cont")
            time.sleep(chance.random() / 10)
    os.unlink(memory)
    torn = opened(copy).torn
    assert torn > 0
    head = msa(copy).stdout.splitlines()[:2]
    plural = "s" if torn > 1 else ""
    assert head[1] == f"{torn} contradiction{plural}: taken from a running guest?"
    ran = msa("--json", "--strict", copy)
    assert ran.returncode == 3
    assert json.loads(ran.stdout)["coverage"]["torn"] == torn
