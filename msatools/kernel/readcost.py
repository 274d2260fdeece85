# SPDX-License-Identifier: LGPL-2.1-or-later

"""What an answer costs in reads, as the kernel that we run on counts them.

drgn reads memory as well as we do, so we ask who sees it all: ``/proc/self/io``
(Documentation/filesystems/proc.rst) counts the read calls of this process, which for a
dump or /proc/kcore are those that strace shows.
"""

import contextlib
import importlib
import os

from msatools.kernel.reader import Reader

_COUNT = b"syscr:"


class ReadCost:
    """Counts reads from when it is made, or from the last count."""

    def __init__(self, reader: Reader, of_file: bool) -> None:
        """
        :param reader: Its reads are told where nobody counts all.
        :param of_file: Whether the target is a file; calls to a socket are not counted.
        """
        self._reader = reader
        self._file: int | None = None
        if of_file:
            # What numpy.unique() imports when it is first called would count, too.
            importlib.import_module("numpy.ma")
            # Some kernels are without CONFIG_TASK_IO_ACCOUNTING.
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._calls()

    def reads(self) -> int:
        """Return how many reads there were since the last call."""
        calls = self._calls()
        reads = self._reader.reads
        if calls is not None and self._before is not None:
            # This call is one, which the count does not have yet.
            reads = calls - self._before - 1
        self._before = calls
        return reads

    def _calls(self) -> int | None:
        if self._file is None:
            return None
        text = os.pread(self._file, 4096, 0)
        for line in text.splitlines():
            if line.startswith(_COUNT):
                return int(line[len(_COUNT) :])
        return None
