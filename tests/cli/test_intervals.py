# SPDX-License-Identifier: LGPL-2.1-or-later

"""When reports and samples are taken, on a clock that the tests turn."""

import io
import itertools
from typing import Any
from unittest.mock import ANY

import pytest
from drgn import FaultError

from msatools.cli.execution import Plan, reports
from msatools.cli.output import ProgressLine
from msatools.kernel.report import Cost, Report
from msatools.program.model import MovedError
from tests.support.calls import MADE

ERROR_S = 1e-6
"""Sums of a few times as floating-point numbers."""


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.cpu_s = 5.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def process_time(self) -> float:
        return self.cpu_s

    def process_time_ns(self) -> int:
        return round(self.cpu_s * 1e9)

    def pass_by(self, wall_s: float, cpu_s: float = 0.0) -> None:
        self.now_s += wall_s
        self.cpu_s += cpu_s


class Session:
    """Takes so long for each look, and logs when it began."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        self._clock = clock
        self.period_s: float | None = options.get("period_s")
        self._costs = options.get("cost", (0.0, 0.0))
        self._sample_s = options.get("sample_s", (0.0, 0.0))
        self.moves: set[int] = options.get("moves", set())
        self.faults: set[int] = options.get("faults", set())
        self.log: list[tuple[str, float]] = []
        self._interval_ns: int = options.get("interval_ns", 7)

    def _look(self, what: str) -> None:
        self.log.append((what, self._clock.now_s - 1000))

    def report(self, progress: object) -> Report:
        raise AssertionError("there are intervals")

    def begin(self, progress: object) -> None:
        self._look("begin")

    def sample(self) -> None:
        self._look("sample")
        self._clock.pass_by(*self._sample_s)
        if len(self.at("sample")) in self.faults:
            raise FaultError("gone", 16)

    def advance(self, progress: object) -> Report:
        self._look("advance")
        self._clock.pass_by(*self._costs)
        if len(self.at("advance")) in self.moves:
            raise MovedError
        return Report(
            target=MADE,
            taken_at_ns=None,
            interval_ns=self._interval_ns,
            coverage={},
            notes=(),
        )

    def at(self, what: str) -> list[float]:
        return [at_s for kind, at_s in self.log if kind == what]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock; what is chosen at random within a period is its middle."""
    clock = Clock()
    for module in ("execution", "output"):
        monkeypatch.setattr(f"msatools.cli.{module}.time", clock)
    monkeypatch.setattr("random.random", lambda: 0.5)
    return clock


def run(
    clock: Clock, plan: Plan, quits_at: float = 1e9, **options: Any
) -> tuple[Session, list[Report]]:
    """Give the session as it is in the end, and at most nine reports."""
    session = Session(clock, **options)

    def call(collect: Any) -> Any:
        return collect(lambda *_: None)

    def quit_before(due_s: float) -> bool:
        clock.now_s = max(clock.now_s, min(due_s, 1000 + quits_at))
        return due_s > 1000 + quits_at

    found = reports(session, plan, call, call, quit_before)
    return session, list(itertools.islice(found, 9))


def near(*times: float) -> Any:
    return pytest.approx(list(times), abs=ERROR_S)


def test_one_after_each_interval(clock: Clock) -> None:
    """What a report takes is a part of the next interval."""
    session, found = run(clock, Plan(2.0, 3), cost=(0.5, 0.1))
    assert session.at("begin") == [0]
    assert session.at("advance") == near(2, 4, 6)
    assert not session.at("sample")
    assert [each.cost for each in found[:2]] == [
        Cost(cpu_ns=10**8, wall_ns=25 * 10**8, elapsed_ns=5 * 10**8, peak_bytes=ANY),
        Cost(cpu_ns=10**8, wall_ns=20 * 10**8, elapsed_ns=5 * 10**8, peak_bytes=ANY),
    ]
    assert [each.notes for each in found] == [()] * 3


@pytest.mark.parametrize(("quits_at", "count"), [(0.3, 0), (1.0, 1), (2.9, 2)])
@pytest.mark.parametrize("period_s", [None, 0.1])
def test_end(clock: Clock, quits_at: float, count: int, period_s: float | None) -> None:
    session, found = run(clock, Plan(1.0), quits_at, period_s=period_s)
    assert len(found) == count
    assert clock.now_s == 1000 + quits_at
    assert all(at_s <= quits_at for at_s in session.at("sample"))


def test_budget(clock: Clock) -> None:
    """What a report took of the CPU is made up for before the next."""
    session, _ = run(clock, Plan(1.0, 4, 0.1), cost=(0.5, 0.3))
    assert session.at("advance") == near(1, 4, 7, 10)
    session, _ = run(clock, Plan(10.0, 2, 0.1), cost=(0.5, 0.3))
    assert session.at("advance") == near(20.5, 30.5)


def test_samples_and_budget(clock: Clock) -> None:
    """They come out of the same budget."""
    options: dict[str, Any] = {"period_s": 0.1, "sample_s": (0.0, 0.02)}
    session, _ = run(clock, Plan(1.0, 1, 0.1), **options)
    assert session.at("sample") == near(0.05, 0.2, 0.4, 0.6, 0.8)
    assert session.at("advance") == near(1.0)


def test_lost_samples_are_noted(clock: Clock) -> None:
    options: dict[str, Any] = {"period_s": 0.25, "faults": {2, 3}}
    _, (first, second) = run(clock, Plan(1.0, 2), **options)
    (note,) = first.notes
    assert note.code == "samples-lost"
    assert note.text == "2 samples within the interval are lost: gone: 0x10"
    assert second.notes == ()


def test_interval_in_which_memory_moved(clock: Clock) -> None:
    """Another begins, and the next report says so; all that were asked for come."""
    session, (first, second) = run(clock, Plan(1.0, 2), moves={1, 2})
    assert session.log == [
        ("begin", 0),
        *(("advance", 1), ("begin", 1), ("advance", 2), ("begin", 2)),
        *(("advance", 3), ("advance", 4)),
    ]
    (note,) = first.notes
    assert note.code == "interval-lost"
    assert note.text == "2 intervals before this are lost: memory came or went"
    assert second.notes == ()


@pytest.mark.parametrize(
    ("interval_ns", "codes"), [(0, ["clock-stands-still"]), (1, []), (None, [])]
)
def test_clock_that_stands_still(
    clock: Clock, interval_ns: int | None, codes: list[str]
) -> None:
    _, (found,) = run(clock, Plan(1.0, 1), interval_ns=interval_ns)
    assert [note.code for note in found.notes] == codes


# How far a look is


class Terminal(io.StringIO):
    """Stands for a stream; what is written comes in pieces."""

    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def shown(clock: Clock, out: Terminal, *times: float) -> list[str]:
    with ProgressLine("probe", out) as progress:
        for done, at_s in enumerate(times):
            clock.now_s = 1000 + at_s
            progress(done, 4)
    return out.pieces


def test_progress(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown after a second, ten times a second, and erased in the end."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(clock, Terminal(), 0, 0.99) == []
    clock.now_s = 1000
    assert shown(clock, Terminal(), 0, 1.0, 1.09, 1.11) == [
        "\rprobe: ----- 25 %\x1b[K",
        "\rprobe: --------------- 75 %\x1b[K",
        "\r\x1b[K",
    ]
    clock.now_s = 1000
    assert shown(clock, Terminal(is_terminal=False), 0, 9, 99) == []


def test_progress_of_a_stream_that_is_closed(clock: Clock) -> None:
    for stream in (None, closed()):
        with ProgressLine("probe", stream) as progress:  # type: ignore[arg-type]
            clock.pass_by(2)
            progress(1, 2)


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream
