# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-cpus: processor sets, and the work of each CPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msatools.cli.arguments import (
    Command,
    Excluded,
    Recorded,
    argument,
    columns,
    cpus,
    mutually_exclusive_group,
    rows,
    view,
)
from msatools.cli.options import UsageError, column_list, cpu_list, name_list
from msatools.model import DiffRows

if TYPE_CHECKING:
    from drgn import Program

    from msatools.cpus.cpus import CpusOptions
    from msatools.cpus.model import CpusReport
    from msatools.kernel.report import Session
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.selfcheck.selfcheck import Check


_TASK_COLUMNS = ("icsw", "migr")
"""Columns that require reading all tasks."""


def _columns(word: str) -> tuple[str, ...]:
    from msatools.render.cpus.report import COLUMNS

    return column_list(word, COLUMNS)


def _options(args: argparse.Namespace) -> CpusOptions:
    from msatools.cpus.cpus import CpusOptions

    return CpusOptions(
        cpus=args.cpus,
        sets=args.sets,
        irqs=args.view == "irqs",
        # Tasks throttled one by one are on no run queue: read all tasks to find them.
        tasks=args.verbose
        or args.view == "sets"
        or args.plan is not None
        or bool({*_TASK_COLUMNS} & {*(args.columns or ())}),
        doing=args.verbose,
        stalls=args.view == "stalls",
        stacks=args.view == "stacks",
        plan=args.plan,
        whole=args.record is not None,
    )


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[CpusReport]:
    from msatools.cpus.cpus import Cpus

    return Cpus(prog, target, _options(args))


def _blocks(report: CpusReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.cpus.report import cpus_blocks

    return cpus_blocks(
        report,
        view=args.view or "cpus",
        columns=args.columns,
        rows=args.rows,
        verbose=args.verbose,
        some=args.cpus is not None or args.sets is not None,
    )


def _model() -> type[CpusReport]:
    from msatools.cpus.model import CpusReport

    return CpusReport


def _choose(report: CpusReport, args: argparse.Namespace) -> CpusReport:
    from msatools.cpus.cpus import choose, has_tasks

    options = _options(args)
    if options.tasks and not has_tasks(report):
        raise UsageError("-v, --sets, -o icsw,migr: tasks were not recorded")
    if options.stalls and report.stalls is None:
        raise UsageError("--stalls: what stands still was not recorded")
    if options.stacks and report.stacks is None:
        raise UsageError("--stacks: the stacks of CPUs were not recorded")
    return choose(report, options)


def _set_names(word: str) -> tuple[str, ...]:
    names = tuple(name_list(word))
    if not names:
        raise argparse.ArgumentTypeError(f"not a list of sets: {word!r}")
    return names


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.plan is not None and has_interval:
        return "--plan: it is of one moment, and an interval is named"
    return None


_EXCLUDED = (
    Excluded("--json", ("-n", "-o", "--info"), "has all rows and columns"),
    *(
        Excluded(view, ("-o",), "has columns of its own")
        for view in ("-i", "--sets", "--info", "--stalls", "--stacks")
    ),
    Excluded(
        "--diff",
        ("-i", "-o", "--info", "--stalls", "--stacks", "--plan"),
        "has tables of its own",
    ),
    *(Excluded(view, ("-n",), "has all rows") for view in ("--stalls", "--stacks")),
    Excluded("--plan", ("-P", "--set", "-o", "-n"), "is of the CPUs that it names"),
)

_COMPARED = (
    DiffRows(
        name="cpus",
        by=("cpu",),
        counts=(
            *("usr_ns", "sys_ns", "irq_ns", "wt_ns", "st_ns", "gst_ns", "idl_ns"),
            *("csw", "icsw", "migr", "intr", "soft", "xcal", "tlb", "minf", "mjf"),
            "runq",
        ),
        facts=("online", "set", "state"),
    ),
    DiffRows(
        name="sets", by=("name",), counts=("irqs_managed",), facts=("kind", "cpus")
    ),
    DiffRows(name="irqs", by=("irq",), counts=("total",), facts=("name", "effective")),
    DiffRows(name="vectors", by=("name",), counts=("total",)),
    DiffRows(name="softirqs", by=("name",), counts=("total",)),
)


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import commands, tasks

    return (*commands.CPUS_CHECKS, *tasks.QUEUED)


COMMAND = Command(
    name="cpus",
    summary="show processor sets, and what each CPU does",
    arguments=(
        cpus("only these CPUs"),
        argument(
            "--set",
            dest="sets",
            type=_set_names,
            metavar="NAME,...",
            help="only CPUs of these sets, such as default,/db",
        ),
        mutually_exclusive_group(
            view("irqs", "show interrupts by CPU, and where they may go", flag="-i"),
            view("sets", "show sets in full, with their tasks and interrupts"),
            view("info", "show what each CPU is: its place, state, capacity"),
            view("stalls", "show what stands still, who holds it up, and why"),
            view("stacks", "show the stack of each CPU in a dump, down to user mode"),
            argument(
                "--plan",
                type=cpu_list,
                metavar="CPU-LIST",
                help="print commands that would set these CPUs apart, and what stays "
                "on them all the same; none is run",
            ),
        ),
        columns(_columns, " (icsw and migr read all tasks)"),
        rows(),
    ),
    examples=(
        ("-v", "run queues too: who waits, and for how long"),
        ("-i -P 4-7", "which interrupts these CPUs take"),
        ("--sets", "who is bound to which CPUs, and who strays"),
        ("--stacks", "what each CPU of a dump was doing"),
        ("--stalls", "why the machine stands still, down to the culprit"),
        ("-o cpu,set,csw,icsw,migr 5", "switches and moves, each 5 s"),
        ("--plan 4-7", "how to keep these CPUs for something alone"),
    ),
    start=_start,
    blocks=_blocks,
    excluded=_EXCLUDED,
    checks=_checks,
    compared=_COMPARED,
    complaint=_complaint,
    recorded=Recorded(
        model=_model,
        choosing=("cpus", "sets"),
        choose=_choose,
        lacks=lambda args: {"--plan": args.plan},
    ),
)
