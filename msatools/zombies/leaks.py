# SPDX-License-Identifier: LGPL-2.1-or-later

"""``struct pid`` that is referred to more often than there are holders to be named.

kernel/pid.c: a ``struct pid`` has one reference while a task, a process group or a
session has the number, and one of each get_pid() that was not put back. One that leaks
stays for ever, and with it its PID namespace.

Holders are looked for in three steps: where they are known to be
(:mod:`msatools.zombies.pidholders`); then, of what is left, on the stacks of tasks and
in the kernel's variables; then in all objects of slab caches, whatever they are. What
refers to a ``struct pid`` from elsewhere is no holder: variables of modules, per-CPU
ones, memory of vmalloc() and whole pages.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import PageReserved, follow_page
from drgn.helpers.linux.slab import slab_object_info

from msatools.kernel.losses import Loss
from msatools.kernel.pidnamespaces import MAX_LEVEL
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.slab import SlabCache
from msatools.kernel.structs import Booleans, read_structs
from msatools.locks.evidence import seen_on_stacks
from msatools.selfdesc.variables import find_variable
from msatools.target.model import Address
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.text import kernel_symbol
from msatools.tasks.waits import classify
from msatools.zombies.model import Leak
from msatools.zombies.pidholders import CALLBACKS, PidHolders
from msatools.zombies.slabscan import SlabScan, SlabWord

_MAX_COUNT = 1 << 30
"""More references than a count can have that is not saturated."""

_MAX_VARIABLES = 1 << 28
"""Bytes."""

_NAMED = "cad_pid"
"""A variable that is counted before."""

# Their pointers are no references: those of who has the number, and the tree in which a
# namespace finds it.
_NO_HOLDERS = frozenset({"task_struct", "signal_cache", "radix_tree_node", "pid"})
# Nothing in these is about processes, and they are large.
_OF_FILES = frozenset({"dentry", "buffer_head", "kernfs_node_cache"})
_OF_MEMORY = frozenset(
    {"vm_area_struct", "vma_lock", "maple_node", "anon_vma", "anon_vma_chain"}
)
_INODES_WITH_PIDS = frozenset({"proc_inode_cache", "mqueue_inode_cache"})

_WITHOUT_PIDS = frozenset(
    {TaskClass.SIG, TaskClass.TMR, TaskClass.LCK, TaskClass.POL, TaskClass.KTW}
)
"""Waits that take no reference."""

Numbers = npt.NDArray[np.int64]
Found = Iterator[tuple[int, str]]
"""Which of those that were looked for, and what holds it."""


@dataclass(frozen=True)
class _Pids:
    """All ``struct pid`` that there are, one row each, by ascending address."""

    address: Addresses
    number: Numbers
    """In the initial PID namespace."""

    references: Numbers
    in_use: Booleans
    """Whether a task, a process group or a session has the number."""

    task: Addresses
    """The ``struct task_struct`` that has it; 0 if none has."""

    def __len__(self) -> int:
        return len(self.address)


def find_leaks(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> tuple[Leak, ...] | None:
    """Find ``struct pid`` with more references than holders, by number.

    This reads all ``struct page``, and some slabs if there is anything to be searched
    for; it may take a second or two. On a running kernel it is done twice, as what
    changes meanwhile looks like a leak.

    :param tasks: All tasks.
    :return: ``None``, with a note, if it cannot be told: the kernel has no SLUB, its
        caches or all ``struct page`` cannot be read.
    """
    before = losses.lost.total()
    try:
        leaks = _suspects(reader, tasks, losses)
        if leaks and reader.is_live:
            again = _suspects(reader, TaskReader(reader).read_all(losses), losses)
            leaks = [leak for leak in leaks if leak in again]
    except (drgn.FaultError, LookupError) as error:
        losses.lose(Loss.LEAKS, f"leaked struct pids cannot be looked for: {error}")
        return None
    if leaks and losses.lost.total() > before:
        text = "not all that may hold struct pids was read: some leaks may be none"
        losses.note("leaks-unsure", text)
    return tuple(sorted(leaks, key=lambda leak: (leak.pid, leak.address)))


def _suspects(reader: Reader, tasks: TaskTable, losses: LossLog) -> list[Leak]:
    scan = SlabScan(reader, losses)
    pids = _read_pids(reader, scan, losses)
    losses.coverage["struct_pids"] = len(pids)
    ledger = _Ledger(pids)
    known = PidHolders(reader, tasks, pids.address, losses)
    places: set[int] = set()
    for holders in known.all():
        rows = _rows(pids, holders.pids)
        ledger.add(rows[rows >= 0], holders.kind)
        if len(holders.places):
            places.update(holders.places[rows >= 0].tolist())
    searches: tuple[Callable[[Addresses], Found], ...] = (
        lambda wanted: _on_stacks(reader, tasks, wanted, losses),
        lambda wanted: _in_variables(reader, wanted, losses),
        lambda wanted: _in_slabs(reader, scan, wanted, places),
    )
    for search in searches:
        left = ledger.unexplained
        if not len(left):
            return []
        kinds: defaultdict[str, list[int]] = defaultdict(list)
        for row, kind in search(pids.address[left]):
            kinds[kind].append(row)
        for kind, found in kinds.items():
            ledger.add(left[found], kind)
    left = ledger.unexplained
    if CALLBACKS in known.lost:
        # One whose number is free is about to lose its last reference.
        left = left[pids.in_use[left] | (pids.references[left] > 1)]
    return [_leak(row, ledger, tasks) for row in left.tolist()]


class _Ledger:
    """The references to each ``struct pid``, and what they are of."""

    def __init__(self, pids: _Pids) -> None:
        self.pids = pids
        self._kinds: dict[str, Numbers] = {}
        self._count = np.zeros(len(pids), np.int64)
        self.add(np.flatnonzero(pids.in_use), "number in use")

    def add(self, rows: npt.NDArray[np.intp], kind: str) -> None:
        """Add a holder for each of some rows, which may be there more than once."""
        each = np.bincount(rows, minlength=len(self.pids)).astype(np.int64)
        self._kinds[kind] = self._kinds.get(kind, 0) + each
        self._count += each

    @property
    def unexplained(self) -> npt.NDArray[np.intp]:
        """The rows of those with more references than holders."""
        return np.flatnonzero(self.pids.references > self._count)

    def named(self, row: int) -> dict[str, int]:
        """Return the holders of one."""
        counts = {kind: int(each[row]) for kind, each in self._kinds.items()}
        return {kind: count for kind, count in counts.items() if count}


def _leak(row: int, ledger: _Ledger, tasks: TaskTable) -> Leak:
    pids = ledger.pids
    task = np.flatnonzero(tasks["address"] == pids.task[row])
    state = None
    if len(task):
        state = "zombie" if tasks["exit_state"][task[0]] else "alive"
    return Leak(
        address=Address(int(pids.address[row])),
        pid=int(pids.number[row]),
        references=int(pids.references[row]),
        named=ledger.named(row),
        task=state,
    )


def _read_pids(reader: Reader, scan: SlabScan, losses: LossLog) -> _Pids:
    """Read all objects of the caches for ``struct pid`` that are none that was freed.

    The last reference that is put back leaves a count of 0.
    """
    prog = reader.prog
    space = find_variable(prog, "init_pid_ns")
    caches = {space.pid_cachep.value_()}
    # One for each level below; static.
    caches.update(cache.value_() for cache in find_variable(prog, "pid_cache"))
    addresses = [scan.objects(cache) for cache in caches & scan.caches.keys()]
    if not addresses:
        raise LookupError("the caches of struct pid are not there")
    address = np.unique(np.concatenate(addresses))
    type_ = prog.type("struct pid")
    kinds = type_.member("tasks").type.length
    members = {
        "references": ("count.refs.counter", "count.counter"),
        "level": ("level",),
        "number": ("numbers[0].nr",),
        "space": ("numbers[0].ns",),
        **{f"tasks{kind}": (f"tasks[{kind}].first",) for kind in range(kinds)},
    }
    read = read_structs(reader, "struct pid", members, address, losses)
    there = (
        read.readable
        & (read["space"] == space.address_)
        & (read["level"] <= MAX_LEVEL)
        & (read["number"] > 0)
        & (read["number"] <= PID_MAX_LIMIT)
        & (read["references"] > 0)
        & (read["references"] < _MAX_COUNT)
    )
    in_use = np.any([read[f"tasks{kind}"] != 0 for kind in range(kinds)], axis=0)
    link = np.uint64(_pid_link(prog))
    first = read["tasks0"].astype(np.uint64)
    return _Pids(
        address=address[there],
        number=read["number"][there].astype(np.int64),
        references=read["references"][there].astype(np.int64),
        in_use=in_use[there],
        task=np.where(first != 0, first - link, 0).astype(np.uint64)[there],
    )


def _pid_link(prog: drgn.Program) -> int:
    offset: int = drgn.offsetof(prog.type("struct task_struct"), "pid_links[0]")
    return offset


def _rows(pids: _Pids, wanted: Addresses) -> npt.NDArray[np.intp]:
    """Find the row of each ``struct pid``; -1 of what is none."""
    if not len(pids):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(pids.address, wanted), len(pids) - 1)
    return np.where(pids.address[place] == wanted, place, -1)


def _on_stacks(
    reader: Reader, tasks: TaskTable, wanted: Addresses, losses: LossLog
) -> Found:
    """Find who has a ``struct pid`` in hand: waits for it, or looks at it.

    One reference a task is counted, however often its stack has the address; none of
    who waits for what has nothing to do with processes: that was left there by calls
    before.
    """
    rows = np.arange(len(tasks))
    number = {address: row for row, address in enumerate(wanted.tolist())}
    seen = seen_on_stacks(
        reader, tasks, rows, number.keys(), stack_bytes(reader.prog), losses
    )
    idle = _idle(reader, tasks, sorted(set().union(*seen.values())))
    for address, holders in seen.items():
        for row in holders:
            if row not in idle:
                yield number[address], "stack of a task"


def _idle(reader: Reader, tasks: TaskTable, rows: list[int]) -> set[int]:
    """Return which of some tasks are in a wait that takes no reference to a process."""
    part = TaskTable(tasks.records[rows], tasks.columns)
    part = part.only(asleep(part))
    stacks = StackCollector(reader, LossLog()).collect(
        part["address"],
        part["stack"].astype(np.uint64),
        part["sp"].astype(np.uint64) if part.has("sp") else None,
    )
    waits = [classify(stacks.names(stack)).task_class for stack in stacks.unique]
    found = {
        int(address)
        for address, place in zip(part["address"], stacks.index, strict=True)
        if waits[place] in _WITHOUT_PIDS
    }
    return {row for row in rows if int(tasks["address"][row]) in found}


def _in_variables(reader: Reader, wanted: Addresses, losses: LossLog) -> Found:
    """Find the kernel's own variables that have a ``struct pid``.

    Pages among them that were given back after the start are others' memory by now.
    """
    try:
        start = kernel_symbol(reader.prog, "_sdata")
        end = kernel_symbol(reader.prog, "_end")
    except LookupError as error:
        losses.lose(Loss.VARIABLES, f"variables are not searched for holders: {error}")
        return
    if not 0 < end - start <= _MAX_VARIABLES:
        return
    start &= -4096
    data, _ = reader.read_around_gaps(start, end - start & -8, 4096)
    words = np.frombuffer(data, "<u8")
    near = np.flatnonzero((words >= wanted.min()) & (words <= wanted.max()))
    for place in near[np.isin(words[near], wanted)].tolist():
        name = _variable(reader.prog, start + 8 * place)
        if name is not None and name != _NAMED:
            row = int(np.flatnonzero(wanted == words[place])[0])
            yield row, f"variable {name}"


def _variable(prog: drgn.Program, address: int) -> str | None:
    try:
        # The kernel's image is not in the direct map, as virt_to_page() expects.
        if not PageReserved(
            follow_page(find_variable(prog, "init_mm").address_of_(), address)
        ):
            return None
        name: str = prog.symbol(address).name
    except (drgn.FaultError, LookupError):
        return None
    return name


def _in_slabs(
    reader: Reader, scan: SlabScan, wanted: Addresses, known: set[int]
) -> Found:
    """Find objects of any kind that have a ``struct pid``, but for those known.

    What was freed still has what was in it, and is no holder. Neither is what the
    allocator keeps of objects to give out.
    """
    number = {address: row for row, address in enumerate(wanted.tolist())}
    sheaf = _sheaf_cache(reader.prog)
    for word in scan.search(wanted, _skipped):
        if word.address in known or not _is_allocated(reader.prog, word.address):
            continue
        if sheaf is not None and _is_sheaf(reader, word, sheaf, scan.caches):
            continue
        yield number[word.value], f"{word.cache.name}+{word.offset:#x}"


def _skipped(cache: SlabCache) -> bool:
    name = cache.name
    if name in _INODES_WITH_PIDS:
        return False
    return (
        name in _NO_HOLDERS | _OF_FILES | _OF_MEMORY
        or name.startswith("pid_")
        or name.endswith("_inode_cache")
    )


def _sheaf_cache(prog: drgn.Program) -> int | None:
    """Find where a ``struct slab_sheaf``, an array of free objects, has their cache.

    ``None`` before Linux v6.18 ("slab: add opt-in caching layer of percpu sheaves").
    """
    try:
        offset: int = prog.type("struct slab_sheaf").member("cache").offset
    except LookupError:
        return None
    return offset


def _is_sheaf(
    reader: Reader, word: SlabWord, sheaf: int, caches: Collection[int]
) -> bool:
    """Return whether a word is in an array of free objects, which may be stale."""
    try:
        data = reader.read(word.address - word.offset + sheaf, 8)
    except drgn.FaultError:
        return False
    return int.from_bytes(data, "little") in caches


def _is_allocated(prog: drgn.Program, address: int) -> bool:
    try:
        info = slab_object_info(prog, address)
    except (drgn.FaultError, LookupError, ValueError):
        return True
    return info is None or bool(info.allocated)
