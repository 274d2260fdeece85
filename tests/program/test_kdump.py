# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of kdumps are parsed; damaged ones raise errors."""

import struct

import pytest

from msatools.errors import DamagedDataError
from msatools.program import formats
from msatools.program.kdump_pages import check_descriptors
from tests.support.madeelf import reader

BLOCK = 4096
PART = (3, 7)
"""Page frame numbers of this part, where it is one of several."""


def image(
    order: str = "<",
    word: int = 8,
    block: int = BLOCK,
    status: int = 0x1,
    version: int = 6,
    release: bytes = b"6.12.0-test",
    vmcoreinfo: int = 1000,
    split: int = 0,
) -> bytes:
    """Return a kdump of three pages: one of 100 bytes, two that share 50 bytes."""
    utsname = b"".join(
        field.ljust(65, b"\0")
        for field in (b"Linux", b"host", release, b"#1", b"x86_64", b"")
    )
    header = b"KDUMP   " + struct.pack(order + "i", version) + utsname
    header = header.ljust(424 if word == 8 else 412, b"\0")
    header += struct.pack(order + "Iiii", status, block, 1, 2)
    header += bytes(20) + struct.pack(order + "i", 4)  # nr_cpus
    sub = struct.pack(order + ("Q" if word == 8 else "I"), 0)
    sub += struct.pack(order + "ii", 31, split)
    if word == 8:
        sub += struct.pack(order + "QQQQ", *PART[:2], 5000, vmcoreinfo)
        sub += struct.pack(order + "QQQQQQQ", 5000, vmcoreinfo, 0, 0, *PART, 1 << 15)
    bitmaps = b"\xff" * block + b"\x15".ljust(block, b"\0")
    start = 4 * block + 3 * 24
    pages = [(start, 100), (start + 100, 50), (start + 100, 50)]
    table = b"".join(struct.pack(order + "QIIQ", *page, 0, 0) for page in pages)
    blocks = header.ljust(block, b"\0") + sub.ljust(block, b"\0")
    return blocks + bitmaps + table + bytes(150)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("word", [4, 8])
@pytest.mark.parametrize("block", [4096, 65536])
def test_header(order: str, word: int, block: int) -> None:
    data = image(order, word, block)
    header = formats.parse_kdump(reader(data))
    assert header.release == "6.12.0-test"
    assert header.machine == "x86_64"
    assert header.compression == "zlib"
    assert header.dump_level == 31
    assert header.nr_cpus == 4
    assert header.block_size == block
    assert not header.incomplete
    assert header.part is None
    assert check_descriptors(reader(data), header, len(data)) == (0, False)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"status": 0}, "compression", "uncompressed"),
        ({"status": 1}, "compression", "zlib"),
        ({"status": 2}, "compression", "lzo"),
        ({"status": 4}, "compression", "snappy"),
        ({"status": 0x20}, "compression", "zstd"),
        ({"status": 0x9}, "incomplete", True),
        ({"split": 1}, "part", range(3, 7)),
        ({"version": 0}, "dump_level", None),
        ({"version": 0}, "has_vmcoreinfo", None),
        ({"vmcoreinfo": 1000}, "has_vmcoreinfo", True),
        ({"vmcoreinfo": 0}, "has_vmcoreinfo", False),
    ],
)
def test_fields(changes: dict[str, int], field: str, value: object) -> None:
    made = image(**changes)  # type: ignore[arg-type]
    assert getattr(formats.parse_kdump(reader(made)), field) == value


def test_notes_by_version() -> None:
    ranges = {
        version: formats.parse_kdump(reader(image(version=version))).notes
        for version in (2, 3, 4, 6)
    }
    both = (range(5000, 6000), range(5000, 6000), range(0))
    assert ranges == {2: (), 3: both[:1], 4: both, 6: both}


def test_absurd_bitmaps() -> None:
    """Those of 2^31 blocks would be read for hours, if the file has a hole there."""
    data = bytearray(image())
    struct.pack_into("<i", data, 424 + 12, (1 << 31) - 1)
    with pytest.raises(DamagedDataError, match="bitmaps have an impossible size"):
        formats.parse_kdump(reader(bytes(data)))


def test_bitmaps_that_libkdumpfile_takes_for_one() -> None:
    """It finds descriptors by both then, beyond those that are checked: SIGBUS."""
    data = bytearray(image())
    struct.pack_into("<Q", data, BLOCK + 96, (1 << 15) + 1)
    with pytest.raises(DamagedDataError, match="bitmaps are too small"):
        formats.parse_kdump(reader(bytes(data)))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shift", range(12, 19))
def test_header_that_libkdumpfile_reads_otherwise(order: str, shift: int) -> None:
    """It takes 32 bits, if a number where a block's size would be is one."""
    data = bytearray(image())
    struct.pack_into(order + "I", data, 412 + 4, 1 << shift)
    with pytest.raises(DamagedDataError, match="two block sizes"):
        formats.parse_kdump(reader(bytes(data)))
