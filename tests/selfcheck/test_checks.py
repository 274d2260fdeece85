# SPDX-License-Identifier: LGPL-2.1-or-later

"""All checks hold on real kernels, and each notices the damage that it is for."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import pytest
from drgn import FaultError, Object, Program, sizeof
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_pid, find_task
from drgn.helpers.linux.slab import find_slab_cache
from msgspec.structs import replace

from fixtures import lab
from fixtures.demo import DEMOS
from msatools.cli.answers import checks_of
from msatools.cpus.held_cpus import WantedLocks
from msatools.errors import MissingError
from msatools.kernel.report import quietly
from msatools.memory.memstat import collect_memstat
from msatools.program import Opened, TargetSpec, open_target
from msatools.registry import NAMES, load
from msatools.selfcheck import memory, selfcheck, tasks
from msatools.selfcheck.model import SelfCheckReport
from msatools.selfcheck.selfcheck import Check, SelfChecks
from msatools.whatis import lookup
from tests.support.overlay import lose, put

DUMPS = (
    *(f"memory-{kernel}" for kernel in ("5.10", "6.1", "6.12", "6.12generic", "7.x")),
    *(f"tasks-{kernel}" for kernel in ("6.1", "6.12", "6.12rt", "7.x")),
    *("crash-6.12", "locks-6.12", "locks-7.x"),
    *("fieldcpus-6.12", "fieldpackets-6.12", "stalls-locks-6.12"),
    *("zombies-6.1", "zombies-6.12", "zombies-7.x"),
    *(f"cpus-{kernel}" for kernel in ("6.1", "6.12", "7.x")),
    *(f"{name}-6.12arm64" for name in ("memory", "tasks", "locks", "zombies", "cpus")),
)
"""Dumps on which all checks hold."""


def opened(name: str) -> Opened:
    """Open a dump of the lab anew."""
    run = lab.build(name)
    path = run.dump("elf" if run.elf else "vmcore")
    return open_target(TargetSpec(path=str(path), types="btf"))


def checked(command: str, found: Opened) -> SelfCheckReport:
    return made(checks_of(load(command)), found, command)


def made(
    checks: Sequence[Check], found: Opened, command: str = "made"
) -> SelfCheckReport:
    return SelfChecks(command, checks, found.prog, found.target).report(quietly)


def failed(report: SelfCheckReport) -> set[str]:
    return {check.name for check in report.checks if check.verdict != "ok"}


UNWINDING = {"stacks.drgn"}
"""Without debug info drgn has no unwind tables."""

NOT_APPLICABLE = {
    "memory.cgroups": ("locks-", "fieldcpus-", "fieldpackets-", "stalls-"),
    "stacks.drgn": ("",),
}
"""Checks that do not apply, and how the names of the dumps begin where they do not."""

KNOWN = {("tasks-7.x", command): {"locks.unknown"} for command in ("locks", "report")}
"""Checks that fail: there a task waits for readers of a vm_area_struct."""


@cache
def once(name: str) -> Opened:
    return opened(name)


@pytest.mark.parametrize("command", NAMES)
@pytest.mark.parametrize("name", DUMPS)
def test_all_hold(name: str, command: str) -> None:
    report = checked(command, once(name))
    assert len(report.checks) >= len(checks_of(load(command)))
    assert report.readings == 1
    for check in report.checks:
        if check.verdict == "not-applicable":
            assert name.startswith(NOT_APPLICABLE[check.name]), check
            assert check.reason
        elif check.name not in KNOWN.get((name, command), ()):
            assert check.verdict == "ok", check


@pytest.mark.parametrize("kernel", ["6.12"])
def test_unwound_as_drgn_does(kernel: str) -> None:
    run = lab.build(f"tasks-{kernel}")
    spec = TargetSpec(path=str(run.elf), types="dwarf", vmlinux=str(run.vmlinux))
    report = checked("locks", open_target(spec))
    (check,) = (check for check in report.checks if check.name == "stacks.drgn")
    assert (check.verdict, check.right_value) == ("ok", 32)


# --- damage


def add(number: Object, more: int) -> None:
    """Add to a number in memory."""
    size, value = sizeof(number), number.value_() + more
    data = (value % (1 << 8 * size)).to_bytes(size, "little")
    put(number.prog_, number.address_, data)


def _node(prog: Program) -> Object:
    return find_slab_cache(prog, "dentry").node[0]


def _file(prog: Program) -> Object:
    files = (collect_memstat(prog, by=("file",)).by or {})["file"]
    largest = next(each for each in files if getattr(each, "kind", None) == "file")
    return Object(prog, "struct address_space", address=largest.mapping)


def _mm(prog: Program) -> Object:
    return find_task(prog, 1).mm


def _rq(prog: Program) -> Object:
    return per_cpu(prog["runqueues"], 1)


def _leave_children(prog: Program) -> None:
    """Take the first child of process 2 off the list."""
    head = find_task(prog, 2).children
    after = head.next.next
    put(prog, head.address_, after.value_().to_bytes(8, "little"))
    put(prog, after.value_() + 8, head.address_.to_bytes(8, "little"))


def _leave_pid(prog: Program) -> None:
    put(prog, find_pid(prog, 2).tasks[0].first.address_, bytes(8))


def _process_counts(prog: Program) -> Object:
    return per_cpu(prog["process_counts"], 0)


DAMAGE: dict[str, tuple[str, Callable[[Program], None], set[str]]] = {
    "slabs": (
        "memstat",
        lambda prog: add(_node(prog).nr_slabs.counter, 1),
        {"memory.slabs"},
    ),
    "objects": (
        "memstat",
        lambda prog: add(_node(prog).total_objects.counter, -1),
        {"memory.objects"},
    ),
    "nrpages": (
        "memstat",
        lambda prog: add(_file(prog).nrpages, 1),
        {"memory.files"},
    ),
    "resident": (
        "memstat",
        lambda prog: add(_mm(prog).rss_stat[0].count, 3),
        {"memory.resident"},
    ),
    "page tables": (
        "memstat",
        lambda prog: add(_mm(prog).pgtables_bytes.counter, 1 << 30),
        {"memory.page-tables"},
    ),
    "charges": (
        "memstat",
        lambda prog: add(prog["root_mem_cgroup"].memory.usage.counter, -30_000),
        {"memory.cgroups"},
    ),
    "vmstat": (
        "memstat",
        lambda prog: add(prog["vm_node_stat"][5].counter, 1),
        {"memstat.kernel.slab"},
    ),
    "nr_threads": (
        "prstat",
        lambda prog: add(prog["nr_threads"], 1),
        {"tasks.nr-threads"},
    ),
    "process_counts": (
        "zombies",
        lambda prog: add(_process_counts(prog), 1),
        {"tasks.process-counts"},
    ),
    "children": ("zombies", _leave_children, {"tasks.children"}),
    "pids": ("locks", _leave_pid, {"tasks.pids"}),
    "nr_uninterruptible": (
        "cpus",
        lambda prog: add(_rq(prog).nr_uninterruptible, 1),
        {"queues.uninterruptible"},
    ),
    "nr_running": (
        "cpus",
        lambda prog: add(_rq(prog).nr_running, 1),
        # It lies over virtual memory alone, among the bytes of a sample.
        {"queues.nr-running", "reading.percpu"},
    ),
    "present CPUs": (
        "cpus",
        lambda prog: put(prog, prog["__cpu_present_mask"].address_, b"\x01"),
        {"cpus.online"},
    ),
    "number of CPUs": (
        "cpus",
        lambda prog: put(
            prog, prog.symbol("__num_online_cpus").address, b"\x03\x00\x00\x00"
        ),
        {"cpus.count"},
    ),
    "nr_running of all": (
        "report",
        lambda prog: add(_rq(prog).nr_running, 1),
        {"queues.nr-running", "reading.percpu"},
    ),
    "slabs of tasks": (
        "whatis",
        lambda prog: put(
            prog, find_slab_cache(prog, "task_struct").name.value_(), b"mask_struct"
        ),
        {"whatis.tasks"},
    ),
}


@pytest.mark.parametrize("command", sorted({whose for whose, _, _ in DAMAGE.values()}))
def test_damage_is_noticed(command: str) -> None:
    """Each damage makes the checks differ that are for it, and no others."""
    found = opened("memory-6.12")
    expected: set[str] = set()
    for whose, damage, wanted in DAMAGE.values():
        if whose == command:
            damage(found.prog)
            assert not expected & wanted
            expected |= wanted
    assert expected
    assert failed(checked(command, found)) - UNWINDING == expected


def test_a_lost_number_is_no_agreement() -> None:
    found = opened("memory-6.12")
    lose(found.prog, found.prog["nr_threads"].address_, 4)
    report = checked("prstat", found)
    (check,) = (check for check in report.checks if check.has_failed)
    assert (check.name, check.verdict) == ("tasks.counted", "unknown")
    assert "lost in this test" in (check.reason or "")


# --- a command that counts wrong


def _without_waiter(report: Any) -> Any:
    lock = report.locks[0]
    short = replace(lock, waiters=lock.waiters[1:])
    return replace(report, locks=(short, *report.locks[1:]))


def _with_owner(report: Any) -> Any:
    lock = next(lock for lock in report.locks if lock.owners)
    owner = replace(lock.owners[0], pid=4_000_000)
    others = tuple(each for each in report.locks if each is not lock)
    return replace(report, locks=(replace(lock, owners=(owner,)), *others))


def _with_pages(report: Any) -> Any:
    """Move pages from one class to another."""
    pages = {"kernel.slab": -5000, "kernel.unattributed": 5000}
    return replace(
        report,
        classes=tuple(
            replace(each, pages=each.pages + pages.get(each.name, 0))
            for each in report.classes
        ),
    )


def _with_switches(report: Any) -> Any:
    return replace(report, cpus=tuple(replace(cpu, csw=0) for cpu in report.cpus))


def _without_zombie(report: Any) -> Any:
    return replace(report, zombies=report.zombies[1:])


def _without_waiting(report: Any) -> Any:
    queues = tuple(replace(queue, waiting=()) for queue in report.run_queues)
    return replace(report, run_queues=queues)


def _with_softirq(report: Any) -> Any:
    first, *others = report.softirqs
    return replace(report, softirqs=(replace(first, total=first.total + 1), *others))


def _with_set(report: Any) -> Any:
    first, *others = report.cpus
    return replace(report, cpus=(replace(first, set="/elsewhere"), *others))


def _with_lifetime(report: Any) -> Any:
    first, *others = report.tasks
    wrong = replace(first, lifetime_ns=first.lifetime_ns + 2 * report.bound_ns + 1)
    return replace(report, tasks=(wrong, *others))


def _with_broken_stack(report: Any) -> Any:
    return replace(report, coverage={**report.coverage, "stacks_incomplete": 1})


WRONG: dict[str, tuple[str, str, Callable[[Any], Any], set[str]]] = {
    "waiter": ("locks", "collect_locks", _without_waiter, {"locks.waiters"}),
    "owner": ("locks", "collect_locks", _with_owner, {"locks.owners"}),
    "pages": (
        "memstat",
        "collect_memstat",
        _with_pages,
        {"memory.unattributed"} | {f"memory.by-{by}" for by in selfcheck.BY},
    ),
    "switches": ("cpus", "collect_cpus", _with_switches, {"cpus.switches"}),
    "zombie": (
        "zombies",
        "collect_zombies",
        _without_zombie,
        {"zombies.listed", "zombies.children", "zombies.groups"},
    ),
    "waiting": (
        "prstat",
        "collect_cpus",
        _without_waiting,
        {"queues.runnable", "queues.latency"},
    ),
    "softirq": ("cpus", "collect_cpus", _with_softirq, {"cpus.softirqs"}),
    "set": ("cpus", "collect_cpus", _with_set, {"cpus.sets"}),
    "lifetime": ("prstat", "collect_prstat", _with_lifetime, {"prstat.lifetimes"}),
    "stack": ("locks", "collect_prstat", _with_broken_stack, {"stacks.complete"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_report_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, name, change, wanted = WRONG[what]
    collect = getattr(selfcheck, name)
    monkeypatch.setattr(
        selfcheck, name, lambda prog, **words: change(collect(prog, **words))
    )
    found = once("tasks-6.12")
    assert failed(checked(command, found)) - UNWINDING == wanted


def test_wrong_reads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = tasks.follow_phys
    monkeypatch.setattr(tasks, "follow_phys", lambda space, at: find(space, at) + 8)
    wanted = {"reading.tasks", "reading.stacks", "reading.percpu"}
    assert failed(checked("zombies", once("memory-6.12"))) == wanted


def test_another_standing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command that does not know who is throttled, or who has a spinlock."""
    monkeypatch.setattr(lookup, "standing", lambda *arguments: "waits for CPU 1")
    report = checked("locks", opened("fieldpackets-6.12"))
    assert failed(report) - UNWINDING == {"standing.whatis"}
    owners = WantedLocks.locks
    monkeypatch.setattr(
        WantedLocks,
        "locks",
        lambda self: {
            cpu: replace(lock, owners=()) for cpu, lock in owners(self).items()
        },
    )
    report = checked("locks", opened("stalls-locks-6.12"))
    assert "standing.spinlocks" in failed(report)


def test_a_report_that_cannot_be_made_is_no_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel whose types lack what a command needs is not one that it fits."""

    def collect(*_: object, **__: object) -> NoReturn:
        raise MissingError("struct page is not known")

    monkeypatch.setattr(selfcheck, "collect_memstat", collect)
    report = checked("memstat", once("memory-6.12"))
    lost = [check for check in report.checks if check.verdict == "unknown"]
    assert report.has_failed
    assert len(lost) == len(memory.CHECKS)
    assert {check.reason for check in lost} == {"no report: struct page is not known"}


# --- a running kernel


class Counted:
    """A check whose numbers change from one reading to the next."""

    def __init__(self, *pairs: tuple[int, int]) -> None:
        self.pairs = iter(pairs)
        self.readings = 0
        self.__name__ = "counted"

    def __call__(self, _: selfcheck.ReportSet) -> Iterator[selfcheck.Comparison]:
        self.readings += 1
        left, right = next(self.pairs)
        yield selfcheck.Comparison(
            name="made.up", left="", right="", left_value=left, right_value=right
        )


@pytest.mark.parametrize(
    ("pairs", "readings", "verdict"),
    [
        (((1, 1),), 1, "ok"),
        (((1, 2), (2, 2)), 2, "ok"),
        (((1, 2), (2, 3), (3, 4)), 3, "moved"),
        (((1, 2), (1, 2), (1, 2)), 3, "differs"),
    ],
)
def test_a_running_kernel_is_read_again(
    pairs: tuple[tuple[int, int], ...],
    readings: int,
    verdict: str,
) -> None:
    core = str(DEMOS["6.12"].core)
    found = open_target(TargetSpec(path=core, types="btf"))
    check = Counted(*pairs)
    report = made((check,), Opened(found.prog, replace(found.target, live=True)))
    assert (report.readings, check.readings) == (readings, readings)
    assert [check.verdict for check in report.checks] == [verdict]


def test_faults_of_our_own_are_not_hidden() -> None:
    def broken(_: selfcheck.ReportSet) -> Iterator[selfcheck.Comparison]:
        yield {}["a class"]

    def absent(_: selfcheck.ReportSet) -> Iterator[selfcheck.Comparison]:
        raise MissingError("no such variable")
        yield

    def lost(_: selfcheck.ReportSet) -> Iterator[selfcheck.Comparison]:
        raise FaultError("not to be read", 0x1000)
        yield

    found = once("memory-6.12")
    with pytest.raises(KeyError):
        made((broken,), found)
    report = made((absent, lost), found)
    verdicts = [check.verdict for check in report.checks]
    assert verdicts == ["not-applicable", "unknown"]
