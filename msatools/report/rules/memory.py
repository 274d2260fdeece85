# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on memory: lack of it, leaks, control groups, page tables and damaged pages.

Each threshold is a constant beside its rule. Several rules share code in
:mod:`msatools.report.rule`; the findings of msa-cpus are made in
:mod:`msatools.cpus.diagnostics`.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from msatools.memory.model import SlabGroup
from msatools.report.memory import (
    GroupAtLimit,
    MemoryState,
    OutOfMemory,
    Victim,
    ZoneState,
    victims,
)
from msatools.report.model import Severity
from msatools.report.rule import (
    Kind,
    ReportParts,
    VerdictRule,
    ago,
    count_text,
    judge,
    kinds_text,
    pid_text,
    slab_groups,
    tasks_text,
    unreclaimable,
    waits_text,
)
from msatools.report.summaries import kinds_of_pages
from msatools.reports.units import size
from msatools.tasks.identity import AddressSpace

# --- There was not enough memory, and the kernel killed processes or died of it.


_HOLDERS = 3
_KINDS = 4
_LITTLE = 0.02
"""Share of memory below which a kind of memory is not listed."""

_DYING_NS = 3_000_000_000
"""Time within which a killed process frees its memory, unless it is stuck."""


class _MemoryShortage(Struct, frozen=True):
    parts: ReportParts
    last: OutOfMemory
    victims: list[Victim]
    alive: list[Victim]
    """Victims that have not died."""

    @property
    def is_fatal(self) -> bool:
        crash = self.parts.crash
        return crash is not None and crash.cause == "out-of-memory"


def _out_of_memory_when(parts: ReportParts) -> Iterator[_MemoryShortage]:
    if not parts.ooms:
        return
    killed = victims(parts.ooms)
    yield _MemoryShortage(parts, parts.ooms[-1], killed, _alive(parts, killed))


def _alive(parts: ReportParts, killed: list[Victim]) -> list[Victim]:
    """Return the victims whose process still has threads that are not dead."""
    now = parts.taken_at_ns
    if parts.prstat is None or now is None:
        return []
    since = {
        (task.pid, task.comm): now - task.lifetime_ns
        for task in parts.prstat.tasks
        if task.task_class != "ZMB"
    }
    return [
        each
        for each in killed
        # Started before the kill: not a later process with the same PID and name.
        if since.get((each.pid, each.comm), now) < each.time_ns
        and now - each.time_ns >= _DYING_NS
    ]


def _out_of_memory_severity(subject: _MemoryShortage) -> Severity:
    return "critical" if subject.is_fatal or subject.alive else "warning"


def _out_of_memory_words(subject: _MemoryShortage) -> str:
    last, parts = subject.last, subject.parts
    where = _where(last)
    if subject.is_fatal:
        return f"{where}, and {_why_fatal(parts)}"
    killed = f"the kernel killed {count_text(len(subject.victims), 'process', 'es')}"
    if subject.alive:
        stays = tasks_text(((each.pid, each.comm) for each in subject.alive), 3)
        verb = "does" if len(subject.alive) == 1 else "do"
        return f"{where}; {killed}, of which {stays} {verb} not exit"
    return f"{where} {ago(parts, last.time_ns)}; {killed}"


def _where(oom: OutOfMemory) -> str:
    if oom.order is not None and oom.order < 0:
        return "a user made the kernel kill a process (sysrq-f)"
    if oom.constraint == "cgroup":
        return f"control group {oom.cgroup or '-'} ran out of memory"
    limits = {"cpuset": " in a cpuset", "memory-policy": " under a memory policy"}
    return f"the machine ran out of memory{limits.get(oom.constraint, '')}"


def _why_fatal(parts: ReportParts) -> str:
    message = (parts.crash.message if parts.crash else None) or ""
    if "panic_on_oom" in message:
        return "the kernel panicked because of panic_on_oom"
    return "the kernel panicked: it had no process to kill"


def _out_of_memory_evidence(subject: _MemoryShortage) -> Iterator[str]:
    last, parts = subject.last, subject.parts
    page = parts.target.page_size
    if last.order is not None and last.order >= 0:
        asked = f"asked for {size(page << last.order)} (order {last.order})"
        where = f" (line {last.line})" if last.line else ""
        flags = f", {last.flags}" if last.flags else ""
        yield f"{last.comm} {asked}{flags}{where}"
    if last.filled:
        whole = sum(last.filled.values())
        kinds = [
            f"{size(amount)} {kind}"
            for kind, amount in last.filled.items()
            if amount >= _LITTLE * whole
        ]
        what = "the group" if last.constraint == "cgroup" else "memory"
        yield f"{what} was then {', '.join(kinds[:_KINDS])}"
    if last.holders:
        holders = (
            f"{pid_text(each.pid, each.comm)} {size(each.rss_pages * page)}"
            for each in last.holders[:_HOLDERS]
        )
        yield f"largest then: {', '.join(holders)}"
    for each in subject.victims[-_HOLDERS:]:
        amount = "" if each.anon_bytes is None else f" ({size(each.anon_bytes)} anon)"
        yield f"killed {pid_text(each.pid, each.comm)}{amount}"
    for each in subject.alive[:_HOLDERS]:
        yield f"{pid_text(each.pid, each.comm)} waits: {waits_text(parts, each.pid)}"
    # The verdict memory-unreclaimable lists the kinds itself.
    if (
        subject.is_fatal
        and last.constraint != "cgroup"
        and not any(True for _ in judge(MEMORY_UNRECLAIMABLE, parts))
    ):
        yield from kinds_text(parts)


def _see(subject: _MemoryShortage) -> tuple[str, ...]:
    if subject.alive:
        # A victim's memory is not free before it has died.
        pids = ",".join(str(each.pid) for each in subject.alive[:_HOLDERS])
        return ("locks", "--chains", "-p", pids)
    by_cgroup = subject.last.constraint == "cgroup"
    return ("memstat", "--by", "cgroup,fs" if by_cgroup else "process,slab,fs")


OUT_OF_MEMORY = VerdictRule(
    code="out-of-memory",
    needs=(),
    when=_out_of_memory_when,
    severity=_out_of_memory_severity,
    confidence="exact",
    words=_out_of_memory_words,
    evidence=_out_of_memory_evidence,
    see=_see,
)


# --- Free memory is below the watermarks of all zones, and little can be reclaimed.


_LOW_SHARE = 0.10
"""Share of managed memory that is available, below which memory is low."""

_CRITICAL_SHARE = 0.05
"""Below this share it is critical."""


def _share(memory: MemoryState) -> float:
    managed = sum(zone.managed for zone in memory.zones)
    available = memory.available_pages
    return 1.0 if not managed or available is None else available / managed


def _is_below_min(memory: MemoryState) -> bool:
    return all(zone.to_min <= 0 for zone in memory.zones)


def _memory_low_when(parts: ReportParts) -> Iterator[MemoryState]:
    memory = parts.memory
    if memory is None or not memory.zones:
        return
    if all(zone.to_low <= 0 for zone in memory.zones) and _share(memory) < _LOW_SHARE:
        yield memory


def _memory_low_severity(memory: MemoryState) -> Severity:
    return "critical" if _share(memory) < _CRITICAL_SHARE else "warning"


def _memory_low_words(memory: MemoryState) -> str:
    mark = "min" if _is_below_min(memory) else "low"
    return (
        f"free memory is below the watermark {mark} of all zones, and "
        f"{100 * _share(memory):.1f} % of memory is available without swapping"
    )


def _reserve_text(zone: ZoneState) -> str:
    if not zone.reserve:
        return ""
    return f", and {zone.reserve:,} reserved for this zone (lowmem_reserve)"


def _memory_low_evidence(memory: MemoryState) -> Iterator[str]:
    for zone in memory.zones:
        yield (
            f"node {zone.node} {zone.name}: {zone.free:,} pages free, watermarks min "
            f"{zone.min:,}, low {zone.low:,}{_reserve_text(zone)}"
        )
    if memory.swap_pages:
        yield f"swap: {memory.swap_free_pages:,} of {memory.swap_pages:,} pages free"
    else:
        yield "there is no swap"


MEMORY_LOW = VerdictRule(
    code="memory-low",
    needs=("memory",),
    when=_memory_low_when,
    severity=_memory_low_severity,
    confidence="exact",
    words=_memory_low_words,
    evidence=_memory_low_evidence,
    see=lambda memory: ("memstat", "--by", "process,slab,fs"),
)


# --- Most memory is of a kind that reclaim cannot free.


_MOST = 0.6
"""Minimum share of unreclaimable memory, of all kinds, if memory is low."""

_KERNEL = 0.4
"""Minimum share of the kernel's own unreclaimable memory, at any time."""


class _PinnedMemory(Struct, frozen=True):
    parts: ReportParts
    kinds: list[Kind]
    managed: int
    is_low: bool


def _memory_unreclaimable_when(parts: ReportParts) -> Iterator[_PinnedMemory]:
    memory = parts.memory
    kinds = unreclaimable(parts)
    managed = sum(zone.managed for zone in memory.zones) if memory else 0
    if not managed:
        return
    is_low = any(True for _ in MEMORY_LOW.when(parts))
    share = sum(kind.pages for kind in kinds) / managed
    kernel = sum(kind.pages for kind in kinds if kind.is_kernel) / managed
    if (is_low and share >= _MOST) or kernel >= _KERNEL:
        yield _PinnedMemory(parts, kinds, managed, is_low)


def _memory_unreclaimable_severity(subject: _PinnedMemory) -> Severity:
    return "critical" if subject.is_low else "warning"


def _memory_unreclaimable_words(subject: _PinnedMemory) -> str:
    largest, total = subject.kinds[0], sum(kind.pages for kind in subject.kinds)
    amount = size(largest.pages * subject.parts.target.page_size)
    return (
        f"{100 * total / subject.managed:.0f} % of memory cannot be reclaimed: most of "
        f"it is {largest.name}, {amount}"
    )


MEMORY_UNRECLAIMABLE = VerdictRule(
    code="memory-unreclaimable",
    needs=("memory", "memstat"),
    when=_memory_unreclaimable_when,
    severity=_memory_unreclaimable_severity,
    confidence="exact",
    words=_memory_unreclaimable_words,
    evidence=lambda subject: kinds_text(subject.parts),
    see=lambda subject: ("memstat", "--by", "process,slab,fs", "--unattributed"),
)


# --- The hypervisor took memory by a balloon, and the guest has too little.


_BALLOON_MUCH = 0.10
"""Minimum share of all pages that are in the balloon."""


class _Balloon(Struct, frozen=True):
    parts: ReportParts
    pages: int
    total: int
    """Pages of the guest's memory, with those in the balloon."""

    last_ns: int | None
    """When memory ran out; ``None`` if it is low now."""


def _balloon_when(parts: ReportParts) -> Iterator[_Balloon]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}["offline"]
    is_low = any(MEMORY_LOW.when(parts))
    # Order -1: a user started the OOM killer, which may be while memory is free.
    ooms = [x for x in parts.ooms if x.constraint != "cgroup" and (x.order or 0) >= 0]
    if pages >= _BALLOON_MUCH * parts.memstat.pages > 0 and (is_low or ooms):
        last_ns = None if is_low else ooms[-1].time_ns
        total = sum(kinds_of_pages(parts.memstat).values())
        yield _Balloon(parts, pages, total, last_ns)


def _balloon_words(subject: _Balloon) -> str:
    page = subject.parts.target.page_size
    amount, total = size(subject.pages * page), size(subject.total * page)
    share = f"{100 * subject.pages / subject.total:.0f} %"
    why = "memory is low" if subject.last_ns is None else "memory ran out"
    return f"{why}, and the balloon has {amount} ({share}) of the guest's {total}"


def _balloon_evidence(subject: _Balloon) -> Iterator[str]:
    yield (
        "the hypervisor took these pages (PageOffline: of a balloon, or unplugged by "
        "virtio-mem)"
    )
    if subject.last_ns is not None:
        yield f"memory ran out last {ago(subject.parts, subject.last_ns)}"


BALLOON = VerdictRule(
    code="balloon",
    needs=("memstat",),
    when=_balloon_when,
    severity="warning",
    confidence="exact",
    words=_balloon_words,
    evidence=_balloon_evidence,
    see=lambda subject: ("memstat",),
)


# --- A general slab cache is large, and most of its objects are one module's.


_MEMORY_LEAK_MUCH = 0.05
"""Minimum share of managed memory in one cache."""

_MEMORY_LEAK_SHOWN = 3


class _Leak(Struct, frozen=True):
    parts: ReportParts
    cache: SlabGroup
    managed: int


def _memory_leak_when(parts: ReportParts) -> Iterator[_Leak]:
    assert parts.memstat is not None
    managed = parts.memstat.managed_pages
    caches = slab_groups(parts.memstat).values()
    for cache in sorted(caches, key=lambda cache: -cache.pages):
        if managed and cache.module and cache.pages >= _MEMORY_LEAK_MUCH * managed:
            yield _Leak(parts, cache, managed)


def _memory_leak_words(subject: _Leak) -> str:
    cache = subject.cache
    amount = size(cache.pages * subject.parts.target.page_size)
    share = f"{100 * cache.pages / subject.managed:.0f} % of memory"
    objects = f"most of its objects seem to be of module {cache.module}"
    return f"slab cache {cache.name} has {amount} ({share}), and {objects}"


def _memory_leak_evidence(subject: _Leak) -> Iterator[str]:
    cache = subject.cache
    if cache.objects_in_use is not None:
        yield f"{cache.objects_in_use:,} objects of {cache.bytes_each} bytes are in use"
    share = 100 * (cache.module_share or 0)
    yield f"{share:.0f} % of the objects read contain a pointer into the module"
    words = [word for word in cache.words or () if word.owner == cache.module]
    if words:
        names = ", ".join(word.name for word in words[:_MEMORY_LEAK_SHOWN])
        yield f"the most frequent targets: {names}"


MEMORY_LEAK = VerdictRule(
    code="memory-leak",
    needs=("memstat",),
    when=_memory_leak_when,
    severity="warning",
    confidence="evidence",
    words=_memory_leak_words,
    evidence=_memory_leak_evidence,
    see=lambda subject: ("memstat", "--by", "slab"),
)


# --- Nearly all of swap is used.


_FREE = 0.10
"""Share of free swap below which swap counts as full."""


_ENOUGH = 0.20
"""Share of memory, available without swapping, that makes full swap harmless."""


class _FullSwap(Struct, frozen=True):
    memory: MemoryState
    page_size: int
    pages: int
    free: int


def _swap_full_when(parts: ReportParts) -> Iterator[_FullSwap]:
    memory = parts.memory
    if memory is None or not memory.swap_pages or memory.swap_free_pages is None:
        return
    if memory.swap_free_pages < _FREE * memory.swap_pages:
        page_size = parts.target.page_size
        yield _FullSwap(memory, page_size, memory.swap_pages, memory.swap_free_pages)


def _swap_full_words(subject: _FullSwap) -> str:
    used, pages = subject.pages - subject.free, subject.pages
    amounts = f"{size(used * subject.page_size)} of {size(pages * subject.page_size)}"
    return f"swap is {100 * used / pages:.0f} % full: {amounts}"


def _swap_full_evidence(subject: _FullSwap) -> Iterator[str]:
    cached = subject.memory.counters.get("NR_SWAPCACHE")
    if cached:
        yield f"{size(cached * subject.page_size)} of it is also in the swap cache"


def _swap_full_severity(subject: _FullSwap) -> Severity:
    """Return info if enough memory is available: unused pages may fill swap."""
    memory = subject.memory
    managed = sum(zone.managed for zone in memory.zones)
    available = memory.available_pages
    has_enough = available is not None and available >= _ENOUGH * managed
    return "info" if has_enough else "warning"


SWAP_FULL = VerdictRule(
    code="swap-full",
    needs=("memory",),
    when=_swap_full_when,
    severity=_swap_full_severity,
    confidence="exact",
    words=_swap_full_words,
    evidence=_swap_full_evidence,
    see=lambda subject: ("memstat", "--by", "process,cgroup"),
)


# --- Pages were taken out of use after hardware errors; and the tasks that lost them.


_MEMORY_POISONED_SHOWN = 4

_SIGNALLED = re.compile(
    r"Memory failure: 0x[0-9a-f]{1,16}: (?P<how>Sending SIGBUS to|Killing) "
    r"(?P<comm>.*):(?P<pid>\d{1,10}) due to hardware memory corruption",
    re.DOTALL,
)
"""mm/memory-failure.c, kill_proc() and kill_procs()"""


class _Poisoned(Struct, frozen=True):
    parts: ReportParts
    pages: int


def _memory_poisoned_when(parts: ReportParts) -> Iterator[_Poisoned]:
    assert parts.memstat is not None
    for check in parts.memstat.checks:
        if check.name == "hwpoison" and (pages := check.kernel_pages or 0):
            yield _Poisoned(parts, pages)


def _memory_poisoned_words(subject: _Poisoned) -> str:
    amount = size(subject.pages * subject.parts.target.page_size)
    pages = count_text(subject.pages, "page")
    return f"{pages} of memory ({amount}) failed and were taken out of use"


def _memory_poisoned_evidence(subject: _Poisoned) -> Iterator[str]:
    yield "counted by num_poisoned_pages: hardware errors, or injected for a test"
    tasks = dict.fromkeys(
        (int(found["pid"]), found["comm"])
        for record in subject.parts.log
        if record.is_kernel and (found := _SIGNALLED.match(record.text))
    )
    if tasks:
        shown = ", ".join(pid_text(*task) for task in [*tasks][:_MEMORY_POISONED_SHOWN])
        more = (
            f" and {len(tasks) - _MEMORY_POISONED_SHOWN:,} more"
            if len(tasks) > _MEMORY_POISONED_SHOWN
            else ""
        )
        yield f"SIGBUS went to {shown}{more}, whose pages they were"


MEMORY_POISONED = VerdictRule(
    code="memory-poisoned",
    needs=("memstat",),
    when=_memory_poisoned_when,
    severity="warning",
    confidence="exact",
    words=_memory_poisoned_words,
    evidence=_memory_poisoned_evidence,
    see=lambda subject: ("memstat",),
)


# --- A control group has used up its memory, and little of it can be reclaimed.


_CACHE = 0.1
"""Share of reclaimable pages from which on it is normal to be at the limit."""


class _FullGroup(Struct, frozen=True):
    group: GroupAtLimit
    page_size: int


def _cgroup_at_limit_when(parts: ReportParts) -> Iterator[_FullGroup]:
    memory = parts.memory
    groups = [] if memory is None else [*memory.groups]
    for group in sorted(groups, key=lambda group: (-group.ooms, -group.pages)):
        can_swap = memory is not None and bool(memory.swap_free_pages)
        free = group.file_pages + (group.anon_pages if can_swap else 0)
        if free < _CACHE * group.max_pages or group.ooms:
            yield _FullGroup(group, parts.target.page_size)


def _cgroup_at_limit_words(subject: _FullGroup) -> str:
    group = subject.group
    limit = size(group.max_pages * subject.page_size)
    return f"control group {group.path or '-'} is at its limit of {limit}"


def _cgroup_at_limit_evidence(subject: _FullGroup) -> Iterator[str]:
    group, page = subject.group, subject.page_size
    yield (
        f"{size(group.pages * page)} charged: {size(group.anon_pages * page)} "
        f"anonymous, {size(group.file_pages * page)} of files"
    )
    if group.ooms:
        yield (
            f"out of memory {count_text(group.ooms, 'time')}, "
            f"{count_text(group.kills, 'process', 'es')} killed"
        )


CGROUP_AT_LIMIT = VerdictRule(
    code="cgroup-at-limit",
    needs=("memory",),
    when=_cgroup_at_limit_when,
    severity="warning",
    confidence="exact",
    words=_cgroup_at_limit_words,
    evidence=_cgroup_at_limit_evidence,
    see=lambda subject: ("memstat", "--by", "cgroup"),
)


# --- Many control groups were removed and still exist, or much is charged to them.


_MANY = 100
"""Minimum number of removed groups. Each holds 10 KiB or more per CPU; reclaim visits
all of them, and so does reading memory.stat of an ancestor."""

_DYING_CGROUPS_MUCH = 0.05
"""Minimum share of managed memory that is charged to removed groups."""


class _RemovedGroups(Struct, frozen=True):
    count: int
    pages: int | None
    """Pages charged to them; ``None`` if unknown."""

    page_size: int


def _dying_cgroups_when(parts: ReportParts) -> Iterator[_RemovedGroups]:
    memory = parts.memory
    if memory is None or not memory.removed_groups:
        return
    count, pages = memory.removed_groups, memory.removed_pages
    managed = sum(zone.managed for zone in memory.zones)
    if count >= _MANY or (pages or 0) >= _DYING_CGROUPS_MUCH * managed > 0:
        yield _RemovedGroups(count, pages, parts.target.page_size)


def _dying_cgroups_words(subject: _RemovedGroups) -> str:
    verb = "exists" if subject.count == 1 else "exist"
    text = f"{count_text(subject.count, 'removed control group')} still {verb}"
    if subject.pages is None:
        return text
    return f"{text}: {size(subject.pages * subject.page_size)} are charged to them"


DYING_CGROUPS = VerdictRule(
    code="dying-cgroups",
    needs=("memory",),
    when=_dying_cgroups_when,
    severity="info",
    confidence="exact",
    words=_dying_cgroups_words,
    evidence=lambda subject: (
        "page cache, files on tmpfs, swap or sockets that are charged to a removed "
        "group keep it until they are freed",
    ),
    see=lambda subject: ("memstat", "--by", "cgroup"),
)


# --- Page tables of processes take a large part of memory.


_PAGE_TABLES_MUCH = 0.05
"""Minimum share of managed memory. Page tables are 0.2 % of what they map without huge
pages; more if many processes map the same memory, or use few pages of a range."""

_PAGE_TABLES_SHOWN = 3


class _Tables(Struct, frozen=True):
    parts: ReportParts
    pages: int
    managed: int

    @property
    def largest(self) -> list[AddressSpace]:
        known = [each for each in self.parts.spaces or () if each.table_bytes]
        return sorted(known, key=lambda each: (-(each.table_bytes or 0), each.pid))


def _page_tables_when(parts: ReportParts) -> Iterator[_Tables]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}
    managed = parts.memstat.managed_pages
    tables = pages["kernel.page_tables"]
    if managed and tables >= _PAGE_TABLES_MUCH * managed:
        yield _Tables(parts, tables, managed)


def _page_tables_words(subject: _Tables) -> str:
    amount = size(subject.pages * subject.parts.target.page_size)
    share = f"{100 * subject.pages / subject.managed:.0f} %"
    return f"page tables of processes take {amount} ({share} of memory)"


def _page_tables_evidence(subject: _Tables) -> Iterator[str]:
    largest = subject.largest
    if not largest:
        return
    shown = ", ".join(
        f"{pid_text(each.pid, each.comm)} {size(each.table_bytes or 0)}"
        for each in largest[:_PAGE_TABLES_SHOWN]
    )
    yield f"most: {shown}, of {len(largest):,} address spaces"


PAGE_TABLES = VerdictRule(
    code="page-tables",
    needs=("memstat",),
    when=_page_tables_when,
    severity="info",
    confidence="exact",
    words=_page_tables_words,
    evidence=_page_tables_evidence,
    see=lambda subject: ("memstat", "--by", "process"),
)
