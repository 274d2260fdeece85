# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-zombies --leaks: a guest's /proc, workload and module."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures
from tests.zombies.dumps import all_dead, with_above

CACHES = {
    "task_struct": ("task_struct",),
    "signal_struct": ("signal_cache",),
    "sighand_struct": ("sighand_cache",),
    # Newer kernels name the cache after its type.
    "cred": ("cred_jar", "cred"),
    "pid": ("pid",),
}
"""Structure that a zombie keeps allocated -> names of its slab cache."""

FIRST_NAMESPACE = 4026531836
"""PROC_PID_INIT_INO."""


def column(name: str, recorded: str | Callable[[Any], Any] = "") -> Fact:
    """Return the fact that zombies have a value.

    :param recorded: Its name in the guest's record, or a function of the record.
    """

    def value(zombie: Any) -> Any:
        if callable(recorded):
            return recorded(zombie)
        return zombie[recorded or name]

    return Fact(
        name=f"{name} of a zombie",
        reported=lambda report: {
            zombie["pid"]: zombie.get(name) for zombie in report["zombies"]
        },
        recorded=lambda run: {one["pid"]: value(one) for one in all_dead(run)},
    )


def nested_pid(one: Any) -> int | None:
    """Return a zombie's PID in its own namespace; None in the initial namespace."""
    pids = one["ns_pids"]
    return int(pids[-1]) if len(pids) > 1 else None


def mask(name: str) -> Fact:
    """Return the fact that parents have certain signals in a mask."""
    return Fact(
        name=f"signals a parent has {name}",
        reported=lambda report: {
            group["ppid"]: group["evidence"][f"{name}_signals"]
            for group in report["groups"]
        },
        recorded=lambda run: {
            # If the leader is dead, another thread's mask counts.
            parent["pid"]: living(parent)[0]["masks"][name]
            for parent in run.workload["parents"]
        },
    )


def living(parent: Any) -> list[Any]:
    return [thread for thread in parent["threads"] if thread["state"] != "Z"]


def group_counts(run: Run) -> Figures:
    return Counter((one["ppid"], one["verdict"]) for one in all_dead(run))


def limit(name: str, applies: Callable[[Any], bool] = lambda row: True) -> Fact:
    """Return the fact that limits have a figure."""
    return Fact(
        name=f"{name} of a limit",
        reported=lambda report: {
            (row["name"], row["scope"]): row[name] for row in report["limits"]
        },
        recorded=lambda run: {
            (row["name"], row["scope"]): row[name]
            for row in run.workload["limits"]
            if applies(row)
        },
    )


def is_bounded(row: Any) -> bool:
    """Return whether a limit is enforced: that of uid 0 is not."""
    return bool(row["scope"] != "uid 0")


def is_still(row: Any) -> bool:
    """Return whether kernel threads do not count against a limit."""
    return row["scope"] not in ("system", "uid 0", f"pid_ns {FIRST_NAMESPACE}")


def zombies_in_each(run: Run) -> Figures:
    """Count the zombies in each limit's scope."""
    dead, spaces = all_dead(run), run.workload["namespaces"]
    found: Counter[tuple[str, str]] = Counter()
    found["threads-max", "system"] = len(dead)
    for one in dead:
        found["RLIMIT_NPROC", f"uid {one['real_uid']}"] += 1
        inode = one["namespace"]
        while inode is not None:
            found["pid_max", f"pid_ns {inode}"] += 1
            inode = spaces[str(inode)]["parent"]
    for scope, count in with_above(Counter(one["cgroup"] for one in dead)):
        found["pids.max", scope] = count
    return found


def cgroup_files(run: Run) -> Figures:
    """Return pids.current and pids.max of each control group."""
    found = {}
    for name in run.truth_names():
        match = re.fullmatch(r"sys/fs/cgroup(/.*)/pids\.current", name)
        if match:
            most = run.truth(name.replace("current", "max")).decode().strip()
            most_or_none = None if most == "max" else int(most)
            found[match[1]] = int(run.truth(name)), most_or_none
    return found


def slab_sizes(run: Run) -> Figures:
    lines = run.truth("proc/slabinfo").decode().splitlines()
    sizes = {line.split()[0]: int(line.split()[3]) for line in lines[2:]}
    return {
        name: sizes[cache]
        for name, caches in CACHES.items()
        for cache in caches
        # A cache that is merged with others has another name.
        if cache in sizes
    }


FACTS = (
    Fact(
        name="zombies",
        reported=lambda report: {
            "rows": len(report["zombies"]),
            "coverage": report["coverage"]["zombies"],
        },
        recorded=lambda run: dict.fromkeys(("rows", "coverage"), len(all_dead(run))),
    ),
    *map(column, ("comm", "ppid", "parent_comm", "cgroup", "exit_code", "namespace")),
    column("verdict"),
    column("uid", "real_uid"),
    column("tracer", lambda one: one["tracer"] or None),
    column("ns_pid", nested_pid),
    Fact(
        name="zombies of a parent and verdict",
        reported=lambda report: {
            (group["ppid"], group["verdict"]): group["count"]
            for group in report["groups"]
        },
        recorded=group_counts,
    ),
    Fact(
        name="groups",
        reported=lambda report: {"groups": len(report["groups"])},
        recorded=lambda run: {"groups": len(group_counts(run))},
    ),
    Fact(
        name="state of a parent",
        reported=lambda report: {
            group["ppid"]: group["parent_state"] for group in report["groups"]
        },
        recorded=lambda run: {
            parent["pid"]: living(parent)[0]["state"]
            for parent in run.workload["parents"]
        },
    ),
    *map(mask, ("blocked", "ignored", "caught")),
    limit("max", is_bounded),
    limit("used", is_still),
    Fact(
        name="zombies of a limit",
        reported=lambda report: {
            (row["name"], row["scope"]): row["zombies"] for row in report["limits"]
        },
        recorded=zombies_in_each,
    ),
    Fact(
        name="tasks of a control group, and how many it may have",
        reported=lambda report: {
            row["scope"]: (row["used"], row["max"])
            for row in report["limits"]
            if row["name"] == "pids.max"
        },
        recorded=cgroup_files,
    ),
    Fact(
        name="limits of users",
        reported=lambda report: Counter(row["name"] for row in report["limits"]),
        recorded=lambda run: {"RLIMIT_NPROC": len(run.workload["users"])},
    ),
    Fact(
        name="bytes of what a zombie holds",
        reported=lambda report: report["held"]["each_bytes"],
        recorded=slab_sizes,
    ),
    Fact(
        name="references that leak",
        reported=lambda report: {
            int(leak["address"], 16): (
                leak["pid"],
                leak["references"] - sum(leak["named"].values()),
            )
            for leak in report["leaks"]
        },
        recorded=lambda run: {
            int(one["address"], 16): (one["pid"], one["leaked"])
            for one in run.workload["leaks"]
        },
    ),
    Fact(
        name="leaks",
        reported=lambda report: {"leaks": len(report["leaks"])},
        recorded=lambda run: {"leaks": len(run.workload["leaks"])},
    ),
)
