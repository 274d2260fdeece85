# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-locks --io: the I/O that a guest asked for, and its kernel's counts."""

import re
from itertools import pairwise
from typing import Any

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures


def counts(run: Run) -> Figures:
    """Return reads and writes in flight of each disk, as the kernel counts them."""
    names = (re.fullmatch(r"sys/block/(.+)/inflight", n) for n in run.truth_names())
    return {
        name[1]: tuple(map(int, run.truth(name[0]).split())) for name in names if name
    }


def reported_counts(report: Any) -> Figures:
    return {disk["name"]: (disk["reads"], disk["writes"]) for disk in report["io"]}


def holder(run: Run, name: str) -> str:
    """Return the disk that holds the requests which were asked of a disk."""
    top, loop, *_ = run.workload["stack"]["disks"]
    return str(loop) if name == top else name


def requests(run: Run) -> Figures:
    """Return operation and bytes of what was asked for, by disk and sector."""
    return {
        (holder(run, each["disk"]), each["sector"]): (
            "write" if each["write"] else "read",
            each["bytes"],
        )
        for each in run.workload["requests"]
    }


def reported_requests(report: Any) -> Figures:
    return {
        (disk["name"], each["sector"]): (each["operation"], each["bytes"])
        for disk in report["io"]
        for each in disk["requests"]
    }


def in_driver(run: Run) -> Figures:
    """Return how many requests the driver of each disk has, as the kernel counts."""
    mapped = {name for name in counts(run) if str(name).startswith("dm-")}
    return {name: sum(both) for name, both in counts(run).items() if name not in mapped}


def reported_in_driver(report: Any) -> Figures:
    return {
        disk["name"]: sum(each["stage"] == "driver" for each in disk["requests"])
        for disk in report["io"]
    }


def stages(run: Run) -> Figures:
    """Return the stage of what device-mapper disks hold, by disk and sector."""
    disks = run.workload["disks"]
    names = {disks["late"]: "delayed", disks["suspended"]: "deferred"}
    return {
        (each["disk"], each["sector"]): names[each["disk"]]
        for each in run.workload["requests"]
        if each["disk"] in names
    }


def reported_stages(report: Any) -> Figures:
    return {
        (disk["name"], each["sector"]): each["stage"]
        for disk in report["io"]
        for each in disk["requests"]
    }


def below(run: Run) -> Figures:
    """Return the disk below each of the stack."""
    disks = run.workload["stack"]["disks"]
    return {name: (under,) for name, under in pairwise(disks)}


def reported_below(report: Any) -> Figures:
    return {disk["name"]: tuple(disk["below"]) for disk in report["io"]}


def ends(run: Run) -> Figures:
    """Return the disk that holds what each task waits for."""
    names = run.workload["disks"]
    found = {each["pid"]: each["disk"] for each in run.workload["requests"]}
    stack = run.workload["stack"]
    found |= dict.fromkeys(stack["waiting"], names["under"])
    # It waits for a worker that waits for the slow disk, below its file system.
    return found | {run.workload["sync"]: names["slow"]}


def reported_ends(report: Any) -> Figures:
    found = {}
    for root in report["roots"]:
        if disks := root.get("disks"):
            found |= dict.fromkeys([*root["waiters"], *root["chain"]], disks[-1])
    return found


FACTS = (
    Fact("reads and writes in flight", reported_counts, counts),
    Fact("requests asked for", reported_requests, requests),
    Fact("requests in drivers", reported_in_driver, in_driver),
    Fact("stages of held bios", reported_stages, stages),
    Fact("disks below", reported_below, below),
    Fact("disk at the end of each wait", reported_ends, ends),
)
