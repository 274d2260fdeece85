# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of prstat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Struct, field

from msatools.kernel.clocks import Accounting
from msatools.kernel.report import ADDED, Report
from msatools.locks.report import Herd, WaitTarget
from msatools.model import Mark
from msatools.program.model import UNLISTED
from msatools.prstat.states import StateTime


class Split(Struct, frozen=True):
    """The parts of the time off the CPU that the kernel keeps."""

    iowait_ns: int | None
    """Uninterruptible sleep in I/O wait."""

    blocked_ns: int | None
    """Other uninterruptible sleep."""

    sleep_ns: int | None
    """Interruptible sleep."""

    stopped_ns: int | None

    delays: Mapping[str, int | None]
    """Delays in ns by kind, such as ``blkio``; they overlap the times above."""

    coverage: float | None
    """Share of the time off the CPU that the times above explain."""


class OffCpu(Struct, frozen=True):
    """Time off the CPU in one class within an interval."""

    task_class: str | None = field(name="class")
    """``None`` for time that no sample shows."""

    ns: int
    error_ns: int
    """The standard error, 0 if the time is exact."""

    on_code: Annotated[bool | None, ADDED] = None
    """``True`` for page faults on executable mappings."""


class Waited(Struct, frozen=True):
    """Time off the CPU as Solaris splits it: of an interval, or the current wait."""

    code_faults_ns: int
    data_faults_ns: int
    locks_ns: int
    stopped_ns: int
    untold_ns: int
    """Time of unknown cause: any of the above, or sleep."""

    is_estimate: bool


class Children(Struct, frozen=True):
    """Sums over reaped children, including those that they reaped."""

    user_ns: int
    system_ns: int
    nvcsw: int
    nivcsw: int
    min_flt: int
    maj_flt: int


class TaskRow(Struct, frozen=True):
    """A process, or a thread. ``None`` if the kernel does not keep a value."""

    pid: int
    tgid: int
    ppid: int | None
    uid: int | None
    comm: str
    cgroup: str | None
    kthread: bool
    threads: int | None
    """Number of threads of its process that are not reaped."""

    state: str
    """The letter as in /proc: one of R S D T t Z X I P."""

    pri: int
    """The priority as in /proc/PID/stat: 20 for nice 0, -2 and less for real-time."""

    nice: int
    cpu: int
    """The CPU that the task is on, or was last on."""

    size_bytes: int | None
    rss_bytes: int | None
    task_class: str = field(name="class")
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
    """Linux does not count them."""

    sleeps: Annotated[int, UNLISTED] = 0
    """Voluntary switches of the threads included in *off_cpu_ns*."""

    off_cpu: Annotated[tuple[OffCpu, ...] | None, ADDED] = None
    waited: Annotated[Waited | None, UNLISTED] = None
    children: Annotated[Children | None, ADDED] = None


class Totals(Struct, frozen=True):
    """Totals of the selected tasks, before the number of rows was limited."""

    processes: int
    threads: int
    states: Mapping[str, int]
    """Threads by the letters of /proc."""

    classes: Mapping[str, int]
    """Threads by class."""

    load_averages: tuple[float, ...] | None
    """The kernel's averages over 1, 5 and 15 minutes."""

    cpus: int
    """Number of online CPUs."""

    ram_bytes: int | None


class TaskGroup(Struct, frozen=True):
    """Processes or threads with a common property."""

    key: str
    """The number of a user, path of a control group, ID of a container, inode number of
    a PID namespace or name of a command; ``-`` for none or an unknown one."""

    processes: int
    threads: int
    size_bytes: int
    """Sums of all address spaces: shared memory counts in each."""

    rss_bytes: int
    cpu_ns: int
    """Time on the CPU of its processes, including their ended threads."""

    cpu_share: float
    """Share of one CPU, over the life of each process or the interval."""


class ClassGroup(Struct, frozen=True):
    """Threads in one class now, and the time in that class."""

    key: str
    """The class; ``-`` for time of an interval whose class is unknown."""

    processes: int
    threads: int
    age_ns: int
    """Sum of the threads' ages in the class."""

    max_age_ns: int
    ns: int | None
    """Time in an interval of all threads, including those in another class now."""

    error_ns: int | None
    """The standard error of :attr:`ns`, 0 if it is exact."""


class LoadGroup(Struct, frozen=True):
    """Threads that contribute to the load in the same way."""

    state: str
    """R or D."""

    task_class: str = field(name="class")
    comm: str
    on: WaitTarget | None
    function: str | None
    """The kernel function that waits."""

    pids: tuple[int, ...]
    max_age_ns: int


class Load(Struct, frozen=True):
    """The threads that make up the current load."""

    runnable: int
    """Number of runnable threads."""

    uninterruptible: int
    groups: tuple[LoadGroup, ...]


class StackGroup(Struct, frozen=True):
    """Threads with the same stack trace."""

    frames: tuple[str, ...]
    """Functions, innermost first; ``name [module]`` in a module."""

    task_class: str = field(name="class")
    pids: tuple[int, ...]
    min_age_ns: int
    max_age_ns: int
    ages_ns: Annotated[tuple[int, ...], UNLISTED]
    comms: Annotated[tuple[str, ...], UNLISTED]
    """Names of the threads, in the order of ``pids``."""


class Why(Struct, frozen=True):
    """Source and accuracy of a field on this kernel."""

    field: str
    bound: str
    """``exact``, ``estimate``, ``upper``, ``lower`` or ``not kept``."""

    text: str


def _group_types() -> Mapping[str, type[Any]]:
    from msatools.prstat.select import GROUPS

    return {name: ClassGroup if name == "class" else TaskGroup for name in GROUPS}


class PrstatReport(Report, frozen=True, kw_only=True):
    """Processes or threads, and where their time went."""

    schema: ClassVar[str] = "msatools.prstat/1"

    bound_ns: int
    """Maximum error of the sum of a thread's times, and of ages."""

    accounting: Accounting
    totals: Totals
    tasks: Sequence[TaskRow]
    per_thread: Annotated[bool, UNLISTED]
    selects: Annotated[bool, UNLISTED] = False
    """Whether only some tasks were requested."""

    herds: tuple[Herd, ...]
    states: Annotated[tuple[StateTime, ...] | None, ADDED] = None
    load: Annotated[Load | None, ADDED] = None
    users: Annotated[tuple[TaskGroup, ...] | None, ADDED] = None
    cgroups: Annotated[tuple[TaskGroup, ...] | None, ADDED] = None
    by: Annotated[
        Mapping[str, tuple[Any, ...]] | None, ADDED, Mark("groups", _group_types)
    ] = None
    """Groups by the requested kinds of :data:`msatools.prstat.select.GROUPS`: a
    :class:`ClassGroup` for ``class``, else a :class:`TaskGroup`."""

    stacks: Annotated[tuple[StackGroup, ...] | None, ADDED] = None
    why: Annotated[tuple[Why, ...] | None, ADDED] = None
