# SPDX-License-Identifier: LGPL-2.1-or-later

"""Contradictions in memory that was copied while its guest ran on.

Each page of such a copy is of another moment. Nothing in the file records that, but two
structures that agree at any moment then differ: neighbours on a list, a count and the
items counted, a run queue and its task, a time stamp and its clock. Changes that CPUs
had half done when all stopped at one moment are no contradictions.

:func:`count_torn` is called once for each file of memory without a dump's headers.
"""

import struct
from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from drgn import Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import ask, ask_each, find_type, find_variable, offset_of

_MOST_TASKS = 1 << 14
"""Maximum number of tasks to read: they suffice, and more would take too long."""
_MOST_CPUS = 1 << 13
_IN_CHANGE = 3
"""Maximum number of contradictions that the one holder of ``tasklist_lock`` causes:
release_task() has counted a thread before it is off its lists, and list_splice() has
three links to set."""

_MOST_NODES = 1 << 10
_MOST_FREE = 5
"""Maximum number of nodes to read of each list of free pages, including its head."""

_OF_A_LOCK = 2
"""Maximum number of broken links that the holder of a zone's lock causes."""

_THREAD_LISTS = ("thread_node", "children")
_LISTS = ("tasks", "sibling", *_THREAD_LISTS)
"""Members of ``struct task_struct`` that link tasks under ``tasklist_lock``. The first
two are in use in thread group leaders only."""

_NUMBERS = {
    "signal": ("signal", "<Q"),
    "state": ("__state", "<I"),
    "old_state": ("state", "<q"),
    "on_cpu": ("on_cpu", "<i"),
    "on_rq": ("on_rq", "<i"),
    "exec_start": ("se.exec_start", "<Q"),
    "arrival": ("sched_info.last_arrival", "<Q"),
    "cpu": ("thread_info.cpu", "<I"),
    "old_cpu": ("cpu", "<I"),
}
"""Other members by name, with the format of each. ``__state`` since Linux kernel commit
2f064a59a11f ("sched: Change task_struct::state") (in v5.14); the CPU in
``thread_info`` since bcf9033e5449 (in v5.16)."""

_LINKS = struct.Struct("<QQ")
_WORD = struct.Struct("<Q")


class _Task(NamedTuple):
    """The members of a task that are compared."""

    links: dict[int, tuple[int, int]]
    """``next`` and ``prev`` of each of the task's list heads, by the head's address."""

    numbers: dict[str, int]

    def number(self, name: str) -> int | None:
        """Return a number by its name in :data:`_NUMBERS`, or that with ``old_``."""
        return self.numbers.get(name, self.numbers.get(f"old_{name}"))


class _RunQueue(NamedTuple):
    current: int
    clock: int
    task_clock: int


def count_torn(prog: Program) -> int:
    """Return the number of contradictions between structures of a kernel.

    It is 0 for a guest that was stopped while its memory was written, whatever its CPUs
    did. Structures that cannot be read count as none.
    """
    try:
        tasks, is_whole = _read_tasks(prog)
        queues = _read_queues(prog)
    except LOST:
        return 0
    listed = _broken_links(
        {node: pair for task in tasks.values() for node, pair in task.links.items()}
    )
    # A page of the structures with the counts may not be in the file.
    with suppress(*LOST):
        listed += _wrong_counts(prog, tasks) if is_whole else 0
    return (
        (listed if listed > _IN_CHANGE else 0)
        + _wrong_free_lists(prog)
        + _wrong_tasks(tasks, queues)
        + _late_stamps(tasks, queues)
    )


def _read(prog: Program, address: int, size: int) -> bytes:
    """Read memory at an address that may be damaged.

    :raises UNREADABLE: if it is no kernel address, or cannot be read
    """
    if not KERNEL_HALF <= address < (1 << 64) - size:
        raise DamagedDataError("no address of the kernel", address)
    data: bytes = prog.read(address, size)
    return data


def _read_tasks(prog: Program) -> tuple[dict[int, _Task], bool]:
    """Return all tasks by address, and whether their lists were read to their ends."""
    reader = _TaskReader(prog)
    first: int = find_variable(prog, "init_task").address_
    tasks: dict[int, _Task] = {}
    is_whole = True

    def add(address: int, lists: tuple[str, ...]) -> bool:
        """Read a task; return whether it is a new one."""
        if address in tasks or len(tasks) >= _MOST_TASKS:
            return False
        tasks[address] = reader.read(address, lists)
        return True

    leader = first
    try:
        while add(leader, _LISTS):
            leader = reader.after(tasks[leader], leader, "tasks")
        is_whole = leader == first
    except UNREADABLE:
        is_whole = False
    for leader in tuple(tasks):
        head = tasks[leader].numbers["signal"] + reader.thread_head
        try:
            node, _ = _LINKS.unpack(_read(prog, head, _LINKS.size))
            seen = set()
            while node != head and node not in seen:
                seen.add(node)
                thread = node - reader.offsets["thread_node"]
                if not add(thread, _THREAD_LISTS) and thread != leader:
                    break
                node = tasks[thread].links[node][0]
            is_whole &= node == head
        except UNREADABLE:
            is_whole = False
    return tasks, is_whole


class _TaskReader:
    """Reads tasks, one read each."""

    def __init__(self, prog: Program) -> None:
        self._prog = prog
        type_ = find_type(prog, "struct task_struct")
        self.offsets = {name: offset_of(type_, name) for name in _LISTS}
        self._places: dict[str, tuple[int, struct.Struct]] = {}
        for name, (member, form) in _NUMBERS.items():
            try:
                self._places[name] = offset_of(type_, member), struct.Struct(form)
            except MissingError:
                continue
        # Up to the last of these members: registers behind them are most of a task.
        ends = [place + form.size for place, form in self._places.values()]
        self._size = max(
            *ends, *(place + _LINKS.size for place in self.offsets.values())
        )
        signal = find_type(prog, "struct signal_struct")
        self.thread_head = offset_of(signal, "thread_head")

    def read(self, address: int, lists: tuple[str, ...]) -> _Task:
        """Read a task.

        :param lists: Names of the list heads that this task uses.
        :raises UNREADABLE: if the file does not have the task
        """
        data = _read(self._prog, address, self._size)
        links = {
            address + self.offsets[name]: _LINKS.unpack_from(data, self.offsets[name])
            for name in lists
        }
        numbers = {
            name: form.unpack_from(data, offset)[0]
            for name, (offset, form) in self._places.items()
        }
        return _Task(links, numbers)

    def after(self, task: _Task, address: int, name: str) -> int:
        """Return the address of the next task on the list *name*."""
        offset = self.offsets[name]
        return task.links[address + offset][0] - offset


def _read_queues(prog: Program) -> dict[int, _RunQueue]:
    """Return the run queue of each CPU that can ever be online."""
    queues = find_variable(prog, "runqueues")
    type_ = find_type(prog, "struct rq")
    places = [offset_of(type_, name) for name in ("curr", "clock", "clock_task")]
    found = {}
    for cpu in islice(ask_each(for_each_possible_cpu, prog), _MOST_CPUS):
        start = ask(per_cpu, queues, cpu).address_
        words = [_WORD.unpack(_read(prog, start + place, 8))[0] for place in places]
        found[cpu] = _RunQueue(*words)
    return found


def _wrong_free_lists(prog: Program) -> int:
    """Count the broken links between the first pages of the lists of free pages.

    The links are in the memmap, and change often in a guest that is not idle. The one
    holder of a zone's lock has at most two broken (list_splice()).
    """
    # Imported here: slow, and few targets are memory alone.
    from drgn.helpers.linux.mmzone import for_each_online_pgdat

    zones = 0
    links: dict[int, tuple[int, int]] = {}
    with suppress(*LOST):
        for pgdat in islice(ask_each(for_each_online_pgdat, prog), _MOST_NODES):
            for zone in pgdat.node_zones:
                if not zone.present_pages:
                    continue
                zones += 1
                for area in zone.free_area:
                    for head in area.free_list:
                        _follow(prog, head.address_, links)
    broken = _broken_links(links)
    return broken if broken > _OF_A_LOCK * zones else 0


def _follow(prog: Program, node: int, links: dict[int, tuple[int, int]]) -> None:
    """Add ``next`` and ``prev`` of a list's first nodes to *links*, by address."""
    with suppress(*UNREADABLE):
        for _ in range(_MOST_FREE):
            if node in links:
                break
            links[node] = _LINKS.unpack(_read(prog, node, _LINKS.size))
            node = links[node][0]


def _broken_links(links: dict[int, tuple[int, int]]) -> int:
    """Count the nodes of lists whose next node's ``prev`` is another node."""
    return sum(
        1
        for node, (following, _) in links.items()
        if following in links and links[following][1] != node
    )


def _wrong_counts(prog: Program, tasks: dict[int, _Task]) -> int:
    """Count the kernel's numbers of threads that differ from those on the lists."""
    offset = offset_of(find_type(prog, "struct signal_struct"), "nr_threads")
    counted = Counter(task.numbers["signal"] for task in tasks.values())
    wrong = 0
    for signal, count in counted.items():
        said = int.from_bytes(_read(prog, signal + offset, 4), "little")
        wrong += said != count
    total: int = find_variable(prog, "nr_threads").value_()
    # Idle tasks are not counted.
    return wrong + (total != len(tasks) - 1)


def _wrong_tasks(tasks: dict[int, _Task], queues: dict[int, _RunQueue]) -> int:
    """Count tasks with ``on_cpu`` that no run queue has as ``curr``, or vice versa.

    __schedule() sets ``rq->curr``, then the next task's ``on_cpu``, and clears that of
    the previous task when it has left its stack. Tasks in such a switch are not
    counted: the next one is runnable, and the previous one's ``exec_start`` is the
    queue's present time.
    """
    if not all("on_cpu" in task.numbers for task in tasks.values()):
        return 0  # a kernel for one CPU
    wrong = 0
    current = {queue.current for queue in queues.values()}
    for address in current & {*tasks}:
        task = tasks[address]
        if not task.numbers["on_cpu"]:
            wrong += not (task.numbers["on_rq"] == 1 and task.number("state") == 0)
    for address in {*tasks} - current:
        task = tasks[address]
        queue = queues.get(task.number("cpu") or 0)
        if task.numbers["on_cpu"] == 1 and queue is not None:
            wrong += task.numbers["exec_start"] != queue.task_clock
    return wrong


def _late_stamps(tasks: dict[int, _Task], queues: dict[int, _RunQueue]) -> int:
    """Count the tasks that arrived on a CPU later than the latest run queue clock."""
    latest = max((queue.clock for queue in queues.values()), default=0)
    return sum(task.numbers.get("arrival", 0) > latest for task in tasks.values())
