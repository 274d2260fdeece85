# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files that commands write: whole or not at all."""

import os
from pathlib import Path

import pytest

from msatools.cli.output import OutputError, check_writable, replace_file


def test_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    for data in (b"first", b"second, and longer"):
        replace_file(str(path), data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "map.svg"
    link.symlink_to("elsewhere/file")
    replace_file(str(link), b"new")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere/file").read_bytes() == b"new"


def test_link_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /tmp, where anyone can lay one."""
    (tmp_path / "precious").write_bytes(b"old")
    (tmp_path / "other").symlink_to("map.svg")
    (tmp_path / "map.svg").symlink_to("precious")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for name in ("map.svg", "other"):
        for write in (check_writable, lambda path: replace_file(path, b"new")):
            with pytest.raises(OutputError, match="a link of another user"):
                write(str(tmp_path / name))
    assert (tmp_path / "precious").read_bytes() == b"old"


def test_old_file_is_kept_if_the_new_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "map.svg"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError, match=r"map.svg: No space left .*; write it"):
        replace_file(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.svg").mkdir()
    os.mkfifo(tmp_path / "p.svg")
    for name, why in (
        ("d.svg", "a directory"),
        ("p.svg", "no regular file"),
        ("none/map.svg", "no such directory"),
    ):
        with pytest.raises(OutputError, match=f"{name}: {why}; "):
            check_writable(str(tmp_path / name))
        with pytest.raises(OutputError, match=f"{name}: {why}; "):
            replace_file(str(tmp_path / name), b"")


def test_directory_that_is_not_writable() -> None:
    """Not even by root, who finds out only as it is tried."""
    with pytest.raises(OutputError, match=r"not writable|write it elsewhere"):
        replace_file("/proc/map.svg", b"")
