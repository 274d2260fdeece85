# SPDX-License-Identifier: LGPL-2.1-or-later

"""Count a command's reads of a file, and the threads that it starts, with strace."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    calls = f"trace={_READS},write"
    with _traced(argv, ("-y", "-e", calls)) as log:
        return _count(log, os.path.realpath(path))


@dataclass
class Traced:
    """A process, and what it did."""

    program: str = ""
    """The last program that it ran, its arguments and its environment; empty if it was
    forked only, or is a thread."""

    threads: int = 0
    """Number of threads that it started."""


def threads_of(
    argv: Sequence[str | Path], env: Mapping[str, str] | None = None
) -> list[Traced]:
    """
    Return the processes of a command, in the order in which they begin, and their
    threads.

    :param env: Its environment; by default that of this process.
    """
    calls = "trace=execve,clone,clone3"
    # Without stopping at all other calls.
    with _traced(argv, ("--seccomp-bpf", "-v", "-s", "4096", "-e", calls), env) as log:
        return _processes(log)


@contextmanager
def _traced(
    argv: Sequence[str | Path],
    options: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yield the log of a command that ends with status 0."""
    host.require(["strace"])
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        done = subprocess.run(
            ["strace", "-f", *options, "-o", log, *map(str, argv)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=env,
        )
        if done.returncode:
            raise RuntimeError(f"{argv[0]} failed: {done.stderr[-2000:]}")
        yield log.read_text(errors="replace")


def _processes(log: str) -> list[Traced]:
    processes: dict[str, Traced] = {}
    for line in log.splitlines():
        number, call = line.split(maxsplit=1)
        process = processes.setdefault(number, Traced())
        if " = -1 " in call:
            continue
        if call.startswith("execve("):
            process.program = call
        elif "CLONE_THREAD" in call:
            process.threads += 1
    return [*processes.values()]


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
