# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read free memory, control groups at their limits, and the log of the OOM killer."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.mm import (
    Zone,
    online_nodes,
    populated_zones,
    read_swap,
    vm_counters,
)
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, enumerators, read_structs
from msatools.memory.by_cgroup import (
    UNKNOWN,
    Memcgs,
    is_unified,
    own_charges,
    read_tree,
)
from msatools.program.description import LogRecord
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    object_at,
)

# --- What filled memory when it ran out, by the kernel's log. Pure.
#
# For the machine: mm/show_mem.c, show_free_areas(). For a cgroup: mm/memcontrol.c,
# mem_cgroup_print_oom_meminfo(), whose lines are those of memory.stat.


ANON, SHMEM, FILE = "anonymous", "tmpfs and shared memory", "page cache"
SLAB, TABLES, STACKS = "slab", "page tables", "kernel stacks"
HUGETLB, FREE = "hugetlb", "free"
OTHER = "in no counter (drivers, vmalloc)"

_KIB = 1024
_COUNT = re.compile(r"([a-z_]+)(?:\((\w+)\))?:(\d{1,18})(kB)?(?=\s|$)")
_NODE = re.compile(r"Node \d{1,4} active_anon:")
_HUGE = re.compile(
    r"(?:Node \d{1,4} )?hugepages_total=(\d{1,12}) .*hugepages_size=(\d{1,12})kB"
)
_TOTAL = re.compile(r"(\d{1,15}) pages (RAM|reserved)")
_STAT = re.compile(r"([a-z_0-9]+) (\d{1,18})")
_STAT_OF_GROUP = {
    # cgroup v1 calls it rss.
    "anon": ANON,
    "rss": ANON,
    "shmem": SHMEM,
    "slab": SLAB,
    "pagetables": TABLES,
    "kernel_stack": STACKS,
    "percpu": "per-CPU memory",
    "sock": "sockets",
    "vmalloc": "vmalloc",
}
_TOTAL_OF = "total_"
_WITH_SHMEM = ("file", "cache")
"""Names of a group's page cache, which includes the files of tmpfs."""

Filled = Mapping[str, int]
"""Bytes of each kind of memory, the largest first; empty if the log does not say."""


def group_filled(lines: Iterable[str]) -> Filled:
    """Return the memory of a control group by kind, from the lines after its name."""
    stat = {
        found[1]: int(found[2]) for line in lines if (found := _STAT.fullmatch(line))
    }
    # In cgroup v1, they include the groups below.
    totals = {
        name.removeprefix(_TOTAL_OF): value
        for name, value in stat.items()
        if name.startswith(_TOTAL_OF)
    }
    stat |= totals
    kinds = {kind: stat[name] for name, kind in _STAT_OF_GROUP.items() if name in stat}
    for name in _WITH_SHMEM:
        if name in stat:
            kinds[FILE] = max(stat[name] - kinds.get(SHMEM, 0), 0)
    return _ranked(kinds)


def machine_filled(lines: Iterable[str], page_size: int) -> Filled:
    """Return the machine's memory by kind, from the lines after ``Mem-Info:``."""
    pages: dict[str, int] = {}
    kib: dict[str, int] = {}
    huge = 0
    for line in lines:
        if found := _HUGE.match(line):
            huge += int(found[1]) * int(found[2]) * _KIB
        elif _NODE.match(line):
            for name, count in _counts(line, in_kib=True):
                kib[name] = kib.get(name, 0) + count
        elif found := _TOTAL.fullmatch(line):
            pages[found[2]] = int(found[1])
        elif line.startswith(("active_anon:", " ")):
            pages.update(_counts(line, in_kib=False))
    if "active_anon" not in pages:
        return {}

    def of(*names: str) -> int:
        return sum(pages.get(name, 0) for name in names) * page_size

    shmem = of("shmem")
    lists = of("active_anon", "inactive_anon", "isolated_anon", "unevictable")
    kinds = {
        # Pages of tmpfs are on the anonymous lists; locked pages, of either kind, are
        # on the unevictable list.
        ANON: max(lists - shmem, 0),
        SHMEM: shmem,
        FILE: of("active_file", "inactive_file", "isolated_file"),
        SLAB: of("slab_reclaimable", "slab_unreclaimable"),
        TABLES: of("pagetables"),
        STACKS: kib.get("kernel_stack", 0) * _KIB,
        HUGETLB: huge,
        FREE: of("free", "free_pcp"),
    }
    kinds[OTHER] = max(of("RAM") - of("reserved") - sum(kinds.values()), 0)
    return _ranked(kinds)


def _counts(line: str, in_kib: bool) -> Iterator[tuple[str, int]]:
    for name, _, count, unit in _COUNT.findall(line):
        if bool(unit) == in_kib:
            yield name, int(count)


def _ranked(kinds: Mapping[str, int]) -> Filled:
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    return {kind: amount for kind, amount in ranked if amount}


# --- Out-of-memory events in the kernel's log (mm/oom_kill.c).


Constraint = Literal["none", "cgroup", "cpuset", "memory-policy"]
"""What ran out of memory: the machine, a control group, a cpuset, a NUMA policy."""

_INVOKED = re.compile(
    r"(?P<comm>.{0,64}) invoked oom-killer: gfp_mask=(?P<gfp>0x[0-9a-f]+)"
    r"(?:\((?P<flags>[\w|]*)\))?.*?, order=(?P<order>-?\d{1,2})\b",
    re.DOTALL,
)
_KIND = re.compile(r"oom-kill:constraint=CONSTRAINT_(?P<kind>\w+)")
_GROUP = re.compile(r"oom-kill:.*\boom_memcg=(?P<path>.*?),task_memcg=")
_IN_GROUP = re.compile(r"\s*mem_cgroup_out_of_memory\+|Memory cgroup out of memory: K")
_LIMIT = re.compile(r"memory: usage \d+kB, limit \d+kB")
_OOM_OF_GROUP = re.compile(
    # "Task in ..." is from before "mm, oom: add oom victim's memcg to the oom context
    # information" (in v5.0), where it comes first.
    r"(?:Memory cgroup stats for |Task in .*? killed as a result of limit of )"
    r"(?P<path>.*?)(?::|$)"
)
_KILLED = re.compile(
    # Before bbbe48029720 ("mm, oom: remove 'prefer children over parent' heuristic")
    # (in v5.1) the line on who was chosen came first, and a child might be killed.
    r"(?:(?:Memory cgroup o|O)ut of memory(?: \(oom_kill_allocating_task\))?: )?"
    r"Killed process (?P<pid>\d{1,10}),?(?: UID \d+,)? \((?P<comm>.*?)\)"
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
"""Starts of the lines that end the description of memory."""
_KINDS: dict[str, Constraint] = {
    "NONE": "none",
    "MEMCG": "cgroup",
    "CPUSET": "cpuset",
    "MEMORY_POLICY": "memory-policy",
}
_MAX = 1024


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
    """One out-of-memory event, and the processes that were killed."""

    time_ns: int
    line: int = 0
    """Line of the text at which the event begins, from 1; 0 in a dump."""

    comm: str | None = None
    """The task that asked for memory; ``None`` if the log no longer has it."""

    order: int | None = None
    """The task asked for 2^order pages; -1 if sysrq started the OOM killer."""

    flags: str | None = None
    """GFP flags of the allocation, such as ``GFP_KERNEL``."""

    constraint: Constraint = "none"
    cgroup: str | None = None
    """Path of the control group that is at its limit."""

    holders: tuple[MemoryHolder, ...] = ()
    """The tasks with most memory, the largest first."""

    filled: Filled = field(default_factory=dict)
    """Memory of the machine or the control group at that time."""

    victims: tuple[Victim, ...] = ()
    """Several, if a control group is killed as a whole (memory.oom.group)."""


def parse_ooms(log: Iterable[LogRecord], page_size: int) -> list[OutOfMemory]:
    """Return the out-of-memory events in a log, the oldest first."""
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
            # The event's beginning is lost: its table of tasks may fill the log.
            begun = OutOfMemory(record.time_ns, record.line)
            last = _detail(begun, holders, record)
        elif last is not None:
            last = _detail(last, holders, record)
            if len(lines) < _MAX:
                lines += line.split("\n")
    if last is not None:
        yield _with(last, holders, lines, page_size)


def _begun(found: re.Match[str], record: LogRecord) -> OutOfMemory:
    return OutOfMemory(
        time_ns=record.time_ns,
        line=record.line,
        comm=found["comm"],
        order=int(found["order"]),
        flags=found["flags"],
    )


def _detail(
    oom: OutOfMemory, holders: list[MemoryHolder], record: LogRecord
) -> OutOfMemory:
    """Return *oom* with the facts of a further line; add tasks to *holders*."""
    line = record.text
    if _LIMIT.match(line) or _IN_GROUP.match(line):
        # Only a control group has a limit. A panic may come before the oom-kill line.
        oom = replace(oom, constraint="cgroup")
    if found := _OOM_OF_GROUP.match(line):
        path = oom.cgroup or found["path"]
        return replace(oom, constraint="cgroup", cgroup=path)
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
    # The lines from the table of tasks on do not describe memory.
    lines = [*takewhile(lambda line: not line.startswith(_ENDS), lines)]
    filled: Filled = {}
    if oom.comm is None:
        pass  # its beginning is lost
    elif oom.constraint == "cgroup":
        filled = group_filled(lines)
    else:
        filled = machine_filled(lines, page_size)
    return replace(oom, holders=tuple(ranked), filled=filled)


# --- What the page allocator has left, and control groups that are at their limits.
#
# mm/page_alloc.c: an allocation may take pages of a zone as long as more are free than
# a watermark and what is reserved for allocations that cannot use other zones.


MAX_GROUPS = 4096
"""Maximum number of control groups that are read, breadth first."""

_AT_LIMIT = 0.98
"""Share of its limit at which a group counts as full: CPUs charge 64 pages ahead."""

_MAX_PAGES = 1 << 40
"""A limit of this many pages (4 PiB) or more means no limit (PAGE_COUNTER_MAX)."""

_LRU_LISTS = 5
"""Lists in enum lru_list: anonymous (inactive, active), of files, unevictable."""


class ZoneState(Struct, frozen=True, kw_only=True):
    """Free pages of a zone, and those that an ordinary allocation may take."""

    node: int
    name: str
    managed: int
    free: int
    low: int
    """Low watermark: with fewer free pages kswapd reclaims."""

    min: int
    """Minimum watermark: with fewer free pages an allocation reclaims by itself."""

    reserve: int
    """Pages kept from allocations that could use a higher zone (lowmem_reserve)."""

    @property
    def to_min(self) -> int:
        """Pages that can be taken at once; 0 or less if there are none."""
        return self.free - self.reserve - self.min

    @property
    def to_low(self) -> int:
        """Pages that can be taken before kswapd has to run."""
        return self.free - self.reserve - self.low


class GroupAtLimit(Struct, frozen=True, kw_only=True):
    """A control group that has used up its memory."""

    path: str | None
    pages: int
    max_pages: int
    file_pages: int
    """Pages of files on its LRU lists, which reclaim can free."""

    anon_pages: int
    """Pages on its lists that only swap could free."""

    ooms: int
    """How often an allocation found nothing to reclaim (memory.events, oom)."""

    kills: int


class MemoryState(Struct, frozen=True, kw_only=True):
    """Free and reclaimable memory, and swap."""

    zones: tuple[ZoneState, ...]
    counters: Mapping[str, int | None]
    """Items of mm/vmstat.c by enumerator, in pages."""

    swap_pages: int | None
    swap_free_pages: int | None
    groups: tuple[GroupAtLimit, ...]
    removed_groups: int | None = None
    """Control groups that were removed and still exist."""

    removed_pages: int | None = None
    """Pages in memory that are charged to them."""

    @property
    def available_pages(self) -> int | None:
        """
        Estimate the pages that can be had without swapping.

        As MemAvailable in mm/show_mem.c: free pages above the reserves, and half of
        the page cache and of reclaimable slabs at least.
        """
        free = sum(max(zone.free - zone.low, 0) for zone in self.zones)
        low = sum(zone.low for zone in self.zones)
        file = self.sum("NR_ACTIVE_FILE", "NR_INACTIVE_FILE")
        slab = self.slab("NR_SLAB_RECLAIMABLE")
        if file is None or slab is None:
            return None
        return free + file - min(file // 2, low) + slab - min(slab // 2, low)

    def sum(self, *names: str) -> int | None:
        """Sum counters; ``None`` if one cannot be read. A missing one counts as 0."""
        total = 0
        for name in names:
            value = self.counters.get(name, 0)
            if value is None:
                return None
            total += value
        return total

    def slab(self, name: str) -> int | None:
        """Return a counter of slabs, whose names end with _B since v5.9."""
        return self.sum(f"{name}_B" if f"{name}_B" in self.counters else name)


def read_memory(reader: Reader, page_size: int, losses: LossLog) -> MemoryState:
    """Read free memory, swap, and the control groups at their limits.

    :raises MissingError: if the types lack what describes zones
    """
    nodes = online_nodes(reader.prog, losses)
    swap = read_swap(reader.prog)
    return MemoryState(
        zones=tuple(_zones(list(populated_zones(nodes)), losses)),
        counters=vm_counters(reader, nodes, losses),
        swap_pages=swap.pages,
        swap_free_pages=swap.free_pages,
        groups=tuple(_groups_at_limit(reader, losses)),
        removed_groups=_removed_groups(reader, losses),
        removed_pages=_removed_pages(reader, losses),
    )


def _zones(zones: Sequence[Zone], losses: LossLog) -> Iterator[ZoneState]:
    if not zones:
        return
    highest = max(zone.number for zone in zones)
    marks = enumerators(zones[0].object.prog_, "enum zone_watermarks")
    items = enumerators(zones[0].object.prog_, "enum zone_stat_item")
    for zone in zones:
        pages = zone.object
        try:
            boost = int(pages.watermark_boost.value_())
            yield ZoneState(
                node=zone.node,
                name=zone.name,
                managed=int(pages.managed_pages.counter.value_()),
                free=int(pages.vm_stat[items["NR_FREE_PAGES"]].counter.value_()),
                low=int(pages._watermark[marks["WMARK_LOW"]].value_()) + boost,
                min=int(pages._watermark[marks["WMARK_MIN"]].value_()) + boost,
                reserve=int(pages.lowmem_reserve[highest].value_()),
            )
        except UNREADABLE as error:
            losses.lose(Loss.NODES, f"cannot read a zone of memory: {error}")


# --- control groups


def _groups_at_limit(reader: Reader, losses: LossLog) -> Iterator[GroupAtLimit]:
    try:
        # The root has no limit.
        groups = read_tree(reader, losses, MAX_GROUPS).addresses[1:]
        found = read_structs(
            reader, "struct mem_cgroup", _members(reader.prog), groups, losses
        )
    except MissingError:
        return  # CONFIG_MEMCG=n
    most, used = found["max"].astype(np.int64), found["used"].astype(np.int64)
    at = found.readable & (most > 0) & (most < _MAX_PAGES) & (used >= most * _AT_LIMIT)
    rows = np.flatnonzero(at)
    names = Memcgs(reader, losses).groups(groups[rows])
    for row, group in zip(rows.tolist(), names, strict=True):
        anon, file = _list_sizes(reader, int(groups[row]))
        yield GroupAtLimit(
            path=group.path,
            pages=int(used[row]),
            max_pages=int(most[row]),
            anon_pages=anon,
            file_pages=file,
            ooms=int(found["ooms"][row]) if found.has("ooms") else 0,
            kills=int(found["kills"][row]) if found.has("kills") else 0,
        )


def _removed_groups(reader: Reader, losses: LossLog) -> int | None:
    """Count removed groups; ``None`` if the memory controller is not on the unified
    hierarchy, whose removed groups are counted."""
    try:
        if is_unified(reader):
            return Memcgs(reader, losses).removed()
    except LOST:
        pass  # CONFIG_MEMCG=n
    return None


def _removed_pages(reader: Reader, losses: LossLog) -> int | None:
    """Sum the pages charged to removed groups themselves; ``None`` if some are unknown.

    A group is removed once CSS_ONLINE is cleared.
    """
    lists = losses.coverage[Loss.LISTS.value]
    try:
        tree = read_tree(reader, losses, MAX_GROUPS)
        own = own_charges(reader, tree, losses).memory
        members = {"flags": ("css.flags",)}
        found = read_structs(
            reader, "struct mem_cgroup", members, tree.addresses, losses
        )
        online = int(find_constant(reader.prog, "CSS_ONLINE").value_())
    except MissingError:
        return None  # CONFIG_MEMCG=n
    removed = found["flags"].astype(np.int64) & online == 0
    is_whole = len(own) < MAX_GROUPS and losses.coverage[Loss.LISTS.value] == lists
    if not is_whole or not found.readable.all() or (own[removed] == UNKNOWN).any():
        return None
    return int(own[removed].sum())


def _members(prog: drgn.Program) -> Members:
    events = enumerators(prog, "enum memcg_memory_event")
    members = {"used": ("memory.usage.counter",), "max": ("memory.max",)}
    for column, event in (("ooms", "MEMCG_OOM"), ("kills", "MEMCG_OOM_KILL")):
        if event in events:
            members[column] = (f"memory_events[{events[event]}].counter",)
    return members


def _list_sizes(reader: Reader, group: int) -> tuple[int, int]:
    """Return the anonymous and the file pages on a group's lists; 0 if unreadable."""
    prog = reader.prog
    anon = file = 0
    try:
        with drgn_lookups:
            info = find_type(prog, "struct mem_cgroup_per_node")
            nodes = object_at(prog, "struct mem_cgroup", group).nodeinfo
            for node in online_nodes(prog, LossLog()):
                address = int(nodes[node.node_id.value_()].value_())
                lists = _words(reader, info, address, "lru_zone_size", _LRU_LISTS)
                by_list = lists.reshape(-1, _LRU_LISTS).sum(0).tolist()
                by_age = _generations(reader, info, address)
                anon += by_list[0] + by_list[1] + by_age[0]
                file += by_list[2] + by_list[3] + by_age[1]
    except LOST:
        return 0, 0
    return anon, file


def _generations(reader: Reader, info: drgn.Type, address: int) -> tuple[int, int]:
    """Return the pages in generations, which take the place of the lists.

    Linux kernel commit ec1c86b25f4b ("mm: multi-gen LRU: groundwork") (in v6.1)
    """
    zones = enumerators(reader.prog, "enum zone_type")["__MAX_NR_ZONES"]
    try:
        words = _words(reader, info, address, "lruvec.lrugen.nr_pages", 2 * zones)
    except MissingError:
        return 0, 0
    # By generation, then anonymous and of files, then by zone.
    anon, file = words.reshape(-1, 2, zones).sum((0, 2)).tolist()
    return anon, file


def _words(
    reader: Reader, type_: drgn.Type, address: int, member: str, row: int
) -> npt.NDArray[np.int64]:
    """Read an array of longs of any number of dimensions, flattened.

    :param row: Number of longs in a row.
    :raises DamagedDataError: if the array does not consist of whole rows
    """
    with drgn_lookups:
        found = drgn.Object(reader.prog, type_, address=0).subobject_(member)
    count = drgn.sizeof(found.type_) // 8
    if not row or count % row:
        raise DamagedDataError(f"{member} has {count} longs")
    return reader.words(address + found.address_, count).view(np.int64)
