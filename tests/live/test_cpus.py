# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-cpus inside of a running kernel, against what that says of itself meanwhile.

Each sample is between two readings of files of /proc: what those say right before and
right after it are the bounds of what it says. (See ``fixtures/lab/guest/cpulive.py``
for what the CPUs do, and ``cpuexperiment.py`` for the processor sets.)
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest import cpuexperiment
from fixtures.lab.guest import cpulive as guest
from fixtures.lab.inside import RESULTS
from msatools.cli.options import cpu_list
from tests.docs.forms import Formed
from tests.docs.pages import DOCS, Page

KERNELS = ("6.1", "6.12")
SECOND = 10**9
LATE_NS = 500_000_000
"""How late a tick may come to the coarse clock by which a report is taken."""

USER_TICK_NS = 10_000_000
"""/proc/stat has whole ones of these."""

OFFLINE = guest.COMES_AND_GOES

Facts = dict[str, Any]
Numbers = dict[int, int]
"""By CPU."""


def results(name: str) -> Facts:
    run = lab.build(name)
    found: Facts = json.loads((run.directory / RESULTS).read_text())
    return found


# --- what the kernel says


def table(text: str) -> dict[str, Numbers]:
    """Read a table with a column a CPU; lines with a total alone are left out."""
    head, *lines = text.splitlines()
    cpus = [int(word.removeprefix("CPU")) for word in head.split()]
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        counts = [int(word) for word in rest.split()[: len(cpus)] if word.isdigit()]
        if len(counts) == len(cpus):
            found[name.strip()] = dict(zip(cpus, counts, strict=True))
    return found


def meanwhile(run: Facts, name: str) -> Counter[int]:
    """Count the interrupts that came to each CPU during a run, by a part of a name."""
    first, *_, last = (reading["interrupts"]["text"] for reading in run["readings"])
    chosen = [line.split(":")[0].strip() for line in last.splitlines() if name in line]
    before, after = table(first), table(last)
    came: Counter[int] = Counter()
    for number in chosen:
        came.update(after[number])
        came.subtract(before[number])
    return came


def stat(text: str) -> dict[str, list[int]]:
    lines = (line.split() for line in text.splitlines())
    return {name: [int(word) for word in words] for name, *words in lines if words}


TIMES = {
    # usr has niced tasks too, and there are no guests.
    ("usr_ns",): (0, 1),
    ("sys_ns",): (2,),
    # Tasks that wait for I/O make of one the other afterwards.
    ("idl_ns", "wt_ns"): (3, 4),
    ("irq_ns",): (5, 6),
    ("st_ns",): (7,),
}
"""Columns, and what makes them of /proc/stat's."""


def files(reading: Facts) -> list[Facts]:
    """Give what was read at once: texts, and when each was read."""
    return [told for told in reading.values() if isinstance(told, dict)]


@dataclass(frozen=True)
class Look:
    """When all was read: no earlier than the first, no later than the other two."""

    from_ns: int
    counted_ns: int
    """But for interrupts of devices, and what follows."""

    to_ns: int


@dataclass(frozen=True)
class Sample:
    """One report, and the readings around it."""

    report: Facts
    readings: list[Facts]
    began: Look | None
    """The look that its interval began with; ``None`` if it is since boot."""

    ended: Look
    first: bool

    @property
    def looks_ns(self) -> int:
        """How long the looks at its begin and end took, the clock being read last.

        What a CPU had in an interval by its counters and by the clock differs by as
        much: some 0.1 s, and more where CPUs are emulated by a busy machine.
        """
        looks = [self.ended] + [self.began] * (self.began is not None)
        return sum(look.counted_ns - look.from_ns for look in looks if look)

    @property
    def rows(self) -> dict[int, Facts]:
        return {row["cpu"]: row for row in self.report["cpus"]}

    def before(self, name: str, moment: int) -> str:
        """Give what a file said last, before a moment."""
        texts = [
            reading[name]["text"]
            for reading in self.readings
            if reading[name]["to_ns"] <= moment
        ]
        return str(texts[-1])

    def after(self, name: str, moment: int) -> str:
        return str(
            next(
                reading[name]["text"]
                for reading in self.readings
                if reading[name]["from_ns"] >= moment
            )
        )

    def bounds(
        self,
        name: str,
        number: Callable[[str], int | None],
        slack: int = 0,
        late: bool = False,
    ) -> tuple[int, int] | None:
        """Tell what a counter can be at least and at most.

        :param number: Takes it out of the file's text; ``None`` if it is not there.
        :param slack: What the file leaves out.
        :param late: Whether it is read after the clock is.
        """
        least = number(self.before(name, self.ended.from_ns))
        most = number(self.after(name, self._end(self.ended, late)))
        if least is None or most is None:
            return None
        if self.began is None:
            return least, most + slack
        before = number(self.before(name, self.began.from_ns))
        after = number(self.after(name, self._end(self.began, late)))
        if before is None or after is None:
            return None
        return max(least - after - slack, 0), most + slack - before

    def _end(self, look: Look, late: bool) -> int:
        return look.to_ns if late else look.counted_ns

    def steady(self, late: bool = False) -> list[int]:
        """Give the CPUs that are there from the begin to the end."""
        moments = [self.ended.from_ns, self._end(self.ended, late)]
        if self.began:
            moments += [self.began.from_ns, self._end(self.began, late)]
        there = [
            {*next(iter(table(text).values()))}
            for moment in moments
            for text in (
                self.before("interrupts", moment),
                self.after("interrupts", moment),
            )
        ]
        return sorted(set.intersection(*there))


@dataclass(frozen=True)
class Live:
    """What the guest left."""

    facts: Facts

    def reports(self, name: str) -> list[Facts]:
        lines = self.facts["runs"][name]["stdout"].splitlines()
        return [json.loads(line) for line in lines]

    def samples(self, name: str) -> Iterator[Sample]:
        run = self.facts["runs"][name]
        before: Look | None = None
        for number, (report, line) in enumerate(
            zip(self.reports(name), run["lines"], strict=True)
        ):
            taken, interval = report["taken_at_ns"], report["interval_ns"]
            # The first look, which has to learn the kernel's types, tells no time. It
            # takes Python longer to start than the first reading takes.
            earliest = max(told["to_ns"] for told in files(run["readings"][0]))
            from_ns = earliest
            if interval is not None:
                from_ns = taken - report["cost"]["elapsed_ns"]
                start = taken - interval
                begun_ns = min(start + LATE_NS, from_ns)
                before = before or Look(earliest, begun_ns, from_ns)
            seen_ns = line["seen_ns"]
            look = Look(from_ns, min(taken + LATE_NS, seen_ns), seen_ns)
            yield Sample(report, run["readings"], before, look, number == 0)
            before = look

    @property
    def changes(self) -> tuple[Facts, Facts]:
        gone, back = self.facts["events"]
        return gone, back


@pytest.fixture(scope="module", params=KERNELS)
def live(request: pytest.FixtureRequest) -> Live:
    return Live(results(f"cpulive-{request.param}"))


@pytest.fixture(scope="module")
def once(live: Live) -> Sample:
    """Since boot."""
    (sample,) = live.samples("once")
    return sample


@pytest.fixture(scope="module")
def intervals(live: Live) -> list[Sample]:
    return [*live.samples("interval")]


@pytest.fixture(scope="module")
def samples(once: Sample, intervals: list[Sample]) -> list[Sample]:
    return [once, *intervals]


def check(sample: Sample, ours: int | None, *bounds: Any, **more: Any) -> None:
    found = sample.bounds(*bounds, **more)
    assert found is not None
    least, most = found
    assert ours is not None
    assert least <= ours <= most


# --- counters


def total(sample: Sample, *columns: str) -> int | None:
    """Sum columns over CPUs; ``None`` if one of an online CPU is not known."""
    found = 0
    for row in sample.report["cpus"]:
        numbers = [row[column] for column in columns]
        if None in numbers:
            if row["online"]:
                return None
            continue
        found += sum(numbers)
    return found


def whole(sample: Sample) -> bool:
    """Tell whether all CPUs were there all the time: what one had is not another's."""
    online = {row["cpu"] for row in sample.report["cpus"] if row["online"]}
    return {*sample.steady()} == online >= {OFFLINE}


def test_some_samples_are_whole(samples: list[Sample]) -> None:
    """Else there would be nothing to look at."""
    assert [whole(sample) for sample in samples][:2] == [True, True]


def test_commands_have_nothing_to_complain_of(live: Live) -> None:
    for run in live.facts["runs"].values():
        assert (run["status"], run["stderr"]) == (0, "")
    reports = [report for name in live.facts["runs"] for report in live.reports(name)]
    assert all(report["coverage"]["cpus_unreadable"] == 0 for report in reports)
    codes = [{note["code"] for note in report["notes"]} for report in reports]
    # The host may have stopped a CPU of the guest while it was setting the clocks.
    assert set().union(*codes) <= {"cpus-changed", "clocks-changing"}
    assert not all("clocks-changing" in those for those in codes)


def test_devices_are_busy(live: Live) -> None:
    """Else there would be nothing to count."""
    for run in live.facts["runs"].values():
        assert meanwhile(run, "virtio0-input")[guest.BUSY] > 0
        assert meanwhile(run, "nvme")[guest.SENDER] > 0


def test_switches(samples: list[Sample]) -> None:
    def switched(text: str) -> int:
        return stat(text)["ctxt"][0]

    for sample in samples:
        check(sample, total(sample, "csw"), "stat", switched)
        for cpu in sample.steady():
            # Each is a call of the scheduler, but not each call is one.
            def called(text: str, cpu: int = cpu) -> int:
                (words,) = re.findall(rf"^cpu{cpu} (.*)$", text, re.M)
                return int(words.split()[2])

            bounds = sample.bounds("schedstat", called)
            assert bounds is not None
            # It counts since the setting was made.
            if sample.began:
                assert sample.rows[cpu]["csw"] <= bounds[1]


def test_times(samples: list[Sample]) -> None:
    told = 0
    for sample in samples:
        for cpu in sample.steady():
            for columns, places in TIMES.items():

                def spent(
                    text: str, cpu: int = cpu, places: tuple[int, ...] = places
                ) -> int:
                    words = stat(text)[f"cpu{cpu}"]
                    return USER_TICK_NS * sum(words[place] for place in places)

                numbers = [sample.rows[cpu][column] for column in columns]
                if None in numbers and sample.report["notes"]:
                    # A look that takes long may see more idle time than there was
                    # time between the clocks: that is not told, and said so.
                    assert columns == ("idl_ns", "wt_ns"), (cpu, columns)
                    continue
                assert None not in numbers, (cpu, columns)
                told += 1
                # Of each of the parts a part of one is left out. And a CPU that is
                # idle as it is looked at has been so until the clock is read.
                slack = len(places) * USER_TICK_NS
                if "idl_ns" in columns:
                    slack += sample.looks_ns
                check(sample, sum(numbers), "stat", spent, slack=slack)
    assert told


def test_interrupts_of_devices(intervals: list[Sample]) -> None:
    for sample in intervals:
        irqs = {str(irq["irq"]): irq for irq in sample.report["irqs"]}
        names = table(sample.before("interrupts", sample.ended.from_ns))
        assert {name for name in names if name.isdigit()} == irqs.keys()
        for name, irq in irqs.items():
            for cpu in sample.steady(late=True):

                def came(text: str, name: str = name, cpu: int = cpu) -> int:
                    return table(text)[name][cpu]

                ours = irq["counts"].get(str(cpu), 0)
                check(sample, ours, "interrupts", came, late=True)


# --- time


def test_intervals_are_in_kernel_time(live: Live) -> None:
    """From one look to the next, and each is within what the guest's clock says."""
    run = live.facts["runs"]["interval"]
    words = run["argv"]
    asked, count = (int(word) for word in words[-2:])
    reports = live.reports("interval")
    assert len(reports) == count
    taken = [report["taken_at_ns"] for report in reports]
    begin = taken[0] - reports[0]["interval_ns"]
    assert run["start_ns"] < begin
    for before, report in zip([begin, *taken], reports, strict=False):
        assert report["taken_at_ns"] - before == report["interval_ns"]
    for moment, line in zip(taken, run["lines"], strict=True):
        # A tick may be noted a little late, but no earlier.
        assert moment <= line["seen_ns"]
    # One that took too long delays the next, so that each alone may be shorter.
    longest = max(report["cost"]["elapsed_ns"] for report in reports)
    assert taken[-1] - begin >= count * asked * SECOND - longest


def need(live: Live, is_there: bool) -> None:
    """Skip a test of whose samples there is none, as looks took longer than intervals.

    What happens in the guest goes on meanwhile.
    """
    asked = int(live.facts["runs"]["interval"]["argv"][-2])
    costs = [report["cost"]["elapsed_ns"] for report in live.reports("interval")]
    assert is_there or max(costs) > asked * SECOND
    if not is_there:
        pytest.skip("the machine was too slow: a look took longer than an interval")


def with_hogs(live: Live, intervals: list[Sample]) -> list[Sample]:
    """Return the samples that began when all hogs were there."""
    start = max(task["to_ns"] for task in live.facts["tasks"].values())
    found = [s for s in intervals if s.began and s.began.from_ns > start]
    need(live, bool(found))
    return found


def test_time_of_cpus_without_ticks(live: Live, intervals: list[Sample]) -> None:
    """It is all told; of others ticks are counted, some of which emulation loses.

    How much of it is of which kind, /proc/stat bounds (test_times()): whenever a CPU
    goes or comes, all others stop in the kernel for as long as that takes.
    """
    columns = ("usr_ns", "sys_ns", "irq_ns", "wt_ns", "st_ns", "gst_ns", "idl_ns")
    for sample in intervals:
        interval = sample.report["interval_ns"]
        for cpu in (6, guest.ISOLATED):
            numbers = [sample.rows[cpu][name] for name in columns]
            assert None not in numbers
            assert abs(sum(numbers) - interval) < sample.looks_ns, cpu
        assert sample.rows[6]["idl_ns"] > 0
    for sample in with_hogs(live, intervals):
        assert sample.rows[guest.ISOLATED]["usr_ns"] > 0
        # Its tasks never sleep.
        busy = sample.rows[guest.FAIR]
        assert busy["idl_ns"] == busy["wt_ns"] == 0


# --- CPUs that come and go


def test_hot_plug(live: Live, intervals: list[Sample]) -> None:
    gone, back = live.changes
    seen = []
    for sample in intervals:
        row = sample.rows[OFFLINE]
        assert ("on" in row["state"], "off" in row["state"]) == (
            (True, False) if row["online"] else (False, True)
        )
        look = sample.ended
        if look.to_ns < gone["from_ns"] or look.from_ns > back["to_ns"]:
            assert row["online"]
            seen.append(True)
        elif look.from_ns > gone["to_ns"] and look.to_ns < back["from_ns"]:
            assert not row["online"]
            assert row["current"] is None
            assert row["runq"] == 0
            seen.append(False)
        # All others are always there.
        assert all(
            other["online"]
            for other in sample.report["cpus"]
            if other["cpu"] < 8 and other["cpu"] != OFFLINE
        )
    assert True in seen
    need(live, False in seen)


def test_cpu_that_is_off_all_the_time(live: Live, intervals: list[Sample]) -> None:
    gone, back = live.changes
    off = [
        sample
        for sample in intervals
        if sample.began
        and sample.began.from_ns > gone["to_ns"]
        and sample.ended.to_ns < back["from_ns"]
    ]
    for sample in off:
        row = sample.rows[OFFLINE]
        for column in ("csw", "intr", "soft", "xcal", "usr_ns", "sys_ns", "idl_ns"):
            assert row[column] == 0, column


def test_what_a_cpu_had_while_it_came_or_went(
    live: Live, intervals: list[Sample]
) -> None:
    """Idle time begins anew; it is not known then, and never more than there was."""
    changed = [sample for sample in intervals if sample.rows[OFFLINE]["idl_ns"] is None]
    assert changed
    for sample in intervals:
        assert sample.began
        events = [
            event
            for event in live.changes
            if event["to_ns"] > sample.began.from_ns
            and event["from_ns"] < sample.ended.to_ns
        ]
        if sample in changed:
            assert events
        # One that is looked at as it changes may be told the next time.
        elif len(events) == 1:
            (event,) = events
            assert (
                event["from_ns"] < sample.began.to_ns
                or event["to_ns"] > sample.ended.from_ns
            )
    for sample in changed:
        assert {note["code"] for note in sample.report["notes"]} == {"cpus-changed"}
        interval = sample.report["interval_ns"]
        for row in sample.report["cpus"]:
            for column in ("usr_ns", "sys_ns", "idl_ns", "wt_ns"):
                value = row[column]
                assert value is None or 0 <= value < interval + sample.looks_ns
            for column in ("csw", "intr", "soft", "xcal", "tlb"):
                # None that went back, which would be near 2**32 or 2**64.
                assert 0 <= row[column] < 1 << 31


# --- what CPUs are, and do


def test_states_and_sets(live: Live, samples: list[Sample]) -> None:
    facts = live.facts["facts"]

    def cpus(name: str) -> set[int]:
        return {*cpu_list(facts[f"/sys/devices/system/cpu/{name}"].strip())}

    sets = {guest.PARTITION: "/db", 6: "/quiet", guest.ISOLATED: "isolcpus"}
    for sample in samples:
        assert sample.rows.keys() == cpus("possible")
        for cpu, row in sample.rows.items():
            assert row["set"] == sets.get(cpu, "default")
            isolated = cpus("isolated") | {6}
            assert ("isolated" in row["state"]) is (cpu in isolated)
            assert ("nohz_full" in row["state"]) is (cpu in cpus("nohz_full"))
            # With -v, which the one without an interval has, all tasks are read.
            reads_tasks = sample.report["coverage"]["tasks"] > 0
            assert reads_tasks is (sample.report["interval_ns"] is None)
            for column in ("icsw", "migr"):
                assert (row[column] is not None) is reads_tasks
        kinds = {each["name"]: each["kind"] for each in sample.report["sets"]}
        assert kinds == {
            "default": "root",
            "/db": "root",
            "/quiet": "isolated",
            "isolcpus": "isolcpus",
            "nohz_full": "nohz_full",
        }
        by_name = {each["name"]: each["cpus"] for each in sample.report["sets"]}
        assert by_name["/db"] == [guest.PARTITION]
        assert by_name["/quiet"] == [6]
        online = {row["cpu"] for row in sample.report["cpus"] if row["online"]}
        assert {*by_name["default"]} == online - sets.keys()


def test_hogs_are_on_their_cpus(live: Live, intervals: list[Sample]) -> None:
    tasks = live.facts["tasks"]
    hogs = {
        guest.FAIR: {tasks[name]["pid"] for name in ("fair-0", "fair-1", "fair-2")},
        guest.ISOLATED: {tasks["isolated-hog"]["pid"]},
    }
    found: set[int] = set()
    for sample in with_hogs(live, intervals):
        for queue in sample.report["run_queues"]:
            told = [task for task in (queue["current"], *queue["waiting"]) if task]
            # Another may run there too: msa-cpus itself.
            found |= hogs.get(queue["cpu"], set()) & {task["pid"] for task in told}
            # That takes a stack, which goes on while it would be unwound.
            assert "doing" not in queue
            for other, pids in hogs.items():
                if other != queue["cpu"]:
                    assert not pids & {task["pid"] for task in told}
    # One may be on its way from the tree to the CPU while that is read, now and then.
    assert found == set.union(*hogs.values())


def test_interrupts_land_where_they_were_told_to(
    live: Live, intervals: list[Sample]
) -> None:
    """Until a CPU goes: then the driver says anew where they may go (virtio_net.c)."""
    number = live.facts["irqs"]["virtio0-input.0"]
    for sample in intervals:
        (irq,) = [irq for irq in sample.report["irqs"] if irq["irq"] == number]
        if sample.first:
            assert (irq["affinity"], irq["effective"]) == ([guest.BUSY], [guest.BUSY])
            assert irq["counts"].keys() <= {str(guest.BUSY)}
        assert {*irq["effective"]} <= {*irq["affinity"]}


# --- the experiment


# Guests of it take minutes each.
EXPERIMENTS = [pytest.param(each, marks=pytest.mark.long) for each in KERNELS]


@pytest.fixture(scope="module", params=EXPERIMENTS)
def steps(request: pytest.FixtureRequest) -> dict[str, Facts]:
    found = results(f"cpuexperiment-{request.param}")["steps"]
    return {step["name"]: step for step in found}


def run_of(step: Facts, *words: str) -> Facts:
    (found,) = [run for run in step["runs"] if run["argv"] == [*words]]
    assert (found["status"], found["stderr"]) == (0, "")
    return dict(found)


def test_the_guide_shows_what_is_printed(steps: dict[str, Facts]) -> None:
    """In the forms of what must be so; the two samples have twice as many rows."""
    page = Page(DOCS / "guides/processor-sets.md")
    shown = [block for block in page.consoles if block.live]
    for name, block in zip(("before", "no-interrupts", "execute"), shown, strict=True):
        (example,) = block.examples
        assert block.live
        printed = Formed(run_of(steps[name], *cpuexperiment.ROWS)["stdout"], block.live)
        assert not printed.lacks(Formed(example.shown, block.live)), printed.text
