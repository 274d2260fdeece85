# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-prstat: what every process and thread is doing, and where its time went."""

import argparse
import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from drgn import Program
from drgn.commands import argument, mutually_exclusive_group

from msatools.cli.arguments import UsageError
from msatools.cli.command import Recorded
from msatools.cli.common_options import (
    membership,
    memberships,
    pids,
    rows,
    uids,
    users,
    view,
)
from msatools.cli.main import Command
from msatools.cli.values import columns, cpu_list, known_names, name_list, state_letters
from msatools.kernel.session import Session
from msatools.render.blocks import Block
from msatools.reports.diff import DiffRows
from msatools.target import Target

if TYPE_CHECKING:
    from msatools.prstat.model import PrstatReport
    from msatools.prstat.options import Options
    from msatools.prstat.recorded import RecordedPrstat

_MAX_HZ = 1000

_CHOOSING = (
    *("pids", "users", "cpus", "kernel_threads", "states_wanted", "classes", "ages"),
    *("cgroups", "containers", "namespaces"),
    *("rows", "threads", "by_user", "by_cgroup", "why", "view"),
)
"""Names of the arguments that select rows, or how they are shown."""


def _parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Convert the error of a parser to that of argparse."""

    def convert(word: str) -> Any:
        try:
            return parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@_parsed_by
def _sort_keys(word: str) -> Any:
    from msatools.prstat.select import parse_sort

    return [parse_sort(name) for name in word.split(",")]


@_parsed_by
def _ages(word: str) -> Any:
    from msatools.prstat.select import parse_ages

    return parse_ages(word)


def _classes(word: str) -> Any:
    from msatools.tasks.classes import TaskClass

    names = known_names(word.upper().split(","), TaskClass.__members__, "class")
    return frozenset(TaskClass[name] for name in names)


def _columns(word: str) -> Any:
    from msatools.render.prstat.columns import COLUMNS

    return columns(word, COLUMNS)


def _groups(word: str) -> Any:
    from msatools.prstat.options import GROUPS

    return known_names(word.lower().split(","), GROUPS, "grouping")


def _fields(word: str) -> Any:
    from msatools.prstat.column_docs import FIELDS

    return known_names(word.upper().split(","), FIELDS, "column")


def _frequency(word: str) -> Any:
    with contextlib.suppress(ValueError):
        hz = float(word)
        if 0 < hz <= _MAX_HZ:
            return hz
    raise argparse.ArgumentTypeError(f"not a frequency up to {_MAX_HZ} Hz: {word!r}")


def _options(args: argparse.Namespace, target: Target | None) -> "Options":
    from msatools.prstat.options import Options
    from msatools.prstat.select import Selection, parse_sort

    by_frames = args.view is None and bool(args.functions or args.modules)
    return Options(
        per_thread=args.threads,
        selection=Selection(
            pids=args.pids,
            uids=uids(args, target),
            kernel=args.kernel_threads,
            cpus=args.cpus,
            states=args.states_wanted,
            classes=args.classes,
            ages=tuple(args.ages),
            membership=membership(args),
        ),
        sort=tuple(args.sort or [parse_sort("CPU")]),
        rows=args.rows,
        children=args.children,
        states=args.view == "states",
        load=args.view == "load",
        users=args.by_user,
        cgroups=args.by_cgroup,
        by=tuple(dict.fromkeys(args.by)),
        stacks=args.view == "stacks" or args.folded is not None or by_frames,
        functions=tuple(args.functions),
        modules=tuple(args.modules),
        why=tuple(args.why),
        hz=args.hz,
        share=args.budget / 2 if args.budget else None,
        whole=args.record is not None,
    )


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> "Session[PrstatReport]":
    from msatools.prstat.prstat import Prstat

    return Prstat(prog, target, _options(args, target))


def _blocks(report: "PrstatReport", args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.prstat.report import blocks, folded

    if args.folded is not None:
        return folded(report, args.folded)
    return blocks(
        report,
        microstates=args.microstates,
        columns=tuple(args.columns) or None,
        rows=args.rows,
        verbose=args.verbose,
    )


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    shown = args.view or ("folded" if args.folded is not None else None)
    if args.hz and not has_interval:
        return "-F: samples are within an interval, and none is named"
    if (args.functions or args.modules) and shown in ("load", "states"):
        return f"--function, --module: --{shown} has no stacks"
    if (args.by or args.by_user or args.by_cgroup) and (args.why or shown == "folded"):
        return f"-a, -Z, --by: --{'why' if args.why else shown} has no groups"
    if shown and (args.microstates or args.columns):
        return f"-m, -o: --{shown} has columns of its own"
    return None


def _model() -> "type[RecordedPrstat]":
    from msatools.prstat.recorded import RecordedPrstat

    return RecordedPrstat


def _choose(report: Any, args: argparse.Namespace) -> "PrstatReport":
    from msatools.prstat.recorded import choose

    options = _options(args, None)
    if args.children and report.kept.reaped is None:
        raise UsageError("--children: was not recorded")
    if options.needs_namespaces and report.kept.namespaces is None:
        raise UsageError("--ns, --by ns: namespaces were not recorded")
    return choose(report, options)


def _require(report: Any, args: argparse.Namespace) -> None:
    from msatools.kernel.pids import require_pids

    require_pids(args.pids or (), report.kept.columns["pid"], damaged=False)


def _lacks(args: argparse.Namespace) -> dict[str, object]:
    return {
        f"--{args.view}": args.view in ("stacks", "states"),
        "--folded": args.folded,
        "--function": args.functions,
        "--module": args.modules,
    }


_COMPARED = (
    DiffRows(
        name="tasks",
        by=("pid", "tgid"),
        counts=(
            *("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "rss_bytes"),
            *("size_bytes", "nvcsw", "nivcsw", "min_flt", "maj_flt", "threads"),
        ),
        facts=("comm", "state", "class", "ppid", "cgroup"),
        lived="lifetime_ns",
    ),
    DiffRows(
        name="herds",
        by=("lock",),
        counts=("waiters", "woken", "wakeups"),
        facts=("owner",),
    ),
)


COMMAND = Command(
    name="prstat",
    summary="show what every process and thread is doing, and where its time went",
    arguments=(
        argument(
            "-m",
            dest="microstates",
            action="store_true",
            help="microstates as Solaris has them: shares of user, system, page "
            "faults, locks, sleep, waiting for a CPU",
        ),
        argument(
            "-L", dest="threads", action="store_true", help="threads, not processes"
        ),
        argument("-a", dest="by_user", action="store_true", help="sum up by user, too"),
        argument(
            "-Z",
            dest="by_cgroup",
            action="store_true",
            help="sum up by control group or container, too",
        ),
        argument(
            "--by",
            type=_groups,
            action="extend",
            default=[],
            metavar="X,...",
            help="sum up by user, cgroup, container (ID), ns (PID namespace), class "
            "(NOW) or comm (name), too",
        ),
        pids("these alone, looked up directly"),
        users(),
        *memberships(),
        argument(
            "-P",
            dest="cpus",
            type=cpu_list,
            metavar="CPU-LIST",
            help="on these CPUs, such as 0-3,8",
        ),
        mutually_exclusive_group(
            argument(
                "--kernel-threads",
                dest="kernel_threads",
                action="store_const",
                const=True,
                help="the kernel's own threads alone",
            ),
            argument(
                "--user-tasks",
                dest="kernel_threads",
                action="store_const",
                const=False,
                help="all but the kernel's own threads",
            ),
        ),
        argument(
            "--state",
            dest="states_wanted",
            type=state_letters,
            metavar="LETTERS",
            help="in these states, such as DZ",
        ),
        argument(
            "--class",
            dest="classes",
            type=_classes,
            metavar="CLASS,...",
            help="doing one of these (NOW), such as LCK,KLK",
        ),
        argument(
            "--age",
            dest="ages",
            type=_ages,
            action="append",
            default=[],
            metavar="AGE",
            help="for so long (FOR), such as '>30s' or '<5m'",
        ),
        argument(
            "--sort",
            type=_sort_keys,
            metavar="KEY,...",
            help="order by columns; +KEY least first, -KEY (--sort=-KEY) largest first",
        ),
        rows("at most so many rows or groups"),
        argument(
            "-o",
            dest="columns",
            type=_columns,
            action="extend",
            default=[],
            metavar="COL,...",
            help="these columns, or all (OFF/VCX: mean time off the CPU per switch)",
        ),
        argument(
            "--children",
            action="store_true",
            help="what children used that were waited for",
        ),
        mutually_exclusive_group(
            view("states", "all timers of Gelato and Solaris, summed up"),
            view("load", "why the load is what it is"),
            view("stacks", "threads that sleep, grouped by stack"),
            argument(
                "--folded",
                choices=("age", "count"),
                help="stacks for flame graphs, by age (in us) or number of waits",
            ),
        ),
        argument(
            "--function",
            dest="functions",
            type=name_list,
            action="extend",
            default=[],
            metavar="NAME,...",
            help="--stacks, of those with one of these functions",
        ),
        argument(
            "--module",
            dest="modules",
            type=name_list,
            action="extend",
            default=[],
            metavar="NAME,...",
            help="--stacks, of those with a function of one of these modules",
        ),
        argument(
            "--why",
            type=_fields,
            action="extend",
            default=[],
            metavar="COL,...",
            help="explain columns, and how well each is known here",
        ),
        argument(
            "-F",
            dest="hz",
            type=_frequency,
            metavar="HZ",
            help="with INTERVAL: sample this often what tasks wait for (default: as "
            "often as a tenth of a CPU, or half of --budget, allows, up to 20)",
        ),
    ),
    examples=(
        ("-mL", "every thread's microstates"),
        ("-mL --class LCK --age '>10s'", "who waits for locks in user space"),
        ("-p 147", "one process"),
        ("--cgroup /a --by container", "containers below a control group"),
        ("--container 3f2a9c81d0e4", "the processes of one container"),
        ("--load", "what makes the load"),
        ("--stacks --state D", "where tasks hang"),
        ("--folded age", "input of flame graph tools"),
    ),
    start=_start,
    blocks=_blocks,
    complaint=_complaint,
    compared=_COMPARED,
    recorded=Recorded(
        model=_model,
        choosing=_CHOOSING,
        choose=_choose,
        require=_require,
        lacks=_lacks,
    ),
)
