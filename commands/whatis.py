# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-whatis: what lies at an address."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from msatools.cli.arguments import Command, Excluded, Operands, Recorded, argument
from msatools.cli.options import UsageError
from msatools.model import DiffRows

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Session
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.selfcheck.selfcheck import Check
    from msatools.whatis.model import AskedAddress, WhatisOptions, WhatisReport

# --help does without the models, which take 0.1 s to import.


def _addresses(args: argparse.Namespace) -> tuple[AskedAddress, ...]:
    """Parse the addresses that the arguments name.

    :raises UsageError: if a word is not an address
    """
    from msatools.whatis.model import parse

    found = []
    for word in args.operands:
        asked = parse(word)
        if asked is None:
            raise UsageError(f"{word}: not an address {_FORMS}")
        found.append(asked)
    return tuple(found)


_FORMS = "such as ffff888003b4e0c0, phys:3b4e0c0, pfn:15182, 4711:7f01, jiffies+0"


def _options(args: argparse.Namespace) -> WhatisOptions:
    from msatools.whatis.model import WhatisOptions

    return WhatisOptions(addresses=_addresses(args), waits=args.waits)


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[WhatisReport]:
    from msatools.whatis.whatis import Whatis

    return Whatis(prog, target, _options(args))


def _blocks(report: WhatisReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.whatis.report import whatis_blocks

    return whatis_blocks(report, verbose=args.verbose)


def _model() -> type[WhatisReport]:
    from msatools.whatis.model import WhatisReport

    return WhatisReport


def _describes(word: str) -> bool:
    from msatools.whatis.model import looks_like_address

    return looks_like_address(word)


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.diff is None and not args.operands:
        return f"no ADDRESS is named; name one {_FORMS}"
    _addresses(args)
    return None


def _require(report: WhatisReport, args: argparse.Namespace) -> None:
    """Refuse addresses that were not recorded."""
    from msatools.program import TargetError

    there = [answer.asked for answer in report.answers]
    for word in args.operands:
        if word not in there:
            known = ", ".join(there[:8]) or "none"
            raise TargetError(word, "not recorded", f"name one of those: {known}")


def _choose(report: WhatisReport, args: argparse.Namespace) -> WhatisReport:
    """Return the recorded answers for the named addresses, in their order."""
    answers = {answer.asked: answer for answer in report.answers}
    return replace(report, answers=tuple(answers[word] for word in args.operands))


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import commands, memory

    return (*commands.ADDRESSES_CHECKS, *memory.CHECKS)


COMMAND = Command(
    name="whatis",
    summary="show what lies at an address: symbol, task, stack, object, page, owner",
    arguments=(
        argument(
            "--waits",
            action="store_true",
            help="look for locks in the objects found, in the waits of all tasks",
        ),
    ),
    operands=Operands(name="ADDRESS", describes=_describes),
    examples=(
        ("ffff888003b4e0c0", "what lies there"),
        ("phys:3b4e0c0 pfn:15182", "physical memory, by address and by page"),
        ("4711:7f0012345678", "an address in the memory of a process"),
        ("init_task+8 schedule+4c/f0", "symbols with offsets, as in an oops"),
    ),
    start=_start,
    blocks=_blocks,
    complaint=_complaint,
    excluded=(Excluded("--diff", ("--waits",), "reads no kernel"),),
    checks=_checks,
    compared=(
        DiffRows(name="answers", by=("asked",), facts=("kind", "text", "readable")),
    ),
    recorded=Recorded(
        model=_model,
        choose=_choose,
        require=_require,
        lacks=lambda args: {"--waits": args.waits},
    ),
)
