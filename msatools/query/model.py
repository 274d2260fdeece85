# SPDX-License-Identifier: LGPL-2.1-or-later

"""Results of queries."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from msatools.model import WIDTH, equal_but, hash_but
from msatools.prstat.states import Time
from msatools.reports.units import duration


class Timers(NamedTuple):
    """The timers of Gelato's microstate accounting for Linux 2.6."""

    oncpu_usr: Time
    oncpu_sys: Time
    oncpu_trap: Time
    interrupted: Time
    onactivequeue: Time
    onexpiredqueue: Time
    paging_sleep: Time
    futex_sleep: Time
    poll_sleep: Time
    interruptible_sleep: Time
    uninterruptible_sleep: Time
    stopped: Time
    zombie: Time


class States(NamedTuple):
    """The states of Solaris's microstate accounting (LMS_* in sys/msacct.h)."""

    user: Time
    system: Time
    trap: Time
    tfault: Time
    dfault: Time
    kfault: Time
    user_lock: Time
    sleep: Time
    wait_cpu: Time
    stopped: Time


class Now(Struct, frozen=True):
    """What a thread was doing at the time of the query."""

    task_class: str | None
    """The class in msa-prstat's column NOW, such as ``LCK``; ``None`` if the thread
    moved on while it was read."""

    timer: str | None
    """The field of :class:`Timers` that was running; ``None`` if unknown, as for a
    running thread on a live kernel, whose mode is unknown."""

    state: str | None
    """The field of :class:`States` that was running; ``None`` also for dead threads."""

    age_ns: int
    """Time since the thread began to do this."""

    age_bound: Literal["exact", "upper", "estimate"]


class _Answer(Struct, frozen=True):
    """Fields of all results."""

    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the kernel; ``None`` if unknown."""

    timers: Timers
    states: States
    notes: tuple[str, ...]
    """Messages about data that could not be read."""

    def __repr__(self) -> str:
        """Return one line: the ID, the name, and the states that took most time."""
        number = getattr(self, "tid", getattr(self, "pid", None))
        name = f" {comm!r}" if (comm := getattr(self, "comm", None)) else ""
        spent = sorted(
            ((time.ns, state) for state, time in self.states._asdict().items() if time),
            key=lambda pair: -(pair[0] or 0),
        )
        words = [f"{state} {duration(ns)}" for ns, state in spent[:_SHOWN] if ns]
        text = f"<{type(self).__name__} {number}{name}: {', '.join(words)}>"
        return text if len(text) <= WIDTH else f"{text[: WIDTH - 2]}…>"


_SHOWN = 3
"""Number of states that ``repr`` shows."""


class Thread(_Answer, frozen=True, dict=True):
    """One thread: its times since it started."""

    tid: int
    pid: int
    """PID of its process."""

    comm: str
    lifetime_ns: int
    """Sum of the five times that Linux always keeps: user, system, latency, off the CPU
    (``states.sleep``, ``states.stopped`` and interrupts), and zombie."""

    read_now: Callable[[], Now]
    """Computes ``now`` from what was read with the times."""

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "read_now")

    def __hash__(self) -> int:
        return hash_but(self, "read_now")

    @cached_property
    def now(self) -> Now:
        """What the thread was doing; computed on first use."""
        return self.read_now()


class Process(_Answer, frozen=True, dict=True):
    """One process: the sum of its threads that have not been reaped."""

    pid: int
    comm: str
    tids: tuple[int, ...]
    ended_user_ns: int
    """User time of threads that have ended, which is in no timer and no state. Linux
    keeps only their CPU time; its split is an estimate."""

    ended_system_ns: int
    read_now: Callable[[], tuple[Now, ...]]
    """Computes ``now`` from what was read with the times."""

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "read_now")

    def __hash__(self) -> int:
        return hash_but(self, "read_now")

    @cached_property
    def now(self) -> tuple[Now, ...]:
        """What each thread was doing, in the order of ``tids``."""
        return self.read_now()


class ChildTimes(_Answer, frozen=True):
    """Times of the reaped children of a process, including those that they reaped."""

    pid: int
    """PID of the parent."""
