# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the owners of the locks of a snapshot, by all evidence.

The evidence: owners recorded in locks, addresses on stacks, functions that take locks
or imply a reader, and facts that refute a recorded owner.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import drgn
import numpy as np
import numpy.typing as npt

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.code import stack_trace
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.locks.context import BlockedTask, LockContext, per_context, read_cases
from msatools.locks.graph import BY_STACK, Owned, owners
from msatools.locks.names import find_lock_place
from msatools.locks.places import LockPlace
from msatools.locks.report import LockTypeName
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.program.arch import START_KERNEL_MAP, arch_of
from msatools.program.linear import KERNEL_HALF
from msatools.tasks.sampler import AgeBound
from msatools.tasks.stacks import Stack
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows, read_stacks
from msatools.tasks.waits import TaskClass

# --- Finds tasks that have certain addresses on their kernel stacks.
#
# A task with a lock's address on its stack has taken the lock, tries to take it, or has
# released it since.


_AT_ONCE = 1024
"""Number of stacks in memory at a time."""


def seen_on_stacks(
    reader: Reader,
    tasks: TaskTable,
    rows: Rows,
    addresses: Collection[int],
    stack_size: int,
    losses: LossLog,
) -> dict[int, list[int]]:
    """
    Find the tasks that have certain addresses in the used part of their stacks.

    The stack pointer of a running task is in the registers of a dump. On a running
    kernel registers cannot be read, so its running tasks are left out.

    :param rows: Rows of the tasks whose stacks are searched.
    :param stack_size: Bytes of a kernel stack.
    :return: Maps each address to the rows of tasks that have it, ascending.
    """
    wanted = np.array(sorted(addresses), np.uint64)
    found: dict[int, set[int]] = {int(address): set() for address in wanted.tolist()}
    if not len(wanted):
        return {}
    pointers = _pointers(reader.prog, tasks, stack_size)
    stacks = np.where(pointers != 0, tasks["stack"], 0).astype(np.uint64)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        # Unreadable stacks were counted when the stacks were unwound.
        memory = read_stacks(
            reader, stacks[part], pointers[part], stack_size, LossLog()
        )
        losses.coverage["stacks_searched"] += int(np.count_nonzero(memory.size))
        indexes = np.flatnonzero(_isin(memory.words, wanted))
        owners = part[np.searchsorted(memory.first, indexes, side="right") - 1]
        for address, row in zip(
            memory.words[indexes].tolist(), owners.tolist(), strict=True
        ):
            found[address].add(row)
    return {address: sorted(seen) for address, seen in found.items()}


def _isin(words: Addresses, ascending: Addresses) -> npt.NDArray[np.bool_]:
    """Return which words are among a few addresses, with few comparisons."""
    found: npt.NDArray[np.bool_] = (words >= ascending[0]) & (words <= ascending[-1])
    found[found] = np.isin(words[found], ascending)
    return found


def _pointers(prog: drgn.Program, tasks: TaskTable, stack_size: int) -> Addresses:
    """Return the stack pointer of each task; 0 if unknown."""
    saved = tasks["sp"] if tasks.has("sp") else np.zeros(len(tasks), np.uint64)
    stopped = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0)
    pointers = np.where(stopped, saved, 0).astype(np.uint64)
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return pointers
    runs = (tasks["on_cpu"] != 0) & (tasks["exit_state"] == 0)
    for row in np.flatnonzero(runs).tolist():
        stack = int(tasks["stack"][row])
        pointers[row] = _running_pointer(
            prog, int(tasks["address"][row]), range(stack, stack + stack_size)
        )
    return pointers


def _running_pointer(prog: drgn.Program, task: int, stack: range) -> int:
    """Return the stack pointer of a running task on its own stack, in a dump.

    The CPU may be on an interrupt's stack, whose frames come first.

    :return: 0 if unknown, or if the CPU was in user mode: then the task's kernel stack
        has only the registers saved at entry.
    """
    try:
        frames = stack_trace(prog, task) or ()
        return next((frame.sp for frame in frames if frame.sp in stack), 0)
    except MissingError:
        return 0


# --- Whether a function on a stack takes locks of a type, by its machine code.
#
# A lock's address on a stack may be left over from a call that has returned. It is
# evidence only if a function on that stack takes locks of that type. The machine code
# shows which functions are called: a call of x86-64, like a bl of arm64, has the
# distance to its target. A function may also take a lock by a helper, one call away.


_TAKES: dict[LockTypeName, str] = {
    "rwsem": """
        down_read down_read_killable down_read_interruptible down_read_trylock
        down_write down_write_killable down_write_trylock __down_read __down_write
        down_read_nested down_write_nested
    """,
    "semaphore": "down down_interruptible down_killable down_trylock down_timeout",
    "percpu_rwsem": "__percpu_down_read percpu_down_write percpu_down_read",
    "srcu": "__srcu_read_lock __srcu_read_lock_nmisafe",
}
_ENTRIES = (
    "do_syscall_64",
    "x64_sys_call",
    "entry_",
    "kthread",
    "ret_from_fork",
    "el0",
)
"""Prefixes of functions that are not searched: they call all system calls, or start and
end kernel threads."""

_MAX_CODE = 1 << 16
"""Maximum number of bytes of a function to search."""


_PADDING = 16
"""Maximum distance of a call's target from the start of the function: some kernels call
into the bytes before a function, or past its first ones."""


def takes(context: LockContext, stack: Stack, type_: LockTypeName) -> bool:
    """Return whether any function on a stack takes locks of a type.

    Also true if that is unknown, as symbols or code are missing.
    """
    finder = _calls(context)
    takers = finder.entries(type_)
    if not takers:
        return True
    for address in stack.instructions():
        symbol = context.text.symbol(address)
        if symbol is None or symbol.name.startswith(_ENTRIES):
            continue
        targets = finder.targets(symbol.address, symbol.size)
        if targets is None or not takers.isdisjoint(targets):
            return True
        for target in targets:
            helper = context.text.symbol(target + _PADDING)
            inner = helper and finder.targets(helper.address, helper.size)
            if inner and not takers.isdisjoint(inner):
                return True
    return False


def takes_variable(
    context: LockContext, stack: Stack, type_: LockTypeName, address: int
) -> bool:
    """Return whether a function on a stack takes locks of a type, and names this one.

    Only machine code of x86-64 is searched for the lock's address.

    :param address: Address of the lock, which is a variable.
    """
    if address < START_KERNEL_MAP or arch_of(context.reader.prog).has_frame_records:
        return False
    finder = _calls(context)
    takers = finder.entries(type_)
    for place in stack.instructions():
        symbol = context.text.symbol(place)
        if symbol is None or symbol.name.startswith(_ENTRIES):
            continue
        targets = finder.targets(symbol.address, symbol.size)
        if not targets or takers.isdisjoint(targets):
            continue
        if finder.names(symbol.address, symbol.size, address):
            return True
    return False


class _Calls:
    """Targets of the calls of functions; each function is read once."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._is_arm = arch_of(context.reader.prog).has_frame_records
        self._targets: dict[int, tuple[int, ...] | None] = {}
        self._entries: dict[LockTypeName, frozenset[int]] = {}

    def entries(self, type_: LockTypeName) -> frozenset[int]:
        """Return the addresses where calls enter functions that take locks of a type.

        :return: Empty if the type has no such functions, or they have no symbols.
        """
        if type_ not in self._entries:
            names = _TAKES.get(type_, "").split()
            found = (self._context.layout.symbol(name) for name in names)
            self._entries[type_] = frozenset(
                address + distance
                for address in found
                if address is not None
                for distance in range(-_PADDING, _PADDING + 1)
            )
        return self._entries[type_]

    def targets(self, start: int, size: int) -> tuple[int, ...] | None:
        """Return the targets of a function's calls and jumps; ``None`` if unreadable.

        On x86-64 these include values that only look like targets.
        """
        if start not in self._targets:
            self._targets[start] = self._read(start, min(size, _MAX_CODE))
        return self._targets[start]

    def names(self, start: int, size: int, address: int) -> bool:
        """Return whether a function's code may name the variable at an address.

        Code has its address as an immediate, or the distance to it.
        """
        try:
            code = self._context.reader.read(start, min(size, _MAX_CODE))
        except UNREADABLE:
            return False
        values = _words_at_each_byte(code)
        after = np.arange(start + 4, start + 4 + len(values), dtype=np.uint64)
        near = after + values.astype(np.int64).astype(np.uint64)
        return bool(
            np.any(values == np.uint32(address & 0xFFFF_FFFF).view(np.int32))
            or np.any(near == np.uint64(address))
        )

    def _read(self, start: int, size: int) -> tuple[int, ...] | None:
        try:
            code = self._context.reader.read(start, size)
        except UNREADABLE:
            return None
        found = _of_arm(code, start) if self._is_arm else _of_x86(code, start)
        return tuple(dict.fromkeys(found.tolist()))


def _of_x86(code: bytes, start: int) -> npt.NDArray[np.uint64]:
    """Return the targets of all bytes that may be ``call rel32`` or ``jmp rel32``."""
    data = np.frombuffer(code, np.uint8)
    places = np.flatnonzero((data[:-4] == 0xE8) | (data[:-4] == 0xE9))
    distance = _words_at_each_byte(code)[places + 1]
    return _moved(start + 5, places, distance.astype(np.int64))


def _words_at_each_byte(code: bytes) -> npt.NDArray[np.int32]:
    """Return the 32-bit words that begin at each byte but the last three."""
    data = np.frombuffer(code, np.uint8)
    count = max(len(data) - 3, 0)
    parts = [
        data[byte : byte + count].astype(np.uint32) << (8 * byte) for byte in range(4)
    ]
    return (parts[0] | parts[1] | parts[2] | parts[3]).astype(np.int32)


def _of_arm(code: bytes, start: int) -> npt.NDArray[np.uint64]:
    """Return the targets of all ``bl`` and ``b`` instructions."""
    words = np.frombuffer(code[: len(code) & ~3], "<u4")
    places = np.flatnonzero((words & 0x7C00_0000) == 0x1400_0000)
    distance = (words[places] << 6).astype(np.int32).astype(np.int64) >> 4
    return _moved(start, 4 * places, distance)


def _moved(
    start: int, places: npt.NDArray[np.intp], distance: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    base = np.uint64(start) + places.astype(np.uint64)
    return base + distance.astype(np.uint64)


@per_context
def _calls(context: LockContext) -> _Calls:
    return _Calls(context)


# --- Owners that follow from the function that a task is in, mostly readers.
#
# A task that handles a page fault has the mmap_lock of its address space for reading,
# or the lock of the mapping: assert_fault_locked() (include/linux/mm.h). A task that
# reads or writes the memory of another process, such as ps, has the mmap_lock of that
# process (__access_remote_vm()). Stacks of both point at the mapping or the mm_struct.
#
# The task that commits a transaction of btrfs wakes those that wait for the end of the
# commit. Its stack points at the transaction (fs/btrfs/transaction.c,
# btrfs_commit_transaction()).
#
# A task that takes a CPU on- or offline has cpu_hotplug_lock for writing
# (kernel/cpu.c). The lock does not record it.
#
# A reader under a srcu_struct that is a variable is in a function that calls
# srcu_read_lock() and whose code names the variable. Its stack need not point at it.


_FAULTS = frozenset(
    {
        *("handle_mm_fault", "__handle_mm_fault", "do_fault", "do_wp_page"),
        *("do_swap_page", "handle_userfault", "faultin_page"),
    }
)
_REMOTE = frozenset({"__access_remote_vm", "access_remote_vm", "get_user_pages_remote"})
_LOCKS = {
    "mmap_lock": "mm_struct",
    "mmap_sem": "mm_struct",
    "vm_lock": "vm_area_struct",
}
"""Maps the lock members that :func:`readers` knows to the structures with them."""


_COMMITS = frozenset({"btrfs_commit_transaction"})
_COMMIT_WAITS = _COMMITS | {
    *("wait_for_commit", "wait_current_trans", "btrfs_wait_for_commit"),
}
"""Functions in which a task waits for the end of a commit."""

_HOTPLUG = frozenset({"_cpu_down", "_cpu_up"})
"""Functions in which a task that sleeps has ``cpu_hotplug_lock`` for writing."""


def readers(snapshot: WaitSnapshot, want: Wanted, stack_size: int) -> frozenset[int]:
    """Return the rows of tasks that own a lock, as implied by their functions.

    Most own it for reading; :func:`find_owners` has the other owners.

    :param stack_size: Bytes of a kernel stack.
    """
    type_ = want.lock.type
    if type_ == "percpu_rwsem":
        return _hotplugging(snapshot, want)
    if type_ == "wait_queue":
        return _committing(snapshot, want, stack_size)
    if type_ != "vma" and not (type_ == "rwsem" and want.readers):
        return frozenset()
    rows = [row for row in _faulting(snapshot) if row not in want.rows]
    place = _place(snapshot, want, stack_size) if rows else None
    if place is None:
        return frozenset()
    cases = read_cases(
        snapshot.context, snapshot.now, np.array(rows, np.intp), stack_size
    )
    return frozenset(
        case.row for case in cases if _holds(snapshot.context, case, place)
    )


def _hotplugging(snapshot: WaitSnapshot, want: Wanted) -> frozenset[int]:
    """Return the rows of tasks that take a CPU on- or offline.

    :return: Empty for a lock other than ``cpu_hotplug_lock``.
    """
    if want.lock.address != snapshot.context.layout.symbol("cpu_hotplug_lock"):
        return frozenset()
    rows = _within(snapshot, _HOTPLUG)
    return frozenset(row for row in rows if row not in want.rows)


def _committing(
    snapshot: WaitSnapshot, want: Wanted, stack_size: int
) -> frozenset[int]:
    """Return the rows of tasks that commit the btrfs transaction of some waiters.

    :return: Empty for other wait queues.
    """
    layout = snapshot.context.layout
    stacks = snapshot.now.stacks
    names = {name.partition(".")[0] for name in stacks.names(stacks[want.rows[0]])}
    if names.isdisjoint(_COMMIT_WAITS) or not layout.has(
        "btrfs_transaction", "commit_wait"
    ):
        return frozenset()
    offset = layout.offset("btrfs_transaction", "commit_wait")
    transaction = (want.lock.address or 0) - offset
    rows = [row for row in _within(snapshot, _COMMITS) if row not in want.rows]
    cases = read_cases(
        snapshot.context, snapshot.now, np.array(rows, np.intp), stack_size
    )
    return frozenset(case.row for case in cases if transaction in case.stack.pointers)


def readers_by_code(snapshot: WaitSnapshot, want: Wanted) -> frozenset[int]:
    """Return the rows of tasks in a function that calls srcu_read_lock() for a lock.

    The function may have left the critical section since, so this is as weak as an
    address on a stack.
    """
    if want.lock.type != "srcu" or not want.readers:
        return frozenset()
    stacks, address = snapshot.now.stacks, want.lock.address or 0
    chosen = [
        index
        for index, stack in enumerate(stacks.unique)
        if takes_variable(snapshot.context, stack, "srcu", address)
    ]
    found = np.flatnonzero(np.isin(stacks.index, chosen)).tolist()
    return frozenset(row for row in found if row not in want.rows)


def _place(snapshot: WaitSnapshot, want: Wanted, stack_size: int) -> LockPlace | None:
    """Return the structure of a lock that page faults take; else ``None``."""
    if want.lock.type == "vma":
        return LockPlace("vm_refcnt", "vm_area_struct", want.lock.address or 0)
    context, first = snapshot.context, np.array(want.rows[:1], np.intp)
    cases = [*read_cases(context, snapshot.now, first, stack_size)]
    try:
        place = find_lock_place(context, want.lock.type, want.lock.address or 0, cases)
    except LOST as error:
        context.losses.lose(
            Loss.LOCK_NAMES, f"cannot determine what a lock lies in: {error}"
        )
        return None
    known = place is not None and _LOCKS.get(place.name) == place.type_name
    return place if known else None


def _faulting(snapshot: WaitSnapshot) -> Iterator[int]:
    """Yield the rows of tasks in a page fault or in an access to another's memory."""
    yield from _within(snapshot, _FAULTS | _REMOTE)


def _within(snapshot: WaitSnapshot, wanted: frozenset[str]) -> list[int]:
    """Return the rows of tasks with any of some functions on their stacks."""
    stacks = snapshot.now.stacks
    chosen = [
        index
        for index, stack in enumerate(stacks.unique)
        if not wanted.isdisjoint(name.partition(".")[0] for name in stacks.names(stack))
    ]
    rows: list[int] = np.flatnonzero(np.isin(stacks.index, chosen)).tolist()
    return rows


def _holds(context: LockContext, case: BlockedTask, place: LockPlace) -> bool:
    """Return whether a task has the lock of a mapping or of an address space.

    :param place: Its member ``vm_refcnt``, ``vm_lock`` or ``mmap_lock``.
    """
    try:
        for remote in (False, True):
            found = case.stack.fault(case.mm, remote)
            if found is None:
                continue
            fault, members = found
            if place.type_name == "vm_area_struct":
                return fault.vma == place.address
            if members["vm_mm"] == place.address:
                return not fault.by_vma
        return place.type_name == "mm_struct" and _is_remote(case, place.address)
    except LOST as error:
        context.losses.lose(Loss.LOCKS, f"cannot determine who has a lock: {error}")
        return False


def _is_remote(case: BlockedTask, mm: int) -> bool:
    """Return whether a task reads or writes the memory of another process.

    It has that process's ``mmap_lock``: a task without it is among the lock's waiters.
    """
    return case.is_in(*_REMOTE) and case.mm != mm and mm in case.stack.pointers


# --- Facts that refute that a task owns a kernel lock.
#
# The owner field of a lock can be stale: a task that exits, or returns to user mode,
# with a mutex held leaves the address of its task_struct there, and a new task may have
# the same address. Three facts refute an owner:
#
# - The task began after the first waiter of the lock fell asleep. An unlock wakes the
#   first waiter (kernel/locking: __mutex_unlock_slowpath(), rwsem_wake()), so that the
#   lock has had one owner since then.
# - The task is where no kernel lock is held: in user mode, on its way there (stopped or
#   frozen), or in a system call that only waits for user space, such as pause().
# - The lock is in the data of a module, and no function on the task's stack is of any
#   module: a task that takes such a lock stays in a module's function until it unlocks.
#
# docs/how-it-works.md has the whole order of evidence.


KERNEL_LOCKS: frozenset[LockTypeName] = frozenset(
    {"mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex", "percpu_rwsem", "srcu"}
)
"""Types of locks that are released before a task leaves the kernel."""

_ONE_OWNER = frozenset({"mutex", "ww_mutex", "rwsem", "rt_mutex"})
"""Types whose first waiter is woken by each unlock."""

SLACK_NS = 100_000_000
"""Maximum difference of the clocks of two CPUs, or of those of starts and sleeps."""

# System calls in which a sleeping task holds no kernel lock, with their functions.
_RESTS = {
    "nanosleep()": "do_nanosleep hrtimer_nanosleep do_cpu_nanosleep",
    "pause()": """
        __do_sys_pause __x64_sys_pause __ia32_sys_pause __arm64_sys_pause sys_pause
    """,
    "sigsuspend()": "sigsuspend",
    "sigtimedwait()": "do_sigtimedwait",
    "poll()": "poll_schedule_timeout do_poll do_sys_poll",
    "select()": "do_select core_sys_select",
    "epoll_wait()": "ep_poll do_epoll_wait",
    "wait()": "do_wait",
    "a read of a pipe": "pipe_read anon_pipe_read",
    "a read of a terminal": "n_tty_read",
    "read of /dev/fuse": "fuse_dev_do_read",
    "the wait for a lock of a file": "locks_lock_inode_wait fcntl_setlk",
}
_BY_FUNCTION = {name: text for text, names in _RESTS.items() for name in names.split()}

_TTY = ("n_tty_", "tty_")
_TO_USER = (
    *("do_signal_stop", "do_freezer_trap", "cgroup_enter_frozen", "get_signal"),
    "ptrace_stop",
)


def against(snapshot: WaitSnapshot, want: Wanted, row: int) -> tuple[str, ...]:
    """Return the facts that refute that a task has a kernel lock, a few words each.

    :param row: Row of a task that the lock names, or that other evidence suggests.
    :return: Empty if nothing refutes it.
    """
    if want.lock.type not in KERNEL_LOCKS:
        return ()
    found = (
        _began_later(snapshot, want, row),
        _rests(snapshot, want, row),
        _is_elsewhere(snapshot, want, row),
    )
    return tuple(text for text in found if text is not None)


def _began_later(snapshot: WaitSnapshot, want: Wanted, row: int) -> str | None:
    """Return a text if a task is younger than the wait of the first waiter."""
    offset = snapshot.clocks.monotonic_offset_ns
    first = snapshot.rows.get(want.queue[0].task) if want.queue else None
    if want.lock.type not in _ONE_OWNER or first is None or offset is None:
        return None
    now = snapshot.now
    if first not in snapshot.blocked or now.age_bound[first] == AgeBound.UPPER:
        return None
    began_ns = int(snapshot.tasks["start_ns"][row]) + offset
    lived_ns = snapshot.clocks.local_ns - began_ns
    if lived_ns + SLACK_NS >= int(now.age_ns[first]):
        return None
    return f"it is younger than the wait of pid {snapshot.pids[first]}"


def _rests(snapshot: WaitSnapshot, want: Wanted, row: int) -> str | None:
    """Return a text if a task is where no kernel lock is held."""
    task_class = TaskClass(int(snapshot.now.classes[row]))
    if task_class is TaskClass.ZMB:
        return "it has exited"
    if task_class is TaskClass.USR:
        return "it is in user mode"
    if task_class is TaskClass.LCK:
        return "it sleeps in futex()"
    wait = snapshot.now.waits[int(snapshot.now.stacks.index[row])]
    names = [name.partition(".")[0] for name in snapshot.functions(row)]
    if task_class in (TaskClass.STP, TaskClass.TRC):
        return "it is returning to user mode" if _leaves(names) else None
    where = _BY_FUNCTION.get(wait.caller or "")
    if where is None or task_class in (TaskClass.LAT, TaskClass.WAK):
        return None
    if where == "a read of a terminal" and _is_of_tty(snapshot, want):
        return None
    return f"it sleeps in {where}"


def _is_elsewhere(snapshot: WaitSnapshot, want: Wanted, row: int) -> str | None:
    """Return a text if a module has the lock, but a task is in no module's function.

    Functions of all modules count: another module may take the lock as well.
    """
    text, stack = snapshot.context.text, snapshot.now.stacks[row]
    address = want.lock.address or 0
    module = text.module_name(address)
    if module is None or not stack.addresses:
        return None
    code = stack.instructions()
    if any(not text.in_kernel(each) and text.module(each) for each in code):
        return None
    return f"no function on its stack is of module {module}, which has the lock"


def _leaves(names: list[str]) -> bool:
    return not set(_TO_USER).isdisjoint(names)


def _is_of_tty(snapshot: WaitSnapshot, want: Wanted) -> bool:
    """Return whether a lock is one of a terminal, which its reader may hold."""
    return any(
        name.startswith(_TTY) for row in want.rows for name in snapshot.functions(row)
    )


# --- Gathers all evidence, which msatools.locks.graph.owners() weighs.


def find_owners(
    snapshot: WaitSnapshot,
    reader: Reader,
    stack_size: int,
    losses: LossLog,
    search: bool,
) -> None:
    """Set ``owners`` and ``refuted`` of each lock, by the lock itself and by stacks.

    :param stack_size: Bytes of a kernel stack.
    :param search: Whether all stacks are searched, not just those of known owners.
    """
    rows = snapshot.rows
    named = {
        lock: [
            (rows[holder.task], holder.confidence)
            for holder in want.holders
            # A lock may still point at a task that has exited.
            if holder.task in rows
        ]
        for lock, want in snapshot.wanted.items()
    }
    of_kernel = {
        lock: lock.address
        for lock in snapshot.wanted
        if lock.address is not None and lock.address >= KERNEL_HALF
    }
    unsure = any(lock.type in BY_STACK for lock in of_kernel)
    known = {row for lock in of_kernel for row, _ in named[lock]}
    searched = np.arange(len(snapshot.tasks)) if search and unsure else _array(known)
    seen = seen_on_stacks(
        reader, snapshot.tasks, searched, set(of_kernel.values()), stack_size, losses
    )
    for lock, want in snapshot.wanted.items():
        queued = {rows[each.task] for each in want.queue or () if each.task in rows}
        found = owners(
            lock,
            named[lock],
            want.readers,
            _seen(snapshot, want, seen, search) if lock in of_kernel else (),
            queued.union(want.rows),
            searched=search,
            implied=readers(snapshot, want, stack_size) if search else (),
            against=partial(against, snapshot, want),
            handles=partial(_takes, snapshot, lock.type),
        )
        want.refuted = tuple(own for own in found if own.against)
        want.owners = tuple(own for own in found if not own.against)
        want.owners += tuple(_servers(snapshot, want))


def _seen(
    snapshot: WaitSnapshot,
    want: Wanted,
    seen: Mapping[int, Collection[int]],
    search: bool,
) -> Collection[int]:
    """Return the rows of tasks with a lock's address on the stack, or in code there."""
    found = seen.get(want.lock.address or 0, ())
    by_code = readers_by_code(snapshot, want) if search else frozenset()
    return {*found, *by_code} if by_code else found


def _takes(snapshot: WaitSnapshot, type_: LockTypeName, row: int) -> bool:
    """Return whether a task is in a function that takes locks of a type."""
    stack = snapshot.now.stacks[row]
    # The stack of a running task was not unwound.
    return not stack.addresses or takes(snapshot.context, stack, type_)


def _servers(snapshot: WaitSnapshot, want: Wanted) -> Iterator[Owned]:
    """Yield the servers of a lock's waiters as its owners, if they are blocked.

    Other servers are reported with the wait itself.
    """
    known: set[int] = {own.row for own in want.owners}
    for row in want.rows:
        external = snapshot.blocked[row].external
        for server in external.servers if external else ():
            owner = snapshot.rows.get(server.task)
            if owner in snapshot.blocked and owner not in known and owner != row:
                known.add(owner)
                yield Owned(owner, server.confidence, seen=False, firm=True)


def _array(rows: set[int]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.array(sorted(rows), np.intp)


def missing_owners(snapshot: WaitSnapshot) -> Sequence[int]:
    """Return the addresses of recorded owners that the table of tasks lacks."""
    rows = snapshot.rows
    holders = [holder for want in snapshot.wanted.values() for holder in want.holders]
    return list(dict.fromkeys(h.task for h in holders if h.task not in rows))
