# SPDX-License-Identifier: LGPL-2.1-or-later

"""Herds in dumps that are taken at random moments of a guest that goes on.

Of three processes with workers on a condition variable two broadcast, one of them five
times as often, and one signals. Truth are the PIDs and the address that they say
themselves.
"""

import random
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import herdlive
from fixtures.lab.cache import default_cache
from fixtures.lab.guest.herdworkers import WORKERS
from msatools.locks.locks import collect_locks
from msatools.locks.report import Herd, UserFrame
from msatools.locks.user_stacks import MOST_FRAMES
from msatools.program import TargetSpec, open_target
from msatools.prstat.prstat import collect_prstat
from msatools.prstat.select import Options

KERNELS = ("6.1", "6.12")
BROADCAST = ("broadcast", "hurried")
DUMPS = 20
PATIENCE = 10
"""So many times as many are taken until a wake-up is met: one of five is of such."""

SETTLE_SECONDS = 3
"""Some rounds, after which threads have waited more often than once."""

each_broadcast = pytest.mark.parametrize(
    "name",
    # Every 10 ms on an emulated machine the workers may all wait for the mutex, one
    # behind the other, and none for the condition variable: that is not told as one.
    ["broadcast", pytest.param("hurried", marks=pytest.mark.long)],
)

WAKES = frozenset({"be_waker", "give_work"})
"""Functions that the waker is in, almost always."""

MOST_SECONDS = 0.5
"""Ten rounds of the slower ones: dumps are of any moment of a round."""


@dataclass
class Seen:
    """What each command tells of each dump, and what is true."""

    truths: dict[str, dict[str, Any]]
    dumps: list[dict[str, tuple[Herd, ...]]]

    @property
    def is_complete(self) -> bool:
        """Whether the last dump has all herds that it should."""
        pids = {(self.truths[name]["pid"],) for name in BROADCAST}
        return all(
            pids == {herd.pids for herd in herds if herd.confidence != "none"}
            for herds in self.dumps[-1].values()
        )

    @property
    def has_woken(self) -> bool:
        """Whether a wake-up is under way in any dump, without which they prove less."""
        told = (
            herd for dump in self.dumps for herds in dump.values() for herd in herds
        )
        return any(herd.woken and herd.confidence != "none" for herd in told)

    def herds(self, name: str) -> Iterator[tuple[str, list[Herd]]]:
        """Yield the command and the crowds of a process that it tells."""
        pids = (self.truths[name]["pid"],)
        for number, dump in enumerate(self.dumps):
            for command, herds in dump.items():
                found = [herd for herd in herds if herd.pids == pids]
                yield f"{command} {number}", found


@pytest.fixture(scope="module", params=KERNELS)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    folder = tmp_path_factory.mktemp("herds")
    with lab.live(f"herdrun-{request.param}") as live:
        time.sleep(SETTLE_SECONDS)
        seen = Seen(live.workload["herds"], [])
        for number in range(PATIENCE * DUMPS):
            if number >= DUMPS and seen.has_woken:
                break
            path = folder / f"vmcore-{number}"
            time.sleep(random.uniform(0, MOST_SECONDS))
            # It stands still as long as it is dumped, and goes on then.
            live.guest.dump(path)
            seen.dumps.append(told(path))
            if seen.is_complete:
                # Others are kept, to find out why.
                path.unlink()
        return seen


def told(path: Path) -> dict[str, tuple[Herd, ...]]:
    opened = open_target(TargetSpec(path=str(path), types="btf"))
    options = Options(per_thread=True, rows=None)
    commands = {
        "locks": collect_locks,
        "prstat": partial(collect_prstat, options=options),
    }
    return {
        name: collect(opened.prog, target=opened.target).herds
        for name, collect in commands.items()
    }


@each_broadcast
def test_a_herd_is_found_at_any_moment(seen: Seen, name: str) -> None:
    truth = seen.truths[name]
    for what, herds in seen.herds(name):
        (herd,) = herds
        assert herd.confidence == "one dump", (what, herd)
        # Whichever of its two words they wait on.
        assert herd.address == truth["condition"], what
        assert herd.lock == f"futex {truth['pid']}:{truth['condition']:#x}", what
        assert herd.name == "condition variable", what
        # Some may be on a CPU, or wait for the mutex.
        assert WORKERS / 2 <= herd.waiters <= WORKERS, (what, herd)


@each_broadcast
def test_its_waker_is_known(seen: Seen, name: str) -> None:
    truth = seen.truths[name]
    for what, (herd,) in seen.herds(name):
        assert herd.waker is not None, what
        assert (herd.waker.pid, herd.waker.comm) == (truth["waker"], "waker"), what
        assert herd.waker.tgid == truth["pid"], what


def test_where_its_waker_stands(seen: Seen) -> None:
    """By the names of functions, where the whole file of its program is there."""
    found = list(frames_of(seen, "broadcast"))
    assert len(found) >= DUMPS
    for what, frames in found:
        assert {frame.module for frame in frames} == {"herd"}, what
        assert not frames[0].guess, what
        assert {frame.function for frame in frames} & WAKES, what


@pytest.mark.long
def test_where_its_waker_stands_in_a_file_without_symbols(seen: Seen) -> None:
    """By places in its file."""
    places = places_of(herdlive.program(default_cache()), WAKES)
    found = list(frames_of(seen, "hurried"))
    assert len(found) >= DUMPS
    for what, frames in found:
        assert {(frame.module, frame.function) for frame in frames} == {("herd", None)}
        assert any(frame.offset in place for frame in frames for place in places), what


def frames_of(seen: Seen, name: str) -> Iterator[tuple[str, tuple[UserFrame, ...]]]:
    for what, (herd,) in seen.herds(name):
        if herd.waker and herd.waker.frames:
            assert len(herd.waker.frames) <= MOST_FRAMES
            yield what, herd.waker.frames


def places_of(program: Path, functions: Collection[str]) -> list[range]:
    """Find where functions are in the file of a program that is linked statically."""
    words = ["objdump", "--syms", "--section-headers", str(program)]
    lines = [
        line.split() for line in subprocess.check_output(words, text=True).split("\n")
    ]
    (start, offset) = next(
        (int(line[3], 16), int(line[5], 16)) for line in lines if line[1:2] == [".text"]
    )
    return [
        range(first, first + int(line[4], 16))
        for line in lines
        if line and line[-1] in functions
        for first in [int(line[0], 16) - start + offset]
    ]


def test_it_is_seen_while_it_is_woken(seen: Seen) -> None:
    assert seen.has_woken


def test_those_that_are_woken_one_by_one_are_none(seen: Seen) -> None:
    for what, herds in seen.herds("signal"):
        assert {herd.confidence for herd in herds} <= {"none"}, what
