# SPDX-License-Identifier: LGPL-2.1-or-later

"""All that verdicts are made from: the reports of the other commands, and more."""

from collections.abc import Mapping

from msgspec import Struct

from msatools.cpus.model import CpusReport
from msatools.locks.report import LocksReport
from msatools.memory.model import MemstatReport
from msatools.prstat.model import Load, PrstatReport, StackGroup
from msatools.report.events import Event
from msatools.report.memory import MemoryState
from msatools.report.model import CrashDetails, Machine
from msatools.report.oom import OutOfMemory
from msatools.target.model import Target
from msatools.target.printk import LogRecord
from msatools.tasks.spaces import AddressSpace
from msatools.zombies.model import Limit, ZombiesReport


class ReportParts(Struct, frozen=True, kw_only=True):
    """What was read of a kernel. A part that failed is ``None``, and among the errors.

    A further source of findings is a further field here, and is read in
    :mod:`msatools.report.report`; the rules that need it name it in ``needs``.
    """

    target: Target
    machine: Machine
    taken_at_ns: int | None
    """CLOCK_MONOTONIC."""

    crash: CrashDetails | None
    log: tuple[LogRecord, ...]
    events: tuple[Event, ...]
    ooms: tuple[OutOfMemory, ...]
    coverage: Mapping[str, int]
    """Reads and losses of all parts."""

    memstat: MemstatReport | None = None
    memory: MemoryState | None = None
    reclaimable_caches: frozenset[int] = frozenset()
    """Addresses of the slab caches whose memory can be reclaimed."""

    spaces: tuple[AddressSpace, ...] | None = None
    """Address spaces of processes."""

    prstat: PrstatReport | None = None
    """Processes."""

    load: Load | None = None
    """The threads that make up the load."""

    stacks: tuple[StackGroup, ...] | None = None
    """Threads by their stacks, the most first; ``None`` if not asked for."""

    locks: LocksReport | None = None
    zombies: ZombiesReport | None = None
    limits: tuple[Limit, ...] | None = None
    """Limits of the number of tasks, also those that no zombie counts against; the
    zombies are in :attr:`zombies`."""

    cpus: CpusReport | None = None
    errors: Mapping[str, str]
    """Why a part failed, by the name of its field."""
