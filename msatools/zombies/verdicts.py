# SPDX-License-Identifier: LGPL-2.1-or-later

"""Why each of the dead is not reaped. Pure.

kernel/exit.c: wait_consider_task() decides which children a wait() takes.
"""

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.structs import Booleans
from msatools.tasks.stackmemory import Rows
from msatools.tasks.wait_options import WaitOpts
from msatools.zombies.model import Verdict
from msatools.zombies.parentfacts import SIGCHLD, ParentFacts
from msatools.zombies.parents import Parents
from msatools.zombies.zombie_tasks import Dead

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""In the order in which they are tested: the first that holds is the verdict."""

BRIEF_NS = 1_000_000_000
"""Minimum uninterruptible sleep that explains zombies of that age: most is shorter."""

Numbers = npt.NDArray[np.uint8]


def verdicts(dead: Dead, parents: Parents) -> Numbers:
    """Return why each of the dead is not reaped.

    :return: Indexes into :data:`VERDICTS`.
    """
    case = _Case(dead, parents, *_waits(dead, parents))
    found = np.full(len(dead), VERDICTS.index("unknown"), np.uint8)
    for index, verdict in reversed([*enumerate(VERDICTS[:-1])]):
        found[_TESTS[verdict](case)] = index
    found[dead.threads < 0] = VERDICTS.index("unknown")
    return found


class _Case(Struct, frozen=True):
    """The dead, their parents, and how each of the dead fits its parent's waits."""

    dead: Dead
    parents: Parents

    taken: Booleans
    """Whether a wait takes it, and the thread can run."""

    missed: Booleans
    """Whether a wait is for other children."""

    left: Booleans
    """Whether a wait would take it if its exit signal were SIGCHLD."""

    def of_parent(self, holds: Callable[[ParentFacts], bool]) -> Booleans:
        """Return for which of the dead the parent meets a condition.

        False if the parent is unknown.
        """
        # The last element is for NONE, which is -1.
        by_parent = [*map(holds, self.parents.facts), False]
        result: Booleans = np.array(by_parent, np.bool_)[self.parents.index]
        return result

    @property
    def sends_sigchld(self) -> Booleans:
        sends: Booleans = self.dead.exit_signal == SIGCHLD
        return sends

    @property
    def idle(self) -> Booleans:
        """Whether no thread of the parent is in wait(); false if unknown."""
        return self.of_parent(lambda parent: parent.waits == ())


def _leader_exited(case: _Case) -> Booleans:
    return case.dead.leads & (case.dead.threads > 0)


def _being_reaped(case: _Case) -> Booleans:
    # The other threads are dead, too, and released in a moment unless traced.
    last = _waits_for_threads(case.dead) & ~_has_traced_thread(case.dead)
    return case.dead.reaped | case.taken | last


def _traced(case: _Case) -> Booleans:
    kept = _waits_for_threads(case.dead) & _has_traced_thread(case.dead)
    return (case.dead.ptraced & case.parents.elsewhere) | kept


def _parent_blocked(case: _Case) -> Booleans:
    stuck = case.parents.stuck_ns
    long = (stuck >= BRIEF_NS) | (case.dead.age_ns < BRIEF_NS)
    return (stuck >= 0) & long & case.idle


def _parent_stopped(case: _Case) -> Booleans:
    return case.of_parent(_is_stopped)


def _reaper_never_reaps(case: _Case) -> Booleans:
    reaps = case.of_parent(
        lambda parent: parent.reaper is not None and parent.waits is not None
    )
    # If SIGCHLD has just been sent, it may reap in a moment.
    notified = case.of_parent(lambda parent: bool(parent.pending))
    return (
        reaps & ~case.taken & ~case.left & ~(notified & (case.dead.age_ns < BRIEF_NS))
    )


def _sigchld_blocked(case: _Case) -> Booleans:
    return case.sends_sigchld & case.of_parent(
        lambda parent: bool(parent.pending and parent.blocks)
    )


def _clone_child(case: _Case) -> Booleans:
    return ~case.sends_sigchld & ~case.dead.ptraced


def _handler_missed(case: _Case) -> Booleans:
    # If it is pending and not blocked, the handler is about to run.
    return case.of_parent(
        lambda parent: parent.disposition == "handler" and parent.pending is False
    )


def _never_waits(case: _Case) -> Booleans:
    return case.idle & case.of_parent(
        lambda parent: parent.disposition in ("default", "ignored")
    )


_TESTS: dict[Verdict, Callable[[_Case], Booleans]] = {
    "leader-exited": _leader_exited,
    "being-reaped": _being_reaped,
    "traced": _traced,
    "parent-blocked": _parent_blocked,
    "parent-stopped": _parent_stopped,
    "reaper-never-reaps": _reaper_never_reaps,
    "sigchld-blocked": _sigchld_blocked,
    "waiting-for-other": lambda case: case.missed,
    "clone-child": _clone_child,
    "handler-missed": _handler_missed,
    "never-waits": _never_waits,
}


def _waits_for_threads(dead: Dead) -> Booleans:
    """Return which are leaders of processes with other dead threads only.

    delay_group_leader(): those have to be released first.
    """
    waits: Booleans = dead.leads & (dead.threads == 0) & (dead.others > 0)
    return waits


def _has_traced_thread(dead: Dead) -> Booleans:
    if dead.leads.all():
        return ~dead.leads
    return np.isin(dead.process, dead.process[~dead.leads])


def _waits(dead: Dead, parents: Parents) -> tuple[Booleans, Booleans, Booleans]:
    """Return *taken*, *missed* and *left* of :class:`_Case`."""
    taken, missed, left = np.zeros((3, len(dead)), np.bool_)
    for parent, children in _families(parents):
        part = dead.only(children)
        for wait in parent.waits or ():
            meant = _is_meant(part, parents.group[children], wait)
            sends = part.exit_signal == SIGCHLD
            # eligible_child()
            fits = part.ptraced | wait.all | (sends != wait.clone)
            able = not _is_stopped(parent)
            other = part.ptraced & parents.elsewhere[children]
            taken[children] |= meant & fits & able & ~other
            missed[children] |= ~meant | (sends & wait.clone & ~fits)
            left[children] |= meant & ~fits & ~sends
    return taken, missed, left


def _is_stopped(parent: ParentFacts) -> bool:
    return bool(parent.living) and parent.stopped >= {*parent.living}


def _families(parents: Parents) -> Iterator[tuple[ParentFacts, Rows]]:
    """Yield each parent with a thread in wait(), and its dead children."""
    order = np.argsort(parents.index, kind="stable")
    counted = np.arange(len(parents.facts) + 1)
    starts = np.searchsorted(parents.index[order], counted)
    for place, parent in enumerate(parents.facts):
        if parent.waits:
            yield parent, order[starts[place] : starts[place + 1]]


def _is_meant(dead: Dead, groups: npt.NDArray[np.uint64], wait: WaitOpts) -> Booleans:
    """Return which children a wait is for, with any exit signal.

    eligible_pid(), do_wait_thread() and ptrace_do_wait()
    """
    meant = np.full(len(dead), wait.exited)
    if wait.kind != "any":
        pids = dead.thread_pid if wait.kind == "pid" else groups
        meant &= pids == wait.pid
    if wait.own:
        meant &= (dead.real_parent == wait.task) | (dead.parent == wait.task)
    return meant
