# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs on Dask's workers: each dump counts once, whatever happens to the workers."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from distributed import Client, wait
from msgspec.structs import replace

from msatools.fleet import run as cluster
from msatools.fleet import run as run_module
from msatools.fleet.buckets import Choice, read_fleet
from msatools.fleet.run import CHANGES, MAX_TRIES, Progress, Report, Run, workers_of
from msatools.fleet.single import Bounds, FleetError, Outcome
from msatools.fleet.store import Results
from tests.fleet import made


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster.local(2, Bounds(memory_bytes=1 << 30, seconds=60)) as client:
        yield client


def run(client: Client, results: Results, paths: list[str], report: Report) -> Progress:
    return Run(client, results, report, results.done()).run(paths)


def dumps(folder: Path, *names: str) -> list[str]:
    """Make files, which are told apart by their paths."""
    for name in names:
        (folder / name).touch()
    return [str(folder / name) for name in names]


def counted(results: Results) -> dict[str | None, int]:
    """Return the sizes of buckets by fingerprint."""
    report = read_fleet(results, Choice())
    return {bucket.fingerprint: bucket.count for bucket in report.buckets}


def states(results: Results) -> Counter[str]:
    return Counter(read_fleet(results, Choice()).states)


def test_each_counts_once(client: Client, tmp_path: Path) -> None:
    results = made.results(tmp_path / "results")
    paths = dumps(tmp_path, "f1-a", "f1-b", "f2-a")
    progress = run(client, results, [*paths, paths[0]], made.by_name)
    assert (progress.finished, progress.skipped, progress.left) == (3, 1, 0)
    assert counted(results) == {"f1": 2, "f2": 1}


def test_a_second_run_does_what_is_left(client: Client, tmp_path: Path) -> None:
    results = made.results(tmp_path / "results")
    paths = dumps(tmp_path, "f1-a", "f1-b", "f2-a")
    run(client, results, paths[:2], made.by_name)
    progress = run(client, results, paths, made.by_name)
    assert (progress.finished, progress.skipped) == (1, 2)
    assert counted(results) == {"f1": 2, "f2": 1}


def test_a_copy_elsewhere_is_known(client: Client, tmp_path: Path) -> None:
    results = made.results(tmp_path / "results")
    first, second = tmp_path / "f1-a", tmp_path / "f1-b"
    head = b"\x7fELF\nOSRELEASE=6.1.0\nCRASHTIME=1795000000\n"
    for path in (first, second):
        path.write_bytes(head)
    progress = run(client, results, [str(first), str(second)], made.by_name)
    assert (progress.finished, progress.skipped) == (1, 1)


class Killer(threading.Thread):
    """Kills workers at random, a number of times, with SIGKILL."""

    def __init__(self, kills: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._kills = kills
        self._pause_s = pause_s
        self._stopped = threading.Event()
        self.killed = 0

    def run(self) -> None:
        dice = random.Random(26)
        while self.killed < self._kills and not self._stopped.wait(self._pause_s):
            pids = [*made.workers_of(os.getpid())]
            if pids:
                os.kill(dice.choice(pids), signal.SIGKILL)
                self.killed += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@pytest.mark.parametrize(
    ("kills", "pause_s"),
    [
        pytest.param(2, 1.0, id="at work"),
        pytest.param(8, 0.3, id="as they start", marks=pytest.mark.long),
    ],
)
def test_workers_that_are_killed(
    client: Client, tmp_path: Path, kills: int, pause_s: float
) -> None:
    """They are replaced, and their dumps are read again.

    Dask's nannies do not replace those that end while they start.
    """
    results = made.results(tmp_path / "results")
    names = [f"f{number % 3}-{number}" for number in range(45)]
    killer = Killer(kills, pause_s)

    def saw(progress: Progress) -> None:
        # Kill until all kills are done: the last dumps wait for that.
        if progress.left <= 2 and killer.is_alive():
            killer.join()

    paths = dumps(tmp_path, *names)
    killer.start()
    progress = Run(client, results, made.slowly, set(), saw).run(paths)
    killer.stop()
    assert killer.killed == kills
    assert progress.states == {"done": 45}
    assert counted(results) == {"f0": 15, "f1": 15, "f2": 15}
    assert made.asked(results, "SELECT count(*) FROM dumps") == [(45,)]


def test_a_dump_that_ends_its_workers(tmp_path: Path) -> None:
    """It is given up at last, and costs no other."""
    results = made.results(tmp_path / "results")
    paths = dumps(tmp_path, "f1-a", "killer-b", "f1-c")
    bounds = Bounds(memory_bytes=1 << 30, seconds=60)
    once = {"distributed.scheduler.allowed-failures": 0}
    with cluster.local(1, bounds, once) as client:
        progress = run(client, results, paths, made.killing)
    assert progress.states == {"done": 2, "crashed": 1}
    (error,) = [dump.error for dump in read_fleet(results, Choice()).lost]
    assert error is not None
    assert error.startswith(f"the cluster gave it up {MAX_TRIES} times: KilledWorker")


def test_what_has_come_is_kept_when_a_run_is_stopped(
    client: Client, tmp_path: Path
) -> None:
    results = made.results(tmp_path / "results")
    paths = dumps(tmp_path, *(f"f1-{number}" for number in range(200)))

    class Stop(BaseException):
        pass

    def saw(progress: Progress) -> None:
        if progress.finished >= 3:
            raise Stop

    with pytest.raises(Stop):
        Run(client, results, made.slowly, set(), saw).run(paths)
    kept = sum(counted(results).values())
    assert 3 <= kept < 200
    progress = run(client, results, paths, made.nothing)
    assert progress.skipped == kept
    assert states(results) == {"done": 200}


HEAD = b"\x7fELF\nOSRELEASE=6.1.0\nCRASHTIME=%d\n"


def replacing(path: str) -> Outcome:
    """Report by what is in a dump, and put another one in its place; for workers."""
    found = Path(path).read_bytes()
    first = HEAD % 1_795_000_000
    if found == first:
        Path(path).write_bytes(HEAD % 1_795_000_001)
    return made.outcome(**made.report("f1" if found == first else "f2"))


def growing(path: str) -> Outcome:
    """Report on a dump that is still written; for workers."""
    with open(path, "ab") as file:
        file.write(b"\0")
    return made.outcome()


def test_a_dump_that_is_replaced_meanwhile_is_read_again(
    client: Client, tmp_path: Path
) -> None:
    """The report of one dump is not stored as that of another."""
    results = made.results(tmp_path / "results")
    dump = tmp_path / "vmcore"
    dump.write_bytes(HEAD % 1_795_000_000)
    progress = run(client, results, [str(dump)], replacing)
    assert (progress.finished, progress.left) == (1, 0)
    assert counted(results) == {"f2": 1}
    assert run(client, results, [str(dump)], replacing).skipped == 1


def test_a_dump_that_is_still_written(client: Client, tmp_path: Path) -> None:
    """It fails, and is not known the next time."""
    results = made.results(tmp_path / "results")
    (path,) = dumps(tmp_path, "vmcore")
    assert run(client, results, [path], growing).states == {"failed": 1}
    assert [dump.error for dump in read_fleet(results, Choice()).lost] == [CHANGES]
    assert Path(path).stat().st_size == MAX_TRIES
    assert run(client, results, [path], made.nothing).states == {"done": 1}
    assert states(results) == {"done": 1}


def other_version(path: str) -> Outcome:
    """Report as msatools of another version does; for workers."""
    return replace(made.nothing(path), version="0.9", worker="web\x1b7")


def without_msatools(path: str) -> Outcome:
    """Fail as the import of it does; for workers."""
    raise ModuleNotFoundError("No module named 'msatools'")


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (other_version, "has msatools 0.9, and this is"),
        (without_msatools, "a worker cannot read dumps: No module named 'msatools'; "),
    ],
)
def test_workers_that_cannot_do_it(
    client: Client, tmp_path: Path, report: Report, said: str
) -> None:
    """That is no dump's fault: the run ends, and none of them is known."""
    results = made.results(tmp_path / "results")
    with pytest.raises(FleetError, match=said):
        run(client, results, dumps(tmp_path, "a", "b"), report)
    assert states(results) == {}


def test_what_is_lost_with_the_last_worker_stops_nothing(tmp_path: Path) -> None:
    """Dask waits for a worker to compute it anew; that there is one is ours to see to.

    The run has workers replaced between two batches of what has come.
    """
    results = made.results(tmp_path / "results")
    with cluster.local(1, Bounds(memory_bytes=1 << 30, seconds=60)) as client:
        future = client.submit(made.nothing, "a", pure=False)
        wait(future)
        client.cluster.scale(0)
        while workers_of(client):
            time.sleep(0.05)
        with patch.multiple(run_module, _FETCH_S=2.0, _FETCH_ONE_S=1.0):
            assert Run(client, results, made.nothing, set())._fetched([future]) == {}
