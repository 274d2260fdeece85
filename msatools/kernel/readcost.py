# SPDX-License-Identifier: LGPL-2.1-or-later

"""Number of reads that a report takes.

drgn itself reads memory too, so :class:`.Reader` does not see all reads.
``/proc/self/io`` (Documentation/filesystems/proc.rst) counts all read calls of the
process, which for an ELF dump or /proc/kcore are those that strace shows. A kdump is
mapped into memory by libkdumpfile and takes no calls: there the reader's reads count.
"""

import contextlib
import os

from msatools.kernel.reader import Reader

_CALLS = b"syscr:"


class ReadCost:
    """Counts reads since it was made, or since the previous count."""

    def __init__(self, reader: Reader, of_file: bool) -> None:
        """
        :param reader: Counts its own reads, for targets that are not read by calls,
            and for kernels without ``/proc/self/io``.
        :param of_file: Whether the target is a file; calls on a socket are not counted.
        """
        self._reader = reader
        self._file: int | None = None
        if of_file:
            # Some kernels lack CONFIG_TASK_IO_ACCOUNTING.
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._calls()

    def reads(self) -> int:
        """Return the number of reads since the last call.

        It is at least the number of reads that the reader has made for the report.
        """
        calls = self._calls()
        reads = self._reader.reads
        if calls is not None and self._before is not None:
            # The previous pread() of the file counts now: it did not include itself.
            reads = max(reads, calls - self._before - 1)
        self._before = calls
        return reads

    def _calls(self) -> int | None:
        if self._file is None:
            return None
        text = os.pread(self._file, 4096, 0)
        for line in text.splitlines():
            if line.startswith(_CALLS):
                return int(line[len(_CALLS) :])
        return None
