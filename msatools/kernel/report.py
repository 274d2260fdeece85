# SPDX-License-Identifier: LGPL-2.1-or-later

"""Base classes of all commands' reports and runs, and the losses in reports.

The kind of a loss determines whether it makes a report incomplete. Collectors count
losses in a :class:`LossLog`. A :class:`Session` makes one report per sample.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, ClassVar, Generic, TypedDict, TypeVar

from drgn import Program
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import OwnFault
from msatools.kernel.reader import Reader
from msatools.model import Mark, Presented
from msatools.program.model import UNLISTED, Target
from msatools.selfdesc import refusals

# --- Kinds of losses of a report, and whether they make it incomplete.
#
# Each loss is counted in the report's coverage under its key, and noted if it has a
# text. --strict uses the same keys, so that no loss is silent.


_STEADY = True


class Loss(str, Enum):
    """A kind of loss; its value is its key in the coverage of reports.

    All kinds make the report of a dump incomplete; the steady ones also that of a
    running kernel. There the others may just be tasks, files or pages that went away
    while they were read.
    """

    is_steady: bool

    def __new__(cls, key: str, is_steady: bool = False) -> "Loss":
        """Return the member with a key."""
        loss = str.__new__(cls, key)
        loss._value_, loss.is_steady = key, is_steady
        return loss

    # Of the dump's file.
    PAGE_DESCRIPTORS = "descriptors_bad"
    TORN = "torn"

    # Of the kernel itself, and of all commands.
    ACCOUNTING = "accounting_unreadable", _STEADY
    CLOCKS = "clocks_unreadable", _STEADY
    COMMAND_LINE = "command_line_unreadable", _STEADY
    COUNTERS = "counters_unreadable", _STEADY
    COUNTS = "counts_broken"
    CPUS = "cpus_unreadable", _STEADY
    LISTS = "lists_broken", _STEADY
    LOAD = "load_unreadable", _STEADY
    LOG = "log_unreadable", _STEADY
    MASKS = "cpumasks_unreadable", _STEADY
    MODULES = "modules_unreadable", _STEADY
    NAMES = "names_unreadable"
    NODES = "nodes_unreadable", _STEADY
    PARTS = "parts_lost", _STEADY
    SYMBOLS = "symbols_unreadable", _STEADY
    TREES = "trees_broken"
    TYPES = "types_unreadable", _STEADY
    UNWINDING = "unwind_tables_unreadable", _STEADY

    # Of tasks.
    CGROUP_NAMES = "cgroup_names_unreadable"
    CGROUP_PATHS = "cgroup_paths_unreadable"
    DESCRIPTORS = "file_tables_unreadable"
    FILES = "files_unreadable"
    PATHS = "paths_unreadable"
    PIDS = "pids_unreadable"
    SIZES = "sizes_unreadable"
    STACKS = "stacks_unreadable"
    STACKS_CUT = "stacks_incomplete"
    TASKS = "tasks_unreadable", _STEADY
    WAITS = "waits_unreadable"

    # Of locks and waiters.
    COMPLETIONS = "completions_unreadable"
    DEVICES = "devices_unreadable"
    DISKS = "disks_unreadable"
    FILE_SYSTEMS = "file_systems_unreadable"
    FUTEX_CHAINS = "futex_chains_broken"
    FUTEX_OWNERS = "futex_owners_unreadable"
    KERNEL_THREADS = "kernel_threads_unreadable"
    LOCKS = "locks_unreadable"
    LOCK_NAMES = "lock_names_unreadable"
    MAPPINGS = "mappings_unreadable"
    SERVERS = "servers_unreadable"
    USER_STACKS = "user_stacks_unreadable"
    WAITERS = "waiters_unreadable"
    WORKQUEUES = "workqueues_unreadable"

    # Of zombies and what holds them.
    HEIRS = "heirs_unreadable"
    HOLDERS = "holders_unreadable"
    LEAKS = "leaks_lost"
    LIMITS = "limits_unreadable", _STEADY
    PARENTS_LOCKS = "locks_lost"
    SLABS = "slabs_unreadable"
    VARIABLES = "variables_unreadable", _STEADY

    # Of CPUs.
    AFFINITIES = "affinities_unreadable"
    DOMAINS = "root_domains_unreadable"
    HANDLERS = "handlers_broken"
    HOTPLUG = "hotplug_unreadable", _STEADY
    IDLE_STATES = "idle_states_unreadable", _STEADY
    IRQS = "irqs_unreadable"
    IRQ_AFFINITY = "irq_affinity_unreadable"
    IRQ_COUNTS = "irq_counts_unreadable"
    IRQ_DESCRIPTORS = "irq_desc_broken"
    PARTITIONS = "partitions_unknown"
    QUEUED = "queues_broken"
    QUEUES_DIFFER = "run_queues_differ"
    RUN_QUEUES = "run_queues_unreadable", _STEADY
    TICKS = "ticks_unreadable", _STEADY
    TOPOLOGY = "topology_unreadable", _STEADY

    # Of memory.
    ADDRESS_SPACES = "address_spaces_lost"
    EXCLUDED = "excluded_pages", _STEADY
    DMA = "dma_pages_lost"
    DMABUFS = "dmabufs_unreadable"
    FTRACE = "ftrace_pages_lost"
    GLOBALS = "tables_pages_lost"
    HEADS = "heads_unreadable", _STEADY
    INODES = "inodes_unreadable"
    OWNERS = "owners_unreadable", _STEADY
    PAGE_BLOCKS = "pageblocks_unreadable", _STEADY
    MEMPOOLS = "mempools_unreadable"
    PAGE_OWNER = "page_owner_unreadable"
    PAGE_TABLES = "page_tables_unreadable", _STEADY
    PAGES = "unreadable_pages", _STEADY
    PCP_LISTS = "pcp_lists_unreadable", _STEADY
    PCP_LISTS_CUT = "pcp_lists_broken"
    PIPES = "pipes_unreadable"
    REQUESTS = "requests_pages_lost"
    RINGS = "rings_unreadable"
    SECTION_TABLE = "section_table_lost", _STEADY
    SLAB_CACHES = "slab_caches_unreadable"
    SOCKETS = "sockets_unreadable"
    SOCKET_BUFFERS = "skbs_unreadable"
    USER_TABLES = "user_tables_unreadable"
    USER_TABLE_ENTRIES = "user_table_entries_broken"
    VMALLOC = "vmalloc_areas_unreadable", _STEADY
    VMSTAT_CPUS = "vmstat_cpus_unreadable", _STEADY


_STRUCT = "struct "
_UNREADABLE = "_unreadable"
_KEYS = frozenset(loss.value for loss in Loss)
_STEADY_KEYS = frozenset(loss.value for loss in Loss if loss.is_steady)


def struct_key(type_name: str) -> str:
    """Return the key for unreadable structures, such as ``cred_unreadable``."""
    return type_name.removeprefix(_STRUCT).replace(" ", "_") + _UNREADABLE


def is_loss(key: str) -> bool:
    """Return whether a key of a report's coverage counts losses."""
    return key in _KEYS or key.endswith(_UNREADABLE)


def spoils(key: str, live: bool) -> bool:
    """Return whether losses with this key make a report incomplete.

    :param live: Whether the report is of a running kernel.
    """
    return key in _STEADY_KEYS if live else is_loss(key)


# --- Logs of losses, and the head of all reports.


_LOGS = "msatools.logs"
"""Key in ``prog.cache`` of the list that :func:`logs_of` returns."""

ADDED = Mark("added")
"""
Metadata of a field that is present on request only.

If such a field is ``None``, it was not requested, and JSON lacks its key; ``None`` of
any other field means that the kernel does not keep it, and is null in JSON.
"""


class Note(Struct, frozen=True):
    """One fact that limits how far a report can be trusted."""

    code: str
    """A stable, short, machine-readable name, such as ``pcp-list-broken``."""

    text: str
    """One sentence."""


class LossLog(Struct):
    """The notes and the coverage that a collector gathers for its report."""

    coverage: Counter[str] = field(default_factory=Counter)
    """Number of reads, and of losses by their key (:class:`Loss`)."""

    about: Counter[str] = field(default_factory=Counter)
    """Number of losses by the *about* of :meth:`lose`, such as the name of a list."""

    notes: dict[tuple[str, str], Note] = field(default_factory=dict)
    """Maps a code and a subject to the first note with both."""

    def note(self, code: str, text: str, subject: str = "") -> None:
        """Add a note, unless there is one with the same code and subject."""
        self.notes.setdefault((code, subject), Note(code, text))

    def copy(self) -> "LossLog":
        """Return a copy of the counts and notes gathered so far."""
        return LossLog(self.coverage.copy(), self.about.copy(), dict(self.notes))

    def reset(self, to: "LossLog") -> None:
        """Return to the state of an earlier copy, before the next report."""
        kept = to.copy()
        self.coverage, self.about, self.notes = kept.coverage, kept.about, kept.notes

    def add(self, other: "LossLog") -> None:
        """Add the counts and notes of another log."""
        self.coverage.update(other.coverage)
        self.about.update(other.about)
        for key, note in other.notes.items():
            self.notes.setdefault(key, note)

    def cover(self, other: "LossLog") -> None:
        """Merge another log that may count the same losses: keep the larger counts."""
        self.coverage |= other.coverage
        self.about |= other.about
        self.notes = {**other.notes, **self.notes}

    def lose(
        self, loss: str, text: str = "", *, count: int = 1, about: str = ""
    ) -> None:
        """Count losses of a kind, and note the first.

        :param loss: A :class:`Loss`, or a :func:`struct_key`.
        :param text: Text of the note; empty for no note.
        :param count: Number of losses; nothing is done if it is 0.
        :param about: What is lost, such as the name of a list. Each *about* of a kind
            has its own count and note.
        """
        if not count:
            return
        key = loss.value if isinstance(loss, Loss) else loss
        assert is_loss(key), key
        self.coverage[key] += count
        if about:
            self.about[about] += count
        if text:
            self.note("lost", text, f"{key} {about}")

    @property
    def lost(self) -> Counter[str]:
        """Number of losses, by key in the coverage."""
        return Counter(
            {
                key: count
                for key, count in self.coverage.items()
                if count and is_loss(key)
            }
        )


def log_of(target: Target) -> LossLog:
    """Return a log with the losses found when the target was opened."""
    losses = LossLog()
    losses.lose(
        Loss.PAGE_DESCRIPTORS,
        "pages lie beyond the end of the file, or have impossible sizes",
        count=target.bad_descriptors,
    )
    # Without a note: the head of the report shows it.
    losses.lose(Loss.TORN, count=target.torn)
    losses.lose(
        Loss.SYMBOLS,
        f"{target.lost_symbols:,} of the kernel's symbols are lost with pages of their "
        "table; what they name is left out, or taken for something that this kernel "
        "lacks",
        count=target.lost_symbols,
    )
    return losses


def logs_of(prog: Program) -> list[LossLog]:
    """Return the logs of the reports on a program that are under way."""
    logs: list[LossLog] = prog.cache.setdefault(_LOGS, [])
    return logs


@contextmanager
def noting_refusals(prog: Program, losses: LossLog) -> Iterator[None]:
    """Count in *losses* the lookups of types that are refused within the context.

    Within it, :func:`logs_of` returns *losses*, too.
    """
    logs = logs_of(prog)
    logs.append(losses)
    try:
        with refusals(prog) as refused:
            yield
    finally:
        # Compare by identity: logs may be equal.
        logs[:] = [log for log in logs if log is not losses]
    for name, why in refused.items():
        losses.lose(Loss.TYPES, f"{name} is left out: {why}", about=name)


class Cost(Struct, frozen=True, kw_only=True):
    """Cost of one of several samples, on the machine that msatools runs on."""

    cpu_ns: int
    """CPU time of this process since the previous sample, output included."""

    wall_ns: int
    """Time since the previous sample."""

    elapsed_ns: int
    """Time that it took to read the kernel and to make the report."""

    peak_bytes: int | None
    """Peak resident memory of this process; ``None`` if /proc does not show it."""


class Report(Presented, Struct, frozen=True, kw_only=True):
    """The head of every report; subclasses add the payload."""

    schema: ClassVar[str]

    target: Target
    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the target kernel."""

    interval_ns: int | None
    """Kernel time since the previous sample; ``None`` for a one-shot report."""

    coverage: Mapping[str, int]
    """Counts of what was read, missing, unreadable and retried, in the keys' units."""

    notes: tuple[Note, ...]

    cost: Annotated[Cost | None, ADDED] = None
    """Cost of the sample; ``None`` for a report without an interval."""

    faults: Annotated[tuple[OwnFault, ...], UNLISTED] = ()
    """Faults of msatools that cost a part of the report."""


class Head(TypedDict):
    """The fields of every report: ``FilesReport(**head, processes=...)``."""

    target: Target
    taken_at_ns: int | None
    interval_ns: int | None
    coverage: Mapping[str, int]
    notes: tuple[Note, ...]


def ns_between(before: Report, after: Report) -> int | None:
    """Return the kernel time between two reports; ``None`` if one has no time."""
    if before.taken_at_ns is None or after.taken_at_ns is None:
        return None
    return after.taken_at_ns - before.taken_at_ns


# --- Number of reads that a report takes.
#
# drgn itself reads memory too, so .Reader does not see all reads. /proc/self/io
# (Documentation/filesystems/proc.rst) counts all read calls of the process, which for
# an ELF dump or /proc/kcore are those that strace shows. A kdump is mapped into memory
# by libkdumpfile and takes no calls: there the reader's reads count.


_CALLS = b"syscr:"


class ReadCost:
    """Counts reads since its construction, or since the previous :meth:`reads`."""

    def __init__(self, reader: Reader, of_file: bool) -> None:
        """
        :param reader: Counts its own reads, for targets that are not read by calls,
            and for kernels without ``/proc/self/io``.
        :param of_file: Whether the target is a file; calls on a socket are not counted.
        """
        self._reader = reader
        self._file: int | None = None
        if of_file:
            # Some kernels lack CONFIG_TASK_IO_ACCOUNTING.
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._calls()

    def reads(self) -> int:
        """Return the number of reads since the last call.

        It is at least the number of reads that the reader has made for the report.
        """
        calls = self._calls()
        reads = self._reader.reads
        if calls is not None and self._before is not None:
            # The previous pread() of the file counts now: it did not include itself.
            reads = max(reads, calls - self._before - 1)
        self._before = calls
        return reads

    def _calls(self) -> int | None:
        if self._file is None:
            return None
        text = os.pread(self._file, 4096, 0)
        for line in text.splitlines():
            if line.startswith(_CALLS):
                return int(line[len(_CALLS) :])
        return None


# --- Runs of commands: the interface, and the base for commands that read a kernel.


R = TypeVar("R", bound=Report)
Options = TypeVar("Options")

Progress = Callable[[int, int], None]
"""``progress(done, total)``, in a unit of the caller's choice."""


def quietly(done: int, total: int) -> None:
    """Ignore progress."""


class Session(Generic[R]):
    """One run of a command on one target, with its state between reports.

    A run without an interval calls :meth:`report` once. One with an interval calls
    :meth:`begin` once and then, after each interval, :meth:`advance`; in between it
    calls :meth:`sample` as often as :attr:`period_s` asks for.

    A command implements :meth:`report`, which is enough if each report is of one
    moment. If an interval is the difference of two reports, the command implements
    :meth:`delta`, too. The other methods are for samples within an interval.
    """

    _previous: R | None = None

    @property
    def period_s(self) -> float | None:
        """Seconds between samples within an interval; ``None`` for no samples."""
        return None

    def report(self, progress: Progress) -> R:
        """Return a report of the totals until now, and of the current state."""
        raise NotImplementedError

    def delta(self, previous: R, current: R) -> R:
        """Return the current report with the changes since the previous one.

        Unless a command overrides this method, only ``interval_ns`` is set.
        """
        return replace(current, interval_ns=ns_between(previous, current))

    def begin(self, progress: Progress) -> None:
        """Read the state at the start of the first interval."""
        self._previous = self.report(progress)

    def sample(self) -> None:
        """Take a sample within an interval."""

    def advance(self, progress: Progress) -> R:
        """Return a report of the interval that ends now, and begin the next."""
        previous, current = self._previous, self.report(progress)
        assert previous is not None, "no interval has begun"
        self._previous = current
        return self.delta(previous, current)


class KernelSession(Session[R], Generic[R, Options]):
    """A run of reports on one kernel, with the options of its command.

    Losses found while the run starts are part of all its reports; losses found during
    one report are part of that one only.
    """

    def __init__(self, prog: Program, target: Target, options: Options) -> None:
        self._prog = prog
        self._target = target
        self._options = options
        self._reader = Reader(prog)
        self._losses = log_of(target)
        self._lasting = self._losses.copy()

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Make the losses found within the context part of all reports."""
        with noting_refusals(self._prog, self._losses):
            yield
        self._lasting = self._losses.copy()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Gather the losses of one report within the context.

        Those of earlier reports are dropped first.
        """
        self._forget()
        with noting_refusals(self._prog, self._losses):
            yield

    def _forget(self) -> None:
        self._losses.reset(self._lasting)
        self._reader.reads = self._reader.bytes = 0

    def _head(self, taken_at_ns: int | None, always: Iterable[str] = ()) -> Head:
        """Return the head of a report, once all of it has been read.

        :param always: See :meth:`_coverage`.
        """
        return Head(
            target=self._target,
            taken_at_ns=taken_at_ns,
            interval_ns=None,
            coverage=self._coverage(always),
            notes=tuple(self._losses.notes.values()),
        )

    def _coverage(self, always: Iterable[str]) -> dict[str, int]:
        """Return the counts of reads and losses for a report.

        :param always: Keys to include, and first, even if their count is 0.
        """
        counted = self._losses.coverage
        counted["reads"] += self._reader.reads
        counted["bytes_read"] += self._reader.bytes
        return {
            **dict.fromkeys(always, 0),
            **{key: count for key, count in counted.items() if count},
        }
