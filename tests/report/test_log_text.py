# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of kernel logs that are texts, against those of their dumps."""

import io
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msatools.commands.report import COMMAND

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import Opened, TargetError, TargetSpec, log_text, open_target
from msatools.program.description import LogRecord
from msatools.program.log_text import LogBytes, parse_log, read_end
from msatools.report.log import read_log
from msatools.report.model import TriageReport
from msatools.report.report import collect_report
from tests.support.calls import Ran, call
from tests.support.logtext import LINES, decoded, dmesg, dmesg_json, pstore, texts
from tests.support.tiers import KERNEL

CRASHES = (
    *("crashes-null", "crashes-bug", "crashes-stack", "crashes-fault", "crashes-warn"),
    *("crashes-nested", "crashes-oom-group", "crashes-init", "watchdogs-hung"),
)
"""Crashes whose reports one CPU wrote: lines of several cannot be told apart."""

NULL = f"crashes-null-{KERNEL}"
FEW = ("crashes-null", "crashes-oom-group")
EACH = [
    pytest.param(f"{name}-{KERNEL}", marks=[] if name in FEW else [pytest.mark.long])
    for name in CRASHES
]


@cache
def dump(name: str) -> Opened:
    return open_target(TargetSpec(path=str(lab.build(name).kept)))


@cache
def of_dump(name: str) -> TriageReport:
    return collect_report(dump(name).prog, target=dump(name).target)


@cache
def log(name: str) -> tuple[LogRecord, ...]:
    return tuple(read_log(Reader(dump(name).prog), LossLog()))


def opened(text: str | bytes, **more: Any) -> Opened:
    data = text.encode() if isinstance(text, str) else text
    spec = TargetSpec(path="-", takes_logs=True, text=LogBytes(data), **more)
    return open_target(spec)


def report(text: str | bytes, **more: Any) -> TriageReport:
    target = opened(text, **more)
    return collect_report(target.prog, target=target.target)


def lines(records: Sequence[LogRecord], line: Callable[[LogRecord], str]) -> str:
    return "".join(f"{line(each)}\n" for each in records)


def panic(found: TriageReport) -> tuple[str, str, list[str]]:
    """Return what the verdict of the crash says, without what only a text has."""
    (verdict,) = [each for each in found.verdicts if each.code == "panic"]
    evidence = [each.rpartition(" (line ")[0] or each for each in verdict.evidence]
    return verdict.severity, verdict.text, evidence


@pytest.mark.parametrize("name", EACH)
def test_each_form_says_what_the_dump_says(name: str) -> None:
    whole = of_dump(name)
    assert whole.crash is not None
    for form, text in texts(log(name)):
        found = report(text)
        assert found.crash is not None, form
        assert panic(found) == panic(whole), form
        for field in ("cause", "message", "function", "module", "cpu", "pid", "comm"):
            of_text = getattr(found.crash, field)
            assert of_text == getattr(whole.crash, field), (form, field)
        assert found.crash.frames == whole.crash.frames, form
        assert found.crash.fingerprint == whole.crash.fingerprint, form
        assert (found.target.kind, found.target.types) == ("log", None)
        # A part of pstore may begin after the line that has it.
        assert found.target.release == whole.target.release, form
        assert found.target.arch == whole.target.arch, form
        assert not found.faults


def test_line_of_the_text() -> None:
    """Evidence names the line, whatever stands before and between."""
    noise = [f"a line of a program {number}" for number in range(7)]
    text = lines(log(NULL), dmesg).splitlines()
    mixed = "\n".join([*noise, *text[:200], *noise, *text[200:]])
    found = report(mixed)
    assert found.crash is not None
    assert found.crash.line is not None
    assert mixed.splitlines()[found.crash.line - 1].endswith(found.crash.message or "-")
    (verdict,) = [each for each in found.verdicts if each.code == "panic"]
    assert verdict.evidence[0] == f"{found.crash.message} (line {found.crash.line})"
    span = found.target.log
    assert span is not None
    assert (span.lines, span.first_line) == (len(mixed.splitlines()), 8)
    assert span.begins == "0.000000 s"
    assert span.ends == f"{re.findall(r'^.*?([0-9]+[.][0-9]{6})', mixed, re.M)[-1]} s"
    assert mixed.splitlines()[span.last_line - 1] == text[-1]


def test_what_a_text_may_have_beside() -> None:
    """Junk, cut lines, other encodings: the crash is the same."""
    text = lines(log(NULL), dmesg)
    prints = of_dump(NULL).crash.fingerprint  # type: ignore[union-attr]
    half = len(text) // 2
    junk = bytes(range(256)) * 8
    for data in (
        junk + b"\n" + text.encode(),
        text[:half].encode() + junk + text[half:].encode(),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        text.replace("\n", "\r\n").encode(),
        text.replace("\n", "\x1b[0m\n\x1b]0;title\x07").encode(),
        text[half + 3 :].encode(),
        "".join(f"> {line}\n" for line in text.splitlines()).encode(),
        text.encode() + b"\xff\xfe\xfd",
    ):
        found = report(data).crash
        assert found is not None, data[:40]
        assert found.fingerprint == prints, data[:40]


def test_boots() -> None:
    """The last with a crash is shown, or the one that is asked for."""
    crashed = lines(log(NULL), dmesg)
    well = lines(log(NULL)[:300], dmesg)
    found = report(well + crashed + well)
    assert found.crash is not None
    assert found.target.log is not None
    assert (found.target.log.boot, found.target.log.boots) == (2, 3)
    # Some messages have several lines.
    assert found.target.log.first_line == 1 + well.count("\n")
    assert any(note.code == "boots" for note in found.notes)
    last = report(well + crashed + well, kernel=3)
    assert last.crash is None
    assert last.target.log is not None
    assert last.target.log.boot == 3
    with pytest.raises(TargetError, match="a log of 3 boots, and no number 4"):
        report(well + crashed + well, kernel=4)


def test_programs_are_told_apart() -> None:
    """A line of a program is no evidence, where its facility is known."""
    made_up = LogRecord(10**12, 4, "Kernel panic - not syncing: sysrq", 1, None, 1)
    records = (*log(NULL)[:300], made_up)
    for form in ("dmesg -x", "dmesg -r", "journalctl -k", "journalctl -o json"):
        assert report(lines(records, LINES[form])).crash is None, form
    assert report(dmesg_json(records)).crash is None


@pytest.mark.parametrize("host", ["", "db1 "])
@pytest.mark.parametrize(
    ("date", "is_zoned"),
    [
        ("May 01 10:00:00", False),
        ("2026-05-01T10:00:00+0200", True),
        ("2026-05-01T10:00:00.123456+02:00", True),
        ("Fri 2026-05-01 10:00:00 UTC", True),
        ("Fri 2026-05-01 10:00:00 CEST", False),
        ("Fri 2026-05-01 10:00:00 +03", True),
        ("1777777777.123456", True),
    ],
)
def test_journals_of_any_zone_and_without_names(
    date: str, is_zoned: bool, host: str
) -> None:
    """journalctl has the zone of its reader, and --no-hostname."""
    said = ["Linux version 6.1.0 (x) #1 SMP", "Kernel panic - not syncing: x"]
    text = "".join(f"{date} {host}kernel: {each}\n" for each in said)
    text += f"{date} {host}sshd[12]: Kernel panic - not syncing: forged\n"
    found = parse_log(LogBytes(text.encode()))
    assert found is not None
    (boot,) = found.boots
    assert [record.text for record in boot.records] == said
    assert boot.host == (host.strip() or None)
    assert (boot.end_day_ns is not None) == is_zoned


@pytest.mark.parametrize("up_s", [0, 9000])
def test_hosts_in_turn(up_s: int) -> None:
    """What a server of syslog has of several is taken apart."""
    ours = lines(log(NULL), dmesg).splitlines()
    alone = report("".join(f"May 01 10:00:00 db1 kernel: {each}\n" for each in ours))
    text = "".join(
        f"May 01 10:00:00 db1 kernel: {each}\n"
        f"May 01 10:00:00 web1 kernel: [{up_s + number:5}.000000] usb 1-1: fine\n"
        for number, each in enumerate(ours)
    )
    found = report(text)
    assert found.crash is not None
    assert alone.crash is not None
    assert found.machine.host == alone.machine.host == "db1"
    assert found.crash.fingerprint == alone.crash.fingerprint
    assert found.target.release == alone.target.release
    assert any("2 boots of 2 hosts" in note.text for note in found.notes)


def test_host_that_gets_its_name_late() -> None:
    """As in a journal, in each boot: that is no other host."""
    ours = lines(log(NULL), dmesg).splitlines()
    text = "".join(
        f"May 01 10:00:00 {'localhost' if row < 9 else 'db1'} kernel: {each}\n"
        for row, each in enumerate(ours)
    )
    for times in (1, 3):
        found = parse_log(LogBytes((text * times).encode()))
        assert found is not None
        assert len(found.boots) == times


def test_kernel_that_speaks_of_itself() -> None:
    """That is no name of a writer: the lines around it are the kernel's, too."""
    said = ["Linux version 6.1.0 (x) #1", "kernel: x", "EXT4-fs: y", "random: z"]
    text = "".join(f"[Fri May  1 10:00:00 2026] {each}\n" for each in said)
    found = parse_log(LogBytes(text.encode()))
    assert found is not None
    assert [record.text for record in found.boots[0].records] == said


def test_parts_of_pstore_are_put_in_order() -> None:
    text = pstore(log(NULL), lines=20)
    assert text.startswith("Panic#1 Part1\n")
    found = parse_log(LogBytes(text.encode()))
    assert found is not None
    (boot,) = found.boots
    times = [record.time_ns for record in boot.records]
    assert times == sorted(times)


def test_levels() -> None:
    """With them the last lines are those of the dump; without, only of what is told."""
    assert report(lines(log(NULL), decoded)).log == of_dump(NULL).log
    assert report(lines(log(NULL)[:300], dmesg)).log == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no kernel log"),
        ("some text\n" * 50, "no kernel log"),
        ("# A guide\n" * 90 + "[    1.234567] usb 1-1: new device\n", "no kernel log"),
        ("Oops, that went wrong.\nBUG: it does not work\n", "no kernel log"),
        ('{"error": "not found"}\n', "no kernel log"),
    ],
)
def test_texts_that_are_no_logs(text: str, why: str) -> None:
    with pytest.raises(TargetError, match=why):
        opened(text)


def test_files_that_are_no_logs_are_refused_as_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (
        b"<html>" + b"[    1.234567] usb 1-1: new device\n" * 99,
        b"version https://git-lfs.github.com/spec/v1\n",
        b'{"error": "not found"}\n',
        b"some text\n",
        b"\x1f\x8b\x08",
    ):
        path.write_bytes(data)
        errors = []
        for takes_logs in (False, True):
            with pytest.raises(TargetError) as caught:
                open_target(TargetSpec(path=str(path), takes_logs=takes_logs))
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_zeros_of_a_file_system(tmp_path: Path) -> None:
    """A file system that was not unmounted leaves blocks of them within a log."""
    path = tmp_path / "syslog"
    text = lines(log(NULL), dmesg).encode()
    line = text.index(b"\n", 2000) + 1
    path.write_bytes(text[:line] + bytes(200_000) + text[line:-2000] + bytes(200_000))
    found = open_target(TargetSpec(path=str(path), takes_logs=True))
    assert collect_report(found.prog, target=found.target).crash is not None


@pytest.mark.parametrize(
    "words",
    [
        *("task:x state:D ", "INFO: task a:1 blocked "),
        *("BUG: soft lockup - CPU#1 [a:1", "a invoked oom-killer: gfp_mask=0x1"),
    ],
)
def test_words_over_and_over(words: str) -> None:
    """They are cut: what looks for words in them may take the square of its length."""
    text = f"[    1.000000] BUG: a\n[    1.000000] {words * 30_000}\n"
    found = report(text)
    assert "oops" in [verdict.code for verdict in found.verdicts]
    assert all(len(line) < 3000 for line in found.log)


def run(*words: str) -> Ran:
    return call(COMMAND, *words, opening=open_target)


def test_memory_that_has_a_log_in_it(tmp_path: Path) -> None:
    """As a guest's memory has, in the page cache: it is no log."""
    text = lines(log(NULL), dmesg).encode()
    noise = random.Random(1).randbytes(1 << 20)
    path = tmp_path / "guest.mem"
    path.write_bytes(bytes(1 << 20) + noise + b"\n" + text + noise)
    with pytest.raises(TargetError):
        open_target(TargetSpec(path=str(path), takes_logs=True))
    # A log has holes if the machine went down, and some noise of a serial line.
    hole = bytes(1 << 20) + noise[: len(text) // 4] + b"\n"
    path.write_bytes(text * 4 + hole + text * 4)
    assert open_target(TargetSpec(path=str(path), takes_logs=True)).target.kind == "log"


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text(lines(log(NULL), dmesg))
    prints = of_dump(NULL).crash.fingerprint  # type: ignore[union-attr]
    ran = run(str(path))
    assert (ran.status, ran.err) == (0, "")
    first, *_ = ran.out.splitlines()
    release = of_dump(NULL).target.release
    count = path.read_text().count("\n")
    assert first.startswith(f"a kernel log, {count} lines, from 0.000000 s to ")
    assert first.endswith(f" s, of kernel {release}")
    assert f"less -R +{report(path.read_bytes()).crash.line} " in ran.out  # type: ignore[union-attr]
    assert run(str(path), "--fingerprint").out == f"{prints}\n"
    found = json.loads(run(str(path), "--json").out)
    assert found["target"]["kind"] == "log"
    assert {*found["sections"]["memstat"]} == {"error"}
    assert run(str(path), "--strict").status == 0
    for options, why in (
        (("--full",), "leave out --full"),
        (("--types", "btf"), "leave out --types"),
        (("-s", "vmlinux"), "leave out -s"),
    ):
        ran = run(str(path), *options)
        assert ran.status == 1
        assert why in ran.err
    assert run(str(path), "5").status == 2


def test_text_that_is_too_long() -> None:
    """Its end is read; the numbers of lines are those of the whole."""
    text = lines(log(NULL), dmesg).encode()
    before = b"a line of some program or other\n" * (4 << 15)
    end = read_end(io.BytesIO(before + text), most=1 << 20)
    assert len(end.data) < 3 << 20
    assert end.skipped_bytes + len(end.data) == len(before) + len(text)
    found = parse_log(end)
    assert found is not None
    assert found.boots[0].first == (4 << 15) + 1
    target = open_target(TargetSpec(path="-", takes_logs=True, text=end))
    shown = collect_report(target.prog, target=target.target)
    assert shown.target.truncated
    assert shown.coverage["log_unreadable"] == 1
    assert shown.crash is not None
    # No memory is missing: there never was any.
    assert "dump-damaged" not in {verdict.code for verdict in shown.verdicts}


def test_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory, however short it is: the last ones are kept."""
    most = 100
    monkeypatch.setattr(log_text, "MAX_LINES", most)
    text = b"[    1.000000] Linux version 6.1.0 (x) #1 SMP"
    for wide in (False, True):
        data = b"\n" * (most + 5) + text
        if wide:
            data = data.decode().encode("utf-16")
        found = parse_log(LogBytes(data, skipped_bytes=7, skipped_lines=1))
        assert found is not None
        assert found.boots[0].first == found.lines == most + 7
        # Those before the last that are kept, and what was not read before.
        assert found.skipped_bytes == 7 + 6


@pytest.mark.parametrize(
    "line",
    [
        "[Jan45 10:00] a day that no month has",
        f"Panic#{'9' * 5000} Part1",
        f"[    9.000000] CPU: 0 PID: 1 Comm: x Tainted: {' ' * 60_000}",
        f"[    9.000000] CPU: 0 PID: 1 Comm: x Tainted: {'P ' * 30_000}",
        f"[    9.000000] task:{' ' * 60_000}",
    ],
)
def test_lines_that_no_kernel_writes(line: str) -> None:
    """They are no fault of ours; long ones would take the square of their length."""
    text = lines(log(NULL), dmesg)
    found = parse_log(LogBytes(f"{text}{line}\n".encode()))
    assert found is not None
    assert max(len(each.text) for each in found.boots[-1].records) <= 2048
    assert report(f"{text}{line}\n{text}").crash is not None


def test_oops_that_ends_the_log() -> None:
    """Before panic(), as with a capture kernel: that is likely, and not known."""
    oops = (
        "[    1.000000] BUG: kernel NULL pointer dereference, address: 0000000000000",
        "[    1.000000] Oops: Oops: 0000 [#1] PREEMPT SMP NOPTI",
        "[    1.000000] CPU: 1 UID: 0 PID: 7 Comm: a Not tainted 6.12.1 #1 Debian",
        "[    1.000000] RIP: 0010:f+0x1/0x2",
    )
    end = "[    1.000100] ---[ end trace 0000000000000000 ]---"
    (verdict,) = report("\n".join(oops)).verdicts
    assert (verdict.code, verdict.confidence) == ("panic", "likely")
    (verdict,) = report("\n".join([*oops, end])).verdicts
    assert verdict.code == "oops"


OF_OTHER_KERNELS = {
    "old frames": (
        "Jan  1 00:00:01 a kernel: BUG: unable to handle kernel paging request at 8\n"
        "Jan  1 00:00:01 a kernel: Oops: 0002 [#1] SMP \n"
        "Jan  1 00:00:01 a kernel: CPU: 3 PID: 7 Comm: b Tainted: G    B   "
        "       ------------ T 3.10.0-1.el7.x86_64 #1\n"
        "Jan  1 00:00:01 a kernel: RIP: 0010:[<ffffffff81000010>]  "
        "[<ffffffff81000010>] f+0x10/0x20\n"
        "Jan  1 00:00:01 a kernel: Call Trace:\n"
        "Jan  1 00:00:01 a kernel:  [<ffffffff81000030>] g+0x10/0x20\n"
        "Jan  1 00:00:01 a kernel: ---[ end trace 0123456789abcdef ]---\n"
        "Jan  1 00:00:01 a sshd[7]: Kernel panic - not syncing: not at all\n",
        ("oops", "page fault at a bad address in f"),
    ),
    "two lines on a victim": (
        "[Thu Jan  1 00:00:01 2026] a invoked oom-killer: gfp_mask=0xd0, order=0\n"
        "[Thu Jan  1 00:00:01 2026] Task in /x/y killed as a result of limit of /x\n"
        "[Thu Jan  1 00:00:01 2026] memory: usage 8kB, limit 8kB, failcnt 1\n"
        "[Thu Jan  1 00:00:01 2026] Memory cgroup stats for /x/y: cache:0KB\n"
        "[Thu Jan  1 00:00:01 2026] Memory cgroup out of memory: Kill process 8 (b) "
        "score 9 or sacrifice child\n"
        "[Thu Jan  1 00:00:01 2026] Killed process 9 (c) total-vm:8kB, anon-rss:4kB\n",
        ("out-of-memory", "control group /x ran out", "killed pid 9 c (4 KiB anon)"),
    ),
    "hung task": (
        "[  300.000000] INFO: task a:7 blocked for more than 120 seconds.\n"
        "[  300.000000] Call Trace:\n"
        "[  300.000000]  [<ffffffff81000010>] schedule+0x29/0x70\n"
        "[  300.000000]  [<ffffffff81000010>] f+0x29/0x70 [m]\n",
        ("hung-tasks", "1 hung task, 1 time: pid 7 a", "f+0x29/0x70 [m]"),
    ),
    "old watchdogs": (
        "[  300.000000][    C2] NMI watchdog: BUG: soft lockup - CPU#2 stuck for 22s! "
        "[a:7]\n"
        "[  301.000000][    C1] INFO: rcu_sched self-detected stall on CPU\n"
        "[  301.000000][    C1] \t1-...: (99 ticks this GP) idle=1\n",
        ("cpu-stalled", "CPU 2: soft lockup", "rcu-stalled", "CPU 1: RCU stall"),
    ),
    "sleep": (
        "[    1.000000] BUG: scheduling while atomic: a/7/0x00000002\n"
        "[    1.000000] CPU: 0 PID: 7 Comm: a Not tainted 6.1.0 #1\n"
        "[    1.000000] Call Trace:\n"
        "[    1.000000]  dump_stack_lvl+0x44/0x5c\n"
        "[    1.000000]  __schedule_bug.cold+0x4c/0x5d\n"
        "[    1.000000]  __schedule+0x8f0/0x9e0\n"
        "[    1.000000]  schedule_timeout+0x8c/0x160\n"
        "[    1.000000]  msleep+0x2d/0x40\n"
        "[    1.000000]  f+0x20/0x1000 [m]\n",
        ("oops", "BUG in f [m]"),
    ),
    "allocation": (
        "[    1.000000] a: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL)\n"
        "[    1.000000] CPU: 0 PID: 7 Comm: a Not tainted 6.1.0 #1\n"
        "[    1.000000] Call Trace:\n"
        "[    1.000000]  dump_stack_lvl+0x44/0x5c\n"
        "[    1.000000]  warn_alloc.cold+0x7b/0xe3\n"
        "[    1.000000]  __alloc_pages+0x309/0x320\n"
        "[    1.000000]  f+0x20/0x1000 [m]\n",
        ("kernel-warnings", "warned 1 time in f [m]", "page allocation failure"),
    ),
    "other devices": (
        "[    1.000000] md/raid1:md0: Disk failure on sdb1, disabling device.\n"
        "[    1.000000] end_request: I/O error, dev sda, sector 1\n"
        "[    1.000000] blk_update_request: I/O error, dev fd0, sector 0\n"
        "[    1.000000] pcieport 0000:00:1c.0: AER: Uncorrected (Fatal) error "
        "received: 0000:00:1c.0\n"
        "[    1.000000] XFS (dm-2): Metadata CRC error detected at f+0x1/0x2 [xfs]\n"
        "[    1.000000] nfs: server a not responding, still trying\n",
        (
            *("1 hardware error,", "2 I/O errors", "2 errors of a file system"),
            *("Disk failure on sdb1", "AER: Uncorrected"),
            *("Metadata CRC", "nfs: server"),
        ),
    ),
    "devices": (
        "kern  :err   : [    1.000000] EXT4-fs error (device sda1): f:1: comm a: b\n"
        "kern  :err   : [    1.000000] mce: [Hardware Error]: Machine check events\n",
        ("device-errors", "1 hardware error", "1 error of a file system", "(line 1)"),
    ),
}


def test_lines_that_are_no_errors_of_devices() -> None:
    """A healthy machine logs them at each boot."""
    version = "[    0.000000] Linux version 6.1.0 (x) #1 SMP\n"
    found = report(
        f"{version}[    1.000000] nvme nvme0: Shutdown timeout set to 8 seconds\n"
    )
    assert not found.verdicts
    found = report(f"{version}[    1.000000] nvme nvme0: I/O 7 QID 2 timeout, aborting")
    assert [verdict.code for verdict in found.verdicts] == ["device-errors"]


@pytest.mark.parametrize(
    ("line", "arch"),
    [
        ("Internal error: Oops: 805 [#1] SMP ARM", None),
        ("Internal error: Oops: 805 [#1] PREEMPT SMP THUMB2", None),
        ("Internal error: Oops: 0000000096000004 [#1] SMP", "aarch64"),
    ],
)
def test_machine_of_arm(line: str, arch: str | None) -> None:
    text = f"[    0.000000] Linux version 6.1.0 (x) #1 SMP\n[    9.000000] {line}\n"
    assert report(text).target.arch == arch


@pytest.mark.parametrize("name", [*OF_OTHER_KERNELS])
def test_logs_of_other_kernels(name: str) -> None:
    """What no kernel of the lab logs: how older ones, and hardware, report."""
    text, expected = OF_OTHER_KERNELS[name]
    found = report(text)
    assert found.crash is None
    said = "\n".join(
        "\n".join((each.code, each.text, *each.evidence)) for each in found.verdicts
    )
    for words in expected:
        assert words in said
    assert not found.faults


def test_source_that_quotes_a_panic() -> None:
    """One line in a hundred, without times: as a text has that is about kernels."""
    panic = "Kernel panic - not syncing: x"
    source = "\n".join(f"int number_{n} = {n};" for n in range(100))
    assert parse_log(LogBytes(f"{source}\n{panic}\n".encode())) is None
    assert parse_log(LogBytes(f"{panic}\n".encode())) is not None
    started = "Linux version 6.12.1 (a@b) (gcc 12) #1 SMP"
    assert parse_log(LogBytes(f"{started}\n{source}\n".encode())) is not None
