# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parents of the dead, held against what each guest's /proc said of them."""

from itertools import chain

import numpy as np
import pytest
from drgn import Object, Program, sizeof

from msatools.kernel.report import Findings
from msatools.locks.look import signals_of
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from msatools.zombies.dead import UNKNOWN, Dead, read_ages, read_dead
from msatools.zombies.doing import MAX_THREADS, read_doing
from msatools.zombies.model import ParentThread
from msatools.zombies.parentfacts import SIGCHLD, ParentFacts
from msatools.zombies.parents import NONE, Parents, read_parents
from msatools.zombies.verdicts import VERDICTS, verdicts
from tests.zombies.conftest import Facts, Seen, look_at, lose, put, seen

MANY = 20_000
PARENT_READS, THREAD_READS = 40, 4
"""That one dead task and its parent may take, and each thread of that: of the 100 of
``-p`` most are for the rest."""


def pairs(dump: Seen) -> list[tuple[ParentFacts, Facts]]:
    """Each parent, and what the guest knew of it."""
    told = {each["pid"]: each for each in dump.run.workload["parents"]}
    # Of the parent of leaders with threads, the guest says nothing.
    return [(each, told[each.pid]) for each in dump.parents.facts if each.pid in told]


def threads(told: Facts) -> list[Facts]:
    """The threads of a parent that lived, as the guest knew them."""
    return [each for each in told["threads"] if each["state"] != "Z"]


def test_each_parent_once(dump: Seen) -> None:
    found = [each.pid for each in dump.parents.facts]
    assert len(set(found)) == len(found)
    ppids = {one["ppid"] for one in dump.told.values()}
    assert set(found) == ppids
    assert ppids - {1} == {each["pid"] for each in dump.run.workload["parents"]}


def test_whose_each_is(dump: Seen) -> None:
    for place, pid in enumerate(dump.pids):
        parent = dump.parents.facts[dump.parents.index[place]]
        one = dump.told[pid]
        assert (parent.pid, parent.comm) == (one["ppid"], one["parent_comm"])
        # The thread that it is a child of is one of its parent.
        assert dump.parents.row[place] in parent.living


def test_threads_that_live(dump: Seen) -> None:
    for found, told in pairs(dump):
        tids = dump.table["pid"][list(found.living)].tolist()
        assert sorted(tids) == [each["tid"] for each in threads(told)], told
        # Of a leader that is dead, what others do is told.
        assert found.state == (threads(told)[0]["state"])


def test_masks(dump: Seen) -> None:
    for found, told in pairs(dump):
        masks = threads(told)[0]["masks"]
        for name in ("blocked", "ignored", "caught"):
            mask = getattr(found, name)
            assert mask is not None
            assert list(signals_of(mask)) == masks[name], (told["comm"], name)


def test_sigchld(dump: Seen) -> None:
    seen_of = set()
    for found, told in pairs(dump):
        masks = [each["masks"] for each in threads(told)]
        waiting = chain(*(mask["pending"] + mask["shared"] for mask in masks))
        assert found.pending == (SIGCHLD in set(waiting)), told
        assert found.blocks == all(SIGCHLD in mask["blocked"] for mask in masks)
        handled = SIGCHLD in masks[0]["caught"]
        assert (found.disposition == "handler") == handled == bool(found.handler)
        assert (found.disposition == "ignored") == (SIGCHLD in masks[0]["ignored"])
        seen_of.add((found.disposition, found.blocks))
    assert len(seen_of) == 5


def test_reapers(dump: Seen) -> None:
    spaces = dump.run.workload["namespaces"].values()
    first = {space["init"] for space in spaces}
    tasks = dump.run.workload["tasks"].values()
    subreapers = {task["pid"] for task in tasks if task.get("subreaper")}
    assert len(first) == 4
    assert len(subreapers) >= 2
    for found in dump.parents.facts:
        wanted = "subreaper" if found.pid in subreapers else None
        assert found.reaper == ("init" if found.pid in first else wanted)


def test_waits(dump: Seen) -> None:
    kinds = set()
    for found, told in pairs(dump):
        assert found.waits is not None
        doing = {each["tid"]: each["wchan"] for each in told["threads"]}
        in_wait = [tid for tid, where in doing.items() if where == "do_wait"]
        tids = [tid_of(dump, wait.task) for wait in found.waits]
        assert sorted(tids) == in_wait, told
        for wait, tid in zip(found.waits, tids, strict=True):
            (task,) = [
                t for t in dump.run.workload["tasks"].values() if t["tid"] == tid
            ]
            check_wait(wait.number, wait.kind, wait.own, wait.exited, task)
            kinds.add(wait.kind)
    assert kinds == {"any", "pid", "group"}


def check_wait(
    number: int | None, kind: str, own: bool, exited: bool, task: Facts
) -> None:
    told = task.get("waits_for", {})
    assert own == ("thread" in told)
    assert exited == (told.get("events") != "stopped")
    if "pid" in told:
        assert (kind, number) == ("pid", told["pid"])
    elif "pgid" in told:
        assert (kind, number) == ("group", told["pgid"])


def tid_of(dump: Seen, task: int) -> int:
    return int(dump.table["pid"][dump.table["address"].tolist().index(task)])


def test_who_is_stopped(dump: Seen) -> None:
    for found, told in pairs(dump):
        stops = [each for each in threads(told) if each["state"] in "Tt"]
        frozen = told["comm"] == "frozen"
        assert len(found.stopped) == len(stops) + frozen, told
        assert len(found.frozen) == frozen


def test_who_is_stuck(dump: Seen) -> None:
    known = dump.parents.facts
    for found, told in pairs(dump):
        stuck = [each["tid"] for each in threads(told) if each["state"] == "D"]
        assert sorted(dump.table["pid"][list(found.stuck)].tolist()) == stuck, told
    for place, parent in enumerate(known[i] for i in dump.parents.index):
        assert (dump.parents.stuck_ns[place] >= 0) == bool(parent.stuck)
    vfork = [each for each in known if each.comm == "blocked-vfork"]
    assert vfork[0].killable
    assert not vfork[0].frozen
    assert not next(each for each in known if each.comm == "blocked-read").killable


def with_state(
    dump: Seen, pid: int, state: int, jobctl: int = 0
) -> tuple[Parents, ParentFacts]:
    """The parents where one thread is in another state, and the parent it is of."""
    records = dump.table.records.copy()
    row = dump.table["pid"].tolist().index(pid)
    records["state"][row] = state
    records["jobctl"][row] |= jobctl
    table = TaskTable(records, dump.table.columns)
    found = read_parents(
        dump.reader, table, dump.dead, read_ages(table, dump.clocks), Findings()
    )
    tgid = dump.table["tgid"][row]
    return found, next(each for each in found.facts if each.pid == tgid)


def test_the_first_thread_and_who_has_children_may_be_stuck(dump: Seen) -> None:
    first = dump.parent_pid("never-first")
    place = dump.place("of-second-1")
    second = int(dump.table["pid"][dump.parents.row[place]])
    assert second != first
    assert dump.parents.stuck_ns[place] == UNKNOWN
    for pid in (first, second):
        found, parent = with_state(dump, pid, 2)
        assert found.stuck_ns[place] > 0
        assert not parent.killable


def test_a_wait_for_a_child_of_vfork_is_not_frozen(dump: Seen) -> None:
    """Though the group is to be: that is its bit in ``jobctl``."""
    pid = dump.parent_pid("blocked-vfork")
    _, parent = with_state(dump, pid, 0x102, jobctl=1 << 23)
    assert parent.stuck
    assert not parent.frozen


@pytest.mark.parametrize("state", [0x4, 0x8, 0x104, 0x8000, 0x8002])
def test_states_that_are_stopped(dump: Seen, state: int) -> None:
    _, parent = with_state(dump, dump.parent_pid("never-sleeps"), state)
    assert len(parent.stopped) == 1
    assert len(parent.frozen) == (state >= 0x8000)
    assert not parent.stuck


def test_who_takes_sigchld_in_sigwait(program: Program) -> None:
    whole = seen("zombies-6.12")
    assert not any(each.sigwaits for each in whole.parents.facts)
    pid = whole.parent_pid("masked-sigwait")
    task = Object(whole.prog, "struct task_struct *", whole.address(pid))
    put(program, task.blocked.address_of_().value_(), bytes(8))
    found = look_at(program, "zombies-6.12").parents.facts
    assert [each.pid for each in found if each.sigwaits] == [pid]


def test_tracers(dump: Seen) -> None:
    for place, pid in enumerate(dump.pids):
        one = dump.told[pid]
        assert dump.parents.tracer[place] == one["tracer"], one
        other = one["tracer"] not in (0, one["ppid"])
        assert dump.parents.elsewhere[place] == other
    assert 0 < np.count_nonzero(dump.parents.elsewhere) < dump.dead.ptraced.sum()


def alone(dump: Seen, pid: int) -> tuple[Dead, Parents, int, int]:
    """Look at one of the dead only, in a table of it and its parent's threads.

    :return: Also how many reads it took, and how many threads there are in the table.
    """
    place = dump.pids.index(pid)
    addresses = [dump.address(pid), int(dump.dead.real_parent[place])]
    table = TaskReader(dump.reader).read_processes(addresses, Findings())
    findings = Findings()
    start = dump.reader.reads
    dead = read_dead(dump.reader, table, read_ages(table, dump.clocks), findings)
    dead = dead.only(table["pid"][dead.row] == pid)
    parents = read_parents(
        dump.reader, table, dead, read_ages(table, dump.clocks), findings
    )
    assert not findings.notes
    return dead, parents, dump.reader.reads - start, len(table)


def test_one_alone(dump: Seen) -> None:
    """The same verdict, by a bounded number of reads."""
    done = set()
    for pid, verdict in dump.verdicts.items():
        place = dump.parents.index[dump.pids.index(pid)]
        if (place, verdict) in done:
            continue
        done.add((place, verdict))
        dead, parents, reads, count = alone(dump, pid)
        assert [VERDICTS[n] for n in verdicts(dead, parents)] == [verdict], pid
        assert reads <= PARENT_READS + THREAD_READS * count, pid
    assert len(done) > 40


def test_one_of_many_alone() -> None:
    many = seen("manytasks-6.1")
    _, _, reads, _ = alone(many, many.pids[MANY // 2])
    assert reads <= PARENT_READS


def doing(dump: Seen) -> dict[str, tuple[ParentThread, ...]]:
    collector = StackCollector(dump.reader, Findings())
    found = read_doing(collector, dump.prog, dump.table, dump.parents, dump.clocks)
    facts = dump.parents.facts
    return {each.comm: told for each, told in zip(facts, found, strict=True)}


def test_what_threads_are_doing(dump: Seen) -> None:
    found = doing(dump)
    by_tid = {t["tid"]: t for t in dump.run.workload["tasks"].values()}
    counted = 0
    for each in chain(*found.values()):
        task = by_tid.get(each.pid)
        if task is None:
            continue
        told = {task["class"], *task.get("also", ())}
        if told == {"OTH"}:  # who is frozen: the guest has no name for that
            told = {"STP"}
        assert each.task_class in told, task
        counted += 1
    assert counted > 40
    said = {name: told[0].doing for name, told in found.items()}
    assert said["stopped"] == "stopped"
    assert said["frozen"] == "frozen"
    assert said["debugged"] == "stopped by its tracer"
    assert said["waiter-stops"] == "in wait() for any child to stop or go on"
    assert said["waiter-first"].startswith("asleep in ")
    assert found["waiter-first"][1].doing == "in wait() for any child of its own"
    assert said["never-sleeps"].endswith("of clock_nanosleep()")
    assert all(each.blocks_sigchld for each in found["masked-threads"])


def test_of_many_threads_those_that_tell_most(dump: Seen) -> None:
    """A parent is made to have more threads than are looked at."""
    place = next(i for i, p in enumerate(dump.parents.facts) if p.comm == "hog")
    hog = dump.parents.facts[place]
    first = next(p for p in dump.parents.facts if p.comm == "waiter-polls")
    rows = (*range(20, 20 + 2 * MAX_THREADS), *hog.living, *first.living)
    made = ParentFacts(**{**vars(hog), "living": rows, "waits": first.waits})
    parents = Parents(**{**vars(dump.parents), "facts": (made,)})
    collector = StackCollector(dump.reader, Findings())
    (found,) = read_doing(collector, dump.prog, dump.table, parents, dump.clocks)
    assert len(found) == MAX_THREADS
    assert found[0].waiting is not None
    assert found[0].waiting.kind == "pid"
    pids = {each.pid for each in found}
    makers = {int(dump.table["pid"][row]) for row in dump.parents.row}
    assert hog.pid in pids
    assert pids & makers


def test_a_parent_that_is_gone(dump: Seen) -> None:
    """As on a live guest, where it was not in the table any more."""
    pid = dump.parent_pid("never-sleeps")
    table = dump.table.only(dump.table["tgid"] != pid)
    findings = Findings()
    dead = read_dead(dump.reader, table, read_ages(table, dump.clocks), findings)
    parents = read_parents(
        dump.reader, table, dead, read_ages(table, dump.clocks), findings
    )
    found = dict(
        zip(table["pid"][dead.row].tolist(), verdicts(dead, parents), strict=True)
    )
    gone = {p for p, one in dump.told.items() if one["ppid"] == pid}
    for each, number in found.items():
        wanted = "unknown" if each in gone else dump.verdicts[each]
        assert VERDICTS[number] == wanted
    assert findings.coverage["parents_unknown"] == len(gone) == 3
    assert set(findings.notes) == {("parent-unknown", "")}
    lost = dead.only(parents.index == NONE)
    assert len(lost) == 3


LOST = {"sighand": "sighand_struct", "signal": "signal_struct", "waits": "who waits"}


@pytest.mark.parametrize("what", LOST)
def test_what_is_lost(program: Program, what: str) -> None:
    """A part of one parent is unreadable: nothing is told of its children."""
    whole = seen("zombies-6.12")
    pid = whole.parent_pid("waiter" if what == "waits" else "never-sleeps")
    parent = next(each for each in whole.parents.facts if each.pid == pid)
    task = Object(whole.prog, "struct task_struct *", whole.address(pid))
    if what == "sighand":
        lose(program, int(task.sighand), sizeof(task.sighand[0]))
    elif what == "signal":
        place = int(task.signal.shared_pending.signal.address_of_())
        lose(program, place, 8)
    else:
        assert parent.waits
        queue = task.signal.wait_chldexit.head.next
        lose(program, int(queue), 16)
    found = look_at(program, "zombies-6.12")
    mine = {p for p, one in whole.told.items() if one["ppid"] == pid}
    for each, told in found.verdicts.items():
        if each in mine:
            assert told == "unknown"
        elif told != whole.verdicts[each]:
            # What lies beside may be lost as well, and is then not told wrongly.
            assert told == "unknown", whole.told[each]
    assert LOST[what] in " ".join(n.text for n in found.findings.notes.values())


def test_who_was_in_the_table_only_in_part(dump: Seen) -> None:
    """A table that lost the first thread of a parent still tells its name."""
    pid = dump.parent_pid("waiter-polls")
    table: TaskTable = dump.table.only(dump.table["pid"] != pid)
    findings = Findings()
    dead = read_dead(dump.reader, table, read_ages(table, dump.clocks), findings)
    parents = read_parents(
        dump.reader, table, dead, read_ages(table, dump.clocks), findings
    )
    assert pid not in {each.pid for each in parents.facts}
    assert findings.coverage["parents_unknown"] == 2
