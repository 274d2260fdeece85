# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernel logs that are texts, in a fleet: which count, and in whose bucket they are."""

import shutil
from pathlib import Path

import pytest

from fixtures import lab
from msatools.fleet.buckets import Choice, read_fleet
from msatools.fleet.dumps import Told, find_dumps, identify, result_of
from msatools.fleet.single import Bounds, report_dump
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.report.log import read_log
from tests.fleet.made import results
from tests.support.logtext import dmesg, messages
from tests.support.tiers import KERNEL

WELL = "".join(f"[{number:5}.000000] usb 1-1: new device\n" for number in range(99))


def test_a_copy_is_the_same_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(WELL)
    shutil.copy(tmp_path / "a.log", tmp_path / "b.log")
    (tmp_path / "c.log").write_text(f"{WELL}[  100.000000] usb 1-1: gone\n")
    first, copy, other = (identify(str(tmp_path / f"{name}.log")) for name in "abc")
    assert first.digest == copy.digest != other.digest
    long = WELL + "[  100.000000] usb 1-1: a\n" * 20_000
    ends = {f"[  200.000000] usb 1-1: {each}\n" for each in "xy"}
    logs = [tmp_path / "d.log", tmp_path / "e.log"]
    for path, end in zip(logs, ends, strict=True):
        path.write_text(long + end)
    assert len({identify(str(path)).digest for path in logs}) == 2


def test_logs_count_where_no_dump_is_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (
        ("dump/vmcore", "KDUMP   "),
        ("dump/vmcore-dmesg.txt", WELL),
        ("log/dmesg.202611280221", WELL),
        ("log/kexec-dmesg.log", WELL),
        ("log/notes.txt", "some text\n"),
        ("pstore/dmesg.txt", WELL),
        ("pstore/dmesg-efi-1", f"Panic#1 Part1\n{WELL}"),
        ("page/console.log", f"<html>{WELL}"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(data)
    told: dict[str, str] = {}
    found = [*find_dumps(["."], (), Told(left_out=told.__setitem__))]
    assert found == ["./dump/vmcore", "./log/dmesg.202611280221", "./pstore/dmesg.txt"]
    assert told == {}


@pytest.mark.parametrize("form", [dmesg, messages], ids=lambda form: form.__name__)
def test_log_is_in_the_bucket_of_its_dump(tmp_path: Path, form: object) -> None:
    """And the dump, which says more, stands for both."""
    dump = lab.build(f"crashes-null-{KERNEL}").kept
    prog = open_target(TargetSpec(path=str(dump))).prog
    text = tmp_path / "console.log"
    lines = (form(each) for each in read_log(Reader(prog), LossLog()))  # type: ignore[operator]
    text.write_text("".join(f"{line}\n" for line in lines))
    bounds = Bounds(memory_bytes=1 << 31, seconds=300)
    made = [
        result_of(identify(str(path)), report_dump(str(path), bounds))
        for path in (dump, text)
    ]
    assert [each.state for each in made] == ["done", "done"]
    fleet = read_fleet(results(tmp_path / "results", *made), Choice())
    (bucket,) = fleet.buckets
    assert bucket.count == 2
    assert bucket.representative == str(dump)
