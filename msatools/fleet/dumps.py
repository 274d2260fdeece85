# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the dumps that arguments name, identify them, and make their result rows."""

import glob
import hashlib
import os
import re
import stat
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

import msatools
from msatools.errors import DamagedDataError, NotSupportedError
from msatools.fleet.single import NO_REPORT, FleetError, Outcome, parse_report
from msatools.program import formats
from msatools.program.foreign import (
    HEAD_BYTES,
    MEMORY_MAGICS,
    VMWARE_MAGICS,
    may_be_log,
    recognize,
)
from msatools.program.formats import SUB_HEADER_BYTES, common
from msatools.program.raw_formats import vmware_ranges
from msatools.program.raw_memory import FileMemory, MemoryRange, Words, find_words

# --- The dumps that arguments name: files, folders, patterns, and a list.


STDIN = "-"
"""Word for a list on standard input, one path a line."""

_NAMES = (
    *("*vmcore*", "*.kdump", "*.core", "*.dump"),
    *("*.mem", "*.vmem", "*.lime", "memory-ranges"),
)
"""Patterns of names that make a file a dump, whatever it contains."""

_BESIDE = ("*dmesg*", "*.txt", "*.log", "*.json", "*.lock", ".*")
"""Names of files that tools write beside dumps."""

_LEAST_MEMORY, _MEMORY_UNIT = 32 << 20, 1 << 20
"""Minimum size of a file searched as raw memory, and the unit of its size; bytes."""

_MOST_SEARCHED = 1 << 30
"""Maximum bytes searched in one file, which takes less than a second."""

_MOST_EXTENTS = 1 << 16

_ELF, _KDUMP, _FLATTENED = b"\x7fELF", b"KDUMP   ", b"makedumpfile"
_ET_CORE = b"\x04\0"


Unread = Callable[[OSError], object]
"""Called for each folder that cannot be read."""

LeftOut = Callable[[str, str], object]
"""Called with the path and the kind of each file in a folder that is no dump."""

NO_DUMP = "no dump"
"""The kind of a file that is no dump and of no known format."""


class Told(NamedTuple):
    """Callbacks for folders that cannot be read and files that are no dumps."""

    unread: Unread = lambda error: None
    left_out: LeftOut = lambda path, what: None


_NOBODY = Told()


def find_dumps(
    words: Iterable[str],
    listed: Iterable[str] = (),
    told: Told = _NOBODY,
) -> Iterator[str]:
    """Yield the path of each dump once, in the order of the words.

    Each named file counts as a dump; in a folder, only files that look like one do.
    Links to folders are not followed.

    :param listed: Lines of the list, if one of the words is ``-``.
    :param told: Called for each folder that cannot be read, and each file left out.
    :raises FleetError: if a word names nothing
    """
    seen: set[str] = set()
    for word in words:
        for path in _paths(word, listed, told):
            # Several links may lead to one file.
            file = os.path.realpath(path)
            if file not in seen:
                seen.add(file)
                yield path


def _paths(word: str, listed: Iterable[str], told: Told) -> Iterator[str]:
    if word == STDIN:
        lines = (line.rstrip("\n") for line in listed)
        yield from (line for line in lines if line)
    elif os.path.isdir(word):
        yield from _in_folder(word, told)
    elif os.path.exists(word) or not glob.has_magic(word):
        # A missing file gets a row with that error.
        yield word
    else:
        found = sorted(_matching(word))
        if not found:
            raise FleetError(f"{word}: no such file; check the pattern")
        for path in found:
            yield from _in_folder(path, told) if os.path.isdir(path) else (path,)


def _matching(pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches.

    Unlike glob.glob, ``**`` does not follow links to folders: they may form cycles,
    whose paths glob.glob repeats.
    """
    head, stars, tail = pattern.partition("**/")
    if not stars or (head and not head.endswith("/")):
        yield from glob.iglob(pattern)
        return
    for top in glob.iglob(head) if head else (os.curdir,):
        for folder, folders, _ in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            rest = os.path.join(glob.escape(folder), tail)
            yield from _matching(rest if head else rest.removeprefix("./"))


def _in_folder(folder: str, told: Told) -> Iterator[str]:
    """Yield the dumps in a folder and its subfolders, sorted by name.

    A kernel's log counts only without a dump beside it, which has the same crash.
    """
    for parent, folders, files in os.walk(folder, onerror=told.unread):
        folders.sort()
        others: list[tuple[str, str | None]] = []
        has_dump = False
        for name in sorted(files):
            path = os.path.join(parent, name)
            if not os.path.isfile(path):
                continue
            what = None if _is_beside(name) else _what_else(name, path)
            if what is None and not _is_beside(name):
                has_dump = True
                yield path
            else:
                others.append((path, what))
        logs = () if has_dump else _logs([path for path, _ in others])
        for path, what in others:
            if path in logs:
                yield path
            elif what is not None:
                told.left_out(path, what)


def _logs(paths: Sequence[str]) -> Sequence[str]:
    """Return the files that are logs of kernels; *paths* are in one folder."""
    found = [
        path
        for path in paths
        # kexec-dmesg is the log of the capture kernel.
        if not os.path.basename(path).startswith((".", "kexec-dmesg")) and is_log(path)
    ]
    # systemd-pstore joins the parts of a log to dmesg.txt.
    whole = [path for path in found if os.path.basename(path) == "dmesg.txt"]
    return whole or found


def is_log(path: str) -> bool:
    """Return whether a file is a kernel's log, by its first and last bytes."""
    try:
        if not may_be_log(path):
            return False
        # Imported late: few files get here.
        from msatools.program.log_text import LogBytes, parse_log

        with formats.opened(path) as read:
            size = os.path.getsize(path)
            ends = read(0, READ_BYTES), read(max(size - READ_BYTES, 0), READ_BYTES)
    except OSError:
        return False
    return any(parse_log(LogBytes(end)) is not None for end in ends)


def _is_beside(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _BESIDE)


def _what_else(name: str, path: str) -> str | None:
    """Return the kind of a file that is no dump, by its name and its first bytes.

    :return: ``None`` for a dump, and for a file that cannot be read.
    """
    if any(fnmatch(name, pattern) for pattern in _NAMES):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(HEAD_BYTES)
    except OSError:
        return None
    if start.startswith(VMWARE_MAGICS) and not _has_vmware_memory(path):
        return "a state of a VMware guest without its memory"
    # Programs and modules are ELF files as well.
    is_core = start.startswith(_ELF) and start[16:18] == _ET_CORE
    if is_core or start.startswith((_KDUMP, _FLATTENED, *MEMORY_MAGICS)):
        return None
    found = recognize(start)
    if found is not None:
        return found.what
    return None if _has_kernel(path) else NO_DUMP


def _has_vmware_memory(path: str) -> bool:
    try:
        with formats.opened(path) as read:
            return bool(vmware_ranges(read))
    except NotSupportedError:
        return True  # the line that refuses it says why
    except (DamagedDataError, EOFError, OSError):
        return False


def _has_kernel(path: str) -> bool:
    """Return whether a file of no known kind looks like a guest's memory.

    Only the end is searched for VMCOREINFO: the kernel allocates its page early in
    boot, from the highest addresses down. Opening a named file searches all of it.
    """
    try:
        memory = FileMemory("raw memory", path)
        if memory.size < _LEAST_MEMORY or memory.size % _MEMORY_UNIT:
            return False
        extents = deque(memory.filled(), maxlen=_MOST_EXTENTS)
        ranges: list[MemoryRange] = []
        room = _MOST_SEARCHED
        while extents and room > 0:
            start, end = extents.pop()
            start = max(start, end - room)
            room -= end - start
            ranges.append(MemoryRange(start, end - start, start))
        searched = FileMemory("raw memory", path, ranges[::-1])
        return any(find_words(searched, [Words(0, b"OSRELEASE=")]))
    except OSError:
        return False


# --- The identity of a dump, from the first part of its file alone.
#
# Copies have the same identity, and each crash has another one: the headers, the
# registers of the CPUs and VMCOREINFO, which has the kernel's build, its place in
# memory (another after each boot) and the time of the crash, all lie there in every
# format.


READ_BYTES = 256 << 10
"""Bytes read from each file: headers, VMCOREINFO, registers of some 500 CPUs."""

_OSRELEASE = re.compile(rb"\nOSRELEASE=([^\n\0]{1,64})\n", re.ASCII)
_NOTES = re.compile(rb"\n(?:OSRELEASE|BUILD-ID|KERNELOFFSET|CRASHTIME)=[^\n]{1,99}")
"""Lines of VMCOREINFO: which kernel, where it lay, and when it crashed."""

_CRASHTIME = re.compile(rb"\nCRASHTIME=(\d{1,12})\n")
_NODENAME, _RELEASE = slice(12 + 65, 12 + 2 * 65), slice(12 + 2 * 65, 12 + 3 * 65)
"""Bytes of ``nodename`` and ``release`` in ``struct disk_dump_header``."""

_TIMESTAMP = 12 + 6 * 65 + 6
"""Offset of the ``struct timeval`` in the header of a 64-bit machine."""

END_S = 1 << 33
"""End of plausible times, in s since 1970 (year 2242): in ns, 64 bits hold them."""


class Identity(Struct, frozen=True, kw_only=True):
    """A dump file, and the facts about its crash in the first part of the file."""

    path: str
    digest: str
    """Hexadecimal; the same for copies. Starts with ``path-`` if the file could not be
    read, so that nothing but its path is known."""

    size_bytes: int | None
    host: str | None
    release: str | None
    time_ns: int | None
    """When the kernel crashed, or the dump was written, in ns since 1970; ``None`` if
    unknown."""

    error: str | None
    """Why the file cannot be read; ``None`` if it can."""

    @property
    def is_known(self) -> bool:
        """Whether the file could be read."""
        return self.error is None


def identify(path: str) -> Identity:
    """Return the identity of the dump at *path*; the file may be no dump at all."""
    try:
        # Opening a FIFO without a writer would block.
        status = os.stat(path)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            return unknown(path, "not a regular file; name a file that holds a dump")
        with open(path, "rb", buffering=0) as file:
            size = os.lseek(file.fileno(), 0, os.SEEK_END)
            head = os.pread(file.fileno(), READ_BYTES, 0)
            tail = os.pread(file.fileno(), READ_BYTES, max(size - READ_BYTES, 0))
    except (OSError, ValueError) as error:
        # ValueError: a null character in the path.
        why = error.strerror if isinstance(error, OSError) else None
        return unknown(path, f"{why or error}; check the path and its permissions")
    kdump_host, kdump_release, written_ns = _kdump_header(head)
    release = _found(_OSRELEASE, head) or kdump_release
    crash_time = _found(_CRASHTIME, head)
    time_ns = _identity_time_ns(int(crash_time or 0)) or written_ns
    common_part = _common_part(head)
    digest = hashlib.sha256(common_part or b"%d\n" % size + head)
    # Identical logs are copies, wherever they lie.
    is_text = not release and is_log(path)
    if is_text:
        # Logs of one machine may begin alike.
        digest.update(tail)
    if time_ns is None and not common_part and not is_text:
        # QEMU's dumps of an idle guest may differ in nothing else.
        digest.update(b"%d\n" % status.st_mtime_ns)
    if not release and not is_text:
        # Not a dump: such files are never taken for copies of each other.
        digest.update(os.fsencode(os.path.abspath(path)))
    return Identity(
        path=path,
        digest=digest.hexdigest()[:32],
        size_bytes=size,
        host=kdump_host,
        release=release,
        time_ns=time_ns,
        error=None,
    )


def _common_part(head: bytes) -> bytes:
    """Return the bytes that all parts of a split dump share; empty for other files.

    ``makedumpfile --split`` writes the parts; opening one of them opens all.
    """
    header = _header(head)
    if header is None or header.part is None:
        return b""
    start = header.block_size
    rest = start + SUB_HEADER_BYTES
    return head[:start] + common(head[start:rest]) + b"".join(_NOTES.findall(head))


def _header(head: bytes) -> formats.Kdump | None:
    try:
        return formats.parse_kdump(lambda offset, size: head[offset : offset + size])
    except (DamagedDataError, EOFError):
        return None


def unknown(path: str, error: str) -> Identity:
    """Return an identity for an unreadable file, which no dump shares.

    :param error: Why the file could not be read.
    """
    digest = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:32]
    return Identity(
        path=path,
        digest=f"path-{digest}",
        size_bytes=None,
        host=None,
        release=None,
        time_ns=None,
        error=error,
    )


def _found(pattern: re.Pattern[bytes], head: bytes) -> str | None:
    found = pattern.search(head)
    return found[1].decode("ascii", "backslashreplace") if found else None


def _kdump_header(head: bytes) -> tuple[str | None, str | None, int | None]:
    """Return host, release and time of writing in ns; ``None`` for each unknown one."""
    if not head.startswith(formats.KDUMP_SIGNATURE):
        return None, None, None
    host = _name(head[_NODENAME])
    written_ns = None
    header = _header(head)
    if header is not None and header.is_64:
        layout = header.byteorder + "qq"
        written_ns = _identity_time_ns(*struct.unpack_from(layout, head, _TIMESTAMP))
    return None if host == "(none)" else host, _name(head[_RELEASE]), written_ns


def _name(field: bytes) -> str | None:
    """Return the text in a field of ``struct new_utsname``."""
    return field.partition(b"\0")[0].decode("ascii", "backslashreplace") or None


def _identity_time_ns(seconds: int, microseconds: int = 0) -> int | None:
    """Return a time in ns since 1970; ``None`` if it is 0 or beyond :data:`END_S`."""
    if not (0 < seconds < END_S and 0 <= microseconds < 10**6):
        return None
    return seconds * 10**9 + microseconds * 1000


# --- Rows of the results: one a dump, and one a verdict, from the JSON of its report.


Row = Mapping[str, object]

VERSION = msatools.__version__
"""Version of new reports; a dump whose report has another version is read again."""

_CODE = re.compile("[a-z][a-z0-9-]{0,39}")
"""What the code of a verdict looks like."""


class Result(Struct, frozen=True, kw_only=True):
    """The rows of one dump."""

    dump: Row
    verdicts: tuple[Row, ...]

    @property
    def state(self) -> str:
        """The state of the dump: see :data:`.single.State`."""
        return str(self.dump["state"])


def result_of(identity: Identity, outcome: Outcome) -> Result:
    """Return the rows of a dump, ready to be stored."""
    try:
        return _result(identity, outcome)
    except (AttributeError, KeyError, TypeError, ValueError):
        # The printing process has read the dump: its output is untrusted.
        broken = replace(outcome, state="crashed", error=NO_REPORT, report=None)
        return _result(identity, broken)


def _result(identity: Identity, outcome: Outcome) -> Result:
    report = parse_report(outcome.report) if outcome.report else {}
    result = uuid.uuid4().hex
    return Result(
        dump={
            "result": result,
            "identity": identity.digest,
            "path": _text(identity.path),
            "size_bytes": identity.size_bytes,
            "state": outcome.state,
            "error": _text(outcome.error),
            "version": VERSION,
            "finished_ns": time.time_ns(),
            "seconds": outcome.seconds,
            "worker": _text(outcome.worker),
            **_of_header(identity, report),
            **_of_crash(report.get("crash") or {}),
            "report": _text(outcome.report),
        },
        verdicts=tuple(_verdicts(result, identity.digest, report)),
    )


def _of_header(identity: Identity, report: Mapping[str, Any]) -> Row:
    """Return the columns on machine and kernel, from the headers and the report."""
    machine = report.get("machine") or {}
    target = report.get("target") or {}
    host = _text(machine.get("host"))
    return {
        # makedumpfile copies it from init_uts_ns, which the report reads as well.
        "host": identity.host or (None if host == "(none)" else host),
        "release": identity.release or _text(target.get("release")),
        "arch": _text(target.get("arch")),
        "format": _text(target.get("format")),
        "truncated": bool(target.get("truncated")) if report else None,
        "time_ns": _rows_time_ns(machine.get("time_ns")) or identity.time_ns,
        "uptime_ns": _number(machine.get("uptime_ns")),
        "cpus": _number(machine.get("cpus")),
        "ram_bytes": _number(machine.get("ram_bytes")),
    }


def _of_crash(crash: Mapping[str, Any]) -> Row:
    names = ("cause", "message", "function", "module", "taints", "comm", "fingerprint")
    numbers = ("cpu", "pid")
    return {
        **{name: _text(crash.get(name)) for name in names},
        **{name: _number(crash.get(name)) for name in numbers},
        "frames": _texts(crash.get("frames")),
    }


def _verdicts(result: str, identity: str, report: Mapping[str, Any]) -> Iterator[Row]:
    for rank, verdict in enumerate(report.get("verdicts") or ()):
        if not _CODE.fullmatch(verdict["code"]):
            raise ValueError(NO_REPORT)
        names = ("code", "severity", "confidence", "text")
        yield {
            "result": result,
            "identity": identity,
            "rank": rank,
            **{name: _storable(verdict[name]) for name in names},
            "see": _text(verdict.get("see")),
            "evidence": _texts(verdict.get("evidence")),
        }


def _text(value: object) -> str | None:
    return _storable(value) if isinstance(value, str) else None


def _texts(values: Any) -> list[str]:
    return [_storable(str(value)) for value in values or ()]


def _storable(text: str) -> str:
    # Parquet has UTF-8 only, and JSON may have halves of surrogate pairs.
    return text.encode("utf-8", "backslashreplace").decode()


def _number(value: object) -> int | None:
    """Return an integer that fits into a 64-bit column; ``None`` for other values."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number:
        return None
    assert isinstance(value, int)
    return value if -(1 << 63) <= value < 1 << 63 else None


def _rows_time_ns(value: object) -> int | None:
    """Return a time in ns since 1970; ``None`` if it is no number or implausible."""
    number = _number(value)
    return number if number is not None and 0 < number < END_S * 10**9 else None
