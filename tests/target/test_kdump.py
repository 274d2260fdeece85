# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of kdumps are parsed; damaged ones raise errors."""

import struct

import pytest

from msatools.target import kdump
from tests.support.madeelf import reader

BLOCK = 4096


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
        sub += struct.pack(order + "QQQQ", 0, 0, 5000, vmcoreinfo)
    bitmaps = b"\xff" * block + b"\x15".ljust(block, b"\0")
    start = 4 * block + 3 * 24
    pages = [(start, 100), (start + 100, 50), (start + 100, 50)]
    table = b"".join(struct.pack(order + "QIIQ", *page, 0, 0) for page in pages)
    blocks = header.ljust(block, b"\0") + sub.ljust(block, b"\0")
    return blocks + bitmaps + table + bytes(150)


def flatten(pieces: list[tuple[int, bytes]], end: bool = True) -> bytes:
    head = (b"makedumpfile\0\0\0\0" + struct.pack(">qq", 1, 1)).ljust(4096, b"\0")
    body = b"".join(
        struct.pack(">qq", offset, len(data)) + data for offset, data in pieces
    )
    return head + body + (b"\xff" * 16 if end else b"")


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("word", [4, 8])
@pytest.mark.parametrize("block", [4096, 65536])
def test_header(order: str, word: int, block: int) -> None:
    data = image(order, word, block)
    header = kdump.parse(reader(data))
    assert header.release == "6.12.0-test"
    assert header.machine == "x86_64"
    assert header.compression == "zlib"
    assert header.dump_level == 31
    assert header.nr_cpus == 4
    assert header.block_size == block
    assert not header.incomplete
    assert not header.split
    assert kdump.end(reader(data), header) == len(data)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"status": 0}, "compression", "uncompressed"),
        ({"status": 1}, "compression", "zlib"),
        ({"status": 2}, "compression", "lzo"),
        ({"status": 4}, "compression", "snappy"),
        ({"status": 0x20}, "compression", "zstd"),
        ({"status": 0x9}, "incomplete", True),
        ({"split": 1}, "split", True),
        ({"version": 0}, "dump_level", None),
        ({"version": 0}, "has_vmcoreinfo", None),
        ({"vmcoreinfo": 1000}, "has_vmcoreinfo", True),
        ({"vmcoreinfo": 0}, "has_vmcoreinfo", False),
    ],
)
def test_fields(changes: dict[str, int], field: str, value: object) -> None:
    made = image(**changes)  # type: ignore[arg-type]
    assert getattr(kdump.parse(reader(made)), field) == value


@pytest.mark.parametrize("size", [4, 300, 430, BLOCK + 4])
def test_file_cut_off_within_its_headers(size: int) -> None:
    with pytest.raises(EOFError):
        kdump.parse(reader(image()[:size]))


@pytest.mark.parametrize("size", [2 * BLOCK, 3 * BLOCK, 4 * BLOCK + 30])
def test_file_cut_off_within_its_tables(size: int) -> None:
    read = reader(image()[:size])
    with pytest.raises(EOFError):
        kdump.end(read, kdump.parse(read))


def test_kdump_without_pages() -> None:
    data = bytearray(image())
    data[2 * BLOCK : 4 * BLOCK] = bytes(2 * BLOCK)
    read = reader(bytes(data))
    assert kdump.end(read, kdump.parse(read)) == 4 * BLOCK


def test_garbage() -> None:
    with pytest.raises(ValueError, match="not a kdump"):
        kdump.parse(reader(b"garbage!" * 100))
    with pytest.raises(ValueError, match="block size"):
        kdump.parse(reader(b"KDUMP   " + b"\x7e" * 1000))


def test_unflatten_sorts_pieces() -> None:
    plain = image()
    pieces = [(BLOCK, plain[BLOCK : 2 * BLOCK]), (0, b"?" * BLOCK), (0, plain[:BLOCK])]
    read = kdump.unflatten(reader(flatten(pieces)))
    assert kdump.parse(read) == kdump.parse(reader(plain))


def test_unflatten_does_not_keep_page_data() -> None:
    plain = image()
    pieces = [(1 << 40, bytes(100)), (0, plain[: 2 * BLOCK])]
    read = kdump.unflatten(reader(flatten(pieces)))
    assert kdump.parse(read).release == "6.12.0-test"
    assert read(1 << 40, 1) == b""


def test_flattened_file_cut_off_within_its_headers() -> None:
    data = flatten([(0, image())], end=False)
    for size in (4096, 4100, 4500):
        with pytest.raises(EOFError):
            kdump.unflatten(reader(data[:size]))


def test_piece_at_a_negative_offset() -> None:
    with pytest.raises(ValueError, match="negative"):
        kdump.unflatten(reader(flatten([(-5, b"x")])))


def test_end_marker() -> None:
    assert kdump.is_flat_complete(flatten([(0, b"x")])[-16:])
    assert not kdump.is_flat_complete(flatten([(0, b"x" * 16)], end=False)[-16:])
    assert not kdump.is_flat_complete(b"\xff" * 8)
