# SPDX-License-Identifier: LGPL-2.1-or-later

"""Intervals of simulated threads: results are compared with what the threads did."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from msatools.kernel.clocks import Clocks
from msatools.model import names
from msatools.prstat.interval import Deltas, Ended, Interval, OffCpuByClass, ended
from msatools.tasks.accounting import (
    BOUND_NS,
    EXIT_ZOMBIE,
    Processes,
    ProcessSums,
    microstates,
)
from msatools.tasks.sampler import AgeBound, TaskSample, TaskState
from msatools.tasks.stacks import Stacks
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import StackWait, TaskClass

MS = 1_000_000
SECOND = 1000 * MS
BEGIN = 100 * SECOND

LCK, TMR, POL, DSK = TaskClass.LCK, TaskClass.TMR, TaskClass.POL, TaskClass.DSK
Numbers = npt.NDArray[np.int64]
COLUMNS = {
    **dict.fromkeys(("address", "signal", "start_ns", "sum_exec_ns"), "u8"),
    **dict.fromkeys(("exec_start_ns", "run_delay_ns", "last_queued_ns"), "u8"),
    **dict.fromkeys(("utime_ns", "stime_ns", "nvcsw", "nivcsw"), "u8"),
    **dict.fromkeys(("min_flt", "maj_flt"), "u8"),
    **dict.fromkeys(("cpu", "state", "flags"), "u4"),
    **dict.fromkeys(("pid", "tgid", "exit_state", "on_cpu", "on_rq"), "i4"),
    "sched_delayed": "u1",
}

NO_WAIT = len(TaskClass)
WAITS = (
    *(StackWait(cls, None, None, None) for cls in TaskClass),
    StackWait(TaskClass.OTH, None, None, None, preempted=True),
)


@dataclass
class Thread:
    """A simulated thread with the kernel's counters."""

    pid: int
    at_ns: int = BEGIN
    columns: dict[str, int] = field(default_factory=dict)
    task_class: TaskClass = POL
    class_known: bool = True
    woken_from: TaskClass | None = None
    """The class that it slept in before it waited for a CPU."""

    counted: tuple[int, int] = (0, 0)
    """Voluntary and involuntary switches before the interval."""

    def __post_init__(self) -> None:
        self.columns = {
            **dict.fromkeys(COLUMNS, 0),
            **dict.fromkeys(("pid", "tgid"), self.pid),
            **dict.fromkeys(("state", "utime_ns", "stime_ns"), 1),
            **dict.fromkeys(("start_ns", "sum_exec_ns"), SECOND),
            **dict.fromkeys(("nvcsw", "nivcsw"), 1000),
            "address": 4096 * self.pid,
            "signal": 512 * self.pid,
            "exec_start_ns": BEGIN - SECOND,
            **self.columns,
        }

    def sleeps(self, ms: float, task_class: TaskClass | None = None) -> "Thread":
        """Sleep: in a new sleep if a class is given, else in the same one."""
        if task_class is not None:
            self._leaves("nvcsw", 1)
            self.task_class = task_class
        return self.goes(ms)

    def runs(self, ms: float) -> "Thread":
        self.goes(ms)
        ns = round(ms * MS)
        self.columns["sum_exec_ns"] += ns
        self.columns |= {"state": 0, "on_cpu": 1, "on_rq": 1, "last_queued_ns": 0}
        self.columns["exec_start_ns"] = self.at_ns
        self.task_class = TaskClass.CPU
        return self

    def waits(self, ms: float) -> "Thread":
        """Wait for a CPU, after being preempted or woken."""
        self.woken_from = None if self.columns["on_cpu"] else self.task_class
        if self.columns["on_cpu"]:
            self._leaves("nivcsw", 0)
        self.columns |= {"state": 0, "on_rq": 1, "last_queued_ns": self.at_ns}
        self.task_class = TaskClass.LAT
        return self.goes(ms)

    def gets_cpu(self) -> "Thread":
        """End a wait for a CPU, which is then counted."""
        waited = self.at_ns - self.columns["last_queued_ns"]
        self.columns["run_delay_ns"] += waited
        return self.runs(0)

    def dies(self) -> "Thread":
        self._leaves("nvcsw", 0)
        self.columns |= {"exit_state": EXIT_ZOMBIE, "state": 0x80}
        self.task_class = TaskClass.ZMB
        return self

    def ran_instead(self, ms: float) -> "Thread":
        """Run for part of the current wait for a CPU."""
        waited = self.at_ns - self.columns["last_queued_ns"]
        self.columns["run_delay_ns"] += waited - round(ms * MS)
        self.columns["sum_exec_ns"] += round(ms * MS)
        return self

    def loses_stamp(self) -> "Thread":
        """Migrate as a delayed sleeper (6.12), which overwrites its stamp."""
        self.columns["exec_start_ns"] = 0
        return self

    def is_known(self, known: int) -> "Thread":
        self.class_known = bool(known)
        return self

    def _leaves(self, counter: str, state: int) -> None:
        self.columns[counter] += 1
        self.columns |= {"state": state, "on_cpu": 0, "on_rq": 0}
        self.columns["exec_start_ns"] = self.at_ns

    def goes(self, ms: float) -> "Thread":
        self.at_ns += round(ms * MS)
        return self


def snapshot(*threads: Thread) -> TaskSample:
    """Return a snapshot of threads that are at the same time."""
    (at_ns,) = {thread.at_ns for thread in threads}
    records = np.zeros(len(threads), list(COLUMNS.items()))
    for row, thread in enumerate(threads):
        for name, value in thread.columns.items():
            records[name][row] = value
    tasks = TaskTable(records, frozenset(COLUMNS))
    clocks = Clocks(at_ns, 0, np.zeros(1, np.int64))
    age = at_ns - tasks["exec_start_ns"].astype(np.int64)
    classes = np.array([thread.task_class for thread in threads], np.uint8)
    bound = np.full(len(threads), AgeBound.EXACT, np.uint8)
    bound[tasks["exec_start_ns"] == 0] = AgeBound.UPPER
    woken = [NO_WAIT if t.woken_from is None else t.woken_from for t in threads]
    text: Any = None
    stacks = Stacks(text, index=np.array(woken, np.int32))
    return TaskSample(
        tasks,
        clocks,
        microstates(tasks, clocks),
        TaskState(classes, age, bound, stacks, WAITS),
        np.array([thread.class_known for thread in threads]),
        np.zeros(len(threads), np.bool_),
        took_ns=0,
    )


def by_class(
    off: OffCpuByClass, row: int = 0
) -> dict[TaskClass | None, tuple[int, int]]:
    return {part.task_class: (part.ns, part.error_ns) for part in off.parts(row)}


def parts(made: Deltas, row: int = 0) -> list[float]:
    """Return user, system, latency, off-CPU and zombie in ms; they sum to the life."""
    lives = made.lives
    arrays = (lives.user_ns, lives.system_ns, lives.latency_ns, lives.off_cpu_ns)
    found = [int(values[row]) for values in (*arrays, lives.zombie_ns)]
    assert sum(found) == lives.lifetime_ns[row]
    assert min(found) >= 0
    off = made.off
    assert off.ns[row].sum() + off.untold_ns[row] == lives.off_cpu_ns[row]
    assert off.ns[row].min() >= 0
    return [value / MS for value in found]


def off(made: Deltas, row: int = 0) -> dict[str | None, float]:
    """Return off-CPU time by class, in ms."""
    found = by_class(made.off, row)
    return {key and key.name: ns / MS for key, (ns, _) in found.items()}


def exactly(made: Deltas, row: int = 0) -> dict[str | None, float]:
    """Return off-CPU time by class after checking that none of it is an estimate."""
    assert made.off.exact[row]
    assert not made.off.error_ns[row].any()
    return off(made, row)


Step = Callable[[Thread], object]
LOSES_STAMP = "runs 10, sleeps 90 DSK, loses_stamp"


def between(first: TaskSample, *later: TaskSample) -> Deltas:
    """Return the interval from the first to the last of some snapshots."""
    under_way = Interval(first)
    for sample in later:
        under_way.add(sample)
    return under_way.end()


def interval(thread: Thread, *steps: Step) -> Deltas:
    """Return the interval of one thread, with a snapshot after each step."""
    samples = [snapshot(thread)]
    for step in steps:
        step(thread)
        samples.append(snapshot(thread))
    return between(*samples)


def acts(words: str) -> Step:
    """Return a step from text such as ``runs 50, sleeps 850 TMR``."""

    def step(thread: Thread) -> None:
        for act in filter(None, words.split(", ")):
            name, *more = act.split()
            amounts = [TaskClass[w] if w.isalpha() else int(w) for w in more]
            getattr(thread, name)(*amounts)

    return step


def made_by(before: str, during: str) -> tuple[Thread, Deltas]:
    """Return the interval of one thread; a bar in the text makes a snapshot."""
    thread = Thread(1)
    acts(before)(thread)
    thread.counted = thread.columns["nvcsw"], thread.columns["nivcsw"]
    return thread, interval(thread, *map(acts, during.split(" | ")))


EXACT: dict[str, tuple[str, str, list[int], dict[str, int]]] = {
    # Before and during the interval, its parts, and off-CPU time by class.
    "never switches": (
        "",
        "sleeps 400 | sleeps 600",
        [0, 0, 0, 1000, 0],
        {"POL": 1000},
    ),
    # Both sleeps are known without samples: from the first and the last snapshot.
    "one sleep after another": (
        *("", "sleeps 100, runs 50, sleeps 850 TMR"),
        *([25, 25, 0, 950, 0], {"TMR": 850, "POL": 100}),
    ),
    "began in it": ("runs 5", "runs 10, sleeps 90 DSK", [5, 5, 0, 90, 0], {"DSK": 90}),
    "ended in it": ("", "sleeps 90, runs 10", [5, 5, 0, 90, 0], {"POL": 90}),
    "stamp is lost": ("runs 1", LOSES_STAMP, [5, 5, 0, 90, 0], {"DSK": 90}),
    "latency": (
        *("", "sleeps 100, waits 30, gets_cpu, runs 20, waits 50"),
        *([10, 10, 80, 100, 0], {"POL": 100}),
    ),
    "woken from the only one": (
        *("runs 5", "runs 10, sleeps 80 LCK, waits 10", [5, 5, 10, 80, 0]),
        {"LCK": 80},
    ),
    # The wait before the interval does not count.
    "open latency is clipped": (
        *("runs 1, waits 500", "goes 70, gets_cpu, runs 30"),
        *([15, 15, 70, 0, 0], {}),
    ),
    # The first snapshot shows a wait of 30 ms, of which it ran for 25.
    "wait that ended before the clocks were read": (
        *("", "sleeps 70, waits 30 | ran_instead 25, runs 1, sleeps 99 TMR"),
        *([13, 13, 5, 169, 0], {"TMR": 99, "POL": 70}),
    ),
    # The switch at exit is not a sleep.
    "dies": ("", "sleeps 50, runs 10, dies, goes 40", [5, 5, 0, 50, 40], {"POL": 50}),
    "dead before": ("dies", "goes 70", [0, 0, 0, 0, 70], {}),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_times(case: str) -> None:
    before, during, expected, by_class = EXACT[case]
    thread, made = made_by(before, during)
    assert parts(made) == expected
    assert exactly(made) == by_class
    assert made.interval_ns == sum(expected) * MS
    assert made.samples == during.count("|")
    switched = made.nvcsw[0] + thread.counted[0], made.nivcsw[0] + thread.counted[1]
    assert switched == (thread.columns["nvcsw"], thread.columns["nivcsw"])
    assert not made.lives.impossible[0]


GUESSED: dict[str, tuple[str, str, dict[str | None, int]]] = {
    # Only the states at both ends are known.
    "sleeps that nothing saw": (
        *("", "sleeps 100, runs 10, sleeps 200 DSK, runs 10, sleeps 300 TMR"),
        {"TMR": 300, "POL": 300},
    ),
    "woken from the last of them": (
        *("runs 1", "sleeps 100 DSK, runs 10, sleeps 200 LCK, waits 10"),
        {"LCK": 300},
    ),
    "preempted after the last of them": (
        *("runs 1", "sleeps 100 DSK, runs 10, sleeps 200 LCK, runs 1, waits 10"),
        {None: 300},
    ),
    # After another sleep, the time of each of the two is unknown.
    "stamp is lost": ("", f"{LOSES_STAMP} | sleeps 100", {"DSK": 145, "POL": 45}),
    "class that is not known": ("", "runs 1, sleeps 99 DSK, is_known 0", {None: 99}),
    # The stack could not be read the first time, and it keeps sleeping.
    "class known later": (
        *("", "sleeps 50, is_known 0 | sleeps 50, is_known 1"),
        {None: 50, "POL": 50},
    ),
    # Time in interrupts is neither on-CPU time, latency nor sleep.
    "interrupts": ("runs 1", "runs 60, goes 40, runs 0", {None: 40}),
}


@pytest.mark.parametrize("case", GUESSED)
def test_estimated_times(case: str) -> None:
    before, during, by_class = GUESSED[case]
    _, made = made_by(before, during)
    assert off(made) == by_class
    assert not made.off.exact[0]


def test_estimate() -> None:
    """Sleeps on futexes and timers, 7:3, that only samples can observe."""
    random = np.random.default_rng(1)
    thread = Thread(1)
    under_way = Interval(snapshot(thread))
    for _ in range(200):
        for _ in range(int(random.integers(3, 12))):
            is_lock = random.random() < 0.7
            thread.runs(0.5).sleeps(1 + random.random(), LCK if is_lock else TMR)
        under_way.add(snapshot(thread))
    made = under_way.end()
    found = by_class(made.off)
    total = int(made.lives.off_cpu_ns[0])
    for task_class, share in ((LCK, 0.7), (TMR, 0.3)):
        ns, error = found[task_class]
        assert abs(ns - share * total) < 3 * error
        # The error of 199 samples, without the exact part.
        assert 0.5 < error / (total * (0.7 * 0.3 / 199) ** 0.5) < 1.1
    assert not made.off.exact[0]


def test_sleep_that_counts_as_latency() -> None:
    """On 6.12 a wake-up can add more latency than the time since."""

    def step(thread: Thread) -> None:
        thread.sleeps(900).waits(2).gets_cpu()
        thread.columns["run_delay_ns"] += 5000 * MS
        thread.runs(8).sleeps(90, TMR)

    alone = interval(Thread(1), step)
    # Without a sample, part of the sleep cannot be separated from latency.
    assert parts(alone) == [4, 4, 902, 90, 0]
    assert alone.lives.impossible[0]
    assert alone.lives.missed_ns[0] == 4100 * MS
    # A sample shows that it slept until then.
    made = interval(Thread(1), lambda t: t.sleeps(0), lambda t: t.sleeps(890), step)
    assert made.interval_ns == 1890 * MS
    assert parts(made)[2] == 902
    assert exactly(made) == {"POL": 890, "TMR": 90}


def newborn(pid: int, at_ns: int, **columns: int) -> Thread:
    counted = dict.fromkeys(("sum_exec_ns", "nvcsw", "nivcsw"), 0)
    columns = {"start_ns": at_ns, "exec_start_ns": at_ns, **counted, **columns}
    return Thread(pid, at_ns, columns, TaskClass.CPU)


def test_born_within_the_interval() -> None:
    old = Thread(1)
    samples = [snapshot(old), snapshot(old.sleeps(100))]
    new = newborn(2, old.at_ns).runs(10).sleeps(20, TMR)
    samples.append(snapshot(new, old.sleeps(30)))
    made = between(*samples, snapshot(old.sleeps(70), new.sleeps(70)))
    assert made.born.tolist() == [False, True]
    assert parts(made, 0) == [0, 0, 0, 200, 0]
    assert parts(made, 1) == [5, 5, 0, 90, 0]
    assert exactly(made, 0) == {"POL": 200}
    assert exactly(made, 1) == {"TMR": 90}
    assert made.nvcsw.tolist() == [0, 1]


def test_born_during_the_first_snapshot() -> None:
    """Its counters since birth are cut to the length of the interval."""
    first = replace(snapshot(Thread(1)), took_ns=300 * MS)
    born = BEGIN - 200 * MS
    asleep = newborn(2, born).runs(40).sleeps(260, TMR)
    # It waited for a CPU during the snapshot, and ran in the interval.
    busy = newborn(3, born).waits(150).gets_cpu().runs(150)
    missed = newborn(4, BEGIN - 300 * MS - 2 * BOUND_NS).runs(400 + 2 * BOUND_NS / MS)
    made = between(first, snapshot(Thread(1).sleeps(100), asleep, busy, missed))
    assert made.born.tolist() == [False, True, True, True]
    assert parts(made, 1) == [20, 20, 0, 60, 0]
    assert exactly(made, 1) == {"TMR": 60}
    assert parts(made, 2) == [50, 50, 0, 0, 0]
    assert parts(made, 3) == [0, 0, 0, 0, 0]
    assert made.nvcsw.tolist() == [0, 1, 0, 0]
    # The wait fits into its lifetime, so it is not an impossible counter.
    assert not made.lives.missed_ns.any()


@pytest.mark.parametrize("seed", range(10))
def test_parts_of_random_threads_sum_up(seed: int) -> None:
    """Exact times are exact."""
    random = np.random.default_rng(seed)
    threads = [Thread(pid) for pid in range(1, 30)]
    slept: dict[int, dict[str, float]] = {thread.pid: {} for thread in threads}
    ran, waited = (dict.fromkeys(slept, 0.0) for _ in range(2))
    under_way = Interval(snapshot(*threads))
    pace = 10 ** random.uniform(0, 2.5, len(threads))
    for _ in range(12):
        end = threads[0].at_ns + 100 * MS
        for thread, mean in zip(threads, pace, strict=True):
            while (left := (end - thread.at_ns) / MS) > 0:
                ms = min(left, round(random.exponential(mean), 3) + 0.001)
                what = int(random.integers(4))
                if thread.columns["state"] == 1 and what > 0:
                    key = thread.task_class.name
                    slept[thread.pid][key] = slept[thread.pid].get(key, 0) + ms
                    thread.sleeps(ms)
                elif what == 0 and thread.task_class == TaskClass.LAT:
                    thread.gets_cpu()
                elif what == 0:
                    waited[thread.pid] += ms
                    thread.waits(ms)
                elif thread.task_class == TaskClass.CPU:
                    if what == 1:
                        ran[thread.pid] += ms
                        thread.runs(ms)
                    else:
                        thread.sleeps(0, (LCK, DSK)[what - 2])
                elif thread.task_class == TaskClass.LAT:
                    thread.gets_cpu()
        under_way.add(snapshot(*threads))
    made = under_way.end()
    exact = 0
    for row, thread in enumerate(threads):
        found = parts(made, row)
        assert sum(found[:2]) == pytest.approx(ran[thread.pid], abs=0.01)
        assert found[2] == pytest.approx(waited[thread.pid], abs=0.01)
        if made.off.exact[row]:
            exact += 1
            expected = {k: v for k, v in slept[thread.pid].items() if v > 0.01}
            times = {k: v for k, v in off(made, row).items() if v > 0.01}
            assert times == pytest.approx(expected, abs=0.01)
    assert exact > 0


# --- ended threads


def processes(count: int, **dead: list[int]) -> Processes:
    """Return processes with the sums of their ended threads."""

    def column(name: str) -> Numbers:
        return np.array(dead.get(name, [0] * count))

    zeros = np.zeros(count, np.int64)
    return Processes(
        known=np.ones(count, np.bool_),
        nr_threads=zeros,
        group_exit_code=zeros,
        dead=ProcessSums(*map(column, names(ProcessSums))),
        dead_sum_exec_ns=column("sum_exec"),
    )


def cpu_ns(made: Ended) -> list[int]:
    found: list[int] = (made.user_ns + made.system_ns).tolist()
    return found


def test_threads_that_ended() -> None:
    """The interval excludes what ended threads had done before it."""
    leader = Thread(1)
    ends = Thread(2, columns={"tgid": 1, "signal": 512, "nvcsw": 40})
    other = Thread(3)
    first = snapshot(leader, ends, other)
    last = snapshot(leader.sleeps(1000), other.sleeps(1000))
    made = ended(
        first,
        processes(3, sum_exec=[7, 7, 0], nvcsw=[5, 5, 0], utime_ns=[4, 4, 0]),
        last,
        # 300 ms and 3 switches more than before; and a thread born and ended since.
        processes(
            2,
            sum_exec=[7 + SECOND + 300 * MS + 50 * MS, 0],
            nvcsw=[5 + 40 + 3 + 1, 0],
            utime_ns=[4 + 1 + 3, 0],
            stime_ns=[1 + 1, 0],
            min_flt=[8, 0],
            maj_flt=[6, 0],
        ),
    )
    assert made.nvcsw.tolist() == [4, 0]
    assert (made.min_flt[0], made.maj_flt[0]) == (8, 6)
    assert cpu_ns(made) == [350 * MS, 0]
    assert made.user_ns[0] == pytest.approx(350 * MS * 3 / 4, abs=1)


@pytest.mark.parametrize("reused", [False, True])
def test_process_that_is_new(reused: bool) -> None:
    """It can have the memory of an ended process, whose sums do not count."""
    gone, new = Thread(2, columns={"signal": 4096}), newborn(3, BEGIN + MS)
    if reused:
        new.columns["signal"] = 4096
    made = ended(
        snapshot(Thread(1), gone),
        processes(2, sum_exec=[9, 4 * SECOND], nvcsw=[0, 50]),
        snapshot(Thread(1).sleeps(1000), new.runs(999)),
        processes(2, sum_exec=[9, 5 * MS], nvcsw=[0, 2]),
    )
    assert cpu_ns(made) == [0, 5 * MS]
    assert made.nvcsw.tolist() == [0, 2]


@pytest.mark.parametrize("unknown", [0, 1])
def test_process_that_is_unknown_at_one_end(unknown: int) -> None:
    """Without the sums at both ends, the difference is unknown."""
    first, last = processes(1, sum_exec=[9]), processes(1, sum_exec=[SECOND])
    (first, last)[unknown].known[:] = False
    samples = snapshot(Thread(1)), snapshot(Thread(1).sleeps(1000))
    assert cpu_ns(ended(samples[0], first, samples[1], last)) == [0]
