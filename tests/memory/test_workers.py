# SPDX-License-Identifier: LGPL-2.1-or-later

"""Workers share a scan with the same results, and always end."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from drgn import Program, ProgramFlags

from fixtures import lab
from msatools.memory import scan as parallel
from msatools.memory.breakdowns import VIEWS
from msatools.memory.memmap import MemmapRange
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.memory.scan import do_in_order
from msatools.memory.sums import ScanResult
from msatools.program import TargetSpec, open_target
from msatools.reports.forms import dumps

COSTS = {"reads", "bytes_read"}
"""Keys in ``coverage`` that depend on the number of workers."""


def in_worker(parent: int) -> bool:
    return os.getpid() != parent


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


HANGS = 120.0
"""Seconds after which a process that must end has hung; it usually ends at once."""


def all_ended(directory: Path) -> bool:
    """Wait until all processes with their PID in a directory have ended."""
    pids = [int(path.name) for path in directory.iterdir()]
    assert pids
    deadline = time.monotonic() + HANGS
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return all(map(has_ended, pids))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_are_taken_in_order(workers: int) -> None:
    taken: list[tuple[int, bool, bytes]] = []
    done: list[int] = []
    parent = os.getpid()

    def large(number: int) -> bytes:
        return bytes([number]) * 3_000_000 if number > 3 else b""

    def work(number: int) -> tuple[int, bool, bytes]:
        # Later pieces are done sooner.
        time.sleep(0.02 * (6 - number))
        return number, in_worker(parent), large(number)

    assert do_in_order(work, 7, workers, taken.append, done.append) == 0
    assert taken == [(number, True, large(number)) for number in range(7)]
    assert sorted(done) == list(range(7))


@pytest.mark.parametrize("victims", [{1}, {0, 1, 2, 3, 4}])
def test_work_of_a_killed_worker_is_done_by_the_parent(victims: set[int]) -> None:
    parent = os.getpid()
    taken: list[tuple[int, bool]] = []
    done: list[int] = []

    def work(number: int) -> tuple[int, bool]:
        if number in victims and in_worker(parent):
            os.kill(os.getpid(), signal.SIGKILL)
        return number, in_worker(parent)

    undone = do_in_order(work, 5, 2, taken.append, done.append)
    assert [number for number, _ in taken] == [0, 1, 2, 3, 4]
    assert undone == sum(not worked for _, worked in taken) >= len(victims & {0, 1})
    assert {number for number, worked in taken if not worked} >= victims & {0, 1}
    assert sorted(done) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("who", ["works", "takes"])
def test_error_is_raised_by_the_parent_and_ends_the_workers(
    tmp_path: Path, who: str
) -> None:
    def work(number: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        if who == "works" and number == 1:
            raise ValueError("enough")
        time.sleep(60 * number if who == "takes" else 0)
        return number

    def take(number: int) -> None:
        taken.append(number)
        if who == "takes":
            raise ValueError("enough")

    taken: list[int] = []
    with pytest.raises(ValueError, match="enough"):
        do_in_order(work, 3, 2, take, lambda _: None)
    assert taken == [0]
    (tmp_path / str(os.getpid())).unlink(missing_ok=True)
    assert all_ended(tmp_path)


@pytest.mark.parametrize("case", ["pipe", "second pipe", "fork", "begin"])
def test_work_is_done_by_the_parent_without_workers(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """No pipe or process can be made, or no worker can begin."""
    pipe, pipes = os.pipe, iter(range(1))

    def refuse() -> int:
        raise BlockingIOError if case == "fork" else PermissionError

    def few_pipes() -> tuple[int, int]:
        if case == "pipe" or next(pipes, None) is None:
            raise OSError(errno.EMFILE, "too many open files")
        return pipe()

    if case == "fork":
        monkeypatch.setattr(os, "fork", refuse)
    if "pipe" in case:
        monkeypatch.setattr(os, "pipe", few_pipes)
    begin = refuse if case == "begin" else lambda: None
    parent = os.getpid()
    taken: list[tuple[int, bool]] = []

    def work(number: int) -> tuple[int, bool]:
        return number, in_worker(parent)

    # Workers that did nothing have ended early; in a sandbox there are none.
    undone = do_in_order(work, 3, 2, taken.append, lambda _: None, begin)
    assert undone == (3 if case == "begin" else 0)
    assert taken == [(number, False) for number in range(3)]


# Ctrl-C on a terminal reaches the workers as well; SIGKILL cannot be handled.
GROUP = """
import os, pathlib, signal, sys, time
from msatools.memory.scan import do_in_order
from msatools.cli.output import Stopped, end_by, stop_on_signals
def work(piece):
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    if piece == 1:
        {act}
    time.sleep(0.5)
    return piece
try:
    with stop_on_signals():
        do_in_order(work, 1000, 3, lambda _: None, lambda _: None)
except Stopped as stopped:
    sys.exit(end_by(stopped.number))
"""


@pytest.mark.parametrize(
    ("act", "number"),
    [
        ("os.killpg(0, signal.SIGINT)", signal.SIGINT),
        ("os.kill(os.getppid(), signal.SIGKILL)", signal.SIGKILL),
    ],
)
def test_signal_to_any_process_ends_all(tmp_path: Path, act: str, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUP.format(act=act), tmp_path],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")
    assert all_ended(tmp_path)


# The installed command with slow workers.
SLOW = """
import os, pathlib, sys, time
from msatools import console
from msatools.memory import scan
pids = pathlib.Path(sys.argv.pop(1))
def slow(*_):
    (pids / str(os.getpid())).touch()
    time.sleep(60)
scan.scan = slow
sys.exit(console.memstat())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_command_leaves_no_processes_or_files(
    run_612: lab.Run, tmp_path: Path, number: int
) -> None:
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-c", SLOW, pids, "-j", "2", run_612.elf]
    process = subprocess.Popen(
        [*map(str, command), "-s", run_612.vmlinux],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    while len(list(pids.iterdir())) < 2 and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    assert process.communicate(timeout=HANGS) == (b"", b"")
    assert process.returncode == -number
    assert all_ended(pids)
    assert list(temporary.iterdir()) == []


def collected(prog: Program, workers: int, by: tuple[str, ...]) -> dict[str, object]:
    """Return a report without costs and times."""
    more = dict.fromkeys(("sections", "verbose"), True)
    if by:
        more |= dict.fromkeys(("frag", "memory_map"), True)
    report = collect_memstat(prog, by=by, workers=workers, **more)
    found: dict[str, object] = json.loads(dumps(report))
    coverage = found["coverage"]
    assert isinstance(coverage, dict)
    for cost in COSTS:
        del coverage[cost]
    found.pop("scan_ns", None)
    return found


@pytest.mark.parametrize("by", [(), ("node", *VIEWS)])
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("memory-6.1", "elf"),
        ("memory-6.12", "elf"),
        ("barepages-6.12", "kdump-lzo"),
        ("barepages-6.12", "flattened"),
    ],
)
def test_any_number_of_workers_gives_the_same_report(
    name: str, format: str, by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_PART_PAGES", 1 << 15)
    spec = TargetSpec(path=str(lab.build(name).dump(format)), types="btf")
    prog = open_target(spec).prog
    one = collected(prog, 1, by)
    assert one["pages"] > 2 * parallel._PART_PAGES
    for workers in (2, 3):
        assert collected(prog, workers, by) == one


def test_report_is_complete_if_workers_are_killed(
    prog: Program, report: MemstatReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    scan = parallel.scan

    def fatal(*args: Any, **options: Any) -> ScanResult:
        if in_worker(parent):
            os.kill(os.getpid(), signal.SIGKILL)
        return scan(*args, **options)

    monkeypatch.setattr(parallel, "scan", fatal)
    found = collect_memstat(prog, workers=2)
    assert found.classes == report.classes
    (note,) = found.notes
    assert note.code == "workers-ended"


def section(nr: int, pages: int = 1 << 15) -> MemmapRange:
    return MemmapRange(nr, "online", True, nr << 15, pages, nr << 21)


LIVE, LOCAL = ProgramFlags.IS_LIVE, ProgramFlags.IS_LOCAL
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("flags", "sections", "default"),
    [
        (ProgramFlags(0), 1, 1),
        (ProgramFlags(0), 31, 1),
        (ProgramFlags(0), 32, min(2, CORES)),
        (ProgramFlags(0), 1 << 20, CORES),
        (LIVE | LOCAL, 1 << 20, 1),
        (LIVE, 1 << 20, 1),
    ],
)
def test_workers_by_default(flags: ProgramFlags, sections: int, default: int) -> None:
    prog = cast(Program, SimpleNamespace(flags=flags))
    ranges = [section(nr) for nr in range(sections)]
    assert parallel.workers_by_default(prog, ranges) == default
    assert parallel.can_share(prog) == (flags != LIVE)


def test_each_worker_of_a_scan_opens_the_kernel_again(
    prog: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(opened: Program) -> None:
        assert opened is prog
        (tmp_path / str(os.getpid())).touch()

    monkeypatch.setattr(parallel, "_open_again", touch)
    collect_memstat(prog, workers=1)
    assert not [*tmp_path.iterdir()]
    collect_memstat(prog, workers=2)
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert pids
    assert os.getpid() not in pids
