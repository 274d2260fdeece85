# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-zombies: why the dead are not reaped, and what they use up."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from msatools.cli.arguments import (
    Command,
    Excluded,
    Recorded,
    argument,
    membership,
    memberships,
    min_age,
    mutually_exclusive_group,
    numbers,
    pids,
    rows,
    uids,
    users,
    view,
)
from msatools.cli.options import UsageError, known_names
from msatools.model import DiffRows

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Session
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.selfcheck.selfcheck import Check
    from msatools.zombies.model import ZombiesOptions, ZombiesReport


def _verdicts(word: str) -> Any:
    from msatools.zombies.model import Verdict

    return frozenset(known_names(word.lower().split(","), get_args(Verdict), "verdict"))


def _options(args: argparse.Namespace, target: Target | None) -> ZombiesOptions:
    from msatools.zombies.model import ZombiesOptions

    return ZombiesOptions(
        pids=args.pids,
        parents=args.parents,
        membership=membership(args),
        uids=uids(args, target),
        verdicts=args.verdicts,
        min_age_ns=args.min_age_ns,
        heirs=args.view == "tree" or args.record is not None,
        leaks=args.view == "leaks",
        cost=args.cost,
    )


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[ZombiesReport]:
    from msatools.zombies.zombies import Zombies

    return Zombies(prog, target, _options(args, target))


def _blocks(report: ZombiesReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.zombies.report import zombies_blocks

    return zombies_blocks(
        report,
        view=args.view or args.by or "parent",
        rows=args.rows,
        verbose=args.verbose,
        some=any(_asked(args)),
    )


_SELECTING = "--parent, --cgroup, --container, --ns, -u, --verdict, --min-age"


def _asked(args: argparse.Namespace) -> tuple[Any, ...]:
    """Return the values of the options that select some zombies."""
    places = args.cgroups, args.containers, args.namespaces
    return args.parents, *places, args.users, args.verdicts, args.min_age_ns


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.pids is not None:
        if any(_asked(args)):
            return f"-p: names tasks, and {_SELECTING} select of all"
        if args.view or args.by or args.rows:
            return "-p: named tasks; --by, --tree, --leaks and -n are of all"
    if args.view == "leaks" and any(_asked(args)):
        return f"--leaks: struct pids; {_SELECTING} are of zombies"
    return None


_EXCLUDED = (
    Excluded("--json", ("--by", "-n"), "has all rows in one form"),
    Excluded(
        "--diff", ("--by", "--tree", "--leaks", "--cost"), "has tables of its own"
    ),
)


def _model() -> type[ZombiesReport]:
    from msatools.zombies.model import ZombiesReport

    return ZombiesReport


def _choose(report: ZombiesReport, args: argparse.Namespace) -> ZombiesReport:
    from msatools.zombies.model import choose

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


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import tasks

    return (*tasks.ALL, *tasks.DEAD)


COMMAND = Command(
    name="zombies",
    summary="show why the dead are not reaped, and what they use up",
    arguments=(
        pids("only these tasks, dead or alive, looked up directly"),
        users(),
        *memberships(),
        numbers("--parent", "parents", "PID", "only children of these processes"),
        argument(
            "--verdict",
            dest="verdicts",
            type=_verdicts,
            metavar="VERDICT,...",
            help="only tasks that are not reaped for these reasons, such as "
            "never-waits",
        ),
        min_age("only tasks that have been dead"),
        mutually_exclusive_group(
            argument(
                "--by",
                choices=("parent", "verdict", "cgroup", "user", "ns"),
                help="group them by parent and verdict (default), or by one other; ns: "
                "PID namespace",
            ),
            view("tree", "show who would inherit them if their parent died"),
            view("leaks", "show struct pids that somebody unknown refers to"),
        ),
        rows(),
        argument(
            "--cost",
            action="store_true",
            help="show how many reads of the kernel's memory it took, how many "
            "bytes, and how long",
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
    excluded=_EXCLUDED,
    checks=_checks,
    compared=_COMPARED,
    recorded=Recorded(
        model=_model,
        choosing=(
            "parents",
            "cgroups",
            "containers",
            "users",
            "verdicts",
            "min_age_ns",
        ),
        choose=_choose,
        lacks=_lacks,
    ),
)
