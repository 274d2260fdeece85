# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-zombies reports: the dead, why nobody reaps them, what they use up.

Plain data: a renderer prints it, JSON serialises it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from msatools.kernel.report import ADDED, Report
from msatools.target.model import Address

Verdict = Literal[
    "leader-exited",
    "being-reaped",
    "traced",
    "parent-blocked",
    "parent-stopped",
    "reaper-never-reaps",
    "sigchld-blocked",
    "waiting-for-other",
    "clone-child",
    "handler-missed",
    "never-waits",
    "unknown",
]
"""Of contract ``zombies``, in the order in which they are tested."""

Reaper = Literal["init", "subreaper"]
Disposition = Literal["default", "ignored", "handler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Zombie:
    """A task that has ended and was not waited for."""

    pid: int
    comm: str
    ppid: int
    """The process that is to wait for it; 0 if that cannot be read."""

    parent_comm: str | None
    uid: int | None
    cgroup: str | None
    exit_code: int
    """As wait() would give it: the status times 256, or the signal, and 128 more if it
    left a core dump."""

    age_ns: int
    age_bound: str
    verdict: Verdict
    namespace: int | None
    """The inode number of its PID namespace."""

    ns_pid: int | None
    """Its PID there, where that is not the initial one."""

    threads: int
    """Threads of its process that still live."""

    tracer: int | None = field(default=None, metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What a thread that is in wait() waits for."""

    kind: Literal["any", "pid", "group"]
    number: int | None
    """The child, or the group of children."""

    clone: bool
    """Whether it takes only children that send another signal than SIGCHLD
    (``__WCLONE``)."""

    all: bool
    """Whether it takes those as well as others (``__WALL``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentThread:
    """What a thread of a parent is doing in place of waiting for the dead."""

    pid: int
    comm: str
    state: str
    """As in /proc."""

    task_class: str = field(metadata={"key": "class"})
    age_ns: int
    doing: str
    """In a few words."""

    waiting: Waiting | None
    """If it is in wait()."""

    blocks_sigchld: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a verdict on the children of one parent stands on."""

    text: str
    """In one line."""

    sigchld: Disposition | None
    """What the parent does on SIGCHLD; ``None`` if that cannot be read."""

    handler: Address | None
    pending: bool | None
    """Whether SIGCHLD is pending."""

    blocked: bool | None
    """Whether all its threads block SIGCHLD."""

    blocked_signals: tuple[int, ...] | None
    ignored_signals: tuple[int, ...] | None
    caught_signals: tuple[int, ...] | None
    """As SigBlk (of the first thread), SigIgn and SigCgt of /proc/PID/status."""

    reaper: Reaper | None
    threads: tuple[ParentThread, ...]
    """Of the parent; of many those that tell most."""

    thread_count: int
    tracer: int | None
    root: str | None
    """What a parent that is blocked waits for in the end, as msa-locks says."""

    root_pid: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ZombieGroup:
    """Children of one parent that are dead for one reason."""

    ppid: int
    parent_comm: str | None
    count: int
    verdict: Verdict
    evidence: Evidence
    advice: str
    """What to do, in one line."""

    parent_state: str | None
    parent_age_ns: int | None
    """How long it has been in it."""

    min_age_ns: int
    max_age_ns: int
    exit_codes: Mapping[str, int]
    """How many ended in each way: ``0``, ``1``, ``SIGKILL``, ``SIGSEGV (core)``."""

    uids: tuple[int, ...]
    cgroups: tuple[str, ...]
    namespaces: tuple[int, ...]
    pids: Sequence[int]
    heir: int | None = field(default=None, metadata=ADDED)
    """Who would inherit them if the parent died."""

    delta: int | None = field(default=None, metadata=ADDED)
    """How many more they are than when the interval began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit that zombies count against."""

    name: str
    """``threads-max``, ``pid_max``, ``pids.max``, ``RLIMIT_NPROC`` or ``pids left``."""

    scope: str
    """What it is a limit of: ``system``, a PID namespace, a control group, a user."""

    used: int | None
    max: int | None
    """``None`` if there is no limit."""

    zombies: int
    """How many of those used are dead."""

    first: bool
    """Whether it is the one that will be hit first: that with the least left."""

    left_ns: int | None = field(default=None, metadata=ADDED)
    """When it will be hit, at the rate of the interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldMemory:
    """Memory that zombies hold."""

    bytes: int
    each_bytes: Mapping[str, int]
    """Of one zombie, by what it is: ``task_struct``, ``signal_struct`` and the like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """A ``struct pid`` with more references than holders that can be named."""

    address: Address
    pid: int
    references: int
    named: Mapping[str, int]
    """Holders by what they are."""

    task: str | None
    """``zombie``, ``alive``, or ``None`` if no task has it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heir:
    """Who would inherit the dead of one parent."""

    ppid: int
    heir: int | None
    """``None`` if they end with it: it is the first of its PID namespace."""

    heir_comm: str | None
    why: str
    """``subreaper``, ``init of PID namespace 4026531836``, another thread ..."""

    reaps: bool | None
    """Whether the heir takes care of its dead; ``None`` if that cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZombieChanges:
    """What an interval has changed."""

    begun: int
    """Zombies that were none, or not there, when it began."""

    reaped: int
    """Zombies that are there no more."""


@dataclass(frozen=True, kw_only=True)
class ZombiesReport(Report):
    """Why the dead are not reaped."""

    schema: ClassVar[str] = "msatools.zombies/1"

    zombies: Sequence[Zombie]
    groups: tuple[ZombieGroup, ...]
    """The largest first."""

    limits: tuple[Limit, ...] | None
    """The nearest first; ``None`` if nobody looked, as with some tasks by name."""

    held: HeldMemory | None
    """``None`` likewise."""

    heirs: tuple[Heir, ...] | None = field(default=None, metadata=ADDED)
    leaks: tuple[Leak, ...] | None = field(default=None, metadata=ADDED)
    asked: tuple["TaskAsked", ...] | None = field(default=None, metadata=ADDED)
    """Tasks that were named, dead or alive."""

    changes: ZombieChanges | None = field(default=None, metadata=ADDED)
    reads: int | None = field(default=None, metadata=ADDED)
    """That the answer took, if its cost was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskAsked:
    """One task that was asked for by its PID, dead or alive."""

    pid: int
    comm: str
    state: str
    ppid: int
    parent_comm: str | None
    age_ns: int
    verdict: Verdict | None
    """``None`` if it is no zombie."""
