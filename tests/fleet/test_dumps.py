# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which dumps arguments name."""

import errno
import os
import struct
from pathlib import Path

import pytest

from msatools.fleet.dumps import NO_DUMP, Told, find_dumps
from msatools.fleet.single import FleetError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as kdump-tools and others leave it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for name, start in (
        ("a/vmcore", b"KDUMP   "),
        ("a/vmcore-dmesg.txt", b"[    0.0] "),
        ("a/core.elf", b"\x7fELF" + bytes(12) + b"\x04\0"),
        ("a/vmlinux", b"\x7fELF" + bytes(12) + b"\x02\0"),
        ("a/.vmcore.part", b"KDUMP   "),
        ("b/c/flat", b"makedumpfile\0\0\0\0"),
        ("b/c/empty.kdump", b""),
        ("b/c/notes", b"some text"),
        ("b/dmesg.2026", b"[    0.0] "),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(start)
    os.mkfifo(tmp_path / "b/vmcore-fifo")
    (tmp_path / "b/up").symlink_to("..")
    return tmp_path


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (".", "./a/core.elf ./a/vmcore ./b/c/empty.kdump ./b/c/flat"),
        ("a", "a/core.elf a/vmcore"),
        ("b/c/notes nowhere", "b/c/notes nowhere"),
        ("*/vmcore", "a/vmcore"),
        ("**/flat", "b/c/flat"),
        ("[ab]", "a/core.elf a/vmcore b/c/empty.kdump b/c/flat"),
        ("a/vmcore a a/vmcore", "a/vmcore a/core.elf"),
        ("- a/vmcore", "x y/z a/vmcore"),
    ],
)
def test_words(words: str, found: str) -> None:
    listed = ["x\n", "\n", "y/z\n", "x\n"]
    assert [*find_dumps(words.split(), listed)] == found.split()


@pytest.mark.usefixtures("tree")
def test_patterns_that_match_nothing() -> None:
    with pytest.raises(FleetError, match=r"^\*\.none: no such file"):
        [*find_dumps(["*.none"])]


def test_patterns_follow_no_links_to_folders(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lead in circles; a path that is found many ways is looked at many times."""
    (tree / "a/up").symlink_to("..")
    seen: list[str] = []
    realpath = os.path.realpath

    def counting(path: str) -> str:
        seen.append(path)
        assert len(seen) < 10, "goes in circles"
        return realpath(path)

    monkeypatch.setattr("os.path.realpath", counting)
    assert [*find_dumps(["**/vmcore", "[b]/**/flat"])] == ["a/vmcore", "b/c/flat"]
    assert len(seen) == 2


def test_folders_that_cannot_be_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named: root in a test can read all."""
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path.endswith("/c"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    unread: list[OSError] = []
    assert [*find_dumps(["b", "a"], (), Told(unread.append))] == [
        "a/core.elf",
        "a/vmcore",
    ]
    assert [error.filename for error in unread] == ["b/c"]


def test_a_name_may_have_the_signs_of_a_pattern(tree: Path) -> None:
    (tree / "a[1]").write_bytes(b"KDUMP   ")
    assert [*find_dumps(["a[1]"])] == ["a[1]"]


def test_states_of_vmware(tree: Path) -> None:
    """One without the memory lies beside a .vmem, which has it."""
    group = struct.pack("<III64sQQ", 0xBED2BED2, 8, 1, b"memory", 92, 99)
    block = struct.pack("<BB6sQQH", 63, 6, b"Memory", 4096, 4096, 0)
    (tree / "a/with.vmss").write_bytes(group + block + bytes(4098))
    (tree / "a/without.vmss").write_bytes(group + bytes(2))
    (tree / "a/without.vmem").write_bytes(bytes(4096))
    told: dict[str, str] = {}
    found = [*find_dumps(["a"], (), Told(left_out=told.__setitem__))]
    assert {"a/with.vmss", "a/without.vmem"} <= {*found}
    assert "without its memory" in told["a/without.vmss"]


def test_files_that_are_no_dumps_are_told(tree: Path) -> None:
    """But not those that tools write beside dumps."""
    (tree / "a/state").write_bytes(b"QFI\xfb\0\0\0\3")
    (tree / "a/vmcore-dmesg.txt").write_bytes(b"[    0.000000] Linux")
    told: dict[str, str] = {}
    found = find_dumps(["a"], (), Told(left_out=told.__setitem__))
    assert [*found] == ["a/core.elf", "a/vmcore"]
    assert told.pop("a/state") == "a qcow2 disk image, not memory"
    assert {*told.values()} == {NO_DUMP}
    assert "a/vmcore-dmesg.txt" not in told


@pytest.mark.parametrize(
    ("size", "text", "is_one"),
    [
        (64 << 20, b"OSRELEASE=6.12.1\n", True),
        (64 << 20, b"something else", False),
        ((64 << 20) + 512, b"OSRELEASE=6.12.1\n", False),
        (8 << 20, b"OSRELEASE=6.12.1\n", False),
    ],
)
def test_memory_by_what_is_in_it(
    tree: Path, size: int, text: bytes, is_one: bool
) -> None:
    """Of a folder, files of any name that have VMCOREINFO at the start of a page."""
    with (tree / "a/snapshot-17").open("wb") as file:
        file.write(b"\x53\xff\0\xf0" * 64)
        file.truncate(size)
        file.seek(7 << 20)
        file.write(text)
    left: dict[str, str] = {}
    found = [*find_dumps(["a"], (), Told(left_out=left.__setitem__))]
    assert ("a/snapshot-17" in found) == is_one
    assert ("a/snapshot-17" in left) == (not is_one)
