# SPDX-License-Identifier: LGPL-2.1-or-later

"""What prstat found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msatools.kernel.accounting import Accounting
from msatools.kernel.report import ADDED, Report
from msatools.locks.base.model import Herd, WaitTarget
from msatools.prstat.states import StateTime
from msatools.target.model import UNLISTED


@dataclass(frozen=True)
class Split:
    """What the time off the CPU was spent on, where the kernel kept it."""

    iowait_ns: int | None
    """Uninterruptible, for block I/O."""

    blocked_ns: int | None
    """Uninterruptible, for anything else."""

    sleep_ns: int | None
    """Interruptible."""

    stopped_ns: int | None

    delays: Mapping[str, int | None]
    """By the kinds of :mod:`msatools.tasks.delays`; they overlap the times above."""

    coverage: float | None
    """Which share of the time off the CPU the times above explain."""


@dataclass(frozen=True)
class OffCpu:
    """What was done off the CPU within an interval, by class."""

    task_class: str | None = field(metadata={"key": "class"})
    """``None`` of what no sample tells."""

    ns: int
    error_ns: int
    """The standard error, 0 if it is exact."""

    on_code: bool | None = field(default=None, metadata=ADDED)
    """``True`` of page faults on what is mapped executable."""


@dataclass(frozen=True)
class Waited:
    """Time off the CPU as Solaris splits it: all of an interval, or what lasts."""

    code_faults_ns: int
    data_faults_ns: int
    locks_ns: int
    stopped_ns: int
    untold_ns: int
    """What nothing tells: it may be any of them, or a sleep."""

    is_estimate: bool


@dataclass(frozen=True)
class Children:
    """What children used that were waited for, and theirs."""

    user_ns: int
    system_ns: int
    nvcsw: int
    nivcsw: int
    min_flt: int
    maj_flt: int


@dataclass(frozen=True)
class TaskRow:
    """A process, or a thread. ``None`` is what the kernel does not keep."""

    pid: int
    tgid: int
    ppid: int | None
    uid: int | None
    comm: str
    cgroup: str | None
    kthread: bool
    threads: int | None
    """Of its process, without those that have been reaped."""

    state: str
    """As in /proc: one of R S D T t Z X I P."""

    pri: int
    """As in /proc/PID/stat: 20 is that of nice 0, -2 and less are real-time."""

    nice: int
    cpu: int
    """The CPU that it is on, or was on last."""

    size_bytes: int | None
    rss_bytes: int | None
    task_class: str = field(metadata={"key": "class"})
    class_age_ns: int
    class_age_bound: str
    """``exact``, ``upper`` or ``estimate``."""

    on: WaitTarget | None
    lifetime_ns: int
    user_ns: int
    system_ns: int
    latency_ns: int
    latency_bound: str
    """``exact`` or ``upper``."""

    off_cpu_ns: int
    zombie_ns: int
    breakdown: Split | None
    nvcsw: int
    nivcsw: int
    min_flt: int
    maj_flt: int
    syscalls: None = None
    """Linux does not count them."""

    signals: None = None
    """Nor these."""

    sleeps: int = field(default=0, metadata=UNLISTED)
    """Voluntary switches of those threads whose time off the CPU this is."""

    off_cpu: tuple[OffCpu, ...] | None = field(default=None, metadata=ADDED)
    waited: Waited | None = field(default=None, metadata=UNLISTED)
    children: Children | None = field(default=None, metadata=ADDED)


@dataclass(frozen=True)
class Totals:
    """All that was selected, before the number of rows was limited."""

    processes: int
    threads: int
    states: Mapping[str, int]
    """Threads by the letters of /proc."""

    classes: Mapping[str, int]
    """Threads by class."""

    load_averages: tuple[float, ...] | None
    """Over 1, 5 and 15 minutes, as the kernel keeps them."""

    cpus: int
    """Online."""

    ram_bytes: int | None


@dataclass(frozen=True)
class TaskGroup:
    """The processes, or threads, that have one thing in common."""

    key: str
    """The number of a user, path of a control group, ID of a container, inode number of
    a PID namespace or name of a command; ``-`` for none or an unknown one."""

    processes: int
    threads: int
    size_bytes: int
    """Sums of all address spaces: shared memory counts in each."""

    rss_bytes: int
    cpu_ns: int
    """Time on the CPU of its processes, and of threads of theirs that have ended."""

    cpu_share: float
    """Of one CPU, over the life of each process or the interval."""


@dataclass(frozen=True)
class ClassGroup:
    """The threads that are doing one thing now, and the time spent on it."""

    key: str
    """The class; ``-`` for time of an interval that nothing tells."""

    processes: int
    threads: int
    age_ns: int
    """For how long the threads have been doing it, summed."""

    max_age_ns: int
    ns: int | None
    """Of an interval, by all threads, also those that do something else now."""

    error_ns: int | None
    """The standard error of :attr:`ns`, 0 if it is exact."""


@dataclass(frozen=True)
class LoadGroup:
    """Threads that make the load in the same way."""

    state: str
    """R or D."""

    task_class: str = field(metadata={"key": "class"})
    comm: str
    on: WaitTarget | None
    function: str | None
    """The kernel function that wanted what is waited for."""

    pids: tuple[int, ...]
    max_age_ns: int


@dataclass(frozen=True)
class Load:
    """Why the load is what it is now."""

    runnable: int
    """Threads that run or could."""

    uninterruptible: int
    groups: tuple[LoadGroup, ...]


@dataclass(frozen=True)
class StackGroup:
    """Threads that came to their wait on the same way."""

    frames: tuple[str, ...]
    """Innermost first; ``name [module]`` in a module."""

    task_class: str = field(metadata={"key": "class"})
    pids: tuple[int, ...]
    min_age_ns: int
    max_age_ns: int
    ages_ns: tuple[int, ...] = field(metadata=UNLISTED)
    comms: tuple[str, ...] = field(metadata=UNLISTED)
    """By thread, as ``pids``."""


@dataclass(frozen=True)
class Why:
    """What a field is on this kernel, and how well it is known."""

    field: str
    bound: str
    """``exact``, ``estimate``, ``upper``, ``lower`` or ``not kept``."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PrstatReport(Report):
    """Processes or threads, and where their time went."""

    schema: ClassVar[str] = "msatools.prstat/1"

    bound_ns: int
    """How far a thread's times may miss its lifetime, and by when ages may be off."""

    accounting: Accounting
    totals: Totals
    tasks: Sequence[TaskRow]
    per_thread: bool = field(metadata=UNLISTED)
    selects: bool = field(default=False, metadata=UNLISTED)
    """Whether some tasks were asked for, and not all."""

    herds: tuple[Herd, ...]
    states: tuple[StateTime, ...] | None = field(default=None, metadata=ADDED)
    load: Load | None = field(default=None, metadata=ADDED)
    users: tuple[TaskGroup, ...] | None = field(default=None, metadata=ADDED)
    cgroups: tuple[TaskGroup, ...] | None = field(default=None, metadata=ADDED)
    by: Mapping[str, tuple[Any, ...]] | None = field(default=None, metadata=ADDED)
    """By the kinds of :data:`msatools.prstat.options.GROUPS` that were asked for: a
    :class:`ClassGroup` each by class, else a :class:`TaskGroup`."""

    stacks: tuple[StackGroup, ...] | None = field(default=None, metadata=ADDED)
    why: tuple[Why, ...] | None = field(default=None, metadata=ADDED)
