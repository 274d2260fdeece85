# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is to be said of each dump of the lab, and what must not be said.

Each scenario says itself what is wrong with its guest: the codes that follow from that
must be said, some others may be, and no further ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fixtures.lab.crashes import CASES, SAVED_CASES
from fixtures.lab.machines import MACHINES
from msatools.report.log import Cause

WARNED = "kernel-warnings"
"""The kernel may warn when a fair server is turned off (kernel/sched/deadline.c,
task_non_contending())."""

ENVIRONMENT = frozenset({"rcu-stalled", "cpu-stalled"})
"""What the kernel reported of a guest whose CPUs a busy host did not run, and what is
over: right as a warning, where the log has it."""

LATE = frozenset({"io-stuck", "hung-tasks", "stopped-owner"})
"""What depends on how long the guest was busy otherwise: test_rules.py has each."""

LATE_CRITICAL = LATE | {"frozen-filesystem"}
"""What is critical once it has lasted for long."""

OBSERVED = frozenset(
    {"blocked-tasks", "cpu-stalled", "kernel-memory", "memory-unattributed"}
)
"""Facts that are out of the ordinary: right beside any trouble, by their own measure,
and wrong of a guest that has none. A counter that nothing explains is never right."""


@dataclass(frozen=True, kw_only=True)
class Died:
    """How a kernel died."""

    cause: Cause
    function: str | None = None
    """The faulting function; ``None`` if that is chance."""

    module: str | None = None
    or_function: str | None = None
    """That of a second CPU that stands still, too, if the log may have its stack."""


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

    critical_may: frozenset[str] = frozenset()
    """Those of them that may be critical."""

    words: Mapping[str, str] = field(default_factory=dict)
    """Words that the text or the evidence of a code must have, or of one of several:
    ``CODE|CODE``."""


def _codes(*codes: str) -> frozenset[str]:
    return frozenset(codes)


_LOW = _codes("memory-low", "memory-unreclaimable")
"""Others may give pages back while a kernel panics for want of memory."""


def _out_of_memory(words: str, function: str | None = None) -> Expected:
    """Return what is to be said of a machine that panicked for want of memory.

    Who asked for memory is chance, except in a module that takes all of it.
    """
    module = None if function is None else "crashmodule"
    return Expected(
        died=Died(cause="out-of-memory", function=function, module=module),
        critical=_codes("out-of-memory"),
        may=_LOW,
        critical_may=_LOW,
        # Of one of them, whichever is said.
        words={"out-of-memory|memory-unreclaimable": words},
    )


def _module(cause: Cause, function: str) -> Expected:
    died = Died(cause=cause, function=function, module="crashmodule")
    return Expected(died=died)


def _unloaded(function: str) -> Expected:
    """Return what is to be said of what leads back to a module that is gone."""
    died = Died(cause="page-fault", function=function)
    return Expected(died=died, words={"panic": "unloaded (the last: crashmodule)"})


_BEHIND = _codes("cpu-stalled", "cpu-starved", "rcu-stalled", "workqueue-stalled")
"""What else stands still behind a CPU that does, or a lock, if that lasts."""


def _stall(
    cause: Cause, function: str, *codes: str, words: str, other: str | None = None
) -> Expected:
    died = Died(cause=cause, function=function, module="stallmodule", or_function=other)
    return Expected(
        died=died,
        critical=_codes(*codes),
        may=LATE | _BEHIND,
        critical_may=_BEHIND,
        words=dict.fromkeys(codes, words),
    )


_TASKS = Expected(
    must=_codes("frozen-filesystem", "lock-herd"),
    # One of its control groups has little memory.
    may=LATE | _codes("cgroup-at-limit"),
    words={"lock-herd": "1,000 threads", "frozen-filesystem": "/mnt/frozen"},
)

_MACHINE = Expected(
    # Two threads want each other's mutexes, in memory of users.
    must=_codes("possible-deadlock", "pids-limit"),
    may=LATE,
    words={"possible-deadlock": "abba-1", "pids-limit": "pids.max of /small"},
)

SCENARIOS: Mapping[str, Expected] = {
    # Nothing is wrong, and nothing may be said.
    "memory": Expected(),
    "owners": Expected(),
    "barepages": Expected(),
    "demo": Expected(),
    # One task reads a disk that is suspended.
    "contained": Expected(may=LATE),
    "nmi": Expected(died=Died(cause="nmi"), may=LATE),
    # Its tasks spin for spinlocks or run for as long as the dump takes.
    "lockspin": Expected(may=_codes("cpu-stalled"), critical_may=_codes("cpu-stalled")),
    "cpulock": Expected(may=_codes("cpu-stalled"), critical_may=_codes("cpu-stalled")),
    # Realtime and deadline tasks have CPUs for themselves, and others want them:
    # khugepaged, and on some kernels the thread of RCU. Interrupts are bound to one
    # CPU, which is busy with them on the slow arm64.
    "cpus": Expected(
        may=_codes(
            *("hung-tasks", "cpu-starved", "rcu-stalled", "irq-imbalance", WARNED),
            # A kworker waits for the CPU of a realtime task, for 30 s on a slow host.
            "workqueue-stalled",
        ),
        critical_may=_codes("cpu-starved", "rcu-stalled", "workqueue-stalled"),
    ),
    "crash": Expected(
        died=Died(cause="sysrq", function="sysrq_handle_crash"),
    ),
    "crashes-null": _module("null-dereference", "cm_read_state"),
    "crashes-gpf": _module("protection-fault", "cm_read_state"),
    "crashes-fault": _module("page-fault", "cm_fault"),
    # Who jumped there, and not what lies there.
    "crashes-jump": _module("page-fault", "cm_jump"),
    "crashes-jump-work": _module("page-fault", "cm_jump"),
    # Where the module was is none: what led there, and which module that may be.
    "crashes-left-timer": _unloaded("__run_timers"),
    "crashes-left-work": _unloaded("process_one_work"),
    # The first panic, and not what befell panic() itself.
    "crashes-nested": _module("null-dereference", "cm_read_state"),
    "crashes-nested-hang": _module("panic", "cm_panic"),
    "crashes-bug": _module("bug", "cm_bug"),
    "crashes-warn": _module("warning", "cm_warn"),
    "crashes-stack": _module("stack-overflow", "cm_recurse"),
    "crashes-init": Expected(died=Died(cause="init-killed", function="do_exit")),
    "crashes-oom": _out_of_memory("anonymous, without swap"),
    "crashes-oom-mlocked": _out_of_memory("locked (mlock)"),
    "crashes-oom-tmpfs": _out_of_memory("tmpfs"),
    "crashes-oom-slab": _out_of_memory("crashmodule_object", "cm_leak_slab"),
    "crashes-oom-pages": _out_of_memory("no owner explains", "cm_leak_pages"),
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
    "watchdogs-soft": _stall(
        "soft-lockup", "sm_spin_on", "cpu-stalled", words="sm-preempt-off"
    ),
    "watchdogs-hard": _stall(
        "hard-lockup", "sm_spin_on", "cpu-stalled", words="sm-own-lock"
    ),
    "watchdogs-rcu": _stall(
        *("rcu-stall", "sm_want_lock", "rcu-stalled"),
        words="sm-own-lock",
        other="sm_spin_on",
    ),
    "watchdogs-hung": _stall(
        "hung-task", "sm_want_mutex", "hung-tasks", words="sm-own-mutex"
    ),
    "lockmodule": Expected(
        critical=_codes("deadlock"),
        must=_codes("possible-deadlock"),
        # Its tasks wait for as long as the machine runs.
        may=_codes("hung-tasks"),
        words={"deadlock": "lm-abba-a"},
    ),
    "locks": Expected(
        must=_codes("frozen-filesystem", "possible-deadlock", "priority-inversion"),
        # Of priority-inversion: a real-time thread has the owner's CPU for itself.
        may=LATE | _codes("lock-herd", "cpu-starved"),
        critical_may=_codes("cpu-starved"),
        words={
            "frozen-filesystem": "/mnt/frozen",
            "priority-inversion": "inversion-owner",
        },
    ),
    "field": Expected(
        critical=_codes("deadlock"),
        must=_codes("frozen-filesystem", "lock-herd", "possible-deadlock"),
        may=LATE | _codes("hung-tasks", "zombies"),
        words={
            "deadlock": "tracer",
            "frozen-filesystem": "/mnt/frozen",
            "lock-herd": "20 threads",
        },
    ),
    "fieldmemory": Expected(
        must=_codes("memory-leak", "out-of-memory", "swap-full", "page-tables"),
        # Not every kernel poisons pages, or keeps removed groups for a page.
        may=_codes("memory-poisoned", "dying-cgroups"),
        words={
            "page-tables": "tables-0",
            "memory-leak": "heapmodule",
            "out-of-memory": "30.0 MiB tmpfs and shared memory",
        },
    ),
    "fieldcalls": Expected(
        critical=_codes("cpu-starved"),
        must=_codes("rcu-backlog"),
        may=LATE | _codes(WARNED),
        # Here a CPU stalls from three seconds on: a busy host leaves one out for that.
        critical_may=_codes("cpu-stalled"),
        words={
            "cpu-starved": "hog (FIFO 50)",
            # The thread that is to call them, and who has its CPU.
            "rcu-backlog": "rcuop/3 is to call them",
        },
    ),
    "fieldpackets": Expected(
        must=_codes("cpu-storm"),
        # From 6.18 on no kernel thread is throttled. One of RCU's callbacks is here.
        may=LATE | _codes("hung-tasks", "cpu-throttled", "rcu-backlog"),
        # As of fieldcpus, below: a CPU that a busy host leaves out.
        critical_may=_codes("cpu-stalled"),
        # The other flood is many polls on a fast host alone: test_fieldpackets.py.
        words={"cpu-storm": "as its backlog was full"},
    ),
    "fieldpages": Expected(may=_codes("swap-full")),
    "fielddmabuf": Expected(),
    "fielddevices": Expected(may=_codes("memory-leak")),
    "fieldballoon": Expected(
        must=_codes("out-of-memory", "balloon"),
        may=_codes("memory-low"),
        words={"balloon": "256.0 MiB", "out-of-memory": "victim"},
    ),
    "fieldcpus": Expected(
        critical=_codes("oops"),
        must=_codes(
            *("cpu-starved", "cpu-storm", "irq-disabled", "kernel-warnings"),
        ),
        # A quota can just have begun anew: tests/cpus/test_fieldcpus.py has both cases.
        may=LATE | _codes("cpu-throttled"),
        # A busy host leaves one of its eight CPUs out for ten seconds.
        critical_may=_codes("cpu-stalled"),
        words={
            "oops": "bm_oops [busymodule]",
            "cpu-starved": "starving-hog (nice -20) runs",
            "irq-disabled": "nvme",
            "kernel-warnings": "20 times in bm_warn [busymodule]",
        },
    ),
    "fieldgrace": Expected(
        must=_codes("kernel-warnings"),
        # Since v6.12 no real-time task is throttled. RCU's own limit may be reached.
        may=LATE | ENVIRONMENT | _codes("cpu-throttled"),
        critical_may=_codes("rcu-stalled"),
        words={"kernel-warnings": "it warned (taint W), which the log no longer has"},
    ),
    "fieldio": Expected(may=LATE | _codes("hung-tasks", "io-stuck")),
    "fieldnbd": Expected(may=LATE),
    "stalls-locks": Expected(
        critical=_codes("cpu-stalled", "rcu-stalled"),
        may=LATE | _BEHIND,
        critical_may=_BEHIND,
        words={"cpu-stalled": "sm_spinlock", "rcu-stalled": "sm-own-lock"},
    ),
    "stalls-rcu": Expected(
        critical=_codes("cpu-stalled", "rcu-stalled"),
        # The reader of RCU has had no turn, if the kernel has fair servers not at all.
        may=LATE | _codes("cpu-starved", WARNED),
        critical_may=_codes("cpu-starved"),
        words={"cpu-stalled": "sm_spin_on", "rcu-stalled": "sm-read-rcu"},
    ),
    "stalls-starve": Expected(
        critical=_codes("cpu-starved", "rcu-stalled"),
        may=LATE | _codes(WARNED),
        words={"cpu-starved": "rt-hog", "rcu-stalled": "rcu_preempt"},
    ),
    "stalls-stop": Expected(
        critical=_codes("cpu-stalled"),
        # The thread of RCU may be on a CPU that has stopped. Workers are, for longer
        # than the kernel's limit if the guest was on a busy host.
        may=LATE | _codes("rcu-stalled", "workqueue-stalled"),
        critical_may=_codes("rcu-stalled", "workqueue-stalled"),
        words={"cpu-stalled": "sm_stopped"},
    ),
    "workqueues": Expected(
        critical=_codes("deadlock", "cpu-starved"),
        # A worker spins; v7.3 warns of delayed work for a CPU that is offline.
        may=LATE
        | _codes("workqueue-stalled", "cpu-stalled", "cpu-storm", "kernel-warnings"),
        critical_may=_codes("workqueue-stalled", "cpu-stalled"),
        words={"cpu-starved": "hog"},
    ),
    "inflight": Expected(
        must=_codes("io-stuck"), may=LATE, words={"io-stuck": "suspended"}
    ),
    "tasks": _TASKS,
    "tasks-on": _TASKS,
    "zombies": Expected(
        must=_codes("zombies", "pids-limit"),
        may=LATE,
        words={"zombies": "300 zombies", "pids-limit": "pids.max of /small"},
    ),
    **{row.name: _MACHINE for row in MACHINES},
    # It has no memory of users, so that owners of their mutexes are unknown.
    "kdump": Expected(
        died=Died(cause="sysrq", function="sysrq_handle_crash"),
        must=_codes("pids-limit"),
        may=LATE,
        words={"pids-limit": "pids.max of /small"},
    ),
}
"""What is to be said, by the name of a scenario."""

NOT_JUDGED: Mapping[str, str] = {
    "bench": "made for its size: tests/bench",
    "dense": "made for its size: tests/bench",
    "manytasks": "made for its size: tests/bench",
    "manyfutexes": "made for its size: tests/bench",
    "hugememory": "made for its size: tests/bench/size.py",
    "manythreads": "made for its size: tests/bench/size.py",
    "tasks-midway": "the dump is taken in the midst of what changes",
    "lockrace": "the dump is taken in the midst of what changes",
    "zombierace": "the dump is taken in the midst of what changes",
    "herdrun": "the dump is taken in the midst of what changes",
    **{
        f"{kind}{count}": "made for its number of CPUs: nothing runs on them"
        for kind, counts in (("possiblecpus", (8, 64, 128, 255)), ("onlinecpus", (32,)))
        for count in counts
    },
}
"""Scenarios with dumps of which nothing is expected, and why."""

assert {*CASES, *SAVED_CASES} == {
    name.removeprefix("crashes-") for name in SCENARIOS if name.startswith("crashes-")
}

FEW = (
    *("memory", "crash", "crashes-null", "crashes-nested", "crashes-oom-group"),
    *("crashes-warn", "lockmodule", "locks"),
    *("field", "fieldcalls", "fieldcpus", "fieldgrace", "fieldio", "fieldpackets"),
    *("stalls-rcu", "workqueues", "inflight"),
)
"""Scenarios of `make test`; the others are in `make test-long`."""
