# SPDX-License-Identifier: LGPL-2.1-or-later

"""Identities of dumps: the same for copies, others for other crashes."""

import os
import shutil
from pathlib import Path

import pytest

from fixtures.demo import DEMOS
from msatools.fleet.dumps import READ_BYTES, Identity, identify
from tests.fleet.dumps import DAY, START, copy_dump, cut_off, overwrite
from tests.support.calls import CORE

CORE_612 = Path(CORE)


def made(tmp_path: Path, name: str, host: str, time_s: int = START) -> Identity:
    return identify(str(copy_dump(CORE_612, tmp_path / name, host, time_s)))


def test_what_the_header_says(tmp_path: Path) -> None:
    found = made(tmp_path, "a", "web7")
    assert found.host == "web7"
    assert found.release == "6.12.117+deb12-cloud-amd64"
    assert found.time_ns == START * 10**9
    assert found.size_bytes == CORE_612.stat().st_size
    assert (found.error, found.is_known) == (None, True)


def test_a_copy_is_the_same_dump(tmp_path: Path) -> None:
    first = made(tmp_path, "a", "web7")
    shutil.copy(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b", (1, 1))
    os.link(tmp_path / "a", tmp_path / "c")
    (tmp_path / "d").symlink_to("a")
    digests = {identify(str(tmp_path / name)).digest for name in "bcd"}
    assert digests == {first.digest}


def test_other_dumps_are_others(tmp_path: Path) -> None:
    found = [
        made(tmp_path, "a", "web7"),
        made(tmp_path, "b", "web8"),
        made(tmp_path, "c", "web7", START + 1),
        identify(str(DEMOS["6.1"].core)),
        identify(CORE),
    ]
    cut_off(tmp_path / "a", 1 << 20)
    found.append(identify(str(tmp_path / "a")))
    assert len({each.digest for each in found}) == len(found)


def test_crash_time_of_vmcoreinfo_goes_first(tmp_path: Path) -> None:
    path = copy_dump(CORE_612, tmp_path / "a", "web7", START + DAY)
    text = b"\nOSRELEASE=6.6.6\nCRASHTIME=%d\n" % START
    overwrite(path, 5000, text)
    found = identify(str(path))
    assert (found.time_ns, found.release) == (START * 10**9, "6.6.6")


def test_dumps_without_a_time_go_by_the_file(tmp_path: Path) -> None:
    """Of a guest that does nothing, QEMU writes the same twice."""
    path = made_elf(tmp_path / "a")
    before = identify(str(path))
    os.utime(path, ns=(1, 1))
    after = identify(str(path))
    assert before.time_ns is after.time_ns is None
    assert before.digest != after.digest


def made_elf(path: Path) -> Path:
    path.write_bytes(b"\x7fELF" + bytes(60) + b"\nOSRELEASE=6.1.0\n" + bytes(100))
    return path


def test_what_is_no_dump_goes_by_its_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    found = [identify(str(tmp_path / name)) for name in ("a", "b")]
    assert found[0].digest != found[1].digest
    assert (found[0].release, found[0].time_ns, found[0].size_bytes) == (None, None, 0)


@pytest.mark.parametrize("kind", ["nothing", "folder", "fifo", "null\0"])
def test_what_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    found = identify(str(path))
    assert not found.is_known
    assert found.digest.startswith("path-")
    assert found.digest == identify(str(path)).digest
    assert (found.size_bytes, found.host, found.time_ns) == (None, None, None)


def test_garbage_in_headers(tmp_path: Path) -> None:
    """Whatever is there, no more than the head is read."""
    import random

    dice = random.Random(26)
    path = copy_dump(CORE_612, tmp_path / "a", "web7")
    for _ in range(200):
        overwrite(path, dice.randrange(12, 4600), dice.randbytes(8))
        found = identify(str(path))
        assert found.is_known
        assert found.time_ns is None or 0 < found.time_ns < 1 << 63
    assert path.stat().st_size > READ_BYTES
