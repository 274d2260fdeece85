# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a query answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from msatools.prstat.pasts import Time


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


@dataclass(frozen=True)
class Now:
    """What a thread was doing when it was asked for."""

    task_class: str | None
    """As msa-prstat shows it (NOW), such as ``LCK``; ``None`` if the thread moved on
    while it was read."""

    timer: str | None
    """The one of :class:`Timers` that was running; ``None`` if that is not known, as on
    a live kernel in which mode a thread runs."""

    state: str | None
    """The same of :class:`States`; ``None`` also of the dead."""

    age_ns: int
    """For how long it had been so."""

    age_bound: Literal["exact", "upper", "estimate"]


@dataclass(frozen=True)
class _Answer:
    """What all answers have."""

    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the kernel looked at; ``None`` if it is not known."""

    timers: Timers
    states: States
    notes: tuple[str, ...]
    """What could not be read on the way, in words."""


@dataclass(frozen=True)
class Thread(_Answer):
    """One thread: its times since it started."""

    tid: int
    pid: int
    """Its process."""

    comm: str
    lifetime_ns: int
    """What the five times that Linux always keeps make up: user, system, latency,
    ``states.sleep`` with ``states.stopped`` and interrupts, and zombie."""

    read_now: Callable[[], Now] = field(repr=False, compare=False)
    """Finds out ``now``, from what was read with the times."""

    @cached_property
    def now(self) -> Now:
        """What it was doing; found out when it is first asked for."""
        return self.read_now()


@dataclass(frozen=True)
class Process(_Answer):
    """One process: the sum of its threads that have not been reaped."""

    pid: int
    comm: str
    tids: tuple[int, ...]
    ended_user_ns: int
    """Time on the CPU of threads that have ended, which is in no timer and no state:
    Linux keeps nothing else of them. Its split is an estimate."""

    ended_system_ns: int
    read_now: Callable[[], tuple[Now, ...]] = field(repr=False, compare=False)
    """Finds out ``now``, from what was read with the times."""

    @cached_property
    def now(self) -> tuple[Now, ...]:
        """What each thread was doing, in the order of ``tids``."""
        return self.read_now()


@dataclass(frozen=True)
class ChildTimes(_Answer):
    """The children of a process that it has waited for, and those that they had."""

    pid: int
    """The process whose children they were."""
