# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parents of zombies agree with each guest's record of them."""

from collections.abc import Sequence

import pytest
from drgn import Object, Program, sizeof

from msatools.kernel.report import LossLog
from msatools.model import values
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader
from msatools.zombies.model import ParentThread
from msatools.zombies.parents import NONE, UNKNOWN, ParentFacts, Parents
from msatools.zombies.verdicts import MAX_THREADS, read_doing
from tests.support.overlay import lose, put
from tests.zombies.dumps import Dump, Facts, read_dump, verdicts_of

PARENT_READS, THREAD_READS = 40, 4
"""Maximum reads for a dead task and its parent, and for each thread of the parent.
``-p`` may take 100, mostly for the rest."""


def threads(recorded: Facts) -> list[Facts]:
    """Return the living threads of a parent in its record."""
    return [each for each in recorded["threads"] if each["state"] != "Z"]


def with_state(
    dump: Dump, pid: int, state: int, jobctl: int = 0
) -> tuple[Parents, ParentFacts]:
    """Return the parents with one thread in another state, and that thread's parent."""
    row = dump.row(pid)
    bits = int(dump.table["jobctl"][row]) | jobctl
    table = dump.with_records(state=(row, state), jobctl=(row, bits))
    found = dump.read_parents(table, dump.dead, LossLog())
    tgid = dump.table["tgid"][row]
    return found, next(each for each in found.facts if each.pid == tgid)


def test_blocked_leader_and_blocked_parent_thread(dump: Dump) -> None:
    first = dump.parent("never-first").pid
    index = dump.index("of-second-1")
    second = int(dump.table["pid"][dump.parents.row[index]])
    assert second != first
    assert dump.parents.stuck_ns[index] == UNKNOWN
    for pid in (first, second):
        found, parent = with_state(dump, pid, 2)
        assert found.stuck_ns[index] > 0
        assert not parent.killable


def test_dead_leader_is_shown_by_its_first_living_thread(dump: Dump) -> None:
    pid = dump.parent("leader-parent").pid
    first, *_, last = sorted(
        dump.table["pid"][list(dump.parent("leader-parent").living)].tolist()
    )
    assert pid < first < last
    states = [with_state(dump, thread, 2)[1].state for thread in (first, last)]
    assert states == ["D", "S"]


def test_wait_for_a_vfork_child_is_not_frozen(dump: Dump) -> None:
    """The group is being frozen (JOBCTL_TRAP_FREEZE), but the wait is not."""
    pid = dump.parent("blocked-vfork").pid
    _, parent = with_state(dump, pid, 0x102, jobctl=1 << 23)
    assert parent.stuck
    assert not parent.frozen


@pytest.mark.parametrize("state", [0x4, 0x8, 0x104, 0x8000, 0x8002])
def test_stopped_states(dump: Dump, state: int) -> None:
    _, parent = with_state(dump, dump.parent("never-sleeps").pid, state)
    assert len(parent.stopped) == 1
    assert len(parent.frozen) == (state >= 0x8000)
    assert not parent.stuck


def test_parent_in_sigwait(program: Program) -> None:
    whole = read_dump("zombies-6.12")
    assert not any(parent.sigwaits for parent in whole.parents.facts)
    pid = whole.parent("masked-sigwait").pid
    task = Object(whole.prog, "struct task_struct *", whole.address(pid))
    put(program, task.blocked.address_of_().value_(), bytes(8))
    found = Dump(program, "zombies-6.12").parents.facts
    assert [parent.pid for parent in found if parent.sigwaits] == [pid]


def alone(dump: Dump, pid: int) -> tuple[str, int, int]:
    """Read one dead task, in a table of it and its parent's threads.

    :return: The verdict, the number of reads, and the number of threads in the table.
    """
    index = dump.pids.index(pid)
    addresses = [dump.address(pid), int(dump.dead.real_parent[index])]
    table = TaskReader(dump.reader).read_processes(addresses, LossLog())
    losses = LossLog()
    start = dump.reader.reads
    dead = dump.read_dead(table, losses)
    dead = dead.only(table["pid"][dead.row] == pid)
    parents = dump.read_parents(table, dead, losses)
    assert not losses.notes
    reads = dump.reader.reads - start
    return verdicts_of(table, dead, parents)[pid], reads, len(table)


def test_single_zombie(dump: Dump) -> None:
    """The verdict is the same, with a bounded number of reads."""
    done = set()
    for pid, verdict in dump.verdicts.items():
        index = dump.parents.index[dump.pids.index(pid)]
        if (index, verdict) in done:
            continue
        done.add((index, verdict))
        found, reads, count = alone(dump, pid)
        assert found == verdict, pid
        assert reads <= PARENT_READS + THREAD_READS * count, pid
    assert len(done) > 40


def threads_of(dump: Dump, parents: Parents) -> Sequence[tuple[ParentThread, ...]]:
    collector = StackCollector(dump.reader, LossLog())
    return read_doing(
        collector, dump.reader, dump.table, parents, dump.clocks, LossLog()
    )


def test_selection_of_a_parents_threads(dump: Dump) -> None:
    """A parent with more threads than are listed."""
    hog, first = dump.parent("hog"), dump.parent("waiter-polls")
    rows = (*range(20, 20 + 2 * MAX_THREADS), *hog.living, *first.living)
    made = ParentFacts(**{**values(hog), "living": rows, "waits": first.waits})
    parents = Parents(**{**values(dump.parents), "facts": (made,)})
    (found,) = threads_of(dump, parents)
    assert len(found) == MAX_THREADS
    assert found[0].waiting is not None
    assert found[0].waiting.kind == "pid"
    pids = {thread.pid for thread in found}
    makers = {int(dump.table["pid"][row]) for row in dump.parents.row}
    assert hog.pid in pids
    assert pids & makers


def test_parent_missing_from_the_table(dump: Dump) -> None:
    """On a running kernel it can have exited before the table was read."""
    pid = dump.parent("never-sleeps").pid
    table = dump.table.only(dump.table["tgid"] != pid)
    losses = LossLog()
    dead = dump.read_dead(table, losses)
    parents = dump.read_parents(table, dead, losses)
    gone = {p for p, one in dump.recorded.items() if one["ppid"] == pid}
    found = verdicts_of(table, dead, parents)
    assert found == dump.verdicts | dict.fromkeys(gone, "unknown")
    assert losses.coverage["parents_unknown"] == len(gone) == 3
    assert set(losses.notes) == {("parent-unknown", "")}
    lost = dead.only(parents.index == NONE)
    assert len(lost) == 3


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("sighand_struct", "never-sleeps"),
        ("signal_struct", "never-sleeps"),
        ("who waits", "waiter"),
    ],
)
def test_unreadable_parent(program: Program, what: str, name: str) -> None:
    """With part of a parent unreadable, its children's verdicts are unknown."""
    whole = read_dump("zombies-6.12")
    pid = whole.parent(name).pid
    task = Object(whole.prog, "struct task_struct *", whole.address(pid))
    structures = {
        "sighand_struct": (task.sighand, sizeof(task.sighand[0])),
        "signal_struct": (task.signal.shared_pending.signal.address_of_(), 8),
        "who waits": (task.signal.wait_chldexit.head.next, 16),
    }
    start, size = structures[what]
    lose(program, int(start), size)
    found = Dump(program, "zombies-6.12")
    mine = {p for p, one in whole.recorded.items() if one["ppid"] == pid}
    for dead, verdict in found.verdicts.items():
        # Adjacent structures can be lost as well, but never give a wrong verdict.
        wanted = {"unknown"} if dead in mine else {"unknown", whole.verdicts[dead]}
        assert verdict in wanted, whole.recorded[dead]
    assert what in " ".join(n.text for n in found.losses.notes.values())
