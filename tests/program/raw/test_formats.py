# SPDX-License-Identifier: LGPL-2.1-or-later

"""Images by forensic tools and streams of QEMU hold what the guest's dump holds."""

import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
from drgn import FaultError

from fixtures import lab
from msatools.program import TargetSpec, open_target
from msatools.program.model import DamagedDumpError, NotADumpError, TargetError
from msatools.program.raw_memory import FileMemory
from tests.program.raw import writers
from tests.program.raw.answers import answers

NAMED = "memstat", "prstat", "zombies"
SECONDS = 10
"""CPU time, which does not depend on what else the machine does."""

WRITERS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "lime": (writers.lime, "LiME, 2.0 GiB, kernel"),
    "raw": (writers.ranges_alone, "raw memory, 2.0 GiB, hole at 0.999"),
    "avml": (writers.avml, "AVML, snappy, "),
    "virtualbox": (writers.virtualbox, "ELF without a note, 2.0 GiB, kernel"),
    "vmware": (writers.vmware, "VMware state, 2.0 GiB, kernel"),
    "migration": (writers.migration, "QEMU migration, 2.0 GiB, hole at 1 GiB, kernel"),
    "savevm": (
        partial(writers.savevm, names=("old", "new")),
        "savevm 'new', 2.0 GiB, hole at 1 GiB, kernel",
    ),
    "virsh": (
        partial(writers.migration, save=True),
        "virsh save, 2.0 GiB, hole at 1 GiB, kernel",
    ),
}


@pytest.fixture(scope="module")
def dump() -> Path:
    """A guest with RAM below and above its hole, half of it each."""
    return lab.build("memory-6.12").dump("elf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("formats")
    yield made
    # Some gigabytes.
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def expected(dump: Path, folder: Path) -> object:
    """The answers on a dump whose registers are left out."""
    plain = writers.without(dump, folder / "elf", b"CORE", b"QEMU")
    found = answers(plain, *NAMED)
    plain.unlink()
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_answers(dump: Path, folder: Path, expected: object, name: str) -> None:
    write, words = WRITERS[name]
    memory = write(dump, folder / name)
    opened = open_target(TargetSpec(path=str(memory), types="btf"))
    assert opened.target.format.startswith(words)
    assert not opened.target.truncated
    assert answers(memory, *NAMED) == expected
    memory.unlink()


@pytest.mark.parametrize("name", ["lime", "avml", "migration", "vmware"])
def test_cut_off(dump: Path, folder: Path, name: str) -> None:
    """What is gone is lost; it does not read as zeros."""
    memory = WRITERS[name][0](dump, folder / name)
    os.truncate(memory, memory.stat().st_size - (1 << 20))
    prog, target = open_target(TargetSpec(path=str(memory), types="btf"))
    assert target.truncated
    with pytest.raises(FaultError, match="not in the file"):
        prog.read((5 << 30) - 4096, 8, True)
    memory.unlink()


def test_kdump_without_the_note(folder: Path) -> None:
    """Its memory is searched, and read page by page."""
    whole = lab.build("memory-6.12").dump("kdump-zlib")
    path = folder / "kdump"
    shutil.copyfile(whole, path)
    with path.open("r+b") as file:
        # Offset and size of VMCOREINFO in struct kdump_sub_header.
        file.seek(4096 + 32)
        file.write(bytes(16))
    found = open_target(TargetSpec(path=str(path), types="btf")).target
    assert found.format.startswith("kdump without a note, 2.0 GiB, kernel found at ")
    expected = answers(whole, "memstat", "zombies")
    assert answers(path, "memstat", "zombies") == expected
    path.unlink()


def test_virsh_save_that_is_compressed(tmp_path: Path) -> None:
    path = tmp_path / "guest save"
    head = (b"LibvirtQemudSave", 2, 10, 1, 3, 0, *[0] * 14)
    path.write_bytes(struct.pack("<16s19I", *head) + bytes(4096))
    with pytest.raises(NotADumpError, match="compressed with xz") as raised:
        open_target(TargetSpec(path=str(path)))
    assert f"`tail -c +103 '{path}' | xz -d > memory`" in raised.value.what_to_do


@pytest.mark.parametrize(
    ("options", "words"),
    [({"apart": True}, "without its memory"), ({"kind": 62}, "compressed memory")],
)
def test_vmware_states_that_are_not_read(
    dump: Path, folder: Path, options: dict[str, int], words: str
) -> None:
    """The line says what to do."""
    path = writers.vmware(dump, folder / "state", **options)
    with pytest.raises(NotADumpError, match=f"VMware guest .* {words}") as raised:
        open_target(TargetSpec(path=str(path)))
    assert "name the .vmem beside it" in raised.value.what_to_do
    path.unlink()


def test_vmware_region_beyond_all_memory(tmp_path: Path) -> None:
    """Numbers have up to 61 bytes there."""
    path = tmp_path / "state"
    values = writers.vmware_value(b"regionsCount", (), 4, struct.pack("<I", 1))
    for name, value in ((b"regionPPN", 1 << 60), (b"regionSize", 1)):
        values += writers.vmware_value(name, (0,), 8, struct.pack("<Q", value))
    block = struct.pack("<QQH", 4096, 4096, 0) + bytes(4096)
    values += writers.vmware_value(b"Memory", (0, 0), 63, block) + bytes(2)
    head = struct.pack("<III64sQQ", 0xBED2BED2, 8, 1, b"memory", 92, len(values))
    path.write_bytes(head + values)
    with pytest.raises(TargetError, match="an impossible region"):
        open_target(TargetSpec(path=str(path)))


def stream(flag: int, before: bytes = b"") -> bytes:
    """Return a stream of QEMU with a page of RAM, and sections before it."""
    size = 1 << 20
    return (
        b"QEVM"
        + struct.pack(">I", 3)
        + before
        + struct.pack(">BI", 1, 2)
        + b"\3ram"
        + struct.pack(">IIQ", 0, 4, size | 4)
        + b"\6pc.ram"
        + struct.pack(">QQ", size, flag)
        + bytes(8192)
    )


@pytest.mark.parametrize(
    ("flag", "name"), [(0x40, "XBZRLE"), (0x100, "compression"), (0x200, "multifd")]
)
def test_streams_that_are_not_read(tmp_path: Path, flag: int, name: str) -> None:
    path = tmp_path / "stream"
    path.write_bytes(stream(flag))
    with pytest.raises(NotADumpError, match=name):
        open_target(TargetSpec(path=str(path)))


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        (b"configuration/target-page-bits", True),
        (b"configuration/capabilities", False),
        (b"configuration/more", False),
    ],
)
def test_parts_of_the_configuration(tmp_path: Path, name: bytes, is_read: bool) -> None:
    """Those that say nothing of pages are passed over; others are refused by name."""
    path = tmp_path / "stream"
    fields = struct.pack(">I", 12) if is_read else b"\0\0\0\1\x0amapped-ram"
    part = struct.pack(">BB", 5, len(name)) + name + struct.pack(">I", 1) + fields
    path.write_bytes(stream(0x10, struct.pack(">BI", 7, 4) + b"virt" + part))
    words = "no Linux kernel|encrypted|an unknown section|zeros" if is_read else None
    words = words or name.decode().rpartition("/")[2].replace("capabilities", "mapped")
    with pytest.raises((NotADumpError, DamagedDumpError), match=words):
        open_target(TargetSpec(path=str(path)))


QCOW2 = b"QFI\xfb", 3, 0, 0, 16, 1 << 30, 0, 4, 2 << 16, 0, 0
BAD_IMAGES = {
    "version": (4, *QCOW2[2:], 1, 1 << 16, 0),
    "clusters": (3, 0, 0, 99, *QCOW2[5:], 1, 1 << 16, 0),
    "no snapshot": (*QCOW2[1:], 0, 0, 0),
    "beyond": (*QCOW2[1:], 1, 1 << 60, 0),
    "many": (*QCOW2[1:], 1 << 30, 1 << 16, 0),
    "encrypted": (*QCOW2[1:6], 2, *QCOW2[7:], 1, 1 << 16, 0),
    "data elsewhere": (*QCOW2[1:], 1, 1 << 16, 4),
    "table beyond": (*QCOW2[1:], 1, 1 << 16, 0),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_disk_images_that_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "disk"
    head = struct.pack(">4sIQIIQIIQQIIQQ", QCOW2[0], *BAD_IMAGES[name])
    state = struct.pack(">QIHHIIQII", 1 << 40, 4, 0, 0, 0, 0, 0, 1 << 20, 0)
    path.write_bytes(head.ljust(1 << 16, b"\0") + state.ljust(1 << 16, b"\0"))
    with pytest.raises((NotADumpError, DamagedDumpError)):
        open_target(TargetSpec(path=str(path)))


LIME = struct.Struct("<IIQQQ")
MAGIC, AVML = 0x4C694D45, 0x4C4D5641
BAD = {
    "overlap": LIME.pack(MAGIC, 1, 0, 15, 0)
    + bytes(16)
    + LIME.pack(MAGIC, 1, 8, 23, 0)
    + bytes(16),
    "backwards": LIME.pack(MAGIC, 1, 16, 8, 0) + bytes(64),
    "far": LIME.pack(MAGIC, 1, 0, (1 << 64) - 1, 0) + bytes(64),
    "no magic": LIME.pack(MAGIC, 1, 0, 15, 0) + bytes(16) + bytes(32),
    "no stream": LIME.pack(AVML, 2, 0, 4095, 0) + b"\xff\6\0\0sNaPpX" + bytes(99),
    "bomb": LIME.pack(AVML, 2, 0, 4095, 0)
    + struct.pack("<II", 0x00 | 9 << 8, 0)
    + b"\xff\xff\xff\xff\x0f"
    + bytes(99),
    "many groups": struct.pack("<III", 0xBED2BED2, 8, 1 << 20) + bytes(99),
    "no regions": struct.pack("<III64sQQ", 0xBED2BED2, 8, 1, b"memory", 92, 99)
    + struct.pack("<BB12sI", 4, 12, b"regionsCount", 2)
    + struct.pack("<BB6sQQH", 63, 6, b"Memory", 4096, 4096, 0)
    + bytes(8192),
    "cut off": struct.pack("<III64sQQ", 0xBED2BED2, 8, 1, b"memory", 1 << 60, 99),
    "large block": b"QEVM"
    + struct.pack(">IBI", 3, 1, 2)
    + b"\3ram"
    + struct.pack(">IIQ", 0, 4, 1 << 40 | 4)
    + b"\6pc.ram"
    + struct.pack(">Q", 1 << 40),
}


@pytest.mark.parametrize("name", BAD)
def test_headers_that_make_no_sense(tmp_path: Path, name: str) -> None:
    path = tmp_path / "memory"
    path.write_bytes(BAD[name])
    with pytest.raises(DamagedDumpError):
        open_target(TargetSpec(path=str(path)))


MUTATED = {
    "lime": writers.lime,
    "avml": writers.avml,
    "vmware": writers.vmware,
    "migration": writers.migration,
    "savevm": writers.savevm,
}
MUTANTS = 100
HEADERS = 700


@pytest.mark.parametrize("name", MUTATED)
def test_damaged_headers(tmp_path: Path, name: str) -> None:
    """Whatever their bytes are, a file without a kernel costs one line."""
    chance = Random(name)
    memory = b"NTOSKRNL" * (1 << 17)
    head = struct.pack("<HHIQQQIHHHHHH", 4, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 4096, 0, 0, len(memory), len(memory), 1)
    elf = tmp_path / "elf"
    front = b"\x7fELF\2\1\1".ljust(16, b"\0") + head + load
    elf.write_bytes(front.ljust(4096, b"\0") + memory)
    path = MUTATED[name](elf, tmp_path / "memory")
    whole = path.read_bytes()
    for _ in range(MUTANTS):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            place = chance.randrange(4, min(HEADERS, len(data)))
            size = chance.choice((1, 2, 4, 8))
            data[place : place + size] = chance.choice(
                (chance.randbytes(size), b"\xff" * size, bytes(size))
            )
        if not chance.randrange(10):
            del data[chance.randrange(4, len(data)) :]
        path.write_bytes(data)
        began = time.process_time()
        with pytest.raises(TargetError):
            open_target(TargetSpec(path=str(path)))
        assert time.process_time() - began < SECONDS


def test_a_chunk_that_is_damaged(dump: Path, folder: Path) -> None:
    """It is lost alone, and does not read as zeros."""
    memory = writers.avml(dump, folder / "avml")
    opened = open_target(TargetSpec(path=str(memory), types="btf"))
    del opened
    whole = FileMemory("ELF", str(dump))
    with memory.open("r+b") as file:
        # Behind the headers of range, stream, and chunk.
        file.seek(32 + 10 + 8 + 4)
        file.write(b"\xff" * 64)
    prog = open_target(TargetSpec(path=str(memory), types="btf")).prog
    with pytest.raises(FaultError, match=r"damaged in the file|not in the file"):
        prog.read(0, 8, True)
    offset = writers.ram_of(dump)[0].offset
    assert prog.read(1 << 20, 64, True) == whole.read(offset + (1 << 20), 64)
