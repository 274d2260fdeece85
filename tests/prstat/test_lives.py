# SPDX-License-Identifier: LGPL-2.1-or-later

"""Microstates sum to each lifetime, with schedstats off, on, and switched on midway.

A guest without KVM can have another clock source than the TSC (Linux 6.1 uses the HPET
here). Then each CPU's clock advances by its own ticks, and ``bound_ns`` is large.
"""

import numpy as np
import pytest

from tests.prstat.dumps import MIDWAY, OFF, ON, Dump, long, read_dump

MS = 1_000_000

HOGS = ("hog-pinned-0", "hog-pinned-1", "hog-pinned-2")
ZOMBIES = ("zombie", "zombie-killed", "zombie-terminated", "dead-leader")


@pytest.fixture(params=[*OFF, *long(*ON, *MIDWAY)])
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


@pytest.fixture(params=ON)
def on(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


def test_hogs_that_share_a_cpu(dump: Dump) -> None:
    """They use all of the CPU's time, and otherwise wait for it.

    Their shares are the scheduler's choice; /proc recorded them.
    """
    rows = [dump.row(name) for name in HOGS]
    lifetimes, ran = dump.lives.lifetime_ns[rows], dump.cpu_ns[rows]
    assert lifetimes.min() > 1.5e9
    waited = dump.as_kept.latency_ns[rows] + dump.as_kept.missed_ns[rows]
    for name, *ours in zip(HOGS, ran, waited, strict=True):
        task = dump.tasks[name]
        path = f"proc/{task['pid']}/task/{task['tid']}/schedstat.again"
        recorded = dump.run.truth(path).split()[:2]
        for had, least in zip(ours, recorded, strict=True):
            assert had >= int(least) > 0, name
    # Before each was bound to that CPU, it can have run on the other.
    assert dump.clocks.monotonic_ns is not None
    starts = np.array([dump.tasks[name]["start_ns"] for name in HOGS])
    elsewhere = lifetimes - (dump.clocks.monotonic_ns - starts)
    assert elsewhere.min() > 0
    assert ran.sum() <= lifetimes.max() + elsewhere.sum() + dump.bound_ns
    # It slept only while it was migrated.
    assert (dump.lives.off_cpu_ns[rows] <= elsewhere + dump.bound_ns).all()
    # The kernel has not counted more than the lifetime either.
    assert dump.as_kept.missed_ns[rows].max() <= dump.bound_ns
    rest = lifetimes - ran - dump.lives.latency_ns[rows]
    assert np.array_equal(rest, dump.lives.off_cpu_ns[rows])


def test_microstates_sum_to_the_lifetime(dump: Dump) -> None:
    for lives in (dump.as_kept, dump.lives):
        parts = (lives.user_ns, lives.system_ns, lives.latency_ns, lives.off_cpu_ns)
        assert np.array_equal(sum((*parts, lives.zombie_ns)), lives.lifetime_ns)
        assert min(int(part.min()) for part in (*parts, lives.zombie_ns)) >= 0
    assert (dump.lives.lifetime_ns > 0).all()
    assert len(dump.table) > 2200


def test_counters_do_not_exceed_the_lifetime(dump: Dump) -> None:
    """Counters exceed the lifetime by at most the clocks' difference."""
    missed = dump.as_kept.missed_ns > dump.bound_ns
    assert np.array_equal(missed, dump.as_kept.impossible)
    if not dump.delays_dequeue:
        assert not missed.any()
        assert not dump.as_kept.latency_is_bound
    else:
        assert dump.as_kept.latency_is_bound


def test_zombies(dump: Dump) -> None:
    """They died between their announcement and their first observation as dead."""
    monotonic = dump.clocks.monotonic_ns
    assert monotonic is not None
    for name in ZOMBIES:
        row = dump.row(name)
        died = monotonic - int(dump.lives.zombie_ns[row])
        task = dump.tasks[name]
        assert task["start_ns"] - dump.bound_ns < died, name
        assert died < task["in_place_ns"] + dump.bound_ns, name
    dead = np.flatnonzero(dump.table["exit_state"])
    assert {dump.row(name) for name in ZOMBIES} <= set(dead.tolist())
    alive = dump.table["exit_state"] == 0
    assert not dump.lives.zombie_ns[alive].any()


# --- off-CPU time


def test_stopped(on: Dump) -> None:
    """Stopped time is the rest, unless delayed sleeps are lost."""
    was, past = on.row("has-stopped"), on.tasks["has-stopped"]["stopped_ns"]
    # The workload waited half a second after it was stopped. A fork can also be slow to
    # wake the new thread, which counts as no sleep.
    before = on.tasks["has-stopped"]["start_ns"] - int(on.table["start_ns"][was])
    lack = on.parts.unexplained_ns[was] - max(on.delayed_ns[was], 0)
    assert 500 * MS - on.bound_ns <= lack <= before + on.bound_ns
    assert past <= before
    stopped = on.parts.stopped
    for row in np.flatnonzero(on.stopped).tolist():
        if on.delays_dequeue:
            assert stopped[row] is None
        else:
            assert stopped[row] == on.parts.unexplained_ns[row]
    others = stopped.known & ~on.stopped
    assert not stopped.ns[others].any()
    # It is unknown if sleep on the run queue is lost, for a varying number of threads.
    assert others.any() if on.delays_dequeue else np.count_nonzero(others) > 2200


def test_waiting_for_disks(on: Dump) -> None:
    """Past and current waits for disks are counted."""
    sleeps = on.parts.sleeps
    past = on.table["iowait_sum_ns"]
    done = ~on.in_iowait
    assert np.array_equal(sleeps.iowait.ns[done], past[done])
    # Delays are counted as well, except that a wait that ended on a CPU with a lagging
    # clock can be counted as 0.
    waited = on.delays.count["blkio"] > 1
    assert waited[on.row("has-read")]
    assert np.median(past[waited]) > 0
    assert not sleeps.blocked[on.row("has-read")]
    stuck = np.flatnonzero(on.in_iowait).tolist()
    assert len(stuck) >= 10
    for row in stuck:
        assert sleeps.iowait.ns[row] >= on.now.age_ns[row]
        assert on.table["state"][row] & 2
    assert on.row("vfork") not in stuck
    blocked = sleeps.blocked[on.row("vfork")]
    assert blocked
    assert blocked >= on.now.age_ns[on.row("vfork")]
