# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-locks: who waits for whom, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from msatools.cli.arguments import (
    Command,
    Excluded,
    Recorded,
    argument,
    membership,
    memberships,
    min_age,
    mutually_exclusive_group,
    pids,
    rows,
    states,
    view,
)
from msatools.cli.options import UsageError, known_names
from msatools.model import DiffRows

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Session
    from msatools.locks.report import LocksReport
    from msatools.locks.report_builder import LocksOptions
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.selfcheck.selfcheck import Check


def _types(word: str) -> Any:
    from msatools.locks.report import LockTypeName

    return frozenset(
        known_names(word.lower().split(","), get_args(LockTypeName), "type")
    )


def _options(args: argparse.Namespace) -> LocksOptions:
    from msatools.locks.report_builder import LocksOptions

    return LocksOptions(
        pids=args.pids,
        types=args.types_wanted,
        states=args.states_wanted,
        min_age_ns=args.min_age_ns,
        membership=membership(args),
        share=args.budget / 2 if args.budget else None,
        stacks=args.stacks,
        workqueues=args.view == "workqueues",
        io=args.view == "io",
    )


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[LocksReport]:
    from msatools.locks.locks import Locks

    return Locks(prog, target, _options(args))


def _blocks(report: LocksReport, args: argparse.Namespace) -> Iterable[Block]:
    if args.view == "dot":
        from msatools.render.locks.dot import digraph

        return digraph(report, verbose=args.verbose)
    from msatools.render.locks.report import locks_blocks

    return locks_blocks(
        report,
        view=args.view or args.by or "root",
        rows=args.rows,
        verbose=args.verbose,
        some=_some(args),
    )


def _some(args: argparse.Namespace) -> bool:
    """Return whether only some waits were selected."""
    waits = args.types_wanted, args.states_wanted, args.min_age_ns
    return any((args.pids, *waits, args.cgroups, args.containers, args.namespaces))


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.view == "dot" and has_interval:
        return "--dot: a graph is of one moment, and an interval is named"
    return None


_VIEWS = ("--by", "--chains", "--holders", "--io", "--workqueues")
_SELECTING = (
    *("-p", "--type", "--state", "--min-age", "--cgroup", "--container", "--ns"),
    "--stacks",
)
_EXCLUDED = (
    Excluded("--dot", ("-n", "--stacks", "--color"), "is a graph and nothing else"),
    Excluded("--io", _SELECTING, "lists disks, not tasks"),
    Excluded("--workqueues", _SELECTING, "lists pools, not tasks"),
    Excluded("--json", ("--dot",), "is another form"),
    Excluded("--json", ("-n",), "has all rows"),
    Excluded("--diff", (*_VIEWS, "--dot", "--stacks"), "has tables of its own"),
)


def _model() -> type[LocksReport]:
    from msatools.locks.report import LocksReport

    return LocksReport


def _choose(report: LocksReport, args: argparse.Namespace) -> LocksReport:
    from msatools.locks.report_builder import choose, has_stacks

    if args.stacks and not has_stacks(report):
        raise UsageError("--stacks: was not recorded")
    if args.view == "workqueues" and report.workqueues is None:
        raise UsageError("--workqueues: was not recorded")
    if args.view == "io" and not report.has_all_io:
        raise UsageError("--io: was not recorded")
    return choose(report, _options(args))


def _require(report: LocksReport, args: argparse.Namespace) -> None:
    from msatools.kernel.pids import require_pids

    require_pids(args.pids or (), report.pids, damaged=False)


def _lacks(args: argparse.Namespace) -> dict[str, object]:
    return {
        "--cgroup": args.cgroups,
        "--container": args.containers,
        "--ns": args.namespaces,
    }


_COMPARED = (
    DiffRows(
        name="waits",
        by=("pid", "tgid"),
        counts=("age_ns",),
        facts=("comm", "state", "class", "lock"),
    ),
    DiffRows(
        name="locks",
        by=("id",),
        counts=("waiters", "max_age_ns"),
        facts=("name",),
    ),
    DiffRows(
        name="roots", by=("kind", "pid", "reason"), counts=("blocked_d", "blocked_s")
    ),
)


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import commands, tasks

    return (*tasks.ALL, *commands.LOCKS_CHECKS, *tasks.STACKS)


COMMAND = Command(
    name="locks",
    summary="show who waits for whom, and why",
    arguments=(
        pids("only these tasks, looked up directly, and all that they wait for"),
        *memberships(),
        states(),
        argument(
            "--type",
            dest="types_wanted",
            type=_types,
            metavar="TYPE,...",
            help="only waits for locks of these types, such as mutex,rwsem",
        ),
        min_age("only tasks that wait"),
        mutually_exclusive_group(
            argument(
                "--by",
                choices=("root", "lock", "task"),
                help="start from the roots (default), the locks or the waiters",
            ),
            view("chains", "show each blocked task's way to its root"),
            view("holders", "show the tasks that others wait for, and how many"),
            view("io", "show the I/O in flight of all disks"),
            view("workqueues", "show pools of workers: what is pending, who is busy"),
            view("dot", "print the graph for Graphviz (locks with few waiters: -v)"),
        ),
        argument(
            "--stacks", action="store_true", help="show the stacks of waiters and roots"
        ),
        rows(),
    ),
    examples=(
        ("--chains --state D", "what each hung task waits for in the end"),
        ("--by lock --type futex", "the locks of user space"),
        ("--holders --min-age 30", "who keeps others waiting for long"),
        ("-p 147 --stacks", "one task, and those in its way"),
        ("--io -n 3", "the oldest requests of each disk"),
        ("--workqueues", "work that does not begin, and who keeps it waiting"),
        ("--dot | dot -Tsvg", "a picture"),
    ),
    start=_start,
    blocks=_blocks,
    complaint=_complaint,
    excluded=_EXCLUDED,
    checks=_checks,
    compared=_COMPARED,
    recorded=Recorded(
        model=_model,
        choosing=("pids", "types_wanted", "states_wanted", "min_age_ns"),
        choose=_choose,
        require=_require,
        lacks=_lacks,
    ),
)
