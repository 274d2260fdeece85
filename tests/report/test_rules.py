# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules, on the reports of real dumps as they would be some time later, or damaged."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from fixtures import lab
from msatools.locks.report import LocksReport, Root, Wait
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import CgroupGroup
from msatools.model import names
from msatools.program import TargetSpec, open_target
from msatools.program.description import LogRecord
from msatools.registry import load
from msatools.render.device import Device
from msatools.render.report.report import page_parts, report_blocks
from msatools.render.terminal import drawn
from msatools.report import rules
from msatools.report.log import last_lines, parse_events
from msatools.report.memory import (
    GroupAtLimit,
    MemoryState,
    OutOfMemory,
    Victim,
    ZoneState,
)
from msatools.report.model import SECTIONS, ReportOptions, TriageVerdict
from msatools.report.report import collect_report
from msatools.report.rule import (
    HUNG_NS,
    LONG_NS,
    ReportParts,
    VerdictRule,
    explained,
    root_text,
    slab_groups,
    starved_roots,
    stopped_roots,
    unreclaimable,
    untested,
    verdicts,
    waits_text,
)
from msatools.report.rules import RULES
from msatools.report.summaries import next_steps, section
from msatools.zombies.model import Limit
from tests.support.calls import call
from tests.truth import tables

FEW = 4
"""Verdicts in full: of a guest that was dumped early there are hardly more than ten."""

MADE_NS = 100_000_000
"""Guests are dumped seconds after the last of their tasks began to wait."""

MIB = 256
"""Pages of a MiB."""


@cache
def parts_of(dump: str) -> ReportParts:
    path = str(lab.build(dump).kept)
    opened = open_target(TargetSpec(path=path, types="btf"))
    options = ReportOptions(keep_parts=True)
    report = collect_report(opened.prog, target=opened.target, options=options)
    assert report.parts is not None
    return report.parts


def quiet_machine() -> ReportParts:
    """Return the parts of a machine with nothing wrong, and no host that was busy.

    The log has what the kernel reported of CPUs that such a host did not run.
    """
    return replace(parts_of("memory-6.12"), events=())


def said(parts: ReportParts) -> dict[str, list[TriageVerdict]]:
    found: dict[str, list[TriageVerdict]] = {}
    for verdict in verdicts(RULES, parts):
        found.setdefault(verdict.code, []).append(verdict)
    return found


def aged(parts: ReportParts, age_ns: int) -> ReportParts:
    """Return the parts with all waits that the guest made as long as *age_ns*.

    What has just begun to wait, such as a worker of the kernel for a disk's answer,
    will not wait that long.
    """
    locks = parts.locks
    assert locks is not None

    def wait(each: Wait) -> Wait:
        if each.age_ns < MADE_NS:
            return each
        return replace(each, age_ns=age_ns, age_bound="exact")

    def root(each: Root) -> Root:
        return replace(each, max_age_ns=age_ns)

    changed: LocksReport = replace(
        locks, waits=tuple(map(wait, locks.waits)), roots=tuple(map(root, locks.roots))
    )
    return replace(parts, locks=changed)


def without_free_pages(parts: ReportParts) -> ReportParts:
    """Return the parts of a machine whose zones are below their watermarks.

    While a kernel panics for want of memory, others may give some back.
    """
    assert parts.memory is not None
    zones = tuple(replace(zone, free=0) for zone in parts.memory.zones)
    return replace(parts, memory=replace(parts.memory, zones=zones))


def test_long_waits() -> None:
    parts = parts_of("locks-6.12")
    early = said(aged(parts, LONG_NS // 4))
    assert not {"io-stuck", "hung-tasks"} & {*early}
    for age_ns, severity in ((LONG_NS, "warning"), (HUNG_NS, "critical")):
        later = aged(parts, age_ns)
        found = said(later)
        (tasks,) = found["hung-tasks"]
        stuck = found["io-stuck"]
        assert {each.severity for each in (tasks, *stuck)} == {severity}
        texts = " ".join(each.text for each in stuck)
        assert all(name in texts for name in ("FUSE server", "dm-0", "dm-1"))
        blocked = {
            wait.pid: wait.comm
            for wait in later.locks.waits  # type: ignore[union-attr]
            if wait.state == "D" and wait.age_ns == age_ns
        }
        parents = {pid for pid, comm in blocked.items() if comm.startswith("vfork-")}
        assert len(parents) == 2
        # Those behind a disk, a server or a frozen file system have their verdict.
        named = explained(later) | parents
        (hung,) = {*blocked} - named
        assert blocked[hung] == "fuse-locked"
        assert tasks.text.startswith(f"pid {hung} fuse-locked has been in state D for")


def test_a_device_that_answers_is_not_stuck() -> None:
    """Who is behind a waiter for a disk may wait for it for long, and the disk not."""
    parts = aged(parts_of("locks-6.12"), LONG_NS)
    assert parts.locks is not None
    (root,) = (
        each for each in parts.locks.roots if each.reason.startswith("I/O on dm-1")
    )
    waits = tuple(
        replace(wait, age_ns=2_000_000) if wait.pid in root.waiters else wait
        for wait in parts.locks.waits
    )
    locks = replace(parts.locks, waits=waits)
    texts = [each.text for each in said(replace(parts, locks=locks))["io-stuck"]]
    assert texts
    assert not any("dm-1" in text for text in texts)


def test_stopped_after_others_began_to_wait() -> None:
    parts = aged(parts_of("locks-6.12"), HUNG_NS)
    assert parts.locks is not None
    roots = tuple(
        replace(root, age_ns=1_000_000_000) if root.state == "T" else root
        for root in parts.locks.roots
    )
    locks = replace(parts.locks, roots=roots)
    assert "stopped-owner" not in said(replace(parts, locks=locks))


def test_a_deadlock_within_more_tasks_explains_them_all() -> None:
    parts = parts_of("lockmodule-6.12")
    assert parts.locks is not None
    cycle = next(each for each in parts.locks.roots if each.kind == "cycle")
    more = replace(cycle, waiters=(*cycle.waiters, 1), behind=(*cycle.behind, 1))
    assert {*cycle.waiters} <= explained(parts)
    assert {*more.behind} <= explained(
        replace(parts, locks=replace(parts.locks, roots=(more,)))
    )


def test_tasks_that_wait_for_stopped_ones() -> None:
    parts = parts_of("locks-6.12")
    assert parts.locks is not None
    stopped = {root.comm for root in stopped_roots(aged(parts, LONG_NS).locks)}  # type: ignore[arg-type]
    # Names of tasks have 15 letters.
    assert stopped >= {"stopped-pi-owne", "stopped-posix-o", "vfork-stopped-c"}
    assert all(comm and "stopped" in comm for comm in stopped)
    assert not [*stopped_roots(aged(parts, LONG_NS // 2).locks)]  # type: ignore[arg-type]
    (found,) = said(aged(parts, LONG_NS))["stopped-owner"]
    assert found.text.startswith(f"{len(stopped)} stopped or frozen tasks (")
    assert len(found.evidence) == len(stopped)
    assert all(": stopped by SIGSTOP for " in line for line in found.evidence)


def test_tasks_that_wait_for_sleeping_ones() -> None:
    parts = parts_of("tasks-6.12")
    (found,) = said(aged(parts, LONG_NS))["blocked-tasks"]
    assert found.severity == "info"
    assert any("flock-owner: asleep in pause" in line for line in found.evidence)
    assert "blocked-tasks" not in said(aged(parts, 1_000_000_000))


def test_tasks_in_state_d_that_do_not_hang_yet() -> None:
    parts = aged(parts_of("fieldio-6.12"), LONG_NS // 2)
    assert parts.locks is not None
    (found,) = said(parts)["blocked-tasks"]
    # Who has just begun to wait is not aged, and does not count.
    blocked = [
        wait
        for wait in parts.locks.waits
        if wait.state == "D" and wait.age_ns == LONG_NS // 2
    ]
    named = explained(parts)
    count = len([wait for wait in blocked if wait.pid not in named])
    assert found.text.startswith(
        f"{count} tasks have been in state D for 2.0s or longer"
    )
    texts = " ".join(found.evidence)
    assert all(name in texts for name in ("nbd0", "nbd1", "NFS server", "SIGSTOP"))


def test_each_root_has_those_behind_itself() -> None:
    """Workers that are roots in place of what they do have tasks of their own."""
    locks = parts_of("workqueues-6.12").locks
    assert locks is not None
    for root in locks.roots:
        if root.kind == "task":
            waiting = {*root.behind} - {root.pid}
            assert len(waiting) == root.blocked_d + root.blocked_s


@pytest.mark.parametrize("dump", ["locks-6.12", "locks-6.1", "locks-7.x"])
def test_parents_in_vfork_are_not_hung(dump: str) -> None:
    """The kernel does not count them either: they can be killed."""
    parts = parts_of(dump)
    locks = parts.locks
    assert locks is not None
    child = {
        root.waiters[0]: root.pid
        for root in locks.roots
        if root.comm and root.comm.startswith("vfork-")
    }
    assert len(child) == 2
    (found,) = said(aged(parts, HUNG_NS))["hung-tasks"]
    (line,) = (line for line in found.evidence if "vfork" in line)
    # One child is stopped, which is a verdict of its own.
    (verdict,) = said(aged(parts, HUNG_NS))["stopped-owner"]
    (stopped,) = (line for line in verdict.evidence if "vfork-" in line)
    (pid,) = (pid for pid in child if f"{child[pid]} vfork-" not in stopped)
    start = "not counted: 1 parent in vfork() for up to 2m00s: "
    assert line.startswith(f"{start}pid {pid} ")
    assert line.endswith(f" until child pid {child[pid]} calls exec or exits")
    # Alone it is said, and alarms nobody.
    alone = replace(
        parts,
        locks=replace(
            locks, waits=tuple(wait for wait in locks.waits if wait.pid in child)
        ),
    )
    (found,) = said(aged(alone, HUNG_NS))["hung-tasks"]
    assert found.severity == "info"
    assert found.text.startswith("1 parent in vfork() for up to 2m00s: ")
    assert found.text.endswith("; a parent in vfork() can be killed")
    (line,) = found.evidence
    assert f"{child[pid]} vfork-" in line
    (verdict,) = said(aged(alone, HUNG_NS))["stopped-owner"]
    assert verdict.severity == "warning"
    killed = replace(alone, locks=replace(locks, waits=()))
    assert "hung-tasks" not in said(killed)


def test_what_a_parent_in_vfork_waits_for() -> None:
    parts = parts_of("locks-6.12")
    assert parts.locks is not None
    for wait in parts.locks.waits:
        if wait.comm.startswith("vfork-"):
            text = waits_text(parts, wait.tgid)
            assert text.endswith(f"in kernel_clone for child pid {wait.owners[0]}")


def test_each_rule_is_true_to_its_form() -> None:
    # Stalls have two rules each: what stands still now, and what the log has, or who
    # has no turn though nothing stands still; and of CPUs, what is below the limits.
    assert max(Counter(rule.code for rule in RULES).values()) == 3
    assert all({*rule.needs} <= {*names(ReportParts)} for rule in RULES)
    parts = parts_of("locks-6.12")
    for verdict in verdicts(RULES, parts):
        assert verdict.text[0] not in " ."
        assert verdict.see.startswith("msa-")
        assert verdict.evidence


@pytest.mark.parametrize("name", [*SECTIONS, "memory"])
def test_without_a_part(name: str) -> None:
    """Only the rules that need the part are silent."""
    parts = parts_of("locks-6.12")
    less = replace(parts, **{name: None})  # type: ignore[arg-type]
    needing = {rule.code for rule in RULES if name in rule.needs}
    before, after = said(parts), said(less)
    assert {*before} - {*after} <= needing
    assert not needing & {*after}


# --- memory


def zone(free: int) -> ZoneState:
    return ZoneState(
        node=0,
        name="Normal",
        managed=1000 * MIB,
        free=free,
        low=200,
        min=100,
        reserve=0,
    )


def memory(
    free: int, cached: int = 0, groups: Iterator[GroupAtLimit] | tuple[()] = ()
) -> MemoryState:
    counters = {"NR_ACTIVE_FILE": cached, "NR_INACTIVE_FILE": 0}
    return MemoryState(
        zones=(zone(free),),
        counters={**counters, "NR_SLAB_RECLAIMABLE_B": 0},
        swap_pages=0,
        swap_free_pages=0,
        groups=tuple(groups),
    )


@pytest.mark.parametrize(
    ("free", "cached", "severity"),
    [
        (201, 0, None),
        (199, 500 * MIB, None),
        (199, 70 * MIB, "warning"),
        (199, 10 * MIB, "critical"),
        (50, 500 * MIB, None),
    ],
)
def test_low_memory(free: int, cached: int, severity: str | None) -> None:
    """Below a watermark, but with much to reclaim, is usual."""
    parts = replace(quiet_machine(), memory=memory(free, cached))
    found = said(parts).get("memory-low", [])
    assert [each.severity for each in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("file_pages", "ooms", "is_said"), [(900, 0, False), (10, 0, True), (900, 3, True)]
)
def test_group_at_its_limit(file_pages: int, ooms: int, is_said: bool) -> None:
    """A group full of the page cache is as it should be."""
    group = GroupAtLimit(
        path="/a",
        pages=1000,
        max_pages=1000,
        file_pages=file_pages,
        anon_pages=1000 - file_pages,
        ooms=ooms,
        kills=ooms,
    )
    state = replace(memory(1000 * MIB), groups=(group,))
    found = said(replace(quiet_machine(), memory=state))
    assert ("cgroup-at-limit" in found) == is_said


def test_nothing_is_said_of_a_quiet_machine() -> None:
    assert said(quiet_machine()) == {}


def with_pages(**pages: int) -> ReportParts:
    """Return a quiet machine with other numbers of pages in some classes."""
    parts = quiet_machine()
    assert parts.memstat is not None
    classes = tuple(
        replace(each, pages=pages.get(each.name.replace(".", "_"), each.pages))
        for each in parts.memstat.classes
    )
    return replace(parts, memstat=replace(parts.memstat, classes=classes))


def test_a_counter_that_nothing_explains() -> None:
    parts = quiet_machine()
    assert parts.memstat is not None
    (first, *others) = parts.memstat.checks
    wrong = replace(first, difference=2048, explained_by=None)
    known = replace(first, difference=2048, explained_by="a reason")
    for check, is_said in ((wrong, True), (known, False)):
        memstat = replace(parts.memstat, checks=(check, *others))
        found = said(replace(parts, memstat=memstat))
        assert {*found} == ({"counter-unexplained"} if is_said else set())


def test_a_counter_in_torn_memory() -> None:
    """Memory that was copied while the kernel ran explains each difference."""
    parts = quiet_machine()
    assert parts.memstat is not None
    (first, *others) = parts.memstat.checks
    wrong = replace(first, difference=2048, explained_by=None)
    memstat = replace(parts.memstat, checks=(wrong, *others))
    torn = replace(parts.target, torn=3)
    (found,) = said(replace(parts, memstat=memstat, target=torn))["counter-unexplained"]
    assert "the memory is torn" in found.evidence[0]
    assert "no known reason" not in found.text


def test_much_memory_without_an_owner() -> None:
    managed = quiet_machine().memstat.managed_pages or 0  # type: ignore[union-attr]
    few, many = managed // 100, managed // 30
    assert "memory-unattributed" not in said(with_pages(kernel_unattributed=few))
    (found,) = said(with_pages(kernel_unattributed=many))["memory-unattributed"]
    assert "3.3 % of memory" in found.text
    assert found.see.endswith(" --unattributed")


def test_much_memory_of_the_kernel() -> None:
    managed = quiet_machine().memstat.managed_pages or 0  # type: ignore[union-attr]
    found = said(with_pages(kernel_page_tables=managed // 5))
    assert {*found} == {"kernel-memory", "page-tables"}
    assert found["kernel-memory"][0].see.endswith(" --by process")
    # More than that is a warning of its own.
    found = said(with_pages(kernel_page_tables=managed // 2))
    assert {*found} == {"memory-unreclaimable", "page-tables"}


def test_removed_groups_are_summed() -> None:
    parts = parts_of("fieldmemory-6.12")
    assert parts.memory is not None
    opened = open_target(TargetSpec(path=parts.target.path, types="btf"))
    report = collect_memstat(opened.prog, target=opened.target, by=("cgroup",))
    groups = (report.by or {})["cgroup"]
    dying = [each for each in groups if isinstance(each, CgroupGroup) and each.dying]
    assert len(dying) == parts.memory.removed_groups
    charged = sum(each.charged_pages or 0 for each in dying)
    assert charged == parts.memory.removed_pages
    (found,) = said(parts)["dying-cgroups"]
    assert found.text.startswith(f"{len(dying):,} removed control groups still exist")


# --- what to go on with


def steps_of(parts: ReportParts) -> list[str]:
    """Return the command lines of the next steps, without the dump's path."""
    found = next_steps(parts, verdicts(RULES, parts))
    assert len(found) <= 5
    return [
        " ".join(step.command.replace(parts.target.path, "").split()) for step in found
    ]


@pytest.mark.parametrize("name", ["kernel_dmabuf", "kernel_rings"])
def test_what_programs_hold_of_the_kernel_is_named_if_large(name: str) -> None:
    what = {"kernel_dmabuf": "dma-bufs", "kernel_rings": "rings of perf"}[name]
    for pages, is_named in ((3000, False), (1 << 15, True)):
        summary = section("memstat", with_pages(**{name: pages})).summary
        assert summary is not None
        assert (what in summary) == is_named, summary
    assert re.search(rf" kernel \(\d+ %, 128\.0 MiB of it {what}.*\)", summary)


def test_usual_steps_of_a_quiet_machine() -> None:
    expected = ["msa-memstat --by process", "msa-prstat -m", "msa-locks"]
    assert steps_of(quiet_machine()) == expected


def test_steps_follow_from_the_summaries() -> None:
    managed = quiet_machine().memstat.managed_pages or 0  # type: ignore[union-attr]
    much = managed // 8
    assert steps_of(with_pages(cache_shmem=much))[0] == "msa-memstat --by fs,file"
    assert steps_of(with_pages(kernel_sockets=much))[0] == "msa-memstat --by file"
    assert steps_of(with_pages(kernel_vmalloc=much))[0] == "msa-memstat --by vmalloc"
    few = managed // 18
    assert steps_of(with_pages(kernel_dmabuf=few))[0] == "msa-memstat --by dmabuf"
    waiting = steps_of(aged(parts_of("lockmodule-6.12"), 1_000_000_000))
    assert waiting[0] == "msa-locks --stacks"
    state = replace(memory(1000 * MIB), removed_groups=30)
    groups = replace(quiet_machine(), memory=state)
    assert steps_of(groups)[0] == "msa-memstat --by cgroup"


@pytest.mark.parametrize("dump", ["zombies-6.12", "field-6.12", "tasks-6.12"])
def test_each_step_has_its_own_reason(dump: str) -> None:
    """Two lines with one reason do not say which of them to take."""
    parts = parts_of(dump)
    reasons = [step.why for step in next_steps(parts, verdicts(RULES, parts))]
    assert len({*reasons}) == len(reasons) > 2


def test_a_selection_shows_no_more_than_all() -> None:
    steps = steps_of(aged(parts_of("locks-6.12"), LONG_NS))
    assert {"msa-locks --chains --state D", "msa-locks --chains"} <= {*steps}


def test_a_step_that_shows_more_takes_the_place_of_another() -> None:
    steps = steps_of(without_free_pages(parts_of("crashes-oom-6.12")))
    assert "msa-memstat --by process,slab,fs --unattributed" in steps
    assert "msa-memstat --by process,slab,fs" not in steps


# --- what could not be tested


def test_codes_that_cannot_be_tested() -> None:
    parts = quiet_machine()
    assert untested(RULES, parts) == ()
    lost = untested(RULES, replace(parts, memstat=None))
    assert {"page-tables", "counter-unexplained"} <= {*lost}
    # The log still has reports of the watchdogs.
    assert "cpu-stalled" not in untested(RULES, replace(parts, cpus=None))


def test_rules_are_sorted_by_severity() -> None:
    def rule(code: str, severity: str) -> "VerdictRule[int]":
        return VerdictRule(
            code=code,
            needs=(),
            when=lambda parts: (1,),
            severity=severity,  # type: ignore[arg-type]
            confidence="exact",
            words=lambda one: code,
            evidence=lambda one: (),
            see=lambda one: ("locks",),
        )

    rules = [rule("a", "info"), rule("b", "critical"), rule("c", "critical")]
    found = verdicts(rules, quiet_machine())
    assert [each.code for each in found] == ["b", "c", "a"]


# --- which rules there are

CONTRACT = (
    *("panic", "oops", "out-of-memory", "memory-low", "memory-unreclaimable"),
    *("cgroup-at-limit", "hung-tasks", "deadlock", "possible-deadlock", "io-stuck"),
    *("frozen-filesystem", "lock-herd", "priority-inversion", "cpu-stalled"),
    *("cpu-starved", "rcu-stalled", "workqueue-stalled", "irq-imbalance", "zombies"),
    *("pids-limit", "dump-damaged"),
)
"""Codes that programs know."""


def test_each_code_is_in_one_file_of_rules() -> None:
    assert {*CONTRACT} <= {rule.code for rule in RULES}
    (folder,) = rules.__path__
    texts = [path.read_text() for path in Path(folder).glob("*.py")]
    for code in {rule.code for rule in RULES}:
        named = (f'code="{code}"', f'_stalls("{code}"', f', "{code}"')
        assert sum(any(name in text for name in named) for text in texts) == 1, code


# --- interrupts


def with_interrupts(share: float) -> ReportParts:
    """Return a machine whose CPU 1 spends a share of its time in interrupts.

    It takes nine tenths of the interrupts of devices.
    """
    parts = quiet_machine()
    assert parts.cpus is not None
    first, second = parts.cpus.cpus
    busy = replace(second, irq_ns=int(share * 100), sys_ns=int(100 * (1 - share)))
    quiet = {"usr_ns": 0, "wt_ns": 0, "st_ns": 0, "gst_ns": 0, "idl_ns": 0}
    irq = next(each for each in parts.cpus.irqs or () if each.name != "timer")
    cpus = replace(
        parts.cpus,
        cpus=(first, replace(busy, **quiet)),
        irqs=(replace(irq, counts={0: 1000, 1: 9000}),),
    )
    return replace(parts, cpus=cpus)


def test_interrupts_on_one_cpu() -> None:
    (verdict,) = said(with_interrupts(0.4))["irq-imbalance"]
    assert verdict.text.startswith("cpu1 takes 90 % of device interrupts")
    assert verdict.evidence[0].startswith("40 % of its time since boot")
    assert verdict.see.endswith(" -i")


def test_interrupts_that_cost_little() -> None:
    assert "irq-imbalance" not in said(with_interrupts(0.05))


# --- want of memory

KILLED_NS = 10_000_000_000
"""When a process was killed; the machine was up for longer."""


def with_victim(killed_ns: int) -> ReportParts:
    """Return a machine whose PID 1 was killed for memory, and lives."""
    parts = quiet_machine()
    assert parts.prstat is not None
    (task,) = (task for task in parts.prstat.tasks if task.pid == 1)
    victim = Victim(pid=1, comm=task.comm, time_ns=killed_ns, anon_bytes=None)
    return replace(parts, ooms=(OutOfMemory(killed_ns, victims=(victim,)),))


def test_victim_that_does_not_die() -> None:
    (verdict,) = said(with_victim(KILLED_NS))["out-of-memory"]
    assert verdict.severity == "critical"
    assert "does not exit" in verdict.text


def test_victim_that_was_just_killed() -> None:
    now = quiet_machine().taken_at_ns
    assert now is not None
    (verdict,) = said(with_victim(now - 1_000_000))["out-of-memory"]
    assert verdict.severity == "warning"


def test_later_process_with_the_number_of_a_victim() -> None:
    (verdict,) = said(with_victim(0))["out-of-memory"]
    assert verdict.severity == "warning"


def test_killed_by_a_user() -> None:
    oom = OutOfMemory(KILLED_NS, comm="bash", order=-1)
    (verdict,) = said(replace(quiet_machine(), ooms=(oom,)))["out-of-memory"]
    assert "sysrq-f" in verdict.text
    assert "ran out" not in verdict.text


def test_caches_that_can_be_reclaimed_are_no_culprits() -> None:
    parts = quiet_machine()
    caches = slab_groups(parts.memstat)
    names = {caches[address].name for address in parts.reclaimable_caches}
    assert {"dentry", "inode_cache"} <= names
    assert not {"task_struct", "kmalloc-64"} & names
    (slab,) = (each for each in unreclaimable(parts) if "slab" in each.name)
    assert not any(f" {name} " in slab.name for name in names)


def test_locked_memory_counts_once() -> None:
    """Of tmpfs without swap all may be locked."""
    parts = quiet_machine()
    assert parts.memory is not None
    assert parts.memstat is not None
    classes = {each.name: each.pages for each in parts.memstat.classes}
    most = classes["user.anon"] + classes["cache.shmem"]
    for locked in (0, classes["user.anon"], most):
        counters = {**parts.memory.counters, "NR_MLOCK": locked}
        memory = replace(parts.memory, counters=counters, swap_free_pages=0)
        kinds = unreclaimable(replace(parts, memory=memory))
        words = ("locked", "anonymous", "tmpfs")
        assert sum(k.pages for k in kinds if k.name.startswith(words)) == most


# --- limits of tasks


def with_limit(name: str, scope: str, used: int) -> ReportParts:
    """Return a machine with a limit of 100 tasks, none of which is a zombie."""
    limit = Limit(
        name=name,
        scope=scope,
        used=used,
        max=100,
        left=100 - used,
        zombies=0,
        first=True,
    )
    return replace(quiet_machine(), limits=(limit,))


@pytest.mark.parametrize(
    ("name", "scope", "used", "severity"),
    [
        ("pids.max", "/", 89, None),
        ("pids.max", "/", 90, "warning"),
        ("threads-max", "system", 99, "warning"),
        ("threads-max", "system", 100, "critical"),
        ("RLIMIT_NPROC", "uid 0", 100, "warning"),
    ],
)
def test_limit_without_zombies(
    name: str, scope: str, used: int, severity: str | None
) -> None:
    found = said(with_limit(name, scope, used)).get("pids-limit", [])
    assert [each.severity for each in found] == ([severity] if severity else [])
    for each in found:
        assert each.evidence[0] == "0 of them are zombies"


def test_all_limits_are_read() -> None:
    """Those of control groups and users, and not of the dead alone."""
    limits = quiet_machine().limits
    assert limits is not None
    names = {limit.name for limit in limits}
    assert {"threads-max", "pid_max", "RLIMIT_NPROC"} <= names
    zombies = parts_of("zombies-6.12")
    assert zombies.zombies is not None
    known = {(each.name, each.scope): each for each in zombies.limits or ()}
    for each in zombies.zombies.limits or ():
        same = known[each.name, each.scope]
        assert (same.used, same.max, same.left) == (each.used, each.max, each.left)


# --- stalls

SOFT = "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [a:12]"


def with_logged_stall(*, is_read: bool) -> ReportParts:
    """A dump whose log reports a stall in its last second."""
    parts = quiet_machine()
    assert parts.cpus is not None
    assert parts.taken_at_ns is not None
    record = LogRecord(parts.taken_at_ns - 1_000_000_000, 0, SOFT, None, 1)
    cpus = parts.cpus if is_read else replace(parts.cpus, stalls=None)
    return replace(parts, cpus=cpus, events=tuple(parse_events([record])))


@pytest.mark.parametrize(
    ("is_read", "severity"), [(True, "warning"), (False, "critical")]
)
def test_stall_that_was_logged(is_read: bool, severity: str) -> None:
    """If nothing stands still now, it is over; if that is unknown, it may go on."""
    (verdict,) = said(with_logged_stall(is_read=is_read))["cpu-stalled"]
    assert verdict.severity == severity
    assert verdict.text.endswith("; it is over") == is_read
    assert verdict.evidence[0] == SOFT


# --- the dump


def test_dump_of_which_too_much_was_left_out() -> None:
    parts = replace(quiet_machine(), coverage={"lists_broken": 1})
    filtered = replace(parts, target=replace(parts.target, dump_level=31))
    for each, is_said in ((parts, False), (filtered, True)):
        (verdict,) = said(each)["dump-damaged"]
        assert any("makedumpfile" in fact for fact in verdict.evidence) == is_said


@pytest.mark.parametrize("dump", ["field-6.12", "lockmodule-6.12"])
def test_deadlocked_tasks_are_no_hung_tasks_too(dump: str) -> None:
    parts = parts_of(dump)
    assert parts.locks is not None
    dead = {pid for each in parts.locks.deadlocks for pid in each.pids}
    kinds = {each.confidence for each in parts.locks.deadlocks}
    assert kinds == {"exact", "possible"}
    assert dead <= explained(parts)
    # Without the deadlocks they would be.
    alone = replace(parts.locks, deadlocks=())
    assert not dead <= explained(replace(parts, locks=alone))
    found = said(aged(parts, HUNG_NS))
    in_d = {wait.pid for wait in parts.locks.waits if wait.state == "D"}
    # No other verdict says that they hang.
    hung = sum(
        not in_d.isdisjoint(each.pids)
        for each in parts.locks.deadlocks
        if each.confidence == "possible"
    )
    severities = [each.severity for each in found["possible-deadlock"]]
    assert severities.count("critical") == hung > 0


def test_waiters_of_a_starved_task_are_no_hung_tasks_too() -> None:
    """What stands behind a thread that gets no CPU stands with who has the CPU."""
    parts = parts_of("fieldcalls-6.12")
    assert parts.locks is not None
    (root,) = (each for each in parts.locks.roots if each.comm == "rcuop/3")
    assert {*root.behind} <= explained(parts)
    found = said(parts)
    (starved,) = found["cpu-starved"]
    assert f"2 tasks wait for pid {root.pid} rcuop/3" in " ".join(starved.evidence)
    lines = [line for each in found["hung-tasks"] for line in each.evidence]
    assert lines
    assert not any("rcuop" in line for line in lines)
    (backlog,) = found["rcu-backlog"]
    assert backlog.severity == "warning"
    assert "cm_freed [callmodule]" in backlog.text
    (line,) = backlog.evidence
    assert line.startswith(f"pid {root.pid} rcuop/3 is to call them")
    assert line.endswith("hog")


def test_what_is_below_the_limits_of_a_stall_is_no_all_clear() -> None:
    """Threads of the kernel do not leave their CPUs; the dump comes seconds later."""
    parts = parts_of("cpulock-6.12")
    found = said(parts)["cpu-stalled"]
    lines = [line for each in found for line in (each.text, *each.evidence)]
    for name in ("cm-irqs-off", "cm-preempt-off", "cm-softirq-off"):
        assert any(f" {name}" in line for line in lines)
    first, *_ = steps_of(parts)
    assert first.startswith("msa-cpus ")
    assert " --stalls" in first
    # One that turns as it should is not in it.
    assert not any("hog-3-" in line for line in lines)


def test_a_cpu_where_tasks_get_no_turn_is_said_once() -> None:
    """It may have run one of them for seconds, too, when the dump is taken."""
    parts = parts_of("fieldcpus-6.12")
    assert parts.cpus is not None
    # Tasks with a quota that has just begun anew may have had no turn, either.
    cpu = lab.build("fieldcpus-6.12").workload["cpus"]["starving"]
    (no_turn,) = (
        each
        for each in parts.cpus.findings
        if each.code == "no-turn" and each.cpus == (cpu,)
    )
    held = replace(no_turn, code="not-switched", text="it has run one task")
    queues = tuple(
        replace(each, switched_ns=3_000_000_000) if each.cpu in held.cpus else each
        for each in parts.cpus.run_queues
    )
    for findings, code in ((no_turn, held), "cpu-starved"), ((held,), "cpu-stalled"):
        cpus = replace(parts.cpus, findings=findings, run_queues=queues, stalls=None)
        found = said(replace(parts, cpus=cpus))
        assert {"cpu-starved", "cpu-stalled"} & {*found} == {code}


@pytest.mark.parametrize("kernel", ["6.1", "6.12", "7.x"])
def test_cpus_that_stopped_for_another_are_said_once(kernel: str) -> None:
    """All wait for one (stop_machine), for longer than any limit."""
    parts = parts_of(f"stalls-stop-{kernel}")
    (found,) = said(parts)["cpu-stalled"]
    assert found.severity == "critical"
    assert any("sm_stopped" in line for line in (found.text, *found.evidence))
    # Without the stalls it is not known what is below a limit.
    assert parts.cpus is not None
    cpus = replace(parts.cpus, stalls=None)
    again = said(replace(parts, cpus=cpus))["cpu-stalled"]
    (held,) = (each for each in again if each.severity == "info")
    assert "below" not in " ".join((held.text, *held.evidence))


def test_stalls_behind_one_cpu_are_one_verdict() -> None:
    parts = parts_of("stalls-locks-6.12")
    assert parts.cpus is not None
    assert parts.cpus.stalls is not None
    stalls = [each for each in parts.cpus.stalls.found if each.over_limit]
    of_cpus = [each for each in stalls if each.code == "cpu-stalled"]
    found = said(parts)["cpu-stalled"]
    causes = {each.culprit_cpu for each in of_cpus}
    assert None not in causes
    assert len(found) == len(causes) < len(of_cpus)
    (holder,) = (each for each in found if " sm-own-lock is in " in each.text)
    behind = [line for line in holder.evidence if line.startswith("behind it")]
    # The owner's own text is certain; that of the waiter is not.
    assert holder.confidence == "exact"
    assert any("(circumstantial)" in line and "sm_spinlock" in line for line in behind)
    said_of = [holder.text, *(line.partition(": ")[2] for line in behind)]
    assert {*said_of} == {each.text for each in of_cpus if each.culprit_cpu == 1}


def test_stall_without_a_cpu_explains_nobody() -> None:
    """RCU that one reader holds up is no reason why another task does not run."""
    parts = parts_of("fieldcalls-6.12")
    assert not starved_roots(parts, lambda task: True, ())
    assert starved_roots(parts, lambda task: True)


def test_throttled_thread_of_rcu() -> None:
    """It waits for its quota, not for what its CPU runs."""
    parts = parts_of("fieldcalls-6.12")
    assert parts.cpus is not None
    why = "throttled by the quota of /limited"
    queues = tuple(
        replace(
            queue,
            waiting=tuple(
                replace(task, throttled=True, throttle=why) for task in queue.waiting
            ),
        )
        for queue in parts.cpus.run_queues
    )
    changed = replace(parts, cpus=replace(parts.cpus, run_queues=queues))
    (backlog,) = said(changed)["rcu-backlog"]
    (line,) = backlog.evidence
    assert line.endswith(f"rcuop/3 is to call them, and is {why}")


def test_a_task_with_the_name_of_a_thread_of_rcu() -> None:
    parts = parts_of("fieldcalls-6.12")
    assert parts.prstat is not None
    rows = tuple(replace(row, kthread=False) for row in parts.prstat.tasks)
    changed = replace(parts, prstat=replace(parts.prstat, tasks=rows))
    (backlog,) = said(changed)["rcu-backlog"]
    assert (backlog.severity, backlog.evidence) == ("info", ())


def test_disabled_interrupt_of_a_disk_that_is_waited_for() -> None:
    parts = parts_of("fieldcpus-6.12")
    found = verdicts(RULES, parts)
    codes = [each.code for each in found]
    assert codes.index("irq-disabled") < codes.index("io-stuck")
    irq, stuck = (said(parts)[code][0] for code in ("irq-disabled", "io-stuck"))
    assert irq.severity == "warning"
    # Which number a controller has differs from boot to boot.
    disk = re.match(r"I/O on nvme\d+n\d+ ", stuck.text)
    assert disk is not None
    assert irq.evidence[0].startswith(f"perhaps the cause of the wait for {disk[0]}")
    # Alone it is good to know.
    (alone,) = said(replace(parts, locks=None))["irq-disabled"]
    assert alone.severity == "info"


def test_small_screen_has_all_that_is_critical() -> None:
    path = str(lab.build("stalls-locks-6.12").kept)
    opened = open_target(TargetSpec(path=path, types="btf"))
    report = collect_report(opened.prog, target=opened.target)
    critical = [each for each in report.verdicts if each.severity == "critical"]
    assert len(critical) > 2
    page = "\n".join(drawn(report_blocks(report), Device(80, 24)))
    heads = re.findall(r"^critical.*?: (\S+)  ", page, re.MULTILINE)
    assert heads == [each.code for each in critical]


def test_verdicts_beyond_those_in_full() -> None:
    assert page_parts(["a", "b"], 10) == ([0, 1], [])
    # The fourth of a code gives its place to the first of another.
    codes = ["io"] * 5 + ["hung"] * 2 + ["irq"]
    assert page_parts(codes, 6) == ([0, 1, 2, 5, 6, 7], [[3, 4]])
    # Where there is room, all of one code are in full.
    assert page_parts(["io"] * 12, 10) == ([*range(10)], [[10, 11]])
    full, short = page_parts([f"{number % 7}" for number in range(30)], 10)
    assert (len(full), len(short)) == (10, 7)
    assert sorted([*full, *(index for each in short for index in each)]) == [*range(30)]


def test_balloon_and_summary_have_one_base() -> None:
    parts = parts_of("fieldballoon-6.12")
    (balloon,) = said(parts)["balloon"]
    summary = section("memstat", parts).summary
    assert summary is not None
    total = summary.partition(" with the balloon: ")[0]
    assert balloon.text.endswith(f" of the guest's {total}")
    share = re.search(r"\((\d+) %\)", balloon.text)
    assert share is not None
    assert f" balloon ({share[1]} %)" in summary


def test_tables_of_the_scheduler_are_no_lines_that_matter() -> None:
    """sysrq-w and some watchdogs print them; a guest does as it makes its scenario."""
    log = parts_of("workqueues-6.12").log
    printed = [record.text for record in log]
    assert any(text.startswith(" S            task   PID") for text in printed)
    shown = last_lines(log)
    assert not any("kworker/" in line or "runnable tasks" in line for line in shown)
    tables_of = (
        "sched_clock_stable()                    : 1",
        "  .curr->pid                     : 203",
        "  .removed.load_avg              : 0",
        "  .dl_bw->total_bw               : 104856",
    )
    rows = [replace(log[-1], level=3, text=each) for each in tables_of]
    assert last_lines((*log, *rows)) == shown
    # What comes with them is kept.
    failed = replace(log[-1], level=3, text="Buffer I/O error on dev sda")
    assert last_lines((*log, failed))[-1].endswith("] Buffer I/O error on dev sda")


def test_details_of_a_stall_of_rcu_are_no_lines_that_matter() -> None:
    """They are the verdict's; that there was a stall is kept."""
    (first, *_) = parts_of("workqueues-6.12").log
    texts = (
        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
        "rcu: \t3-...!: (0 ticks this GP) idle=da70/0/0x0 softirq=81/81 fqs=0",
        "rcu: \t(detected by 0, t=3015 jiffies, g=-487, q=1 ncpus=4)",
        "rcu: \t(t=3006 jiffies g=-467 q=3 ncpus=7)",
        "rcu: rcu_preempt kthread starved for 3016 jiffies! g-487 f0x2",
        "rcu: RCU grace-period kthread stack dump:",
        "rcu: Stack dump where RCU GP kthread last ran:",
    )
    log = [replace(first, level=3, time_ns=1, text=text) for text in texts]
    assert [line.partition("] ")[2] for line in last_lines(log)] == [texts[0], texts[4]]


def test_what_nothing_wakes_is_something_unknown() -> None:
    parts = parts_of("locks-6.12")
    assert parts.locks is not None
    root = next(each for each in parts.locks.roots if each.kind == "external")
    asleep = replace(root, external=None, reason="asleep in some_function")
    assert root_text(asleep) == "something unknown (asleep in some_function)"
    # A FUSE server that sleeps is known.
    served = next(each for each in parts.locks.roots if each.external == "fuse")
    assert "unknown" not in root_text(served)


def test_memory_that_cannot_be_reclaimed_is_said_once() -> None:
    parts = parts_of("crashes-oom-6.12")
    for each in (parts, without_free_pages(parts)):
        found = [verdict for those in said(each).values() for verdict in those]
        lines = [line for verdict in found for line in verdict.evidence]
        assert len([line for line in lines if line.startswith("reclaim cannot")]) == 1
        assert len({*lines}) == len(lines)


@pytest.mark.parametrize("dump", ["field-6.12", "locks-6.12"])
def test_first_page_has_each_code_and_explains_its_marks(dump: str) -> None:
    """There is more wrong than verdicts are in full; nothing of it is off the page."""
    found = tables.report("report", dump)["verdicts"]
    assert len(found) > FEW
    words = str(lab.build(dump).kept), "--types", "btf"
    few_words = *words, "-n", str(FEW)
    text = call(load("report"), *few_words, opening=open_target).out
    page = text.partition("\nmemstat: ")[0]
    for verdict in found:
        assert f": {verdict['code']}  " in page
    all_words = *words, "-n", "all"
    everything = call(load("report"), *all_words, opening=open_target).out
    assert all(f"  {verdict['text']}\n" in everything for verdict in found)
    assert ", in short" in page
    assert ", in short" not in everything
    assert (
        "\n(likely) by a field that may be out of date; (circumstantial) " in everything
    )
