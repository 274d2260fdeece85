# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-zombies: dead tasks, why they are not reaped, and what they use.

The options of a report are here, with what they select.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.kernel.report import ADDED, Report
from msatools.program.model import Address
from msatools.reports.units import signal_name
from msatools.tasks.identity import ANY, Membership, is_in_path

# --- Exit statuses. Pure.


_CORE = 0x80
_SIGNAL = 0x7F


def ending(exit_code: int) -> str:
    """
    Return how a task ended, by its status as of wait().

    >>> ending(0), ending(3 << 8), ending(9), ending(11 | 0x80)
    ('0', '3', 'SIGKILL', 'SIGSEGV (core)')
    """
    number = exit_code & _SIGNAL
    if not number:
        return str(exit_code >> 8 & 0xFF)
    return signal_name(number) + (" (core)" if exit_code & _CORE else "")


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
"""Verdicts, in the order in which they are tested."""

Reaper = Literal["init", "subreaper"]
Disposition = Literal["default", "ignored", "handler"]


class Zombie(Struct, frozen=True, kw_only=True):
    """A task that has ended and was not waited for."""

    pid: int
    comm: str
    ppid: int
    """PID of the process that has to wait for it; 0 if unreadable."""

    parent_comm: str | None
    uid: int | None
    cgroup: str | None
    exit_code: int
    """The status as of wait(): the exit status times 256, or the signal, plus 128 with
    a core dump."""

    age_ns: int
    age_bound: str
    verdict: Verdict
    namespace: int | None
    """The inode number of its PID namespace."""

    ns_pid: int | None
    """Its PID there, if that is not the initial namespace."""

    threads: int
    """Number of living threads of its process."""

    tracer: Annotated[int | None, ADDED] = None


class Waiting(Struct, frozen=True, kw_only=True):
    """The children that a thread in wait() waits for."""

    kind: Literal["any", "pid", "group"]
    number: int | None
    """The PID or process group."""

    clone: bool
    """Whether only children with another exit signal than SIGCHLD count
    (``__WCLONE``)."""

    all: bool
    """Whether children with any exit signal count (``__WALL``)."""


class ParentThread(Struct, frozen=True, kw_only=True):
    """What a thread of a parent is doing."""

    pid: int
    comm: str
    state: str
    """The letter as in /proc."""

    task_class: str = field(name="class")
    age_ns: int
    doing: str
    """A short description."""

    waiting: Waiting | None
    """What it waits for in wait(), if it is there."""

    blocks_sigchld: bool


class Evidence(Struct, frozen=True, kw_only=True):
    """The evidence for a verdict on the children of one parent."""

    text: str
    """Summary in one line."""

    sigchld: Disposition | None
    """The parent's disposition of SIGCHLD; ``None`` if unreadable."""

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
    """Threads of the parent, the most relevant ones if there are many."""

    thread_count: int
    tracer: int | None
    root: str | None
    """The root cause of a blocked parent, from msa-locks."""

    root_pid: int | None


class HeldNamespace(Struct, frozen=True, kw_only=True):
    """A PID namespace that cannot end, as its init waits for zombies in it."""

    namespace: int
    """Its inode number."""

    pid: int
    """PID of its init, which has exited and is not dead yet."""

    comm: str
    age_ns: int
    """Time of the init in its state."""


class ZombieGroup(Struct, frozen=True, kw_only=True):
    """Dead children of one parent with the same verdict."""

    ppid: int
    parent_comm: str | None
    count: int
    verdict: Verdict
    evidence: Evidence
    advice: str
    """What to do, in one line."""

    parent_state: str | None
    parent_age_ns: int | None
    """Time of the parent in that state."""

    min_age_ns: int
    max_age_ns: int
    exit_codes: Mapping[str, int]
    """Counts by exit status: ``0``, ``1``, ``SIGKILL``, ``SIGSEGV (core)``."""

    uids: tuple[int, ...]
    cgroups: tuple[str, ...]
    namespaces: tuple[int, ...]
    pids: Sequence[int]
    heir: Annotated[int | None, ADDED] = None
    """PID of the process that would inherit them if the parent died."""

    holds: Annotated[tuple[HeldNamespace, ...], ADDED] = ()
    """PID namespaces, such as those of containers, that end only once these are
    reaped."""

    delta: Annotated[int | None, ADDED] = None
    """Growth of *count* in the interval."""


class Limit(Struct, frozen=True, kw_only=True):
    """A limit that zombies count against."""

    name: str
    """``threads-max``, ``pid_max``, ``pids.max`` or ``RLIMIT_NPROC``."""

    scope: str
    """Scope: ``system``, a PID namespace, a control group, a user."""

    used: int | None
    """Number of tasks that count, the dead included; of ``pid_max`` the PIDs in use."""

    max: int | None
    """``None`` if there is no limit."""

    left: int | None
    """Number of further ones that the kernel allows; ``None`` if there is no limit, or
    it is unknown. Less than *max* minus *used* for ``pid_max``, as some free PIDs are
    not given out again."""

    zombies: int
    """Number of zombies in *used*."""

    first: bool
    """Whether it is the limit with the least left."""

    left_ns: Annotated[int | None, ADDED] = None
    """Time until it is hit, at the rate of the interval."""


class HeldMemory(Struct, frozen=True, kw_only=True):
    """Memory that zombies hold."""

    bytes: int
    each_bytes: Mapping[str, int]
    """Size of one object by its type: ``task_struct``, ``signal_struct`` and so on."""


class Leak(Struct, frozen=True, kw_only=True):
    """A ``struct pid`` with more references than known holders."""

    address: Address
    pid: int
    references: int
    named: Mapping[str, int]
    """Number of known holders by kind."""

    task: str | None
    """``zombie``, ``alive``, or ``None`` if no task has it any more."""


class Heir(Struct, frozen=True, kw_only=True):
    """The process that would inherit the dead children of one parent."""

    ppid: int
    heir: int | None
    """Its PID; ``None`` if the parent is init of its PID namespace, which ends with
    it."""

    heir_comm: str | None
    why: str
    """``subreaper``, ``init of PID namespace 4026531836``, another thread ..."""

    reaps: bool | None
    """Whether the heir reaps its children; ``None`` if unknown."""


class ZombieChanges(Struct, frozen=True, kw_only=True):
    """Changes in an interval."""

    begun: int
    """Number of new zombies."""

    reaped: int
    """Number of zombies that were reaped."""


class ZombiesReport(Report, frozen=True, kw_only=True):
    """Why the dead are not reaped."""

    schema: ClassVar[str] = "msatools.zombies/1"

    zombies: Sequence[Zombie]
    groups: tuple[ZombieGroup, ...]
    """The largest first."""

    limits: tuple[Limit, ...] | None
    """The nearest first; ``None`` if not read, as for tasks selected by PID."""

    held: HeldMemory | None
    """Memory that zombies hold; ``None`` if not read, as for tasks selected by PID."""

    heirs: Annotated[tuple[Heir, ...] | None, ADDED] = None
    leaks: Annotated[tuple[Leak, ...] | None, ADDED] = None
    asked: Annotated[tuple["TaskAsked", ...] | None, ADDED] = None
    """Tasks selected by PID, dead or alive."""

    changes: Annotated[ZombieChanges | None, ADDED] = None
    reads: Annotated[int | None, ADDED] = None
    """Number of reads that the report took, if requested."""

    read_bytes: Annotated[int | None, ADDED] = None
    """Bytes of the kernel's memory that it asked for, if requested."""

    elapsed_ns: Annotated[int | None, ADDED] = None
    """Time that it took, if requested."""


class TaskAsked(Struct, frozen=True, kw_only=True):
    """A task selected by its PID, dead or alive."""

    pid: int
    comm: str
    state: str
    ppid: int
    parent_comm: str | None
    age_ns: int
    verdict: Verdict | None
    """``None`` if it is not a zombie."""


# --- Options of msa-zombies.


class ZombiesOptions(Struct, frozen=True, kw_only=True):
    """Contents of a report; ``None`` for all tasks.

    Limits and held memory are always of all zombies.
    """

    pids: tuple[int, ...] | None = None
    """PIDs of tasks, dead or alive, which are looked up directly."""

    parents: tuple[int, ...] | None = None
    """PIDs of parents whose children to report."""

    membership: Membership = ANY
    """Control groups, containers or namespaces. A dead task only has a PID and a user
    namespace. Tasks of nested namespaces are not included."""

    uids: tuple[int, ...] | None = None
    min_age_ns: int = 0
    """Minimum time since they died."""

    verdicts: frozenset[Verdict] | None = None

    heirs: bool = False
    """Whether to report who would inherit them if their parent died."""

    leaks: bool = False
    """Whether to search for each struct pid with unexplained references."""

    cost: bool = False
    """Whether to report the number of reads."""


# --- Select the requested part of a report of all zombies. Pure.


def choose(report: ZombiesReport, options: ZombiesOptions) -> ZombiesReport:
    """
    Return the requested zombies, in their groups.

    The evidence of a group stays that of all the parent's children.
    """
    chosen = {one.pid: one for one in report.zombies if _is_wanted(one, options)}
    groups = [_part(group, chosen) for group in report.groups]
    left = [group for group in groups if group is not None]
    return replace(
        report,
        zombies=tuple(chosen.values()),
        groups=tuple(sorted(left, key=lambda group: (-group.count, group.ppid))),
        heirs=report.heirs if options.heirs else None,
        leaks=report.leaks if options.leaks else None,
        reads=report.reads if options.cost else None,
        read_bytes=report.read_bytes if options.cost else None,
        elapsed_ns=report.elapsed_ns if options.cost else None,
    )


def _is_wanted(zombie: Zombie, options: ZombiesOptions) -> bool:
    wanted: Sequence[tuple[Collection[object] | None, object]] = (
        (options.parents, zombie.ppid),
        (options.uids, zombie.uid),
        (options.verdicts, zombie.verdict),
    )
    if zombie.age_ns < options.min_age_ns:
        return False
    return is_in_path(options.membership, zombie.cgroup) and all(
        names is None or value in names for names, value in wanted
    )


def _part(group: ZombieGroup, chosen: dict[int, Zombie]) -> ZombieGroup | None:
    """Return the requested part of a group; ``None`` if it is empty."""
    dead = [chosen[pid] for pid in group.pids if pid in chosen]
    if len(dead) == len(group.pids):
        return group
    if not dead:
        return None
    ended = Counter(ending(zombie.exit_code) for zombie in dead)
    return replace(
        group,
        count=len(dead),
        min_age_ns=min(zombie.age_ns for zombie in dead),
        max_age_ns=max(zombie.age_ns for zombie in dead),
        exit_codes=dict(sorted(ended.items(), key=lambda item: (-item[1], item[0]))),
        uids=_known(zombie.uid for zombie in dead),
        cgroups=tuple(sorted({z.cgroup for z in dead if z.cgroup is not None})),
        namespaces=_known(zombie.namespace for zombie in dead),
        pids=[zombie.pid for zombie in dead],
        # The previous count of this part is unknown.
        delta=None,
    )


def _known(numbers: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({number for number in numbers if number is not None}))
