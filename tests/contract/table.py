# SPDX-License-Identifier: LGPL-2.1-or-later

"""A row for each command: the arguments to test it with, and the shape of its JSON."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from drgn import Program, sizeof
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task
from msatools.commands import cpus, locks, memstat, prstat, report, whatis, zombies

from msatools.cli.command import Command
from msatools.cpus import model as cpus_model
from msatools.cpus.stalls import model as stalls_model
from msatools.locks.base.lock import LockTypeName, OwnerConfidence
from msatools.locks.base.model import ExternalKind
from msatools.locks.io.model import Stage
from msatools.memory.pages.classes import CLASSES
from msatools.report.causes import Cause
from msatools.report.model import SECTIONS
from msatools.tasks.classes import TaskClass
from msatools.whatis import model as whatis_model
from msatools.zombies.model import Verdict
from tests.contract.shapes import (
    ADDRESS,
    ANY,
    COUNT,
    NONE,
    NUMBER,
    WORDS,
    Map,
    Matching,
    Shape,
)
from tests.support.overlay import lose


@dataclass(frozen=True, kw_only=True)
class Row:
    """The contract of one command."""

    command: Command[Any]

    options: frozenset[str]
    """Its own options, besides those of all commands."""

    asked: tuple[str, ...] = ()
    """Arguments to run it with on the demo, as text and as JSON."""

    no_json: tuple[str, ...] = ()
    """Arguments that cannot be combined with ``--json``."""

    naming: tuple[str, ...]
    """Arguments that make it name one of the tasks 1, 43, 210, 211."""

    wrong: Mapping[str, str]
    """Invalid arguments -> part of the error message."""

    absent: Mapping[str, str] = field(default_factory=dict)
    """Arguments that name something not in the demo -> start of the error message."""

    payload: Shape
    """The keys of its JSON besides those of all commands."""

    payload_of: Mapping[str, Shape] = field(default_factory=dict)
    """Arguments -> the keys that they add."""

    payload_of_interval: Shape
    """The keys that a sample adds."""

    rich: str | None = None
    """A dump of the lab with everything that the demo lacks."""

    damage: Callable[[Program], None]
    """Make something unreadable that the command reads."""

    damaged: str
    """The key in ``coverage`` that counts the damage."""

    lost: Mapping[str, tuple[bool, bool]]
    """Key in ``coverage`` -> whether ``--strict`` fails if it is not 0: on a dump, and
    on a running kernel."""

    @property
    def name(self) -> str:
        return self.command.name


def _lose_task(prog: Program) -> None:
    lose(prog, find_task(prog, 210).value_(), sizeof(prog.type("struct task_struct")))


def _lose_run_queue(prog: Program) -> None:
    queue = per_cpu(prog["runqueues"], 1)
    lose(prog, queue.address_, sizeof(queue))


def _lose_sections(prog: Program) -> None:
    lose(prog, prog["mem_section"][0].value_(), 4096)


SHARED_OPTIONS = frozenset(
    {
        "-v",
        "--json",
        "--strict",
        "--self-check",
        "--budget",
        "--no-redraw",
        "--why",
        "--color",
        "--record",
        "--diff",
    }
    | {"-h", "--help"}
)
TARGET_OPTIONS = frozenset(
    {"-k", "-c", "--qemu", "-s", "--types", "--debuginfod", "--sandbox"}
    | {"--kernel", "--vmcoreinfo", "--no-pager"}
    | {"--debug", "--version"}
)

TASK_CLASS = frozenset(TaskClass.__members__)
STATE = frozenset("RSDTtZXIP")
BOUND = frozenset({"exact", "upper", "estimate"})
LOCK_ID = Matching(r"[a-z_]+ (\d+:)?0x[0-9a-f]+|socket:\[\d+\]|[a-z_]+ .+")
NS = COUNT
MOMENT = {
    "target": {
        "path": str,
        "kind": frozenset({"elf", "kdump", "raw", "kcore", "qmp"}),
        "live": bool,
        "release": str,
        "arch": str,
        "page_size": int,
        "types": frozenset({"dwarf", "btf"}),
        "dump_level": COUNT,
        "truncated": bool,
        "crash": (
            {"message": WORDS, "cpu": COUNT, "pid": COUNT, "comm": WORDS},
            NONE,
        ),
        "format": str,
    },
    "taken_at_ns": int,
    "coverage": Map(int),
    "notes": [{"code": Matching("[a-z-]+"), "text": str}],
}
ONE_SHOT: dict[str, Shape] = {"schema": str, **MOMENT, "interval_ns": NONE}
SAMPLE: dict[str, Shape] = {
    **ONE_SHOT,
    "interval_ns": int,
    "cost": {"cpu_ns": int, "wall_ns": int, "elapsed_ns": int, "peak_bytes": COUNT},
}

ON = (
    {
        "kind": str,
        "address?": ADDRESS,
        "addresses?": [ADDRESS],
        **{f"{key}?": str for key in ("type", "name", "path", "device", "mode")},
        **{f"{key}?": str for key in ("local", "peer", "fs")},
        **{f"{key}?": int for key in ("waiters", "owner", "inode", "fd", "count")},
        **{f"{key}?": int for key in ("pid", "pgid", "cpu", "id")},
        **{f"{key}?": int for key in ("expires_ns", "left_ns")},
        **{f"{key}?": bool for key in ("shared", "text")},
        **{f"{key}?": [int] for key in ("fds", "signals")},
    },
    NONE,
)
HERDS = [
    {
        "lock": LOCK_ID,
        "waiters": int,
        "owner": COUNT,
        "kind": str,
        "address": (ADDRESS, NONE),
        "pids": [int],
        "min_age_ns": int,
        "max_age_ns": int,
        "nvcsw_median": int,
        "confidence": frozenset({"none", "one dump", "confirmed"}),
        "woken": int,
        "waker": (
            {
                "pid": int,
                "tgid": int,
                "comm": str,
                "frames?": [
                    {
                        **dict.fromkeys(("function", "module"), (str, NONE)),
                        "offset": int,
                        "guess": bool,
                    }
                ],
            },
            NONE,
        ),
        "name?": str,
        "wakeups?": int,
        "in_vain?": float,
    }
]

SCHED_CLASS = frozenset(get_args(cpus_model.SchedClass))
QUEUED = {
    "pid": int,
    "comm": str,
    "class": SCHED_CLASS,
    "policy": str,
    "priority": int,
    "rt_priority": COUNT,
    "nice": COUNT,
    "deadline_ns": NS,
    "wait_ns": NS,
    "wait_bound": BOUND,
    "cgroup": WORDS,
    "throttled": bool,
    "throttle?": str,
}
BOUND_TASK = {
    "pid": int,
    "comm": str,
    "cpus": [int],
    "cpu": int,
    "cgroup": WORDS,
    "why": str,
    "kthread": bool,
}
VECTORS = [{"name": str, "text": str, "counts": Map(int, NUMBER), "total": COUNT}]
TIMES = ("usr", "nice", "sys", "irq", "softirq", "wt", "st", "gst", "idl")
COUNTS = (
    *("minf", "mjf", "xcal", "tlb", "intr", "soft", "csw", "icsw", "migr", "runq"),
    *(f"{name}_ns" for name in TIMES),
)

CPUS = Row(
    command=cpus.COMMAND,
    options=frozenset(
        {
            *("-P", "--set", "-i", "--sets", "--info", "--stalls", "--stacks"),
            *("--plan", "-o", "-n"),
        }
    ),
    asked=(
        *("-v -P 0-1", "--set default -o all -n 9", "-i", "--sets", "--info"),
        *("--stalls", "--stalls -v -P 0", "--stacks -P 1", "--plan 1"),
    ),
    naming=("--sets",),
    wrong={
        "-P x": "not a number: 'x'",
        "-P": "expected one argument",
        "-P 3-1": "not a list of CPUs: '3-1'",
        "-P 1,,2": "not a number: ''",
        "-P -1": "not a number: ''",
        "-P 99999": "not a list of CPUs",
        "-i --sets": "not allowed with",
        "-i --info": "not allowed with",
        "--sets --info": "not allowed with",
        "--sets --stalls": "not allowed with",
        "--stalls -n 9": "-n: no effect with --stalls, which has all rows",
        "--stalls -o cpu": "-o: no effect with --stalls",
        "--plan x": "not a number: 'x'",
        "--plan 1 -i": "not allowed with",
        "--plan 1 -P 1": "-P: no effect with --plan, which is of the CPUs",
        "--plan 1 5": "--plan: it is of one moment, and an interval is named",
        "-o cpu,ithr": "unknown column 'ithr'; choose from cpu, set, state, minf, mjf,",
        "-o ,": "argument -o: unknown column ''",
        "--set ,": "argument --set: not a list of sets: ','",
        "-i -o cpu": "-o: no effect with -i, which has columns of its own",
        "--sets -o all": "-o: no effect with --sets",
        "-n 0": "not a positive number: '0'",
        "-n many": "not a number: 'many'",
    },
    absent={
        "--plan 0-1": "CPU 0-1: no CPU would be left for all else",
        "--plan 1,77": "CPU 77: this kernel has none of that number",
        "-P 77": "CPU 77: this kernel has none of that number",
        "-P 1,50-51": "CPU 50-51: this kernel has none of that number",
        "--set /nowhere": "set /nowhere: there is none of that name; choose from",
        "--set default,db": "set db: there is none of that name",
    },
    payload={
        "load": ([float], NONE),
        "cpus": [
            {
                "cpu": int,
                "online": bool,
                "set": str,
                "state": [frozenset(get_args(cpus_model.State))],
                **dict.fromkeys(COUNTS, COUNT),
                **dict.fromkeys(("smtx", "srw", "syscl"), NONE),
                "current": ({"pid": int, "comm": str, "class": SCHED_CLASS}, NONE),
                "processor": ANY,
            }
        ],
        "sets": [
            {
                "name": str,
                "kind": frozenset(get_args(cpus_model.SetKind)),
                "cpus": [int],
                "source": str,
                "asked": ([int], NONE),
                "exclusive": ([int], NONE),
                "nodes": [int],
                "reason": WORDS,
                "root_domain": (ADDRESS, NONE),
                "balanced": (bool, NONE),
                "irqs_routed": [int],
                "irqs_allowed": [int],
                "irqs_managed": int,
                "tasks?": {
                    "members": int,
                    "pinned": [BOUND_TASK],
                    "straying": [BOUND_TASK],
                    "percpu_threads": int,
                },
            }
        ],
        "run_queues": [
            {
                "cpu": int,
                "running": int,
                "current": (QUEUED, NONE),
                "waiting": [QUEUED],
                "clock_ns": int,
                "lag_ns": NS,
                "ticked_ns": NS,
                "switched_ns": NS,
                "lag_why": WORDS,
                "panicked": bool,
                "doing?": Matching("user mode|(kernel|interrupt).*"),
            }
        ],
        "findings": [{"code": str, "text": str, "cpus": [int], "advice": WORDS}],
        "nodes": [int],
        "storms?": [
            {
                "kind": frozenset(
                    {
                        *("tasklet", "timer", "work", "interrupt", "softirq", "call"),
                        "callback",
                    }
                ),
                "cpu": int,
                "function": str,
                "per_second": (float, NONE),
                "share": (float, NONE),
                "waiting?": int,
                "irq?": int,
            }
        ],
    },
    payload_of={
        "-i": {
            "irqs": [
                {
                    "irq": int,
                    "name": str,
                    "chip": WORDS,
                    "affinity": [int],
                    "effective": [int],
                    "managed": bool,
                    "counts": Map(int, NUMBER),
                    "total": COUNT,
                    "share": (float, NONE),
                    "time_ns": NONE,
                    "disabled?": bool,
                    "functions?": [str],
                }
            ],
            "vectors": VECTORS,
            "softirqs": VECTORS,
        },
        "--stacks": {
            "stacks": [
                {"cpu": int, "pid": COUNT, "comm": WORDS, "frames": ([str], NONE)}
            ]
        },
        "--stalls": {
            "stalls": {
                "limits": {
                    **dict.fromkeys(
                        ("no_tick_ns", "no_switch_ns", "rcu_ns", "call_ns"), int
                    ),
                    "soft_watchdog": (bool, NONE),
                    "hard_watchdog": (bool, NONE),
                },
                "found": [
                    {
                        "code": frozenset(get_args(stalls_model.StallCode)),
                        "kind": frozenset(get_args(stalls_model.StallKind)),
                        "text": str,
                        "chain": [str],
                        "confidence": frozenset(get_args(stalls_model.Confidence)),
                        "for_ns": NS,
                        "limit_ns": int,
                        "over_limit": bool,
                        "cpus": [int],
                        "culprit_cpu": (int, NONE),
                        "culprit_pid": (int, NONE),
                        "waiting": int,
                    }
                ],
                "cpus": ANY,
                "rcu": ANY,
                "calls": ANY,
                "stop_machine": ANY,
                "timers": ANY,
                "halted_ns": NS,
                "stolen": [int],
            }
        },
        "--plan": {
            "plan": {
                "cpus": [int],
                "others": [int],
                "steps": [
                    {
                        "name": frozenset(
                            {"partition", "interrupts", "workqueues", "boot"}
                        ),
                        "text": str,
                        "commands": [str],
                    }
                ],
                "stays": [{"name": str, "text": str, "irqs": [int], "pids": [int]}],
            },
        },
    },
    payload_of_interval={},
    rich="cpus-6.12",
    damage=_lose_run_queue,
    damaged="run_queues_unreadable",
    lost={
        "cpus_unreadable": (True, True),
        "run_queues_unreadable": (True, True),
        "cpumasks_unreadable": (True, True),
        "rq_unreadable": (True, False),
        "kernel_stat_unreadable": (True, False),
        "irq_counts_unreadable": (True, False),
        "lists_broken": (True, True),
        "queues_broken": (True, False),
        "trees_broken": (True, False),
        "counts_broken": (True, False),
        "leaks_lost": (True, False),
        "partitions_unknown": (True, False),
        "run_queues_differ": (True, False),
        "ticks_unreadable": (True, True),
        "cpus": (False, False),
        "irqs": (False, False),
        "tasks": (False, False),
        "reads": (False, False),
    },
)

_LOST_OF_TASKS = {
    "tasks_unreadable": (True, True),
    "lists_broken": (True, True),
    "run_queues_unreadable": (True, True),
    "cred_unreadable": (True, False),
    "stacks_incomplete": (True, False),
    "futex_chains_broken": (True, False),
    "leaks_lost": (True, False),
    "clocks_unreadable": (True, True),
    "waiters_unreadable": (True, False),
    "zombies": (False, False),
    "locks_unknown": (False, False),
    "parents_ended": (False, False),
    "reads": (False, False),
}

WRONG_MEMBERSHIPS = {
    "--cgroup system.slice": "not a path such as /system.slice: 'system.slice'",
    "--cgroup /a,": "not a path such as /system.slice: ''",
    "--container 123": "not 12 to 64 hexadecimal digits of a container's ID: '123'",
    "--container web-server-1": "not 12 to 64 hexadecimal digits",
    "--ns pid": "not a number: 'pid'",
    "--ns": "expected one argument",
}

DISK_IO = {
    "name": str,
    "device": str,
    **dict.fromkeys(("reads", "writes", "depth"), COUNT),
    "scheduler": WORDS,
    **dict.fromkeys(("is_suspended", "is_frozen", "is_quiesced"), bool),
    "no_completion_ns": NS,
    "below": [str],
    "requests": [
        {
            "address": ADDRESS,
            "operation": str,
            "sector": COUNT,
            "bytes": int,
            "stage": frozenset(get_args(Stage)),
            "age_ns": NS,
            "driver_age_ns": NS,
            "tag": COUNT,
            "pid": COUNT,
        }
    ],
}

QUEUED_WORK = {"function": WORDS, "workqueue": WORDS, "waiter": COUNT}

WORK_POOL = {
    "id": int,
    "address": ADDRESS,
    **dict.fromkeys(("cpu", "node", "nice", "manager"), COUNT),
    "cpus": ([int], NONE),
    "flags": [str],
    **dict.fromkeys(("pending", "workers", "idle", "running"), int),
    "progress_age_ns": NS,
    "is_stalled": bool,
    "busy": [
        {
            "pid": int,
            "comm": str,
            **dict.fromkeys(("function", "workqueue"), WORDS),
            "state": (STATE, NONE),
            **dict.fromkeys(("age_ns", "work_age_ns"), NS),
            **dict.fromkeys(("intensive", "rescuer"), bool),
        }
    ],
    "works": [QUEUED_WORK],
    "culprits": [int],
    "why": WORDS,
}

WORKQUEUE = {
    "name": str,
    "address": ADDRESS,
    "flags": [str],
    **dict.fromkeys(("max_active", "rescuer"), COUNT),
    **dict.fromkeys(("active", "inactive", "maydays"), int),
    "works": [QUEUED_WORK],
}

WORKQUEUES = {
    "pools": [WORK_POOL],
    "queues": [WORKQUEUE],
    "offline": [{"cpu": int, "function": WORDS, "workqueue": WORDS, "expires_ns": NS}],
    "stalled_after_ns": int,
}

LOCKS = Row(
    command=locks.COMMAND,
    options=frozenset(
        {"-p", "--type", "--state", "--min-age", "--by", "--chains", "--holders"}
        | {"--dot", "--stacks", "-n", "--cgroup", "--container", "--ns", "--io"}
        | {"--workqueues"}
    ),
    asked=(
        "-v --stacks",
        "--by lock -n 9",
        "--by task --type mutex,rwsem,futex --state DS --min-age 1 -n 9",
        "--chains -n 9",
        "--holders",
        "--io",
        "--io -v -n 3",
        "--workqueues",
        "--workqueues -v",
        f"--cgroup /,/nowhere --container {'0' * 12} -n all",
        "-p 1",
    ),
    no_json=("--dot", "--dot -v -p 211"),
    naming=("--by task",),
    wrong={
        "-p x": "not a number: 'x'",
        **WRONG_MEMBERSHIPS,
        "--type spin": "unknown type 'spin'; choose from mutex, ww_mutex, rwsem",
        "--type ,": "unknown type ''",
        "--state Q": "states are some of R, S, D",
        "--state": "expected one argument",
        "--min-age=-1": "not a duration such as 30 or 5m: '-1'",
        "--min-age x": "not a duration",
        "--min-age nan": "not a duration",
        "--by owner": "invalid choice",
        "--by root --chains": "not allowed with",
        "--chains --holders": "not allowed with",
        "--holders --dot": "not allowed with",
        "-n 0": "not a positive number",
        "--dot --json": "--dot: no effect with --json, which is another form",
        "--dot -n 3": "-n: no effect with --dot, which is a graph and nothing else",
        "--dot --stacks": "--stacks: no effect with --dot",
        "--dot 5": "a graph is of one moment",
        "--io --workqueues": "not allowed with",
        "--io --state D": "--state: no effect with --io, which lists disks, not tasks",
        "--workqueues -p 1": "-p: no effect with --workqueues, which lists pools",
        "--workqueues --stacks": "--stacks: no effect with --workqueues",
    },
    absent={"-p 99999": "pid 99999: no such task"},
    payload={
        "waits": [
            {
                "pid": int,
                "tgid": int,
                "comm": str,
                "state": STATE,
                "age_ns": int,
                "age_bound": BOUND,
                "mode": (frozenset({"read", "write"}), NONE),
                "lock": (LOCK_ID, NONE),
                "class": TASK_CLASS,
                "caller": WORDS,
                "call": WORDS,
                "any_of?": [LOCK_ID],
                "on?": ON,
                "why?": str,
                "stack?": [str],
            }
        ],
        "locks": [
            {
                "id": LOCK_ID,
                "type": frozenset(get_args(LockTypeName)),
                "address": (ADDRESS, NONE),
                "name": WORDS,
                "owners": [
                    {
                        "pid": int,
                        "confidence": frozenset({"exact", "likely", "evidence"}),
                        "comm": str,
                        "seen": bool,
                        "evidence": [str],
                    }
                ],
                "refuted": [
                    {
                        "pid": int,
                        "confidence": frozenset({"exact", "likely", "evidence"}),
                        "comm": str,
                        "seen": bool,
                        "evidence": [str],
                    }
                ],
                "waiters": [int],
                "max_age_ns": int,
                **{f"{key}?": int for key in ("readers", "inode", "pid")},
                **{f"{key}?": str for key in ("path", "device", "cache", "what")},
                "delta_waiters?": int,
            }
        ],
        "roots": [
            {
                "kind": frozenset({"task", "external", "cycle"}),
                "pid": COUNT,
                "reason": str,
                "blocked_d": int,
                "blocked_s": int,
                "comm": WORDS,
                "state": (STATE, NONE),
                "age_ns": NS,
                "waiters": [int],
                "chain": [int],
                "max_age_ns": int,
                "lock?": LOCK_ID,
                "disks?": [str],
                "pool?": int,
                "stack?": [str],
                "confidence?": frozenset(get_args(OwnerConfidence)),
                "external?": frozenset(get_args(ExternalKind)),
            }
        ],
        "io?": [DISK_IO],
        "deadlocks": [
            {
                "confidence": frozenset({"exact", "possible"}),
                "pids": [int],
                "locks": [LOCK_ID],
            }
        ],
        "herds": HERDS,
        "inversions": [
            {"lock": LOCK_ID, "owner": int, "waiter": int}
            | {"owner_pri": int, "waiter_pri": int}
            | {"owner_policy?": frozenset({"IDLE"}), "owner_ready_ns?": int}
        ],
    },
    payload_of={
        "--io": {"has_all_io": bool},
        "--io -v -n 3": {"has_all_io": bool},
        "--workqueues": {"workqueues": WORKQUEUES},
        "--workqueues -v": {"workqueues": WORKQUEUES},
    },
    payload_of_interval={
        "changes": {key: [int] for key in ("begun", "ended", "moved", "stuck")},
        "contention": [
            {
                "lock": LOCK_ID,
                "type": frozenset(get_args(LockTypeName)),
                "name": WORDS,
                "looks": int,
                "share": float,
                "mean_queue": float,
                "max_queue": int,
                "wait_ns": int,
                "error_ns": int,
                "owners": [{"pid": int, "comm": str, "looks": int, "where": str}],
            }
        ],
    },
    rich="locks-6.12",
    damage=_lose_task,
    damaged="lists_broken",
    lost=_LOST_OF_TASKS,
)

GROUPS = Map([{"key": str, "name": str, "pages": int, "classes": Map(int)}])

MEMSTAT = Row(
    command=memstat.COMMAND,
    options=frozenset(
        {
            *("--by", "-n", "-j", "--sections", "--unattributed", "--frag", "--map"),
            *("--leaks", "--textfile"),
        }
    ),
    asked=(
        "-v",
        "--by node,zone",
        "--by section,order,slab,vmalloc -n 9",
        "--by cgroup --by file,fs,process,dmabuf -j 2",
        "--frag",
        "--sections",
        "--map",
        "--unattributed",
        "--leaks",
    ),
    naming=("--by process",),
    wrong={
        "--by cpu": "unknown grouping 'cpu'; choose from node, zone, section, cgroup,",
        "--by node,": "unknown grouping ''",
        "--by": "expected one argument",
        "-n 0": "not a positive number: '0'",
        "-n x": "not a number: 'x'",
        "-j 0": "not a number of workers, 1 to 1024: '0'",
        "-j=-1": "not a number of workers",
        "-j x": "not a number of workers",
        "-j 1.5": "not a number of workers",
        "-j 1025": "not a number of workers",
        "--diff a": "expected 2 arguments",
        "--textfile": "expected one argument",
        "--textfile x.prom --diff a b": "--textfile: no effect with --diff",
        "--map map.jpg": "--map: not a file that ends in .svg or .png: map.jpg",
    },
    payload={
        "pages": int,
        "classes": [
            {
                "name": frozenset(CLASSES.values()),
                "pages": int,
                "bytes": int,
            }
        ],
        "checks": [
            {
                "name": str,
                "walk_pages": int,
                "counter": str,
                "kernel_pages": COUNT,
                "difference": COUNT,
                "explained_by": WORDS,
            }
        ],
        "managed_pages": COUNT,
        "physical_pages": COUNT,
        "swap_pages": COUNT,
        "swap_free_pages": COUNT,
        "swap?": {
            "devices": [{"name": str, "pages": int, "used": int}],
            **dict.fromkeys(("total_pages", "free_pages"), int),
            **dict.fromkeys(("cached_pages", "anon_pages", "shmem_pages"), COUNT),
            "zswap": (
                {"stored_pages": int, "pool_bytes": COUNT, "ratio": (float, NONE)},
                NONE,
            ),
            "zram": (
                {
                    **dict.fromkeys(("stored_pages", "compressed_bytes"), int),
                    "pool_bytes": COUNT,
                    "ratio": (float, NONE),
                },
                NONE,
            ),
        },
        "scan_ns": int,
        "changes": (Map(COUNT), NONE),
    },
    payload_of={
        "--by": {"by": Map([ANY])},
        "--by node,zone": {"by": GROUPS},
        "--sections": {
            "sections": [
                {
                    "nr": int,
                    "state": frozenset({"online", "offline", "device"}),
                    "early": bool,
                    "pfn": int,
                    "pages": int,
                    "memmap": ADDRESS,
                    "memmap_end": ADDRESS,
                    "node": COUNT,
                    "zones": [str],
                }
            ]
        },
        "--frag": {"frag": ANY},
        "--map": {"map": ANY},
        "--unattributed": {"unattributed": [ANY]},
        "--leaks": {
            "leaks": [
                {
                    **dict.fromkeys(("cache?", "area?"), str),
                    "order?": int,
                    "objects": COUNT,
                    "bytes": int,
                    "holds": [str],
                    "module": str,
                    "confidence": frozenset({"exact", "likely", "evidence"}),
                }
            ]
        },
        "-v": {
            "vmalloc": [{"caller": str, "areas": int, "pages": int, "module": WORDS}]
        },
    },
    payload_of_interval={},
    damage=_lose_sections,
    damaged="section_table_lost",
    lost={
        "excluded_pages": (True, True),
        "unreadable_pages": (True, True),
        "owners_unreadable": (True, True),
        "pcp_lists_unreadable": (True, True),
        "page_tables_unreadable": (True, True),
        "files_unreadable": (True, False),
        "section_table_lost": (True, True),
        "lists_broken": (True, True),
        "pcp_lists_broken": (True, False),
        "user_tables_unreadable": (True, False),
        "user_table_entries_broken": (True, False),
        "offline_pages": (False, False),
        "lists_resumed": (False, False),
        "reads": (False, False),
    },
)

GROUP_OF_TASKS = {
    "key": str,
    **dict.fromkeys(("processes", "threads", "size_bytes", "rss_bytes"), int),
    "cpu_ns": int,
    "cpu_share": float,
}

STACKS = [
    {
        "frames": [str],
        "class": TASK_CLASS,
        "pids": [int],
        "min_age_ns": int,
        "max_age_ns": int,
    }
]

PRSTAT = Row(
    command=prstat.COMMAND,
    options=frozenset(
        {"-m", "-L", "-a", "-Z", "-p", "-u", "-P", "--kernel-threads", "--user-tasks"}
        | {"--by", "--cgroup", "--container", "--ns"}
        | {
            "--state",
            "--class",
            "--min-age",
            "--max-age",
            "--sort",
            "-n",
            "-o",
            "--children",
        }
        | {"--states", "--load", "--stacks", "--folded", "--function", "--module"}
        | {"-F"}
    ),
    asked=(
        "-m -L -v -n 9",
        "-a -Z --children --sort RSS -n 9",
        "-o CGROUP,ON --kernel-threads -n 9",
        "--by user,cgroup,container --by class,comm -n 9",
        f"--cgroup / --cgroup /a,/b* --container {'0' * 64} -n all",
        "-o all -n 2",
        "-u 0 -P 0-1 --user-tasks --state S --class SIG --min-age 1 --max-age 1d -n 9",
        "--states",
        "--load -n 1",
        "--stacks --function do_nanosleep -n 1",
        "--folded age --module virtio -n 1",
        "-p 1",
    ),
    naming=("", "-L -v", "-p 1"),
    wrong={
        "--states --load": "not allowed with",
        "--stacks --folded age": "not allowed with",
        "--kernel-threads --user-tasks": "not allowed with",
        "--min-age soon": "not a duration such as 30 or 5m: 'soon'",
        "--max-age=-5s": "not a duration",
        "-P 3-1": "not a list of CPUs: '3-1'",
        "-P all": "not a number: 'all'",
        "--state Q": "states are some of R, S, D",
        "--state ,": "states are some of R, S, D",
        "--class FUT": "unknown class 'FUT'; choose from CPU, USR",
        "--sort NOTHING": "unknown column 'NOTHING'; choose from PID",
        "--sort +-PID": "cannot sort by '+-PID'",
        "-o PID,WHAT": "unknown column 'WHAT'; choose from PID",
        "-n 0": "not a positive number: '0'",
        "-n many": "not a number: 'many'",
        "-p init": "not a number: 'init'",
        "-u root,": "not a user's number or name: ''",
        "-u a:b": "not a user's number or name: 'a:b'",
        "--by": "expected one argument",
        "--by parent": "unknown grouping 'parent'; choose from user, cgroup, container",
        **WRONG_MEMBERSHIPS,
        "--folded size": "invalid choice",
        "-F 0": "not a frequency up to 1000 Hz: '0'",
        "-F nan": "not a frequency",
        "-F fast": "not a frequency up to 1000 Hz: 'fast'",
        "-F 1001": "not a frequency",
        "-F 20": "samples are within an interval, and none is named",
        "--load --function schedule": "--function, --module: of stacks; add --stacks",
        "--states --module ext4": "--function, --module: of stacks; add --stacks",
        "--stacks -m": "-m: no effect with --stacks, which has rows of its own",
        "--folded age -o PID": "-o: no effect with --folded",
        "--folded age --by user": "--by: no effect with --folded",
        "--why LAT -a": "-a: no effect with --why, which explains names",
    },
    absent={
        "-p 99999": "pid 99999: no such task",
        "-L -p 1,99998,99999": "pid 99998, 99999: no such tasks",
        "-P 0,77": "CPU 77: this kernel has none of that number",
    },
    payload={
        "bound_ns": int,
        "accounting": {
            "schedstats": (bool, NONE),
            "delayacct": (bool, NONE),
            "irq_time": bool,
            "precise_cputime": bool,
            "stable_clock": bool,
        },
        "totals": {
            "processes": int,
            "threads": int,
            "states": Map(int, STATE),
            "classes": Map(int, TASK_CLASS),
            "load_averages": ([float], NONE),
            "cpus": int,
            "ram_bytes": COUNT,
        },
        "tasks": [
            {
                **dict.fromkeys(("pid", "tgid", "pri", "nice", "cpu"), int),
                **dict.fromkeys(("ppid", "uid", "threads"), COUNT),
                "comm": str,
                "cgroup": WORDS,
                "kthread": bool,
                "state": STATE,
                "size_bytes": COUNT,
                "rss_bytes": COUNT,
                "class": TASK_CLASS,
                "class_age_ns": int,
                "class_age_bound": BOUND,
                "on": ON,
                "lifetime_ns": int,
                "user_ns": int,
                "system_ns": int,
                "latency_ns": int,
                "latency_bound": frozenset({"exact", "upper"}),
                "off_cpu_ns": int,
                "zombie_ns": int,
                "breakdown": (
                    {
                        "iowait_ns": NS,
                        "blocked_ns": NS,
                        "sleep_ns": NS,
                        "stopped_ns": NS,
                        "delays": Map(COUNT),
                        "coverage": (float, NONE),
                    },
                    NONE,
                ),
                **dict.fromkeys(("nvcsw", "nivcsw", "min_flt", "maj_flt"), int),
                "syscalls": NONE,
                "signals": NONE,
                "children?": dict.fromkeys(
                    ("user_ns", "system_ns", "nvcsw", "nivcsw", "min_flt", "maj_flt"),
                    int,
                ),
                "off_cpu?": [
                    {
                        "class": (TASK_CLASS, NONE),
                        "ns": int,
                        "error_ns": int,
                        "on_code?": bool,
                    }
                ],
            }
        ],
        "herds": HERDS,
    },
    payload_of={
        "-a": {"users": [GROUP_OF_TASKS]},
        "-Z": {"cgroups": [GROUP_OF_TASKS]},
        "--by": {
            "by": {
                **{f"{kind}?": [GROUP_OF_TASKS] for kind in ("user", "cgroup", "ns")},
                **{f"{kind}?": [GROUP_OF_TASKS] for kind in ("container", "comm")},
                "class?": [
                    {
                        "key": TASK_CLASS | {"-"},
                        **dict.fromkeys(("processes", "threads", "age_ns"), int),
                        "max_age_ns": int,
                        **dict.fromkeys(("ns", "error_ns"), NS),
                    }
                ],
            }
        },
        "--states": {"states": [ANY]},
        "--load": {
            "load": {
                "runnable": int,
                "uninterruptible": int,
                "groups": [
                    {
                        "state": frozenset("RD"),
                        "class": TASK_CLASS,
                        "comm": str,
                        "on": ON,
                        "function": WORDS,
                        "pids": [int],
                        "max_age_ns": int,
                    }
                ],
            }
        },
        "--stacks": {"stacks": STACKS},
        "--why": {"why": [{"field": str, "bound": str, "text": str}]},
    },
    payload_of_interval={},
    rich="tasks-6.12",
    damage=_lose_task,
    damaged="lists_broken",
    lost=_LOST_OF_TASKS,
)

VERDICT = frozenset(get_args(Verdict))

REPORT = Row(
    command=report.COMMAND,
    options=frozenset({"--full", "--html", "--fingerprint", "--textfile", "-n"}),
    asked=("-v", "--full", "-n 3"),
    no_json=("--fingerprint",),
    naming=(),  # of a machine that is well, JSON names no task
    wrong={
        "--html": "expected one argument",
        "--textfile x.prom --fingerprint": "--textfile: no effect with --fingerprint",
        "--html x.html 5": "--html: a page is of one moment, and an interval is named",
        "-n 0": "not a positive number: '0'",
        "-n many": "not a number: 'many'",
        "--fingerprint --full": "--full: no effect with --fingerprint",
        "--fingerprint --json": "--fingerprint: no effect with --json",
        "--fingerprint --html x": "--html: no effect with --fingerprint",
        "--full --json": "--full: no effect with --json",
        "--record x --full": "--full: recordings do not have it",
    },
    payload={
        "machine": {
            "host": WORDS,
            "build": WORDS,
            "uptime_ns": NS,
            "time_ns": NS,
            "cpus": COUNT,
            "ram_bytes": COUNT,
            "load": ([float], NONE),
            "taints": WORDS,
        },
        "verdicts": [
            {
                "code": Matching("[a-z-]+"),
                "severity": frozenset({"critical", "warning", "info"}),
                "confidence": frozenset({"exact", "likely", "evidence"}),
                "text": str,
                "evidence": [str],
                "see": str,
            }
        ],
        "crash": (
            {
                "cause": frozenset(get_args(Cause)),
                "message": WORDS,
                "function": WORDS,
                "module": WORDS,
                "taints": WORDS,
                "cpu": COUNT,
                "pid": COUNT,
                "comm": WORDS,
                "frames": [str],
                "fingerprint": Matching("[0-9a-f]{16}"),
                "nested": [
                    {
                        "cause": frozenset(get_args(Cause)),
                        "message": WORDS,
                        "function": WORDS,
                        "module": WORDS,
                        "time_ns": NS,
                    }
                ],
                "time_ns": NS,
            },
            NONE,
        ),
        "checked?": int,
        "unchecked?": [Matching("[a-z-]+")],
        "log": [str],
        "sections": Map({"summary?": str, "error?": str}, frozenset({*SECTIONS})),
        "next": [{"command": str, "why": str}],
    },
    payload_of_interval={},
    rich="crashes-oom-group-6.12",
    damage=_lose_task,
    damaged="lists_broken",
    lost={
        "log_unreadable": (True, True),
        "parts_lost": (True, True),
        "lists_broken": (True, True),
        "tasks_unreadable": (True, True),
        "clocks_unreadable": (True, True),
        "parts": (False, False),
        "reads": (False, False),
    },
)

ZOMBIES = Row(
    command=zombies.COMMAND,
    options=frozenset(
        {"-p", "--parent", "--ns", "-u", "--verdict", "--by", "--tree", "--leaks"}
        | {"-n", "--cost", "--cgroup", "--container", "--min-age"}
    ),
    asked=(
        "-v",
        "--by cgroup -n 9",
        "--verdict never-waits -u 0 --ns 4026531836 --parent 1 --min-age 1 -n all",
        f"--cgroup / --container {'0' * 12}",
        "--tree",
        "-p 1 --cost",
    ),
    naming=("-p 1",),
    wrong={
        "-p x": "not a number: 'x'",
        "--parent x": "not a number: 'x'",
        "--ns pid:[4026531836]": "not a number",
        **WRONG_MEMBERSHIPS,
        "-u root,": "not a user's number or name: ''",
        "--verdict dead": "unknown verdict 'dead'; choose from leader-exited",
        "--verdict ,": "unknown verdict ''",
        "--by zone": "invalid choice",
        "--by cgroup --tree": "not allowed with",
        "--tree --leaks": "not allowed with",
        "-n 0": "not a positive number",
        "-p 5 --parent 1": "-p: names tasks, and --parent, --cgroup",
        "-p 5 --ns 4026531836": "-p: names tasks",
        "-p 5 --cgroup /a": "-p: names tasks",
        "-p 5 -u 0": "-p: names tasks",
        "-p 5 --verdict traced": "-p: names tasks",
        "-p 5 --by user": "-p: named tasks",
        "-p 5 --tree": "-p: named tasks",
        "-p 5 --leaks": "-p: named tasks",
        "-p 5 -n 1": "-p: named tasks",
        "--leaks --parent 5": "--leaks: struct pids",
        "--leaks -u 0": "--leaks: struct pids",
        "--leaks --container 0123456789ab": "--leaks: struct pids",
    },
    absent={
        "-p 99999": "pid 99999: no such task",
        "--parent 1,99999": "pid 99999: no such task; list them all without --parent",
    },
    payload={
        "zombies": [
            {
                "pid": int,
                "comm": str,
                "ppid": int,
                "parent_comm": WORDS,
                "uid": COUNT,
                "cgroup": WORDS,
                "exit_code": int,
                "age_ns": int,
                "age_bound": BOUND,
                "verdict": VERDICT,
                "namespace": COUNT,
                "ns_pid": COUNT,
                "threads": int,
                "tracer?": int,
            }
        ],
        "groups": [
            {
                "ppid": int,
                "parent_comm": WORDS,
                "count": int,
                "verdict": VERDICT,
                "evidence": ANY,
                "advice": str,
                "parent_state": (STATE, NONE),
                "parent_age_ns": NS,
                "min_age_ns": int,
                "max_age_ns": int,
                "exit_codes": Map(int),
                "uids": [int],
                "cgroups": [str],
                "namespaces": [int],
                "pids": [int],
                "heir?": int,
                "holds": [{"namespace": int, "pid": int, "comm": str, "age_ns": int}],
                "delta?": int,
            }
        ],
        "limits": (
            [
                {
                    "name": str,
                    "scope": str,
                    "used": COUNT,
                    "max": COUNT,
                    "left": COUNT,
                    "zombies": int,
                    "first": bool,
                    "left_ns?": int,
                }
            ],
            NONE,
        ),
        "held": ({"bytes": int, "each_bytes": Map(int)}, NONE),
    },
    payload_of={
        "--tree": {
            "heirs": [
                {
                    "ppid": int,
                    "heir": COUNT,
                    "heir_comm": WORDS,
                    "why": str,
                    "reaps": (bool, NONE),
                }
            ]
        },
        "-p": {
            "asked": [
                {
                    "pid": int,
                    "comm": str,
                    "state": STATE,
                    "ppid": int,
                    "parent_comm": WORDS,
                    "age_ns": int,
                    "verdict": (VERDICT, NONE),
                }
            ]
        },
        "--cost": {"reads": int, "read_bytes": int, "elapsed_ns": int},
    },
    payload_of_interval={"changes": {"begun": int, "reaped": int}},
    rich="zombies-6.12",
    damage=_lose_task,
    damaged="lists_broken",
    lost=_LOST_OF_TASKS,
)

WHATIS = Row(
    command=whatis.COMMAND,
    options=frozenset({"--waits"}),
    asked=("-v", "--waits", "phys:1000000 runqueues+8 deadbeef 0"),
    naming=("1:400000",),
    wrong={
        "jiffies+0 jiffies phys:x": "phys:x: not an address such as ffff888003b4e0c0",
        "x pfn:-1": "pfn:-1: not an address",
        "x 1:zz": "1:zz: not an address",
        "0.5": "0.5: not ADDRESS, and there are no samples",
        "-5": "-5: not ADDRESS, and there are no samples",
        "--diff x y --waits": "--waits: no effect with --diff, which reads no kernel",
    },
    absent={"4194303:1000": "pid 4194303: no such task"},
    payload={
        "answers": [
            {
                "asked": str,
                "address": (ADDRESS, NONE),
                "kind": frozenset(get_args(whatis_model.Kind)),
                "text": str,
                "readable": (bool, NONE),
                "symbol?": {
                    "name": str,
                    "offset": int,
                    "module": WORDS,
                    "freed": bool,
                },
                "task?": {"pid": int, "comm": str, "address": ADDRESS},
                "stack?": {
                    "pid": int,
                    "comm": str,
                    "start": ADDRESS,
                    "bytes": int,
                    "offset": int,
                    "where": frozenset(
                        {"frame", "unused", "registers", "guard", "unknown"}
                    ),
                    "frame": COUNT,
                    "function": WORDS,
                    "next_function": WORDS,
                },
                "slab?": {
                    "cache": str,
                    "object": ADDRESS,
                    "bytes": int,
                    "offset": int,
                    "allocated": (bool, NONE),
                    "merged": int,
                    "merged_names": [str],
                    "object_bytes": COUNT,
                    "points_to": [str],
                },
                "page_struct?": {"pfn": int, "offset": int},
                "percpu?": {
                    "cpu": COUNT,
                    "variable": WORDS,
                    "offset": int,
                    "pointer": ADDRESS,
                    "bytes": COUNT,
                    "allocated": (bool, NONE),
                },
                "vmalloc?": {
                    "start": ADDRESS,
                    "bytes": int,
                    "use": str,
                    "caller": WORDS,
                    "offset": int,
                    "guard": bool,
                    "physical": (ADDRESS, NONE),
                },
                "user?": {
                    "pid": int,
                    "comm": str,
                    "mapping": WORDS,
                    "offset": COUNT,
                    **dict.fromkeys(("start", "end"), (ADDRESS, NONE)),
                    "protection": WORDS,
                    "state": frozenset(
                        {"mapped", "swapped", "absent", "none", "unknown"}
                    ),
                },
                "page?": {
                    "pfn": int,
                    "class": frozenset(CLASSES.values()),
                    "owner": WORDS,
                    "flags": [str],
                    **dict.fromkeys(("order", "node", "references"), COUNT),
                    "cgroup": WORDS,
                    "is_guess?": bool,
                    "file?": {
                        "name": str,
                        "inode": int,
                        "offset": COUNT,
                        "fstype": str,
                        "device": WORDS,
                    },
                    "mappers?": [{"pid": int, "comm": str, "address": ADDRESS}],
                    "cache?": str,
                    "table_owners?": [
                        {"pid": int, "comm": str, "start": ADDRESS, "bytes": COUNT}
                    ],
                },
                **dict.fromkeys(("type?", "member?", "object?", "lock?"), str),
            }
        ],
        "locks": [
            {
                "id": LOCK_ID,
                "address": ADDRESS,
                "readers": COUNT,
                "type": frozenset(get_args(LockTypeName)),
                "owners": [
                    {
                        "pid": int,
                        "comm": str,
                        "confidence": frozenset({"exact", "likely", "evidence"}),
                    }
                ],
                "waiters": ([int], NONE),
            }
        ],
    },
    payload_of_interval={},
    damage=_lose_sections,
    damaged="section_table_lost",
    lost={
        "section_table_lost": (True, True),
        "slabs_unreadable": (True, False),
        "locks_unreadable": (True, False),
        "mappings_unreadable": (True, False),
        "page_tables_unreadable": (True, True),
        "vmalloc_areas_unreadable": (True, True),
        "symbols_unreadable": (True, True),
        "reads": (False, False),
    },
)

ROWS = (
    CPUS,
    LOCKS,
    MEMSTAT,
    PRSTAT,
    REPORT,
    WHATIS,
    ZOMBIES,
)
