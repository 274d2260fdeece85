# SPDX-License-Identifier: LGPL-2.1-or-later

"""The identity of a dump, from the first part of its file alone.

It is the same wherever the file lies, and differs for each crash: the headers, the
registers of the CPUs and VMCOREINFO, which has the kernel's build, its place in memory
(another after each boot) and the time of the crash, all lie there in every format.
"""

import hashlib
import os
import re
import stat
import struct

from msgspec import Struct

from msatools.errors import DamagedDataError
from msatools.target import kdump
from msatools.target.splitparts import SUB_HEADER_BYTES, common

HEAD_BYTES = 256 << 10
"""Read of each file: headers, VMCOREINFO, and the registers of some 500 CPUs."""

_OSRELEASE = re.compile(rb"\nOSRELEASE=([^\n\0]{1,64})\n", re.ASCII)
_NOTES = re.compile(rb"\n(?:OSRELEASE|BUILD-ID|KERNELOFFSET|CRASHTIME)=[^\n]{1,99}")
"""Lines of VMCOREINFO: which kernel, where it lay, and when it crashed."""

_CRASHTIME = re.compile(rb"\nCRASHTIME=(\d{1,12})\n")
_NODENAME, _RELEASE = slice(12 + 65, 12 + 2 * 65), slice(12 + 2 * 65, 12 + 3 * 65)
"""Members of ``utsname`` in ``struct disk_dump_header``."""

_TIMESTAMP = 12 + 6 * 65 + 6
"""Offset of the ``struct timeval`` in the header of a 64-bit machine."""

END_S = 1 << 33
"""Times are before the year 2242, so that they fit into 64 bits in ns."""


class Identity(Struct, frozen=True, kw_only=True):
    """A dump file, and what its first part says about the crash."""

    path: str
    digest: str
    """Hexadecimal; the same for copies. Starts with ``path-`` if the file could not be
    read, so that nothing but its path is known."""

    size_bytes: int | None
    host: str | None
    release: str | None
    time_ns: int | None
    """When the kernel crashed, or the dump was written; in ns since 1970."""

    error: str | None
    """Why the file cannot be read, if it cannot."""

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
            head = os.pread(file.fileno(), HEAD_BYTES, 0)
    except (OSError, ValueError) as error:
        # ValueError: a null character in the path.
        why = error.strerror if isinstance(error, OSError) else None
        return unknown(path, f"{why or error}; check the path and its permissions")
    kdump_host, kdump_release, written_ns = _kdump_header(head)
    release = _found(_OSRELEASE, head) or kdump_release
    crash_time = _found(_CRASHTIME, head)
    time_ns = _time_ns(int(crash_time or 0)) or written_ns
    common_part = _common_part(head)
    digest = hashlib.sha256(common_part or b"%d\n" % size + head)
    if time_ns is None and not common_part:
        # QEMU's dumps of an idle guest may differ in nothing else.
        digest.update(b"%d\n" % status.st_mtime_ns)
    if not release:
        # Not a dump: what such files have in common means nothing.
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
    """Return what the parts of a split dump have the same; empty for another file.

    ``makedumpfile --split`` wrote them, and they are read together from any of them.
    """
    header = _header(head)
    if header is None or header.part is None:
        return b""
    start = header.block_size
    rest = start + SUB_HEADER_BYTES
    return head[:start] + common(head[start:rest]) + b"".join(_NOTES.findall(head))


def _header(head: bytes) -> kdump.Kdump | None:
    try:
        return kdump.parse(lambda offset, size: head[offset : offset + size])
    except (DamagedDataError, EOFError):
        return None


def unknown(path: str, error: str) -> Identity:
    """Return the identity of a dump that could not be read, so that it is no dump's.

    :param error: Why it could not.
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
    """Return host, release and the time of writing, as far as a header has them."""
    if not head.startswith(kdump.SIGNATURE):
        return None, None, None
    host = _name(head[_NODENAME])
    written_ns = None
    header = _header(head)
    if header is not None and header.is_64:
        layout = header.byteorder + "qq"
        written_ns = _time_ns(*struct.unpack_from(layout, head, _TIMESTAMP))
    return None if host == "(none)" else host, _name(head[_RELEASE]), written_ns


def _name(field: bytes) -> str | None:
    """Return the text in a field of ``struct new_utsname``."""
    return field.partition(b"\0")[0].decode("ascii", "backslashreplace") or None


def _time_ns(seconds: int, microseconds: int = 0) -> int | None:
    """Return a time in ns; ``None`` if it is not one of these centuries."""
    if not (0 < seconds < END_S and 0 <= microseconds < 10**6):
        return None
    return seconds * 10**9 + microseconds * 1000
