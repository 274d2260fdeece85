# SPDX-License-Identifier: LGPL-2.1-or-later

"""A plan to set CPUs apart: commands to copy, between comments of a shell."""

from collections.abc import Iterable, Iterator
from typing import TypeGuard

from msatools.cpus.plan_model import CpuPlan, PlanRest
from msatools.kernel.ranges import ranges
from msatools.render.blocks import Block, Cell, Span, Text, text, verbatim

_SHOWN = 8


def plan_lines(plan: CpuPlan) -> Iterator[Block]:
    """Yield the lines of a plan, of which all but the commands begin with ``#``.

    None goes on in a further line, which would be no comment.
    """
    apart, others = ranges(plan.cpus), ranges(plan.others)
    head = f"# To set CPU {apart} apart, and leave {others} for all else; not run here"
    yield _whole(Span(head, "title"))
    for step in plan.steps:
        yield text()
        yield _whole(f"# {step.name}: {step.text}")
        for command in step.commands:
            yield verbatim(f"# {command}" if step.name == "boot" else command)
    yield text()
    yield _whole(Span(f"# What stays on {apart} all the same:", "title"))
    for rest in plan.stays:
        yield _whole(f"# - {rest.text}{_numbers(rest)}")


def comments(lines: Iterable[Block]) -> Iterator[Block]:
    """Yield the lines of a report around a plan, so that a shell passes over them."""
    for each in lines:
        yield _whole("# ", *each.spans) if _has_text(each) else each


def _whole(*spans: Cell) -> Text:
    return Text(spans, narrow="keep")


def _has_text(block: Block) -> TypeGuard[Text]:
    return isinstance(block, Text) and bool(block.spans)


def _numbers(rest: PlanRest) -> str:
    """Return which interrupts or tasks stay."""
    if rest.irqs:
        return f" (irq {ranges(rest.irqs, _SHOWN)})"
    if rest.pids:
        return f" (pid {ranges(rest.pids, _SHOWN)})"
    return ""
