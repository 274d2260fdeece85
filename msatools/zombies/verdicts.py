# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find why each zombie is not reaped, the evidence, and its parent's activity."""

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.locks.context import signals_of
from msatools.program.model import Address
from msatools.tasks.identity import comm_text
from msatools.tasks.sampler import TaskState, collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import Throttles, letters
from msatools.tasks.syscalls import WaitOpts
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows
from msatools.tasks.waits import StackWait, TaskClass
from msatools.zombies.model import Evidence, Heir, ParentThread, Verdict, Waiting
from msatools.zombies.parents import SIGCHLD, UNKNOWN, Dead, ParentFacts, Parents

# --- The reason why each zombie is not reaped. Pure.
#
# kernel/exit.c: wait_consider_task() decides which children a wait() takes.


VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""In the order in which they are tested: the first that holds is the verdict."""

BRIEF_NS = 1_000_000_000
"""Minimum uninterruptible sleep that explains older zombies: most is shorter."""

Numbers = npt.NDArray[np.uint8]


def verdicts(dead: Dead, parents: Parents) -> Numbers:
    """Return the verdict on each dead task.

    :return: Indexes into :data:`VERDICTS`.
    """
    case = _Case(dead, parents, *_verdict_waits(dead, parents))
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
    """Whether a wait() of the parent takes the dead task, and the waiter can run."""

    missed: Booleans
    """Whether a wait() of the parent is for other children."""

    left: Booleans
    """Whether a wait() would take the dead task if its exit signal were SIGCHLD."""

    def of_parent(self, holds: Callable[[ParentFacts], bool]) -> Booleans:
        """Return for each dead task whether its parent meets a condition.

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
    # If SIGCHLD has just been sent, the reaper may reap in a moment.
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
    # If SIGCHLD is pending and not blocked, the handler is about to run.
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
    """Return for each dead task whether it leads a process whose others are dead, too.

    delay_group_leader(): the other threads have to be released first.
    """
    waits: Booleans = dead.leads & (dead.threads == 0) & (dead.others > 0)
    return waits


def _has_traced_thread(dead: Dead) -> Booleans:
    if dead.leads.all():
        return ~dead.leads
    return np.isin(dead.process, dead.process[~dead.leads])


def _verdict_waits(dead: Dead, parents: Parents) -> tuple[Booleans, Booleans, Booleans]:
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


# --- The activities of the threads of zombies' parents.


MAX_THREADS = 8
"""Maximum number of threads of each parent that are read: it may have thousands."""

_PLAIN = {
    TaskClass.CPU: "running",
    TaskClass.USR: "running in user mode",
    TaskClass.SYS: "running in the kernel",
    TaskClass.INT: "interrupted",
    TaskClass.STP: "stopped",
    TaskClass.TRC: "stopped by its tracer",
    TaskClass.ZMB: "dead",
}


def read_doing(
    collector: StackCollector,
    reader: Reader,
    tasks: TaskTable,
    parents: Parents,
    clocks: Clocks,
    losses: LossLog,
) -> tuple[tuple[ParentThread, ...], ...]:
    """Return the activities of each parent's threads, in the order of ``facts``.

    Of many threads choose the most relevant: those in wait(), those in uninterruptible
    sleep, those that created the zombies, and the leader.
    """
    creators = set(parents.row.tolist())
    chosen = [_choose(tasks, parent, creators) for parent in parents.facts]
    rows = np.array([row for each in chosen for row in each], np.intp)
    part = tasks.only(rows)
    now = collect_now(collector, reader.prog, part, clocks)
    states = letters(part)
    throttles = Throttles(reader, part, losses)
    indices = iter(range(len(rows)))
    activities = []
    for parent, each in zip(parents.facts, chosen, strict=True):
        waits = {wait.task: wait for wait in parent.waits or ()}
        threads = []
        for row, index in zip(each, indices, strict=False):
            wait = waits.get(int(part["address"][index]))
            throttle = throttles.of(index, clocks.local_ns)
            threads.append(
                ParentThread(
                    pid=int(part["pid"][index]),
                    comm=comm_text(part["comm"][index]),
                    state=str(states[index]),
                    task_class=TaskClass(int(now.classes[index])).name,
                    age_ns=int(now.age_ns[index]),
                    doing=(
                        _doing(now, index, row in parent.frozen, wait, part)
                        if throttle is None
                        else throttle.text
                    ),
                    waiting=None if wait is None else _waiting(wait),
                    blocks_sigchld=row in parent.blocking,
                )
            )
        activities.append(tuple(threads))
    return tuple(activities)


def _choose(tasks: TaskTable, parent: ParentFacts, creators: set[int]) -> Sequence[int]:
    """Choose rows of a parent's living threads, the most relevant first."""
    if len(parent.living) <= MAX_THREADS:
        return parent.living
    waiting = {wait.task for wait in parent.waits or ()}

    def rank(row: int) -> tuple[bool, ...]:
        waits = int(tasks["address"][row]) in waiting
        return (
            not waits,
            row not in parent.stuck,
            row not in creators,
            row != parent.row,
        )

    return sorted(parent.living, key=rank)[:MAX_THREADS]


def waited(wait: WaitOpts) -> str:
    """Describe which children a call of wait() takes: ``child 7``, ``any child``."""
    number = "of unknown number" if wait.number is None else str(wait.number)
    who = {"any": "any child", "pid": f"child {number}", "group": f"group {number}"}
    text = who[wait.kind]
    if wait.own:
        text += " of its own"
    if wait.clone:
        text += " that sends no SIGCHLD"
    if not wait.exited:
        text += " to stop or go on"
    return text


def _waiting(wait: WaitOpts) -> Waiting:
    return Waiting(kind=wait.kind, number=wait.number, clone=wait.clone, all=wait.all)


def _doing(
    now: TaskState, index: int, frozen: bool, wait: WaitOpts | None, part: TaskTable
) -> str:
    """Return the activity of one thread in words, without its age."""
    task_class = TaskClass(int(now.classes[index]))
    if frozen:
        return "frozen"
    if task_class in _PLAIN:
        return _PLAIN[task_class]
    if task_class is TaskClass.LAT:
        return f"waits for CPU {int(part['cpu'][index])}"
    if wait is not None:
        return f"in wait() for {waited(wait)}"
    return _asleep(now.waits[int(now.stacks.index[index])])


def _asleep(wait: StackWait) -> str:
    where = wait.caller or wait.function
    if wait.call is not None and where is not None and where != wait.call:
        return f"asleep in {where}() of {wait.call}()"
    if where or wait.call:
        return f"asleep in {where or wait.call}()"
    return "asleep"


# --- Evidence and advice for a verdict, in one line each. Pure.


_NO_KILL = "kill -9 on a zombie does nothing"
_MAX_NAMED = 3


def evidence(
    verdict: Verdict,
    parent: ParentFacts | None,
    threads: tuple[ParentThread, ...] = (),
    tracers: Sequence[int] = (),
) -> Evidence:
    """Return the evidence for a verdict on dead children of one parent.

    ``root`` and ``root_pid`` are ``None``; the caller adds them.

    :param parent: ``None`` if unknown.
    :param threads: What the parent's threads are doing.
    :param tracers: PIDs of the processes that trace these children.
    """
    tracer = tracers[0] if len(set(tracers)) == 1 and tracers[0] > 0 else None
    text = _text(verdict, parent, threads, tracers)
    if parent is None:
        return Evidence(
            text=text,
            sigchld=None,
            handler=None,
            pending=None,
            blocked=None,
            blocked_signals=None,
            ignored_signals=None,
            caught_signals=None,
            reaper=None,
            threads=threads,
            thread_count=len(threads),
            tracer=tracer,
            root=None,
            root_pid=None,
        )
    return Evidence(
        text=text,
        sigchld=parent.disposition,
        handler=None if parent.handler is None else Address(parent.handler),
        pending=parent.pending,
        blocked=parent.blocks,
        blocked_signals=_signals(parent.blocked),
        ignored_signals=_signals(parent.ignored),
        caught_signals=_signals(parent.caught),
        reaper=parent.reaper,
        threads=threads,
        thread_count=len(parent.living),
        tracer=tracer,
        root=None,
        root_pid=None,
    )


def advice(
    verdict: Verdict,
    parent: ParentFacts | None,
    *,
    tracers: Sequence[int] = (),
    heir: Heir | None = None,
    age_ns: int | None = None,
) -> str:
    """Return what to do about dead children of one parent, in one line.

    :param tracers: PIDs of the processes that trace these children.
    :param heir: The process that would inherit them; ``None`` if unknown.
    :param age_ns: Time since the first of them died; ``None`` if unknown.
    """
    if verdict == "leader-exited":
        return (
            "nothing can be reaped yet: its other threads still run, and may be meant "
            "to; if not, kill -9 on it ends them"
        )
    if verdict == "being-reaped":
        return "nothing to do: it is being reaped"
    if verdict in _FLAWS and parent is not None and _is_brief(age_ns):
        # The parent may just be busy, or not have run since its wake-up.
        return (
            f"look again: none has been dead for a second, and {_name(parent)} may "
            f"reap them yet; {_NO_KILL}"
        )
    return f"{_remedy(verdict, parent, tracers, heir)}; {_NO_KILL}"


def _is_brief(age_ns: int | None) -> bool:
    return age_ns is not None and age_ns < BRIEF_NS


def _name(parent: ParentFacts) -> str:
    return f"{parent.pid} {parent.comm}"


def _signals(mask: int | None) -> tuple[int, ...] | None:
    return None if mask is None else signals_of(mask)


def _text(
    verdict: Verdict,
    parent: ParentFacts | None,
    threads: tuple[ParentThread, ...],
    tracers: Sequence[int],
) -> str:
    """Return the evidence in one line."""
    if verdict == "leader-exited":
        return "its first thread has ended, and others live"
    if verdict == "traced":
        have = "have" if len({*tracers} - {UNKNOWN, 0}) > 1 else "has"
        return f"traced by {_named(tracers)}, which {have} to wait for it first"
    if parent is None:
        return "nothing is known of its parent"
    if verdict == "being-reaped":
        waits = [each for each in threads if each.waiting]
        return _who(waits) if waits else "it is taken off right now"
    if verdict == "parent-blocked":
        stuck = [each for each in threads if each.state == "D"]
        return _who(stuck) if stuck else "it is in uninterruptible sleep"
    if verdict == "parent-stopped":
        return _all(parent, _stopped(parent, threads))
    if verdict == "reaper-never-reaps":
        return f"{_reaper(parent)}, and {_evidence_waits(parent)}"
    if verdict == "sigchld-blocked":
        return _all(parent, "SIGCHLD is pending, and blocked", by=True)
    if verdict == "waiting-for-other":
        return _evidence_waits(parent)
    if verdict == "clone-child":
        return (
            "it sends another signal than SIGCHLD or none, and only a wait() with "
            f"__WALL or __WCLONE takes it: {_evidence_waits(parent)}"
        )
    if verdict == "handler-missed":
        return "SIGCHLD has a handler, is not pending, and dead children are left"
    if verdict == "never-waits":
        return _never(parent)
    return "nothing that is known of its parent says why"


def _named(numbers: Sequence[int]) -> str:
    """List some processes, at most :data:`_MAX_NAMED` of them."""
    known = sorted({number for number in numbers if number > 0})
    if not known:
        return "an unknown process"
    named = ", ".join(map(str, known[:_MAX_NAMED]))
    more = len(known) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _who(threads: Sequence[ParentThread]) -> str:
    first = threads[0]
    text = f"thread {first.pid} is {first.doing}"
    return f"{text}, and {len(threads) - 1} more" if len(threads) > 1 else text


def _all(parent: ParentFacts, what: str, by: bool = False) -> str:
    """Return a text on all threads: *what* is their state, or their act if *by*."""
    count = len(parent.living)
    if count == 1:
        return what if by else f"it is {what}"
    return f"{what} by all {count} threads" if by else f"all {count} threads are {what}"


def _stopped(parent: ParentFacts, threads: Sequence[ParentThread]) -> str:
    if parent.frozen:
        return "frozen"
    traced = any(each.task_class == "TRC" for each in threads)
    return "stopped by a tracer" if traced else "stopped"


def _reaper(parent: ParentFacts) -> str:
    if parent.reaper == "init":
        return "it is init of a PID namespace"
    return "it is a subreaper"


def _evidence_waits(parent: ParentFacts) -> str:
    """Return a text on the threads of a parent that are in wait()."""
    if parent.waits is None:
        return "who is in wait() is not known"
    texts = list(dict.fromkeys(map(waited, parent.waits)))
    if not texts:
        return "no thread is in wait()"
    more = len(texts) - _MAX_NAMED
    named = ", ".join(texts[:_MAX_NAMED])
    return f"in wait() for {named}" + (f" and {more} more" if more > 0 else "")


def _never(parent: ParentFacts) -> str:
    if parent.disposition == "ignored":
        # With SIGCHLD ignored at its exit, the kernel would have reaped it.
        action = "SIGCHLD is ignored, but was not when it ended"
    elif parent.sigwaits:
        action = "SIGCHLD is taken in sigwait()"
    else:
        action = "SIGCHLD has no handler"
    return f"{action}, and {_evidence_waits(parent)}"


def _remedy(
    verdict: Verdict,
    parent: ParentFacts | None,
    tracers: Sequence[int],
    heir: Heir | None,
) -> str:
    name = "its parent" if parent is None else _name(parent)
    if verdict == "traced":
        return (
            f"end the tracer, {_named(tracers)}, or let it wait or detach: then their "
            "parent can reap them"
        )
    if parent is None:
        return "find out its parent"
    if verdict == "parent-blocked":
        return _unblock(parent, name)
    if verdict == "parent-stopped":
        return _go_on(parent, name)
    if verdict == "waiting-for-other":
        return (
            f"end what {name} waits for, after which it may go on to these, or fix it "
            "to wait for any child"
        )
    flaw = _FLAWS.get(verdict)
    if flaw is None:
        return f"look at what {name} is doing"
    what = "fix" if parent.pid == 1 else "restart or fix"
    return f"{what} {name}: {flaw}; {_end(parent, heir)}"


_FLAWS: dict[Verdict, str] = {
    "reaper-never-reaps": "it inherits orphans and never waits for them",
    "sigchld-blocked": "it blocks SIGCHLD and has not asked for it",
    "clone-child": "its wait() lacks __WALL",
    "handler-missed": "its handler has to wait until no dead child is left",
    "never-waits": "it never waits for its children",
}


def _unblock(parent: ParentFacts, name: str) -> str:
    cause = f"end what {name} waits for (see msa-locks -p {parent.pid})"
    if parent.reaper == "init":
        return f"{cause}; do not kill it: {_end(parent, None)}"
    if parent.killable:
        return f"{cause}, or, if its work may be lost, kill -9 {parent.pid}"
    return f"{cause}: until then it cannot even be killed"


def _go_on(parent: ParentFacts, name: str) -> str:
    if parent.frozen:
        return f"thaw the control group of {name}"
    if parent.state == "t":
        return f"end the tracer of {name}, or let it go on"
    return f"let {name} go on: kill -CONT {parent.pid}, so that it can reap them"


def _end(parent: ParentFacts, heir: Heir | None) -> str:
    """Return a text on who inherits the zombies if their parent ends."""
    if parent.pid == 1:
        return "1 cannot end while the system runs"
    inherits = parent.reaper != "init" if heir is None else heir.heir is not None
    if not inherits:
        text = f"if {parent.pid} exits, the kernel kills"
        return f"{text} every process of its PID namespace"
    if heir is None:
        return f"if {parent.pid} ends, another inherits them"
    then = {True: " and reaps them", False: " them, and does not reap them either"}
    rest = " them" if heir.reaps is None else then[heir.reaps]
    return f"if {parent.pid} ends, {heir.heir} inherits{rest}"
