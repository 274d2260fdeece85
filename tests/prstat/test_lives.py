# SPDX-License-Identifier: LGPL-2.1-or-later

"""Microstates sum to each lifetime, with schedstats off, on, and switched on midway.

A guest without KVM can have another clock source than the TSC (Linux 6.1 uses the HPET
here). Then each CPU's clock advances by its own ticks, and ``bound_ns`` is large.
"""

import numpy as np
import pytest

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.structs import Booleans
from tests.prstat.dumps import MIDWAY, OFF, ON, Dump, long, read_dump

MS = 1_000_000

HOGS = ("hog-pinned-0", "hog-pinned-1", "hog-pinned-2")
FEW = 5
"""Classes with fewer threads are not compared: one stalled CPU could affect half."""

ZOMBIES = ("zombie", "zombie-killed", "zombie-terminated", "dead-leader")


@pytest.fixture(params=[*OFF, *long(*ON, *MIDWAY)])
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


@pytest.fixture(params=ON)
def on(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


@pytest.fixture(params=long(*MIDWAY))
def midway(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


def assert_near(dump: Dump, apart: Nanoseconds, rows: Booleans) -> None:
    """Check that differences are within the clocks' bound for most threads of a class.

    The kernel reads its clock twice for some pairs of counters, and an emulated CPU can
    stall in between. That affects a few random threads; a wrong computation would
    affect all of a class.
    """
    for cls in np.unique(dump.now.classes[rows]):
        of_class = np.abs(apart[rows & (dump.now.classes == cls)])
        assert np.median(of_class) <= dump.bound_ns or len(of_class) < FEW


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


def uncounted(dump: Dump) -> Booleans:
    """Return threads that were off the CPU in ways that schedstats do not count."""
    return dump.stopped | stop_class(dump) | parked(dump)


def stop_class(dump: Dump) -> Booleans:
    """Return threads of a scheduling class without schedstats."""
    return dump.kernels_own & np.char.startswith(dump.table["comm"], b"migration/")


def parked(dump: Dump) -> Booleans:
    """Return threads of CPU 1 that are created, and parked, before it is up."""
    names = dump.table["comm"]
    own = np.char.endswith(names, b"/1") & ~np.char.startswith(names, b"kworker")
    return dump.kernels_own & own & ~stop_class(dump)


def test_sleeps_sum_to_the_off_cpu_time(on: Dump) -> None:
    """Exceptions are stopped time and, on 6.12, some sleep on the run queue."""
    lack = on.parts.unexplained_ns
    if on.delays_dequeue:
        lack = lack - np.maximum(on.delayed_ns, 0)
    counted = ~uncounted(on)
    assert np.count_nonzero(counted) > 2200
    assert_near(on, lack, counted)


def test_times_that_schedstats_do_not_count(on: Dump) -> None:
    """Each exception above applies to some threads."""
    table, parts = on.table, on.parts
    for row in np.flatnonzero(stop_class(on)).tolist():
        # Neither its current nor its earlier sleeps are counted.
        assert table["state"][row] == 1
        assert table["pcount"][row] > 0
        assert table["sleep_start_ns"][row] == table["block_start_ns"][row] == 0
        assert table["sum_sleep_ns"][row] < MS
    # Until the CPU is up, for which all of them are made first; once all CPUs are, the
    # kernel starts the thread of devtmpfs (kernel_init_freeable()).
    lack, starts = parts.unexplained_ns[parked(on)], table["start_ns"][parked(on)]
    assert len(lack) >= 2
    assert lack.min() > 0
    (up,) = table["start_ns"][table["comm"] == b"kdevtmpfs"]
    until = starts + lack.astype(np.uint64)
    assert until.min() + on.bound_ns >= starts.max()
    assert until.max() <= up + on.bound_ns
    for name in ("stopped", "stopped-thread", "traced"):
        row = on.row(name)
        # Not a sleep.
        assert table["state"][row] & 3 == 0
        age_ns = int(on.now.age_ns[row])
        # Its clock stands still until a tick comes, which a busy host may hold back.
        assert age_ns - parts.unexplained_ns[row] <= on.bound_ns + age_ns // 20


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
    # Delays are counted as well, except that a single wait that ended on a CPU with a
    # lagging clock can be counted as 0.
    waited = on.delays.count["blkio"] > 1
    assert waited[on.row("has-read")]
    assert past[waited].all()
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


def test_sleep_that_counts_as_latency(on: Dump) -> None:
    """On 6.12 sleeps after a move on the run queue are counted twice."""
    twice = on.as_kept.latency_ns - on.lives.latency_ns
    if not on.delays_dequeue:
        assert not twice.any()
        return
    # The affected threads vary.
    assert_near(on, np.minimum(twice + on.delayed_ns, 0), ~stop_class(on))
    moved = twice > 0
    # Either all of their latency was sleep, or the excess is subtracted from it.
    assert ((on.parts.unexplained_ns == 0) | (on.lives.latency_ns == 0))[moved].all()
    assert (on.as_kept.off_cpu_ns + twice == on.lives.off_cpu_ns).all()


def test_impossible_counters(dump: Dump) -> None:
    """They belong to delayed sleepers and are not printed."""
    impossible = np.flatnonzero(dump.parts.impossible).tolist()
    if not dump.delays_dequeue:
        assert not impossible
    for row in impossible:
        hidden = {
            kind
            for kind, column in dump.parts.delays.items()
            if dump.delays.has[row] and column[row] is None
        }
        if not hidden:
            assert not dump.parts.known[row]
            continue
        assert hidden == {"blkio"}
        assert dump.delays.delay_ns["blkio"][row] > dump.bound_ns + int(
            dump.table["iowait_sum_ns"][row]
        )


def test_delays_of_disks_are_sleeps_that_waited_for_them(on: Dump) -> None:
    """Two independent counters of the same waits agree where they are valid."""
    blkio = on.parts.delays["blkio"]
    past = on.table["iowait_sum_ns"].astype(np.int64)
    believed = blkio.known & ((blkio.ns > 0) | (past > 0))
    row = on.row("has-read")
    assert believed[row] or on.parts.impossible[row]
    assert_near(on, blkio.ns - past, believed)


# --- statistics that are on since midway


def test_threads_since_the_switch_are_covered(midway: Dump) -> None:
    switched = midway.run.workload["times"]["switched_on_ns"]
    later = midway.table["start_ns"].astype(np.int64) > switched
    assert np.count_nonzero(later) > 20
    assert midway.parts.known.all()
    lack = midway.parts.unexplained_ns - np.maximum(midway.delayed_ns, 0)
    assert lack[later].min() >= -midway.bound_ns
    # An interrupted fork counts as no sleep.
    assert np.median(lack[later]) <= midway.bound_ns
    known = midway.parts.stopped.known[later]
    if midway.delays_dequeue:
        known = known[midway.parts.unexplained_ns[later] <= midway.bound_ns]
    assert known.all()


def test_threads_before_the_switch_are_partly_covered(midway: Dump) -> None:
    """Threads that slept only once are fully covered: the current sleep is known."""
    switched = midway.run.workload["times"]["switched_on_ns"]
    earlier = midway.table["start_ns"].astype(np.int64) < switched - 1e9
    woken = midway.table["sum_sleep_ns"] > 0
    # The number of threads woken since varies.
    assert (earlier & woken).any()
    assert midway.clocks.monotonic_ns is not None
    since = midway.clocks.monotonic_ns - switched
    assert midway.slept.total_ns[earlier & woken].max() <= since + midway.bound_ns
    assert midway.parts.coverage[earlier & woken].max() < 1
    once = earlier & ~woken & (midway.table["pcount"] == 1) & ~midway.stopped
    once &= midway.table["exit_state"] == 0
    assert once.any()
    assert np.median(midway.parts.coverage[once]) > 0.99
    # The rest of their time is unknown.
    left = earlier & (midway.parts.unexplained_ns > midway.bound_ns)
    left &= ~midway.kernels_own
    assert left.any()
    assert not midway.parts.stopped.known[left].any()
