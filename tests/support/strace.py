# SPDX-License-Identifier: LGPL-2.1-or-later

"""Count a command's system calls that read a file, with strace."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fixtures.lab import host

MARKER = "strace-marker "
"""Prefix of a line on standard error after which reads are counted separately."""

_SECONDS = 300
_READS = "read,pread64,readv,preadv,preadv2"
# With -y, strace shows each descriptor's path: pread64(3</tmp/vmcore>, ...
_CALL = re.compile(r"(?:\d+\s+)?(?P<name>\w+)\(\d+<(?P<path>[^>]*)>(?P<rest>.*)")
_WRITTEN = re.compile(rf'"{MARKER}([^"\\]*)')


def reads_of(argv: Sequence[str | Path], path: Path) -> dict[str, int]:
    """
    Count a command's reads of *path*.

    :return: text of a marker -> number of reads after it; those before the first marker
        are under the empty text.
    """
    host.require(["strace"])
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        calls = f"trace={_READS},write"
        done = subprocess.run(
            ["strace", "-f", "-y", "-e", calls, "-o", log, *map(str, argv)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{argv[0]} failed: {done.stderr[-2000:]}")
        return _count(log.read_text(errors="replace"), os.path.realpath(path))


def _count(log: str, path: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    part = ""
    for line in log.splitlines():
        call = _CALL.match(line)
        if not call:
            continue
        if call["name"] == "write":
            marker = _WRITTEN.search(call["rest"])
            part = marker[1] if marker else part
        elif call["path"] == path:
            counts[part] += 1
    return dict(counts)
