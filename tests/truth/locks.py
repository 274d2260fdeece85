# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-locks: the locks, owners and waiters that a guest's workload made."""

from collections.abc import Callable, Iterator
from typing import Any

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures

Truth = dict[str, Any]
"""A lock as the guest recorded it."""

EXCLUSIVE = ("mutex", "ww_mutex", "rt_mutex")

IN_FILES = ("shared-file", "shared-memory")
SHARED = (*IN_FILES, "stopped-pi", "fuse-mutex")
"""Futexes that are identified by file and offset, not by an address."""


def in_report(figure: Callable[[Any], Any]) -> Callable[[Any], Figures]:
    """Return a function that returns a figure of the lock that each task waits for.

    The key is the task's PID; if it waits for any of several locks, PID and address.
    """

    def of(report: Any) -> Figures:
        locks = {lock["id"]: lock for lock in report["locks"]}
        figures: dict[Any, Any] = {}
        for wait in report["waits"]:
            for one in wait.get("any_of") or [wait["lock"]]:
                if one is not None:
                    found = figure(locks[one])
                    figures[wait["pid"]] = found
                    figures[wait["pid"], locks[one]["address"]] = found
        return figures

    return of


def in_guest(
    figure: Callable[[Truth], Any], applies: Callable[[Truth], bool] = bool
) -> Callable[[Run], Figures]:
    """Return a function that returns the same figure as the guest recorded it."""

    def of(run: Run) -> Figures:
        figures = {key: figure(lock) for lock, key in waits(run) if applies(lock)}
        if not figures:
            raise LookupError("no such lock")
        return figures

    return of


def waits(run: Run) -> Iterator[tuple[Truth, Any]]:
    """Yield each lock with the key of each of its waiters, as in the report."""
    locks: list[Truth] = run.workload["locks"]
    pids = [one["pid"] for lock in locks for one in lock["waiters"]]
    for lock in locks:
        for one in lock["waiters"]:
            several = pids.count(one["pid"]) > 1
            # A server that is blocked itself must be woken before it can end a wait.
            blocks = {"server_is_blocked": lock.get("fuse_server") in pids}
            key = (one["pid"], lock["address"]) if several else one["pid"]
            yield lock | blocks, key


def type_of(lock: Truth) -> str:
    return "spinlock" if lock["type"] == "rwlock" else str(lock["type"])


def waiters(lock: Truth) -> list[int]:
    """Return the waiters in queue order; CPUs that spin have none."""
    pids = [one if isinstance(one, int) else one["pid"] for one in lock["waiters"]]
    return sorted(pids) if type_of(lock) == "spinlock" else pids


def owners(lock: Truth) -> dict[int, str]:
    """Return the owners and the confidence of each."""
    pids = [one["pid"] for one in lock["owners"]]
    kind = type_of(lock)
    if lock["name"] == "bit-lock":
        # The kernel does not record the owner of a bit lock.
        return {}
    if kind == "folio" and lock["server_is_blocked"]:
        return {lock["fuse_server"]: "likely"}
    if lock.get("word_holds_tid"):
        # The word is in the thread's robust list: the kernel clears it at exit.
        return dict.fromkeys(pids, "exact")
    if "readers" not in lock:
        return {one["pid"]: one["confidence"] for one in lock["owners"]}
    if kind in (*EXCLUSIVE, "completion") or (kind == "rwsem" and not lock["readers"]):
        return dict.fromkeys(pids, "exact")
    # A rwsem records its last reader; the others are found by their stacks.
    last = lock.get("last_reader") if kind == "rwsem" else None
    return {pid: "likely" if pid == last else "evidence" for pid in pids}


def known_owners(run: Run) -> Figures:
    """Return the owners whose lock is in the dump: makedumpfile leaves out pages of
    files, and with them a futex that is in one."""
    saved = "vmcore" in run.formats()
    of = in_guest(owners, lambda lock: not (saved and lock["name"] in IN_FILES))
    return of(run)


def described(lock: Truth) -> dict[str, Any]:
    """Return a lock's description as it must be in the report."""
    path, inode, kind = lock.get("path"), lock.get("inode"), lock["type"]
    name = lock.get("lock_name")
    if lock.get("symbol"):
        return {"name": lock["symbol"]}
    if lock.get("cache"):
        offset = int(lock["address"], 16) - int(lock["object"], 16)
        return {"name": f"{lock['cache']}+{offset:#x}", "cache": lock["cache"]}
    if kind == "wait_queue" and "mount" in lock:
        # The guest recorded the request's file; the report has its file system.
        mount = lock["mount"]
        return {"name": f"FUSE request of {mount}", "path": mount}
    if kind == "percpu_rwsem" and path:
        level = "page fault" if "fault" in lock["name"] else "write"
        return {"name": f"frozen {path} ({level})", "path": path}
    if name == "mmap_lock":
        return {"pid": lock["pid"]}
    if name == "pipe":
        return {"name": f"pipe:[{inode}]", "inode": inode}
    if name and path:
        inodes = {} if inode is None else {"inode": inode}
        return {"name": f"{name} of {path}", "path": path} | inodes
    if name:
        return {"name": name}
    if kind == "folio" and path and path.startswith("/dev/"):
        return {"name": f"folio 0 of {path.removeprefix('/dev/')}"}
    return {"path": path, "inode": inode} if path else {}


def description(key: str) -> Fact:
    def has(lock: Truth) -> bool:
        return key in described(lock)

    return Fact(
        name=f"{key} of the lock",
        reported=in_report(lambda lock: lock.get(key)),
        recorded=in_guest(lambda lock: described(lock)[key], has),
    )


def modes(run: Run) -> Figures:
    return {
        one["pid"]: one["mode"]
        for lock in run.workload["locks"]
        for one in lock["waiters"]
        if one["mode"] is not None
    }


def deadlocks(run: Run) -> Figures:
    """Return all cycles and whether each is exact."""
    locks: list[Truth] = run.workload["locks"]
    made = run.workload.get("deadlocks")
    if made is None:
        possible = [lock for lock in locks if lock["deadlock"] == "possible"]
        pids = {one["pid"] for lock in possible for one in lock["waiters"]}
        made = [{"exact": False, "pids": pids}]
    cycles = [(cycle["exact"], sorted(cycle["pids"])) for cycle in made]
    return {"all": sorted(cycles)}


def reported_deadlocks(report: Any) -> Figures:
    cycles = [
        (cycle["confidence"] == "exact", sorted(cycle["pids"]))
        for cycle in report["deadlocks"]
    ]
    return {"all": sorted(cycles)}


FACTS = (
    Fact(
        name="type of the lock",
        reported=in_report(lambda lock: lock["type"]),
        recorded=in_guest(type_of),
    ),
    Fact(
        name="address of the lock",
        reported=in_report(lambda lock: lock["address"]),
        recorded=in_guest(
            # A condition variable is identified by its start, not by its futex word.
            lambda lock: lock.get("condition") or lock["address"],
            lambda lock: lock["address"] is not None and lock["name"] not in SHARED,
        ),
    ),
    Fact(
        name="waiters in order",
        reported=in_report(waiters),
        recorded=in_guest(waiters),
    ),
    Fact(
        name="mode",
        reported=lambda report: {one["pid"]: one["mode"] for one in report["waits"]},
        recorded=modes,
    ),
    Fact(
        name="owners",
        reported=in_report(
            lambda lock: {one["pid"]: one["confidence"] for one in lock["owners"]}
        ),
        recorded=known_owners,
    ),
    Fact(
        name="readers",
        reported=in_report(lambda lock: lock.get("readers")),
        recorded=in_guest(
            lambda lock: lock["readers"],
            lambda lock: "readers" in lock and lock["type"] == "rwsem",
        ),
    ),
    *map(description, ("name", "path", "inode", "pid", "cache")),
    Fact(name="deadlocks", reported=reported_deadlocks, recorded=deadlocks),
)
