# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernel logs that are texts of any origin: lines become records like a dump's.

A text is not trusted: its size is bounded, and lines that no kernel wrote are left out.
Only msa-report reads such logs; for dumps this module is not imported.
"""

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import BinaryIO, NamedTuple

from drgn import Program
from msgspec import Struct
from msgspec.structs import replace

from msatools.program.description import OPENED_TEXT, LogRecord
from msatools.program.dumpfile import os_error
from msatools.program.foreign import WIDE, is_text
from msatools.program.log_lines import (
    FEW,
    NS,
    SHARE,
    Clock,
    LineParser,
    LogLine,
    clean_line,
    hosts_of,
)
from msatools.program.model import Target, TargetError

# --- A text as a whole: find the kernel's lines, and the boot of each.


MAX_BYTES = 32 << 20
"""Maximum bytes to read of a text, from its end, where a crash is."""

MAX_LINES = 1 << 20
"""Maximum number of lines to keep, the last ones: even a short one takes memory."""

_MAX_CHARACTERS = 2048
"""Maximum characters to keep of a line: a kernel's lines are shorter, and the time of
some patterns grows with the square of the length."""

_CHUNK = 1 << 20

_VERSION = re.compile(r"Linux version (?P<release>\d\S{0,64}) .*?(?P<build>#\d.*)?$")
_LINUX, _BOOTING = "Linux version ", "Booting Linux on physical CPU "
_RELEASE = re.compile(
    r".*?(?:Not tainted|Tainted: [A-Z-]+(?: +[A-Z-]+)*) +(?P<release>\d\S{0,64}) #",
    re.DOTALL,
)
_WITNESS = re.compile(
    r"Linux version \d+\.\d+.*#\d|Kernel panic - not syncing: |"
    r"CPU: \d+ (UID: \d+ )?PID: \d+ Comm: .* (Not t|T)ainted"
)
"""Lines that only a kernel writes."""

_PSTORE = re.compile(
    r"(?:Panic|Oops|Emergency|Shutdown|Unknown)#(\d{1,18}) Part(\d{1,18})$"
)
_BOOT_MARKS = "-- Boot ", "-- Reboot --"
_RESET_NS = 10 * NS
"""Nanoseconds by which the clock must go back if a line is of another boot."""

_ARCHITECTURES = (
    ("x86_64", re.compile(r"RIP: \w{4}:|BIOS-e820: |x86/|smpboot: |RAX: [0-9a-f]{16}")),
    (
        "aarch64",
        # 32-bit kernels name their instruction set at the end of the line.
        re.compile(
            r"Booting Linux on physical CPU 0x0000|pstate: |"
            r"Internal error: (?!.* (?:ARM|THUMB2)$)"
        ),
    ),
    ("riscv64", re.compile(r"SBI specification|epc : |riscv: ")),
)
_X86 = "x86_64"
_PAGES = re.compile(r"active_anon:(\d{1,15}) inactive_anon:")
_KIB = re.compile(r"Node \d+ active_anon:(\d{1,18})kB")
PAGE_BYTES = 4096

_UNKNOWN_LEVEL = 4
"""printk's own default (CONFIG_MESSAGE_LOGLEVEL_DEFAULT)."""


class Boot(Struct, frozen=True):
    """The lines that a text has of one boot of a kernel."""

    records: tuple[LogRecord, ...]
    begins: str
    """The first time, as the text writes it; empty if there is none."""

    ends: str
    clock: Clock | None
    """The clock of the records' times; ``None`` if these have none."""

    end_day_ns: int | None
    """Time of the last record with a zone, in ns since 1970; ``None`` if no record has
    a zone."""

    host: str | None
    first: int
    """Number of the boot's first line in the text, from 1."""

    last: int


class LogText(Struct, frozen=True):
    """A kernel's log that was opened as a text."""

    boots: tuple[Boot, ...]
    lines: int
    """Number of lines of the text, those of programs and skipped ones included."""

    skipped_bytes: int
    """Number of bytes at the start of the text that were not read."""

    has_levels: bool
    """Whether any line has a level."""

    chosen: int | None = None
    """Number of the requested boot, from 1; ``None`` if none was requested."""


class LogBytes(NamedTuple):
    """The last bytes of a text."""

    data: bytes
    skipped_bytes: int = 0
    """Number of bytes before *data*, which were not kept."""

    skipped_lines: int = 0


def read_end(file: BinaryIO, most: int = MAX_BYTES) -> LogBytes:
    """Read a stream to its end; keep its last bytes, at most *most* and a MiB more."""
    kept, bytes_, lines = bytearray(), 0, 0
    while part := file.read(_CHUNK):
        kept += part
        over = len(kept) - most
        if over > _CHUNK:
            bytes_, lines = bytes_ + over, lines + kept.count(b"\n", 0, over)
            del kept[:over]
    return LogBytes(bytes(kept), bytes_, lines)


def open_log(
    path: str, text: LogBytes | None, chosen: int | None
) -> tuple[Program, Target] | None:
    """Open a text as a kernel's log; ``None`` if it is none.

    :param path: Path of the text, or a name for it.
    :param text: The text that was read; ``None`` to read the file at *path*.
    :param chosen: Number of the requested boot, from 1.
    :return: A program without memory, for :mod:`msatools.report`.
    :raises TargetError: if the log has no such boot, or cannot be read
    """
    if text is None:
        try:
            with open(path, "rb") as file:
                text = read_end(file)
        except OSError as error:
            raise os_error(path, error) from error
        if not is_text(text.data):
            return None
    found = parse_log(text)
    if found is None:
        return None
    if chosen is not None and not 1 <= chosen <= len(found.boots):
        boots = f"{len(found.boots)} boot{'s' if len(found.boots) > 1 else ''}"
        raise TargetError(
            path, f"a log of {boots}, and no number {chosen}", "leave out --kernel"
        )
    prog = Program()
    prog.cache[OPENED_TEXT] = replace(found, chosen=chosen)
    return prog, Target(
        path=path,
        kind="log",
        live=False,
        release=None,
        arch=None,
        page_size=PAGE_BYTES,
        types=None,
        dump_level=None,
        truncated=bool(found.skipped_bytes),
        crash=None,
        format="kernel log",
    )


def parse_log(text: LogBytes) -> LogText | None:
    """Return the log in a text; ``None`` if the text is no log."""
    text = _last_lines(text)
    raw = _in_order(_decoded(text.data).split("\n"), text.skipped_lines + 1)
    texts = [clean_line(line) for _, line in raw]
    parser = LineParser(hosts_of(texts))
    lines = [
        parsed._replace(text=parsed.text[:_MAX_CHARACTERS])
        for (number, _), text in zip(raw, texts, strict=True)
        if (parsed := parser.parse(number, text)) is not None
    ]
    kernel = _of_kernel(lines)
    if not kernel or not _is_log(kernel, sum(1 for text in texts if text)):
        return None
    marks = [
        number
        for (number, _), text in zip(raw, texts, strict=True)
        if text.startswith(_BOOT_MARKS)
    ]
    boots = tuple(_boot(part) for part in _boots_of_each(kernel, marks))
    levels = any(line.level is not None for line in kernel)
    count = text.skipped_lines + len(raw) - (not texts[-1])
    return LogText(boots, count, text.skipped_bytes, levels)


def _last_lines(text: LogBytes) -> LogBytes:
    """Return the last :data:`MAX_LINES` lines of a text, UTF-16 converted to UTF-8."""
    data = text.data
    if data.startswith(WIDE):
        data = data.decode("utf-16", "replace").encode()
    over = data.count(b"\n") + 1 - MAX_LINES
    if over <= 0:
        return text._replace(data=data)
    skipped = len(data.rsplit(b"\n", MAX_LINES)[0]) + 1
    return LogBytes(
        data[skipped:], text.skipped_bytes + skipped, text.skipped_lines + over
    )


def _decoded(data: bytes) -> str:
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "backslashreplace")


def _in_order(lines: Sequence[str], first: int) -> list[tuple[int, str]]:
    """Return number and line, in the order of the log: pstore's parts are reversed."""
    parts: dict[tuple[int, int], list[tuple[int, str]]] = {}
    key = (0, 0)
    for number, line in enumerate(lines, first):
        if line[:1] in "POESU" and (found := _PSTORE.match(line.strip())):
            key = int(found[1]), -int(found[2])
        parts.setdefault(key, []).append((number, line))
    return [each for _, part in sorted(parts.items()) for each in part]


def _of_kernel(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return the lines of the kernel.

    These are the lines with its stamp or its name; if there are none, those that begin
    with a time; if there are none either, those without a time.
    """
    for forms in (("stamp", "kernel"), ("dated",), ("bare",)):
        found = [line for line in lines if line.form in forms and line.text]
        if found:
            return found
    return []


def _is_log(kernel: Sequence[LogLine], count: int) -> bool:
    """Return whether a text is a log, and not one that quotes some lines of one.

    :param kernel: The kernel's lines, not empty.
    :param count: Number of lines of the text that are not empty.
    """
    witnesses = [line.text for line in kernel if _WITNESS.match(line.text)]
    if witnesses:
        # Without any times, a single "Kernel panic" may be in a program's source.
        return (
            kernel[0].form != "bare"
            or len(witnesses) >= min(2, SHARE * count)
            or witnesses[0].startswith(_LINUX)
        )
    if kernel[0].form in ("bare", "dated"):
        # Only times as dmesg writes them: in brackets, or with a comma.
        return (
            kernel[0].form == "dated"
            and len(kernel) >= SHARE * count > 0
            and any(
                re.match(r"\w{3} |.*\d,\d{6}", line.when)
                for line in islice(kernel, FEW)
            )
        )
    return len(kernel) >= FEW or len(kernel) >= SHARE * count


def _boots_of_each(
    lines: Sequence[LogLine], marks: Sequence[int]
) -> list[list[LogLine]]:
    """Return the lines of each boot of each host, by the number of the last line.

    A syslog server mixes lines of several hosts in one text. Two names may also be of
    one host, which gets its own name late in each boot.
    """
    boots = [*_boots(lines, marks)]
    by_host: dict[str, list[LogLine]] = {}
    last = next((line.host for line in lines if line.host), "")
    for line in lines:
        last = line.host or last
        by_host.setdefault(last, []).append(line)
    if len(by_host) < 2:
        return boots
    split = [boot for part in by_host.values() for boot in _boots(part, marks)]
    if len(split) >= len(boots) and not any(map(_comes_back, boots)):
        return boots
    return sorted(split, key=lambda boot: boot[-1].number)


def _comes_back(boot: Sequence[LogLine]) -> bool:
    """Return whether a host has lines both before and after another host's lines."""
    runs = [host for host, _ in groupby(line.host for line in boot if line.host)]
    return len(runs) > len({*runs})


def _boots(lines: Sequence[LogLine], marks: Sequence[int]) -> Iterator[list[LogLine]]:
    """Yield the lines of each boot, the oldest first.

    :param marks: Numbers of the lines by which journalctl separates boots.
    """
    boot: list[LogLine] = []
    highest_ns, has_version = 0, False
    for line in lines:
        is_version = line.text.startswith(_LINUX) and bool(_VERSION.match(line.text))
        ns = line.boot_ns
        fell = ns is not None and ns < highest_ns - _RESET_NS and ns < _RESET_NS
        if boot and bisect(marks, line.number) > bisect(marks, boot[-1].number):
            fell = True
        if boot and (
            fell or (has_version and is_version) or line.text.startswith(_BOOTING)
        ):
            yield boot
            boot, highest_ns, has_version = [], 0, False
        elif boot and is_version and len(boot) > _EARLY:
            # The lines so far are of an earlier boot, whose start is lost.
            yield boot
            boot, highest_ns = [], 0
        boot.append(line)
        has_version |= is_version
        highest_ns = max(highest_ns, ns or 0)
    yield boot


_EARLY = 3
"""Maximum number of lines that a kernel logs before its version."""


def _boot(lines: Sequence[LogLine]) -> Boot:
    stamped = [line for line in lines if line.boot_ns is not None]
    clock: Clock | None = None
    if stamped:
        clock = "boot"
    elif any(line.day_ns is not None for line in lines):
        clock = "day"
    records: list[LogRecord] = []
    last_ns = 0
    for line in lines:
        ns = line.boot_ns if clock == "boot" else line.day_ns
        last_ns = last_ns if ns is None else ns
        records.append(
            LogRecord(
                time_ns=last_ns,
                level=_UNKNOWN_LEVEL if line.level is None else line.level,
                text=line.text,
                tid=line.tid,
                cpu=line.cpu,
                facility=line.facility,
                line=line.number,
                when=None if clock == "boot" else line.when,
            )
        )
    times = [line.when for line in lines if line.when]
    zoned = [line for line in lines if line.is_zoned and line.day_ns is not None]
    numbers = [line.number for line in lines]
    return Boot(
        records=tuple(records),
        begins=times[0] if times else "",
        ends=times[-1] if times else "",
        clock=clock,
        end_day_ns=zoned[-1].day_ns if zoned else None,
        host=next((line.host for line in lines if line.host), None),
        first=min(numbers),
        last=max(numbers),
    )


# --- Facts about the kernel in a log.


class LogFacts(Struct, frozen=True):
    """Facts about the kernel in a boot's lines; ``None`` for those not found."""

    release: str | None = None
    build: str | None = None
    arch: str | None = None
    page_bytes: int | None = None


def facts_of(boot: Boot) -> LogFacts:
    """Return release, build, architecture and page size from a boot's lines."""
    release = build = arch = None
    pages: list[int] = []
    kib: list[int] = []
    for record in boot.records:
        text = record.text
        if build is None and (found := _VERSION.match(text)):
            release, build = found["release"], found["build"]
        elif release is None and "ainted" in text and (found := _RELEASE.match(text)):
            release = found["release"]
        if arch is None:
            names = (name for name, words in _ARCHITECTURES if words.match(text))
            arch = next(names, None)
        if found := _PAGES.match(text):
            pages, kib = [int(found[1])], []
        elif found := _KIB.match(text):
            kib.append(int(found[1]))
    page_bytes = PAGE_BYTES if arch == _X86 else None
    if page_bytes is None and pages and pages[0] and kib:
        # The total in pages, and its parts by node in KiB (mm/show_mem.c).
        shift = (sum(kib) * 1024 // pages[0]).bit_length() - 1
        page_bytes = 1 << shift if 12 <= shift <= 16 else None
    return LogFacts(release, build, arch, page_bytes)
