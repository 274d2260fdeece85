# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs of cases, each in a process of its own.

It is forked from one that has imported all that the commands import, and has read no
dump: what a run does, uses and leaves behind is of its own case alone.
"""

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from fixtures.demo.catalog import DEMOS
from msatools.cli.main import run_console
from msatools.registry import NAMES, load
from tests.fuzz.cases import Case
from tests.fuzz.change import applied, apply_to_file
from tests.fuzz.dumps import dump, path_of
from tests.fuzz.judge import SECONDS, Run, judge

_POLL_S = 0.01
_ROOM = 4 << 30
"""Address space that a run may add, so that the machine survives it."""

_TRIES = 60
"""Runs that making a case smaller may take."""


def warm_up() -> None:
    """Import what the commands import, which takes longer than most runs."""
    core = str(next(iter(DEMOS.values())).core)
    with tempfile.TemporaryDirectory() as directory:
        for command in NAMES:
            for words in ((), ("--json",)):
                modules = Path(directory, "modules")
                _run(command, core, words, Path(directory), modules)
                for name in modules.read_text().splitlines():
                    # Some are no files, but made by other modules.
                    with suppress(ImportError):
                        import_module(name)
    # No run has to look for garbage in all of this.
    gc.collect()
    gc.freeze()


def run_case(case: Case, directory: Path) -> tuple[str, Run]:
    """Return the outcome of a case, and how it ended."""
    path = directory / "vmcore"
    write_dump(case, path)
    run = _run(case.command, str(path), case.arguments, directory)

    def whole() -> Iterator[Run]:
        words = case.command, case.arguments
        yield expected(*words, case.dump.core)
        # What cannot be read is worded differently.
        yield expected(*words, case.dump.core, case.dump.format)

    return judge(case, run, whole()), run


def write_dump(case: Case, path: Path) -> None:
    """Write the changed dump of a case to a file."""
    if isinstance(case.dump.data, bytes):
        path.write_bytes(applied(case.dump.data, case.changes))
        return
    # It has many holes.
    source = str(path_of(case.dump.core))
    subprocess.run(["cp", "--sparse=always", source, str(path)], check=True)
    path.chmod(0o600)
    apply_to_file(path, case.changes)


@cache
def expected(
    command: str, words: tuple[str, ...], core: str, format: str | None = None
) -> Run:
    """Return the run of a command on an undamaged core, as it is or in a format."""
    with tempfile.TemporaryDirectory() as directory:
        path = path_of(core)
        if core in DEMOS and format is not None:
            path = Path(directory, "vmcore")
            path.write_bytes(dump(core, format).data)
        return _run(command, str(path), words, Path(directory))


def smaller(
    case: Case, outcome: str, directory: Path, is_late: Callable[[], bool]
) -> Case:
    """Return the case with as few changes as still have the same outcome."""
    changes = list(case.changes)
    size = len(changes)
    tries = 0
    while size > 1 or len(changes) > 1:
        size = max(size // 2, 1)
        for start in range(0, len(changes), size):
            rest = changes[:start] + changes[start + size :]
            tries += 1
            if tries > _TRIES or is_late():
                return replace(case, changes=tuple(changes))
            less = replace(case, changes=tuple(rest))
            if rest and run_case(less, directory)[0] == outcome:
                changes = rest
                break
        else:
            if size == 1:
                break
    return replace(case, changes=tuple(changes))


def _run(
    command: str,
    path: str,
    words: Iterable[str],
    directory: Path,
    modules: Path | None = None,
) -> Run:
    """Run a command, and write the names of what it has imported into *modules*."""
    started_at = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out, err = directory / "out", directory / "err"
    pid = os.fork()
    if not pid:
        _child(command, [path, "--types", "btf", *words], out, err, modules)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if not ended:
        os.killpg(pid, signal.SIGKILL)
        os.wait4(pid, 0)
    return Run(
        os.waitstatus_to_exitcode(status) if ended else None,
        out.read_text(errors="backslashreplace"),
        err.read_text(errors="backslashreplace"),
        max(usage.ru_maxrss - _resident(started_at), 0) << 10,
    )


def _resident(otherwise: int) -> int:
    """Return this process's memory in KiB, which a forked one has from the start."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return otherwise


def _child(
    command: str, words: list[str], out: Path, err: Path, modules: Path | None
) -> None:
    status = 99
    try:
        os.setsid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(out, flags, 0o600), 1)
        os.dup2(os.open(err, flags, 0o600), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        room = _address_space() + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        status = run_console(load(command), words)
        sys.stdout.flush()
        sys.stderr.flush()
        if modules is not None:
            modules.write_text("\n".join(sys.modules))
    finally:
        os._exit(status)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
