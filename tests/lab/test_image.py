# SPDX-License-Identifier: LGPL-2.1-or-later
import gzip
import lzma
import stat
from pathlib import Path

import pytest

from fixtures.lab import image
from fixtures.lab.errors import LabError


def module(depends: str) -> bytes:
    return f"\x7fELF\0license=GPL\0depends={depends}\0name=x\0".encode("latin-1")


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """x-tables is needed by ip_tables; loop is built in."""
    (tmp_path / "modules.builtin").write_text("kernel/drivers/block/loop.ko\n")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/x_tables.ko").write_bytes(module(""))
    packed = lzma.compress(module("x_tables"))
    (tmp_path / "net/ip_tables.ko.xz").write_bytes(packed)
    return tmp_path


def test_dependencies_come_first_and_once(modules: Path) -> None:
    order = image.load_order(modules, ["ip_tables", "x_tables", "loop"])
    assert [m.name for m in order] == ["x_tables", "ip_tables"]
    assert order[1].data == module("x_tables")


def test_unknown_module_is_an_error(modules: Path) -> None:
    with pytest.raises(LabError, match="no module nothing"):
        image.load_order(modules, ["nothing"])


def test_depends_of_a_module() -> None:
    assert image.depends_of(module("a,b")) == ["a", "b"]
    assert image.depends_of(module("")) == []
    assert image.depends_of(b"\x7fELF") == []


def test_cpio_entry_is_aligned_and_says_its_sizes() -> None:
    entry = image.cpio_entry("init", stat.S_IFREG | 0o755, b"12345")
    assert entry.startswith(b"070701")
    assert len(entry) % 4 == 0
    assert int(entry[6 + 8 : 6 + 16], 16) == stat.S_IFREG | 0o755
    assert int(entry[6 + 6 * 8 : 6 + 7 * 8], 16) == 5
    assert entry[110:115] == b"init\0"
    assert entry[116:121] == b"12345"


def test_initramfs_is_the_same_each_time() -> None:
    made = [image.initramfs(b"busybox", [image.Module("m", b"m")]) for _ in range(2)]
    assert made[0] == made[1]
    content = gzip.decompress(made[0])
    for name in (b"init\0", b"bin/busybox\0", b"modules/00-m.ko\0", b"TRAILER!!!\0"):
        assert name in content


def test_guest_half_of_every_scenario_is_there() -> None:
    for scenario in ("memory", "crash", "bench"):
        for path in image.guest_files(scenario).values():
            assert path.is_file()
