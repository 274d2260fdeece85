# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-locks: who waits for whom, and who is to blame."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from drgn import Program
from drgn.commands import argument, mutually_exclusive_group

from msatools.cli.arguments import UsageError
from msatools.cli.command import Recorded
from msatools.cli.common_options import membership, memberships, pids, rows, view
from msatools.cli.main import Command
from msatools.cli.values import duration_ns, known_names, state_letters
from msatools.kernel.session import Session
from msatools.render.blocks import Block
from msatools.reports.diff import DiffRows
from msatools.target import Target

if TYPE_CHECKING:
    from msatools.locks.options import LocksOptions
    from msatools.locks.report import LocksReport


def _types(word: str) -> Any:
    from typing import get_args

    from msatools.locks.base.lock import LockTypeName

    return frozenset(
        known_names(word.lower().split(","), get_args(LockTypeName), "type")
    )


def _options(args: argparse.Namespace) -> "LocksOptions":
    from msatools.locks.options import LocksOptions

    return LocksOptions(
        pids=args.pids,
        types=args.types_wanted,
        states=args.states_wanted,
        min_wait_ns=args.min_wait_ns,
        membership=membership(args),
        share=args.budget / 2 if args.budget else None,
        stack=args.stack,
    )


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> "Session[LocksReport]":
    from msatools.locks.locks import Locks

    return Locks(prog, target, _options(args))


def _blocks(report: "LocksReport", args: argparse.Namespace) -> Iterable[Block]:
    if args.view == "dot":
        from msatools.render.locks.dot import digraph

        return digraph(report, verbose=args.verbose)
    from msatools.render.locks.report import blocks

    return blocks(
        report,
        view=args.view or args.by or "root",
        rows=args.rows,
        verbose=args.verbose,
        some=_some(args),
    )


def _some(args: argparse.Namespace) -> bool:
    """Return whether only some waits were selected."""
    waits = args.types_wanted, args.states_wanted, args.min_wait_ns
    return any((args.pids, *waits, args.cgroups, args.containers, args.namespaces))


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.view != "dot":
        return None
    if args.json:
        return "--dot: another form than --json"
    if has_interval:
        return "--dot: a graph is of one moment, and an interval is named"
    if args.rows or args.stack:
        return "-n, --stack: --dot has neither rows nor stacks"
    return None


def _model() -> "type[LocksReport]":
    from msatools.locks.report import LocksReport

    return LocksReport


def _choose(report: "LocksReport", args: argparse.Namespace) -> "LocksReport":
    from msatools.locks.choose import choose, has_stacks

    if args.stack and not has_stacks(report):
        raise UsageError("--stack: was not recorded")
    return choose(report, _options(args))


def _require(report: "LocksReport", args: argparse.Namespace) -> None:
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


COMMAND = Command(
    name="locks",
    summary="show who waits for whom, and who is to blame",
    arguments=(
        pids("these alone, looked up directly, and all that they wait for"),
        argument(
            "--type",
            dest="types_wanted",
            type=_types,
            metavar="TYPE,...",
            help="waits for such locks, such as mutex,rwsem",
        ),
        argument(
            "--state",
            dest="states_wanted",
            type=state_letters,
            metavar="LETTERS",
            help="waits in these states, such as D",
        ),
        argument(
            "--min-wait",
            dest="min_wait_ns",
            type=duration_ns,
            default=0,
            metavar="S",
            help="waits of at least so many seconds, or 500ms, 5m, 2h",
        ),
        *memberships(),
        mutually_exclusive_group(
            argument(
                "--by",
                choices=("root", "lock", "task"),
                help="what comes first: who is to blame (default), locks, waiters",
            ),
            view("chains", "each blocked task's way to its root"),
            view("holders", "tasks that others wait for, and how many"),
            view("dot", "the graph, for Graphviz (locks with few waiters: -v all)"),
        ),
        argument(
            "--stack", action="store_true", help="the stacks of waiters and roots"
        ),
        rows("show at most so many roots, rows or chains (JSON has all)"),
    ),
    examples=(
        ("--chains --state D", "what each hung task waits for in the end"),
        ("--by lock --type futex", "the locks of user space"),
        ("--holders --min-wait 30", "who keeps others waiting for long"),
        ("-p 147 --stack", "one task, and those in its way"),
        ("--dot | dot -Tsvg", "a picture"),
    ),
    start=_start,
    blocks=_blocks,
    complaint=_complaint,
    compared=_COMPARED,
    recorded=Recorded(
        model=_model,
        choosing=("pids", "types_wanted", "states_wanted", "min_wait_ns"),
        choose=_choose,
        require=_require,
        lacks=_lacks,
    ),
)
