# SPDX-License-Identifier: LGPL-2.1-or-later

"""300 dumps end in the right buckets, whatever becomes of workers and runs."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures import lab
from fixtures.demo import DEMOS
from msatools.fleet.buckets import Choice, read_fleet
from msatools.fleet.store import MARK, Results
from tests.fleet.dumps import DAY, START, copy_dump, cut_off, overwrite
from tests.fleet.made import asked, workers_of
from tests.fleet.program import file_of
from tests.report.expected import SCENARIOS

pytestmark = pytest.mark.long

KERNELS = ("6.1", "6.12")
COPIED = ("crashes-null", "crashes-bug", "crashes-stack")
"""Scenarios whose dumps are kdumps, which can be copied as those of other hosts."""

ONCE = ("crashes-gpf", "crashes-fault", "crashes-warn")
COPIES, DEMO_COPIES, DAMAGED = 4, 119, 10

Counts = Counter[tuple[str | None, str | None]]
"""Dumps by cause and function of the crash."""


def _copies() -> Iterator[tuple[Path, str]]:
    """Yield what is copied, and the scenario."""
    for kernel in KERNELS:
        for name in COPIED:
            for _ in range(COPIES):
                yield lab.build(f"{name}-{kernel}").kept, name
        for _ in range(DEMO_COPIES):
            yield DEMOS[kernel].core, "demo"


def make_fleet(folder: Path) -> Counts:
    """Make the dumps; return how many there are of what, by the lab's own truth."""
    counts: Counts = Counter()
    number = 0
    for number, (source, name) in enumerate(_copies()):
        host = f"host{number % 40}"
        time_s = START + number % 20 * DAY + number
        copy_dump(source, folder / host / f"{number}.kdump", host, time_s)
        counts[_died(name)] += 1
    for kernel in KERNELS:
        for name in ONCE:
            path = folder / f"{name}-{kernel}" / "vmcore"
            path.parent.mkdir()
            path.symlink_to(lab.build(f"{name}-{kernel}").kept)
            counts[_died(name)] += 1
    # A copy of a dump that is there is no other dump.
    shutil.copy(folder / "host0" / "0.kdump", folder / "again.kdump")
    _make_damaged(folder / "damaged")
    (folder / "hangs.core").write_text(file_of("hang"))
    (folder / "eats.core").write_text(file_of("eat"))
    return counts


def _died(name: str) -> tuple[str | None, str | None]:
    died = None if name == "demo" else SCENARIOS[name].died
    return (None, None) if died is None else (died.cause, died.function)


def _make_damaged(folder: Path) -> None:
    """Make dumps that cannot be opened, each in its own way."""
    for number in range(DAMAGED):
        names = [folder / f"{kind}{number}.kdump" for kind in ("cut", "lost", "odd")]
        for name in names:
            copy_dump(DEMOS["6.12"].core, name, f"bad-{name.stem}", START + number)
        cut_off(names[0], 1000 + 300 * number)
        overwrite(names[1], 0, b"DAMAGED!")
        # The table of page descriptors is beyond the end.
        overwrite(names[2], 424 + 12, b"\xff\xff\xff\x7f")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Counts]]:
    folder = tmp_path_factory.mktemp("fleet")
    yield folder, make_fleet(folder)
    shutil.rmtree(folder)


def start(folder: Path, results: Path) -> "subprocess.Popen[bytes]":
    words = (sys.executable, "-m", "tests.fleet.runner", folder, results, "2")
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def rows(results: Path) -> int:
    """Return the number of dumps that are stored."""
    if not (results / MARK).exists():
        return 0
    ((count,),) = asked(Results(str(results)), "SELECT count(*) FROM dumps")
    assert isinstance(count, int)
    return count


def check(results: Path, counts: Counts) -> None:
    """Check that each dump is where it belongs, and none is lost or there twice."""
    report = read_fleet(Results(str(results)), Choice())
    found: Counts = Counter()
    for bucket in report.buckets:
        found[bucket.cause, bucket.function] += bucket.count
    assert found == counts
    # One bug is one bucket, on both kernels.
    assert len(report.buckets) == len(counts)
    assert report.states == {
        "done": counts.total(),
        "failed": 3 * DAMAGED + 1,
        "timeout": 1,
    }
    lost = {Path(dump.path).name: dump for dump in report.lost}
    assert lost["hangs.core"].state == "timeout"
    assert lost["eats.core"].error == "MemoryError"
    assert all(name[:3] in ("cut", "los", "odd", "han", "eat") for name in lost)
    assert report.buckets[0].count == 2 * DEMO_COPIES
    assert len(report.buckets[0].hosts) == 40


def test_all_at_once(fleet: tuple[Path, Counts], tmp_path: Path) -> None:
    folder, counts = fleet
    assert counts.total() + 3 * DAMAGED + 2 == 300
    assert start(folder, tmp_path / "results").wait() == 0
    check(tmp_path / "results", counts)


def test_workers_that_are_killed(fleet: tuple[Path, Counts], tmp_path: Path) -> None:
    folder, counts = fleet
    results = tmp_path / "results"
    dice = random.Random(26)
    killed = 0
    with start(folder, results) as process:
        while killed < 10:
            # At any moment of the next dumps.
            wait_for(process, results, rows(results) + 5)
            time.sleep(dice.random())
            workers = [*workers_of(process.pid)]
            if workers:
                os.kill(dice.choice(workers), signal.SIGKILL)
                killed += 1
        assert process.wait() == 0
    check(results, counts)


def test_runs_that_are_killed(fleet: tuple[Path, Counts], tmp_path: Path) -> None:
    folder, counts = fleet
    results = tmp_path / "results"
    for share in (0.2, 0.5, 0.8):
        with start(folder, results) as process:
            wait_for(process, results, int(share * counts.total()))
            process.kill()
    done = rows(results)
    assert start(folder, results).wait() == 0
    check(results, counts)
    # Nothing that was stored was read again.
    ((count,),) = asked(Results(str(results)), "SELECT count(*) FROM stored_dumps")
    assert count == rows(results) > done


def wait_for(process: "subprocess.Popen[bytes]", results: Path, count: int) -> None:
    while rows(results) < count:
        assert process.poll() is None, "it ended before"
        time.sleep(0.5)
