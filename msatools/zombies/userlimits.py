# SPDX-License-Identifier: LGPL-2.1-or-later

"""RLIMIT_NPROC: the number of processes of users, and their limits.

kernel/ucount.c, kernel/cred.c: a task counts against its real user in its user
namespace, against the creator of that namespace, and so on. Each process has its own
limit for its user; each user namespace has one for its creator.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, read_structs
from msatools.selfdesc.find import find_constant
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskTable
from msatools.zombies.model import Limit

_RLIMIT_NPROC = 6
"""include/uapi/asm-generic/resource.h, as on x86 and arm64."""

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
    Return a limit that is not known to be the first to be hit.

    :param unusable: How many of the free ones the kernel does not give out.
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
    """Return which tasks of a running kernel still exist.

    The memory of others may have been reused.
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
