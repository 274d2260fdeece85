# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-prstat: what every process and thread is doing, and where its time went."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msatools.cli.arguments import (
    Command,
    Excluded,
    Recorded,
    argument,
    columns,
    cpus,
    membership,
    memberships,
    min_age,
    mutually_exclusive_group,
    pids,
    rows,
    states,
    uids,
    users,
    view,
)
from msatools.cli.options import (
    UsageError,
    column_list,
    duration_ns,
    known_names,
    name_list,
    parse_words,
)
from msatools.model import DiffRows

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Session
    from msatools.program import Target
    from msatools.prstat.model import PrstatReport
    from msatools.prstat.recorded import RecordedPrstat
    from msatools.prstat.select import Options
    from msatools.render.blocks import Block
    from msatools.selfcheck.selfcheck import Check


_MAX_HZ = 1000

_OF_CHILDREN = ("CUSR", "CSYS", "CVCX", "CICX", "CMIN", "CMAJ")
"""Columns of the resources that reaped children used."""

_CHOOSING = (
    *("pids", "users", "cpus", "kernel_threads", "states_wanted", "classes"),
    *("min_age_ns", "max_age_ns"),
    *("cgroups", "containers", "namespaces"),
    *("rows", "threads", "by_user", "by_cgroup", "why", "view"),
)
"""Names of the arguments that select rows or their presentation."""


def _parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Convert a parser's ValueError to argparse's ArgumentTypeError."""

    def convert(word: str) -> Any:
        try:
            return parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@_parsed_by
def _sort_keys(word: str) -> Any:
    from msatools.prstat.select import KEYS, parse_sort

    names = word.split(",")
    known_names((name.lstrip("+-").upper() for name in names), KEYS, "column")
    return [parse_sort(name) for name in names]


def _classes(word: str) -> Any:
    from msatools.tasks.waits import TaskClass

    names = known_names(word.upper().split(","), TaskClass.__members__, "class")
    return frozenset(TaskClass[name] for name in names)


def _columns(word: str) -> Any:
    from msatools.render.prstat.columns import COLUMNS

    return column_list(word, COLUMNS)


def _groups(word: str) -> Any:
    from msatools.prstat.select import GROUPS

    return known_names(word.lower().split(","), GROUPS, "grouping")


def _frequency(word: str) -> Any:
    with contextlib.suppress(ValueError):
        hz = float(word)
        if 0 < hz <= _MAX_HZ:
            return hz
    raise argparse.ArgumentTypeError(f"not a frequency up to {_MAX_HZ} Hz: {word!r}")


def _options(args: argparse.Namespace, target: Target | None) -> Options:
    from msatools.prstat.select import Options, Selection, parse_sort

    return Options(
        per_thread=args.threads,
        selection=Selection(
            pids=args.pids,
            uids=uids(args, target),
            kernel=args.kernel_threads,
            cpus=args.cpus,
            states=args.states_wanted,
            classes=args.classes,
            min_age_ns=args.min_age_ns,
            max_age_ns=args.max_age_ns,
            membership=membership(args),
        ),
        sort=tuple(args.sort or [parse_sort("CPU")]),
        stuck_first=not args.sort,
        # --why explains columns and shows no tasks.
        rows=0 if args.why else args.rows,
        children=_needs_children(args),
        states=args.view == "states",
        load=args.view == "load",
        users=args.by_user,
        cgroups=args.by_cgroup,
        by=tuple(dict.fromkeys(args.by)),
        stacks=_has_stacks(args),
        functions=tuple(args.functions),
        modules=tuple(args.modules),
        why=tuple(args.why),
        hz=args.hz,
        share=args.budget / 2 if args.budget else None,
        causes=_has_causes(args),
        whole=args.record is not None,
    )


def _has_causes(args: argparse.Namespace) -> bool:
    """Return whether causes of waits may be shown, or page faults are sorted by."""
    # Callers at drgn's prompt read the report itself; live, any column can be shown.
    if not hasattr(args, "core") or parse_words(args.words).interval_s is not None:
        return True
    if args.json or args.microstates or args.columns or args.record is not None:
        return True
    return any(key.name in ("TFL", "DFL") for key in args.sort or ())


def _has_stacks(args: argparse.Namespace) -> bool:
    """Return whether stacks are shown, or selected by function or module."""
    named = args.functions or args.modules
    return bool(args.view == "stacks" or args.folded is not None or named)


def _needs_children(args: argparse.Namespace) -> bool:
    """Return whether columns of reaped children are shown, or sorted by."""
    if args.children:
        return True
    names = {*(args.columns or ()), *(key.name for key in args.sort or ())}
    return not names.isdisjoint(_OF_CHILDREN)


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[PrstatReport]:
    from msatools.prstat.prstat import Prstat

    return Prstat(prog, target, _options(args, target))


def _blocks(report: PrstatReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.prstat.report import folded, prstat_blocks

    if args.folded is not None:
        return folded(report, args.folded, args.rows)
    return prstat_blocks(
        report,
        microstates=args.microstates,
        columns=None if args.columns is None else tuple(args.columns),
        rows=args.rows,
        verbose=args.verbose,
    )


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.hz and not has_interval:
        return "-F: samples are within an interval, and none is named"
    if (args.functions or args.modules) and args.view in ("states", "load"):
        return "--function, --module: of stacks; add --stacks or --folded"
    for given, option, kind in (
        (args.by_user, "-a", "user"),
        (args.by_cgroup, "-Z", "cgroup"),
    ):
        # JSON has both, each by its own key.
        if given and kind in args.by and not args.json:
            return f"{option}: the same as --by {kind}, which is given as well"
    return None


_GROUPING = ("-a", "-Z", "--by")
_ROWS = ("-m", "-o", "-L", "--sort", "--children")
"""Options of the table of tasks."""

_STACKS = ("--stacks", "--folded", "--function", "--module")
_EXCLUDED = (
    *(
        Excluded(view, _ROWS, "has rows of its own, of threads", in_text=True)
        for view in ("--states", "--load", *_STACKS)
    ),
    Excluded(
        "--folded", (*_GROUPING, "-v", "--color"), "prints stacks and nothing else"
    ),
    Excluded("-o", ("-m", "--children"), "names all columns"),
    Excluded("--children", ("-m",), "has columns of its own", in_text=True),
    Excluded("--json", ("--folded",), "is another form: use --stacks"),
    Excluded("--json", ("-o",), "has all columns"),
    Excluded("--diff", ("-m", "-o", "--sort", "-F"), "has tables of its own"),
    Excluded("--diff", ("--load", *_GROUPING), "has tables of its own"),
)


def _model() -> type[RecordedPrstat]:
    from msatools.prstat.recorded import RecordedPrstat

    return RecordedPrstat


def _choose(report: Any, args: argparse.Namespace) -> PrstatReport:
    from msatools.prstat.recorded import choose

    options = _options(args, None)
    if _needs_children(args) and report.kept.reaped is None:
        raise UsageError("--children, -o CUSR…: what children used was not recorded")
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


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import memory, tasks

    return (
        *tasks.ALL,
        *tasks.DEAD,
        *tasks.LIVES,
        *tasks.QUEUED,
        memory.resident,
        *tasks.STACKS,
    )


COMMAND = Command(
    name="prstat",
    summary="show what every process and thread is doing, and where its time went",
    arguments=(
        pids("only these tasks, looked up directly"),
        users(),
        *memberships(),
        cpus("only tasks on these CPUs"),
        states(),
        argument(
            "--class",
            dest="classes",
            type=_classes,
            metavar="CLASS,...",
            help="only tasks that do one of these (NOW), such as LCK,KLK",
        ),
        min_age("only tasks that have done so (FOR)"),
        argument(
            "--max-age",
            dest="max_age_ns",
            type=duration_ns,
            metavar="TIME",
            help="only tasks that have done so (FOR) for at most so long",
        ),
        mutually_exclusive_group(
            argument(
                "--kernel-threads",
                dest="kernel_threads",
                action="store_const",
                const=True,
                help="only the kernel's own threads",
            ),
            argument(
                "--user-tasks",
                dest="kernel_threads",
                action="store_const",
                const=False,
                help="only tasks that are not the kernel's own threads",
            ),
        ),
        argument("-L", dest="threads", action="store_true", help="show threads"),
        argument(
            "-m",
            dest="microstates",
            action="store_true",
            help="show microstates as Solaris has them: shares of user, system, page "
            "faults, locks, sleep, waiting for a CPU",
        ),
        argument(
            "--children",
            action="store_true",
            help="show what children used that were waited for",
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
        mutually_exclusive_group(
            view("states", "show all timers of Gelato and Solaris, summed up"),
            view("load", "show why the load is what it is"),
            view("stacks", "show threads that sleep, grouped by stack"),
            argument(
                "--folded",
                choices=("age", "count"),
                help="print stacks for flame graphs, by age (in us) or number of waits",
            ),
        ),
        argument(
            "--function",
            dest="functions",
            type=name_list,
            action="extend",
            default=[],
            metavar="NAME,...",
            help="only stacks with one of these functions",
        ),
        argument(
            "--module",
            dest="modules",
            type=name_list,
            action="extend",
            default=[],
            metavar="NAME,...",
            help="only stacks with a function of one of these modules",
        ),
        argument(
            "--sort",
            type=_sort_keys,
            metavar="KEY,...",
            help="order by columns; +KEY least first, -KEY (--sort=-KEY) largest first",
        ),
        columns(_columns, " (OFF/VCX: mean time off the CPU per switch)"),
        rows(", in JSON too"),
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
        ("-mL --class LCK --min-age 10", "who waits for locks in user space"),
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
    excluded=_EXCLUDED,
    checks=_checks,
    explains_kernel=True,
    compared=_COMPARED,
    recorded=Recorded(
        model=_model,
        choosing=_CHOOSING,
        choose=_choose,
        require=_require,
        lacks=_lacks,
    ),
)
