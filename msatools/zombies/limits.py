# SPDX-License-Identifier: LGPL-2.1-or-later

"""The limits that zombies count against, and the memory that they hold."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.files import MAX_DEPTH, cgroup_paths
from msatools.kernel.pids import (
    MAX_LEVEL,
    PID_MAX_LIMIT,
    RESERVED_PIDS,
    innermost_numbers,
    read_pid_namespaces,
    reserved_taken,
)
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Booleans, Members, read_structs
from msatools.locks.places import Slabs
from msatools.locks.struct_reader import Layout
from msatools.selfdesc.find import find_constant, find_variable
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows
from msatools.zombies.model import HeldMemory, Limit

# --- RLIMIT_NPROC: the number of processes of users, and their limits.
#
# kernel/ucount.c, kernel/cred.c: a task counts against its real user in its user
# namespace, against the creator of that namespace, and so on. Each process has its own
# limit for its user; each user namespace has one for its creator.


_RLIMIT_NPROC = 6
"""Index in ``rlim``, as on x86 and arm64 (include/uapi/asm-generic/resource.h)."""

_MAX_LEVEL = 34
"""Maximum depth of user namespaces: create_user_ns() allows 33."""

_LONG_MAX = (1 << 63) - 1

_CRED = {
    # Linux kernel commit 905ae01c4ae2 ("Add a reference to ucounts for each cred") (in
    # v5.14)
    "account": ("ucounts", "user"),
    "counts": ("ucounts",),
}
_SIGNAL = {"most": (f"rlim[{_RLIMIT_NPROC}].rlim_cur",)}
_SAME = {
    "pid": ("pid",),
    "cred": ("real_cred",),
    "signal": ("signal",),
}
"""Members that identify a task when its limits have been read."""


class _Account(Struct):
    """The count of a user's processes: a ``struct ucounts`` or ``user_struct``."""

    uid: int
    used: int
    space: int
    """Address of the user namespace; 0 if users are not counted by namespace."""

    dead: int = 0
    most: int | None = None
    """The lowest limit; ``None`` if there is none."""

    def lower(self, most: int) -> None:
        """Lower the limit, if *most* is lower."""
        self.most = most if self.most is None else min(self.most, most)


def user_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> Iterator[Limit]:
    """Yield the number of processes of each user with a zombie, and its limit.

    The idle tasks, one a CPU, count for user 0, who has no limit (copy_process()). If a
    user's processes have different limits, the lowest is reported, of the living
    processes if there are any. The limit does not hold for processes with CAP_SYS_ADMIN
    or CAP_SYS_RESOURCE.
    """
    creds = read_structs(
        reader, "struct cred", _CRED, tasks["cred"].astype(np.uint64), losses
    )
    account_of: Addresses = creds["account"].astype(np.uint64)
    dead = Counter(account_of[zombies].tolist())
    dead.pop(0, None)
    try:
        if creds.has("counts"):
            accounts = _ucounts(reader, dead, losses)
        else:
            accounts = _user_structs(reader, dead, losses)
    except MissingError as error:
        losses.note(
            "no-user-counts", f"the number of processes by user is unknown: {error}"
        )
        return
    _limit_by_processes(reader, tasks, zombies, account_of, accounts, losses)
    spaces = _inodes(reader, accounts, losses)
    for account in accounts.values():
        inode = spaces.get(account.space)
        where = "" if inode is None else f" of user_ns {inode}"
        endless = not account.uid or account.most is None
        yield make_limit(
            "RLIMIT_NPROC",
            f"uid {account.uid}{where}",
            max(account.used, 0),
            None if endless else account.most,
            account.dead,
        )


def make_limit(
    name: str,
    scope: str,
    used: int | None,
    most: int | None,
    zombies: int,
    unusable: int = 0,
) -> Limit:
    """
    Return a limit; ``first`` is false until the limits are sorted.

    :param unusable: Number of free ones that the kernel does not allocate again.
    """
    left = None
    if used is not None and most is not None:
        left = max(most - used - unusable, 0)
    return Limit(
        name=name,
        scope=scope,
        used=used,
        max=most,
        left=left,
        zombies=zombies,
        first=False,
    )


def _ucounts(
    reader: Reader, dead: Counter[int], losses: LossLog
) -> dict[int, _Account]:
    """Read the counts of users, and of the creators of their namespaces."""
    number = find_constant(reader.prog, "UCOUNT_RLIMIT_NPROC").value_()
    counts = {
        # Linux kernel commit de399236e240 ("ucounts: Split rlimit and ucount values and
        # max values") (in v5.19); before, all were in one array.
        "used": (f"rlimit[{number}].counter", f"ucount[{number}].counter"),
        "uid": ("uid.val",),
        "space": ("ns",),
    }
    bounds = {
        "above": ("ucounts",),
        "most": (f"rlimit_max[{number}]", f"ucount_max[{number}]"),
    }
    found: dict[int, _Account] = {}
    level = dict(dead)
    limits: dict[int, int] = {}
    for _ in range(_MAX_LEVEL):
        if not level:
            break
        addresses = np.array(sorted(level.keys() - found.keys()), np.uint64)
        read = read_structs(reader, "struct ucounts", counts, addresses, losses)
        for row in np.flatnonzero(read.readable).tolist():
            found[int(addresses[row])] = _account(read.columns, row)
        for address, count in level.items():
            if address in found:
                found[address].dead += count
                if address in limits:
                    found[address].lower(limits[address])
        spaces = np.array([found[a].space if a in found else 0 for a in level], "u8")
        made = read_structs(
            reader, "struct user_namespace", bounds, spaces.astype(np.uint64), losses
        )
        above: Counter[int] = Counter()
        limits = {}
        for row, count in enumerate(level.values()):
            maker = int(made["above"][row])
            if made.readable[row] and maker:
                above[maker] += count
                most = int(made["most"][row])
                limits[maker] = min(most, limits.get(maker, most))
        level = above
    return found


def _account(columns: Any, row: int) -> _Account:
    uid, used, space = (int(columns[name][row]) for name in ("uid", "used", "space"))
    return _Account(uid, used, space)


def _user_structs(
    reader: Reader, dead: Counter[int], losses: LossLog
) -> dict[int, _Account]:
    """Read users' counts as they were before Linux kernel commit 21d1c5e386bc
    ("Reimplement RLIMIT_NPROC on top of ucounts") (in v5.14)."""
    members = {"used": ("processes.counter",), "uid": ("uid.val",)}
    users = np.fromiter(dead, np.uint64, len(dead))
    read = read_structs(reader, "struct user_struct", members, users, losses)
    if len(users) and not read.has("used"):
        raise MissingError("struct user_struct has no processes")
    return {
        int(users[row]): _Account(
            int(read["uid"][row]), int(read["used"][row]), 0, dead[int(users[row])]
        )
        for row in np.flatnonzero(read.readable).tolist()
    }


def _limit_by_processes(
    reader: Reader,
    tasks: TaskTable,
    zombies: Rows,
    account_of: Addresses,
    accounts: dict[int, _Account],
    losses: LossLog,
) -> None:
    """Lower each account's limit to the lowest of its processes, living ones if any."""
    alive = tasks["exit_state"] == 0
    wanted = [address for address, account in accounts.items() if account.uid]
    living = np.flatnonzero(alive & np.isin(account_of, _words(wanted)))
    lowest = _lowest(reader, tasks, living, account_of, losses)
    without = [address for address in wanted if address not in lowest]
    dead = zombies[np.isin(account_of[zombies], _words(without))]
    lowest |= _lowest(reader, tasks, dead, account_of, losses)
    for address, most in lowest.items():
        if most <= _LONG_MAX:
            accounts[address].lower(most)
    for account in accounts.values():
        if account.most == _LONG_MAX:
            account.most = None


def _lowest(
    reader: Reader,
    tasks: TaskTable,
    rows: Rows,
    account_of: Addresses,
    losses: LossLog,
) -> dict[int, int]:
    """Find the lowest limit by account among the processes of some tasks."""
    signals = tasks["signal"][rows].astype(np.uint64)
    read = read_structs(reader, "struct signal_struct", _SIGNAL, signals, losses)
    known = read.readable & _are_there(reader, tasks, rows)
    owners, index = np.unique(account_of[rows][known], return_inverse=True)
    lowest = np.full(len(owners), ~np.uint64(0))
    np.minimum.at(lowest, index, read["most"][known].astype(np.uint64))
    return dict(zip(owners.tolist(), lowest.tolist(), strict=True))


def _are_there(reader: Reader, tasks: TaskTable, rows: Rows) -> Booleans:
    """Return for each row whether its task still exists, if the kernel is running.

    The memory of tasks that have ended may have been reused.
    """
    if not reader.is_live:
        return np.ones(len(rows), np.bool_)
    addresses = tasks["address"][rows].astype(np.uint64)
    known = LossLog()  # a task that has ended is not counted as unreadable
    now = read_structs(reader, "struct task_struct", _SAME, addresses, known)
    same: Booleans = now.readable
    for name in _SAME:
        same = same & (now[name] == tasks[name][rows])
    return same


def _words(addresses: list[int]) -> npt.NDArray[np.uint64]:
    return np.array(addresses, np.uint64)


def _inodes(
    reader: Reader, accounts: dict[int, _Account], losses: LossLog
) -> dict[int, int]:
    """Return the inode numbers of the user namespaces, but for the initial one."""
    addresses = _words(sorted({account.space for account in accounts.values()}))
    read = read_structs(
        reader,
        "struct user_namespace",
        {"inode": ("ns.inum",), "parent": ("parent",)},
        addresses,
        losses,
    )
    nested = read.readable & (read["parent"] != 0)
    return {
        int(addresses[row]): int(read["inode"][row])
        for row in np.flatnonzero(nested).tolist()
    }


# --- The limits that zombies count against, and how near each is.
#
# kernel/fork.c, kernel/pid.c, kernel/cgroup/pids.c, kernel/ucount.c: a zombie counts as
# a thread of the system, has a PID in its PID namespace and in each above, is charged
# to its control group and to each above, and counts as a process of its user.


_GROUP = {
    "used": ("counter.counter",),
    "most": ("limit.counter", "limit"),
    "cgroup": ("css.cgroup",),
    "parent": ("css.parent",),
}


def collect_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> tuple[Limit, ...]:
    """Return all limits that some dead tasks count against, the nearest first.

    :param tasks: All tasks.
    :param zombies: Rows of the dead tasks in the table.
    """
    return _nearest_first(
        [
            _system_limit(reader.prog, len(zombies), losses),
            *_namespace_limits(reader, tasks, zombies, losses),
            *_group_limits(reader, tasks, zombies, losses),
            *user_limits(reader, tasks, zombies, losses),
        ]
    )


def left(
    before: Iterable[Limit], after: Iterable[Limit], interval_ns: int
) -> tuple[Limit, ...]:
    """Set the time until each limit is hit, at the rate of an interval. Pure.

    It is ``None`` for limits whose use does not grow, and for new ones.

    :return: The limits of *after*, the first to be hit first.
    """
    known = {(limit.name, limit.scope): limit for limit in before}
    limits = []
    for limit in after:
        earlier = known.get((limit.name, limit.scope))
        left_ns = None if earlier is None else _left_ns(earlier, limit, interval_ns)
        limits.append(replace(limit, left_ns=left_ns))
    return _nearest_first(limits)


def _left_ns(before: Limit, after: Limit, interval_ns: int) -> int | None:
    room = after.left
    if room is None or after.used is None or before.used is None:
        return None
    if not room:
        return 0
    grown = after.used - before.used
    if grown <= 0 or interval_ns <= 0:
        return None
    return room * interval_ns // grown


def _nearest_first(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Sort limits by the time until they are hit, then by what is left."""

    def key(limit: Limit) -> tuple[bool, int, bool, int, str, str]:
        room = limit.left
        soon = limit.left_ns
        far = soon is None, soon or 0, room is None, room or 0
        return *far, limit.name, limit.scope

    ordered = sorted(limits, key=key)
    return tuple(
        replace(limit, first=not number and limit.left is not None)
        for number, limit in enumerate(ordered)
    )


def _system_limit(prog: drgn.Program, zombies: int, losses: LossLog) -> Limit:
    used = _variable(prog, "nr_threads", losses)
    most = _variable(prog, "max_threads", losses)
    return make_limit("threads-max", "system", used, most, zombies)


def _variable(prog: drgn.Program, name: str, losses: LossLog) -> int | None:
    try:
        value: int = find_variable(prog, name).value_()
    except LOST as error:
        losses.lose(Loss.LIMITS, f"{name} cannot be read: {error}", about=name)
        return None
    return value


def _namespace_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> Iterator[Limit]:
    """Yield the limits of the PIDs in each PID namespace, and in those above.

    All PIDs are below ``pid_max``. Once the allocation has wrapped around, only PIDs
    from :data:`RESERVED_PIDS` on are available (alloc_pid()).
    """
    pids = tasks["thread_pid"][zombies].astype(np.uint64)
    innermost, _ = innermost_numbers(reader, pids, losses)
    spaces = read_pid_namespaces(reader, innermost, losses)
    dead: Counter[int] = Counter()
    for address, count in _counted(innermost):
        for _ in range(MAX_LEVEL + 1):
            if address not in spaces:
                break
            dead[address] += count
            address = spaces[address].parent
    for address, space in spaces.items():
        scope, used, most = f"pid_ns {space.inode}", space.taken, space.most
        low = reserved_taken(reader, space, losses)
        unusable = 0 if low is None else RESERVED_PIDS - low
        yield make_limit("pid_max", scope, used, most, dead[address], unusable)


def _counted(addresses: Addresses) -> Iterator[tuple[int, int]]:
    """Yield each different address but NULL, and its count."""
    unique, counts = np.unique(addresses, return_counts=True)
    for address, count in zip(unique.tolist(), counts.tolist(), strict=True):
        if address:
            yield address, count


def _group_limits(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> Iterator[Limit]:
    """Yield the limits of control groups and of those above, but for the root group,
    which has no limit."""
    try:
        number = find_constant(reader.prog, "pids_cgrp_id").value_()
    except MissingError:
        # CONFIG_CGROUP_PIDS
        text = "this kernel has no limits on the tasks of control groups"
        losses.note("no-pids-controller", text)
        return
    of_task = tasks["cgroups"][zombies].astype(np.uint64)
    states: Members = {"state": (f"subsys[{number}]",)}
    sets = read_structs(reader, "struct css_set", states, of_task, losses)
    dead = Counter(dict(_counted(sets["state"].astype(np.uint64))))
    type_ = "struct pids_cgroup"
    found: dict[int, tuple[int, int, int]] = {}
    level = np.fromiter(dead, np.uint64, len(dead))
    parents: dict[int, int] = {}
    for _ in range(MAX_DEPTH):
        known = np.array([0, *parents], np.uint64)
        level = level[~np.isin(level, known, assume_unique=True)]
        if not len(level):
            break
        read = read_structs(reader, type_, _GROUP, level, losses)
        for row in np.flatnonzero(read.readable).tolist():
            address = int(level[row])
            parents[address] = int(read["parent"][row])
            columns = ("used", "most", "cgroup")
            used, most, cgroup = (int(read[name][row]) for name in columns)
            found[address] = used, most, cgroup
        level = distinct(read["parent"].astype(np.uint64))
    below = _with_below(dead, parents)
    groups = [address for address, parent in parents.items() if parent]
    cgroups = np.array([found[address][2] for address in groups], np.uint64)
    paths = cgroup_paths(reader, cgroups, losses)
    for address, path in zip(groups, paths, strict=True):
        used, most, _ = found[address]
        # PIDS_MAX means no limit; it is PID_MAX_LIMIT + 1.
        limit = most if most <= PID_MAX_LIMIT else None
        scope = path or f"control group {address:#x}"
        yield make_limit("pids.max", scope, used, limit, below[address])


def _with_below(own: Counter[int], parents: dict[int, int]) -> Counter[int]:
    """Return the count of each group, with those of all groups below it."""
    total: Counter[int] = Counter()
    for address, count in own.items():
        for _ in range(MAX_DEPTH):
            if address not in parents:
                break
            total[address] += count
            address = parents[address]
    return total


# --- The memory that zombies hold until they are reaped.
#
# kernel/exit.c, kernel/fork.c: address space, files and stack are freed at exit, the
# rest by release_task() and RCU callbacks after it.


def held_memory(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> HeldMemory:
    """Return the memory that dead tasks hold, with the padding of the slab allocator.

    Objects shared with living tasks are not counted. Each size is read from one object,
    as all objects of a cache have the same size. Unknown sizes are left out, and noted.

    :param tasks: All tasks.
    :param zombies: Rows of the dead tasks in the table.
    """
    sizes = _Sizes(reader, losses)
    alone = _Alone(tasks, zombies)
    dead = tasks["address"][zombies].astype(np.uint64)
    processes, creds, pids = map(alone, ("signal", "cred", "thread_pid"))
    found = [
        ("task_struct", sizes.of("task_struct", dead), len(dead)),
        ("signal_struct", sizes.of("signal_struct", processes), len(processes)),
        # Rare clones that share a sighand_struct are counted as if they did not.
        (
            "sighand_struct",
            sizes.member("task_struct", "sighand", _of(tasks, zombies, processes)),
            len(processes),
        ),
        ("cred", sizes.of("cred", creds), len(creds)),
        # Data of security modules.
        ("task security", sizes.member("task_struct", "security", dead), len(dead)),
        ("cred security", sizes.member("cred", "security", creds), len(creds)),
    ]
    if tasks.has("delays"):
        delays = alone("delays")
        found.append(("task_delay_info", sizes.of("delays", delays), len(delays)))
    size, all_pids = _pids(reader, sizes, pids, losses)
    each = {name: size for name, size, _ in found if size}
    if size:
        each["pid"] = size
    return HeldMemory(
        bytes=sum(size * count for _, size, count in found) + all_pids, each_bytes=each
    )


class _Alone:
    """Objects of dead tasks that are not shared with living ones."""

    def __init__(self, tasks: TaskTable, zombies: Rows) -> None:
        self._tasks = tasks
        self._dead = zombies
        living = np.ones(len(tasks), np.bool_)
        living[zombies] = False
        self._living = living

    def __call__(self, column: str) -> Addresses:
        """Return the distinct addresses of such objects in a column of the table."""
        addresses = self._tasks[column]
        dead = distinct(addresses[self._dead])
        living = distinct(addresses[self._living])
        alone = dead[(dead != 0) & ~np.isin(dead, living, assume_unique=True)]
        found: Addresses = alone.astype(np.uint64)
        return found


class _Sizes:
    """Finds the sizes of slab objects by their addresses."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._layout = Layout(reader)
        self._slabs = Slabs(self._layout)
        self._losses = losses

    def of(self, name: str, addresses: Addresses) -> int:
        """Return the size of objects, read from the first; 0 if unknown."""
        if not len(addresses):
            return 0
        try:
            found = self._slabs.find(int(addresses[0]))
        except LOST as error:
            self._losses.lose(Loss.SIZES, f"cannot read a size: {error}", about=name)
            return 0
        return 0 if found is None else found.size

    def member(self, type_: str, member: str, owners: Addresses) -> int:
        """Return the size of the object that a member points to; 0 if not found."""
        if not len(owners) or not self._layout.has(type_, member):
            return 0
        try:
            pointer = self._layout.member(int(owners[0]), type_, member)
        except UNREADABLE as error:
            self._losses.lose(Loss.SIZES, f"cannot read a size: {error}", about=member)
            return 0
        return self.of(member, np.array([pointer], np.uint64))


def _of(tasks: TaskTable, zombies: Rows, processes: Addresses) -> Addresses:
    """Return the addresses of the dead tasks of the first process in *processes*."""
    rows = zombies[np.isin(tasks["signal"][zombies], processes[:1])]
    addresses: Addresses = tasks["address"][rows].astype(np.uint64)
    return addresses


def _pids(
    reader: Reader, sizes: _Sizes, pids: Addresses, losses: LossLog
) -> tuple[int, int]:
    """Return the most common size of a ``struct pid``, and the sum of all sizes.

    A ``struct pid`` has a number per level of PID namespaces; each level has a cache.
    """
    spaces, _ = innermost_numbers(reader, pids, losses)
    unique, first, counts = np.unique(spaces, return_index=True, return_counts=True)
    bytes_of: Counter[int] = Counter()
    for space, index, count in zip(
        unique.tolist(), first.tolist(), counts.tolist(), strict=True
    ):
        if space:
            size = sizes.of("pid", pids[index : index + 1])
            bytes_of[size] += size * count
    if not bytes_of:
        return 0, 0
    most, _ = bytes_of.most_common(1)[0]
    return most, sum(bytes_of.values())
