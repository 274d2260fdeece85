# SPDX-License-Identifier: LGPL-2.1-or-later

"""Evidence and advice for a verdict, in one line each. Pure."""

from collections.abc import Sequence

from msatools.locks.base.lock_context import signals_of
from msatools.target.model import Address
from msatools.zombies.model import Evidence, Heir, ParentThread, Verdict
from msatools.zombies.parent_activity import waited
from msatools.zombies.parentfacts import ParentFacts
from msatools.zombies.verdicts import BRIEF_NS
from msatools.zombies.zombie_tasks import UNKNOWN

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
        return f"{_reaper(parent)}, and {_waits(parent)}"
    if verdict == "sigchld-blocked":
        return _all(parent, "SIGCHLD is pending, and blocked", by=True)
    if verdict == "waiting-for-other":
        return _waits(parent)
    if verdict == "clone-child":
        return (
            "it sends another signal than SIGCHLD or none, and only a wait() with "
            f"__WALL or __WCLONE takes it: {_waits(parent)}"
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
    """Return a text on all threads of a parent: what they are, or do if *by*."""
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


def _waits(parent: ParentFacts) -> str:
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
    return f"{action}, and {_waits(parent)}"


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
    """Return what happens to the dead if their parent ends."""
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
