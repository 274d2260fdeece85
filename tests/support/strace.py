# SPDX-License-Identifier: LGPL-2.1-or-later

"""How often a command reads a file, as the kernel sees it."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fixtures.lab import host

MARKER = "strace-marker "
"""What a command may write to standard error to part its reads."""

_SECONDS = 300
_READS = "read,pread64,readv,preadv,preadv2"
# With -y each descriptor is followed by its file's path: pread64(3</tmp/vmcore>, ...
_CALL = re.compile(r"(?:\d+\s+)?(?P<name>\w+)\(\d+<(?P<path>[^>]*)>(?P<rest>.*)")
_SAID = re.compile(rf'"{MARKER}([^"\\]*)')


def reads_of(argv: Sequence[str | Path], path: Path) -> dict[str, int]:
    """
    Count the reads of *path* that a command makes.

    :return: How many follow each marker that it writes, by the marker's text; what
        comes before the first is under the empty text.
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
            said = _SAID.search(call["rest"])
            part = said[1] if said else part
        elif call["path"] == path:
            counts[part] += 1
    return dict(counts)
