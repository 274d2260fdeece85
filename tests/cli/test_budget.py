# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a run is said to have taken of the machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msatools.cli import execution

ASK = "from msatools.cli.execution import peak_bytes; print(peak_bytes())"
MUCH = 256 << 20


def test_peak_is_not_that_of_who_started_us() -> None:
    """Who is copied before another program takes its place, with all its memory."""
    content = b"\1" * MUCH
    words = [sys.executable, "-c", ASK]
    # With it Python copies itself, where it would else start a process beside itself.
    done = subprocess.run(words, preexec_fn=os.getpid, stdout=subprocess.PIPE)
    assert 1 << 20 < int(done.stdout) < len(content)


class Clock:
    """Time that passes as a test wants: the machine's own would make it chance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.used_s = 1000.0, 5.0
        self.burnt: list[tuple[float, float]] = []
        monkeypatch.setattr(execution.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(execution, "cpu_ns", lambda: round(self.used_s * 1e9))

    def burn(self, seconds: float) -> None:
        self.burnt.append((self.now_s, seconds))
        self.used_s += seconds
        self.now_s += seconds

    def most_of_a_window_s(self) -> float:
        """The most CPU time that a window has, which begins or ends with any look."""
        spans = [(start, start + length) for start, length in self.burnt]
        starts = [start for start, _ in spans]
        starts += [end - execution.WINDOW_S for _, end in spans]
        return max(
            sum(
                max(0.0, min(end, window + execution.WINDOW_S) - max(start, window))
                for start, end in spans
            )
            for window in starts
        )


def run(
    clock: Clock, share: float, looks_s: Sequence[float], interval_s: float
) -> None:
    """Look, render and wait as reports() does."""
    pacing = execution.Pace(share)
    for look_s in looks_s:
        clock.burn(look_s)
        due_s = max(clock.now_s, pacing._started.at_s + interval_s)
        clock.now_s = max(due_s, pacing.earliest_s)
        pacing.start()


@given(
    share=st.floats(0.005, 0.9),
    interval_s=st.floats(0.1, 70),
    part=st.floats(0.001, 1),
    changes=st.lists(st.floats(-1, 1), min_size=5, max_size=120),
)
def test_no_window_has_more_than_the_share(
    share: float, interval_s: float, part: float, changes: list[float]
) -> None:
    """Looks of up to what a window has, each up to a point dearer than the last."""
    point_s = 0.01 * execution.WINDOW_S
    look_s = part * share * execution.WINDOW_S
    looks = [max(look_s + change * point_s / 2, 1e-6) for change in changes]
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        run(clock, share, looks, interval_s)
        assert clock.most_of_a_window_s() <= (share + 0.01) * execution.WINDOW_S + 1e-6


def test_a_look_dearer_than_a_window_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    run(clock, 0.01, [2.0] * 5, 1)
    starts = [start for start, _ in clock.burnt]
    assert all(b - a >= 200 - 1e-6 for a, b in pairwise(starts))
