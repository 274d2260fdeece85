# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks of user space: which futex a task waits on, who else does, and who has it.

The kernel knows who waits on which futex. Who has it only the process knows, but for
those that inherit priority. What the C library writes next to a futex is a hint: it is
taken for what it says only if all that is there fits
(:mod:`msatools.locks.user.nptl`), and if whom it names is a thread that can have it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import drgn
import numpy as np
from drgn.helpers.linux.pid import find_task

from msatools.kernel.losses import Loss
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.report import LossLog
from msatools.kernel.walks import tree_records
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import (
    Holder,
    Lock,
    LockTypeName,
    OwnerConfidence,
    QueuedWaiter,
    Request,
)
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.lock_type import LockType
from msatools.locks.base.model import Mode
from msatools.locks.places.places import lock_places
from msatools.locks.sleeping.kernellocks import kernel_locks
from msatools.locks.user import nptl
from msatools.locks.user.futexes import Waiter, futex_queues, futex_waiters, futexes
from msatools.locks.user.futexwaits import waiters_of
from msatools.locks.user.usermemory import UserMemory, user_memory
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.syscalls import read_syscalls

PARKED = "parked on a futex of its own stack: nobody wakes it"

_FEW_WAITERS = 8
"""Of a futex in a file, whose mappings are looked at until one has it."""

_MAX_PROCESSES = 4096
"""That map a file, of which one may have a futex in it."""

_PARKED_BYTES = 256
"""Above the stack pointer, within which a function's own variables are."""

_PAGE = 4096

# A futex's operation, without what it says of clocks and of who may use it.
_COMMAND = 0x7F
_WAIT_BITSET = 9
_ALL_BITS = 0xFFFF_FFFF


@dataclass(frozen=True)
class _Said:
    """What is known of a futex that is waited on."""

    owner: int | None = None
    """The address of a ``struct task_struct``."""

    confidence: OwnerConfidence = "likely"
    mode: Mode | None = None
    readers: int | None = None

    condition: int | None = None
    """How far behind the start of the condition variable it is that it is a word of."""


@dataclass(frozen=True)
class _Place:
    """Where a futex is in the memory of one who waits on it."""

    task: int
    mm: int
    address: int
    inode: int
    """Of the file that it is in; 0 if it is in none."""


@dataclass(frozen=True)
class _Users:
    """The processes that map a file."""

    mms: frozenset[int]
    spaces: frozenset[int]
    """Their PID namespaces, as far as they are known."""


class _Futexes:
    """What was read of futexes for one context."""

    def __init__(self, context: LockContext) -> None:
        self.seen: dict[tuple[LockTypeName, object], Waiter] = {}
        """A waiter of each futex that somebody was found to wait on, by its key."""

        self.said: dict[FutexKey, _Said] = {}
        self.requests: dict[tuple[LockTypeName, FutexKey], Request] = {}
        self.words: dict[FutexKey, tuple[FutexKey, FutexKey]] = {}
        """Both futexes of each condition variable, by the key of its start."""

        self.conditions: dict[tuple[int, int], int | None] = {}
        """Where the one starts that has a futex, by address space and the address of
        the 8 bytes that both of its futexes are."""

        self.starts: set[tuple[int, int]] = set()
        """The same that there are, by address space and address."""

        self.users: dict[int, _Users] = {}
        """By ``struct inode``."""

        self.tasks: dict[tuple[int, int], int | None] = {}
        """By PID namespace and ID."""

        self.by_pid: dict[int, int] = dict(
            zip(
                context.tasks["pid"].tolist(),
                context.tasks["address"].tolist(),
                strict=True,
            )
        )
        self.mms: dict[int, int] = dict(
            zip(
                context.tasks["address"].tolist(),
                context.tasks["mm"].tolist(),
                strict=True,
            )
        )

    def learn_condition(self, mm: int, address: int, start: int | None) -> None:
        self.conditions[mm, address & ~7] = start
        if start is not None:
            self.starts.add((mm, start))


@per_context
def _learned(context: LockContext) -> _Futexes:
    return _Futexes(context)


def requests(context: LockContext, case: BlockedTask) -> list[Request]:
    """
    Return which futexes a task waits on.

    :return: One; several if it waits for any of them; none if they are not found.
    """
    waiters, _ = waiters_of(context, case)
    return _requests(context, waiters)


def futex_requests(context: LockContext, task: int) -> list[Request]:
    """Return the same of the ``struct task_struct`` at an address, by the hash tables.

    All waiters are read the first time; then each costs next to nothing.
    """
    by_task, _ = futex_waiters(context)
    waiters = sorted(by_task.get(task, ()), key=lambda waiter: waiter.address)
    return _requests(context, waiters)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters on a futex, the next to be woken up first.

    Those of a futex that inherits priority are in the order of its ``rt_mutex``. Who
    waits for one of several futexes is on the queue of each.
    """
    waiters = _waiters(context, lock)
    if not waiters:
        return None
    mode = None if lock.type == "pi_futex" else _said(context, waiters[0]).mode
    tasks = list(dict.fromkeys(waiter.task for waiter in waiters))
    if lock.type == "pi_futex":
        tasks = _by_urgency(context, waiters[0].pi_state, tasks)
    return [QueuedWaiter(task, mode) for task in tasks]


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the owner of a futex.

    ``exact`` of one that inherits priority: the kernel has to know; and of a thread
    that is waited for to end. All else is ``likely`` at best: the C library's word.
    """
    waiter = _learned(context).seen.get((lock.type, lock.key))
    if waiter is None:
        return []
    if lock.type == "pi_futex":
        return _pi_owner(context, waiter)
    said = _said(context, waiter)
    return [] if said.owner is None else [Holder(said.owner, said.confidence)]


def readers(context: LockContext, lock: Lock) -> int | None:
    """Count who has a futex for reading; ``None`` if it counts no readers."""
    waiter = _learned(context).seen.get((lock.type, lock.key))
    if waiter is None or lock.type == "pi_futex":
        return None
    return _said(context, waiter).readers


def condition_at(context: LockContext, mm: int, address: int) -> int | None:
    """Find the condition variable that a futex is a word of.

    :param mm: Of the process that it is private to, the ``struct mm_struct``.
    :return: Where it starts; ``None`` if it is of none, or nothing tells.
    """
    learned = _learned(context)
    place = mm, address & ~7
    if place not in learned.conditions:
        start = None
        try:
            start = _read_condition(context, mm, address, (0, 0), None)
        except (drgn.FaultError, LookupError) as error:
            context.losses.lose(Loss.WAITERS, f"a condition variable is lost: {error}")
        learned.learn_condition(mm, address, start)
    return learned.conditions[place]


def is_condition(context: LockContext, lock: Lock, mm: int) -> bool:
    """Return whether a futex that somebody was found to wait on is of such.

    :param mm: Of the process that it is private to, the ``struct mm_struct``.
    """
    learned = _learned(context)
    shared = isinstance(lock.key, FutexKey) and lock.key in learned.words
    return shared or (mm, lock.address) in learned.starts


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Return what a futex without an owner stands for: see :func:`parked`."""
    return parked(context, case.address, request)


def parked(context: LockContext, task: int, request: Request) -> str | None:
    """
    Return whether a task waits for ever on a word that nobody else knows.

    glibc has a thread do so for which a futex that inherits priority would close a
    circle, and which the kernel therefore refused (EDEADLK); the word is a variable of
    the function that waits. There is no other trace of it, so all has to fit: how it
    waits, and that it owns a futex which others wait for.

    :param task: The address of its ``struct task_struct``, one of ``context.tasks``.
    """
    lock = request.lock
    if lock.type != "futex" or lock.address is None:
        return None
    waiters = _waiters(context, lock)
    if len(waiters) != 1 or not _owns_wanted_futex(context, task):
        return None
    row = context.tasks.only(context.tasks["address"] == np.uint64(task))
    if not len(row):
        return None
    prog = context.reader.prog
    call = read_syscalls(context.reader, row, stack_bytes(prog), LossLog())
    if not call.known[0] or call.compat[0] or call.name(0) != "futex":
        return None
    address, operation, value, timeout, _, bits = call.arguments[0].tolist()
    above = address - int(call.sp[0])
    plain = operation & _COMMAND == _WAIT_BITSET and bits & _ALL_BITS == _ALL_BITS
    # Half of a word may be left of what was there before.
    fits = plain and not value & _ALL_BITS and not timeout
    if fits and address == lock.address and 0 <= above < _PARKED_BYTES:
        return PARKED
    return None


def _requests(context: LockContext, waiters: Iterable[Waiter]) -> list[Request]:
    """Return each futex once.

    While a kernel runs, a task may be met in the queues of both futexes of a condition
    variable, as it waits again before all queues are read.
    """
    return list(dict.fromkeys(_request(context, waiter) for waiter in waiters))


def _request(context: LockContext, waiter: Waiter) -> Request:
    learned = _learned(context)
    type_: LockTypeName = "pi_futex" if waiter.pi_state else "futex"
    found = learned.requests.get((type_, waiter.key))
    if found is None:
        said = _Said() if waiter.pi_state else _said(context, waiter)
        key, mode = waiter.key, said.mode
        if said.condition is not None:
            key = waiter.key.moved(-said.condition)
            learned.words[key] = waiter.key.pair()
        learned.seen[type_, key] = waiter
        lock = Lock(type_, key.address, key)
        found = learned.requests[type_, waiter.key] = Request(lock, mode)
    return found


def _waiters(context: LockContext, lock: Lock) -> list[Waiter]:
    """Return the waiters on a futex that somebody was found to wait on."""
    key = lock.key
    if not isinstance(key, FutexKey):
        return []
    words = _learned(context).words.get(key)
    if words is not None:
        # Their queues may be far apart in the tables: all are read.
        found = [each for word in words for each in futex_queues(context).get(word, ())]
    elif not context.alone:
        found = futex_queues(context).get(key, [])
    else:
        first = _learned(context).seen.get((lock.type, key))
        chain = futexes(context).chain(first.lock) if first else ()
        found = [waiter for waiter in chain if waiter.key == key]
    # Who is to get one that inherits priority later, waits for another thing yet.
    return [w for w in found if bool(w.pi_state) == (lock.type == "pi_futex")]


def _by_urgency(context: LockContext, pi_state: int, tasks: list[int]) -> list[int]:
    try:
        mutex = pi_state + context.layout.offset("futex_pi_state", "pi_mutex")
        order = kernel_locks(context).rt_mutex(mutex).waiters or ()
    except drgn.FaultError as error:
        context.losses.lose(Loss.WAITERS, f"the queue of a futex is lost: {error}")
        order = ()
    queued = set(tasks)
    first = [task for task in order if task in queued]
    # One may be about to go to sleep, or to be gone.
    return list(dict.fromkeys([*first, *tasks]))


def _pi_owner(context: LockContext, waiter: Waiter) -> list[Holder]:
    """Return the owner of a futex that inherits priority.

    The owner that is recorded may be about to be changed, while another takes the
    kernel's own lock.
    """
    layout, state = context.layout, waiter.pi_state
    owner, taken = layout.members(state, "futex_pi_state", "owner", "pi_mutex.owner")
    key = futexes(context).key(state + layout.offset("futex_pi_state", "key"))
    # It may have been freed, and be of another futex now.
    if key != waiter.key or owner < KERNEL_HALF or not context.pid(owner):
        return []
    agree = taken & ~1 in (0, owner)
    return [Holder(owner, "exact" if agree else "likely")]


def _owns_wanted_futex(context: LockContext, task: int) -> bool:
    """Return whether others wait for a futex that inherits priority, and a task has."""
    # "futex: Move futex related task_struct data into a struct" (in v7.1)
    head = task + context.layout.offset(
        "task_struct", "futex.pi_state_list", "pi_state_list"
    )
    try:
        return context.layout.word(head) not in (0, head)
    except drgn.FaultError:
        return False


# --- what the memory of processes says


def _said(context: LockContext, waiter: Waiter) -> _Said:
    """Read what there is at a futex, once."""
    said = _learned(context).said
    key = waiter.key
    if key not in said:
        try:
            said[key] = _read_futex(context, waiter)
        except (drgn.FaultError, LookupError) as error:
            context.losses.lose(Loss.FUTEX_OWNERS, f"who has a futex is lost: {error}")
            said[key] = _Said()
    return said[key]


@dataclass(frozen=True)
class _Words:
    """The memory around a futex: what is on its page comes with one read."""

    memory: UserMemory
    mm: int
    start: int
    data: bytes

    @classmethod
    def around(cls, context: LockContext, place: _Place) -> "_Words | None":
        """Read it; ``None`` if the futex is not in the dump."""
        page = place.address & -_PAGE
        start = max(place.address - nptl.RWLOCK_BYTES, page)
        end = min(place.address + nptl.RWLOCK_BYTES, page + _PAGE)
        data = user_memory(context).read(place.mm, start, end - start)
        return (
            None if data is None else cls(user_memory(context), place.mm, start, data)
        )

    def read(self, address: int, size: int) -> bytes | None:
        """Read some bytes; ``None`` if they are not in the dump."""
        first = address - self.start
        if first >= 0 and first + size <= len(self.data):
            return self.data[first : first + size]
        return self.memory.read(self.mm, address, size)


def _read_futex(context: LockContext, waiter: Waiter) -> _Said:
    """Return what is at a futex.

    :raises drgn.FaultError: if what leads to it, or to its owner, is damaged
    """
    place = _place(context, waiter)
    words = _Words.around(context, place) if place else None
    if place is None or words is None:
        context.losses.coverage["futexes_not_read"] += 1
        return _Said()
    return (
        _thread(context, place, words)
        or _mutex(context, place, words, waiter.key)
        or _rwlock(context, place, words, waiter.key)
        or _condition(context, place, waiter.key)
        or _Said()
    )


def _thread(context: LockContext, place: _Place, words: _Words) -> _Said | None:
    """Return a thread that is waited for to end: the kernel clears the word then."""
    word = int.from_bytes(words.read(place.address, 4) or b"", "little")
    if not 0 < word < PID_MAX_LIMIT or place.inode:
        return None
    task = _owner(context, place, word)
    if task is None:
        return None
    clears = context.layout.member(task, "task_struct", "clear_child_tid")
    return _Said(task, "exact") if clears == place.address else None


def _mutex(
    context: LockContext, place: _Place, words: _Words, key: FutexKey
) -> _Said | None:
    if place.address % 8:
        return None
    data = words.read(place.address, nptl.MUTEX_BYTES)
    mutex = nptl.mutex(data, key.shared) if data else None
    if mutex is None:
        return None
    task = _owner(context, place, mutex.owner)
    if task is None or (task in _tasks_on(context, key) and not mutex.blocks_owner):
        return None
    return _Said(task)


def _rwlock(
    context: LockContext, place: _Place, words: _Words, key: FutexKey
) -> _Said | None:
    starts = [nptl.rwlock_start(place.address)]
    if not place.address % 8:
        # Readers may wait on its first word.
        starts.append(place.address)
    for start in starts:
        data = words.read(start, nptl.RWLOCK_BYTES)
        at = place.address - start
        lock = nptl.rwlock(data, at, key.shared) if data else None
        if lock is None:
            continue
        if lock.writer is None:
            return _Said(mode=lock.mode, readers=lock.readers)
        task = _owner(context, place, lock.writer)
        # Who has it for writing is refused it once more.
        if task is not None and task not in _tasks_on(context, key):
            return _Said(task, mode=lock.mode, readers=lock.readers)
    return None


def _condition(context: LockContext, place: _Place, key: FutexKey) -> _Said | None:
    queued = [len(futex_queues(context).get(word, ())) for word in key.pair()]
    if context.live:
        # They were read at another time than its words are.
        queued = [0, 0]
    start = _read_condition(
        context, place.mm, place.address, (queued[0], queued[1]), key.shared
    )
    if not key.of_inode:
        _learned(context).learn_condition(place.mm, place.address, start)
    return None if start is None else _Said(condition=place.address - start)


def _read_condition(
    context: LockContext,
    mm: int,
    address: int,
    queued: tuple[int, int],
    shared: bool | None,
) -> int | None:
    """Find where the condition variable starts that a futex is a word of."""
    for newer, start in enumerate(nptl.condition_starts(address)):
        data = user_memory(context).read(mm, start, nptl.CONDITION_BYTES)
        if data is None:
            return None
        if nptl.condition(data, bool(newer), queued, shared):
            return start
    return None


def _tasks_on(context: LockContext, key: FutexKey) -> set[int]:
    lock = Lock("futex", key.address, key)
    return {waiter.task for waiter in _waiters(context, lock)}


# --- where a futex is, and who can have it


def _place(context: LockContext, waiter: Waiter) -> _Place | None:
    """Find a futex in the memory of one who waits on it."""
    key = waiter.key
    if key.address is not None:
        mm = _mm(context, waiter.task)
        return _Place(waiter.task, mm, key.address, 0) if mm else None
    others = _waiters(context, Lock("futex", None, key))[:_FEW_WAITERS]
    for task in dict.fromkeys([waiter.task, *(other.task for other in others)]):
        mm = _mm(context, task)
        for file in user_memory(context).shared_files(mm) if mm else ():
            address = file.start + (key.file_offset or 0) - file.first
            if file.sequence == key.object and file.start <= address < file.end:
                return _Place(task, mm, address, file.inode)
    return None


def _mm(context: LockContext, task: int) -> int:
    """Return a task's address space; 0 if it has none."""
    known = _learned(context).mms.get(task)
    return context.layout.member(task, "task_struct", "mm") if known is None else known


def _owner(context: LockContext, place: _Place, tid: int) -> int | None:
    """Find the thread with an ID that can have a futex; ``None`` unless it is one.

    The ID is as its process sees it. Of a futex in a file it may be one of another
    process, which may see other IDs than who waits.
    """
    mms, spaces = {place.mm}, {_namespace(context, place.task)}
    if place.inode:
        users = _users(context, place.inode)
        mms, spaces = mms | users.mms, spaces | users.spaces
    tasks = {_task(context, space, tid) for space in spaces - {0}} - {None}
    fits = [task for task in tasks if task is not None and _mm(context, task) in mms]
    return fits[0] if len(fits) == 1 else None


def _users(context: LockContext, inode: int) -> _Users:
    """Find who maps a file.

    :raises drgn.FaultError: if they are too many, or it cannot be read
    """
    known = _learned(context).users
    if inode not in known:
        mms = frozenset(_mapped_by(context, inode))
        owners = (lock_places(context).owner_of_mm(mm) for mm in mms)
        spaces = frozenset(_namespace(context, owner) for owner in owners if owner)
        known[inode] = _Users(mms, spaces)
    return known[inode]


def _mapped_by(context: LockContext, inode: int) -> set[int]:
    """Find the address spaces that map a file."""
    layout = context.layout
    mapping = layout.member(inode, "inode", "i_mapping")
    root = mapping + layout.offset("address_space", "i_mmap.rb_root", "i_mmap")
    node, mm = (
        layout.offset("vm_area_struct", member) for member in ("shared.rb", "vm_mm")
    )
    size = max(node + layout.size("rb_node"), mm + 8)
    name = "the mappings of a file with futexes"
    found: set[int] = set()
    records = tree_records(context.reader, root, node, size, context.losses, name)
    for count, (_, data) in enumerate(records):
        if count >= _MAX_PROCESSES:
            raise drgn.FaultError("too many processes map it", inode)
        found.add(int.from_bytes(data[mm : mm + 8], "little"))
    return found


def _namespace(context: LockContext, task: int) -> int:
    """Find the PID namespace by which a task knows itself; 0 if it is dead."""
    layout = context.layout
    pid = layout.member(task, "task_struct", "thread_pid")
    if pid < KERNEL_HALF:
        return 0
    level = layout.member(pid, "pid", "level")
    number = pid + layout.offset("pid", "numbers[0].ns") + level * layout.size("upid")
    return layout.word(number)


def _task(context: LockContext, space: int, tid: int) -> int | None:
    """Find the thread with an ID in a PID namespace."""
    learned = _learned(context)
    if (space, tid) in learned.tasks:
        return learned.tasks[space, tid]
    prog = context.reader.prog
    initial = space == context.layout.symbol("init_pid_ns")
    task = learned.by_pid.get(tid) if initial else None
    if task is None:
        namespace = drgn.Object(prog, "struct pid_namespace *", value=space)
        task = int(find_task(namespace, tid).value_()) or None
    learned.tasks[space, tid] = task
    return task


FUTEX = LockType(
    names=frozenset({"futex", "pi_futex"}),
    requests=requests,
    queue=queue,
    holders=holders,
    readers=readers,
    what=what,
    task_class=TaskClass.LCK,
)
