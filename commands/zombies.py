# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-zombies: why the dead are not reaped, and what they use up."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from drgn import Program
from drgn.commands import argument, mutually_exclusive_group

from msatools.cli.arguments import UsageError
from msatools.cli.command import Recorded
from msatools.cli.common_options import (
    membership,
    memberships,
    numbers,
    pids,
    rows,
    uids,
    users,
    view,
)
from msatools.cli.main import Command
from msatools.cli.values import known_names
from msatools.kernel.session import Session
from msatools.render.blocks import Block
from msatools.reports.diff import DiffRows
from msatools.target import Target

if TYPE_CHECKING:
    from msatools.zombies.model import ZombiesReport
    from msatools.zombies.options import ZombiesOptions


def _verdicts(word: str) -> Any:
    from typing import get_args

    from msatools.zombies.model import Verdict

    return frozenset(known_names(word.lower().split(","), get_args(Verdict), "verdict"))


def _options(args: argparse.Namespace, target: Target | None) -> "ZombiesOptions":
    from msatools.zombies.options import ZombiesOptions

    return ZombiesOptions(
        pids=args.pids,
        parents=args.parents,
        membership=membership(args),
        uids=uids(args, target),
        verdicts=args.verdicts,
        heirs=args.view == "tree" or args.record is not None,
        leaks=args.view == "leaks",
        cost=args.cost,
    )


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> "Session[ZombiesReport]":
    from msatools.zombies.zombies import Zombies

    return Zombies(prog, target, _options(args, target))


def _blocks(report: "ZombiesReport", args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.zombies.report import blocks

    return blocks(
        report,
        view=args.view or args.by or "parent",
        rows=args.rows,
        verbose=args.verbose,
        some=any(_asked(args)),
    )


_SELECTING = "--parent, --cgroup, --container, --ns, -u, --verdict"


def _asked(args: argparse.Namespace) -> tuple[Any, ...]:
    """Return the values of the options that select some zombies."""
    places = args.cgroups, args.containers, args.namespaces
    return args.parents, *places, args.users, args.verdicts


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.pids is not None:
        if any(_asked(args)):
            return f"-p: names tasks, and {_SELECTING} select of all"
        if args.view or args.by or args.rows:
            return "-p: named tasks; --by, --tree, --leaks and -n are of all"
    if args.view == "leaks" and any(_asked(args)):
        return f"--leaks: struct pids; {_SELECTING} are of zombies"
    return None


def _model() -> "type[ZombiesReport]":
    from msatools.zombies.model import ZombiesReport

    return ZombiesReport


def _choose(report: "ZombiesReport", args: argparse.Namespace) -> "ZombiesReport":
    from dataclasses import replace

    from msatools.zombies.choose import choose

    if args.view == "leaks" and report.leaks is None:
        raise UsageError("--leaks: was not recorded")
    if args.cost and report.reads is None:
        raise UsageError("--cost: was not recorded")
    options = _options(args, None)
    return choose(report, replace(options, heirs=args.view == "tree"))


def _lacks(args: argparse.Namespace) -> dict[str, object]:
    return {"-p": args.pids is not None, "--ns": args.namespaces}


_COMPARED = (
    DiffRows(
        name="groups",
        by=("ppid", "parent_comm", "verdict"),
        counts=("count", "max_age_ns"),
        facts=("parent_state",),
    ),
    DiffRows(
        name="zombies",
        by=("pid",),
        facts=("comm", "ppid", "verdict"),
        lived="age_ns",
    ),
    DiffRows(name="limits", by=("name", "scope"), counts=("used", "zombies", "max")),
)


COMMAND = Command(
    name="zombies",
    summary="show why the dead are not reaped, and what they use up",
    arguments=(
        pids("these alone, dead or alive, looked up directly"),
        numbers("--parent", "parents", "PID", "children of these processes"),
        *memberships(),
        users(),
        argument(
            "--verdict",
            dest="verdicts",
            type=_verdicts,
            metavar="VERDICT,...",
            help="those that are not reaped for this reason, such as never-waits",
        ),
        mutually_exclusive_group(
            argument(
                "--by",
                choices=("parent", "verdict", "cgroup", "user", "namespace"),
                help="what they are grouped by: parent and verdict (default), or other",
            ),
            view("tree", "who would inherit them if their parent died"),
            view("leaks", "struct pids that somebody unknown refers to"),
        ),
        rows("show at most so many groups or rows (JSON has all)"),
        argument(
            "--cost",
            action="store_true",
            help="say how many reads of the kernel's memory it took",
        ),
    ),
    examples=(
        ("-p 4711 --cost", "one task, in a hundred reads or less"),
        ("--parent 147 -v", "each dead child of a process, and all evidence"),
        ("--by cgroup", "which container they are in"),
        ("--verdict parent-blocked", "those whose parent hangs"),
        ("--tree", "who would inherit them"),
    ),
    start=_start,
    blocks=_blocks,
    complaint=_complaint,
    compared=_COMPARED,
    recorded=Recorded(
        model=_model,
        choosing=("parents", "cgroups", "containers", "users", "verdicts"),
        choose=_choose,
        lacks=_lacks,
    ),
)
