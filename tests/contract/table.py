# SPDX-License-Identifier: LGPL-2.1-or-later

"""A row for each command: the arguments to test it with.

The form of its JSON is in docs/schema, which each answer is held against
(``tests.support.calls``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drgn import Program, sizeof
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task
from msatools.commands import cpus, locks, memstat, prstat, report, whatis, zombies

from msatools.cli.arguments import Command, make_parser
from tests.support.overlay import lose


@dataclass(frozen=True, kw_only=True)
class Row:
    """The contract of one command."""

    command: Command[Any]

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

    rich: str | None = None
    """A dump of the lab with everything that the demo lacks."""

    damage: Callable[[Program], None]
    """Make something unreadable that the command reads."""

    damaged: str
    """The key in ``coverage`` that counts the damage."""

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def options(self) -> frozenset[str]:
        """Its own options, besides those of all commands."""
        parser = make_parser(self.command, in_drgn=True)
        found = {word for action in parser._actions for word in action.option_strings}
        return frozenset(found - SHARED_OPTIONS)


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

CPUS = Row(
    command=cpus.COMMAND,
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
    },
    absent={
        "--plan 0-1": "CPU 0-1: no CPU would be left for all else",
        "--plan 1,77": "CPU 77: this kernel has none of that number",
        "-P 1,50-51": "CPU 50-51: this kernel has none of that number",
        "--set /nowhere": "set /nowhere: there is none of that name; choose from",
        "--set default,db": "set db: there is none of that name",
    },
    rich="cpus-6.12",
    damage=_lose_run_queue,
    damaged="run_queues_unreadable",
)

LOCKS = Row(
    command=locks.COMMAND,
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
        "--ns": "expected one argument",
        "--type spin": "unknown type 'spin'; choose from mutex, ww_mutex, rwsem",
        "--type ,": "unknown type ''",
        "--state Q": "states are some of R, S, D",
        "--min-age=-1": "not a duration such as 30 or 5m: '-1'",
        "--min-age nan": "not a duration",
        "--by owner": "invalid choice",
        "--by root --chains": "not allowed with",
        "--chains --holders": "not allowed with",
        "--holders --dot": "not allowed with",
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
    rich="locks-6.12",
    damage=_lose_task,
    damaged="lists_broken",
)


MEMSTAT = Row(
    command=memstat.COMMAND,
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
        "-n x": "not a number: 'x'",
        "-j 0": "not a number of workers, 1 to 1024: '0'",
        "-j 1.5": "not a number of workers",
        "-j 1025": "not a number of workers",
        "--diff a": "expected 2 arguments",
        "--textfile": "expected one argument",
        "--textfile x.prom --diff a b": "--textfile: no effect with --diff",
        "--map map.jpg": "--map: not a file that ends in .svg or .png: map.jpg",
    },
    damage=_lose_sections,
    damaged="section_table_lost",
)


PRSTAT = Row(
    command=prstat.COMMAND,
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
        "-P all": "not a number: 'all'",
        "--state ,": "states are some of R, S, D",
        "--class FUT": "unknown class 'FUT'; choose from CPU, USR",
        "--sort NOTHING": "unknown column 'NOTHING'; choose from PID",
        "--sort +-PID": "cannot sort by '+-PID'",
        "-o PID,WHAT": "unknown column 'WHAT'; choose from PID",
        "-p init": "not a number: 'init'",
        "-u root,": "not a user's number or name: ''",
        "-u a:b": "not a user's number or name: 'a:b'",
        "--by": "expected one argument",
        "--by parent": "unknown grouping 'parent'; choose from user, cgroup, container",
        "--cgroup system.slice": "not a path such as /system.slice: 'system.slice'",
        "--cgroup /a,": "not a path such as /system.slice: ''",
        "--container web-server-1": "not 12 to 64 hexadecimal digits",
        "--ns pid": "not a number: 'pid'",
        "--folded size": "invalid choice",
        "-F 0": "not a frequency up to 1000 Hz: '0'",
        "-F nan": "not a frequency",
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
    rich="tasks-6.12",
    damage=_lose_task,
    damaged="lists_broken",
)


REPORT = Row(
    command=report.COMMAND,
    asked=("-v", "--full", "-n 3"),
    no_json=("--fingerprint",),
    naming=(),  # of a machine that is well, JSON names no task
    wrong={
        "--html": "expected one argument",
        "--textfile x.prom --fingerprint": "--textfile: no effect with --fingerprint",
        "--html x.html 5": "--html: a page is of one moment, and an interval is named",
        "--fingerprint --full": "--full: no effect with --fingerprint",
        "--fingerprint --json": "--fingerprint: no effect with --json",
        "--fingerprint --html x": "--html: no effect with --fingerprint",
        "--full --json": "--full: no effect with --json",
        "--record x --full": "--full: recordings do not have it",
    },
    rich="crashes-oom-group-6.12",
    damage=_lose_task,
    damaged="lists_broken",
)

ZOMBIES = Row(
    command=zombies.COMMAND,
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
        "--parent x": "not a number: 'x'",
        "--ns pid:[4026531836]": "not a number",
        "--verdict dead": "unknown verdict 'dead'; choose from leader-exited",
        "--verdict ,": "unknown verdict ''",
        "--by zone": "invalid choice",
        "--by cgroup --tree": "not allowed with",
        "--tree --leaks": "not allowed with",
        "-p 5 --parent 1": "-p: names tasks, and --parent, --cgroup",
        "-p 5 --cgroup /a": "-p: names tasks",
        "-p 5 --verdict traced": "-p: names tasks",
        "-p 5 --tree": "-p: named tasks",
        "-p 5 -n 1": "-p: named tasks",
        "--leaks --parent 5": "--leaks: struct pids",
        "--leaks -u 0": "--leaks: struct pids",
        "--leaks --container 0123456789ab": "--leaks: struct pids",
    },
    absent={
        "-p 99999": "pid 99999: no such task",
        "--parent 1,99999": "pid 99999: no such task; list them all without --parent",
    },
    rich="zombies-6.12",
    damage=_lose_task,
    damaged="lists_broken",
)

WHATIS = Row(
    command=whatis.COMMAND,
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
    damage=_lose_sections,
    damaged="section_table_lost",
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
