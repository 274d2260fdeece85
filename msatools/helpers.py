# SPDX-License-Identifier: LGPL-2.1-or-later

"""Helpers for drgn's prompt and for scripts that describe a kernel object.

>>> from msatools.helpers import lock_owner
>>> lock_owner(inode.i_rwsem).comm
(char [16])"frozen-mkdir"

They stand beside ``drgn.helpers.linux``: most take an object of a kernel and return
objects of drgn. They need no debug info. All waits, zombies or pages, where needed, are
read once for a dump, and at each call for a running kernel, which changes meanwhile.
``None`` means that the kernel does not record it, or that it cannot be read. From a
damaged dump they return the readable part; the commands' notes list the losses.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

import drgn
from drgn import Object, Program

from msatools.errors import LOST
from msatools.kernel.clocks import read_clocks
from msatools.kernel.pids import find_task
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.lock_types import holders_of, queue_of
from msatools.locks.report import Lock
from msatools.program import describe
from msatools.selfdesc.find import find_type
from msatools.whatis.lookup import LOCKS, Lookup
from msatools.whatis.model import AddressAnswer, AskedAddress, Space
from msatools.whatis.whatis import AddressFinder

if TYPE_CHECKING:
    from msatools.cpus.model import CpuSet
    from msatools.locks.report import LocksReport, Wait, WaitTarget
    from msatools.memory.model import MemstatReport, SlabGroup
    from msatools.query.model import Thread
    from msatools.zombies.model import Zombie, ZombiesReport

__all__ = (
    "blocked_tasks",
    "deadlocks",
    "lock_owner",
    "lock_waiters",
    "memory_classes",
    "microstates",
    "page_class",
    "processor_sets",
    "slab_caches",
    "wait_chain",
    "wait_lock",
    "wait_target",
    "what_is",
    "zombie_reason",
)

_CACHED = "msatools.helpers"
"""Key of the helpers' results in a program's cache."""

_QUEUED = ("mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex")
"""Types of locks that always have a list of their waiters."""

_STRUCTS = {type_: tag for tag, type_ in reversed(LOCKS.items())} | {"folio": "folio"}
"""Maps the type of a lock to its structure."""

_MADE = {
    "task": ("struct task_struct *", "find_task(prog, PID)"),
    "page": ("struct page *", "pfn_to_page(prog, PFN)"),
    "lock": ("a lock or a pointer to one", "inode.i_rwsem"),
}
"""Type that each argument must have, and an example that returns such an object."""

T = TypeVar("T")


# --- locks


def lock_owner(lock: Object) -> Object | None:
    """
    Get the task that a lock records as its owner.

    :param lock: A lock, or a pointer to one: ``struct mutex``, ``struct
        rw_semaphore``, ``struct rt_mutex``, ``struct percpu_rw_semaphore`` ...
    :return: ``struct task_struct *``; ``None`` if no owner is recorded. If readers
        hold a rwsem, it is the last of them, which may have released it since.
    :raises TypeError: if it is no lock
    :raises drgn.FaultError: if the lock cannot be read
    """
    found = _lock(lock)
    context = _lookup(lock.prog_).locks
    for holder in holders_of(context, found):
        return _task(lock.prog_, holder.task)
    return None


def lock_waiters(lock: Object) -> Iterator[Object]:
    """
    Iterate over the tasks in the queue of a lock, in its order.

    :param lock: As for :func:`lock_owner`.
    :return: Iterator of ``struct task_struct *``; empty if the lock keeps no list.
    :raises TypeError: if it is no lock
    :raises drgn.FaultError: if the lock cannot be read
    """
    found = _lock(lock)
    prog = lock.prog_
    _pointed(lock).read_()
    queue = queue_of(_lookup(prog).locks, found)
    if queue is None and found.type in _QUEUED:
        raise drgn.FaultError("cannot read the waiters of the lock", found.address or 0)
    return iter([_task(prog, waiter.task) for waiter in queue or ()])


def _require(name: str, given: object) -> None:
    """
    Check that an argument is a drgn object of the right type.

    :param name: Name of the argument: a key of :data:`_MADE`.
    :raises TypeError: if it is not; the message names the type
    """
    wanted, such_as = _MADE[name]
    is_right = isinstance(given, Object)
    if isinstance(given, Object) and name != "lock":  # locks have many types
        type_ = given.type_.unaliased()
        is_pointer = type_.kind == drgn.TypeKind.POINTER
        target = type_.type.unaliased() if is_pointer else type_
        is_struct = target.kind == drgn.TypeKind.STRUCT
        is_right = is_struct and target.tag in wanted.split()
        is_right &= is_pointer or name == "task"
    if not is_right:
        text = f"{name} must be an object of drgn, {wanted}, such as {such_as}"
        raise TypeError(f"{text}, not {_kind(given)}")


def _kind(given: object) -> str:
    """Return the type of something, in C if it is an object of drgn."""
    if isinstance(given, Object):
        return str(given.type_.type_name())
    return f"{given:#x}" if type(given) is int else type(given).__name__


def _pointed(lock: Object) -> Object:
    """Return the object that a pointer points to; other objects unchanged."""
    is_pointer = lock.type_.unaliased().kind == drgn.TypeKind.POINTER
    return lock[0] if is_pointer else lock


def _lock(lock: Object) -> Lock:
    """Return the lock that an object is, or points to."""
    _require("lock", lock)
    lock = _pointed(lock)
    type_ = lock.type_.unaliased()
    tag = type_.tag if type_.kind == drgn.TypeKind.STRUCT else None
    if tag not in LOCKS or lock.address_ is None:
        raise TypeError(f"not a lock in memory: {lock.type_.type_name()}")
    return Lock(LOCKS[tag], lock.address_)


# --- tasks that wait


def blocked_tasks(prog: Program) -> Iterator[Object]:
    """
    Iterate over the tasks that are blocked, the longest first.

    A task is blocked if it is in uninterruptible sleep, waits for a lock, or waits for
    something that another task has to do.

    :return: Iterator of ``struct task_struct *``.
    """
    for wait in sorted(_waits(prog).waits, key=lambda wait: -wait.age_ns):
        task = _task_of(prog, wait.pid)
        if task is not None:
            yield task


def wait_lock(task: Object) -> Object | None:
    """
    Get the lock that a task waits for.

    :param task: ``struct task_struct *``
    :return: The lock, as ``struct mutex`` or what it is; ``None`` if the task waits for
        no lock, for one of several, or for one in user space (a futex).
    """
    _require("task", task)
    prog, report = task.prog_, _waits(task.prog_)
    wait = _wait_of(report, task)
    if wait is None or wait.lock is None:
        return None
    (lock,) = (each for each in report.locks if each.id == wait.lock)
    tag = _STRUCTS.get(lock.type)
    if tag is None or lock.address is None:
        return None
    return Object(prog, find_type(prog, f"struct {tag}"), address=int(lock.address))


def wait_chain(task: Object) -> list[Object]:
    """
    Follow a task to the task that it waits for, and so on.

    Owners are those of ``msa-locks``: recorded by the lock, or known from stacks. Where
    a lock has several owners, the first is followed.

    :param task: ``struct task_struct *``
    :return: ``struct task_struct *`` of the task and of all that follow. The list ends
        with a task that waits for no other, or before one that is in the list already
        (a deadlock) or cannot be read.
    """
    _require("task", task)
    prog = task.prog_
    owners = {wait.pid: wait.owners for wait in _waits(prog).waits}
    chain, pids = [task], [task.pid.value_()]
    while pid := next(iter(owners.get(pids[-1], ())), None):
        owner = None if pid in pids else _task_of(prog, pid)
        if owner is None:
            break
        chain.append(owner)
        pids.append(pid)
    return chain


def deadlocks(prog: Program, *, possible: bool = False) -> list[list[Object]]:
    """
    Find the tasks that wait for each other.

    :param possible: Whether to include deadlocks with an owner that is known only from
        evidence, such as a stack: these may be none.
    :return: Lists of ``struct task_struct *``: each waits for the next, the last for
        the first. Tasks that cannot be read are left out.
    """
    found = []
    for deadlock in _waits(prog).deadlocks:
        if possible or deadlock.confidence == "exact":
            tasks = [_task_of(prog, pid) for pid in deadlock.pids]
            found.append([task for task in tasks if task is not None])
    return [tasks for tasks in found if tasks]


def wait_target(task: Object) -> "WaitTarget | None":
    """
    Get what a task waits on: a file, a pipe, a socket, a futex, a timer, a child ...

    :param task: ``struct task_struct *``
    :return: Its fields that are known; ``None`` if it does not wait, or the target is
        unknown.
    """
    from msatools.prstat.prstat import collect_prstat
    from msatools.prstat.select import Options, Selection

    _require("task", task)
    pid = task.pid.value_()
    if pid == 0:
        return None
    options = Options(per_thread=True, selection=Selection(pids=(pid,)))
    report = collect_prstat(task.prog_, options=options)
    return next((row.on for row in report.tasks if row.pid == pid), None)


def microstates(task: Object) -> "Thread":
    """
    Get where the time of a thread went: see :func:`msatools.thread`.

    :param task: ``struct task_struct *``
    """
    from msatools.query.kernel import open

    _require("task", task)
    return open(task.prog_).thread(task.pid.value_())


def zombie_reason(task: Object) -> str | None:
    """
    Get why a dead task is not reaped, as ``msa-zombies`` says it.

    :param task: ``struct task_struct *``
    :return: ``"never-waits"``, ``"sigchld-blocked"``, ``"parent-blocked"`` ...;
        ``None`` if the task is no zombie.
    """
    _require("task", task)
    pid = task.pid.value_()
    found = (each for each in _zombies(task.prog_) if each.pid == pid)
    return next((each.verdict for each in found), None)


# --- memory and CPUs


def page_class(page: Object) -> str | None:
    """
    Get the class of a page, as ``msa-memstat`` counts it.

    :param page: ``struct page *``
    :return: ``"user.anon"``, ``"kernel.slab"``, ``"free.buddy"`` ...;
        ``None`` if it is not of the memmap, or cannot be read.
    """
    _require("page", page)
    found = what_is(page.prog_, page.value_()).page_struct
    if found is None:
        return None
    described = _answer(page.prog_, "pfn", found.pfn).page
    return None if described is None else described.page_class


def what_is(prog: Program, address: int) -> AddressAnswer:
    """
    Get what lies at an address: a symbol, a task, a stack, an object of a slab, a page.

    :param address: Virtual address of the kernel.
    """
    describe(prog)
    if not isinstance(address, int) or not 0 <= address < 1 << 64:
        raise TypeError(
            "address must be an int of 64 bits, such as pointer.value_() or "
            f"object.address_, not {_kind(address)}"
        )
    return _answer(prog, "kernel", address)


def _answer(prog: Program, space: Space, number: int) -> AddressAnswer:
    lookup = _lookup(prog)
    finder = _once(prog, "finder", lambda: AddressFinder(lookup, describe(prog)))
    return finder.answer(AskedAddress(f"{number:#x}", space, number))


def memory_classes(prog: Program) -> dict[str, int]:
    """Count the pages of each class: the table of ``msa-memstat``."""
    return {count.name: count.pages for count in _memory(prog).classes}


def slab_caches(prog: Program) -> "list[SlabGroup]":
    """List the slab caches with their pages and objects, the largest first."""
    groups = cast("tuple[SlabGroup, ...]", (_memory(prog).by or {})["slab"])
    return [group for group in groups if group.slabs is not None]


def processor_sets(prog: Program) -> "list[CpuSet]":
    """List the sets of CPUs: of partitions, of the command line, and the others."""
    from msatools.cpus.cpus import collect_cpus

    return list(_once(prog, "cpus", lambda: collect_cpus(prog)).sets)


# --- Reports and readers, kept for a dump.


def _once(prog: Program, name: str, make: Callable[[], T]) -> T:
    """Call *make*; for a dump only once: its result is kept in the program's cache."""
    describe(prog)  # without debug info, the kernel's own types are loaded
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return make()
    kept = prog.cache.setdefault(_CACHED, {})
    if name not in kept:
        kept[name] = make()
    return cast(T, kept[name])


def _lookup(prog: Program) -> Lookup:
    def make() -> Lookup:
        reader, losses = Reader(prog), LossLog()
        return Lookup(reader, read_clocks(reader, losses), losses)

    return _once(prog, "lookup", make)


def _waits(prog: Program) -> "LocksReport":
    from msatools.locks.locks import collect_locks

    return _once(prog, "locks", lambda: collect_locks(prog))


def _zombies(prog: Program) -> "tuple[Zombie, ...]":
    from msatools.zombies.zombies import collect_zombies

    report: ZombiesReport = _once(prog, "zombies", lambda: collect_zombies(prog))
    return tuple(report.zombies)


def _memory(prog: Program) -> "MemstatReport":
    from msatools.memory.memstat import collect_memstat

    return _once(prog, "memory", lambda: collect_memstat(prog, by=("slab",)))


def _wait_of(report: "LocksReport", task: Object) -> "Wait | None":
    pid = task.pid.value_()
    return next((wait for wait in report.waits if wait.pid == pid), None)


def _task(prog: Program, address: int) -> Object:
    type_ = prog.pointer_type(find_type(prog, "struct task_struct"))
    return Object(prog, type_, value=address)


def _task_of(prog: Program, pid: int) -> Object | None:
    """Return the thread with an ID; ``None`` if it has ended or cannot be read."""
    try:
        address = find_task(_lookup(prog).reader, pid)
    except LOST:
        return None
    return None if address is None else _task(prog, address)
