# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is to be said of each dump of the lab, and what must not be said.

Each scenario says itself what is wrong with its guest: the codes that follow from that
must be said, some others may be, and no further ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fixtures.lab.crashes import CASES, SAVED_CASES
from msatools.report.causes import Cause

ENVIRONMENT = frozenset({"rcu-stalled", "cpu-stalled", "oops"})
"""What the kernel reports of a guest whose CPUs a busy host does not run."""


LATE = frozenset({"io-stuck", "hung-tasks"})
"""What depends on how long the guest was busy otherwise: test_rules.py has both."""


@dataclass(frozen=True, kw_only=True)
class Died:
    """How a kernel died."""

    cause: Cause
    function: str | None = None
    """The faulting function; ``None`` if that is chance."""

    module: str | None = None


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is to be said of one scenario."""

    died: Died | None = None
    critical: frozenset[str] = frozenset()
    """Codes that must be said, as critical."""

    must: frozenset[str] = frozenset()
    """Further codes that must be said."""

    may: frozenset[str] = frozenset()
    """Codes that depend on when the dump was taken."""

    kernels: tuple[str, ...] = ("6.1", "6.12")
    words: Mapping[str, str] = field(default_factory=dict)
    """Words that the text or the evidence of a code must have."""


def _codes(*codes: str) -> frozenset[str]:
    return frozenset(codes)


_OUT = _codes("out-of-memory", "memory-low", "memory-unreclaimable")


def _out_of_memory(words: str) -> Expected:
    """Return what is to be said of a machine that panicked for want of memory."""
    return Expected(
        died=Died(cause="out-of-memory"),
        critical=_OUT,
        words={"memory-unreclaimable": words},
    )


def _module(cause: Cause, function: str) -> Expected:
    died = Died(cause=cause, function=function, module="crashmodule")
    return Expected(died=died)


def _stall(cause: Cause, function: str, *codes: str) -> Expected:
    died = Died(cause=cause, function=function, module="stallmodule")
    # Those that wait for the stalled CPU, or for its lock.
    may = _codes("hung-tasks", "cpu-starved", "rcu-stalled", "workqueue-stalled")
    return Expected(died=died, critical=_codes(*codes), may=may)


SCENARIOS: Mapping[str, Expected] = {
    # Nothing is wrong.
    "memory": Expected(),
    "owners": Expected(),
    "barepages": Expected(),
    "lockspin": Expected(may=_codes("cpu-stalled")),
    "cpulock": Expected(may=_codes("cpu-stalled")),
    # khugepaged waits for work on a CPU that a real-time thread has for itself.
    "cpus": Expected(may=_codes("hung-tasks", "cpu-starved", "irq-imbalance")),
    "crash": Expected(
        died=Died(cause="sysrq", function="sysrq_handle_crash"),
    ),
    "crashes-null": _module("null-dereference", "cm_read_state"),
    "crashes-gpf": _module("protection-fault", "cm_read_state"),
    "crashes-fault": _module("page-fault", "cm_fault"),
    "crashes-bug": _module("bug", "cm_bug"),
    "crashes-warn": _module("warning", "cm_warn"),
    "crashes-stack": _module("stack-overflow", "cm_recurse"),
    "crashes-init": Expected(died=Died(cause="init-killed")),
    "crashes-oom": _out_of_memory("anonymous, without swap"),
    "crashes-oom-mlocked": _out_of_memory("locked (mlock)"),
    "crashes-oom-tmpfs": _out_of_memory("tmpfs"),
    "crashes-oom-slab": _out_of_memory("crashmodule_object"),
    "crashes-oom-pages": _out_of_memory("no owner explains"),
    "crashes-oom-group": Expected(
        died=Died(cause="out-of-memory"),
        critical=_codes("out-of-memory"),
        must=_codes("cgroup-at-limit"),
        words={"out-of-memory": "/service", "cgroup-at-limit": "/service"},
    ),
    "crashes-oom-victim": Expected(
        died=Died(cause="sysrq", function="sysrq_handle_crash"),
        critical=_codes("out-of-memory"),
        words={"out-of-memory": "for completion"},
        may=_codes("cgroup-at-limit", "hung-tasks"),
    ),
    "watchdogs-soft": _stall("soft-lockup", "sm_spin_on", "cpu-stalled"),
    "watchdogs-hard": _stall("hard-lockup", "sm_spin_on", "cpu-stalled"),
    "watchdogs-rcu": _stall("rcu-stall", "sm_want_lock", "rcu-stalled"),
    "watchdogs-hung": _stall("hung-task", "sm_want_mutex"),
    "lockmodule": Expected(
        critical=_codes("deadlock"),
        must=_codes("possible-deadlock"),
        words={"deadlock": "lm-abba-a"},
    ),
    "locks": Expected(
        must=_codes("frozen-filesystem", "possible-deadlock", "priority-inversion"),
        # Of priority-inversion: a real-time thread has the owner's CPU for itself.
        may=LATE | _codes("lock-herd", "cpu-starved"),
        words={"frozen-filesystem": "/mnt/frozen"},
    ),
    "stalls-rcu": Expected(
        critical=_codes("cpu-stalled", "rcu-stalled"),
        may=LATE | _codes("cpu-starved"),
        words={"cpu-stalled": "sm_spin_on", "rcu-stalled": "sm-read-rcu"},
    ),
    "stalls-starve": Expected(
        critical=_codes("cpu-starved", "rcu-stalled"),
        may=LATE,
        words={"cpu-starved": "rt-hog", "rcu-stalled": "rcu_preempt"},
    ),
    "workqueues": Expected(
        critical=_codes("deadlock", "cpu-starved"),
        may=LATE | _codes("workqueue-stalled", "cpu-stalled"),
        words={"cpu-starved": "hog"},
    ),
    "inflight": Expected(
        must=_codes("io-stuck"), may=LATE, words={"io-stuck": "suspended"}
    ),
    "tasks": Expected(
        must=_codes("frozen-filesystem", "lock-herd"),
        may=LATE | _codes("cgroup-at-limit"),
        words={"lock-herd": "1,000 threads"},
    ),
    "zombies": Expected(
        must=_codes("zombies", "pids-limit"),
        may=LATE,
        words={"zombies": "300 zombies", "pids-limit": "pids.max of /small"},
    ),
}
"""What is to be said, by the name of a scenario."""

assert {*CASES, *SAVED_CASES} == {
    name.removeprefix("crashes-") for name in SCENARIOS if name.startswith("crashes-")
}

FEW = (
    *("memory", "crash", "crashes-null", "crashes-oom-group", "lockmodule", "locks"),
    *("stalls-rcu", "stalls-starve", "workqueues", "inflight"),
)
"""Scenarios of `make test`; the others are in `make test-long`."""
