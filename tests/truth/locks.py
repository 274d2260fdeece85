# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-locks reports, and who took which lock and waits for it in the guests."""

from collections.abc import Callable, Iterator
from typing import Any

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures

Truth = dict[str, Any]
"""A lock as the guest knows it."""

EXCLUSIVE = ("mutex", "ww_mutex", "rt_mutex")

IN_FILES = ("shared-file", "shared-memory")
SHARED = (*IN_FILES, "stopped-pi", "fuse-mutex")
"""Futexes that are known by where they are in a file, not by an address."""


def in_report(figure: Callable[[Any], Any]) -> Callable[[Any], Figures]:
    """Take a figure of the lock that each task waits for.

    By the task's PID; of one that waits for any of several locks, by their address too.
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
    """Take a figure of the lock that each task waits for, where the guest knows it."""

    def of(run: Run) -> Figures:
        figures = {key: figure(lock) for lock, key in waits(run) if applies(lock)}
        if not figures:
            raise LookupError("no such lock")
        return figures

    return of


def waits(run: Run) -> Iterator[tuple[Truth, Any]]:
    """Iterate over the locks and those who wait for each, keyed as in the report."""
    locks: list[Truth] = run.workload["locks"]
    pids = [one["pid"] for lock in locks for one in lock["waiters"]]
    for lock in locks:
        for one in lock["waiters"]:
            several = pids.count(one["pid"]) > 1
            # A server that is blocked itself has to run before it can end a wait.
            blocks = {"server_is_blocked": lock.get("fuse_server") in pids}
            key = (one["pid"], lock["address"]) if several else one["pid"]
            yield lock | blocks, key


def type_of(lock: Truth) -> str:
    return "spinlock" if lock["type"] == "rwlock" else str(lock["type"])


def waiters(lock: Truth) -> list[int]:
    """List the waiters in their order, which CPUs that spin do not have."""
    pids = [one if isinstance(one, int) else one["pid"] for one in lock["waiters"]]
    return sorted(pids) if type_of(lock) == "spinlock" else pids


def owners(lock: Truth) -> dict[int, str]:
    """Return the owners, and how sure each can be."""
    pids = [one["pid"] for one in lock["owners"]]
    kind = type_of(lock)
    if lock["name"] == "bit-lock":
        # Who has set a bit is known to nobody but the guest.
        return {}
    if kind == "folio" and lock["server_is_blocked"]:
        return {lock["fuse_server"]: "likely"}
    if lock.get("word_holds_tid"):
        # The kernel knows, too: it clears the word when the thread ends.
        return dict.fromkeys(pids, "exact")
    if "readers" not in lock:
        return {one["pid"]: one["confidence"] for one in lock["owners"]}
    if kind in (*EXCLUSIVE, "completion") or (kind == "rwsem" and not lock["readers"]):
        return dict.fromkeys(pids, "exact")
    # A rwsem names the last that came to read; the others are found by their stacks.
    last = lock.get("last_reader") if kind == "rwsem" else None
    return {pid: "likely" if pid == last else "evidence" for pid in pids}


def known_owners(run: Run) -> Figures:
    """Return the owners whose lock is in the dump: makedumpfile leaves out pages of
    files, and with them a futex that is in one."""
    saved = "vmcore" in run.formats()
    of = in_guest(owners, lambda lock: not (saved and lock["name"] in IN_FILES))
    return of(run)


def described(lock: Truth) -> dict[str, Any]:
    """Say of a lock what the guest knows, as the report does."""
    path, inode, kind = lock.get("path"), lock.get("inode"), lock["type"]
    name = lock.get("lock_name")
    if lock.get("symbol"):
        return {"name": lock["symbol"]}
    if lock.get("cache"):
        offset = int(lock["address"], 16) - int(lock["object"], 16)
        return {"name": f"{lock['cache']}+{offset:#x}", "cache": lock["cache"]}
    if kind == "wait_queue" and "mount" in lock:
        # The guest says which file its request is about; we say which file system.
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
    def knows(lock: Truth) -> bool:
        return key in described(lock)

    return Fact(
        name=f"{key} of the lock",
        reported=in_report(lambda lock: lock.get(key)),
        recorded=in_guest(lambda lock: described(lock)[key], knows),
    )


def modes(run: Run) -> Figures:
    return {
        one["pid"]: one["mode"]
        for lock in run.workload["locks"]
        for one in lock["waiters"]
        if one["mode"] is not None
    }


def deadlocks(run: Run) -> Figures:
    """Return all cycles, with how sure each can be."""
    locks: list[Truth] = run.workload["locks"]
    made = run.workload.get("deadlocks")
    if made is None:
        possible = [lock for lock in locks if lock["deadlock"] == "possible"]
        pids = {one["pid"] for lock in possible for one in lock["waiters"]}
        made = [{"exact": False, "pids": pids}]
    cycles = [(each["exact"], sorted(each["pids"])) for each in made]
    return {"all": sorted(cycles)}


def reported_deadlocks(report: Any) -> Figures:
    cycles = [
        (each["confidence"] == "exact", sorted(each["pids"]))
        for each in report["deadlocks"]
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
            # A condition variable goes by its start, not by the word that is waited on.
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
