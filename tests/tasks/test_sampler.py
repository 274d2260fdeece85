# SPDX-License-Identifier: LGPL-2.1-or-later

"""Samples of threads are right, and reuse what has not changed since the last one."""

import drgn
import numpy as np
import pytest

from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.prstat.interval import Interval
from msatools.tasks import sampler as module
from msatools.tasks.sampler import USUAL_SHARE, Sampler, TaskSample, collect_now
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass
from tests.support.dumps import open_dump


@pytest.fixture(scope="module", params=["tasks-6.1", "tasks-6.12"])
def prog(request: pytest.FixtureRequest) -> drgn.Program:
    return open_dump(request.param, "btf")


class Stepped:
    """A dump whose tasks can be changed between two samples, as if they had run."""

    def __init__(self, prog: drgn.Program) -> None:
        self.reader = Reader(prog)
        self.losses = LossLog()
        self.sampler = Sampler(self.reader, self.losses, hz=10, read=self._read)
        self.table = self.sampler.task_reader.read_all(LossLog())

    def _read(self, losses: LossLog) -> TaskTable:
        return TaskTable(self.table.records.copy(), self.table.columns)


def awake(sample: TaskSample) -> int:
    """Count the threads that wait for a CPU; each sample unwinds their stacks."""
    return int(np.count_nonzero(sample.now.classes == TaskClass.LAT))


def test_first_sample_is_as_collected(prog: drgn.Program) -> None:
    reader, losses = Reader(prog), LossLog()
    sampler = Sampler(reader, losses)
    sample = sampler.sample()
    expected = collect_now(
        sampler.collector, prog, sample.tasks, read_clocks(reader, LossLog())
    )
    assert (sample.now.classes == expected.classes).all()
    assert (sample.now.age_ns == expected.age_ns).all()
    assert (sample.now.age_bound == expected.age_bound).all()
    for row in range(0, len(sample.tasks), 7):
        assert sample.now.stacks[row] == expected.stacks[row]
        index, other = sample.now.stacks.index[row], expected.stacks.index[row]
        assert sample.now.waits[index] == expected.waits[other]
    assert sample.class_known.all()
    assert sampler.period_s is None


def test_thread_without_switches_is_not_unwound_again(prog: drgn.Program) -> None:
    stepped = Stepped(prog)
    first = stepped.sampler.sample()
    reads, unwound = stepped.reader.reads, stepped.losses.coverage["stacks"]
    assert unwound > 2000
    second = stepped.sampler.sample()
    assert stepped.losses.coverage["stacks"] == unwound + awake(first)
    assert stepped.reader.reads - reads < 10 + awake(first)
    assert (second.now.classes == first.now.classes).all()
    for row in range(0, len(first.tasks), 7):
        assert second.now.stacks[row] == first.now.stacks[row]


def test_changed_thread_is_unwound_again(prog: drgn.Program) -> None:
    """A change shows in switch counts, state or start time."""
    stepped = Stepped(prog)
    first = stepped.sampler.sample()
    waits = np.flatnonzero(first.now.classes == TaskClass.TMR)
    assert len(waits) >= 4
    records = stepped.table.records
    records["nvcsw"][waits[0]] += 1
    records["nivcsw"][waits[1]] += 1
    records["state"][waits[2]] = 0
    records["start_ns"][waits[3]] += 1
    unwound = stepped.losses.coverage["stacks"]
    second = stepped.sampler.sample()
    assert stepped.losses.coverage["stacks"] == unwound + 4 + awake(first)
    assert second.now.classes[waits[2]] == TaskClass.LAT
    for row in waits[[0, 1, 3]].tolist():
        assert second.now.stacks[row] == first.now.stacks[row]


def test_threads_that_come_and_go(prog: drgn.Program) -> None:
    stepped = Stepped(prog)
    everyone = stepped.table
    order = np.random.default_rng(1).permutation(len(everyone))
    stepped.table = TaskTable(everyone.records[order[100:]], everyone.columns)
    first = stepped.sampler.sample()
    stepped.table = TaskTable(everyone.records[order[:-100]], everyone.columns)
    second = stepped.sampler.sample()
    expected = Sampler(stepped.reader, LossLog()).sample().now.classes[order[:-100]]
    assert (second.now.classes == expected).all()
    interval = Interval(first)
    interval.add(second)
    made = interval.end()
    assert made.gone == 100
    assert np.flatnonzero(made.born).tolist() == list(range(100))
    # No time has passed between the two.
    assert not made.lives.lifetime_ns.any()


def test_unused_stacks_are_dropped(
    prog: drgn.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SPARE_STACKS", 5)
    stepped = Stepped(prog)
    everyone = stepped.table
    first = stepped.sampler.sample()
    few = np.zeros(len(everyone), np.bool_)
    few[::40] = True
    stepped.table = everyone.only(few)
    sample = stepped.sampler.sample()
    assert len(sample.now.waits) == len(sample.now.stacks.unique)
    assert len(sample.now.waits) == len({*sample.now.stacks.index.tolist(), 0})
    assert len(sample.now.waits) < len(first.now.waits)
    for row, old in enumerate(np.flatnonzero(few).tolist()):
        assert sample.now.stacks[row] == first.now.stacks[old]
        wait = sample.now.waits[sample.now.stacks.index[row]]
        assert wait == first.now.waits[first.now.stacks.index[old]]


class Racing(Stepped):
    """The same as on a running kernel: a task can change while it is read."""

    def __init__(self, prog: drgn.Program, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(prog)
        monkeypatch.setattr(self.sampler, "_live", True)
        reader = self.sampler.task_reader
        monkeypatch.setattr(reader, "read_each", lambda addresses, losses: addresses)
        monkeypatch.setattr(reader, "table", self._read_some)
        self.row = int(np.flatnonzero(self.table["comm"] == b"nanosleep")[0])
        """The row of a sleeping thread."""

        self._address = int(self.table["address"][self.row])
        self._rows = {
            int(address): row for row, address in enumerate(self.table["address"])
        }
        self._readings: list[np.void] = []

    def then(self, **columns: int) -> "Racing":
        """Change columns for the next time that the thread is read again."""
        record = self.table.records[self.row].copy()
        for name, value in columns.items():
            record[name] = value
        self._readings.append(record)
        return self

    def _read_some(self, addresses: list[int], losses: LossLog) -> TaskTable:
        records = self.table.records[[self._rows[address] for address in addresses]]
        if self._address in addresses and self._readings:
            records[addresses.index(self._address)] = self._readings.pop(0)
        return TaskTable(records, self.table.columns)

    @property
    def unwound(self) -> int:
        return self.losses.coverage["stacks"]


@pytest.fixture
def racing(prog: drgn.Program, monkeypatch: pytest.MonkeyPatch) -> Racing:
    return Racing(prog, monkeypatch)


def test_live_sample_is_the_same_if_nothing_changes(
    racing: Racing, prog: drgn.Program
) -> None:
    sample = racing.sampler.sample()
    expected = Stepped(prog).sampler.sample()
    assert (sample.now.classes == expected.now.classes).all()
    assert sample.class_known.all()
    for row in range(0, len(sample.tasks), 7):
        assert sample.now.stacks[row] == expected.now.stacks[row]
    unwound = racing.unwound
    racing.sampler.sample()
    assert racing.unwound == unwound + awake(sample)


def test_task_that_is_reused_while_it_is_read(racing: Racing) -> None:
    pid = racing.table["pid"][racing.row]
    racing.then(pid=4_000_000, start_ns=1)
    sample = racing.sampler.sample()
    assert len(sample.tasks) == len(racing.table) - 1
    assert pid not in sample.tasks["pid"]
    assert racing.losses.coverage["tasks_gone"] == 1


def test_task_that_wakes_up_while_it_is_read(racing: Racing) -> None:
    """The last record read is used, in all columns."""
    racing.then(state=0, on_rq=1, run_delay_ns=77)
    sample = racing.sampler.sample()
    assert sample.now.classes[racing.row] == TaskClass.LAT
    assert sample.tasks["run_delay_ns"][racing.row] == 77


def test_task_that_runs_after_its_stack_was_read(racing: Racing) -> None:
    """Its stack is complete and gives a class, but is not reused by the next sample."""
    switches = int(racing.table["nvcsw"][racing.row])
    racing.then(nvcsw=switches + 1)
    first = racing.sampler.sample()
    assert first.class_known[racing.row]
    unwound, others = racing.unwound, awake(first)
    racing.sampler.sample()
    assert racing.unwound == unwound + others + 1
    racing.sampler.sample()
    assert racing.unwound == unwound + 2 * others + 1


def test_torn_stack_gives_no_class(
    racing: Racing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack ends too early, and the task has run since."""
    stack, switches = (
        int(racing.table[name][racing.row]) for name in ("stack", "nvcsw")
    )
    words = racing.reader.words

    def torn(address: int, count: int) -> Addresses:
        found = words(address, count)
        if stack < address < stack + racing.sampler.collector.stack_bytes:
            found = found.copy()
            found[len(found) // 2 :] = 0
        return found

    monkeypatch.setattr(racing.reader, "words", torn)
    racing.then(nvcsw=switches + 1)
    sample = racing.sampler.sample()
    assert not sample.class_known[racing.row]
    assert racing.losses.coverage["classes_untold"] == 1


def test_list_that_changes_while_it_is_followed(
    racing: Racing, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [racing.table.only(racing.table["pid"] < 50)] * 2

    def read(losses: LossLog) -> TaskTable:
        if left:
            losses.lose("lists_broken", "it breaks off")
            return left.pop()
        return racing.table

    monkeypatch.setattr(racing.sampler, "_read", read)
    assert len(racing.sampler.sample().tasks) == len(racing.table)
    assert racing.losses.coverage["walks_retried"] == 2
    assert racing.losses.notes == {}
    # If the list changes at each try, the sample is incomplete, with a note.
    left = [racing.table.only(racing.table["pid"] < 50)] * 9
    assert len(racing.sampler.sample().tasks) == len(left[0])
    assert racing.losses.lost["lists_broken"] == 1


def test_period(prog: drgn.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The period is as requested, or longer if a sample costs more than its share."""
    stepped = Stepped(prog)
    stepped.sampler.sample()
    assert stepped.sampler.period_s == 0.1
    times = iter([100.0, 100.005, 200.0, 201.0])
    monkeypatch.setattr(module.time, "process_time", lambda: next(times))
    stepped.sampler.sample()
    assert stepped.sampler.period_s == 0.1
    stepped.sampler.sample()
    assert stepped.sampler.period_s == 1 / USUAL_SHARE
