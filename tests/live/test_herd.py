# SPDX-License-Identifier: LGPL-2.1-or-later

"""A herd on a condition variable, while it runs: what msa-prstat and msa-locks tell.

Truth are the workers, each of which counts for itself how long it has waited.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.herdlive import COUNT
from fixtures.lab.guest.herdworkers import WAYS, WORKERS
from fixtures.lab.inside import RESULTS

RUNS = ("herdlive-6.1", "herdlive-6.12")

CONDITION_BYTES = 48
"""``sizeof(pthread_cond_t)``, of glibc on a machine of 64 bits."""

LEAST = 0.9
"""Of what the workers have waited for, which has to be told as such."""


@dataclass
class Herd:
    """What was seen of the workers of one kind."""

    facts: dict[str, Any]

    def samples(self, command: str) -> list[dict[str, Any]]:
        ran = self.facts["commands"][command]
        assert (ran["status"], ran["stderr"]) == (0, "")
        found = [json.loads(line) for line in ran["stdout"].splitlines()]
        assert len(found) == COUNT
        return found

    def slept_ns(self, sample: dict[str, Any]) -> tuple[int, int]:
        """How long all workers slept within an interval: the least and the most.

        That is how long they waited, by their own count, but for the time in which they
        had been woken and had no CPU, by the kernel's.
        """
        end_ns = sample["taken_at_ns"]
        begin_ns = end_ns - sample["interval_ns"]
        least = most = 0
        for worker in range(WORKERS):
            (low, high), (later_low, later_high) = (
                self._waited_ns(worker, at_ns) for at_ns in (begin_ns, end_ns)
            )
            delays = self._delay_ns(worker, begin_ns, end_ns)
            least += max(later_low - high - delays, 0)
            most += min(later_high - low, sample["interval_ns"])
        return least, most

    def _waited_ns(self, worker: int, at_ns: int) -> tuple[int, int]:
        """How long a worker had waited at a moment, between two of its counts."""
        before, after = self._around(worker, at_ns)
        low = max(before[1], after[1] - max(after[0] - at_ns, 0))
        return low, min(after[1], before[1] + max(at_ns - before[0], 0))

    def _delay_ns(self, worker: int, begin_ns: int, end_ns: int) -> int:
        """How long it had waited for a CPU, at most."""
        (before, _), (_, after) = (
            self._around(worker, at_ns) for at_ns in (begin_ns, end_ns)
        )
        return after[2] - before[2]

    def _around(self, worker: int, at_ns: int) -> tuple[tuple[int, int, int], ...]:
        counts = [
            tuple(
                reading[key][worker] for key in ("at_ns", "waited_ns", "run_delay_ns")
            )
            for reading in self.facts["readings"]
        ]
        later = next((n for n, count in enumerate(counts) if count[0] >= at_ns), None)
        assert later, "nobody has read what it counted before, or after"
        return counts[later - 1], counts[later]


@cache
def herd(run: str, way: str) -> Herd:
    return Herd(json.loads((lab.build(run).directory / RESULTS).read_text())[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_what_workers_wait_for_is_told(run: str, way: str) -> None:
    """By default, in each interval; and nothing else is."""
    seen = herd(run, way)
    for sample in seen.samples("prstat"):
        rows = [row for row in sample["tasks"] if row["pid"] in seen.facts["workers"]]
        assert len(rows) == WORKERS
        told = sum(
            part["ns"]
            for row in rows
            for part in row["off_cpu"]
            if part["class"] == "LCK"
        )
        least, most = seen.slept_ns(sample)
        assert LEAST * least <= told <= most + WORKERS * sample["bound_ns"]


@pytest.mark.parametrize("command", ["prstat", "locks"])
@pytest.mark.parametrize("run", RUNS)
def test_a_herd_that_is_woken_together_is_named(run: str, command: str) -> None:
    seen = herd(run, "broadcast")
    for sample in seen.samples(command):
        # Between two wake-ups some may be on each of the two words that it has.
        assert sample["herds"]
        assert sum(found["waiters"] for found in sample["herds"]) <= WORKERS
        for found in sample["herds"]:
            assert found["confidence"] == "confirmed"
            assert found["pids"] == [seen.facts["pid"]]
            place = int(found["address"], 16) - seen.facts["condition"]
            assert 0 <= place < CONDITION_BYTES
            assert found["wakeups"] >= found["waiters"]
            assert found["in_vain"] > 0.5


@pytest.mark.parametrize("run", RUNS)
def test_those_that_are_woken_one_by_one_are_none(run: str) -> None:
    seen = herd(run, "signal")
    for command in ("prstat", "locks"):
        for sample in seen.samples(command):
            assert {found["confidence"] for found in sample["herds"]} <= {"none"}


@pytest.mark.parametrize("run", RUNS)
def test_the_waker_is_known(run: str) -> None:
    """In most intervals: it is told by the last that it woke, which may be at work."""
    seen = herd(run, "broadcast")
    wakers = [sample["herds"][0]["waker"] for sample in seen.samples("prstat")]
    assert sum(bool(w) and w["pid"] == seen.facts["waker"] for w in wakers) > COUNT / 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_the_condition_is_the_lock_most_waited_for(run: str, way: str) -> None:
    seen = herd(run, way)
    for sample in seen.samples("locks"):
        first = sample["contention"][0]
        assert first["type"] == "futex"
        prefix = f"futex {seen.facts['pid']}:0x"
        assert first["lock"].startswith(prefix)
        place = int(first["lock"].removeprefix(prefix), 16) - seen.facts["condition"]
        assert 0 <= place < CONDITION_BYTES
        assert 0 < first["mean_queue"] <= first["max_queue"] <= WORKERS
        # Half of them asleep, and half of those on each of the two words that it has.
        assert first["max_queue"] >= WORKERS / 4
        assert first["looks"] == sample["coverage"]["looks"] > 0
