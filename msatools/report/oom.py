# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the kernel's log has of a lack of memory (mm/oom_kill.c)."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.report.oomstat import Filled, group_filled, machine_filled
from msatools.target.printk import LogRecord

Constraint = Literal["none", "cgroup", "cpuset", "memory-policy"]
"""What had no memory: the machine, a control group, a cpuset, a policy of NUMA."""

_INVOKED = re.compile(
    r"(?P<comm>.*) invoked oom-killer: gfp_mask=(?P<gfp>0x[0-9a-f]+)"
    r"(?:\((?P<flags>[\w|]*)\))?.*?, order=(?P<order>-?\d{1,2})\b",
    re.DOTALL,
)
_KIND = re.compile(r"oom-kill:constraint=CONSTRAINT_(?P<kind>\w+)")
_GROUP = re.compile(r"oom-kill:.*\boom_memcg=(?P<path>.*?),task_memcg=")
_LIMIT = re.compile(r"memory: usage \d+kB, limit \d+kB")
_OF_GROUP = re.compile(r"Memory cgroup stats for (?P<path>.*?):")
_KILLED = re.compile(
    r"(?:Memory cgroup o|O)ut of memory(?: \(oom_kill_allocating_task\))?: "
    r"Kill(?:ed)? process (?P<pid>\d{1,10}) \((?P<comm>.*?)\)"
    r"(?:.*?anon-rss:(?P<anon>\d{1,20})kB)?",
    re.DOTALL,
)
_TASK = re.compile(
    r"\[ *(?P<pid>\d{1,10})\] +\d+ +\d+ +\d+ +(?P<rss>\d{1,20})(?: +-?\d+)+ "
    r"(?P<comm>.+)",
    re.DOTALL,
)
_ENDS = (
    *("Tasks state (memory values", "oom-kill:", "Out of memory", "Kernel panic"),
    "Memory cgroup out of memory",
)
"""How lines begin that come after those on the state of memory."""
_KINDS: dict[str, Constraint] = {
    "NONE": "none",
    "MEMCG": "cgroup",
    "CPUSET": "cpuset",
    "MEMORY_POLICY": "memory-policy",
}
_MAX = 1024
_KIB = 1024


class Victim(Struct, frozen=True):
    """A process that the kernel killed for memory."""

    pid: int
    comm: str
    time_ns: int
    """When it was killed."""

    anon_bytes: int | None
    """Anonymous memory that it had in RAM."""


class MemoryHolder(Struct, frozen=True):
    """A process and its memory, in the log's table of tasks."""

    pid: int
    comm: str
    rss_pages: int


class OutOfMemory(Struct, frozen=True):
    """One lack of memory, and what followed."""

    time_ns: int
    comm: str | None = None
    """The task that asked for memory; ``None`` if the log no longer has it."""

    order: int | None = None
    """It asked for 2^order pages; -1 if a user did, by sysrq."""

    flags: str | None = None
    """How it asked: ``GFP_KERNEL``."""

    constraint: Constraint = "none"
    cgroup: str | None = None
    """Path of the control group that is at its limit."""

    holders: tuple[MemoryHolder, ...] = ()
    """The tasks with most memory, the largest first."""

    filled: Filled = field(default_factory=dict)
    """What the memory of the machine, or of the control group, was then."""

    victims: tuple[Victim, ...] = ()
    """Several, if a control group is killed as a whole (memory.oom.group)."""


def parse_ooms(log: Iterable[LogRecord], page_size: int) -> list[OutOfMemory]:
    """Return the lacks of memory in a log, the oldest first."""
    return list(_parse(log, page_size))


def victims(ooms: Sequence[OutOfMemory]) -> list[Victim]:
    """Return all processes that the kernel killed for memory."""
    return [victim for oom in ooms for victim in oom.victims]


def _parse(log: Iterable[LogRecord], page_size: int) -> Iterator[OutOfMemory]:
    last: OutOfMemory | None = None
    holders: list[MemoryHolder] = []
    lines: list[str] = []
    for record in log:
        line = record.text
        if not record.is_kernel:
            continue
        if found := _INVOKED.match(line):
            if last is not None:
                yield _with(last, holders, lines, page_size)
            last, holders, lines = _begun(found, record), [], []
        elif last is None and (_KIND.match(line) or _KILLED.match(line)):
            # The table of tasks before it may be larger than the log.
            last = _detail(OutOfMemory(record.time_ns), holders, record)
        elif last is not None:
            last = _detail(last, holders, record)
            if len(lines) < _MAX:
                lines += line.split("\n")
    if last is not None:
        yield _with(last, holders, lines, page_size)


def _begun(found: re.Match[str], record: LogRecord) -> OutOfMemory:
    return OutOfMemory(
        time_ns=record.time_ns,
        comm=found["comm"],
        order=int(found["order"]),
        flags=found["flags"],
    )


def _detail(
    oom: OutOfMemory, holders: list[MemoryHolder], record: LogRecord
) -> OutOfMemory:
    """Return the same with what a further line adds."""
    line = record.text
    if _LIMIT.match(line):
        # Only a control group has a limit. A panic comes before its own line.
        return replace(oom, constraint="cgroup")
    if found := _OF_GROUP.match(line):
        return replace(oom, constraint="cgroup", cgroup=found["path"])
    if found := _KIND.match(line):
        kind = _KINDS.get(found["kind"], "none")
        group = _GROUP.match(line)
        path = group["path"] if group else oom.cgroup
        return replace(oom, constraint=kind, cgroup=path if kind == "cgroup" else None)
    if found := _KILLED.match(line):
        anon = found["anon"]
        victim = Victim(
            pid=int(found["pid"]),
            comm=found["comm"],
            time_ns=record.time_ns,
            anon_bytes=None if anon is None else int(anon) * _KIB,
        )
        return replace(oom, victims=(*oom.victims, victim)[:_MAX])
    if (found := _TASK.match(line)) and len(holders) < _MAX:
        rss = int(found["rss"])
        holders.append(MemoryHolder(int(found["pid"]), found["comm"], rss))
    return oom


def _with(
    oom: OutOfMemory, holders: list[MemoryHolder], lines: list[str], page_size: int
) -> OutOfMemory:
    ranked = sorted(holders, key=lambda holder: -holder.rss_pages)
    # What comes after the table of tasks is of something else.
    lines = [*takewhile(lambda line: not line.startswith(_ENDS), lines)]
    filled: Filled = {}
    if oom.comm is None:
        pass  # its beginning is lost
    elif oom.constraint == "cgroup":
        filled = group_filled(lines)
    else:
        filled = machine_filled(lines, page_size)
    return replace(oom, holders=tuple(ranked), filled=filled)
