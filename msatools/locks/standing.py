# SPDX-License-Identifier: LGPL-2.1-or-later

"""
What speaks against a task that is named as the owner of a kernel lock.

A lock's own word can be wrong: a task that exits, or goes back to user mode, with a
mutex held leaves its ``task_struct`` in the word, which the next task may have by now.
Three things refute it:

- The task began after the first waiter of the lock fell asleep. An unlock wakes the
  first waiter (kernel/locking: __mutex_unlock_slowpath(), rwsem_wake()), so that the
  lock has had one owner since then.
- The task rests where no kernel lock is held: in user mode, on its way there (stopped
  or frozen), or in a system call that waits for the user's sake alone, such as pause().
- The lock is in the data of a module, and none of the functions that the task is in is
  of any module: who takes such a lock is in one until it unlocks it.

docs/how-it-works.md has the whole order of evidence.
"""

from msatools.locks.base.lock import LockTypeName
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.tasks.classes import TaskClass
from msatools.tasks.task_state import AgeBound

KERNEL_LOCKS: frozenset[LockTypeName] = frozenset(
    {"mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex", "percpu_rwsem", "srcu"}
)
"""Types of locks that are released before a task leaves the kernel."""

_ONE_OWNER = frozenset({"mutex", "ww_mutex", "rwsem", "rt_mutex"})
"""Types whose first waiter is woken by each unlock."""

SLACK_NS = 100_000_000
"""How much the clocks of CPUs, and those of starts and of sleeps, may differ."""

# Functions in which a task sleeps for the user alone. Their callers hold no lock, and
# they have released those that they had.
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
    """Return what refutes that a task has a kernel lock, each in a few words.

    :param row: A task that the lock names, or that something else speaks for.
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
    """Return that a task is younger than the wait of the first waiter."""
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
    """Return where a task is, if no kernel lock is held there."""
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
    """Return that a task is in no function of a module, if a module's lock is wanted.

    A lock of one module may be taken by the functions of another that it works with.
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
