# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's memory as hypervisors and forensic tools write it, from its ELF dump.

The layouts are written down here once more, from the formats' own descriptions: nothing
is taken from the code that reads them.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import cramjam
import numpy as np

from fixtures.lab import sparse
from msatools.program import formats
from msatools.program.formats import opened, reader_of
from msatools.program.kdump_pages import KdumpPages

_BLOCK = 1 << 16
_AT_ONCE = 4096
_AVML_BYTES = 16 << 20
_FIRMWARE = range(0xF0000000, 1 << 32)
"""Where QEMU has its firmware, which is no RAM."""


class Ram(NamedTuple):
    """A range of a guest's RAM, and where it lies in its ELF dump."""

    start: int
    size: int
    offset: int


def ram_of(dump: Path) -> list[Ram]:
    """Return the ranges of RAM in an ELF dump by QEMU, one for each that touch."""
    with opened(str(dump)) as read:
        loads = list(formats.parse_elf(read).loads)
    merged: list[Ram] = []
    for each in sorted(loads, key=lambda load: load.address):
        if each.address in _FIRMWARE:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.start + last.size == each.address
            and last.offset + last.size == each.offset
        ):
            merged[-1] = last._replace(size=last.size + each.size)
        else:
            merged.append(Ram(each.address, each.size, each.offset))
    return merged


def blocks(dump: Path, ram: Ram) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a range that are not zeros, by offset in it."""
    with dump.open("rb", buffering=0) as file:
        read = reader_of(file.fileno())
        for offset in range(0, ram.size, _BLOCK):
            data = read(ram.offset + offset, min(_BLOCK, ram.size - offset))
            if data.count(0) != len(data):
                yield offset, data


def _write(dump: Path, ram: Ram, out: BinaryIO, position: int) -> None:
    for offset, data in blocks(dump, ram):
        out.seek(position + offset)
        out.write(data)


def packed(dump: Path, out: Path) -> Path:
    """Write what a memory-backend-file, Firecracker, Cloud Hypervisor and VMware have.

    All RAM follows each other, without the hole.
    """
    position = 0
    with out.open("wb") as file:
        for ram in ram_of(dump):
            _write(dump, ram, file, position)
            position += ram.size
        file.truncate(position)
    return out


def identical(dump: Path, out: Path) -> Path:
    """Write what QEMU's ``pmemsave 0 SIZE`` has: addresses are offsets."""
    all_ram = ram_of(dump)
    with out.open("wb") as file:
        for ram in all_ram:
            _write(dump, ram, file, ram.start)
        file.truncate(all_ram[-1].start + all_ram[-1].size)
    return out


def lime(dump: Path, out: Path) -> Path:
    """Write what LiME has: a header, and then each range of RAM."""
    position = 0
    with out.open("wb") as file:
        for ram in ram_of(dump):
            file.seek(position)
            last = ram.start + ram.size - 1
            file.write(struct.pack("<IIQQQ", 0x4C694D45, 1, ram.start, last, 0))
            _write(dump, ram, file, position + 32)
            position += 32 + ram.size
        file.truncate(position)
    return out


def ranges_alone(dump: Path, out: Path) -> Path:
    """Write what LiME's format=raw has: the ranges of System RAM alone.

    Firmware keeps the first page, the last KiB below 640 KiB, the BIOS, and the end of
    the lower part (arch/x86/kernel/e820.c; /proc/iomem of the lab's guests).
    """
    lower, *upper = ram_of(dump)
    assert lower.start == 0
    first, low, kept = (0x1000, 0x9FC00), 0x100000, 0x29000
    position = 0
    with out.open("wb") as file:
        for start, end in (first, (low, lower.size - kept)):
            _write(dump, Ram(start, end - start, lower.offset + start), file, position)
            position += end - start
        for ram in upper:
            _write(dump, ram, file, position)
            position += ram.size
        file.truncate(position)
    return out


def virtualbox(dump: Path, out: Path) -> Path:
    """Write what ``VBoxManage debugvm dumpvmcore`` has: notes of its own, and RAM.

    There are a note of the machine and one of each CPU, none of them as in other cores.
    """
    all_ram = ram_of(dump)
    notes = b""
    for name, kind, size in ((b"VBCORE", 0xB00, 20), (b"VBCPU", 0xB01, 1024)):
        head = struct.pack("<III", len(name) + 1, size, kind)
        notes += head + name.ljust(8, b"\0") + struct.pack("<I", 0xC01AC0DE)
        notes += bytes(size - 4)
    count = 1 + len(all_ram)
    position = 64 + 56 * count
    header = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header += struct.pack(
        "<HHIQQQIHHHHHH", 4, 62, 1, 0, 64, 0, 0, 64, 56, count, 0, 0, 0
    )
    header += struct.pack("<IIQQQQQQ", 4, 4, position, 0, 0, len(notes), len(notes), 0)
    position = -(-(position + len(notes)) // 4096) * 4096
    places = []
    for ram in all_ram:
        fields = position, ram.start, ram.start, ram.size, ram.size, 4096
        header += struct.pack("<IIQQQQQQ", 1, 7, *fields)
        places.append((ram, position))
        position += ram.size
    with out.open("wb") as file:
        file.write(header + notes)
        for ram, place in places:
            _write(dump, ram, file, place)
        file.truncate(position)
    return out


def avml(dump: Path, out: Path) -> Path:
    """Write what AVML has: ranges of some MiB, each a stream of snappy's frames.

    Ranges that are all zeros are left out.
    """
    with out.open("wb") as file, dump.open("rb") as source:
        for ram in ram_of(dump):
            for start in range(0, ram.size, _AVML_BYTES):
                size = min(_AVML_BYTES, ram.size - start)
                source.seek(ram.offset + start)
                data = source.read(size)
                if data.count(0) == size:
                    continue
                stream = bytes(cramjam.snappy.compress(data))
                first = ram.start + start
                last = first + size - 1
                file.write(struct.pack("<4sIQQQ", b"AVML", 2, first, last, 0))
                file.write(stream + struct.pack("<Q", len(stream)))
    return out


def vmware_value(
    name: bytes, indices: tuple[int, ...], kind: int, data: bytes
) -> bytes:
    """Return a value of VMware's: its tag, name, indices and data."""
    tag = struct.pack("<BB", len(indices) << 6 | kind, len(name))
    return tag + name + struct.pack(f"<{len(indices)}I", *indices) + data


def vmware(dump: Path, out: Path, *, kind: int = 63, apart: bool = False) -> Path:
    """Write what a .vmss with the memory in it has: groups of values, one a block.

    :param kind: The kind of the block of memory: 62 if it is compressed.
    :param apart: Whether to leave the memory out, as if it were in a .vmem.
    """
    all_ram = ram_of(dump)
    page, total = 4096, sum(ram.size for ram in all_ram)
    cpu = vmware_value(b"cpu:numVCPUs", (), 4, struct.pack("<I", 2))
    cpu += vmware_value(b"rip", (1,), 8, bytes(8))
    cpu += vmware_value(b"gpregs", (0,), 63, struct.pack("<QQH5x", 8, 8, 5) + bytes(8))
    memory = vmware_value(b"align_mask", (0, 3), 4, bytes(4))
    memory += vmware_value(b"regionsCount", (), 4, struct.pack("<I", len(all_ram)))
    position = 0
    for number, ram in enumerate(all_ram):
        for name, value in (
            (b"regionPageNum", position),
            (b"regionPPN", ram.start),
            (b"regionSize", ram.size),
        ):
            memory += vmware_value(name, (number,), 4, struct.pack("<I", value // page))
        position += ram.size
    start = 12 + 2 * 80
    place = start + len(cpu) + 2 + len(memory)
    if not apart:
        # The block begins at a multiple of a page.
        before = place + 2 + 2 + len(b"Memory") + 4 + 18
        block = struct.pack("<QQH", total, total, -before % page)
        memory += vmware_value(b"Memory", (0, 0), kind, block + bytes(-before % page))
    with out.open("wb") as file:
        file.write(struct.pack("<III", 0xBED2BED2, 8, 2))
        file.write(struct.pack("<64sQQ", b"cpu", start, len(cpu) + 2))
        file.write(struct.pack("<64sQQ", b"memory", start + len(cpu) + 2, total))
        file.write(cpu + bytes(2) + memory)
        position = file.tell()
        for ram in () if apart else all_ram:
            _write(dump, ram, file, position)
            position += ram.size
        file.truncate(position)
        file.seek(position)
        file.write(bytes(2))
    return out


def migration(dump: Path, out: Path, *, save: bool = False) -> Path:
    """Write what ``migrate`` to a file has, up to the first device.

    :param save: Whether libvirt's header of ``virsh save`` goes first.
    """
    all_ram = ram_of(dump)
    total = sum(ram.size for ram in all_ram)
    page = 4096
    with out.open("wb") as file:
        if save:
            xml = b"<domain/>\0"
            head = (b"LibvirtQemudSave", 2, len(xml), 1, 0, 0, *[0] * 14)
            file.write(struct.pack("<16s19I", *head) + xml)
        file.write(b"QEVM" + struct.pack(">I", 3))
        machine = b"pc-q35-7.2"
        file.write(struct.pack(">BI", 7, len(machine)) + machine)
        file.write(struct.pack(">BI", 1, 2) + b"\3ram" + struct.pack(">II", 0, 4))
        video = 16 << 20
        file.write(struct.pack(">Q", total + video | 4))
        file.write(b"\6pc.ram" + struct.pack(">Q", total))
        file.write(b"\x08vga.vram" + struct.pack(">Q", video))
        file.write(struct.pack(">QBI", 0x10, 0x7E, 2))
        file.write(struct.pack(">BI", 3, 2))
        file.write(struct.pack(">QB", 0 | 2, 8) + b"vga.vram" + b"\0")
        position, name = 0, b"\6pc.ram"
        with dump.open("rb") as source:
            for ram in all_ram:
                source.seek(ram.offset)
                for _ in range(0, ram.size, page):
                    data = source.read(page)
                    flag = 0 if name else 0x20
                    if data.count(0) == page:
                        file.write(struct.pack(">Q", position | 2 | flag) + name)
                        file.write(b"\0")
                    else:
                        file.write(struct.pack(">Q", position | 8 | flag) + name)
                        file.write(data)
                    position, name = position + page, b""
        file.write(struct.pack(">QBI", 0x10, 0x7E, 2))
        file.write(struct.pack(">BI", 4, 5) + b"\5timer" + struct.pack(">II", 0, 2))
    return out


def savevm(dump: Path, out: Path, *, names: tuple[str, ...] = ("snap",)) -> Path:
    """Write what ``savevm`` has: a qcow2 image with the stream behind its disk.

    :param names: Names of the snapshots; the last one has the guest.
    """
    stream = migration(dump, out.with_suffix(".stream"))
    cluster, entries = 1 << 16, 1 << 13
    disk = 3 * entries * cluster + 512
    size = stream.stat().st_size
    clusters = -(-size // cluster)
    tables = -(-clusters // entries)
    first = 4  # headers, snapshots, and two L1 tables
    data_at = (first + tables) * cluster
    with out.open("wb") as file, stream.open("rb") as source:
        file.write(struct.pack(">4sIQIIQII", b"QFI\xfb", 3, 0, 0, 16, disk, 0, 4))
        file.write(struct.pack(">QQIIQQ", 2 * cluster, 0, 0, len(names), cluster, 0))
        file.seek(cluster)
        for number, name in enumerate(names, 1):
            is_last = number == len(names)
            head = 2 + is_last, 4 + tables, 1, len(name), 0, 0, 0, 0, 16
            file.write(struct.pack(">QIHHIIQII", head[0] * cluster, *head[1:]))
            file.write(struct.pack(">QQ", size if is_last else 0, disk))
            file.write(b"1" + name.encode())
            file.seek(-file.tell() % 8, 1)
        file.seek(3 * cluster + 4 * 8)
        for table in range(tables):
            file.write(struct.pack(">Q", 1 << 63 | (first + table) * cluster))
        for number in range(clusters):
            data = source.read(cluster)
            place = 1 << 63 | data_at + number * cluster
            file.seek(first * cluster + number * 8)
            if data.count(0) == len(data):
                file.write(struct.pack(">Q", 1))
                continue
            file.write(struct.pack(">Q", place))
            file.seek(data_at + number * cluster)
            file.write(data)
    stream.unlink()
    return out


def without(dump: Path, out: Path, *names: bytes) -> Path:
    """Copy an ELF dump; notes of these names get another."""
    sparse.copy_file(dump, out)
    with opened(str(dump)) as read:
        (notes,) = (each for each in formats.parse_elf(read).segments if each.kind == 4)
        head = read(0, notes.offset + notes.size)
    for name in names:
        # The name of a note follows its header.
        sized = struct.pack("<I", len(name) + 1)
        assert head.count(name + b"\0") >= 1
        assert sized in head
        head = head.replace(name + b"\0", b"x" * len(name) + b"\0")
    with out.open("r+b") as file:
        file.write(head)
    return out


def from_kdump(dump: Path, out: Path) -> Path:
    """Write packed RAM from a kdump by QEMU, which has every page of RAM."""
    pages = KdumpPages(str(dump))
    size = pages.page_size
    position = 0
    with out.open("wb") as file:
        for first in range(0, pages.pfns.stop, _AT_ONCE):
            pfns = range(first, min(first + _AT_ONCE, pages.pfns.stop))
            found = pages.read(np.array(pfns, np.int64))
            for pfn, page in zip(pfns, found, strict=True):
                if page is None or pfn * size in _FIRMWARE:
                    continue
                if page.count(0) != len(page):
                    file.seek(position)
                    file.write(page)
                position += size
        file.truncate(position)
    return out
